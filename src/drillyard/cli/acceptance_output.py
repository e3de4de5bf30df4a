"""What `accept` and `launch --accept` do with an outcome: they print it, write acceptance.json, and
drain nodes where asked to."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from drillyard.cli.options import print_json

if TYPE_CHECKING:
    from drillyard.acceptance.judgement import Outcome
    from drillyard.config.cluster import ClusterConfig


def report_outcome(
    outcome: Outcome, file: Path, out: TextIO | None = None, *, as_json: bool = False
) -> None:
    """Write acceptance.json, and print the results, or the document, on `out` or standard
    output."""
    from drillyard.acceptance.document import document_of

    document = document_of(outcome)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    if as_json:
        print_json(document)
        return
    for result in outcome.results:
        print(f"{result.status:10} {result.check:24} {result.reason}", file=out)
        for line in result.evidence if result.check == "job" else ():
            print(f"    {line}", file=out)
    print(f"{outcome.verdict}: {file}", file=out)


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
