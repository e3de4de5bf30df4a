"""The bucket of Terraform's state: made before anything else, removed after everything else.

It is made by one request with its name, label and versioning, so after a loss of power `down` finds
it by its name, and `leaks` by its label. Objects of a cluster are below NAME/: Terraform's state
and lock, `creating.json`, which lists what an apply that has not ended may have made, and
`images.json`, which has the digests of the installers' images.
"""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from drillyard.errors import MissingExtraError, UnreachableError, UserError
from drillyard.launch.agent.state_file import json_object
from drillyard.programs import parallel_map, shown_text
from drillyard.provision.cluster_plan import CLUSTER_LABEL, ClusterPlan
from drillyard.provision.google.api import ApiError, GoogleApis, google_apis
from drillyard.provision.google.endpoints import endpoints
from drillyard.provision.terraform_output import StateResource, state_resources

try:
    from google.api_core import exceptions
    from google.auth.credentials import AnonymousCredentials
    from google.auth.exceptions import DefaultCredentialsError, GoogleAuthError
    from google.cloud import storage
    from google.cloud.storage.retry import DEFAULT_RETRY
except ImportError as _error:
    raise MissingExtraError(
        f"a cluster's state needs Google's client ({_error.name}): pip install 'drillyard[gcp]'"
    ) from None

LIMITS: dict[str, Any] = {"retry": DEFAULT_RETRY.with_timeout(60.0), "timeout": 60.0}
_STATE = "default.tfstate"
_CREATING, _IMAGES = "creating.json", "images.json"
_AT_ONCE = 10


@dataclass(frozen=True)
class DataBucket:
    """A bucket of the cluster for run directories and data. `has_data`: earlier versions of objects
    count, folders do not."""

    name: str
    location: str
    has_data: bool
    hierarchical: bool = False
    """Whether its folders are things of their own, which stay when their objects are deleted."""


