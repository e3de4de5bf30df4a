"""Cloud Storage: the bucket of a cluster's state, and its buckets for data."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from drillyard.errors import MissingExtraError, UnreachableError, UserError
from drillyard.formatting import plural
from drillyard.programs import parallel_map, shown_text
from drillyard.provision.cluster_plan import CLUSTER_LABEL, ClusterPlan
from drillyard.provision.data_stores import DataStore
from drillyard.provision.google.api import ApiError, GoogleApis, google_apis
from drillyard.provision.google.endpoints import endpoints
from drillyard.provision.state_bucket import StateBucket

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
BUCKET_KIND = "google_storage_bucket"
_AT_ONCE = 10


@dataclass(frozen=True)
class DataBucket(DataStore):
    """A bucket of the cluster for run directories and data. `has_data`: earlier versions of objects
    count, folders do not."""

    hierarchical: bool = False
    """Whether its folders are things of their own, which stay when their objects are deleted."""


class GoogleStateBucket(StateBucket):
    """The state's bucket of one cluster. A version is a generation."""

    scheme, lock = "gs", "default.tflock"
    earlier_versions = "gcloud storage ls --all-versions, then gcloud storage cp"

    def __init__(self, plan: ClusterPlan) -> None:
        super().__init__(plan)
        reached = endpoints()
        options: dict[str, Any] = {}
        if reached.is_emulated:
            options["credentials"] = AnonymousCredentials()  # type: ignore[no-untyped-call]
        if (address := reached.address("storage")) is not None:
            options["client_options"] = {"api_endpoint": address.rstrip("/")}
        with self.words():
            self.client = storage.Client(project=plan.project, **options)

    def find(self) -> Any | None:
        with self.words():
            return self.client.lookup_bucket(self.name, **LIMITS)

    def ensure(self) -> bool:
        if (found := self.find()) is not None:
            if not found.versioning_enabled:
                raise UserError(
                    f"{self.title}: keeps no earlier versions of the state\nTurn them on: gcloud"
                    f" storage buckets update {self.title} --versioning"
                )
            return False
        bucket = self.client.bucket(self.name)
        bucket.labels = dict(self.plan.labels or {CLUSTER_LABEL: self.plan.name})
        bucket.versioning_enabled = True
        bucket.iam_configuration.uniform_bucket_level_access_enabled = True
        bucket.iam_configuration.public_access_prevention = "enforced"
        with self.words():
            try:
                self.client.create_bucket(bucket, location=self.plan.region, **LIMITS)
            except exceptions.Conflict:
                # Another `up` of this cluster, or another project.
                return self.client.lookup_bucket(self.name, **LIMITS) is None and self._taken()
        return True

    def _taken(self) -> bool:
        raise UserError(
            f"{self.title}: the name belongs to another project; set cluster.state_bucket"
        )

    def remove(self) -> str | None:
        bucket = self.find()
        if bucket is None:
            return None
        with self.words():
            versions = list(self.client.list_blobs(self.name, versions=True, **LIMITS))
            ours = [each for each in versions if self.is_own_object(each.name)]
            label = (bucket.labels or {}).get(CLUSTER_LABEL)
            parallel_map(_delete_version, ours, _AT_ONCE)
            if label != self.plan.name:
                return f"its label {CLUSTER_LABEL} is {label or 'missing'}, not {self.plan.name}"
            if others := sorted({each.name for each in versions} - {each.name for each in ours}):
                return f"it has {plural(len(others), 'object')} of others: {', '.join(others[:3])}"
            try:
                bucket.delete(**LIMITS)
            except exceptions.NotFound:
                return None
            except exceptions.Conflict:
                return "another command has begun to use it"
        return None

    def read(self, name: str) -> tuple[bytes, str] | None:
        with self.words():
            blob = self.client.bucket(self.name).get_blob(f"{self.prefix}/{name}", **LIMITS)
            if blob is None:
                return None
            try:
                # This generation, so that both belong together.
                data: bytes = blob.download_as_bytes(if_generation_match=blob.generation, **LIMITS)
            except (exceptions.NotFound, exceptions.PreconditionFailed):
                return self.read(name)
            return data, str(blob.generation)

    def write(self, name: str, data: bytes, *, new: bool = False) -> str | None:
        blob = self.client.bucket(self.name).blob(f"{self.prefix}/{name}")
        condition = {"if_generation_match": 0} if new else {}
        with self.words():
            try:
                blob.upload_from_string(data, "application/json", **condition, **LIMITS)
            except exceptions.PreconditionFailed:
                return None
        return str(blob.generation)

    def delete(self, name: str, version: str | None = None) -> None:
        blob = self.client.bucket(self.name).blob(f"{self.prefix}/{name}")
        generation = None if version is None else int(version)
        missing = (exceptions.NotFound, exceptions.PreconditionFailed)
        with self.words(), contextlib.suppress(*missing):
            blob.delete(if_generation_match=generation, **LIMITS)

    def backend(self) -> dict[str, Any]:
        return {"gcs": {"bucket": self.name, "prefix": self.prefix}}

    @contextlib.contextmanager
    def words(self, title: str | None = None) -> Iterator[None]:
        """Errors of the client as ours."""
        place, project = title or self.title, self.plan.project
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


class DataBuckets:
    """The cluster's buckets for data."""

    kind = BUCKET_KIND

    def __init__(self, plan: ClusterPlan) -> None:
        self._plan = plan
        state = GoogleStateBucket(plan)
        self._client, self._words = state.client, state.words

    def find(self, name: str) -> DataBucket | None:
        """The bucket `name`, if it exists in the cluster's project and carries the cluster's label:
        a cluster of the same name in another project has the same one."""
        with self._words(f"gs://{name}"):
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
            place = found.location.lower()
            return DataBucket(name, f"gs://{name}", place, has_data, hierarchical)

    def empty(self, store: DataBucket) -> Iterator[str]:
        """Delete its objects, then its folders."""
        if store.has_data:
            count = self._delete_objects(store.name)
            yield f"deleted {plural(count, 'object')} of {store.title}"
        if folders := self._delete_folders(store):
            yield f"deleted {plural(folders, 'folder')} of {store.title}"

    def delete(self, store: DataBucket) -> None:
        """Delete an empty bucket."""
        with self._words(store.title), contextlib.suppress(exceptions.NotFound):
            self._client.bucket(store.name).delete(**LIMITS)

    def _delete_objects(self, name: str) -> int:
        """Delete every object of a bucket with all versions; how many there were."""
        with self._words(f"gs://{name}"):
            found = list(self._client.list_blobs(name, versions=True, **LIMITS))
            parallel_map(_delete_version, found, _AT_ONCE)
            return len(found)

    def _delete_folders(self, bucket: DataBucket) -> int:
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
