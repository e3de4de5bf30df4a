"""What each key of another trainer's config is here: one table per tool, in `trainer_tables/`.

A row says the setting of ours, or that there is none and why, and the tool's default. `TrainerFile`
is a config read with its table: an empty key is its default, a key under an older name is known by
the newer one, and what no rule takes is reported, so that nothing is dropped in silence.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from drillyard.config.problems import closest_name
from drillyard.packaged_yaml import read_packaged_yaml

TOOLS = ("axolotl", "trl", "deepspeed", "llamafactory")
EMPTY: tuple[Any, ...] = (None, "", [], {})


@dataclass(frozen=True)
class TrainerKey:
    """A key of a tool. `ours`: the setting it becomes, `how`: where it is not moved as it is;
    `why`: the reason where there is none, or, with `refused`, that all of the file is refused."""

    default: Any = None
    ours: str | None = None
    how: str | None = None
    why: str | None = None
    refused: bool = False


@dataclass(frozen=True)
class TrainerTable:
    """All keys of a tool; nested ones with dots, those of a list's rows with `[].`. `aliases`:
    older names. `other_versions`: keys that `version` does not have, and older or newer ones do."""

    name: str
    package: str
    version: str
    keys: dict[str, TrainerKey]
    aliases: dict[str, str]
    other_versions: frozenset[str]

    def rows_of(self, name: str) -> dict[str, TrainerKey]:
        """The keys of the rows of the list `name`, without the part before them."""
        return {
            key.removeprefix(f"{name}[]."): row
            for key, row in self.keys.items()
            if key.startswith(f"{name}[].")
        }


@cache
def table_of(tool: str) -> TrainerTable:
    """The table of one of `TOOLS`."""
    content = read_packaged_yaml("drillyard.config", f"trainer_tables/{tool}.yaml")
    keys: dict[str, TrainerKey] = {}
    aliases: dict[str, str] = {}
    older: set[str] = set()
    if included := content.get("includes"):
        shared = table_of(included.removesuffix(".yaml"))
        keys, aliases, older = dict(shared.keys), dict(shared.aliases), set(shared.other_versions)
    for group in content["none"]:
        keys |= {
            key: TrainerKey(default=value, why=group["why"]) for key, value in group["keys"].items()
        }
    keys |= {
        key: TrainerKey(**row, refused=True) for key, row in content.get("refused", {}).items()
    }
    keys |= {key: TrainerKey(**row) for key, row in content["taken"].items()}
    return TrainerTable(
        content["name"],
        content["package"],
        str(content["version"]),
        keys,
        aliases | content["aliases"],
        frozenset(older | set(content.get("other_versions", ()))),
    )


@dataclass
class ConvertedConfig:
    """Settings of a run config, nested, and what had no place in it: (key, reason)."""

    settings: dict[str, Any] = field(default_factory=dict)
    left_out: list[tuple[str, str]] = field(default_factory=list)

    def put(self, path: str, value: Any) -> None:
        """Set the setting at a dotted path."""
        *sections, last = path.split(".")
        place = self.settings
        for name in sections:
            place = place.setdefault(name, {})
        place[last] = value

    def get(self, path: str) -> Any:
        """The setting at a dotted path, or None."""
        found: Any = self.settings
        for name in path.split("."):
            found = found.get(name) if isinstance(found, dict) else None
        return found

    def leave_out(self, key: str, reason: str) -> None:
        """Report a key of the file, or a setting, with what is done instead."""
        self.left_out.append((key, reason))


class TrainerFile:
    """A config of another trainer: the values of its keys, and which of them a rule has taken."""

    def __init__(self, tool: str, content: Mapping[str, Any], path: Path) -> None:
        self.tool = tool
        self.table = table_of(tool)
        self.path = path
        self.values: dict[str, Any] = {}
        self._spelled: dict[str, str] = {}
        self._taken: dict[str, None] = {}
        for name, value in content.items():
            key = self.table.aliases.get(name, name)
            if value in EMPTY or (key != name and content.get(key) not in EMPTY):
                continue
            row = self.table.keys.get(key)
            is_switch = row is not None and isinstance(row.default, bool)
            self.values[key] = _as_switch(value) if is_switch else as_number(value)
            self._spelled[key] = name

    def has(self, key: str) -> bool:
        """Whether the file says something for this key."""
        return key in self.values

    def is_left(self, key: str) -> bool:
        """Whether the file says something for this key that no rule has taken."""
        return key in self.values and key not in self._taken

    def last_taken(self) -> list[str]:
        """The keys of the file that were taken last, for messages: two at most."""
        return [self.spelled(key) for key in self._taken if key in self.values][-2:]

    def spelled(self, key: str) -> str:
        """The key as the file writes it."""
        return self._spelled.get(key, key)

    def default(self, key: str) -> Any:
        """What the tool takes where the file says nothing."""
        return self.table.keys[key].default

    def take(self, key: str) -> Any:
        """The value of a key, or the tool's default; it counts as taken over."""
        self._taken[key] = None
        return self.value(key)

    def value(self, key: str) -> Any:
        """The value of a key, or the tool's default."""
        return self.values.get(key, self.default(key) if key in self.table.keys else None)

    def move(self, key: str, found: ConvertedConfig, path: str | None = None) -> None:
        """Write the value of `key`, or the tool's default, as a setting of ours."""
        ours = path or self.table.keys[key].ours
        assert ours is not None
        put_value(found, ours, self.take(key), self.spelled(key))

    def finish(self, found: ConvertedConfig) -> None:
        """Move every key that needs no rule, and report every other that none has taken."""
        for key, row in self.table.keys.items():
            is_moved = row.ours is not None and row.how is None and "." not in key
            if is_moved and key not in self._taken:
                self.move(key, found)
        for key in filter(self.is_left, self.values):
            self._report(key, found)

    def _report(self, key: str, found: ConvertedConfig) -> None:
        value, row = self.values[key], self.table.keys.get(key)
        if row is None:
            found.leave_out(self.spelled(key), self.unknown(key))
        elif row.why is not None and value != row.default and (value or row.default):
            found.leave_out(self.spelled(key), row.why)

    def unknown(self, key: str, known: Mapping[str, Any] | None = None) -> str:
        """What is said of a key that the tool does not have."""
        near = closest_name(key, [*(self.table.keys if known is None else known)])
        asked = f"; is {near} meant?" if near else ""
        return f"is not a key of {self.table.name} {self.table.version}{asked}"


