"""Facts about the options of the built-in sources: what is refused, and what the error says."""

from __future__ import annotations

import subprocess
import sys

import pytest

from drillyard.data.builtin import documents, validate_options
from drillyard.errors import UserError


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("text-to-sq", {}, "'text-to-sql'"),
        ("text-to-sql", {"example": 5}, "mean 'examples'"),
        ("text-to-sql", {"examples": 0}, "at least 1"),
        ("text-to-sql", {"examples": "many"}, "whole number"),
        ("text-to-sql", {"examples": True}, "whole number"),
        ("text-to-sql", {"seed": -1}, "at least 0"),
        ("text-to-sql", {"held_out": "questions"}, "takes a list"),
        ("text-to-sql", {"held_out": ["question"]}, "mean 'questions'"),
        ("text-to-sql", {"held_out": ["questions", "questions"]}, "different parts"),
        ("text-to-sql", {"made_up": 1.5}, "share from 0 to 1"),
        ("python-stdlib", {"seed": 1}, "takes no options"),
    ],
)
def test_a_wrong_option_is_an_error_that_says_what_is_allowed(
    name: str, options: dict[str, object], said: str
) -> None:
    with pytest.raises(UserError) as error:
        validate_options(name, options)
    assert said in str(error.value)


def test_an_unknown_part_is_an_error_before_the_first_row() -> None:
    with pytest.raises(UserError, match="mean 'databases'"):
        documents("text-to-sql", {}, "database")


def test_defaults_are_filled_in() -> None:
    assert validate_options("text-to-sql", {"seed": 3})["seed"] == 3
    assert validate_options("text-to-sql", {})["examples"] > 0


def test_torch_is_not_imported() -> None:
    code = "import sys, drillyard.data.builtin; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
