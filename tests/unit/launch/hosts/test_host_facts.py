"""What hosts tell about themselves, judged: each problem named with its hosts and what to do; no
false alarms."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from drillyard.hardware import catalog
from drillyard.launch.agent.job import Job
from drillyard.launch.hosts.host_facts import HostAnswer, judge, not_shared
from drillyard.programs import Host, Result
from drillyard.version import __version__

JOB = Job("r", "c", "ssh", 1, 8, "/s/r", "/s/r/launch", [], port=21000)
MACHINE = catalog().machines["a3-megagpu-8g"]
H100 = ["NVIDIA H100 80GB HBM3"] * 8


def facts(**changes: Any) -> dict[str, Any]:
    """A host where all is well."""
    well: dict[str, Any] = {
        "clock": 1000.2,
        "clock_at_end": 1000.4,
        "user": 1001,
        "gpus": 8,
        "gpu_models": H100,
        "directory": {"path": "/s", "error": None, "free_bytes": 1 << 40, "seen": None},
        "ports_free": [21001],
        "drillyard": {
            "python": "/p/bin/python",
            "version": f"drillyard {__version__}",
            "error": None,
        },
        "agents": [],
        "runs": [],
    }
    return well | changes


def answer(host: str, **changes: Any) -> HostAnswer:
    """What a host said between 1000 and 1001 on this machine's clock."""
    return HostAnswer(
        host,
        Result(("ssh",), 0, json.dumps(facts(**changes)) + "\n", ""),
        "",
        1000.0,
        1001.0,
    )


def judged_of(answers: list[HostAnswer]) -> list[str]:
    return judge(answers, JOB, machine=MACHINE)


def judged(*changes: dict[str, Any]) -> list[str]:
    """The problems of hosts a, b, c, ..."""
    return judged_of(
        [answer(host, **each) for host, each in zip("abcdefgh", changes, strict=False)]
    )


def test_hosts_that_are_well_have_no_problem() -> None:
    assert judged({}, {}, {}) == []


def test_a_host_that_ssh_cannot_reach_is_reported_in_sshs_own_words() -> None:
    said = "Warning: ...\nssh: connect to host b port 22: Connection refused\n"
    argv = Host("b", user="me", config_file="/etc/ssh/lab").argv(["uname"])
    (problem,) = judged_of([answer("a"), HostAnswer("b", Result(argv, 255, "", said))])
    assert problem.startswith("b: ") and said.splitlines()[1] in problem
    # What is to be typed reaches the host as the launch does.
    assert "ssh -F /etc/ssh/lab -l me b true" in problem


def test_a_host_that_does_not_answer_or_has_no_python_is_reported() -> None:
    lost = HostAnswer("a", None, "no answer after 180 s")
    bare = HostAnswer("b", Result(("ssh", "b"), 127, "", "sh: 1: python3: not found\n"))
    message = judged_of([lost, bare])
    assert message[0] == "a: no answer after 180 s"
    assert message[1].startswith("b: has no python3 on its PATH")


def test_hosts_with_the_same_problem_share_its_line() -> None:
    missing = {"drillyard": {"python": "/p/bin/python", "version": None, "error": "No such file"}}
    (message,) = judged(*[missing] * 6)
    assert message.startswith(
        "a, b, c, d and 2 more: /p/bin/python cannot run drillyard: No such file; install"
        f" drillyard {__version__}"
    )


def test_every_problem_of_every_host_is_reported() -> None:
    message = judged(
        {"ports_free": []},
        {"drillyard": {"python": "/p", "version": "drillyard 1.1.9", "error": None}},
        {"gpus": 7, "gpu_models": H100[:7]},
        {"directory": {"path": "/s", "error": "/s: Read-only file system"}},
    )
    assert [line[:2] for line in message] == ["a:", "b:", "c:", "d:", "c:"]
    assert "ports 21000 to 21015" in message[0] and "ss -ltnp" in message[0]
    assert f"/p has drillyard 1.1.9, and this machine launches with {__version__}" in message[1]
    assert "7 GPUs, and machine a3-megagpu-8g has 8" in message[2]
    assert "/s: cannot be written: /s: Read-only file system" in message[3]
    assert "GPUs: 7 x NVIDIA H100 80GB HBM3, where a has 8 x" in message[4]


def test_gpus_without_a_working_driver_and_other_models_are_reported() -> None:
    assert "nvidia-smi fails" in judged({"gpu_models": None}, {"gpu_models": None})[0]
    (message,) = judged({}, {"gpu_models": ["NVIDIA A100"] * 8}, {})
    assert message.startswith("b: GPUs: 8 x NVIDIA A100, where a has 8 x NVIDIA H100 80GB HBM3")


