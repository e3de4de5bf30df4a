"""messages.txt has every sentence that a user may read, so that a diff shows each change of one."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from tools.messages import sentences

ROOT = Path(__file__).resolve().parents[2]


def test_the_snapshot_of_messages_is_current() -> None:
    check = [sys.executable, "tools/messages.py", "--check"]
    ended = subprocess.run(check, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, (
        f"run `make messages`, then read the diff of tests/unit/messages.txt\n{ended.stdout}"
    )


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (
            'raise UserError(f"{path}: no such {kind.name}; " "give another")',
            ["{path}: no such {name}; give another"],
        ),
        ('echo("one file" if n == 1 else f"{n} files in all")', ["[one file|{n} files in all]"]),
        ('"a line of text" + hint', ["a line of text{hint}"]),
        ('x = "first line\\nsecond line"', ["first line", "second line"]),
        ('"""A docstring of a module."""\nassert x, "our own mistake"\nkey = "no_sentence"', []),
        ('@app.command()\ndef go():\n    """Start it\n    now."""', ["Start it now."]),
    ],
)
def test_a_sentence_is_collected_as_it_is_put_together(code: str, expected: list[str]) -> None:
    assert list(sentences(ast.parse(code))) == expected
