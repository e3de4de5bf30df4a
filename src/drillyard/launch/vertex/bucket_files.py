"""The run directories of Vertex AI jobs: objects of a bucket, under the paths that containers see.

`BucketFiles` implements `remote_files.Files`, so logs and artifacts are read by the same code as
those of hosts. A node's log is stored in parts (`node-0.log`, `node-0.log.0001`, ...), which are
read as one file. The bucket is read directly, without the cache of a mount.

Cost: a listing per directory and request, then one range request for each file that has grown, 10
at a time.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import PurePosixPath
from typing import Any, TypeVar

from drillyard.config.cluster import ClusterConfig
from drillyard.errors import MissingExtraError, UnreachableError, UserError
from drillyard.launch.file_server import HEAD_BYTES
from drillyard.launch.remote_files import Files, ReadRequest, ReadResult
from drillyard.launch.vertex.config import NO_CLIENT, bucket_of, mounted, uri_of
from drillyard.programs import parallel_map

try:
    from google.api_core import exceptions
    from google.auth.credentials import AnonymousCredentials
    from google.auth.exceptions import DefaultCredentialsError, GoogleAuthError
    from google.cloud import storage
    from google.cloud.storage.retry import DEFAULT_RETRY
except ImportError as _error:
    raise MissingExtraError(NO_CLIENT.format(_error.name)) from None

PART = re.compile(r"(?P<log>.*/node-\d+\.log)\.(?P<number>\d{4,})")
_AT_ONCE = 10
"""As many connections as Google's client keeps."""
_LISTED = "items(name,size),nextPageToken"
# Retries are safe for all that is done here: an object is written whole or not, and twice the same
# content is the same object.
_LIMITS: dict[str, Any] = {"retry": DEFAULT_RETRY.with_timeout(30.0), "timeout": 60.0}
_ABSENT = (
    exceptions.NotFound,
    exceptions.PreconditionFailed,
    exceptions.RequestRangeNotSatisfiable,
)
_T = TypeVar("_T")


@dataclass(frozen=True)
class StoredObject:
    """An object as it was at one moment."""

    content: bytes
    generation: int
    """Another one each time that the object is written or made again."""
    created_at: float
    """Unix seconds, by the bucket's clock."""


