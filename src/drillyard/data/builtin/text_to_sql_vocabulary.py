"""Domains, values and templates of `builtin:text-to-sql`, from `text_to_sql_vocabulary.yaml`, which
explains them."""

from __future__ import annotations

import string
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from drillyard.packaged_yaml import read_packaged_yaml

COLUMN_SLOTS = "abcdlnxy"
VALUE_SLOTS = "vwujkhqprzig"


@dataclass(frozen=True)
class Domain:
    """A main table with a label (unique text), categories (repeating text) and numbers; and its
    table of events."""

    table: str
    role: Literal["train", "development", "test"]
    label: str
    categories: tuple[str, ...]
    numbers: tuple[str, ...]
    events: str
    key: str
    event_category: str
    event_numbers: tuple[str, ...]

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of the main table, without the key."""
        return (self.label, *self.categories, *self.numbers)

    @property
    def event_columns(self) -> tuple[str, ...]:
        """Columns of the event table, without the key."""
        return (self.event_category, *self.event_numbers)


@dataclass(frozen=True)
class Template:
    """One SQL pattern and the phrasings of its question."""

    name: str
    sql: str
    questions: tuple[str, ...]

    @cached_property
    def placeholders(self) -> frozenset[str]:
        """Names of all placeholders of the SQL."""
        return frozenset(field for _, field, _, _ in string.Formatter().parse(self.sql) if field)

    @cached_property
    def column_slots(self) -> tuple[str, ...]:
        """The column placeholders in a fixed order; their columns make the (template, columns)
        combination."""
        return tuple(slot for slot in COLUMN_SLOTS if slot in self.placeholders)

    @cached_property
    def value_slots(self) -> tuple[str, ...]:
        """The value placeholders, in an order in which each can be drawn from those before it."""
        return tuple(slot for slot in VALUE_SLOTS if slot in self.placeholders)

    @property
    def joins(self) -> bool:
        """Whether the SQL reads the event table."""
        return "e" in self.placeholders


def _tuples(values: dict[str, Any]) -> dict[str, Any]:
    return {
        key: tuple(value) if isinstance(value, list) else value for key, value in values.items()
    }


_data = read_packaged_yaml("drillyard.data.builtin", "text_to_sql_vocabulary.yaml")
DOMAINS = tuple(
    Domain(table=table, **_tuples(domain)) for table, domain in _data["domains"].items()
)
TEMPLATES = tuple(
    Template(name, sql, tuple(questions)) for name, (sql, *questions) in _data["templates"].items()
)
LABELS: tuple[str, ...] = tuple(_data["labels"])
EXTRA_CATEGORIES: dict[str, str] = _data["extra_categories"]
EXTRA_NUMBERS: tuple[str, ...] = tuple(_data["extra_numbers"])
CATEGORY_VALUES: dict[str, tuple[str, ...]] = _tuples(_data["category_values"])
CATEGORY_VALUES |= {name: CATEGORY_VALUES[like] for name, like in EXTRA_CATEGORIES.items()}
NUMBER_RANGES: dict[str, tuple[int, int, int]] = _tuples(_data["number_ranges"])
NUMBER_RANGES |= {name: (1, 999, 1) for name in EXTRA_NUMBERS}
