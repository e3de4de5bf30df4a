"""The bucket of a cluster's state in Nebius' object storage, which speaks S3.

The bucket itself is made, found and deleted by Nebius' CLI, since S3 knows no labels of buckets
there; its objects are read and written by S3, with the key of a service account, which Terraform's
backend uses as well. An object that must be new is written with the condition If-None-Match: *, as
Terraform's lock is (https://developer.hashicorp.com/terraform/language/backend/s3#state-locking).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from functools import partial
from typing import Any

from drillyard.errors import MissingExtraError, UnreachableError, UserError
from drillyard.formatting import plural
from drillyard.programs import parallel_map, shown_text
from drillyard.provision.cluster_plan import CLUSTER_LABEL, ClusterPlan
from drillyard.provision.nebius import cli
from drillyard.provision.nebius.apply_script import s3_backend
from drillyard.provision.nebius.storage_key import KEY_VARIABLES, key_commands, require_key
from drillyard.provision.state_bucket import STATE, StateBucket

try:
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError
    from botocore.session import Session
except ImportError as _error:
    raise MissingExtraError(
        f"a cluster's state in S3 needs its client ({_error.name}): pip install 'drillyard[nebius]'"
    ) from None

ENDPOINT = "AWS_ENDPOINT_URL_S3"
"""Another address of the service, as every client of S3 takes it."""
_ABSENT = ("NoSuchKey", "NoSuchBucket", "NoSuchVersion", "404")
_IS_THERE = ("PreconditionFailed", "ConditionalRequestConflict", "412", "409")
_REFUSED = ("AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "401", "403")
_VERSIONED, _DELETED = "ENABLED", "SCHEDULED_FOR_DELETION"
_BUCKET = ("storage", "bucket")
_AT_ONCE = 10


class NebiusStateBucket(StateBucket):
    """The state's bucket of one cluster. A version is that of S3."""

    scheme, lock = "s3", f"{STATE}.tflock"
    earlier_versions = "aws s3api list-object-versions, then aws s3api copy-object"

    def __init__(self, plan: ClusterPlan) -> None:
        super().__init__(plan)
        self._endpoint = os.environ.get(ENDPOINT) or plan.state_endpoint
        self._opened: Any = None

    @property
    def _client(self) -> Any:
        """The client of S3. Raises UserError where the environment has no key."""
        if self._opened is None:
            require_key(self.plan)
            settings = Config(
                connect_timeout=15,
                read_timeout=60,
                retries={"max_attempts": 4, "mode": "standard"},
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
            )
            key, secret = (os.environ[each] for each in KEY_VARIABLES)
            self._opened = Session().create_client(
                "s3",
                region_name=self.plan.region,
                endpoint_url=self._endpoint,
                aws_access_key_id=key,
                aws_secret_access_key=secret,
                config=settings,
            )
        return self._opened

    def find(self) -> cli.Item | None:
        found = (
            each
            for each in cli.items(*_BUCKET, parent=self.plan.project)
            if cli.name_of(each) == self.name
        )
        return next(found, None)

    def ensure(self) -> bool:
        if (found := self.find()) is not None:
            self._require_usable(found)
            return False
        place = ("--parent-id", self.plan.project, "--name", self.name)
        labels = ",".join(f"{key}={value}" for key, value in (self.plan.labels or {}).items())
        kept = ("--versioning-policy", "enabled", "--labels", labels)
        try:
            cli.call(*_BUCKET, "create", *place, *kept)
        except cli.NebiusError as error:
            if error.refusal != "taken":
                raise
            # Another `up` of this cluster, or another project.
            if self.find() is None:
                raise UserError(
                    f"{self.title}: the name belongs to another project; set cluster.state_bucket"
                ) from None
            return False
        return True

    def _require_usable(self, found: cli.Item) -> None:
        identifier = cli.id_of(found)
        if (found.get("status") or {}).get("state") == _DELETED:
            raise UserError(
                f"{self.title}: somebody has deleted it, and Nebius keeps it for some days\nTake it"
                f" back: nebius storage bucket undelete --id {identifier}"
            )
        if (found.get("spec") or {}).get("versioning_policy") != _VERSIONED:
            raise UserError(
                f"{self.title}: keeps no earlier versions of the state\nTurn them on: nebius"
                f" storage bucket update --id {identifier} --versioning-policy enabled"
            )

    def remove(self) -> str | None:
        found = self.find()
        if found is None:
            return None
        versions = list(self._versions())
        ours = [each for each in versions if self.is_own_object(each[0])]
        parallel_map(self._delete_version, ours, _AT_ONCE)
        label = cli.cluster_label(found)
        if label != self.plan.name:
            return f"its label {CLUSTER_LABEL} is {label or 'missing'}, not {self.plan.name}"
        if others := sorted({name for name, _ in versions} - {name for name, _ in ours}):
            return f"it has {plural(len(others), 'object')} of others: {', '.join(others[:3])}"
        # Without it the bucket stays for seven days, and its name is taken.
        with self._absent():
            cli.call(*_BUCKET, "delete", "--id", cli.id_of(found), "--ttl", "0")
        return None

    def _versions(self) -> Iterator[tuple[str, str]]:
        """Key and version of each content that the bucket has, marks of deletions included."""
        with self._words():
            for page in self._client.get_paginator("list_object_versions").paginate(
                Bucket=self.name
            ):
                for each in (*page.get("Versions", ()), *page.get("DeleteMarkers", ())):
                    yield each["Key"], each["VersionId"]

    def _delete_version(self, version: tuple[str, str]) -> None:
        with self._words():
            key, identifier = version
            self._client.delete_object(Bucket=self.name, Key=key, VersionId=identifier)

    def read(self, name: str) -> tuple[bytes, str] | None:
        with self._words():
            try:
                found = self._client.get_object(Bucket=self.name, Key=f"{self.prefix}/{name}")
                return found["Body"].read(), str(found.get("VersionId", ""))
            except ClientError as error:
                if _code(error) not in _ABSENT:
                    raise
                return None

    def write(self, name: str, data: bytes, *, new: bool = False) -> str | None:
        put = partial(self._client.put_object, Bucket=self.name, Key=f"{self.prefix}/{name}")
        condition = {"IfNoneMatch": "*"} if new else {}
        with self._words():
            try:
                made = put(Body=data, ContentType="application/json", **condition)
            except ClientError as error:
                if not new or _code(error) not in _IS_THERE:
                    raise
                return None
        return str(made.get("VersionId", ""))

    def delete(self, name: str, version: str | None = None) -> None:
        chosen = {"VersionId": version} if version else {}
        with self._words():
            try:
                self._client.delete_object(Bucket=self.name, Key=f"{self.prefix}/{name}", **chosen)
            except ClientError as error:
                if _code(error) not in _ABSENT:
                    raise

    def backend(self) -> dict[str, Any]:
        return s3_backend(self.plan, self._endpoint)

    @contextlib.contextmanager
    def _absent(self) -> Iterator[None]:
        try:
            yield
        except cli.NebiusError as error:
            if error.refusal != "absent":
                raise

    @contextlib.contextmanager
    def _words(self) -> Iterator[None]:
        """Errors of the client as ours, without the key."""
        try:
            yield
        except ClientError as error:
            code = _code(error)
            if code in _REFUSED:
                raise UserError(
                    f"{self.title}: the key in {KEY_VARIABLES[0]} may not use it ({code})\nMake a"
                    f" new one, of a service account that may: {key_commands(self.plan)}"
                ) from None
            raise UserError(f"{self.title}: {code}\nRepeat the command") from None
        except (BotoCoreError, HTTPClientError, OSError) as error:
            raise UnreachableError(
                f"{self.title}: cannot be reached ({shown_text(str(error))})\nCheck the network,"
                " then repeat the command"
            ) from None


def _code(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))
