"""What `drillyard cluster status` finds on the nodes of a cluster that exists: for each check what
is well, or which nodes lack what, with the remedy. Pure.

A launcher's facts name the function that finds it (`PlatformFacts.cluster_check`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from drillyard.config.cluster import ClusterConfig
from drillyard.formatting import first_few, plural
from drillyard.hardware.catalog import Catalog
from drillyard.programs import Programs

_SHOWN_NODES = 8
FindingResult = Literal["ok", "missing", "unknown", "note"]


@dataclass(frozen=True)
class Finding:
    """What was found in a check. `missing`: a run on these nodes would miss it; `unknown`: it could
    not be looked at; `note`: runs work, and something is worth knowing."""

    check: str
    result: FindingResult
    text: str
    """What is there; else what is wrong, and what to do."""
    nodes: tuple[str, ...] = ()
    """The nodes that it is about; empty: all, or the cluster as a whole."""

    @property
    def line(self) -> str:
        named = first_few(self.nodes, _SHOWN_NODES)
        return f"{named}: {self.text}" if named else self.text


@dataclass(frozen=True)
class ClusterCheck:
    """All findings, in the order of the checks."""

    cluster: str
    platform: str
    wanted: int
    """Nodes of a run, by the config."""
    nodes: tuple[str, ...]
    """All that a run may get."""
    looked_at: tuple[str, ...]
    """Those that answered."""
    findings: tuple[Finding, ...]

    @property
    def proved(self) -> tuple[str, ...]:
        """The nodes that answered and lack nothing."""
        lacking = {node for each in self._found("missing") for node in each.nodes}
        return tuple(node for node in self.looked_at if node not in lacking)

    @property
    def exit_code(self) -> int:
        """0: a run finds all that it needs; 1: it would miss something; 3: that is not known."""
        if self._found("missing"):
            return 1
        return 0 if len(self.proved) >= self.wanted and not self._found("unknown") else 3

    def _found(self, result: FindingResult) -> list[Finding]:
        return [each for each in self.findings if each.result == result]

    def as_json(self) -> dict[str, Any]:
        # The line of a finding is for people: its nodes may be too many to name.
        return {
            **dataclasses.asdict(self),
            "proved": self.proved,
            "ready": self.exit_code == 0,
        }

    def text(self, config: str) -> str:
        """A row for each finding, and what comes next. `config`: the cluster config, quoted."""
        rows = [(each.check, each.result, each.line) for each in self.findings]
        widths = [max((len(row[column]) for row in rows), default=0) for column in (0, 1)]
        lines = [
            f"{check:{widths[0]}}  {result:{widths[1]}}  {line}" for check, result, line in rows
        ]
        if self.exit_code == 0:
            lines.append(f"ready: drillyard launch RUN --cluster {config}")
        else:
            proved = f"{len(self.proved)} of {plural(len(self.nodes), 'node')} lack nothing"
            lines.append(
                f"next: {proved}, and a run takes {self.wanted}: do what the rows say, then"
                f" drillyard cluster status {config}"
            )
        return "\n".join(lines)


class ClusterChecker(Protocol):
    """Looks at all nodes of a cluster. Raises UserError for a config with which nothing could be
    launched; a cluster that cannot be asked is a finding."""

    def __call__(
        self, cluster: ClusterConfig, facts: Catalog, programs: Programs
    ) -> ClusterCheck: ...


def by_check(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """The findings of a check beside each other, checks in the order of their first finding."""
    order = list(dict.fromkeys(each.check for each in findings))
    return tuple(sorted(findings, key=lambda each: order.index(each.check)))


def shared_findings(findings: Iterable[Finding]) -> list[Finding]:
    """The same with one finding for all nodes of which the same is said."""
    nodes_of: dict[Finding, list[str]] = {}
    for each in findings:
        nodes_of.setdefault(dataclasses.replace(each, nodes=()), []).extend(each.nodes)
    return [dataclasses.replace(each, nodes=tuple(nodes)) for each, nodes in nodes_of.items()]
