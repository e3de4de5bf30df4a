"""`drillyard watch` as a person and as a pipe sees it: a live run, a finished one, leaving, and no
torch."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.facts import says
from tests.unit.reporting import runs

WATCH = [sys.executable, "-m", "drillyard", "watch"]
TIMEOUT_SECONDS = 240
CONTROLS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """A command in a terminal of 80 x 24; `text` is all that it has printed, without colours and
    cursor moves."""

    def __init__(self, *arguments: object) -> None:
        self._side, other = pty.openpty()
        fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.settings = termios.tcgetattr(other)
        environment = {**os.environ, "TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8"}
        command = [*WATCH, *map(str, arguments)]
        self.process = subprocess.Popen(
            command,
            stdin=other,
            stdout=other,
            stderr=other,
            env=environment,
            # Ctrl-C is a signal only in the terminal that a session belongs to.
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        self._other = other
        self.raw = b""

    @property
    def text(self) -> str:
        return CONTROLS.sub("", self.raw.decode("utf-8", "replace")).replace("\r", "")

    def read_until(self, condition: Callable[[], bool]) -> None:
        limit = time.monotonic() + TIMEOUT_SECONDS
        while not condition():
            assert time.monotonic() < limit, self.text
            if select.select([self._side], [], [], 0.05)[0]:
                self.raw += os.read(self._side, 65536)

    def press(self, key: bytes) -> None:
        os.write(self._side, key)

    def end(self) -> int:
        """Read to the end; returns the exit code."""
        self.read_until(lambda: self.process.poll() is not None)
        while select.select([self._side], [], [], 0.1)[0]:
            self.raw += os.read(self._side, 65536)
        assert termios.tcgetattr(self._other) == self.settings
        os.close(self._side)
        os.close(self._other)
        return self.process.returncode


def test_a_live_run_is_followed_to_its_end(tmp_path):
    whole = runs.write_run(tmp_path / "whole", steps=60)
    going = tmp_path / "going"
    going.mkdir()
    # As a run writes them: the end is reported when all steps are there.
    files = {name: (whole / name).read_bytes() for name in ("metrics.jsonl", "events.jsonl")}
    parts = {name: [data[: len(data) // 2], data[len(data) // 2 :]] for name, data in files.items()}

    def write(part: int) -> None:
        # Half of the bytes end within a line: it counts when its rest is there.
        for name, pieces in parts.items():
            with (going / name).open("ab") as file:
                file.write(pieces[part])

    write(0)
    terminal = Terminal(going, "--interval", "0.1", "--price-per-gpu-hour", "3")
    terminal.read_until(lambda: "q quits" in terminal.text and "of 60" in terminal.text)
    seen = max(map(int, re.findall(r"step (\d+) of 60", terminal.text)))
    assert 20 < seen < 40 and "completed" not in terminal.text
    threading.Timer(0.3, write, [1]).start()
    assert terminal.end() == 0
    final = terminal.text[terminal.text.rindex("going  completed") :].splitlines()
    assert len(final) <= 24 and all(len(line) <= 80 for line in final)
    assert any("step 60 of 60  100.0%" in line for line in final)
    assert any(says(line, "run ... complete") for line in final)
    assert b"\x1b[?1049h" in terminal.raw and terminal.raw.index(
        b"\x1b[?1049l"
    ) < terminal.raw.rindex(b"completed")


@pytest.mark.parametrize(("key", "code"), [(b"q", 0), (b"\x03", 130)])
def test_q_and_ctrl_c_leave_a_run_that_goes_on(tmp_path, key, code):
    terminal = Terminal(runs.write_run(tmp_path / "trial", steps=20, end=None), "--interval", "30")
    terminal.read_until(lambda: "q quits" in terminal.text)
    terminal.press(key)
    assert terminal.end() == code
    assert "Traceback" not in terminal.text


def test_a_pipe_gets_plain_lines(tmp_path):
    directory = runs.write_run(tmp_path / "trial")
    ended = subprocess.run(
        [*WATCH, str(directory)], capture_output=True, text=True, timeout=TIMEOUT_SECONDS
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    lines = ended.stdout.splitlines()
    assert "\x1b" not in ended.stdout
    assert says(lines, "step 160: ... complete")
    assert any(line.startswith("step 160 of 160 | loss ") for line in lines)
    assert "Run        trial: completed, step 160 of 160" in lines
    assert any(re.fullmatch(r"Cost +\$[\d,.]+, \$[\d.]+/M tokens", line) for line in lines)


def test_a_failed_run_has_exit_code_1(tmp_path):
    directory = runs.write_run(tmp_path / "trial", steps=10, end="failed")
    ended = subprocess.run(
        [*WATCH, str(directory)], capture_output=True, text=True, timeout=TIMEOUT_SECONDS
    )
    assert ended.returncode == 1
    assert "trial: failed, step 10 of 10" in ended.stdout


def test_a_reader_that_goes_ends_the_watch_without_a_traceback(tmp_path):
    directory = runs.write_run(tmp_path / "trial", steps=20, end=None)
    command = [*WATCH, str(directory), "--interval", "0.1"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        with (directory / "events.jsonl").open("a") as file:
            file.write(
                '{"time": "2026-01-31T13:00:00.000000Z", "event": "warning", "text": "late"}\n'
            )
        assert process.wait(TIMEOUT_SECONDS) == 1
        assert "Traceback" not in process.stderr.read()


def test_an_interrupt_without_a_terminal_is_130(tmp_path):
    directory = runs.write_run(tmp_path / "trial", steps=20, end=None)
    with subprocess.Popen(
        [*WATCH, str(directory)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(TIMEOUT_SECONDS) == 130
        assert process.stderr.read() == b""


def test_a_directory_without_a_run_is_refused(tmp_path):
    ended = subprocess.run(
        [*WATCH, str(tmp_path)], capture_output=True, text=True, timeout=TIMEOUT_SECONDS
    )
    assert ended.returncode == 2
    assert "no events.jsonl" in ended.stderr


def test_the_command_needs_no_torch(tmp_path):
    directory: Path = runs.write_run(tmp_path / "trial", steps=20)
    program = (
        "import json, sys\n"
        "from drillyard.cli.main import main\n"
        f"try: main(['watch', {str(directory)!r}])\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "names = ('torch', 'transformers', 'pyarrow')\n"
        "print(json.dumps([name for name in names if name in sys.modules]))\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=TIMEOUT_SECONDS
    )
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout.splitlines()[-1]) == []
