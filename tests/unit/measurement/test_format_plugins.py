"""A separate distribution adds a log format; one that cannot be used costs a line on stderr and
nothing else."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.unit.measurement.lines import perf, write
from tests.unit.measurement.prefixes import PREFIXES, prefixed

from drillyard.errors import UserError
from drillyard.measurement.formats import GROUP, log_formats
from drillyard.measurement.read_logs import read_logs
from drillyard.measurement.run_result import measure
from drillyard.plugins import load_plugins

FORMAT = '''
import re

from drillyard.measurement.formats.line_rules import fact_rule
from drillyard.measurement.formats.log_format import NUMBER, StepPattern, TextFormat
from drillyard.measurement.formats.values import Value, decode_values

PATTERN = rb"acme step=(\\d{1,18}) loss=%s took_ms=%s" % (NUMBER, NUMBER)
VALUES = [Value("step", integer=True), Value("loss"), Value("seconds", 1e-3)]


class Acme(TextFormat):
    """acme step=3 loss=2.5 took_ms=500"""

    name = "acme"
    title = "Acme Trainer"
    preference = 15
    windowed = True
    anchor = b"acme step="
    rules = (fact_rule(b"acme gpus", rb"acme gpus (?P<num_gpus>\\d+)"),)

    def step_pattern(self, line):
        found = re.search(PATTERN, line)
        return found and StepPattern(found.start(), PATTERN, decode_values(VALUES, {}))
'''
DOCUMENT = '''
from drillyard.measurement.formats.log_format import DocumentFormat, LogFormat


class Acme(DocumentFormat):
    """acme ..."""

    name = "acme"
    title = "Acme Trainer"

    @staticmethod
    def matches(head):
        return head.startswith(b"acme")

    def read(self, name, file, stream):
        return 5
'''
LOG = b"acme gpus 16\n" + b"".join(
    b"acme step=%d loss=%.2f took_ms=500\n" % (step, 9 / step) for step in (10, 20, 30)
)
Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Install a distribution with one module and entry points NAME=VALUE."""
    before = set(sys.modules)

    def install(source: str, **entries: str) -> None:
        write(tmp_path / "site/acme_logs.py", source)
        info = tmp_path / "site/acme_logs-1.2.dist-info"
        write(info / "METADATA", "Metadata-Version: 2.1\nName: acme-logs\nVersion: 1.2\n")
        lines = "".join(f"{name} = {value}\n" for name, value in entries.items())
        write(info / "entry_points.txt", f"[{GROUP}]\n{lines}")
        monkeypatch.syspath_prepend(str(tmp_path / "site"))
        _forget()

    yield install
    for name in set(sys.modules) - before:
        if name.startswith("acme"):
            del sys.modules[name]
    _forget()


def _forget() -> None:
    log_formats.cache_clear()
    load_plugins.cache_clear()


