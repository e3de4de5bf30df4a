"""Paths in a Vertex AI job's bucket: every container sees gs://BUCKET as the directory /gcs/BUCKET.

The mount is Cloud Storage FUSE (https://cloud.google.com/vertex-ai/docs/training/cloud-storage-file-system). Plans
contain the containers' paths; this machine reads and writes the bucket itself.
"""

from __future__ import annotations

import posixpath
import re
from dataclasses import dataclass

from drillyard.config.cluster import ClusterConfig
from drillyard.errors import UserError

MOUNT = "/gcs"
_SCHEME = "gs://"
# https://cloud.google.com/storage/docs/buckets#naming
_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]")


@dataclass(frozen=True)
class BucketPath:
    """A place in a bucket; `key` is the object's name, or the prefix of those below a directory, without end slash."""

    bucket: str
    key: str

    @property
    def mounted(self) -> str:
        """As containers see it."""
        return posixpath.join(MOUNT, self.bucket, self.key).rstrip("/")

    @property
    def uri(self) -> str:
        """Its gs:// address."""
        return f"{_SCHEME}{self.bucket}/{self.key}"

    @classmethod
    def at(cls, path: str) -> BucketPath:
        """The place of a container's path, or of gs://BUCKET/KEY."""
        bucket, _, key = path.removeprefix(f"{MOUNT}/").removeprefix(_SCHEME).partition("/")
        return cls(bucket, key.rstrip("/"))

    def below(self, path: str) -> BucketPath:
        """A file or directory below this one."""
        return BucketPath(self.bucket, posixpath.join(self.key, path))


def bucket_of(cluster: ClusterConfig) -> str:
    """The bucket of the cluster. UserError where its name cannot be one."""
    name = cluster.storage.bucket or ""
    if not _BUCKET.fullmatch(name):
        raise UserError(
            f"cluster config: storage.bucket: '{name}' cannot be a bucket's name: 3 to 222 lower case letters, digits, "
            "'-', '_' and '.' (https://cloud.google.com/storage/docs/buckets#naming); write it without gs://"
        )
    return name


def project_of(cluster: ClusterConfig) -> BucketPath:
    """What relative paths of a run config refer to: `storage.directory`, which lies in the bucket, or the bucket."""
    root = BucketPath(bucket_of(cluster), "")
    wanted = cluster.storage.directory
    return root if wanted is None else _inside(wanted, root, "cluster config: storage.directory")


def output_of(output: str, cluster: ClusterConfig) -> BucketPath:
    """The directory that holds run directories: `output` of the run config, in the cluster's bucket."""
    return _inside(output, project_of(cluster), "run config: output")


def _inside(path: str, base: BucketPath, where: str) -> BucketPath:
    mounted = posixpath.join(MOUNT, path.removeprefix(_SCHEME)) if path.startswith(_SCHEME) else path
    whole = posixpath.normpath(posixpath.join(base.mounted, mounted))
    root = posixpath.join(MOUNT, base.bucket)
    if whole != root and not whole.startswith(root + "/"):
        raise UserError(
            f"{where}: {path} is not in the bucket {base.bucket}: on Vertex AI only a bucket is seen by all nodes and "
            f"outlives them\nWrite a relative path, or one below {root} (that is {_SCHEME}{base.bucket})."
        )
    return BucketPath(base.bucket, whole[len(root) :].strip("/"))
