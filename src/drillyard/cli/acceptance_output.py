"""What `accept` and `launch --accept` do with an outcome: they print it, write acceptance.json, and
drain nodes where asked to."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from drillyard.cli.options import print_json

if TYPE_CHECKING:
    from drillyard.acceptance.judgement import Outcome
    from drillyard.config.cluster import ClusterConfig


def report_outcome(
    outcome: Outcome, file: Path | None, out: TextIO | None = None, *, as_json: bool = False
) -> None:
    """Write acceptance.json (None: nowhere), and print the results, or the document, on `out` or
    standard output."""
    from drillyard.acceptance.acceptance_document import acceptance_document

    document = acceptance_document(outcome)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(document.as_text() + "\n", encoding="utf-8")
    if as_json:
        print_json(document.model_dump())
        return
    for result in outcome.results:
        print(f"{result.status:10} {result.check:24} {result.reason}", file=out)
        for line in result.evidence if result.check == "job" else ():
            print(f"    {line}", file=out)
    print(f"{outcome.verdict}{'' if file is None else f': {file}'}", file=out)


def acceptance_file(place: Path) -> Path:
    """acceptance.json in a directory, or the .json file that is named itself."""
    return place if place.suffix == ".json" else place / "acceptance.json"


def write_hardware_file(outcome: Outcome, file: Path, name: str) -> None:
    """Write the measured rows, and say how they are used."""
    from drillyard.acceptance.hardware_rows import hardware_file

    text = hardware_file(outcome, name)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    print(f"wrote {file}: drillyard estimate ... --hardware {file}", file=sys.stderr)


def drain_nodes(cluster: ClusterConfig, outcome: Outcome, max_share: float | None) -> None:
    """Drain the proven nodes, and print what was done."""
    from drillyard.acceptance.drain import MAX_SHARE, drain_culprits
    from drillyard.launch.launcher import launcher_for

    share = MAX_SHARE if max_share is None else max_share
    for line in drain_culprits(launcher_for(cluster), outcome, share):
        print(line, file=sys.stderr)


def require_drain(drain: bool, max_share: float | None) -> None:
    """Raise ConfigError where --max-share would limit nothing."""
    from drillyard.errors import ConfigError

    if max_share is not None and not drain:
        raise ConfigError("--max-share: limits --drain, which is not given; give both or neither")
