"""Facts: values with their sources, dates, and whether a primary source confirms them; and the rows
that hold them.

A row of a data file is a frozen pydantic model, which is also the schema of users' files. Its
attributes are plain values; `row.fact("memory_gib")` gives a `Fact`. Arithmetic on facts keeps
their sources, so a result of an unverified value is unverified. Units are part of field names.

Four keys of a row give its sources: `source` and `date` of the row, `sources` of single fields, and
`unverified`, true or a list of fields.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date
from typing import Annotated, Any, Final, Generic, Self, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PrivateAttr

from drillyard.allowed_values import Allowed

T = TypeVar("T")
R = TypeVar("R", bound="CatalogRow")
Number = int | float


@dataclass(frozen=True, slots=True)
class FactSource:
    """Source of a value, and the ISO date on which it was read or published; None where a user's
    file has none."""

    text: str
    date: str | None
    unverified: bool = False


@dataclass(frozen=True, slots=True)
class Fact(Generic[T]):
    """A value and its sources."""

    value: T
    sources: tuple[FactSource, ...]

    @property
    def unverified(self) -> bool:
        """Whether a source is a derivation or unconfirmed; every output shows that."""
        return any(source.unverified for source in self.sources)

    @property
    def source(self) -> str:
        """The texts of the sources, in the order in which they were combined."""
        return "; ".join(dict.fromkeys(source.text for source in self.sources))

    @property
    def date(self) -> str | None:
        """The oldest date among the sources."""
        return min(
            (source.date for source in self.sources if source.date is not None), default=None
        )

    def __add__(self: Fact[float], other: Fact[float] | Number) -> Fact[float]:
        return combine(self.value + _value(other), self, other)

    def __sub__(self: Fact[float], other: Fact[float] | Number) -> Fact[float]:
        return combine(self.value - _value(other), self, other)

    def __mul__(self: Fact[float], other: Fact[float] | Number) -> Fact[float]:
        return combine(self.value * _value(other), self, other)

    def __truediv__(self: Fact[float], other: Fact[float] | Number) -> Fact[float]:
        return combine(self.value / _value(other), self, other)

    def __rtruediv__(self: Fact[float], other: Number) -> Fact[float]:
        return combine(other / self.value, self)

    def as_json(self) -> dict[str, Any]:
        """`{"value": ..., "source": ..., "date": ..., "unverified": ...}`."""
        return {
            "value": self.value,
            "source": self.source,
            "date": self.date,
            "unverified": self.unverified,
        }


def combine(value: T, *parts: Fact[Any] | FactSource | Number) -> Fact[T]:
    """`value` as a fact with the sources of `parts`; numbers have none."""
    sources: list[FactSource] = []
    for part in parts:
        if isinstance(part, Fact):
            sources += part.sources
        elif isinstance(part, FactSource):
            sources.append(part)
    return Fact(value, tuple(dict.fromkeys(sources)))


def _value(part: Fact[float] | Number) -> float:
    return part.value if isinstance(part, Fact) else part


@dataclass(frozen=True, slots=True)
class Provenance:
    """The sources of a row and of single fields, and the unverified fields.

    A field is named by its path: `peak_tflops` or, for one value of a mapping, `peak_tflops.fp8`. A
    source of a path is that of everything below it.
    """

    row: FactSource
    by_field: Mapping[str, FactSource] = field(default_factory=dict)
    unverified: frozenset[str] = frozenset()

    def of(self, path: str) -> FactSource:
        """The source of the value at `path`."""
        lineage = [path.rsplit(".", cut)[0] for cut in range(path.count(".") + 1)]
        source = next((self.by_field[step] for step in lineage if step in self.by_field), self.row)
        doubted = source.unverified or any(step in self.unverified for step in lineage)
        return FactSource(source.text, source.date, doubted)


class Record(BaseModel):
    """A group of values in a row. Unknown keys are refused and values are not coerced: a quoted
    number is a mistake."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class CatalogRow(Record):
    """The base of every row: fields are plain values, `fact` gives one of them with its source."""

    _provenance: Provenance = PrivateAttr()

    def model_post_init(self, context: Any, /) -> None:
        """Take the row's provenance, which is the `context` of the validation."""
        assert isinstance(context, Provenance), "make rows by `create` or `read_row`"
        self._provenance = context

    @classmethod
    def create(cls, provenance: Provenance, **values: Any) -> Self:
        """A row of these values and their sources."""
        return cls.model_validate(values, context=provenance)

    @property
    def provenance(self) -> Provenance:
        """The sources of the row."""
        return self._provenance

    def fact(self, path: str) -> Fact[Any]:
        """The value at `path` (`memory_gib`, `peak_tflops.bf16`, `data_nics.count`) with its source
        and date.

        Raises AttributeError or KeyError for a path that the row does not have; an unknown value is
        None.
        """
        value: Any = self
        for step in path.split("."):
            value = value[step] if isinstance(value, Mapping) else getattr(value, step)
        return Fact(value, (self.provenance.of(path),))


def _calendar_day(text: str) -> str:
    return date.fromisoformat(text).isoformat()


Day = Annotated[
    str,
    Field(pattern=r"^\d{4}-\d{2}-\d{2}$"),
    AfterValidator(_calendar_day),
    Allowed("a day such as 2026-11-21"),
]


class Citations(Record):
    """The keys of a row that give the sources of its values."""

    source: str | None = None
    date: Day | None = None
    unverified: bool | list[str] = False
    sources: dict[str, str] = Field(default={})


PROVENANCE_KEYS: Final = tuple(Citations.model_fields)


def split_row(raw: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fields of a row, and its citations."""
    cited = {key: raw[key] for key in PROVENANCE_KEYS if key in raw}
    return {key: value for key, value in raw.items() if key not in cited}, cited


def read_row(
    cls: type[R],
    raw: Mapping[str, Any],
    known: Mapping[str, FactSource],
    own: FactSource | None = None,
) -> R:
    """The row in `raw`. Raises pydantic.ValidationError, and KeyError for an unknown source of a
    packaged row.

    `known` are the sources that rows refer to by key. `own` is the user's file, the source of rows
    that name none.
    """
    fields, cited = split_row(raw)
    # Packaged YAML has dates and integer keys; in JSON both are text, as in a user's file.
    citations = Citations.model_validate_json(json.dumps(cited, default=str))
    return cls.model_validate_json(json.dumps(fields), context=_provenance(citations, known, own))


def _provenance(
    citations: Citations, known: Mapping[str, FactSource], own: FactSource | None
) -> Provenance:
    default = _source(citations.source, citations.date, known, own)
    by_field = {
        # A known source keeps its own date.
        name: _source(text, None if text in known else citations.date, known, own)
        for name, text in citations.sources.items()
    }
    if citations.unverified is True:
        default = dataclasses.replace(default, unverified=True)
        by_field = {
            name: dataclasses.replace(source, unverified=True) for name, source in by_field.items()
        }
    unverified = citations.unverified if isinstance(citations.unverified, list) else []
    return Provenance(default, by_field, frozenset(unverified))


def _source(
    text: str | None, day: str | None, known: Mapping[str, FactSource], own: FactSource | None
) -> FactSource:
    if text in known or own is None:
        source = known[text or ""]
        return source if day is None else dataclasses.replace(source, date=day)
    return FactSource(own.text if text is None else f"{own.text}: {text}", day)


def cited(row: CatalogRow, path: str) -> str:
    """The source of a fact with its date. Machine names contain dots, so a path is looked up from
    its first part."""
    source = row.provenance.of(path)
    return f"{source.text}, {source.date}{' (unverified)' if source.unverified else ''}"
