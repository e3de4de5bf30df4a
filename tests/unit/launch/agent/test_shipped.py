"""The agent as it travels: plain files for the Python of any node."""

from __future__ import annotations

import ast
import errno
import json
import os
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from drillyard.launch.agent import index, job, scheduler_env
from drillyard.launch.agent.job import Job, read_job
from drillyard.launch.agent.node_command import fill
from drillyard.launch.agent.state_file import record_cancelled, replace_file
from drillyard.launch.hosts.launcher import run_status
from drillyard.launch.prepared_run import agent_files
from drillyard.launch.run_status import Handle
from drillyard.supervise.process_identity import process_of, this_process

SHIPPED = {Path(file.path).name: file.content for file in agent_files()}
JOB = Job(
    run="tiny",
    cluster="here",
    platform="local",
    nodes=2,
    processes_per_node=1,
    run_directory="/r",
    launch_directory="/r/launch",
    command=["true"],
    port=20_000,
)


@pytest.mark.parametrize("name", sorted(SHIPPED))
def test_a_file_is_for_python_3_9_and_its_standard_library(name: str) -> None:
    tree = ast.parse(SHIPPED[name], feature_version=(3, 9))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            assert all(each.name.split(".")[0] in sys.stdlib_module_names for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            module = (node.module or "").split(".")[0]
            assert module in sys.stdlib_module_names
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert f"{node.module}.py" in SHIPPED
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            # Both came with Python 3.10.
            assert not (
                node.func.id == "zip" and any(each.arg == "strict" for each in node.keywords)
            )
            assert not (node.func.id == "isinstance" and isinstance(node.args[1], ast.BinOp))


def test_shared_modules_travel() -> None:
    assert {"reaper.py", "cause.py", "restart_policy.py", "__main__.py", "job.py"} <= set(SHIPPED)


def test_a_job_is_read_as_it_was_written(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text(JOB.as_json())
    assert read_job(tmp_path / "job.json") == JOB


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": 9}, "another version"),
        ({"nod": 1}, "unknown fields: nod"),
        ({"port": 0}, "first of 16 ports"),
        ({"nodes": "2"}, "nodes cannot be str"),
    ],
)
def test_a_job_that_cannot_be_followed_is_refused(
    tmp_path: Path, change: dict[str, object], words: str
) -> None:
    path = tmp_path / "job.json"
    path.write_text(json.dumps({**json.loads(JOB.as_json()), **change}))
    with pytest.raises(job.UsageError, match=words) as refused:
        job.load_job(str(path))
    assert str(refused.value).count(str(path)) == 1


