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
    """A node that joined. `name` is what people and the scheduler call it."""

    rank: NonNegativeInt
    name: str
    address: str = ""


class Observation(_Part):
    """What one probe found on one node, between two, or on all.

    `nodes` are ranks of nodes. `values` is what the probe printed; of a probe with ranks
    `{"ranks": [{rank, node, local_rank, values, error}, ...]}`. `error`: why there are no values,
    or what is missing in them. `silent`: nodes that did not answer. Times in seconds, `started_at`
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
    """All observations of one job. `missing` are nodes that never joined."""

    format: Literal[1] = 1
    level: Literal["quick", "standard", "full"]
    started_at: float = 0.0
    ended_at: float = 0.0
    expected_nodes: PositiveInt
    processes_per_node: PositiveInt
    nodes: tuple[NodeIdentity, ...]
    missing: tuple[NonNegativeInt, ...] = ()
    observations: tuple[Observation, ...]

    def name_of(self, rank: int) -> str:
        """The name of a node by its rank."""
        found = next((node.name for node in self.nodes if node.rank == rank), None)
        return found or f"node {rank}"

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
