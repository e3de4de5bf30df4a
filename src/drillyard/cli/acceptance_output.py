"""What `accept` and `launch --accept` do with an outcome: they print it, write it as JSON, as a
page and as JUnit XML, and drain nodes where asked to."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from drillyard.cli.options import print_json
from drillyard.errors import UserError
from drillyard.safe_files import (
    MARKUP,
    YAML,
    describe_os_error,
    is_marked,
    replace_output,
    require_replaceable,
    write_output,
)

if TYPE_CHECKING:
    from drillyard.acceptance.judgement import Outcome
    from drillyard.config.cluster import ClusterConfig


@dataclass(frozen=True)
class AcceptanceFiles:
    """What an acceptance writes: acceptance.json with the page and JUnit XML beside it under the
    same name (`document` None: none of them), and rows for --hardware. `remedy`: what to do where
    one of them would replace a file that is not our own."""

    document: Path | None = None
    hardware: Path | None = None
    remedy: str = "move it away, or name another file"

    @property
    def page(self) -> Path | None:
        return self.document and self.document.with_suffix(".html")

    @property
    def junit(self) -> Path | None:
        return self.document and self.document.with_suffix(".xml")

    def require_replaceable(self) -> None:
        """Raise UserError, before a job runs for them, where the files would replace others than
        our own, or each other."""
        kinds = (
            (self.document, _is_acceptance),
            (self.page, is_marked(MARKUP)),
            (self.junit, is_marked(MARKUP)),
            (self.hardware, is_marked(YAML)),
        )
        given = [path for path, _ in kinds if path is not None]
        for path, is_own in kinds:
            if path is None:
                continue
            if given.count(path) > 1:
                raise UserError(f"{path}: --write-hardware names a file of --output; name another")
            try:
                if path.is_dir():
                    raise UserError(f"{path}: is a directory; {self.remedy}")
                there = next(each for each in path.absolute().parents if each.exists())
                if not there.is_dir():
                    raise UserError(f"{there}: is not a directory; {self.remedy}")
                if not path.exists() and not os.access(there, os.W_OK):
                    raise UserError(f"{there}: may not be written to; {self.remedy}")
                require_replaceable(path, is_own, self.remedy)
            except OSError as error:
                raise UserError(f"{path}: {describe_os_error(error)}") from None

    def write(self, outcome: Outcome, title: str) -> None:
        """Write them, and print which on standard error. `title`: the cluster, or what was judged.
        Raises UserError."""
        from drillyard.acceptance.acceptance_document import acceptance_document
        from drillyard.acceptance.acceptance_page import render_acceptance
        from drillyard.acceptance.document_text import junit_xml
        from drillyard.acceptance.hardware_rows import hardware_file

        self.require_replaceable()
        if self.document is not None and self.page is not None and self.junit is not None:
            document = acceptance_document(outcome)
            _write(self.document, document.as_text() + "\n", None)
            _write(self.page, render_acceptance(document, title), MARKUP)
            _write(self.junit, junit_xml(document, title), MARKUP)
            print(f"written: {self.document}, {self.page}, {self.junit}", file=sys.stderr)
        if self.hardware is not None:
            _write(self.hardware, hardware_file(outcome, title), YAML)
            print(
                f"written: {self.hardware}; drillyard estimate ... --hardware {self.hardware}",
                file=sys.stderr,
            )


def _is_acceptance(content: bytes) -> bool:
    """Whether content is an acceptance.json."""
    try:
        document = json.loads(content)
    except (ValueError, RecursionError):
        return False
    return isinstance(document, dict) and {"version", "verdict", "evidence"} <= document.keys()


def _write(path: Path, text: str, mark: bytes | None) -> None:
    data = text.encode("utf-8", "replace")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if mark is None:
            replace_output(path, data)
        else:
            write_output(path, data, overwrite=True, mark=mark)
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {describe_os_error(error)}") from None


def print_outcome(outcome: Outcome, out: TextIO | None = None, *, as_json: bool = False) -> None:
    """Print the outcome, or its document, on `out` or standard output."""
    from drillyard.acceptance.acceptance_document import acceptance_document
    from drillyard.acceptance.document_text import as_text

    document = acceptance_document(outcome)
    if as_json:
        print_json(document.model_dump())
    else:
        print(as_text(document), end="", file=out, flush=True)


def acceptance_file(place: Path) -> Path:
    """acceptance.json in a directory, or the .json file that is named itself."""
    return place if place.suffix == ".json" else place / "acceptance.json"


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
