"""Submitting to hosts: what is sent and what is not, what a failure in each stage leads to, and
Ctrl-C in its midst."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shlex
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.unit.launch.hosts.test_host_facts import facts
from tests.unit.launch.requests import WORKLOAD, request

from drillyard.errors import UserError
from drillyard.launch import launcher as launcher_module
from drillyard.launch import run_changes
from drillyard.launch.agent.job import Job
from drillyard.launch.agent.submit import TAKEN
from drillyard.launch.hosts.host_agents import MOST_AT_ONCE, ask_all
from drillyard.launch.hosts.launcher import HostsLauncher, run_status
from drillyard.launch.launcher import Launcher, launcher_for
from drillyard.launch.plan import Plan
from drillyard.launch.run_status import Handle
from drillyard.programs import Programs, Result, defer_interrupt
from drillyard.version import __version__

CLUSTER = """
name: many
platform: ssh
nodes: {nodes}
processes_per_node: 1
ssh: {{hosts: [{hosts}], directory: /p}}
"""


@dataclass
class Hosts(Programs):
    """Hosts that answer as a test says: `says` has (words of the command, host) -> Result."""

    says: dict[tuple[str, str], Result] = field(default_factory=dict)
    known: list[dict[str, Any]] = field(default_factory=list)
    calls: list[tuple[str, str, bytes]] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)
    answers: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    """Further facts of a check, by verb and host."""

    def run(
        self, argv: Sequence[str], *, stdin: bytes = b"", timeout: float | None = None
    ) -> Result:
        assert argv[0] == "ssh"
        host, command = argv[-2], argv[-1]
        verbs = (
            'agent" unlock',
            'agent" place',
            "list",
            "forget",
            " stop ",
            'agent" start',
            "--nonce",
            "check",
            "rm -f -- ",
        )
        verb = next(
            verb for verb in verbs if verb in command and (verb != "list" or "--cluster" in command)
        )
        self.calls.append((verb.strip(), host, stdin))
        self.commands.append(command)
        message = self.says.get((verb.strip(), host))
        if message is not None:
            return message
        if verb == "list":
            return Result(tuple(argv), 0, json.dumps(self.known), "")
        answer: dict[str, Any] = facts(gpus=0, gpu_models=None, drillyard=None)
        if verb == "--nonce":
            answer["directory"] = {"seen": True}
        answer |= self.answers.get((verb.strip(), host), {})
        return Result(tuple(argv), 0, json.dumps(answer), "")

    def stream(self, argv: Sequence[str]) -> subprocess.Popen[bytes]:
        """The files of a host are those of this machine."""
        return super().stream(shlex.split(argv[-1])[5:])

    def verbs(self) -> list[str]:
        """What was asked, in order, the same of several hosts once."""
        return list(dict.fromkeys(verb for verb, _, _ in self.calls))


def made(hosts: Hosts, nodes: int = 2, run: str = WORKLOAD) -> tuple[Launcher[Any], Plan]:
    names = ", ".join(f"n{node}" for node in range(nodes))
    asked = request(CLUSTER.format(nodes=nodes, hosts=names), run)
    launcher = launcher_for(asked.cluster, hosts)
    return launcher, launcher.plan(asked)


def failed(words: str, code: int = 1) -> Result:
    return Result(("ssh",), code, "", words)


STARTED = ['agent" place', 'agent" start', 'agent" unlock']


def test_stages_follow_one_another_and_every_host_gets_its_agent() -> None:
    hosts = Hosts()
    launcher, plan = made(hosts, 3)
    assert str(run_changes.submit(launcher, plan)) == "ssh://many/nccl"
    assert hosts.verbs() == ["list", "check", "--nonce", "rm -f --", *STARTED]
    assert [host for verb, host, _ in hosts.calls if verb == 'agent" start'] == ["n0", "n1", "n2"]


def test_the_secret_and_values_of_the_environment_go_to_the_launch_directory_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TOKEN", "hush-hush")
    hosts = Hosts()
    run = WORKLOAD.replace("workload: {", "workload: {environment: {TOKEN: '${env:TOKEN}'}, ")
    launcher, plan = made(hosts, run=run)
    run_changes.submit(launcher, plan)
    sent = {verb: stdin for verb, _, stdin in hosts.calls}
    with tarfile.open(fileobj=io.BytesIO(sent['agent" place'])) as tar:
        members = {member.name: member for member in tar.getmembers()}
        message = tar.extractfile("secrets.json")
        assert message is not None and json.loads(message.read()) == {"TOKEN": "hush-hush"}
    assert members["secret"].mode == members["secrets.json"].mode == 0o600
    assert not any(
        b"hush-hush" in stdin for verb, _, stdin in hosts.calls if verb != 'agent" place'
    )
    assert "hush-hush" not in repr(plan)


def test_a_variable_that_is_not_set_is_reported_before_anything_is_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TOKEN", raising=False)
    hosts = Hosts()
    launcher, plan = made(
        hosts, run=WORKLOAD.replace("workload: {", "workload: {environment: {A: '${env:TOKEN}'}, ")
    )
    with pytest.raises(UserError, match=r"env:TOKEN.*nothing was sent: export TOKEN="):
        run_changes.submit(launcher, plan)
    assert hosts.calls == []


def test_where_one_host_is_not_well_nothing_is_written_and_the_mark_is_removed() -> None:
    hosts = Hosts(says={("check", "n1"): failed("ssh: connect to host n1: No route to host", 255)})
    launcher, plan = made(hosts)
    with pytest.raises(
        UserError, match=r"nothing was started; 2 hosts were checked:\n  n1: cannot be reached"
    ):
        run_changes.submit(launcher, plan)
    assert hosts.verbs() == ["list", "check", "rm -f --"]


def test_a_host_that_does_not_see_the_mark_stops_the_launch() -> None:
    blind = Result(("ssh",), 0, json.dumps({"directory": {"seen": False}}), "")
    hosts = Hosts(says={("--nonce", "n1"): blind})
    launcher, plan = made(hosts)
    with pytest.raises(UserError, match="n1: /p/runs is not the directory that n0 sees"):
        run_changes.submit(launcher, plan)
    assert hosts.verbs() == ["list", "check", "--nonce", "rm -f --"]


def test_an_agent_that_does_not_start_takes_the_others_with_it_and_the_run_is_not_known() -> None:
    hosts = Hosts(says={('agent" start', "n1"): failed("error: no space left")})
    launcher, plan = made(hosts)
    with pytest.raises(
        UserError, match=r"could not be started, and what was is stopped:\n  n1: .*no space left"
    ):
        run_changes.submit(launcher, plan)
    assert sorted(host for verb, host, _ in hosts.calls if verb == "stop") == ["n0", "n1"]
    assert hosts.verbs()[-2:] == ["forget", 'agent" unlock']


def test_a_launch_that_another_one_has_locked_out_writes_nothing_and_stops_nothing() -> None:
    hosts = Hosts(says={('agent" place', "n0"): failed("submission 0123, 4 s ago", TAKEN)})
    launcher, plan = made(hosts)
    with pytest.raises(
        UserError, match=r"being launched by another .*0123, 4 s ago.*; nothing was submitted"
    ):
        run_changes.submit(launcher, plan)
    assert hosts.verbs() == [
        "list",
        "check",
        "--nonce",
        "rm -f --",
        'agent" place',
        'agent" unlock',
    ]


def test_that_the_head_host_has_no_locks_is_reported_and_the_launch_goes_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    unlocked = Result(("ssh",), 0, "", "Welcome!\ndrillyard: no lock on /p/claim: so and so\n")
    hosts = Hosts(says={('agent" place', "n0"): unlocked})
    launcher, plan = made(hosts)
    run_changes.submit(launcher, plan)
    assert hosts.verbs()[-3:] == STARTED
    assert capsys.readouterr().err == "drillyard: no lock on /p/claim: so and so\n"


@pytest.mark.parametrize(
    ("verb", "said"),
    [
        ('agent" place', failed("submission 0123, running there", TAKEN)),
        (
            'agent" start',
            Result(("ssh",), 0, json.dumps({"submission": "0123", "already": True}), ""),
        ),
        (
            'agent" start',
            failed(
                "error: node 0 of nccl runs here already (submission 0123, process 9): stop it", 2
            ),
        ),
    ],
)
@pytest.mark.parametrize("host", ["n0", "n1"])
def test_agents_of_another_submission_are_reported_and_left_alone(
    host: str, verb: str, said: Result
) -> None:
    if verb == 'agent" place' and host != "n0":
        return  # Only the head host has the launch directory's lock.
    hosts = Hosts(says={(verb, host): said})
    launcher, plan = made(hosts)
    with pytest.raises(UserError, match=r"being launched by another .*0123.*nothing was submitted"):
        run_changes.submit(launcher, plan)
    assert hosts.verbs()[-1] == 'agent" unlock'
    stopped = [each for each_verb, each, _ in hosts.calls if each_verb == "stop"]
    assert stopped == ([] if verb == 'agent" place' else [{"n0": "n1", "n1": "n0"}[host]])
    # What is undone is this submission's: the one of the secret that was sent.
    undone = [
        command
        for (each_verb, _, _), command in zip(hosts.calls, hosts.commands, strict=True)
        if each_verb in ("stop", "forget")
    ]
    secret = sent_secret(hosts)
    own = hashlib.sha256(secret).hexdigest()[:16]
    assert all(shlex.split(command)[-1].split()[-1] == own for command in undone)
    assert len(undone) == (0 if verb == 'agent" place' else 2)


def sent_secret(hosts: Hosts) -> bytes:
    """The secret in the archive that the head host got."""
    archives = [stdin for verb, _, stdin in hosts.calls if verb == 'agent" place']
    with tarfile.open(fileobj=io.BytesIO(archives[0])) as tar:
        secret = tar.extractfile("secret")
        assert secret is not None
        return secret.read()


def known(state: dict[str, Any] | None, **more: Any) -> list[dict[str, Any]]:
    entry = {
        "run": "nccl",
        "platform": "ssh",
        "launch_directory": "/p/runs/nccl/launch",
        "nodes": 2,
        "submitted_at": 5.0,
    }
    return [{"entry": entry, "state": state, "agent": "alive", "problem": None, **more}]


RUNNING = {
    "state": "running",
    "nodes": 2,
    "hosts": ["n0", "n1"],
    "round": 1,
    "failures": 1,
    "since": 9.0,
}


def test_a_run_that_goes_on_is_not_started_twice() -> None:
    hosts = Hosts(known=known(RUNNING))
    launcher, plan = made(hosts)
    with pytest.raises(UserError, match=r"is running already, and nothing was submitted"):
        run_changes.submit(launcher, plan)
    assert hosts.verbs() == ["list"]


def test_replace_stops_it_on_all_hosts_first() -> None:
    hosts = Hosts(known=known(RUNNING))
    launcher, plan = made(hosts)
    run_changes.submit(launcher, plan, replace=True)
    assert hosts.verbs()[:3] == ["list", "stop", "check"]


@pytest.mark.parametrize(("ended_at", "ends"), [(None, True), (10.0, False)])
def test_agents_that_wait_for_a_dead_leader_are_ended_before_the_run_is_started_again(
    ended_at: float | None, ends: bool
) -> None:
    hosts = Hosts(
        known=known(
            RUNNING | {"state": "failed", "reason": "agent gone", "ended_at": ended_at},
            agent="gone",
        )
    )
    launcher, plan = made(hosts)
    run_changes.submit(launcher, plan)
    assert hosts.verbs()[:3] == (
        ["list", "stop", "check"] if ends else ["list", "check", "--nonce"]
    )
    # The run failed; ending what is left of it does not make it a cancelled one.
    assert all("--keep-state" in command for command in hosts.commands if " stop " in command)


def test_resume_ends_the_agents_that_wait_for_a_dead_leader(tmp_path: Path) -> None:
    hosts = Hosts(
        known=known(
            RUNNING | {"state": "failed", "reason": "agent gone", "ended_at": None}, agent="gone"
        )
    )
    launch = tmp_path / "runs" / "nccl" / "launch"
    hosts.known[0]["entry"]["launch_directory"] = str(launch)
    launcher, plan = made(hosts)
    launch.mkdir(parents=True)
    for name in ("job.json", "run.yaml", "cluster.yaml"):
        (launch / name).write_text(plan.file(name).content)
    assert str(run_changes.resume(launcher, "nccl")) == "ssh://many/nccl"
    assert hosts.verbs()[:3] == ["list", "stop", "check"]
    assert sorted(host for verb, host, _ in hosts.calls if verb == "stop") == ["n0", "n1"]


def test_a_run_whose_job_is_damaged_is_not_resumed_but_named(tmp_path: Path) -> None:
    hosts = Hosts(known=known(RUNNING | {"state": "failed"}, agent="gone"))
    launch = tmp_path / "runs" / "nccl" / "launch"
    hosts.known[0]["entry"]["launch_directory"] = str(launch)
    launcher, plan = made(hosts)
    launch.mkdir(parents=True)
    for name in ("job.json", "run.yaml", "cluster.yaml"):
        (launch / name).write_text("[]" if name == "job.json" else plan.file(name).content)
    with pytest.raises(UserError, match=r"job\.json: not a job; launch the run config again"):
        run_changes.resume(launcher, "nccl")


def test_cancel_says_which_hosts_it_could_not_reach_and_stops_the_others() -> None:
    hosts = Hosts(
        known=known(RUNNING),
        says={("stop", "n1"): failed("ssh: connect to host n1: timed out", 255)},
    )
    launcher, _ = made(hosts)
    with pytest.raises(UserError, match=r"is stopped on 1 of 2 hosts;\nn1: cannot be reached"):
        run_changes.cancel(launcher, "nccl")
    assert sorted(host for verb, host, _ in hosts.calls if verb == "stop") == ["n0", "n1"]


def test_cancel_of_a_run_that_is_over_does_nothing() -> None:
    hosts = Hosts(known=known(RUNNING | {"state": "succeeded"}))
    launcher, _ = made(hosts)
    done = run_changes.cancel(launcher, "nccl")
    assert (done.status.state, done.before) == ("succeeded", "succeeded")
    assert hosts.verbs() == ["list"]


def test_cancel_waits_as_long_as_the_job_may_take_to_save(tmp_path: Path) -> None:
    job = Job(
        "nccl",
        "many",
        "ssh",
        2,
        1,
        str(tmp_path),
        str(tmp_path / "launch"),
        ["true"],
        stop_seconds=200.0,
    )
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch" / "job.json").write_text(job.as_json())
    hosts = Hosts(known=known(RUNNING))
    hosts.known[0]["entry"]["launch_directory"] = str(tmp_path / "launch")
    launcher, _ = made(hosts)
    assert run_changes.cancel(launcher, "nccl").before is None
    stops = [command for command in hosts.commands if " stop " in command]
    assert len(stops) == 2
    assert all(
        200 < float(shlex.split(command)[-1]) < 230 and '--patience "$2"' in command
        for command in stops
    )


def test_who_waits_for_a_run_to_end_is_reported_for_how_long(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = threading.Event()
    message = []
    monkeypatch.setattr(
        launcher_module, "print_notice", lambda text: (message.append(text), said.set())
    )
    with launcher_module.cancel_notice(Handle("ssh", "c", "quick"), 120.0):
        pass
    monkeypatch.setattr(launcher_module, "_QUIET_SECONDS", 0.0)
    with launcher_module.cancel_notice(Handle("ssh", "c", "slow"), 120.0):
        assert said.wait(60)
    assert message == [
        "ssh://c/slow: is stopping and has 120 s to save; cancel it again to kill it at once"
    ]


def test_cancel_of_a_run_of_which_nothing_was_started_takes_it_off_the_index() -> None:
    hosts = Hosts(known=known(None, agent="none"))
    launcher, _ = made(hosts)
    assert run_changes.cancel(launcher, "nccl").status.state == "cancelled"
    assert hosts.verbs() == ["list", "stop", "forget"]
    hosts.says["forget", "n0"] = Result(("ssh",), 0, "Welcome!\n", "")
    assert run_changes.cancel(launcher, "nccl").status.state == "cancelled"


def test_what_a_login_says_of_its_own_does_not_matter() -> None:
    noisy = Result(("ssh",), 0, f"{json.dumps(known(RUNNING))}\n", "")
    launcher, _ = made(Hosts(says={("list", "n0"): noisy}))
    assert launcher.status("nccl").state == "running"


def test_a_run_that_is_not_known_is_reported_with_those_that_are() -> None:
    launcher, _ = made(Hosts(known=known(RUNNING)))
    with pytest.raises(UserError, match=r"there is no run 'other' on n0; there are: nccl"):
        launcher.status("other")


def test_what_the_agents_reported_becomes_a_status() -> None:
    launcher, _ = made(Hosts(known=known(RUNNING)))
    (status,) = launcher.runs()
    assert (status.state, status.nodes, status.hosts, status.attempt, status.failures) == (
        "running",
        2,
        ("n0", "n1"),
        1,
        1,
    )
    assert (status.submitted_at, status.since) == (5.0, 9.0)
    failure = {
        "reason": "exit code 1",
        "rank": 3,
        "node": "node 1 (n1)",
        "exit_code": 1,
        "lines": ["boom"],
        "more": 1,
    }
    (seen,) = known(RUNNING | {"state": "failed", "failure": failure})
    message = run_status(status.handle, seen).failure
    assert message is not None and (message.rank, message.lines) == (3, ("boom",))


def test_a_run_whose_agents_have_reported_nothing_is_starting_and_one_whose_directory_is_gone_failed() -> (  # noqa: E501
    None
):
    launcher, _ = made(Hosts(known=known(None)))
    assert launcher.status("nccl").state == "starting"
    gone = known(None, agent="none", problem="/p/runs/nccl/launch is not there")
    launcher, _ = made(Hosts(known=gone))
    assert launcher.status("nccl").state == "failed"
    assert launcher.status("nccl").reason == "/p/runs/nccl/launch is not there"


class Slow(Programs):
    """Programs that take a while and count how many run at the same time."""

    def __init__(self) -> None:
        self.now = self.most = 0
        self._lock = threading.Lock()

    def run(
        self, argv: Sequence[str], *, stdin: bytes = b"", timeout: float | None = None
    ) -> Result:
        with self._lock:
            self.now += 1
            self.most = max(self.most, self.now)
        time.sleep(0.02)
        with self._lock:
            self.now -= 1
        return Result(tuple(argv), 0, argv[-1], "")


def test_hundreds_of_hosts_are_asked_at_the_same_time_within_a_bound_and_answer_in_order() -> None:
    names = [f"n{number}" for number in range(300)]
    programs = Slow()
    answers = ask_all(names, [["true", name] for name in names], programs, seconds=1)
    assert [answer.result.stdout for answer in answers if answer.result] == names
    assert 1 < programs.most <= MOST_AT_ONCE


def test_ctrl_c_waits_until_the_run_is_whole(capsys: pytest.CaptureFixture[str]) -> None:
    with defer_interrupt("ssh://c/r"):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)
    assert (
        "ssh://c/r is submitted already; drillyard runs cancel ssh://c/r" in capsys.readouterr().err
    )


def test_ctrl_c_amid_a_failure_leaves_the_failure_to_be_reported() -> None:
    with pytest.raises(UserError, match="it failed"), defer_interrupt("ssh://c/r"):
        os.kill(os.getpid(), signal.SIGINT)
        raise UserError("it failed")


def test_programs_that_are_started_meanwhile_do_not_hear_ctrl_c() -> None:
    message = "import signal; print(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []))"
    with defer_interrupt("ssh://c/r"):
        (answer,) = ask_all(["here"], [[sys.executable, "-c", message]], Programs(), seconds=60)
    assert answer.result is not None and answer.result.stdout == "True\n"


def test_versions_are_this_packages() -> None:
    drillyard = {"python": "/p", "version": "drillyard 1.2.0", "error": None}
    hosts = Hosts(
        says={
            ("check", "n0"): Result(("ssh",), 0, json.dumps(facts(gpus=0, drillyard=drillyard)), "")
        }
    )
    launcher, plan = made(hosts)
    with pytest.raises(
        UserError, match=f"has drillyard 1.2.0, and this machine launches with {__version__}"
    ):
        run_changes.submit(launcher, plan)
    assert isinstance(launcher, HostsLauncher)
