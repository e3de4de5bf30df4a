"""The part of a config that is right, so that its rules are checked beside its mistakes.

A value of the wrong type and an unknown key are left out, and with them what cannot be without: an
entry of a list that lacks a setting, a section. The rules of the rest then find their problems in
the same error; those about what was left out are dropped, as only the gap has made them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ValidationError

from drillyard.config.problems import Path, Problem
from drillyard.config.validation_errors import find_problems

Model = TypeVar("Model", bound=BaseModel)


@dataclass(frozen=True)
class PartialConfig(Generic[Model]):
    """The rest of a document, and the paths of what it does not have, also of keys that unknown
    ones meant."""

    config: Model
    left_out: tuple[Path, ...]

    def own(self, problems: Iterable[Problem]) -> Iterator[Problem]:
        """Those of the problems that the document has, at its own positions of lists."""
        for problem in problems:
            path = _in_document(problem.path, self.left_out)
            others = [_in_document(each, self.left_out) for each in problem.depends_on]
            concerned = (path, *others)
            if not any(_within(each, gone) for each in concerned for gone in self.left_out):
                yield replace(problem, path=path)


def partial_config(
    model: type[Model], value: dict[str, Any], stand_ins: Mapping[str, Any], context: Any
) -> PartialConfig[Model] | None:
    """The rest of a document that is not a `model`, without what `find_problems` finds.

    `stand_ins` are values for keys that every config must have. None where a model's own rules
    refuse the rest, or a key without a stand-in is missing.
    """
    left_out: set[Path] = set()
    meant: set[Path] = set()
    rest = value
    while problems := list(find_problems(model, rest)):
        found = [_in_document(each.path, left_out) for each in problems]
        meant |= {_in_document(path, left_out) for each in problems for path in each.depends_on}
        # What is missing takes with it the section that must have it.
        gone = {path if path[0] in stand_ins else _there(value, path, left_out) for path in found}
        if () in gone or gone <= left_out:
            return None
        left_out |= gone
        rest = {**stand_ins, **_without(value, (), left_out)}
    try:
        config = model.model_validate_json(json.dumps(rest), strict=True, context=context)
    except ValidationError:
        return None
    return PartialConfig(config, (*left_out, *meant))


def _without(value: Any, path: Path, left_out: set[Path]) -> Any:
    if isinstance(value, dict):
        return {
            key: _without(item, (*path, key), left_out)
            for key, item in value.items()
            if (*path, key) not in left_out
        }
    if isinstance(value, list):
        return [
            _without(item, (*path, index), left_out)
            for index, item in enumerate(value)
            if (*path, index) not in left_out
        ]
    return value


def _in_document(path: Path, left_out: Iterable[Path]) -> Path:
    """The path of the rest as one of the document, where entries before it are still there."""
    found: Path = ()
    for part in path:
        if isinstance(part, int):
            gone = [each[-1] for each in left_out if each[:-1] == found]
            for position in sorted(each for each in gone if isinstance(each, int)):
                part += position <= part
        found = (*found, part)
    return found


def _there(value: Any, path: Path, left_out: set[Path]) -> Path:
    """`path`, or where the rest has nothing there the section around it."""
    for part in path:
        try:
            value = value[part]
        except (KeyError, IndexError, TypeError):
            return path[:-1]
    return path[:-1] if path in left_out else path


def _within(path: Path, outer: Path) -> bool:
    return path[: len(outer)] == outer
