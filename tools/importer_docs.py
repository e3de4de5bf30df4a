"""Write docs/importers.md from the tables of other trainers' keys: `python tools/importer_docs.py`.

`--check` writes nothing and exits with 1 where the page is not what the tables say.
"""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path

from drillyard.config.trainer_table import TOOLS, TrainerTable, table_of

PAGE = Path(__file__).parents[1] / "docs/importers.md"
INTRODUCTION = """# Configs of other trainers

`drillyard init DIR --from-axolotl FILE`, `--from-trl`, `--from-deepspeed` and `--from-llamafactory`
write a run.yaml with the settings of FILE. What the tool takes where the file says nothing is
written too, where it is not what a run takes. Every other key is named with the reason, on lines
that begin with `not taken over:`. An empty key is its default. A file of another tool is refused
with the flag to use, and so is training by preferences or rewards (`rl`, `beta`, `stage: dpo`).

The tools take relative paths from the directory where they are started, which the file does not
say. A path that exists from here, beside the file or in a directory above it is written as an
absolute one; any other is written as it is and named.

This page is made from the tables in `src/drillyard/config/trainer_tables/` by
`python tools/importer_docs.py`. A default is the tool's, where it has one.
"""


def page() -> str:
    """The text of the page."""
    parts = [INTRODUCTION]
    for tool in ("training_arguments", *sorted(TOOLS)):
        parts.append(section(tool))
    return "\n".join(parts)


def section(tool: str) -> str:
    """What is taken over and what not, of one tool."""
    table = table_of(tool)
    own = table.keys
    if tool in ("trl", "llamafactory"):
        shared = table_of("training_arguments").keys
        own = {key: row for key, row in own.items() if shared.get(key) != row}
    title = table.name[0].upper() + table.name[1:]
    lines = [f"## {title}", "", f"`{table.package}` {table.version}."]
    if own is not table.keys:
        lines[-1] += " With the keys of TrainingArguments, above, where none is given here."
    lines += ["", "| key | setting | how | default |", "|---|---|---|---|"]
    for key, row in own.items():
        if row.ours is not None:
            default = "" if row.default is None else f"`{json.dumps(row.default)}`"
            how = (row.how or "").replace("|", "\\|")
            lines.append(f"| `{key}` | `{row.ours}` | {how} | {default} |")
    lines += ["", *refused(table), "No counterpart:", ""]
    reasons: dict[str, list[str]] = {}
    for key, row in own.items():
        if row.ours is None and not row.refused:
            reasons.setdefault(row.why or "", []).append(f"`{key}`")
    for why, keys in reasons.items():
        text = f"- {why}: {', '.join(sorted(keys))}"
        lines += textwrap.wrap(text, 100, subsequent_indent="  ", break_on_hyphens=False)
    return "\n".join(lines) + "\n"


def refused(table: TrainerTable) -> list[str]:
    """The keys for which all of a file is refused."""
    keys = [f"`{key}`" for key, row in table.keys.items() if row.refused]
    return [*textwrap.wrap(f"Refused: {', '.join(keys)}.", 100), ""] if keys else []


def main() -> int:
    """Write the page, or compare it."""
    if sys.argv[1:] == ["--check"]:
        return int(PAGE.read_text(encoding="utf-8") != page())
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
