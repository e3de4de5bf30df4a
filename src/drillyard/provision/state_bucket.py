"""The bucket of Terraform's state: made before anything else, removed after everything else.

It is made by one request with its name, label and versioning, so after a loss of power `down` finds
it by its name, and `leaks` by its label. Objects of a cluster are below NAME/: Terraform's state
and lock, `creating.json`, which lists what an apply that has not ended may have made,
`images.json`, which has the digests of the installers' images, and `deployed.json`. Each cloud has
a class for its own object storage; what the objects say is here.
"""

from __future__ import annotations

import json
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from drillyard.launch.agent.state_file import json_object
from drillyard.provision.cluster_plan import ClusterPlan
from drillyard.provision.terraform_output import StateResource, state_resources

STATE = "default.tfstate"
"""Terraform's state, below the cluster's name."""
DEPLOYED = "deployed.json"
"""Of Cluster Toolkit: a hash of the files that were deployed last."""
_CREATING, _IMAGES = "creating.json", "images.json"


class StateBucket(ABC):
    """The state's bucket of one cluster. All methods raise UserError, UnreachableError where the
    service does not answer. A version is a text that names one content of an object: what is
    deleted by it is that content alone."""

    scheme: str
    lock: str
    """The object that Terraform's backend locks with."""
    earlier_versions: str
    """What the user types for an earlier version of a damaged state."""

    def __init__(self, plan: ClusterPlan) -> None:
        self.plan = plan
        self.name = plan.state_bucket
        self.prefix = plan.name
        self.title = f"{self.scheme}://{self.name}"

    def is_own_object(self, key: str) -> bool:
        """Whether an object of the bucket is one that Drillyard or its Terraform writes for the
        cluster: of Cluster Toolkit, each group has a state further below the cluster's name."""
        written = (STATE, self.lock, DEPLOYED, _CREATING, _IMAGES)
        return key.startswith(f"{self.prefix}/") and key.rpartition("/")[2] in written

    @abstractmethod
    def find(self) -> Any | None:
        """The bucket, or None where there is none of the name."""

    @abstractmethod
    def ensure(self) -> bool:
        """Create the bucket where it is missing; whether this has made it."""

    @abstractmethod
    def remove(self) -> str | None:
        """Delete the cluster's objects and the bucket; says why it keeps the bucket, if it does:
        it is another's by its label, or has objects of others."""

    @abstractmethod
    def read(self, name: str) -> tuple[bytes, str] | None:
        """An object of the cluster with its version; None where there is none."""

    @abstractmethod
    def write(self, name: str, data: bytes, *, new: bool = False) -> str | None:
        """Write an object of the cluster; its version, or None where it is to be `new` and is there
        already."""

    @abstractmethod
    def delete(self, name: str, version: str | None = None) -> None:
        """Delete an object of the cluster, if it is there: any, or only this version."""

    @abstractmethod
    def backend(self) -> dict[str, Any]:
        """Terraform's backend: one kind with its settings, without a secret."""

    def begin_state(self, terraform_version: str) -> None:
        """Write an empty state where there is none. Terraform would do it at init, and take the
        lock for that, which the caller holds."""
        empty = {
            "version": 4,
            "terraform_version": terraform_version,
            "serial": 0,
            "lineage": str(uuid.uuid4()),
            "outputs": {},
            "resources": [],
        }
        self.write(STATE, json.dumps(empty).encode(), new=True)

    def resources(self, place: str = "") -> dict[str, StateResource]:
        """What the state has, with all attributes, by address. `place`: where another state than
        the cluster's own is, below its name, ending in `/`."""
        found = self.read(f"{place}{STATE}")
        text = "" if found is None else found[0].decode()
        return {each.address: each for each in state_resources(text, self.earlier_versions)}

    def creating(self) -> tuple[list[str], list[str]]:
        """Addresses that an apply which was killed may have created without a trace in the state;
        and those of them that were being imported, and may be in the state unchecked."""
        found = self.read(_CREATING)
        content = {} if found is None else json_object(found[0])
        addresses, importing = content.get("addresses", []), content.get("importing", [])
        return [str(each) for each in addresses], [str(each) for each in importing]

    def set_creating(self, addresses: Sequence[str], importing: Sequence[str] = ()) -> None:
        """Record what an apply is about to create; empty: all of its outcomes are in the state."""
        if addresses:
            content = {"addresses": list(addresses), "importing": list(importing)}
            self.write(_CREATING, json.dumps(content).encode())
        else:
            self.delete(_CREATING)

    def digests(self) -> dict[str, str]:
        """The recorded digests of images, by image with tag."""
        found = self.read(_IMAGES)
        content = {} if found is None else json_object(found[0])
        return {str(image): str(digest) for image, digest in content.items()}

    def record_digests(self, digests: Mapping[str, str]) -> None:
        """Record digests beside those that are recorded."""
        if {**(earlier := self.digests()), **digests} != earlier:
            self.write(_IMAGES, json.dumps({**earlier, **digests}, indent=2).encode())
