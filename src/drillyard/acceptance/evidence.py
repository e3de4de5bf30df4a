"""What an acceptance job observed, as node 0 wrote it or as recorded files give it: the only input
of the judgement.

It was made elsewhere, so it is data: read within limits, and whatever does not have this form is
refused or leaves a check without evidence.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveInt, ValidationError

from drillyard.errors import UserError

MOST_BYTES = 512 << 20
"""Of one document: a thousand nodes in full."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class NodeIdentity(_Part):
    """A node that joined. `name` is what people and the scheduler call it, `host` its host name,
    `address` where the others reach it."""

    rank: NonNegativeInt
    name: str
    address: str = ""
    host: str = ""
    rack: str = ""
    """What the scheduler says of its place; empty where it says nothing."""


class Observation(_Part):
    """What one probe found on one node, between two, or on all.

    `nodes` are ranks of nodes. `values` is what the probe printed; of a probe with ranks
    `{"ranks": [{rank, node, local_rank, values, error}, ...]}`. `error`: why values are
    missing, all or some. `silent`: nodes that did not answer. Times in seconds, `started_at`
    since 1970 by node 0's clock.
    """

    probe: str
    scope: Literal["node", "pairs", "mesh", "all"]
    nodes: tuple[NonNegativeInt, ...]
    round: NonNegativeInt | None = None
    arguments: dict[str, Any] = {}
    values: dict[str, Any] | None = None
    error: str | None = None
    silent: tuple[NonNegativeInt, ...] = ()
    started_at: float = 0.0
    seconds: float = 0.0
    source: str = ""
    """The file of a recorded observation."""


class AcceptanceEvidence(_Part):
    """All observations of one job. `missing` are nodes that never joined; `interrupted`: why the
    job ended before its last step. `recorded`: it was read from files, and only what they hold is
    judged."""

    format: Literal[1] = 1
    recorded: bool = False
    level: Literal["quick", "standard", "full"]
    submission: str = ""
    """Of the job that wrote it: an earlier one's file is not taken for this one's."""
    hosts: tuple[str, ...] = ()
    """The scheduler's names of the nodes, by rank; empty where not known."""
    started_at: float = 0.0
    ended_at: float = 0.0
    expected_nodes: PositiveInt
    processes_per_node: PositiveInt
    nodes: tuple[NodeIdentity, ...]
    missing: tuple[NonNegativeInt, ...] = ()
    interrupted: str | None = None
    observations: tuple[Observation, ...]

    def name_of(self, rank: int) -> str:
        """The name of a node by its rank: the scheduler's, else what it calls itself."""
        if 0 <= rank < len(self.hosts) and self.hosts[rank]:
            return self.hosts[rank]
        found = next((node.name for node in self.nodes if node.rank == rank), None)
        return found or f"node {rank}"

    @property
    def racks(self) -> dict[str, str]:
        """Racks by rank, as the search takes them."""
        return {str(node.rank): node.rack for node in self.nodes if node.rack}

    def of(self, probe: str) -> list[Observation]:
        """The observations of a probe, in order."""
        return [each for each in self.observations if each.probe == probe]


def parse_evidence(text: bytes, source: str) -> AcceptanceEvidence:
    """The document in `text`. Raises UserError, which names `source`, for another text."""
    try:
        return AcceptanceEvidence.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UserError(
            f"{source}: is not the evidence of an acceptance job"
            f" ({f'{where}: ' if where else ''}{first['msg']}); run drillyard accept again"
        ) from None
