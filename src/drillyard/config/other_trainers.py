"""Configs of DeepSpeed, TRL, Axolotl and LLaMA-Factory as settings of a run config, for
`drillyard init --from-...`.

The tables in `trainer_tables/` hold every key of each tool; `from_axolotl.py`,
`from_hf_trainers.py` and `from_deepspeed.py` the rules that need more than a new name. What a file
leaves to its tool's default is written out where that default is another than ours, so the run
stays the same. Keys without a counterpart are returned with the reason: nothing is dropped in
silence. A file of another tool, or of another kind of training, is refused.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from drillyard.config.from_axolotl import from_axolotl
from drillyard.config.from_deepspeed import from_deepspeed
from drillyard.config.from_hf_trainers import from_llamafactory, from_trl
from drillyard.config.trainer_table import (
    EMPTY,
    TOOLS,
    ConvertedConfig,
    TrainerFile,
    nested_keys,
    table_of,
)
from drillyard.config.yaml_document import read_document
from drillyard.errors import ConfigError

__all__ = ["ConvertedConfig", "convert"]

_SECTIONS = frozenset(
    {
        "bf16",
        "comet",
        "csv_monitor",
        "fp16",
        "optimizer",
        "optimizer.params",
        "scheduler",
        "scheduler.params",
        "tensorboard",
        "wandb",
        "zero_optimization",
    }
)
"""Sections of DeepSpeed's config whose keys the table has one by one."""
_CONVERTERS: dict[str, Callable[[TrainerFile, ConvertedConfig], None]] = {
    "deepspeed": from_deepspeed,
    "trl": from_trl,
    "axolotl": from_axolotl,
    "llamafactory": from_llamafactory,
}


def convert(tool: str, path: str | os.PathLike[str]) -> ConvertedConfig:
    """The config of `tool` (one of `TOOLS`) in the file at `path`. Raises UserError if it cannot be
    read, is of another tool or trains in a way that is not available."""
    content = read_document(path).value
    if not isinstance(content, dict):
        raise ConfigError(
            f"{os.fspath(path)}: is not a config of {tool}: its top level has no keys"
        )
    _require_tool(tool, content, path)
    flat = dict(nested_keys(content, _SECTIONS)) if tool == "deepspeed" else content
    file, found = TrainerFile(tool, flat, Path(path)), ConvertedConfig()
    _require_available(file)
    try:
        _CONVERTERS[tool](file, found)
    except (AttributeError, TypeError, ValueError) as error:
        # The rules compute with values as the tool does; a value of another type ends here.
        near = ", ".join(file.last_taken())
        raise ConfigError(
            f"{file.path}: a value at or near {near} has a type that {file.table.name} does not"
            f" take there: {error}"
        ) from None
    file.finish(found)
    found.settings.setdefault(
        "name", _name_of(found.settings.pop("output_dir", None) or Path(path).stem)
    )
    return found


def _name_of(text: str) -> str:
    name = re.sub(r"[^a-z0-9._-]", "-", Path(text).name.lower())
    return name.strip("-_.")[:63].strip("-_.") or "run"


def _require_tool(tool: str, content: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Refuse a file most of whose keys are another tool's."""
    keys = {str(key) for key in content}
    known = {other: len(keys & _top_keys(other)) for other in TOOLS}
    best = max(TOOLS, key=lambda other: (known[other], other == tool))
    own = {other: len(keys & _own_keys(other)) for other in TOOLS}
    if best != tool and own[best] > own[tool]:
        name, asked = table_of(best).name, table_of(tool).name
        raise ConfigError(
            f"{os.fspath(path)}: is a config of {name}, not of {asked}: it has"
            f" {', '.join(sorted(keys & _own_keys(best))[:3])}; use --from-{best}"
        )


def _top_keys(tool: str) -> set[str]:
    table = table_of(tool)
    return {re.split(r"[.\[]", key)[0] for key in table.keys} | set(table.aliases)


def _own_keys(tool: str) -> set[str]:
    """Keys that no other tool has."""
    others = set[str]().union(*(_top_keys(other) for other in TOOLS if other != tool))
    return _top_keys(tool) - others


def _require_available(file: TrainerFile) -> None:
    for key, value in file.values.items():
        row = file.table.keys.get(key)
        if row is not None and row.refused and value not in (*EMPTY, False):
            raise ConfigError(f"{file.path}: {file.spelled(key)}: {row.why}")