def put_value(found: ConvertedConfig, path: str, value: Any, key: str) -> None:
    """Write `value` at `path`; `key` is named where no setting can have it."""
    if value == "auto":
        found.leave_out(key, f"is auto, decided elsewhere; set {path}")
    elif path.endswith("every_steps") and isinstance(value, float) and 0 < value < 1:
        found.leave_out(key, f"is a share of all steps; set {path}")
    elif path == "training.gradient_clipping" and value == 0:
        found.put(path, None)
    elif value not in EMPTY:
        found.put(path, value)


def as_number(value: Any) -> Any:
    """Numbers that a file has as text, and whole ones with a decimal point, as numbers."""
    if isinstance(value, str):
        try:
            value = float(value) if re.search("[.eE]", value) else int(value)
        except ValueError:
            return value
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _as_switch(value: Any) -> Any:
    return (
        {"true": True, "false": False}.get(value.lower(), value)
        if isinstance(value, str)
        else value
    )


def nested_keys(content: Mapping[str, Any], sections: frozenset[str]) -> Iterator[tuple[str, Any]]:
    """Keys of `sections` with dots, all others as they are."""
    for key, value in content.items():
        if key in sections and isinstance(value, Mapping):
            for inner, inner_value in value.items():
                yield from nested_keys({f"{key}.{inner}": inner_value}, sections)
        else:
            yield key, value
