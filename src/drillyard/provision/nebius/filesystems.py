"""The shared file system that a cluster has made: it has the data of its runs, and whether it is
empty nobody can see from outside, so it stays unless the user says otherwise."""

from __future__ import annotations

from collections.abc import Iterator

from drillyard.provision.cluster_plan import ClusterPlan
from drillyard.provision.data_stores import DataStore
from drillyard.provision.nebius import cli
from drillyard.provision.nebius.instances import FILESYSTEM_KIND

_WORDS = ("compute", "filesystem")


class SharedFilesystems:
    """Those of one cluster."""

    kind = FILESYSTEM_KIND

    def __init__(self, plan: ClusterPlan) -> None:
        self._plan = plan

    def find(self, name: str) -> DataStore | None:
        """The file system `name` of the project, if it carries the cluster's label."""
        found = self._item(name)
        if found is None:
            return None
        return DataStore(name, f"file system {name} ({cli.id_of(found)})", "", has_data=True)

    def empty(self, store: DataStore) -> Iterator[str]:
        """Nothing: its deletion deletes what is in it."""
        return iter(())

    def delete(self, store: DataStore) -> None:
        """Delete it with what is in it."""
        if (found := self._item(store.name)) is not None:
            cli.call(*_WORDS, "delete", "--id", cli.id_of(found))

    def _item(self, name: str) -> cli.Item | None:
        rows = cli.items(*_WORDS, parent=self._plan.project)
        ours = (each for each in rows if cli.is_ours(self._plan, each))
        return next((each for each in ours if cli.name_of(each) == name), None)
