"""The base of every config model: unknown keys refused, values never changed, secrets never shown.

Defaults obey the constraints of users' values. References to the environment are resolved while
validating and restored while serialising (`environment.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    field_serializer,
    field_validator,
)
from pydantic.fields import FieldInfo

from drillyard.allowed_values import Allowed
from drillyard.config.environment import hide_secrets, resolve_secrets
from drillyard.config.problems import Path, SourceLocation


@dataclass(frozen=True)
class FileMark:
    """Marks a setting whose texts are files of this machine (`local_files.py`).

    `may_be_name`: a text may also be a name that is not a file, such as an id of the hub. `words`:
    texts that are never files.
    """

    may_be_name: bool = False
    words: tuple[str, ...] = ()


LocalFile = Annotated[str, FileMark(words=("none",))]
"""A file of the machine that reads the config. A relative one is relative to the config's directory
(`local_files.py` makes it absolute), so the config works from every directory. `none` is OpenSSH's
word for no file."""
NamedFile = Annotated[str, FileMark(may_be_name=True)]
"""A file or directory of this machine, beside the config or in the working directory, or a name."""
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Count = Annotated[int, Field(ge=0)]
VariableName = Annotated[
    str,
    Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$"),
    Allowed("the name of a variable: letters, digits and '_', not beginning with a digit"),
]
"""An environment variable."""


def file_mark(field: FieldInfo) -> FileMark | None:
    """The mark of a setting, which may be left out; None where it is not a file."""
    kinds = [field, *(get_args(field.annotation))]
    marks = [mark for kind in kinds for mark in getattr(kind, "metadata", ())]
    marks += [mark for kind in kinds for mark in getattr(kind, "__metadata__", ())]
    return next((mark for mark in marks if isinstance(mark, FileMark)), None)


class ConfigOrigin:
    """Location of each value of a loaded config. Never part of the config's value: all origins are
    equal."""

    def __init__(self, places: Mapping[Path, SourceLocation] | None = None) -> None:
        self.places = places

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ConfigOrigin)

    def __hash__(self) -> int:
        return 0


class StrictModel(BaseModel):
    """A model that refuses keys it does not know: a mistyped setting is never silently ignored."""

    model_config = ConfigDict(
        extra="forbid", validate_default=True, frozen=True, allow_inf_nan=False
    )

    _origin: ConfigOrigin = PrivateAttr(default_factory=ConfigOrigin)

    @field_validator("*", mode="after")
    @classmethod
    def _resolve_secrets(cls, value: Any, info: ValidationInfo) -> Any:
        if info.context is not None and not info.context["resolve_environment"]:
            return value
        return resolve_secrets(value)

    @field_validator("*", mode="after")
    @classmethod
    def _refuse_infinite(cls, value: Any) -> Any:
        """Also inside of values of any kind, which `allow_inf_nan` does not reach and JSON cannot
        write."""
        if not _is_finite(value):
            raise ValueError("not all of its numbers are finite")
        return value

    @field_serializer("*", mode="wrap")
    def _hide_secrets(self, value: Any, handler: SerializerFunctionWrapHandler) -> Any:
        return handler(hide_secrets(value))


def _is_finite(value: Any) -> bool:
    """Whether all numbers in nested mappings and lists are."""
    if isinstance(value, dict | list):
        return all(map(_is_finite, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, float) or math.isfinite(value)
