"""A secret's value in a text that is derived from it, or that a workload prints: it is written as
its reference again.

A run that succeeds, one that fails and one that is cancelled are in
tests/integration/launch/test_secrets.py.
"""

from __future__ import annotations

import base64
import io
import json
import os
import shlex
import signal
import subprocess
import sys
import time
import urllib.parse
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.text import Text
from tests.facts import says
from tests.unit.launch.requests import cluster, request

from drillyard import redaction
from drillyard.cli import main as cli
from drillyard.config.load import load_run_config
from drillyard.console import SafeConsole
from drillyard.control_characters import CleanStream
from drillyard.launch.agent.job import Job
from drillyard.launch.launcher import launcher_for
from drillyard.launch.plan import Program
from drillyard.launch.prepared_run import agent_files
from drillyard.plan_files import PlanFile
from drillyard.programs import archive
from drillyard.telemetry.events import append_event

TOKEN = "s3cr&t/to+k%n-7h1s"
REFERENCE = "${env:PLANTED_TOKEN}"


@pytest.fixture(autouse=True)
def planted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLANTED_TOKEN", TOKEN)


def config_with_secret(directory: Path) -> Path:
    path = directory / "run.yaml"
    settings: dict[str, Any] = {
        "name": "tiny",
        "output": str(directory / "runs"),
        "model": {"id": f"hub/{REFERENCE}", "init": "pretrained"},
        "data": {"source": f"https://u:{REFERENCE}@host.invalid/x.jsonl", "sequence_length": 16},
        "training": {"steps": 1, "optimizer": {"learning_rate": 0.1}},
    }
    path.write_text(json.dumps(settings))
    return path


def holders(directory: Path, value: str = TOKEN) -> list[Path]:
    """The files below a directory that hold a value."""
    return [
        path
        for path in directory.rglob("*")
        if path.is_file() and value.encode() in path.read_bytes()
    ]


def test_an_error_about_a_derived_text_shows_the_reference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = str(load_run_config(config_with_secret(tmp_path)).data.source)
    cli.print_error(f"{source}: cannot be opened")
    assert says(capsys.readouterr().err, f"error: https://u:{REFERENCE}@host.invalid/x.jsonl:")


def test_an_event_of_a_derived_text_shows_the_reference(tmp_path: Path) -> None:
    source = str(load_run_config(config_with_secret(tmp_path)).data.source)
    assert TOKEN in source
    append_event(tmp_path, "failure", reason=f"cannot open {source}: 'refused'")
    (event,) = map(json.loads, (tmp_path / "events.jsonl").read_text().splitlines())
    assert event["reason"] == f"cannot open https://u:{REFERENCE}@host.invalid/x.jsonl: 'refused'"


WORKLOAD = r"""
import base64, json, os, sys, time, urllib.parse
token = os.environ["PLANTED_TOKEN"]
for number in range(0, len(token), 3):
    os.write(1, token[number : number + 3].encode())  # in pieces, each perhaps a read of its own
    time.sleep(0.01)
print("", "in a URL", urllib.parse.quote(token, safe=""), os.environ["URL"])
print("Basic", base64.b64encode(b"u:" + token.encode()).decode())
print(json.dumps({"key": token}), repr(token), flush=True)
with open(os.environ["DRILLYARD_EXIT_RECORD"], "w") as record:
    json.dump({"exit_code": 1, "rank": 0, "reason": f"bad {token}", "lines": [f"ValueError: bad {token}"]}, record)
sys.exit(f"ValueError: bad {token}")
"""  # noqa: E501


