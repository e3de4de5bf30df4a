"""Many things at the same time, which an interrupt leaves at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from drillyard.errors import UserError
from drillyard.launch.programs import Host, Programs, parallel_map

INTERRUPTED = """
import os, signal, threading
from drillyard.launch.programs import parallel_map

def never(_):
    os.kill(os.getpid(), signal.SIGINT)
    threading.Event().wait()

parallel_map(lambda item: parallel_map(never, [item], 1), [1, 2], 2)
"""


def test_answers_come_in_order_and_the_first_failure_is_raised_when_all_have_ended() -> None:
    assert parallel_map(lambda number: number * number, range(100), 7) == [
        number * number for number in range(100)
    ]
    assert parallel_map(str, [], 4) == []
    ended = []

    def fail(number: int) -> None:
        ended.append(number)
        if number in (2, 5):
            raise ValueError(number)

    with pytest.raises(ValueError, match="2"):
        parallel_map(fail, range(9), 3)
    assert sorted(ended) == list(range(9))


def test_an_exit_in_a_thread_is_raised_where_it_is_waited_for() -> None:
    code = (
        "import sys; from drillyard.launch.programs import parallel_map as m; m(lambda _:"
        " sys.exit(3), [1, 2], 2)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 3


def test_an_interrupt_ends_the_process_though_nothing_has_ended() -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED], capture_output=True, timeout=120, check=False
    )
    assert done.returncode == -signal.SIGINT and b"KeyboardInterrupt" in done.stderr


@pytest.mark.parametrize("noise", ["hello\\n", "42\\n", "[1]\\n", "{}", "no end of line"])
def test_what_a_login_prints_and_reads_is_no_part_of_the_answer(
    noise: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    login = f"printf '{noise}'; printf '{noise}' >&2; read answer;"
    fake_ssh(tmp_path, monkeypatch, f'{login} for last; do :; done; eval "$last"')
    host = Host(f"h-{tmp_path.name}")
    done = Programs().run(host.argv(["sh", "-c", "cat; echo err >&2"]), stdin=b"{}\n\0", timeout=30)
    assert (done.returncode, done.stdout, done.stderr) == (0, "{}\n\0", "err\n")
    assert len(capsys.readouterr().err.splitlines()) <= 1


@pytest.mark.parametrize("login", ["echo closed; exit 0", "exec true", "exec /usr/sbin/nologin"])
def test_a_login_shell_that_never_runs_the_command_is_named(
    login: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_ssh(tmp_path, monkeypatch, login)
    with pytest.raises(UserError, match="login shell"):
        Programs().run(Host("h0").argv(["true"]), timeout=30)
    with pytest.raises(UserError, match="login shell"):
        Programs().stream(Host("h0").argv(["true"]))


def fake_ssh(directory: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    program = directory / "bin" / "ssh"
    program.parent.mkdir()
    program.write_text(f"#!/bin/bash\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