def test_a_format_of_another_distribution_is_read_behind_every_prefix(
    install: Install, tmp_path: Path
) -> None:
    install(FORMAT, acme="acme_logs:Acme")
    assert list(log_formats())[:3] == ["drillyard", "acme", "dllogger"]
    for launcher, prefix in PREFIXES.items():
        log = read_logs([write(tmp_path / "run.log", prefixed(LOG, prefix))])
        assert (log.format, log.steps.step.tolist()) == ("acme", [10, 20, 30]), launcher
        assert log.steps.seconds.tolist() == [0.5] * 3
        assert log.steps.window_steps.tolist() == [10] * 3
        assert log.facts.num_gpus == 16
    assert read_logs([tmp_path / "run.log"], framework="acme").format == "acme"
    document = measure(log).as_json()
    assert (document["format"], document["step_seconds"]["p50"], document["num_gpus"]) == (
        "acme",
        0.5,
        16,
    )


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import no_such_module_anywhere\n", "acme"),
        ("raise RuntimeError('broken\\nfile')\n", "acme"),
        (FORMAT.replace("def step_pattern", "def other"), "acme"),
        (FORMAT.replace('title = "Acme Trainer"', ""), "acme"),
        ("class Acme: pass\n", "acme"),
        (FORMAT, "megatron"),
        (FORMAT.replace("preference = 15", 'preference = "high"'), "acme"),
        (FORMAT.replace("windowed = True", "windowed = None"), "acme"),
        (FORMAT.replace('anchor = b"', 'anchor = "'), "acme"),
        (FORMAT.replace("rules = (", "rules = 5 and (5, "), "acme"),
        (FORMAT.replace("rules = (", "rules = 5\n    other = ("), "acme"),
        (FORMAT.replace('fact_rule(b"acme gpus"', "fact_rule('acme gpus'"), "acme"),
        (FORMAT.replace("(?P<num_gpus>", "(?P<num_gpus"), "acme"),
        (FORMAT.replace("found = ", "found = 1 / 0  # "), "acme"),
        (FORMAT.replace("return found and ", "return "), "acme"),
        (FORMAT.replace("return found and ", "return 5 or "), "acme"),
        (
            FORMAT.replace("    def step", "    def __init__(self):\n        pass\n\n    def step"),
            "acme",
        ),
        (DOCUMENT.replace("matches(head)", "matches()"), "acme"),
        (DOCUMENT.replace("DocumentFormat", "LogFormat"), "acme"),
    ],
)
def test_a_format_that_cannot_be_used_is_one_line(
    source: str, name: str, install: Install, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    install(source, **{name: "acme_logs:Acme"})
    log = read_logs([write(tmp_path / "run.log", "".join(f"{perf(step)}\n" for step in (1, 2, 3)))])
    assert log.format == "perflogger"
    assert "acme" not in log_formats() and log_formats()["megatron"].title == "Megatron-LM"
    (line,) = capfd.readouterr().err.splitlines()
    assert GROUP in line and "acme-logs 1.2" in line and name in line


@pytest.mark.parametrize(
    "source",
    [
        FORMAT.replace("found = ", "assert line == self.anchor\n        found = "),
        FORMAT.replace("return found and ", "return found and 5  # "),
        FORMAT.replace("found.start(), PATTERN,", "found.start(), b'(',"),
        FORMAT.replace("found.start(), PATTERN,", "found.start(), None,"),
        FORMAT.replace("decode_values(VALUES, {})", "lambda groups, place: {}['loss']"),
        FORMAT.replace("decode_values(VALUES, {})", "lambda groups, place: None"),
        FORMAT.replace("decode_values(VALUES, {})", "lambda groups, place: {}"),
        FORMAT.replace('Value("loss")', 'Value("los")'),
        FORMAT.replace("?P<num_gpus>", "?P<gpus>"),
        FORMAT + "\n    def end_block(self, block):\n        1 / 0\n",
        FORMAT + "\n    def finish_lane(self, lane):\n        1 / 0\n",
        DOCUMENT.replace("return head", "return head and head[10**9]"),
        DOCUMENT,
    ],
)
def test_a_format_whose_code_fails_on_a_log_is_named_with_its_distribution(
    source: str, install: Install, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    install(source, acme="acme_logs:Acme")
    log = write(tmp_path / "run.log", LOG)
    with pytest.raises(UserError, match=f"{GROUP} 'acme' of acme-logs 1.2") as failed:
        read_logs([log])
    assert "--framework" in str(failed.value) and "acme" in log_formats()
    write(log, "".join(f"{perf(step)}\n" for step in (1, 2, 3)))
    assert read_logs([log], framework="perflogger").format == "perflogger"
    assert capfd.readouterr().err == ""


def test_a_damaged_value_is_no_failure_of_the_format(install: Install, tmp_path: Path) -> None:
    install(FORMAT.replace("    rules", "    other"), acme="acme_logs:Acme")
    log = read_logs([write(tmp_path / "run.log", LOG.replace(b"loss=0.45", b"loss=1e2e"))])
    assert (log.format, log.steps.step.tolist()) == ("acme", [10, 30])


def test_a_format_is_known_by_the_name_of_its_entry_point(install: Install, tmp_path: Path) -> None:
    install(FORMAT, acme_2="acme_logs:Acme")
    assert read_logs([write(tmp_path / "run.log", LOG)]).format == "acme_2"
