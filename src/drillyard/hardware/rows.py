"""Rows of YAML to frozen dataclasses: the types of the dataclass are the schema, for our data files and for users' own.

Nothing is coerced (a number in quotes is a mistake), keys that are not fields are mistakes, numbers must be above 0
unless their field's metadata says `zero`. Every mistake of a row is told, none stops the others.

The reader knows exactly the types that rows use: text, numbers, booleans, Literal, `X | None`, tuples of one type,
mappings and nested dataclasses. It is written here because a hundred rows must be read in milliseconds, without
importing pydantic.
"""

from __future__ import annotations

import dataclasses
import math
import re
import types
from collections.abc import Mapping
from dataclasses import MISSING, dataclass
from datetime import date
from functools import cache
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from drillyard.hardware.facts import CatalogRow, FactSource, Provenance

R = TypeVar("R", bound=CatalogRow)
Step = str | int
PROVENANCE_KEYS = ("source", "date", "unverified", "sources")
ISO_DATE = re.compile(r"\d{4}-\d{2}-\d{2}")


@dataclass(frozen=True, slots=True)
class RowMistake:
    """What is wrong with the value at `path`."""

    path: tuple[Step, ...]
    message: str


class _Refused(Exception):
    """A value was refused; the mistake is on the list already."""


def read_row(
    cls: type[R], raw: Any, path: tuple[Step, ...], known: Mapping[str, FactSource], own: FactSource | None = None
) -> tuple[R | None, list[RowMistake]]:
    """The row that `raw` describes, or None and what is wrong with it.

    `known` are the sources that a row may refer to by key. `own` is the source of a row of a user's file, which need
    not name one; without it a row must refer to a known source.
    """
    mistakes: list[RowMistake] = []
    if not isinstance(raw, dict):
        return None, [RowMistake(path, f"{_found(raw)}; a row is a mapping")]
    body = {key: value for key, value in raw.items() if key not in PROVENANCE_KEYS}
    try:
        values = _fields(cls, body, path, mistakes)
    except _Refused:
        values = {}
    provenance = _provenance(cls, raw, path, known, own, mistakes)
    if mistakes or provenance is None:
        return None, mistakes
    return cls(provenance=provenance, **values), []


@cache
def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


def _fields(cls: type, raw: Mapping[str, Any], path: tuple[Step, ...], mistakes: list[RowMistake]) -> dict[str, Any]:
    hints = _hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls) if field.name != "provenance"}
    values: dict[str, Any] = {}
    before = len(mistakes)
    for key, value in raw.items():
        if key not in fields:
            mistakes.append(RowMistake((*path, key), _unknown(str(key), [*fields, *PROVENANCE_KEYS])))
            continue
        zero = bool(fields[key].metadata.get("zero"))
        try:
            values[key] = _convert(hints[key], value, (*path, key), zero, mistakes)
        except _Refused:
            continue
    for name, field in fields.items():
        if name not in raw and field.default is MISSING and field.default_factory is MISSING:
            mistakes.append(RowMistake(path, f"'{name}' is missing; {_wanted(hints[name])} is needed"))
    if len(mistakes) > before:
        raise _Refused
    return values


def _convert(hint: Any, value: Any, path: tuple[Step, ...], zero: bool, mistakes: list[RowMistake]) -> Any:
    def refuse(message: str) -> _Refused:
        mistakes.append(RowMistake(path, message))
        return _Refused()

    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        if value is None:
            return None
        return _convert(next(kind for kind in arguments if kind is not types.NoneType), value, path, zero, mistakes)
    if origin is Literal:
        if value not in arguments:
            raise refuse(f"{_found(value)}; one of {', '.join(str(one) for one in arguments)} is needed")
        return value
    if origin is tuple:
        if not isinstance(value, list):
            raise refuse(f"{_found(value)}; a list is needed")
        return tuple(_convert(arguments[0], item, (*path, n), zero, mistakes) for n, item in enumerate(value))
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(value, dict):
            raise refuse(f"{_found(value)}; a mapping is needed")
        return {
            _key(arguments[0], key, path, mistakes): _convert(arguments[1], item, (*path, key), zero, mistakes)
            for key, item in value.items()
        }
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        if not isinstance(value, dict):
            raise refuse(f"{_found(value)}; a mapping is needed")
        return hint(**_fields(hint, value, path, mistakes))
    if hint in (int, float):
        fits = isinstance(value, int if hint is int else (int, float)) and not isinstance(value, bool)
        if not fits or not math.isfinite(value) or value < 0 or (value == 0 and not zero):
            raise refuse(f"{_found(value)}; {_wanted(hint)}{' or 0' if zero else ''} is needed")
        return hint(value)
    if not isinstance(value, hint):
        raise refuse(f"{_found(value)}; {_wanted(hint)} is needed")
    return value


