"""A secret in an environment variable, used in the fields that take one, is nowhere in what three
kinds of ends leave.

Looked at are all files below the user's directory (run directories, caches, HOME, reports), what
each command said, and the command lines of all processes while a run goes on. `secrets.json` alone
may hold it, readable by its owner, while the run lives.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
from tests.integration.launch.desk import Desk
from tests.integration.tiny_run import write_config, write_rows

from drillyard.launch.agent.job import run_token
from drillyard.supervise.reaper import RUN_MARK, end_marked_processes

TOKEN = "s3cr&t/to+k%n-7h1s"
FORMS = [
    TOKEN,
    quote(TOKEN),
    quote(TOKEN, safe=""),
    base64.b64encode(TOKEN.encode()).decode(),
    json.dumps(TOKEN)[1:-1],
]
REFERENCE = "${env:PLANTED_TOKEN}"
PRINTS = (
    'echo "$PLANTED_TOKEN $URL"; echo "ValueError: bad $URL" >&2; printf "%s" "$PLANTED_TOKEN" |'
    " base64"
)


class CommandLines:
    """Looks at the command lines of all processes until `found` is asked for."""

    def __init__(self) -> None:
        self._seen: set[bytes] = set()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._over.wait(0.05):
            self._look_once()

    def _look_once(self) -> None:
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError), open(f"/proc/{name}/cmdline", "rb") as file:
                self._seen.add(file.read())

    def with_secret(self) -> list[bytes]:
        self._over.set()
        self._thread.join()
        self._look_once()
        return [line for line in self._seen if any(form.encode() in line for form in FORMS)]


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    settings = {
        "name": "here",
        "platform": "local",
        "processes_per_node": 1,
        "environment": {"API_KEY": REFERENCE, "URL": f"https://u:{REFERENCE}@host.invalid/x"},
    }
    desk = Desk(tmp_path / "desk", settings)
    desk.environment |= {"PLANTED_TOKEN": TOKEN, "DRILLYARD_CACHE": str(desk.directory / "cache")}
    yield desk
    for run in desk.directory.glob("runs/*"):
        end_marked_processes(run_token(str(run / "launch")), RUN_MARK)


def holders(desk: Desk, *, while_it_lives: bool = False) -> list[str]:
    """Files below the user's directory that hold the secret."""
    found = []
    for path in desk.directory.rglob("*"):
        if path.is_symlink() or not path.is_file():
            continue
        data = path.read_bytes()
        if not any(form.encode() in data for form in FORMS):
            continue
        if path.name == "secrets.json" and while_it_lives:
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            continue
        found.append(str(path.relative_to(desk.directory)))
    return found


def say(desk: Desk, *arguments: object) -> int:
    """Give a command, whose words must not hold the secret; its exit code."""
    done = desk.say(*arguments)
    assert not [form for form in FORMS if form in done.stdout + done.stderr], (
        arguments,
        done.stdout,
        done.stderr,
    )
    return done.returncode


def look_from_everywhere(desk: Desk, run: str) -> None:
    """Every command that shows something of a run."""
    for arguments in (
        ["status"],
        ["status", "--json"],
        ["logs"],
        ["logs", "--json"],
        ["artifacts"],
    ):
        say(desk, "runs", arguments[0], run, *arguments[1:])
    say(desk, "runs", "list")


def test_workloads_that_print_their_secrets(desk: Desk) -> None:
    """One succeeds, one fails and one is cancelled."""
    seen = CommandLines()
    ends = {
        "good": ("true", 0),
        "bad": ("exit 1", 1),
        "ended": ("touch begun; exec sleep 1000", 130),
    }
    for name, (last, code) in ends.items():
        environment = {"WORKLOAD_KEY": f"x-{REFERENCE}"}
        workload = {"command": ["bash", "-c", f"{PRINTS}; {last}"], "environment": environment}
        run = desk.write_run(name, workload)
        assert say(desk, "launch", run, "--dry-run") == 0
        assert say(desk, "launch", run, "--output", desk.directory / f"plan-{name}") == 0
        assert say(desk, "launch", run, "--max-failures", "0") == 0
        if code == 130:
            desk.wait_for(name, lambda status: status["state"] == "running")
            assert holders(desk, while_it_lives=True) == []
            assert say(desk, "runs", "cancel", name) == 0
        assert say(desk, "runs", "wait", name) == code
        look_from_everywhere(desk, name)
        log = (desk.directory / f"runs/{name}/launch/node-0.log").read_text()
        assert f"{REFERENCE} https://u:{REFERENCE}@host.invalid/x" in log
    assert holders(desk) == []
    assert seen.with_secret() == []


def test_training_runs_whose_settings_hold_secrets(desk: Desk) -> None:
    """One trains to its end, in a directory that comes from the environment too; one cannot read
    its data."""
    rows = write_rows(desk.directory / "rows.jsonl", 60)
    seen = CommandLines()
    desk.environment |= {"SCRATCH_OF_TEST": str(desk.directory)}
    good = write_config(
        desk.directory, "good",
        output="${env:SCRATCH_OF_TEST}/runs",
        data__source={"path": str(rows), "name": f"part-{REFERENCE}"},
        training__steps=2,
        checkpoint={"every_steps": 1},
    )  # fmt: skip
    bad = write_config(desk.directory, "bad", data__source=f"{desk.directory}/{REFERENCE}.jsonl")
    assert say(desk, "train", good, "--nproc-per-node", "1") == 0
    assert say(desk, "launch", bad) == 0
    assert say(desk, "runs", "wait", "bad") == 2
    look_from_everywhere(desk, "bad")
    run = desk.directory / "runs/good"
    assert (run / "summary.json").exists()
    assert say(desk, "report", run) == 0
    assert say(desk, "metrics", run) == 0
    say(desk, "estimate", good)
    assert say(desk, "checkpoint", "list", run) == 0
    assert REFERENCE in (desk.directory / "runs/bad/logs/rank-0.log").read_text()
    assert holders(desk) == []
    assert seen.with_secret() == []
