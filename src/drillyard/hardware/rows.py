"""Rows of YAML to models: the model is the schema, for our data files and for users' own.

A row says where its values come from by four keys beside its fields: `source` and `date` of the row, `sources` of
single fields, and `unverified`, true or a list of fields. They become the row's `Provenance`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from datetime import date
from typing import Annotated, Any, Final, TypeVar

from pydantic import AfterValidator, Field

from drillyard.hardware.facts import CatalogRow, FactSource, Provenance, Record

R = TypeVar("R", bound=CatalogRow)


def _calendar_day(text: str) -> str:
    return date.fromisoformat(text).isoformat()


class Citations(Record):
    """What a row says about the sources of its values."""

    source: str | None = None
    date: Annotated[str, AfterValidator(_calendar_day)] | None = Field(
        default=None, pattern=r"^\d{4}-\d{2}-\d{2}$", description="A day such as 2026-11-21."
    )
    unverified: bool | list[str] = False
    sources: dict[str, str] = Field(default={})


PROVENANCE_KEYS: Final = tuple(Citations.model_fields)


def split_row(raw: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fields of a row, and what it says about their sources."""
    cited = {key: raw[key] for key in PROVENANCE_KEYS if key in raw}
    return {key: value for key, value in raw.items() if key not in cited}, cited


def read_row(cls: type[R], raw: Mapping[str, Any], known: Mapping[str, FactSource], own: FactSource | None = None) -> R:
    """The row that `raw` describes.

    `known` are the sources that a row may refer to by key. `own` is the source of a row of a user's file, which need
    not name one; without it a row must refer to a known source, else KeyError. Raises pydantic.ValidationError.
    """
    fields, cited = split_row(raw)
    # Dates of our files are dates already; keys of mappings are text in JSON, as they are in a user's file.
    citations = Citations.model_validate_json(json.dumps(cited, default=str))
    return cls.model_validate_json(json.dumps(fields), context=_provenance(citations, known, own))


def _provenance(citations: Citations, known: Mapping[str, FactSource], own: FactSource | None) -> Provenance:
    default = _source(citations.source, citations.date, known, own)
    by_field = {
        # The row's date is not that of a source which has one of its own.
        name: _source(text, None if text in known else citations.date, known, own)
        for name, text in citations.sources.items()
    }
    if citations.unverified is True:
        default = dataclasses.replace(default, unverified=True)
        by_field = {name: dataclasses.replace(source, unverified=True) for name, source in by_field.items()}
    unverified = citations.unverified if isinstance(citations.unverified, list) else []
    return Provenance(default, by_field, frozenset(unverified))


def _source(text: str | None, day: str | None, known: Mapping[str, FactSource], own: FactSource | None) -> FactSource:
    if text in known or own is None:
        source = known[text or ""]
        return source if day is None else dataclasses.replace(source, date=day)
    return FactSource(own.text if text is None else f"{own.text}: {text}", day)