def _key(hint: Any, key: Any, path: tuple[Step, ...], mistakes: list[RowMistake]) -> Any:
    """Keys of a mapping: a user's file has them as text, ours as YAML types them."""
    if hint is str:
        return str(key)
    if str(key).isdecimal():
        return int(key)
    mistakes.append(RowMistake((*path, key), "the key must be a whole number"))
    raise _Refused


def _provenance(
    cls: type,
    raw: Mapping[str, Any],
    path: tuple[Step, ...],
    known: Mapping[str, FactSource],
    own: FactSource | None,
    mistakes: list[RowMistake],
) -> Provenance | None:
    before = len(mistakes)
    default = _source(raw.get("source"), raw.get("date"), (*path, "source"), known, own, mistakes)
    by_field: dict[str, FactSource] = {}
    for name, given in _mapping(raw.get("sources"), (*path, "sources"), mistakes).items():
        _check_path(cls, name, (*path, "sources", name), mistakes)
        # The row's date is not that of a source which has one of its own.
        day = None if isinstance(given, str) and given in known else raw.get("date")
        source = _source(given, day, (*path, "sources", name), known, own, mistakes)
        if source is not None:
            by_field[name] = source
    doubted = raw.get("unverified", False)
    if doubted not in (True, False) and not isinstance(doubted, list):
        mistakes.append(RowMistake((*path, "unverified"), f"{_found(doubted)}; true or a list of fields is needed"))
    names = [str(name) for name in doubted] if isinstance(doubted, list) else []
    for name in names:
        _check_path(cls, name, (*path, "unverified"), mistakes)
    if len(mistakes) > before or default is None:
        return None
    if doubted is True:
        default = dataclasses.replace(default, unverified=True)
        by_field = {name: dataclasses.replace(source, unverified=True) for name, source in by_field.items()}
    return Provenance(default, by_field, frozenset(names))


def _source(
    text: Any,
    day: Any,
    path: tuple[Step, ...],
    known: Mapping[str, FactSource],
    own: FactSource | None,
    mistakes: list[RowMistake],
) -> FactSource | None:
    if isinstance(text, str) and text in known:
        source = known[text]
        return source if day is None else dataclasses.replace(source, date=_day(day, path, mistakes))
    if own is None:
        mistakes.append(RowMistake(path, f"{_found(text)}; a key of sources.yaml is needed"))
        return None
    if text is not None and not isinstance(text, str):
        mistakes.append(RowMistake(path, f"{_found(text)}; text that says where the values come from is needed"))
        return None
    told = own.text if text is None else f"{own.text}: {text}"
    return FactSource(told, None if day is None else _day(day, path, mistakes))


def _day(day: Any, path: tuple[Step, ...], mistakes: list[RowMistake]) -> str | None:
    text = str(day)
    try:
        if ISO_DATE.fullmatch(text):
            return date.fromisoformat(text).isoformat()
    except ValueError:
        pass
    mistakes.append(RowMistake((*path[:-1], "date"), f"found '{text}'; a day such as 2026-11-21 is needed"))
    return None


def _check_path(cls: type, name: str, path: tuple[Step, ...], mistakes: list[RowMistake]) -> None:
    fields = [field.name for field in dataclasses.fields(cls)]
    if name.split(".")[0] not in fields:
        mistakes.append(RowMistake(path, _unknown(name, fields)))


def _mapping(value: Any, path: tuple[Step, ...], mistakes: list[RowMistake]) -> Mapping[str, Any]:
    if value is None or isinstance(value, dict):
        return value or {}
    mistakes.append(RowMistake(path, f"{_found(value)}; a mapping of fields to sources is needed"))
    return {}


def _unknown(key: str, known: list[str]) -> str:
    from drillyard.config.problems import closest_name

    meant = closest_name(key, known)
    hint = (
        f"did you mean '{meant}'?"
        if meant
        else f"known are {', '.join(name for name in known if name != 'provenance')}"
    )
    return f"'{key}' is not known here; {hint}"


def _found(value: Any) -> str:
    from drillyard.config.validation_errors import describe_value

    return f"found {describe_value(value)}"


def _wanted(hint: Any) -> str:
    if get_origin(hint) in (Union, types.UnionType):
        hint = next(kind for kind in get_args(hint) if kind is not types.NoneType)
    if get_origin(hint) is Literal:
        return f"one of {', '.join(str(one) for one in get_args(hint))}"
    words = {int: "a whole number above 0", float: "a number above 0", str: "text", bool: "true or false"}
    return words.get(hint, "a mapping or a list")
