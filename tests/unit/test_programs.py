"""Many things at the same time, which an interrupt leaves at once."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from drillyard.errors import UnreachableError, UserError
from drillyard.launch.remote_files import RemoteFiles
from drillyard.programs import Host, Programs, input_for_login, parallel_map

INTERRUPTED = """
import os, signal, threading
from drillyard.programs import parallel_map

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
        "import sys; from drillyard.programs import parallel_map as m; m(lambda _:"
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


def test_hosts_with_the_same_login_are_noted_once_and_what_ssh_itself_says_never(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    warning = "Warning: Permanently added '%s' (ED25519) to the list of known hosts."
    shared = "ControlSocket /h/.ssh/drillyard-1 already exists, disabling multiplexing"
    login = f'printf "{warning}\\r\\n{shared}\\r\\n" $RANDOM >&2; $GREETS;'
    fake_ssh(tmp_path, monkeypatch, f'{login} for last; do :; done; eval "$last"')
    hosts = [Host(f"{tmp_path.name}-{number}") for number in range(8)]

    def ask(host: Host) -> str:
        return Programs().run(host.argv(["echo", "here"]), timeout=60).stdout

    monkeypatch.setenv("GREETS", ":")
    assert parallel_map(ask, hosts, 8) == ["here\n"] * 8
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("GREETS", f"echo {tmp_path.name}")
    assert parallel_map(ask, hosts, 8) == ["here\n"] * 8
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize("login", ["echo closed; exit 0", "exec true", "exec /usr/sbin/nologin"])
def test_a_login_shell_that_never_runs_the_command_is_named(
    login: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_ssh(tmp_path, monkeypatch, login)
    with pytest.raises(UserError, match="login shell"):
        Programs().run(Host("h0").argv(["true"]), timeout=30)
    with pytest.raises(UserError, match="login shell"):
        Programs().stream(Host("h0").argv(["true"]))


def test_a_login_that_fills_a_pipe_with_errors_is_passed_and_noted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    login = "for n in $(seq 4000); do echo 'a line of a login that warns about much' >&2; done;"
    fake_ssh(tmp_path, monkeypatch, f'{login} for last; do :; done; eval "$last"')
    host = Host(f"h-{tmp_path.name}")
    files = RemoteFiles(host, Programs(), sys.executable)
    (tmp_path / "a").write_text("text")
    answers: list[object] = []
    asking = threading.Thread(
        target=lambda: answers.append(files.find([f"{tmp_path}/a"])), daemon=True
    )
    asking.start()
    asking.join(60)
    assert answers == [[(f"{tmp_path}/a", 4)]]
    files.close()
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_what_a_lost_connection_last_wrote_is_shown_without_what_the_login_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_ssh(tmp_path, monkeypatch, 'echo noise >&2; for last; do :; done; eval "$last"')
    ends = tmp_path / "python"
    ends.write_text("#!/bin/sh\necho 'no space left' >&2; exit 1\n")
    ends.chmod(0o755)
    with pytest.raises(UnreachableError, match="cannot be read: no space left"):
        RemoteFiles(Host("h0"), Programs(), str(ends)).find(["/*"])


@pytest.mark.parametrize("said", ["", "echo dialling; echo slowly >&2; "])
def test_a_login_that_hangs_is_named_with_a_command_that_shows_it(
    said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drillyard.programs._SILENT_SECONDS", 0.4)
    fake_ssh(tmp_path, monkeypatch, f"{said}exec sleep 600")
    host = Host("me@h0", port=2222, config_file="/etc/my config")
    for ask in (Programs().stream, lambda argv: Programs().run(argv, timeout=180)):
        with pytest.raises(UnreachableError, match=r"^me@h0: no answer after") as refused:
            ask(host.argv(["true"]))
        assert "ssh -F '/etc/my config' -p 2222 me@h0 true" in str(refused.value)
        assert ("dialling slowly" in str(refused.value)) == bool(said)


def test_a_login_that_takes_long_and_prints_meanwhile_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drillyard.programs._SILENT_SECONDS", 1.0)
    login = "for n in 1 2 3 4 5 6 7 8; do sleep 0.3; echo $n >&2; done;"
    fake_ssh(tmp_path, monkeypatch, f'{login} for last; do :; done; eval "$last"')
    done = Programs().run(Host("h0").argv(["echo", "here"]), timeout=180)
    assert done.stdout == "here\n"


def test_a_plan_that_is_applied_by_hand_passes_a_login_that_reads_its_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    login = "echo 42; read answer; read another;"
    fake_ssh(tmp_path, monkeypatch, f'{login} for last; do :; done; eval "$last"')
    argv = Host("h0").argv(["cat"])
    line = f"{{ {input_for_login(argv)} && echo sent; }} | {shlex.join(argv)}"
    done = subprocess.run(["sh", "-c", line], capture_output=True, timeout=60, check=False)
    assert done.returncode == 0 and done.stdout.endswith(b"\nsent\n"), done


def fake_ssh(directory: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    program = directory / "bin" / "ssh"
    program.parent.mkdir()
    program.write_text(f"#!/bin/bash\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
