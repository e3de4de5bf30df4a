"""What is forked is in every way that a test or drillyard looks at the process that would have been
started."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.integration import forked_start

from drillyard.supervise.process_identity import process_state

# Prints a line of facts about itself; with a word after `train` starts that as its rank, as a
# supervisor does. Then it ends with the number that it reads.
PROGRAM = """
import json, os, signal, sys
sys.path.insert(1, {source!r})
def lines(name):
    return open("/proc/self/" + name).read().split("\\0")[:-1]
facts = dict(
    pid=os.getpid(), parent=os.getppid(), argv=sys.argv, path=sys.path[0], cwd=os.getcwd(),
    session=os.getsid(0) == os.getpid(), group=os.getpgrp() == os.getpid(),
    command=lines("cmdline"), shown=sorted(lines("environ")),
    variables=sorted(f"{{k}}={{v}}" for k, v in os.environ.items()),
    ignored=[n for n in signal.valid_signals() if signal.getsignal(n) == signal.SIG_IGN],
    streams=[(s.encoding, s.errors, s.line_buffering, s.write_through) for s in
             (sys.stdin, sys.stdout, sys.stderr)],
    open=[n for n in map(int, os.listdir("/proc/self/fd")) if n < 500],
    main=__name__, network=os.readlink("/proc/self/ns/net"),
    imported=[n for n in ("torch", "typer") if n in sys.modules],
)
print(json.dumps(facts), flush=True)
if len(sys.argv) > 2:
    sys.modules["tests.integration.forked_start"]._SCRIPTS.add(__file__)
    from drillyard.supervise.rank_process import start_process
    rank = start_process([sys.executable, __file__, "train"], {{**os.environ, "RANK": "0"}}, 1, 2)
sys.exit(int(sys.stdin.readline() or signal.pause() or 0))
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A script that may be forked."""
    path = tmp_path / "program.py"
    path.write_text(PROGRAM.format(source=str(Path(__file__).parents[2] / "src")))
    monkeypatch.setattr(forked_start, "_SCRIPTS", {str(path)})
    return path


@pytest.fixture
def started(program: Path) -> Iterator[Any]:
    """Starts the program; what is left of it is killed."""
    processes: list[subprocess.Popen[str]] = []

    def start(
        *words: str, verb: str = "train", before: Sequence[str] = (), **options: Any
    ) -> tuple[subprocess.Popen[str], dict[str, Any]]:
        command = [*before, sys.executable, str(program), verb, *words]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        process = subprocess.Popen(command, **pipes | options)
        processes.append(process)
        assert process.stdout is not None
        return process, json.loads(process.stdout.readline())

    yield start
    for process in processes:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    "options",
    [{}, {"start_new_session": True}, {"process_group": 0}, {"cwd": "/"}, {"verb": "runs"}],
    ids=str,
)
def test_a_fork_is_the_process_that_would_have_been_started(
    started: Any, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    forked = started(**options)
    with monkeypatch.context() as patched:
        patched.setattr(forked_start, "_SCRIPTS", set())
        real = started(**options)
    imported = ["typer"] if "verb" in options else ["torch", "typer"]
    assert (forked[1].pop("imported"), real[1].pop("imported")) == (imported, [])
    for process, facts in (forked, real):
        assert facts.pop("pid") == process.pid
        assert facts["parent"] == os.getpid()
    assert forked[1] == real[1]
    for process, _ in (forked, real):
        assert process.poll() is None
        process.communicate("7\n")
        assert process.returncode == 7


@pytest.mark.skipif(os.geteuid() != 0, reason="a network namespace needs root")
def test_a_fork_enters_the_network_that_nsenter_would_enter(
    started: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with subprocess.Popen(
        ["unshare", "--net", "sh", "-c", "echo; exec cat"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as other:
        assert other.stdin is not None and other.stdout is not None
        other.stdout.readline()
        network = f"/proc/{other.pid}/ns/net"
        enter = ["nsenter", f"--net={network}", "--"]
        process, forked = started(verb="runs", before=enter)
        with monkeypatch.context() as patched:
            patched.setattr(forked_start, "_SCRIPTS", set())
            _, real = started(verb="runs", before=enter)
        assert (forked.pop("imported"), real.pop("imported")) == (["typer"], [])
        assert forked.pop("pid") == process.pid and real.pop("pid")
        assert forked == real and forked["network"] == os.readlink(network)
        other.stdin.close()


def test_it_is_stopped_and_killed_by_its_id(started: Any) -> None:
    process, _ = started()
    process.send_signal(signal.SIGSTOP)
    assert os.waitpid(process.pid, os.WUNTRACED) == (process.pid, signal.SIGSTOP << 8 | 0x7F)
    process.kill()
    assert process.wait() == -signal.SIGKILL


def test_a_rank_is_forked_too_and_dies_with_its_supervisor(started: Any) -> None:
    process, _ = started("and a rank", stdin=subprocess.DEVNULL)
    rank = json.loads(process.stdout.readline())
    assert "torch" in rank["imported"] and rank["parent"] == process.pid and rank["session"]
    assert "RANK=0" in rank["variables"] and rank["variables"] == rank["shown"]
    process.kill()
    assert process.wait() == -signal.SIGKILL
    end = time.monotonic() + 60
    while process_state(rank["pid"]) not in ("", "Z"):
        assert time.monotonic() < end, "the rank outlives its supervisor"
        time.sleep(0.01)


@pytest.mark.parametrize("change", ["variable", "limits", "code of the caller", "open descriptors"])
def test_where_a_fork_would_differ_the_process_is_started(started: Any, change: str) -> None:
    options = {
        "variable": {"env": os.environ | {"OMP_NUM_THREADS": "2"}},
        "limits": {"umask": 0o27},
        "code of the caller": {"preexec_fn": lambda: None},
        "open descriptors": {"close_fds": False},
    }
    for verb in ("train", "runs"):
        assert not started(verb=verb, **options[change])[1]["imported"]
    assert "torch" in started(env=os.environ | {"MASTER_PORT": "1"})[1]["imported"]


def test_a_plain_command_may_have_another_home_but_not_what_its_imports_read(started: Any) -> None:
    other = os.environ | {"HOME": "/", "PATH": "/usr/bin", "KUBECONFIG": "/none"}
    assert started(verb="runs", env=other)[1]["imported"] == ["typer"]
    for name in ("PYDANTIC_DISABLE_PLUGINS", "PYTHONUTF8", "LC_ALL"):
        assert not started(verb="runs", env=other | {name: "1"})[1]["imported"]


def test_servers_of_a_block_import_in_its_environment_and_end_with_it(
    started: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONUTF8", "1")
    with forked_start.forked(forked_start.PLAIN):
        assert started(verb="runs")[1]["imported"] == ["typer"]
    assert not started(verb="runs")[1]["imported"]


def test_what_is_started_for_real_is_there() -> None:
    for name in forked_start.STARTED_FOR_REAL:
        file, _, test = name.partition("::")
        text = (Path(__file__).parent / file).read_text(encoding="utf-8")
        assert f"def {test.partition('[')[0] or 'test'}" in text, name
