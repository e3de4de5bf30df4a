"""The record of a run's data in its run directory, which later attempts compare with the data they
find.

`data.json` has the content key of every source with the hash of each of its files, the key of the
tokenizer, and the fingerprint of the sample order. An attempt compares before it tokenises: changed
data are named and refused, because they would give other samples in another order. Missing data do
not stop a run whose tokenised cache is intact: the cache has all that training reads, under the
content key in the record.

The checkpoint's copy of the fingerprint is compared when it is loaded (training/resume.py), so a
run directory without this file, or on another host, is protected too; only the names are missing
there.
"""

from __future__ import annotations

import datetime
import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from drillyard.config.problems import shown_address
from drillyard.data import DATA_RECORD
from drillyard.data.sources import DataSource, SourceContents
from drillyard.errors import UserError
from drillyard.formatting import first_few
from drillyard.guarded_files import read_json
from drillyard.redaction import redact
from drillyard.safe_files import replace_file

RECORDED_FILES = 10_000
"""A source of more files is recorded by its key alone: a change is detected, but no file is
named."""
_NAMED = 3
CHANGED_DATA_ADVICE = (
    "To continue would train on other samples in another order: undo the change, or start under"
    " another `name`"
)


@dataclass(frozen=True)
class DataRecord:
    """The data of a run: contents of training and held-out sources by name, tokenizer, sample
    order, and the day that its chat template sees, if that has a clock."""

    fingerprint: str
    tokenizer: str
    training: dict[str, SourceContents] = field(default_factory=dict)
    held_out: dict[str, SourceContents] = field(default_factory=dict)
    date: str | None = None


def read_record(run_directory: Path) -> DataRecord | None:
    """The record of a run's data; None if there is none, or it cannot be read."""
    try:
        content = read_json(run_directory / DATA_RECORD)
        parts = {name: _contents(content[name]) for name in ("training", "held_out")}
        date = content.get("date")
        if date is not None:
            datetime.date.fromisoformat(date)
        return DataRecord(
            str(content["fingerprint"]), str(content["tokenizer"]), **parts, date=date
        )
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        # not written yet, or cut off by a crash: the checkpoint's fingerprint still protects the
        # order
        return None


def _contents(parts: dict[str, Any]) -> dict[str, SourceContents]:
    # Earlier versions wrote names without redaction.
    return {
        redact(name): SourceContents(str(part["key"]), dict(part["files"]))
        for name, part in parts.items()
    }


def write_record(run_directory: Path, record: DataRecord) -> None:
    """Write the record unless the file has it already. Raises OSError."""
    kept = replace(
        record, training=_shortened(record.training), held_out=_shortened(record.held_out)
    )
    if read_record(run_directory) != kept:
        text = json.dumps({"version": 1, **asdict(kept)}, indent=1)
        path = run_directory / DATA_RECORD
        replace_file(path, f"{text}\n".encode(), draft=path.with_name(f"{DATA_RECORD}.tmp"))


def _shortened(parts: dict[str, SourceContents]) -> dict[str, SourceContents]:
    return {
        n: part if len(part.files) <= RECORDED_FILES else SourceContents(part.key, {})
        for n, part in parts.items()
    }


def describe_change(now: SourceContents, then: SourceContents) -> str:
    """The files that differ, or that the content does, for an error message."""
    changed = [name for name, value in now.files.items() if then.files.get(name, value) != value]
    new = [name for name in now.files if name not in then.files]
    missing = [name for name in then.files if name not in now.files]
    if not (then.files and now.files) or "" in changed:
        return "its content changed"
    differences = [(changed, "other content"), (new, "new"), (missing, "missing")]
    return "; ".join(f"{first_few(names, _NAMED)}: {what}" for names, what in differences if names)


def only_removed_files(now: SourceContents, then: SourceContents) -> bool:
    """Whether the only change of a source is that some of its files are missing."""
    return bool(now.files) and now.files.items() < then.files.items()


def refuse_change(
    source: DataSource, now: SourceContents, then: SourceContents, advice: str = CHANGED_DATA_ADVICE
) -> None:
    """Raise the UserError for a training source that changed since this run began."""
    what = describe_change(now, then)
    raise UserError(
        f"data.source {source.name} ({shown_address(source.config.path)}) changed since this run"
        f" began: {what}. {advice}"
    )
