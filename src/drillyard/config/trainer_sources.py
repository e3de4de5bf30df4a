"""Data sources of other trainers' configs as `data.source`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from drillyard.config.trainer_rules import local_path
from drillyard.config.trainer_table import ConvertedConfig, TrainerFile

NO_SOURCE = "documents.jsonl"


@dataclass(frozen=True)
class Source:
    """One data set; `key`: where the file names it."""

    path: Any
    key: str
    split: str = "train"
    options: dict[str, Any] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)


def write_sources(
    file: TrainerFile, found: ConvertedConfig, sources: list[Source], setting: str
) -> None:
    """Write them as `setting`; without any, a placeholder that is reported."""
    rows: list[Any] = []
    for source in sources:
        path = local_path(file, found, source.path, source.key)
        row = {"path": path} | ({"split": source.split} if source.split != "train" else {})
        row |= source.more | ({"options": source.options} if source.options else {})
        rows.append(row)
    if not rows:
        found.put(setting, NO_SOURCE)
        found.leave_out(setting, f"is not in the file; set it in place of {NO_SOURCE}")
    elif len(rows) == 1:
        found.put(setting, rows[0]["path"] if rows[0].keys() == {"path"} else rows[0])
    else:
        found.put(setting, rows)
