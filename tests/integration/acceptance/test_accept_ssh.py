"""`drillyard accept` on two real sshd hosts of a network of their own: runs without a fault, faults
given from outside of the code, and a start that is refused."""

from __future__ import annotations

import json
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.acceptance.faults import BY_NAME, SPEEDS, judged
from tests.integration.acceptance.places import FORKING, Accepted, Place, ssh_place
from tests.integration.launch.sshd_hosts import SshHosts, hosts_on_a_network
from tests.integration.tiny_run import TIMEOUT_SECONDS

SEED = 1


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshHosts]:
    """h0 and h1."""
    with hosts_on_a_network(tmp_path_factory.mktemp("hosts")) as both:
        yield both


@pytest.fixture(scope="module")
def place(hosts: SshHosts, tmp_path_factory: pytest.TempPathFactory) -> Place:
    """A user of both."""
    return ssh_place(hosts, tmp_path_factory.mktemp("desk"), lines=FORKING)


@pytest.fixture(scope="module")
def first(place: Place) -> Accepted:
    """The run without a fault with which others are compared."""
    found = place.accept()
    (place.directory / "baseline.json").write_text(json.dumps(found.document))
    return found


def test_quick_runs_pass_without_a_fault(hosts: SshHosts, place: Place, first: Accepted) -> None:
    assert first.code == 0 and first.document["verdict"] == "pass", first.output
    again = place.accept("--baseline", place.directory / "baseline.json")
    # Other tests run beside this one, and half of the baseline's speed may be too much to ask:
    # benchmarks/acceptance_faults.py, on a quiet machine, demands a pass, and repeats it.
    assert set(again.failed) <= set(SPEEDS), again.output
    assert again.document["verdict"] == ("fail" if again.failed else "pass"), again.output
    assert hosts.nothing_left()


@pytest.mark.parametrize("name", ["a full /dev/shm", "a clock 2 s off"])
def test_a_fault_is_named_and_moves_with_the_node(
    hosts: SshHosts, name: str, tmp_path: Path
) -> None:
    fault, draw = BY_NAME[name], random.Random(f"{name} {SEED}")
    number = draw.randrange(2)
    turned = ssh_place(hosts, tmp_path / "turned", order=(1, 0), lines=FORKING)
    with fault.give(hosts, hosts.hosts[number], draw):
        # Without a baseline: half of its speed may be too much to ask beside other tests.
        found = turned.accept()
    assert judged(fault, hosts.names[number], found) == [], found.output


def test_a_start_on_a_bad_host_is_refused_and_the_host_named(hosts: SshHosts, place: Place) -> None:
    run = place.desk.write_run("trains", {"command": ["true"]})
    with BY_NAME["a full /dev/shm"].give(hosts, hosts.hosts[1], random.Random(0)):
        refused = place.desk.say("launch", run, "--accept", "quick", "--drain", "--max-share", "1")
    assert refused.returncode == 2 and "h1: " in refused.stderr, refused.stderr
    assert "nothing was submitted" in refused.stderr
    # --drain says what to do instead.
    assert "ssh.hosts" in refused.stderr
    listed = place.desk.say("runs", "list", "--cluster", "cluster.yaml", "--json").stdout
    assert [each["run"] for each in json.loads(listed)["runs"]] == ["accept-pair"]


def test_ctrl_c_leaves_nothing_running(hosts: SshHosts, place: Place) -> None:
    command = place.desk.start("accept", "cluster.yaml")
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not any("/files/acceptance run" in each for each in hosts.processes().values()):
        assert time.monotonic() < deadline and command.poll() is None
        time.sleep(0.1)
    command.send_signal(signal.SIGINT)
    command.communicate(timeout=TIMEOUT_SECONDS)
    assert command.returncode == 130
    assert hosts.nothing_left(), hosts.processes()
