"""What `accept` and `launch --accept` do with an outcome: they print it, write it as JSON, as a
page and as JUnit XML, and drain nodes where asked to."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from drillyard.cli.options import print_json

if TYPE_CHECKING:
    from drillyard.acceptance.judgement import Outcome
    from drillyard.config.cluster import ClusterConfig


def report_outcome(
    outcome: Outcome,
    title: str,
    file: Path | None,
    out: TextIO | None = None,
    *,
    as_json: bool = False,
) -> None:
    """Write acceptance.json, and beside it the page and JUnit XML under the same name (None:
    nowhere); print the outcome, or the document, on `out` or standard output. `title`: the
    cluster, or what was judged."""
    from drillyard.acceptance.acceptance_document import acceptance_document
    from drillyard.acceptance.acceptance_page import render_acceptance
    from drillyard.acceptance.document_text import as_text, junit_xml

    document = acceptance_document(outcome)
    written = []
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        for suffix, text in (
            (".json", document.as_text() + "\n"),
            (".html", render_acceptance(document, title)),
            (".xml", junit_xml(document, title)),
        ):
            written.append(file.with_suffix(suffix))
            written[-1].write_text(text, encoding="utf-8")
    if as_json:
        print_json(document.model_dump())
        return
    print(as_text(document), end="", file=out)
    if written:
        print(f"written: {', '.join(map(str, written))}", file=out)


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