class StateBucket:
    """The state's bucket of one cluster. All methods raise UserError, UnreachableError where the
    service does not answer."""

    def __init__(self, plan: ClusterPlan) -> None:
        self._plan = plan
        self.name = plan.state_bucket
        self.prefix = plan.name
        self.title = f"gs://{self.name}"
        reached = endpoints()
        options: dict[str, Any] = {}
        if reached.is_emulated:
            options["credentials"] = AnonymousCredentials()  # type: ignore[no-untyped-call]
        if (address := reached.address("storage")) is not None:
            options["client_options"] = {"api_endpoint": address.rstrip("/")}
        with self.words():
            self._client = storage.Client(project=plan.project, **options)

    def find(self) -> Any | None:
        """The bucket, or None where there is none of the name."""
        with self.words():
            return self._client.lookup_bucket(self.name, **LIMITS)

    def ensure(self) -> bool:
        """Create the bucket where it is missing; whether this has made it."""
        if (found := self.find()) is not None:
            if not found.versioning_enabled:
                raise UserError(
                    f"{self.title}: keeps no earlier versions of the state\nTurn them on: gcloud"
                    f" storage buckets update {self.title} --versioning"
                )
            return False
        bucket = self._client.bucket(self.name)
        bucket.labels = dict(self._plan.labels or {CLUSTER_LABEL: self._plan.name})
        bucket.versioning_enabled = True
        bucket.iam_configuration.uniform_bucket_level_access_enabled = True
        bucket.iam_configuration.public_access_prevention = "enforced"
        with self.words():
            try:
                self._client.create_bucket(bucket, location=self._plan.region, **LIMITS)
            except exceptions.Conflict:
                # Another `up` of this cluster, or another project.
                return self._client.lookup_bucket(self.name, **LIMITS) is None and self._taken()
        return True

    def _taken(self) -> bool:
        raise UserError(
            f"{self.title}: the name belongs to another project; set cluster.state_bucket"
        )

    def remove(self) -> str | None:
        """Delete the cluster's objects and the bucket; says why it keeps the bucket, if it does:
        it is another's by its label, or has objects of others."""
        bucket = self.find()
        if bucket is None:
            return None
        with self.words():
            versions = list(self._client.list_blobs(self.name, versions=True, **LIMITS))
            ours = [each for each in versions if each.name.startswith(f"{self.prefix}/")]
            label = (bucket.labels or {}).get(CLUSTER_LABEL)
            parallel_map(_delete_version, ours, _AT_ONCE)
            if label != self._plan.name:
                return f"its label {CLUSTER_LABEL} is {label or 'missing'}, not {self._plan.name}"
            if others := sorted({each.name for each in versions} - {each.name for each in ours}):
                return f"it has {len(others)} objects of others: {', '.join(others[:3])}"
            try:
                bucket.delete(**LIMITS)
            except exceptions.NotFound:
                return None
            except exceptions.Conflict:
                return "another command has begun to use it"
        return None

    def read(self, name: str) -> tuple[bytes, int] | None:
        """An object of the cluster with its generation; None where there is none."""
        with self.words():
            blob = self._client.bucket(self.name).get_blob(f"{self.prefix}/{name}", **LIMITS)
            if blob is None:
                return None
            try:
                # This generation, so that both belong together.
                data: bytes = blob.download_as_bytes(if_generation_match=blob.generation, **LIMITS)
            except (exceptions.NotFound, exceptions.PreconditionFailed):
                return self.read(name)
            return data, int(blob.generation)

    def write(self, name: str, data: bytes, *, new: bool = False) -> int | None:
        """Write an object of the cluster; its generation, or None where it is to be `new` and is
        there already."""
        blob = self._client.bucket(self.name).blob(f"{self.prefix}/{name}")
        condition = {"if_generation_match": 0} if new else {}
        with self.words():
            try:
                blob.upload_from_string(data, "application/json", **condition, **LIMITS)
            except exceptions.PreconditionFailed:
                return None
        return int(blob.generation)

    def delete(self, name: str, generation: int | None = None) -> bool:
        """Delete an object of the cluster: any, or only this generation; whether it was there."""
        blob = self._client.bucket(self.name).blob(f"{self.prefix}/{name}")
        with self.words():
            try:
                blob.delete(if_generation_match=generation, **LIMITS)
            except (exceptions.NotFound, exceptions.PreconditionFailed):
                return False
        return True

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
        self.write(_STATE, json.dumps(empty).encode(), new=True)

    def resources(self, place: str = "") -> dict[str, StateResource]:
        """What the state has, with all attributes, by address. `place`: where another state than
        the cluster's own is, below its name, ending in `/`."""
        found = self.read(f"{place}{_STATE}")
        listed = state_resources("" if found is None else found[0].decode())
        return {each.address: each for each in listed}

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

    def own_bucket(self, name: str) -> DataBucket | None:
        """The bucket `name`, if it exists in the cluster's project and carries the cluster's label:
        a cluster of the same name in another project has the same one."""
        with self.words(f"gs://{name}"):
            found = self._client.lookup_bucket(name, **LIMITS)
            if found is None or (found.labels or {}).get(CLUSTER_LABEL) != self._plan.name:
                return None
            in_project = self._client.list_buckets(
                project=self._plan.project, prefix=name, **LIMITS
            )
            if not any(each.name == name for each in in_project):
                return None
            listed = self._client.list_blobs(name, versions=True, max_results=1, **LIMITS)
            has_data = any(True for _ in listed)
            hierarchical = bool(found.hierarchical_namespace_enabled)
            return DataBucket(name, found.location.lower(), has_data, hierarchical)

    def delete_objects(self, name: str) -> int:
        """Delete every object of a bucket with all versions; how many there were."""
        with self.words(f"gs://{name}"):
            found = list(self._client.list_blobs(name, versions=True, **LIMITS))
            parallel_map(_delete_version, found, _AT_ONCE)
            return len(found)

    def delete_folders(self, bucket: DataBucket) -> int:
        """Delete every folder of a bucket whose objects are deleted, the innermost first; how many
        there were. A folder with an object is refused, and so is a bucket with a folder
        (https://cloud.google.com/storage/docs/delete-folders)."""
        apis = google_apis(self._plan.project)
        deleted = 0
        # Managed folders, which have rights of their own, are in buckets of both kinds.
        for method in ("folders", "managedFolders") if bucket.hierarchical else ("managedFolders",):
            by_depth: dict[int, list[str]] = {}
            for page in apis.pages("storage", f"{method}.list", bucket=bucket.name):
                for each in page.get("items") or ():
                    by_depth.setdefault(each["name"].rstrip("/").count("/"), []).append(
                        each["name"]
                    )
            delete = partial(_delete_folder, apis, method, bucket.name)
            for depth in sorted(by_depth, reverse=True):
                parallel_map(delete, by_depth[depth], _AT_ONCE)
                deleted += len(by_depth[depth])
        return deleted

    def delete_bucket(self, name: str) -> None:
        """Delete an empty bucket."""
        with self.words(f"gs://{name}"), contextlib.suppress(exceptions.NotFound):
            self._client.bucket(name).delete(**LIMITS)

    @contextlib.contextmanager
    def words(self, title: str | None = None) -> Iterator[None]:
        """Errors of the client as ours."""
        place, project = title or self.title, self._plan.project
        try:
            yield
        except (exceptions.Forbidden, exceptions.Unauthorized) as error:
            raise UserError(
                f"{place}: may not be used ({shown_text(str(error))})\nGrant it: gcloud projects"
                f" add-iam-policy-binding {project} --member user:YOUR_ACCOUNT --role"
                " roles/storage.admin\nor, if the name belongs to another project, set"
                " cluster.state_bucket"
            ) from None
        except DefaultCredentialsError:
            raise UserError(
                f"{place}: this machine has no credentials of Google Cloud\nLog in: gcloud auth"
                " application-default login"
            ) from None
        except (exceptions.GoogleAPIError, GoogleAuthError, OSError) as error:
            raise UnreachableError(
                f"{place}: cannot be reached ({shown_text(str(error))})\nCheck the network, then"
                " repeat the command"
            ) from None


def _delete_folder(apis: GoogleApis, method: str, bucket: str, name: str) -> None:
    key = method.removesuffix("s")
    try:
        apis.call("storage", f"{method}.delete", bucket=bucket, **{key: name})
    except ApiError as error:
        if error.refusal != "absent":
            raise


def _delete_version(blob: Any) -> None:
    with contextlib.suppress(exceptions.NotFound):
        blob.bucket.blob(blob.name, generation=blob.generation).delete(**LIMITS)


def ensure_state_bucket(plan: ClusterPlan) -> bool:
    """Create the bucket of the state where it is missing; whether this has made it."""
    return StateBucket(plan).ensure()


def remove_state_bucket(plan: ClusterPlan) -> str | None:
    """Remove the bucket of the state; says why it stays, if it does."""
    return StateBucket(plan).remove()