def test_what_a_workload_prints_and_tells_has_the_reference_in_every_file_of_the_run(
    tmp_path: Path,
) -> None:
    launch = tmp_path / "launch"
    (launch / "agent").mkdir(parents=True)
    for file in agent_files():
        (launch / file.path).write_text(file.content)
    job = Job(
        run="tiny",
        cluster="here",
        platform="local",
        nodes=1,
        processes_per_node=1,
        run_directory=str(tmp_path),
        launch_directory=str(launch),
        command=[sys.executable, "-c", WORKLOAD],
        environment={"URL": f"https://u:{REFERENCE}@host/x"},
        max_failures=0,
    )
    (launch / "job.json").write_text(job.as_json())
    (launch / "secrets.json").write_text(json.dumps({"PLANTED_TOKEN": TOKEN}))
    environment = {name: value for name, value in os.environ.items() if name != "PLANTED_TOKEN"}
    done = subprocess.run(
        [sys.executable, launch / "agent", "run", "--job", launch / "job.json"],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    (launch / "secrets.json").unlink(missing_ok=True)
    for form in (
        TOKEN,
        urllib.parse.quote(TOKEN, safe=""),
        base64.b64encode(TOKEN.encode()[2:11]).decode(),
    ):
        assert not holders(tmp_path, form)
        assert form not in done.stdout + done.stderr
    log = (launch / "node-0.log").read_text()
    assert log.count(REFERENCE) >= 6 and f"https://u:{REFERENCE}@host/x" in log
    assert REFERENCE in done.stdout
    state = json.loads((launch / "state.json").read_text())
    assert f"bad {REFERENCE}" in state["failure"]["reason"]
    assert (
        len([path for path in (launch / "exits").iterdir() if REFERENCE in path.read_text()]) == 2
    )


def test_other_variables_and_short_values_are_left_alone(tmp_path: Path) -> None:
    from drillyard.redaction import Redactor

    place = tmp_path / "scratch"
    place.mkdir()
    redactor = Redactor(
        {"USER": "alexandra", "REGION": "eu-west", "SCRATCH": str(place), "TOKEN": "abcdefgh"}
    )
    text = f"/home/alexandra eu-west {place}/runs"
    assert redactor.text(text) == text
    assert redactor.text("abcdefgh abcdefg") == "${env:TOKEN} abcdefg"


# Hypothesis draws literals of the source too, and a path that exists (/dev/kmsg) is no secret.
secrets = st.text(min_size=8, max_size=20).filter(
    lambda text: text.isprintable() and text.strip() == text and not text.startswith("/")
)


@given(secrets, st.binary(max_size=9), st.binary(max_size=9))
def test_each_form_of_a_value_is_found(value: str, before: bytes, after: bytes) -> None:
    from drillyard.redaction import Redactor

    redactor = Redactor({"T": value})
    begin, end = before.hex(), after.hex()
    forms = [
        value,
        urllib.parse.quote(value),
        urllib.parse.quote_plus(value),
        json.dumps(value),
        repr(value),
    ]
    for form in forms:
        assert "${env:T}" in redactor.text(f"{begin} {form} {end}"), form
    assert "${env:T}" in redactor.text(base64.b64encode(before + value.encode() + after).decode())


def test_a_value_may_have_bytes_that_are_not_utf_8() -> None:
    from drillyard.redaction import Redactor

    redactor = Redactor({"T": "hunter2-\udcff"})
    for form in (b"hunter2-\xff", b"hunter2-%FF", b"hunter2-%ff"):
        assert redactor.lines(b"a " + form) == b"a ${env:T}"


@given(
    st.lists(st.integers(1, 7), min_size=1),
    st.lists(st.sampled_from(["", "x", "hunter2-", "\n"]), max_size=5),
)
def test_pieces_cut_anywhere_give_what_the_whole_gives(cuts: list[int], between: list[str]) -> None:
    from drillyard.redaction import RedactedStream, Redactor

    redactor = Redactor({"T": "hunter2-hunter3", "LINES": "first line\nsecond line"})
    data = "".join(f"{text}hunter2-hunter3 second line {text}" for text in ["", *between]).encode()
    stream, got, place, number = RedactedStream(redactor), b"", 0, 0
    while place < len(data):
        length = cuts[number % len(cuts)]
        got += stream.feed(data[place : place + length])
        place, number = place + length, number + 1
    got += stream.feed(b"")
    assert got == redactor.lines(data) and b"hunter3" not in got and b"second line" not in got


LONGER = "hunter2-hunter3"


@pytest.mark.parametrize("cut", range(1, len(LONGER)))
def test_of_values_that_begin_alike_no_rest_is_passed_on(cut: int) -> None:
    from drillyard.redaction import RedactedStream, Redactor

    stream = RedactedStream(Redactor({"SHORT": LONGER[:9], "LONG": LONGER}))
    got = [
        stream.feed(piece)
        for piece in (b"x " + LONGER[:cut].encode(), LONGER[cut:].encode() + b" y", b"")
    ]
    assert b"".join(got) == b"x ${env:LONG} y"


def test_a_text_that_is_filtered_twice_stays() -> None:
    from drillyard.redaction import Redactor

    redactor = Redactor({"SITE_PASSWORD": "PASSWORD"})
    once = redactor.text("it is PASSWORD")
    assert once == "it is ${env:SITE_PASSWORD}" == redactor.text(once)
    assert (
        redactor.lines(b"PASSWORD ${env:SITE_PASSWORD}")
        == b"${env:SITE_PASSWORD} ${env:SITE_PASSWORD}"
    )


def test_a_value_in_quotes_of_a_shell_or_of_python() -> None:
    from drillyard.redaction import Redactor

    value = "p\u00e4ss'word-x"
    redactor = Redactor({"T": value})
    traced = "'" + value.replace("'", "'\\''") + "'"  # as `sh -x` shows a command
    for text in (
        shlex.quote(value),
        traced,
        repr(f"it's \"{value}"),
        ascii(f'"{value}'),
        repr(value.encode()),
    ):
        assert "word-x" not in redactor.text(text)


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_value_that_the_end_of_a_line_or_a_colour_cuts_in_two(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rich.table import Table

    value = "abcdefgh-1234-https://ijklmnop-True-5678"
    monkeypatch.setattr(redaction, "_known", redaction.Redactor({"T": value}))
    stream = io.StringIO()
    console = SafeConsole(
        file=CleanStream(stream), force_terminal=is_terminal, color_system="standard", width=24
    )
    table = Table("reason")
    table.add_row(f"bad key {value}")
    table.add_row(Text(f"bad key {value}"))
    for text in (f"tok={value}", f"it is {value}", table):
        console.print(text)
    assert stream.getvalue().count("${env:T}") == 4
    assert not any(part in stream.getvalue() for part in ("abcd", "1234", "ijkl", "5678"))


@pytest.mark.parametrize(
    ("config", "stage"),
    [
        (cluster("local", None, 1, processes_per_node=1), "write"),
        (cluster(storage="{directory: /s}"), "submit"),
    ],
    ids=["local", "slurm"],
)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_secrets_that_are_on_their_way_are_removed_when_a_signal_ends_the_submission(
    tmp_path: Path, config: str, stage: str, number: signal.Signals
) -> None:
    asked = request(config)
    (step,) = (
        step
        for step in launcher_for(asked.cluster).plan(asked).steps
        if isinstance(step, Program) and step.stage == stage
    )
    # In the place of the agent, which the signal ends too.
    python = tmp_path / "bin" / "python3"
    python.parent.mkdir()
    python.write_text(f"#!/bin/sh\ntouch {tmp_path}/started\nexec sleep 600\n")
    python.chmod(0o755)
    words = [str(python) if word == "/usr/bin/python3" else word for word in step.argv]
    unpacked = tmp_path / "tmp"
    unpacked.mkdir()
    environment = os.environ | {
        "TMPDIR": str(unpacked),
        "PATH": f"{python.parent}:{os.environ['PATH']}",
    }
    shell = subprocess.Popen(words, stdin=subprocess.PIPE, env=environment, start_new_session=True)
    assert shell.stdin is not None
    with shell.stdin as stdin:
        stdin.write(
            archive([PlanFile("secret", "one\n", 0o600), PlanFile("secrets.json", TOKEN, 0o600)])
        )
    deadline = time.monotonic() + 60
    while not (tmp_path / "started").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    (held,) = holders(unpacked)
    assert held.stat().st_mode & 0o077 == held.parent.stat().st_mode & 0o077 == 0
    os.killpg(shell.pid, number)
    assert shell.wait(60) != 0
    assert list(unpacked.iterdir()) == []