@pytest.mark.parametrize(("rank", "leader"), [(None, "a"), (0, None), (2, "a")])
def test_a_node_must_know_its_place(
    monkeypatch: pytest.MonkeyPatch, rank: int | None, leader: str | None
) -> None:
    for name in ("SLURM_NODEID", "CLUSTER_SPEC"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(job.UsageError, match="node"):
        scheduler_env.locate_node(
            JOB, Namespace(node_rank=rank, leader=leader, submission=None, attempt="0")
        )


def test_only_the_placeholders_are_replaced() -> None:
    values = {"node_rank": "1", "master_port": "7"}
    assert fill("{node_rank} ${HOME} {x} {} {{master_port}}", values) == "1 ${HOME} {x} {} {7}"


def test_a_process_is_known_again() -> None:
    me = this_process()
    assert process_of(me.as_json()) == me and me.alive and me.here
    assert process_of({"pid": 1}) is None and process_of(None) is None


GONE = {**this_process().as_json(), "started": 1}
STATE = {
    "run": "tiny",
    "cluster": "here",
    "submission": "s",
    "state": "running",
    "reason": None,
    "exit_code": None,
}


def seen(
    directory: Path, *, entry: dict[str, str] | None = None, **fields: object
) -> dict[str, object]:
    state = {**STATE, "platform": "local", "agent": GONE, **fields}
    replace_file(directory / "state.json", json.dumps(state))
    looked = index.look({"launch_directory": str(directory), **(entry or {})})
    assert isinstance(looked["state"], dict)
    return {**looked, "state": looked["state"]["state"], "reason": looked["state"]["reason"]}


def test_a_run_whose_agent_is_gone_has_failed(tmp_path: Path) -> None:
    found = seen(tmp_path)
    assert (found["agent"], found["state"]) == ("gone", "failed")
    assert str(found["reason"]).startswith("agent gone")


def test_a_run_whose_agent_lives_or_is_elsewhere_is_reported_as_written(tmp_path: Path) -> None:
    assert seen(tmp_path, agent=this_process().as_json())["state"] == "running"
    far = seen(tmp_path, agent={**GONE, "machine": "another boot", "host": "far"})
    assert (far["agent"], far["state"]) == ("elsewhere", "running")


def test_a_leader_of_an_earlier_boot_of_this_host_is_gone(tmp_path: Path) -> None:
    assert seen(tmp_path, agent={**GONE, "machine": "another boot"})["agent"] == "gone"


def test_who_starts_a_run_again_after_85(tmp_path: Path) -> None:
    job = {"job_id": "7"}
    assert (
        seen(tmp_path, entry=job, state="restarting", exit_code=85, platform="slurm")["state"]
        == "restarting"
    )
    assert (
        seen(tmp_path, state="restarting", exit_code=85, reason="stopped by SIGTERM")["state"]
        == "failed"
    )


def test_a_cancelled_run_whose_agent_is_gone_did_not_fail(tmp_path: Path) -> None:
    record_cancelled(tmp_path, "s")
    assert seen(tmp_path)["state"] == "cancelled"


def read_only(**options: object) -> None:
    """NamedTemporaryFile of a read-only directory."""
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


def test_a_run_without_state_has_none(tmp_path: Path) -> None:
    assert index.look({"launch_directory": str(tmp_path)})["problem"] is None
    assert "is not there" in index.look({"launch_directory": str(tmp_path / "away")})["problem"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tempfile.NamedTemporaryFile", read_only)
        assert (
            "cannot be written to: Read-only"
            in index.look({"launch_directory": str(tmp_path)})["problem"]
        )
    for damaged in ("{", "[]", '{"state": "dancing"}'):
        (tmp_path / "state.json").write_text(damaged)
        assert index.look({"launch_directory": str(tmp_path)})["problem"].count("state.json") == 1


def test_a_run_whose_state_is_damaged_goes_on_while_its_agent_lives(tmp_path: Path) -> None:
    (tmp_path / "agents").mkdir()
    for process, state in ((this_process().as_json(), "running"), (GONE, "failed")):
        announced = {"node": 0, "agent": GONE, "keeper": process}
        (tmp_path / "agents" / "a.json").write_text(json.dumps(announced))
        (tmp_path / "state.json").write_text("{")
        found = {"entry": {}, **index.look({"launch_directory": str(tmp_path)})}
        status = run_status(Handle("local", "here", "tiny"), found)
        assert (status.state, "state.json" in str(status.reason)) == (state, True)


def test_files_of_a_run_that_are_damaged_do_not_hide_it(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text("[]")
    with pytest.raises(ValueError, match="not a job"):
        read_job(tmp_path / "job.json")
    (tmp_path / "epochs").mkdir()
    (tmp_path / "epochs" / "0001.node-0.alive").touch()
    (tmp_path / "agents").mkdir()
    announced = {"agent": this_process().as_json() | {"pid": 1e999}}
    (tmp_path / "agents" / "a.json").write_text(json.dumps(announced))
    (tmp_path / "agents" / "b.json").write_text(json.dumps({"agent": GONE}))
    assert seen(tmp_path, epoch=1)["agent"] == "gone"


def test_an_entry_stays_whole_when_its_run_cannot_be_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its job is found by it."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))

    def fail(*arguments: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(tmp_path / "launch"))

    entry = {
        "run": "r",
        "cluster": "here",
        "platform": "slurm",
        "job_id": "7",
        "launch_directory": f"{tmp_path}/launch",
    }
    index.write_entry(json.dumps(entry))
    monkeypatch.setattr(index, "read_state", fail)
    index.list_runs(Namespace(cluster="here"))
    (seen,) = json.loads(capsys.readouterr().out)
    assert seen["entry"].items() >= entry.items()
    assert (seen["state"], seen["problem"]) == (None, f"{tmp_path}/launch: Input/output error")


def test_a_forgotten_run_is_not_listed_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))

    def listed() -> list[str]:
        index.list_runs(Namespace(cluster="here"))
        return [each["entry"]["run"] for each in json.loads(capsys.readouterr().out)]

    for run in ("first", "second"):
        entry = {
            "run": run,
            "cluster": "here",
            "platform": "local",
            "launch_directory": str(tmp_path / run),
        }
        index.write_entry(json.dumps(entry))
    assert listed() == ["first", "second"]
    for _ in range(2):
        assert index.forget(Namespace(cluster="here", run="first", submission=None)) == 0
        assert listed() == ["second"]
    # A launch that failed takes its own entry off, and none that another has written since.
    index.write_entry(json.dumps(entry), "theirs")
    for submission, left in (("mine", ["second"]), ("theirs", [])):
        index.forget(Namespace(cluster="here", run="second", submission=submission))
        assert listed() == left
