"""Facts: values that carry where they come from, and whether a primary source confirms them.

A row of a data file is a frozen pydantic model. Its attributes are plain values for arithmetic;
`row.fact("memory_gib")` gives the same value as a `Fact` with source, date and `unverified`. Arithmetic on facts keeps
their sources, so a result of an unverified value is unverified.

Limits: comparisons look at values through `.value`; there is no algebra of units, units are part of field names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, Generic, Self, TypeVar

from pydantic import BaseModel, ConfigDict, PrivateAttr

T = TypeVar("T")
Number = int | float


@dataclass(frozen=True, slots=True)
class FactSource:
    """Where a value was read. `date` (ISO) is when it was read or published; None for a user's own file without one."""

    text: str
    date: str | None
    unverified: bool = False


@dataclass(frozen=True, slots=True)
class Fact(Generic[T]):
    """A value and everything it rests on."""

    value: T
    sources: tuple[FactSource, ...]

    @property
    def unverified(self) -> bool:
        """Whether it rests on a derivation or on a source that nothing confirms: say so wherever it is shown."""
        return any(source.unverified for source in self.sources)

    @property
    def source(self) -> str:
        """The sources in words, in the order in which they were combined."""
        return "; ".join(dict.fromkeys(source.text for source in self.sources))

    @property
    def date(self) -> str | None:
        """The oldest date among the sources: the fact is at most as fresh as that."""
        return min((source.date for source in self.sources if source.date is not None), default=None)

    def __add__(self: Fact[float], other: Fact[float] | Number) -> Fact[float]:
        return combine(self.value + _value(other), self, other)

    def __radd__(self: Fact[float], other: Number) -> Fact[float]:
        return combine(other + self.value, self)

    def __sub__(self: Fact[float], other: Fact[float] | Number) -> Fact[float]:
        return combine(self.value - _value(other), self, other)

    def __rsub__(self: Fact[float], other: Number) -> Fact[float]:
        return combine(other - self.value, self)

    def __mul__(self: Fact[float], other: Fact[float] | Number) -> Fact[float]:
        return combine(self.value * _value(other), self, other)

    def __rmul__(self: Fact[float], other: Number) -> Fact[float]:
        return combine(other * self.value, self)

    def __truediv__(self: Fact[float], other: Fact[float] | Number) -> Fact[float]:
        return combine(self.value / _value(other), self, other)

    def __rtruediv__(self: Fact[float], other: Number) -> Fact[float]:
        return combine(other / self.value, self)

    def as_json(self) -> dict[str, Any]:
        """`{"value": ..., "source": ..., "date": ..., "unverified": ...}`."""
        return {"value": self.value, "source": self.source, "date": self.date, "unverified": self.unverified}


def combine(value: T, *parts: Fact[Any] | Number) -> Fact[T]:
    """`value` as a fact that rests on `parts`; numbers among them bring no source."""
    sources = [source for part in parts if isinstance(part, Fact) for source in part.sources]
    return Fact(value, tuple(dict.fromkeys(sources)))


def total(facts: Iterable[Fact[float]]) -> Fact[float]:
    """The sum of `facts`; 0 without any source when there are none."""
    return reduce(lambda left, right: left + right, facts, Fact(0.0, ()))


def _value(part: Fact[float] | Number) -> float:
    return part.value if isinstance(part, Fact) else part


@dataclass(frozen=True, slots=True)
class Provenance:
    """The sources of one row: one for the row, others for single fields, and which fields nothing primary confirms.

    A field is named by its path: `peak_tflops` or, for one value of a mapping, `peak_tflops.fp8`. What holds for a path
    holds for everything below it.
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
    """A group of values in a row. Unknown keys are refused and nothing is coerced: a number in quotes is a mistake."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class CatalogRow(Record):
    """The base of every row: its fields are plain values, `fact` gives one of them with its source."""

    _provenance: Provenance = PrivateAttr()

    def model_post_init(self, context: Any, /) -> None:
        """`context` of the validation is the row's provenance; it never comes from the values of a file."""
        assert isinstance(context, Provenance), "make rows by `create` or `read_row`"
        self._provenance = context

    @classmethod
    def create(cls, provenance: Provenance, **values: Any) -> Self:
        """A row of these values, with where they come from."""
        return cls.model_validate(values, context=provenance)

    @property
    def provenance(self) -> Provenance:
        """The sources of the row."""
        return self._provenance

    def fact(self, path: str) -> Fact[Any]:
        """The value at `path` (`memory_gib`, `peak_tflops.bf16`, `data_nics.count`) with its source and date.

        Raises AttributeError or KeyError for a path that the row does not have; an unknown value is None.
        """
        value: Any = self
        for step in path.split("."):
            value = value[step] if isinstance(value, Mapping) else getattr(value, step)
        return Fact(value, (self.provenance.of(path),))
