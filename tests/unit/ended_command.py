"""A command of `drillyard` that is run in the process of the tests."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest

from drillyard.cli import main as cli


@dataclass(frozen=True)
class Ended:
    """What a command has printed, and its exit code."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def lines(self) -> list[str]:
        return [line.rstrip() for line in self.out.splitlines()]


def run_command(capsys: pytest.CaptureFixture[str], *arguments: object) -> Ended:
    """Run `drillyard ARGUMENTS`."""
    with pytest.raises(SystemExit) as ended:
        cli.main(list(map(str, arguments)))
    printed = capsys.readouterr()
    return Ended(int(ended.value.code or 0), printed.out, printed.err)
