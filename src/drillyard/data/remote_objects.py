"""Objects at addresses (gs://, s3://, hf://, https://), read by ranges through fsspec as if they
were files.

A range that fails is asked for again from the byte reached, in smaller pieces, so a connection that
is cut every few kilobytes still makes progress; a refusal (401, 403, 404) is an error at once. An
object has a tag (generation, ETag or the like), which is compared after a failure and once a source
is read: bytes of two versions are never mixed unseen.

Objects are read once, into the tokenised cache. Rows of `evaluation.metrics` that generate text are
read at each start.
"""

from __future__ import annotations

import io
import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import PurePosixPath
from typing import Any, BinaryIO, TypeVar, cast
from urllib.parse import urlsplit

from drillyard.config.fetch_limits import is_withheld, withheld_error
from drillyard.config.problems import remote_scheme, shown_address
from drillyard.errors import MissingExtraError, UserError
from drillyard.hub_access import access_advice

Result = TypeVar("Result")

RANGE_BYTES = 8 << 20
"""Bytes asked for at once, per open object."""
SMALLEST_RANGE = 1 << 10
ATTEMPTS = 10
"""Failures in a row, without a byte between them, before an object is given up: about a minute."""
FIRST_PAUSE_SECONDS = 0.1
_TAGS = (
    "generation",
    "ETag",
    "etag",
    "blob_id",
    "md5Hash",
    "Content-MD5",
    "Digest",
    "Last-Modified",
)
_PACKAGES = {
    "gs": "gcsfs",
    "s3": "s3fs",
    "hf": "huggingface_hub",
    "https": "aiohttp",
    "http": "aiohttp",
}
_ACCESS = {
    "gs": (
        "Log in with `gcloud auth application-default login`, or let this account read the bucket"
    ),
    "s3": (
        "Set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, to an account that may"
        " read the bucket"
    ),
    "https": (
        "Give an address that can be read without a login, or download the file and give its path"
    ),
}


@dataclass(frozen=True)
class RemoteObject:
    """An object with its size in bytes and a tag that changes with its content. Picklable; opened
    like a Path."""

    address: str
    size: int
    tag: str

    def __str__(self) -> str:
        """The address without its query, which may hold a signature."""
        return shown_address(self.address)

    @property
    def name(self) -> str:
        """The last part of the path."""
        return PurePosixPath(urlsplit(self.address).path or self.address).name

    @property
    def suffix(self) -> str:
        """The end of the name from its last dot."""
        return PurePosixPath(self.name).suffix

    def open(self, mode: str = "rb") -> BinaryIO:
        """A seekable stream of the bytes. Reading raises UserError if they cannot be read or have
        changed."""
        assert mode == "rb"
        return cast(BinaryIO, io.BufferedReader(_Ranges(self), RANGE_BYTES))


def list_objects(
    address: str, is_readable: Callable[[PurePosixPath], bool]
) -> tuple[RemoteObject, ...]:
    """The object at an address, or those below it with readable names, in the order of their paths.

    UserError if there is none, access is denied, or the service cannot be reached; WithheldError
    if it may not be asked (`fetch_limits.py`).
    """
    if is_withheld(address):
        raise withheld_error(f"data.source: {shown_address(address)}", is_data=True)
    files = _files_of(address)
    path = files._strip_protocol(address)
    info = _retried(address, lambda: _fresh_info(files, path))
    if info["type"] != "directory":
        return (_object(address, info),)
    found = _retried(address, lambda: files.find(path, detail=True))
    objects = []
    for name, each in sorted(found.items()):
        below = PurePosixPath(name[len(path) :].lstrip("/"))
        if is_readable(below) and not any(part.startswith(".") for part in below.parts):
            objects.append(_object(f"{address.rstrip('/')}/{below}", each))
    return tuple(objects)


def _object(address: str, info: dict[str, Any]) -> RemoteObject:
    tag = next((f"{key} {info[key]}" for key in _TAGS if info.get(key)), None)
    if info.get("size") is None or tag is None:
        raise UserError(
            f"{shown_address(address)}: its size or version (ETag, Last-Modified) is not known, so"
            " a change would go unnoticed. Download it and give its path."
        )
    return RemoteObject(address, int(info["size"]), tag)


def _fresh_info(files: Any, path: str) -> dict[str, Any]:
    files.invalidate_cache()
    return dict(files.info(path))


