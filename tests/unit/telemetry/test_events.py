"""Every event that any source file writes is in the vocabulary, and the vocabulary's table tells of
every event."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import get_args

import pytest

import drillyard
from drillyard.telemetry import events, runlog

SOURCE = Path(drillyard.__file__).parent
WRITERS = {"event", "on_event", "append_event"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def called_name(call: ast.Call) -> str:
    """The last part of what is called, without a leading underscore: `self._on_event(...)` is
    `on_event`."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    return name.lstrip("_")


def calls_in(tree: ast.AST) -> list[ast.Call]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call)]


def first_arguments(calls: list[ast.Call], writers: set[str]) -> Iterator[ast.expr]:
    for call in calls:
        if called_name(call) in writers:
            # append_event(run_directory, name, ...) has its name second.
            yield from call.args[called_name(call) == "append_event" :][:1]


def forwarders(functions: list[tuple[Function, list[ast.Call]]], writers: set[str]) -> set[str]:
    """Functions that hand their first parameter on as an event's name, such as a checkpointer's
    `_tell`."""
    found = set()
    for function, calls in functions:
        parameters = [argument.arg for argument in function.args.args if argument.arg != "self"]
        handed_on = {
            argument.id
            for argument in first_arguments(calls, writers)
            if isinstance(argument, ast.Name)
        }
        if parameters[:1] and parameters[0] in handed_on:
            found.add(function.name.lstrip("_"))
    return found


def literals(expression: ast.expr) -> Iterator[str]:
    """The texts that an expression may be: itself, or either side of a condition."""
    if isinstance(expression, ast.IfExp):
        yield from literals(expression.body)
        yield from literals(expression.orelse)
    elif isinstance(expression, ast.Constant) and isinstance(expression.value, str):
        yield expression.value


def written(programs: list[str]) -> set[str]:
    writers = set(WRITERS)
    while True:
        trees = [parsed(text) for text in programs if any(name in text for name in writers)]
        new = forwarders([each for _, functions in trees for each in functions], writers) - writers
        if not new:
            break
        writers |= new
    arguments = (argument for calls, _ in trees for argument in first_arguments(calls, writers))
    return {name for argument in arguments for name in literals(argument)}


@cache
def parsed(program: str) -> tuple[list[ast.Call], list[tuple[Function, list[ast.Call]]]]:
    """The calls of a program, and its functions with theirs."""
    tree = ast.parse(program)
    functions = [node for node in ast.walk(tree) if isinstance(node, Function)]
    return calls_in(tree), [(each, calls_in(each)) for each in functions]


def table() -> set[str]:
    """The names in the first column of the module's table."""
    rows = re.findall(r"^\| ([a-z_, ]+) \|", events.__doc__ or "", flags=re.MULTILINE)
    return {name for row in rows for name in row.split(", ")} - {"event"}


@pytest.fixture(scope="module")
def names() -> set[str]:
    sources = written([path.read_text(encoding="utf-8") for path in SOURCE.rglob("*.py")])
    return sources | {f"{span}_{end}" for span in get_args(runlog.Span) for end in ("begin", "end")}


def test_every_event_that_is_written_is_in_the_vocabulary(names: set[str]) -> None:
    assert names - set(get_args(events.EventName)) == set()
    assert {"run_start", "resume", "checkpoint_begin", "failure", "restart", "end"} <= names, (
        "the search finds events"
    )


def test_the_table_tells_of_every_event_and_of_no_other() -> None:
    assert table() == set(get_args(events.EventName))


def test_the_search_sees_names_behind_wrappers_and_conditions() -> None:
    program = """
class Saver:
    def _tell(self, event, step):
        self._on_event(event, step=step)
    def report(self, name):
        self._tell(name, 1)
    def save(self, log):
        self._tell("behind", 1)
        self.report("far behind")
        log.event("a" if log else "b")
        log.other("not one")
        append_event(directory, "appended")
"""
    assert written([program]) == {"behind", "far behind", "a", "b", "appended"}
