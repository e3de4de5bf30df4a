"""Data sources of other trainers' configs as `data.source`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from drillyard.config.trainer_rules import local_path
from drillyard.config.trainer_table import ConvertedConfig, TrainerFile

NO_SOURCE = "documents.jsonl"


@dataclass(frozen=True)
class Source:
    """One data set; `key`: where the file names it, or empty where `path` is not of the file."""

    path: Any
    key: str
    split: str = "train"
    options: dict[str, Any] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)


def write_sources(
    file: TrainerFile, found: ConvertedConfig, sources: list[Source], setting: str
) -> None:
    """Write them as `setting`; without any, a placeholder that is reported."""
    rows: list[dict[str, Any]] = []
    for source in sources:
        path = local_path(file, found, source.path, source.key) if source.key else source.path
        row = {"path": path} | ({"split": source.split} if source.split != "train" else {})
        row |= source.more | ({"options": source.options} if source.options else {})
        rows.append(row)
    _name_apart(rows)
    if not rows:
        found.put(setting, NO_SOURCE)
        found.leave_out(setting, f"is not in the file; set it in place of {NO_SOURCE}")
    elif len(rows) == 1:
        found.put(setting, rows[0]["path"] if rows[0].keys() == {"path"} else rows[0])
    else:
        found.put(setting, rows)


def _name_apart(rows: list[dict[str, Any]]) -> None:
    """Names for sources that would have the same one: with their split and configuration."""
    names = [PurePath(str(row["path"])).name for row in rows]
    for number, (row, name) in enumerate(zip(rows, names, strict=True)):
        if names.count(name) > 1:
            parts = [name, row.get("options", {}).get("name"), row.get("split")]
            row["name"] = "-".join([*filter(None, parts), str(number + 1)])
