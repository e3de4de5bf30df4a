"""secrets.json goes when the run is over, however it ends, and comes back when the run is resumed.

On this machine in tests/integration/launch/test_user.py, from a bucket in
tests/integration/launch/test_vertex.py.
"""

from __future__ import annotations

import io
import json
import tarfile
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.unit.launch.requests import WORKLOAD, cluster, request
from tests.unit.launch.slurm.test_job_script_run import Play

from drillyard.launch import run_changes
from drillyard.launch.agent.host_cleanup import stop
from drillyard.launch.agent.state_file import StateFile
from drillyard.launch.launcher import launcher_for
from drillyard.programs import Programs, Result


@pytest.fixture
def secrets(tmp_path: Path) -> Path:
    path = tmp_path / "secrets.json"
    path.write_text('{"TOKEN": "planted"}')
    return path


@pytest.mark.parametrize("state", ["succeeded", "failed", "cancelled"])
def test_the_leader_removes_it_with_the_last_state_and_not_before(
    secrets: Path, state: str
) -> None:
    file = StateFile(secrets.parent, {})
    for goes_on in ("starting", "running", "restarting"):
        file.enter(goes_on)
        assert secrets.exists()

    file.enter(state)

    assert not secrets.exists()


def test_a_leader_that_another_start_has_replaced_leaves_it(secrets: Path) -> None:
    StateFile(secrets.parent, {}, superseded=lambda: True).enter("failed")

    assert secrets.exists()


@pytest.mark.parametrize("mark_only", [False, True])
def test_cancelling_removes_it_also_where_no_agent_was_started(
    secrets: Path, capsys: pytest.CaptureFixture[str], mark_only: bool
) -> None:
    stop(
        Namespace(
            launch_directory=str(secrets.parent),
            job=None,
            keep_state=False,
            submission=None,
            mark_only=mark_only,
            grace_seconds=0.0,
        )
    )

    assert not secrets.exists()


@pytest.mark.parametrize(
    ("code", "stays"), [(0, False), (1, False), (2, False), (130, False), (85, True), (75, True)]
)
def test_slurms_job_removes_it_unless_it_is_queued_again(
    tmp_path: Path, code: int, stays: bool
) -> None:
    play = Play(tmp_path, f"exit {code}")
    (play.launch / "secrets.json").write_text("{}")
    play.state(code)

    play.run()

    assert (play.launch / "secrets.json").exists() == stays


def test_slurms_resume_sends_it_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = tmp_path / "runs" / "nccl" / "launch"
    launch.mkdir(parents=True)
    (launch / "run.yaml").write_text(
        "name: nccl\nworkload: {environment: {A: '${env:MY_TOKEN}'}}\n"
    )
    (launch / "state.json").write_text(
        json.dumps({"submission": "12", "state": "failed", "exit_code": 1})
    )
    monkeypatch.setenv("MY_TOKEN", "planted")
    sent: list[bytes] = []
    entry = {
        "run": "nccl",
        "cluster": "c",
        "platform": "slurm",
        "launch_directory": str(launch),
        "job_id": "12",
    }
    seen = {
        "entry": entry,
        "state": {"state": "failed", "submission": "12", "nodes": 2},
        "agent": "gone",
    }

    class Head(Programs):
        def run(
            self, argv: Sequence[str], *, stdin: bytes = b"", timeout: float | None = None
        ) -> Result:
            if "submit" in argv:
                sent.append(stdin)
            said = (
                json.dumps([{**seen, "problem": None, "cancelled": False}])
                if "list" in argv
                else ""
            )
            return Result(
                tuple(argv), 0, said if "list" in argv else "13\n" if "submit" in argv else "", ""
            )

    launcher = launcher_for(request(cluster("slurm"), WORKLOAD).cluster, Head())
    run_changes.resume(launcher, "nccl")

    with tarfile.open(fileobj=io.BytesIO(sent[0])) as archive:
        message = archive.extractfile("secrets.json")
        assert message is not None
        assert json.loads(message.read()) == {"MY_TOKEN": "planted"}
        assert archive.getmember("secrets.json").mode == 0o600