class BucketFiles(Files):
    """Files of a cluster's bucket."""

    def __init__(self, cluster: ClusterConfig) -> None:
        assert cluster.location is not None
        self._name = bucket_of(cluster)
        self._root = mounted(self._name) + "/"
        self.title = uri_of(self._name)
        # Google's own variable, by which its client finds a server for tests: it has no accounts.
        emulated = "STORAGE_EMULATOR_HOST" in os.environ
        with self._words():
            credentials = AnonymousCredentials() if emulated else None  # type: ignore[no-untyped-call]
            client = storage.Client(project=cluster.location.project, credentials=credentials)
            self._bucket = client.bucket(self._name)

    def find(self, patterns: Sequence[str]) -> list[tuple[str, int]]:
        found: dict[str, int] = {}
        for pattern in patterns:
            for path, size in self._whole(re.split(r"[*?\[]", pattern, maxsplit=1)[0]).items():
                # As glob does it: a star does not match a slash.
                if PurePosixPath(path).match(pattern):
                    found[path] = size
        return sorted(found.items())

    def tree(self, directory: str) -> list[tuple[str, int]]:
        top = directory.rstrip("/") + "/"
        return sorted((path.removeprefix(top), size) for path, size in self._whole(top).items())

    def read(self, requests: Sequence[ReadRequest]) -> list[ReadResult | None]:
        directories = {posixpath.dirname(request.path) + "/" for request in requests}
        parts: dict[str, list[tuple[str, int]]] = {}
        for directory in directories:
            parts.update(self._parts(directory))
        return parallel_map(
            lambda request: self._piece(request, parts.get(request.path)), requests, _AT_ONCE
        )

    def close(self) -> None:
        pass  # Nothing stays open between requests.

    def text(self, path: str) -> str | None:
        """An object as text; None where there is none."""
        blob = self._bucket.blob(self._key(path))
        found: bytes | None = self._answer(lambda: blob.download_as_bytes(**_LIMITS), None)
        return None if found is None else found.decode("utf-8", errors="replace")

    def remove(self, path: str, generation: int | None = None) -> None:
        """Remove an object, where it exists; with `generation`, only where it is still that one."""
        blob = self._bucket.blob(self._key(path))
        self._answer(lambda: blob.delete(if_generation_match=generation, **_LIMITS), None)

    def create(self, path: str, content: bytes) -> int | None:
        """Create an object; returns its generation, None where there is one. Of several at once
        one creates it. `content` is of this call alone: by it an object is recognised whose answer
        was lost."""
        blob = self._bucket.blob(self._key(path))

        def created() -> int | None:
            with self._words():
                try:
                    blob.upload_from_string(content, if_generation_match=0, **_LIMITS)
                except exceptions.PreconditionFailed:
                    return None
            return int(blob.generation)

        made = self._retried(created)
        if made is None and (there := self.stored(path)) is not None and there.content == content:
            return there.generation
        return made

    def stored(self, path: str) -> StoredObject | None:
        """An object with its generation; None where there is none, or a newer one by now."""
        blob = self._bucket.blob(self._key(path))

        def read() -> StoredObject | None:
            blob.reload(**_LIMITS)
            generation = int(blob.generation)
            content = blob.download_as_bytes(if_generation_match=generation, **_LIMITS)
            return StoredObject(content, generation, blob.time_created.timestamp())

        return self._answer(read, None)

    def write(self, directory: str, contents: Mapping[str, bytes]) -> None:
        """Write objects below a directory. Directories become objects too, for mounts that need
        them."""
        top = self._key(directory)
        made = {posixpath.join(top, path): content for path, content in contents.items()}
        parents = {str(parent) for name in made for parent in PurePosixPath(name).parents}
        made.update({f"{parent}/": b"" for parent in parents if len(parent) >= len(top)})

        def put(name: str) -> None:
            kind = "application/octet-stream"
            self._bucket.blob(name).upload_from_string(made[name], content_type=kind, **_LIMITS)

        with self._words():
            parallel_map(put, list(made), _AT_ONCE)

    def _parts(self, prefix: str) -> dict[str, list[tuple[str, int]]]:
        """The files with this prefix, each with its objects in order: mounted path and size."""

        def listed() -> list[tuple[str, int]]:
            blobs = self._bucket.list_blobs(prefix=self._key(prefix), fields=_LISTED, **_LIMITS)
            return sorted(
                {
                    f"{self._root}{b.name}": int(b.size) for b in blobs if not b.name.endswith("/")
                }.items()
            )

        files: dict[str, list[tuple[str, int]]] = {}
        for path, size in self._answer(listed):
            part = PART.fullmatch(path)
            files.setdefault(part["log"] if part else path, []).append((path, size))
        return files

    def _whole(self, prefix: str) -> dict[str, int]:
        """Path and size of the files with this prefix."""
        return {path: sum(size for _, size in parts) for path, parts in self._parts(prefix).items()}

    def _piece(
        self, request: ReadRequest, parts: Sequence[tuple[str, int]] | None
    ) -> ReadResult | None:
        if parts is None:
            return None
        size = sum(size for _, size in parts)
        replaced = size < request.offset
        begin = (
            0
            if replaced
            else request.offset
            if request.offset >= 0
            else max(0, size + request.offset)
        )
        data = self._range(parts, begin, request.length)
        head = (
            data[:HEAD_BYTES] if begin == 0 else request.head or self._range(parts, 0, HEAD_BYTES)
        )
        return ReadResult(head, replaced, data)

    def _range(self, parts: Sequence[tuple[str, int]], begin: int, length: int) -> bytes:
        data = b""
        for path, size in parts:
            if begin < size and len(data) < length:
                last = min(size, begin + length - len(data)) - 1
                blob = self._bucket.blob(self._key(path))
                data += self._answer(
                    partial(blob.download_as_bytes, start=begin, end=last, **_LIMITS), b""
                )
            begin = max(0, begin - size)
        return data

    def _key(self, path: str) -> str:
        if not path.startswith(self._root):
            raise UserError(f"{path}: is not in {self.title}")
        return path.removeprefix(self._root)

    def _answer(self, ask: Callable[[], _T], *absent: _T) -> _T:
        """The answer; `absent`, where given, for an object that is not there, is another one than
        was meant, or is shorter than its listing."""

        def answered() -> _T:
            with self._words():
                try:
                    return ask()
                except _ABSENT as error:
                    # A missing bucket is a mistake, unlike a missing object.
                    if not absent or re.search(
                        "bucket (does not exist|not found)", str(error), re.I
                    ):
                        raise
                    return absent[0]

        return self._retried(answered)

    @contextmanager
    def _words(self) -> Iterator[None]:
        try:
            yield
        except exceptions.NotFound as error:
            raise UserError(
                f"storage.bucket: there is no bucket {self._name}, or it is not yours to see"
                f" ({_first(error)})\nMake it: gcloud storage buckets create {self.title}"
                " --location REGION"
            ) from None
        except (exceptions.Forbidden, exceptions.Unauthorized) as error:
            raise UserError(
                f"storage.bucket: {self.title} may not be used ({_first(error)})\nYou, and the"
                " job's service account, need roles/storage.objectAdmin: gcloud storage buckets"
                f" add-iam-policy-binding {self.title} ..."
            ) from None
        except DefaultCredentialsError:
            raise UserError(
                f"{self.title}: this machine has no credentials of Google Cloud; run "
                "`gcloud auth application-default login`"
            ) from None
        except (exceptions.GoogleAPIError, GoogleAuthError, OSError) as error:
            raise UnreachableError(
                f"{self.title}: cannot be reached ({_first(error)}); check the network"
            ) from None


def _first(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]
