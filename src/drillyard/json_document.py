"""Documents that programs read, such as `drillyard estimate --json`: the models whose schema
`drillyard schema` prints.

The models are the contract with those programs. Within one `version` of a document fields may be
added; none is renamed, removed or given another meaning. A field is read from the attribute of its
name, or from that of `read_from`.
"""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import AliasPath, BaseModel, ConfigDict, Field, WithJsonSchema

Number = Annotated[int | float, WithJsonSchema({"type": "number"})]
"""A whole number is printed without a point."""


def read_from(path: str, description: str | None = None) -> Any:
    """A field that is read from the attribute at `path`."""
    return Field(validation_alias=AliasPath(*path.split(".")), description=description)


class DocumentPart(BaseModel):
    """Part of the document. It has exactly the fields described; the schema lets readers accept
    fields added later."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        from_attributes=True,
        populate_by_name=True,
        json_schema_extra=lambda schema: schema.pop("additionalProperties"),
    )

    def as_text(self) -> str:
        return json.dumps(self.model_dump(), indent=2, ensure_ascii=False, allow_nan=False)


class FactEntry(DocumentPart):
    """A value with its sources."""

    value: Number
    source: str
    date: str | None
    unverified: bool


class QuotaEntry(DocumentPart):
    """Amount that the cluster counts against a quota of its cloud."""

    metric: str
    region: str | None
    amount: int
    unit: str
    reason: str
    dimensions: dict[str, str]
    source: str = read_from("source.text")