def test_a_full_disk_is_reported() -> None:
    (message,) = judged({"directory": {"path": "/s", "error": None, "free_bytes": 5 << 20}})
    assert message == "a: /s: only 5 MiB are free, and checkpoints need more: make room"


def test_agents_of_the_run_and_other_runs_with_the_gpus_are_reported() -> None:
    other = {"run": "other", "cluster": "c", "launch_directory": "/s/other/launch"}
    own = {"run": "r", "cluster": "c", "launch_directory": "/s/r/launch"}
    message = judged({"agents": [{"node": 0}], "runs": [own]}, {"runs": [other]})
    assert message[0].startswith("a: r is still running there: drillyard runs cancel r")
    assert message[1].startswith("b: run other of cluster c is active there and has the GPUs")
    assert judge([answer("a", gpus=0, gpu_models=None, runs=[other])], JOB) == []


def test_images_and_users_must_be_the_same() -> None:
    image = {"runtime": "docker", "id": "sha256:1", "error": None}
    message = judged(
        {"image": image},
        {"image": image | {"id": "sha256:2"}},
        {"image": image | {"id": None}, "user": 7},
    )
    assert message[0].startswith("b: image: sha256:2, where a has sha256:1; pull the same on all")
    assert message[1].startswith("c: user id: 7, where a has 1001")
    (reported_of_a,) = judged(
        {"image": image | {"error": "neither docker nor podman is installed"}}
    )
    assert "neither docker nor podman" in reported_of_a


def test_a_clock_that_is_off_is_reported_with_its_way() -> None:
    (ahead,) = judged({}, {"clock": 1005.2, "clock_at_end": 1005.4}, {})
    assert ahead.startswith("b: its clock is 4.2 s or more ahead of most others")
    (behind,) = judged({}, {}, {"clock": 990.2, "clock_at_end": 990.4})
    assert behind.startswith("c: its clock is 9.2 s or more behind most others")


def test_this_machines_own_clock_does_not_matter() -> None:
    off = {"clock": 5000.2, "clock_at_end": 5000.4}
    assert judged(off, off, off) == []


@given(
    offsets=st.lists(st.floats(-0.9, 0.9), min_size=2, max_size=6),
    waits=st.lists(
        st.tuples(st.floats(0, 30), st.floats(0, 30), st.floats(0, 30)), min_size=6, max_size=6
    ),
    here=st.floats(-1e4, 1e4),
)
def test_clocks_within_two_seconds_are_never_accused_however_slow_the_connections(
    offsets: list[float], waits: list[tuple[float, float, float]], here: float
) -> None:
    answers = []
    for host, offset, (before, amid, after) in zip("abcdef", offsets, waits, strict=False):
        message = facts(clock=2e4 + before + offset, clock_at_end=2e4 + before + amid + offset)
        result = Result(("ssh",), 0, json.dumps(message), "")
        answers.append(HostAnswer(host, result, "", 2e4 + here, 2e4 + before + amid + after + here))
    assert judged_of(answers) == []


@given(off=st.floats(2.01, 1e6), waits=st.tuples(st.floats(0, 5), st.floats(0, 5)))
def test_a_clock_that_is_further_off_than_the_round_trip_can_hide_is_always_reported(
    off: float, waits: tuple[float, float]
) -> None:
    before, after = waits
    shift = off + 2 * (before + after)
    far = {"clock": 1000 + before + shift, "clock_at_end": 1000 + before + shift}
    result = Result(("ssh",), 0, json.dumps(facts(**far)), "")
    late = HostAnswer("c", result, "", 1000.0, 1000.0 + before + after)
    prompt = [
        HostAnswer(
            host,
            Result(("ssh",), 0, json.dumps(facts(clock=1000.0, clock_at_end=1000.0)), ""),
            "",
            1000.0,
            1000.0,
        )
        for host in "ab"
    ]
    assert any(line.startswith("c: its clock is") for line in judged_of([*prompt, late]))


def test_hosts_that_do_not_share_the_directory_are_named() -> None:
    assert not_shared([answer("b", directory={"seen": True})], "/s", "a") == []
    unseen = [answer(host, directory={"seen": False}) for host in "bc"]
    (message,) = not_shared(unseen, "/s", "a")
    assert message.startswith(
        "b, c: /s is not the directory that a sees under that path: put `output` or"
        " storage.directory"
    )
