"""What holds the data of a cluster's runs: it outlives the cluster, unless the user says that its
data may go."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class DataStore:
    """A bucket or a file system of the cluster. `title`: gs://NAME; `has_data`: False where it is
    known to be empty."""

    name: str
    title: str
    location: str
    has_data: bool


class DataStores(Protocol):
    """Those of one cluster, all of one kind of Terraform's."""

    kind: str

    def find(self, name: str) -> DataStore | None:
        """The store of this name, if it is in the cluster's project and carries its label."""

    def empty(self, store: Any) -> Iterator[str]:
        """Delete what is in it, as far as its deletion needs that; what was deleted."""

    def delete(self, store: Any) -> None:
        """Delete it, empty as it is."""