class _Ranges(io.RawIOBase):
    """The bytes of an object by ranges."""

    def __init__(self, remote: RemoteObject) -> None:
        self._object, self._at = remote, 0
        self._files = _files_of(remote.address)
        self._path = self._files._strip_protocol(remote.address)
        self._range = RANGE_BYTES
        # Google's storage reads the generation that was listed, or fails.
        self._version = (
            {"generation": remote.tag.partition(" ")[2]}
            if remote.tag.startswith("generation ")
            else {}
        )

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = (
            offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._object.size}[whence]
        )
        return self._at

    def readinto(self, buffer: Any) -> int:
        wanted = min(len(buffer), self._object.size - self._at)
        if wanted <= 0:
            return 0
        data = _retried(self._object.address, lambda: self._fetch(wanted), f" at byte {self._at}")
        buffer[: len(data)] = data
        self._at += len(data)
        self._range = min(RANGE_BYTES, 2 * self._range)
        return len(data)

    def _fetch(self, wanted: int) -> bytes:
        count = min(wanted, self._range)
        try:
            data: bytes = self._files.cat_file(
                self._path, start=self._at, end=self._at + count, **self._version
            )
        except Exception:
            self._range = max(SMALLEST_RANGE, count // 8)
            self._require_unchanged()
            raise
        if len(data) > count:
            raise UserError(
                f"{self._object}: the server sends the whole object where a part is asked for."
                " Download it and give its path."
            )
        if len(data) < count:
            self._range = max(SMALLEST_RANGE, count // 8)
            self._require_unchanged()
            if not data:
                raise ConnectionError("the connection ended")
        return data

    def _require_unchanged(self) -> None:
        """Raise UserError if the object is not the one that was listed; nothing if that cannot be
        found out now."""
        try:
            now = _object(self._object.address, _fresh_info(self._files, self._path))
        except Exception:
            return  # the attempt's own error says why
        if now != self._object:
            raise UserError(
                f"{self._object} changed while it was read ({self._object.size} bytes,"
                f" {self._object.tag}; now {now.size} bytes, {now.tag}). Start again when it is"
                " complete."
            )


def _retried(address: str, attempt: Callable[[], Result], where: str = "") -> Result:
    for number in range(ATTEMPTS):
        try:
            return attempt()
        except UserError:
            raise
        except Exception as error:  # each file system has its own
            refuse(address, error)
            last = error
        if number + 1 < ATTEMPTS:
            time.sleep(FIRST_PAUSE_SECONDS * 2**number)
    raise UserError(
        f"{shown_address(address)}: cannot be read{where} after {ATTEMPTS} attempts"
        f" ({_reason(last)}). Start again when it can be reached; nothing incomplete was kept."
    ) from None


def refuse(address: str, error: Exception) -> None:
    """Raise UserError for an error that another attempt cannot change: no access, no such object,
    a redirect that is refused."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, UserError):
            raise cause from None
        cause = cause.__cause__
    status, scheme = _status(error), remote_scheme(address) or ""
    if status in (401, 403):
        raise UserError(
            f"{shown_address(address)}: access is denied ({status})."
            f" {_access_advice(address, scheme)}."
        ) from None
    if status in (404, 410):
        raise UserError(
            f"{shown_address(address)}: no such object or bucket. Check the address."
        ) from None
    is_wrong = isinstance(error, ValueError) and not isinstance(
        error, json.JSONDecodeError
    )  # half an answer of an API
    if is_wrong or type(error).__name__ == "OfflineModeIsEnabled":
        raise UserError(f"{shown_address(address)}: cannot be read ({_reason(error)}).") from None


def _access_advice(address: str, scheme: str) -> str:
    if scheme != "hf":
        return _ACCESS[scheme if scheme in _ACCESS else "https"]
    repository = "/".join(address.removeprefix("hf://").split("@")[0].split("/")[:3])
    return access_advice(repository)


def _status(error: BaseException | None) -> int | None:
    """The HTTP status behind an error, or the one it amounts to; None for a failure that may
    pass."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        seen.append(error)
        for owner in (error, getattr(error, "response", None)):
            for name in ("status", "status_code", "code"):
                value = getattr(owner, name, None)
                if isinstance(value, int) and 400 <= value < 600:
                    return value
        error = error.__cause__ or error.__context__
    for each in seen:
        if (
            isinstance(each, PermissionError)
            or str(each).startswith("Forbidden")
            or "Credentials" in type(each).__name__
        ):
            return 403
    if isinstance(seen[0], FileNotFoundError) and len(seen) == 1:
        return 404
    return None


def _reason(error: BaseException) -> str:
    text = re.sub(r"[?]\S*", "", (str(error).splitlines() or [""])[0])
    return f"{type(error).__name__}: {text}".rstrip(": ")


def _files_of(address: str) -> Any:
    scheme = remote_scheme(address) or ""
    if _PACKAGES[scheme] != "aiohttp":
        return _filesystem(scheme)
    _require_package(scheme)
    from drillyard.data.http_objects import http_files

    return http_files(urlsplit(address).hostname or "")


@lru_cache
def _filesystem(scheme: str) -> Any:
    _require_package(scheme)
    import fsspec

    package = _PACKAGES[scheme]
    options: dict[str, Any] = {"skip_instance_cache": True, "use_listings_cache": False}
    if package == "gcsfs":
        import logging

        from gcsfs.core import GCSFileSystem

        # It logs each failure with a traceback; the message of the last one is ours.
        logging.getLogger("gcsfs").setLevel(logging.CRITICAL)

        # The class that fsspec would take first asks for the bucket's type, which needs rights that
        # a reader may lack.
        return GCSFileSystem(**options)
    return fsspec.filesystem(scheme, **options)


def _require_package(scheme: str) -> None:
    import importlib

    try:
        importlib.import_module(_PACKAGES[scheme])
        importlib.import_module("fsspec")
    except ImportError as error:
        raise MissingExtraError(
            f"data.source: {scheme}:// needs the package {_PACKAGES[scheme]}, which is not"
            " installed.\npip install 'drillyard[remote]'"
        ) from error
