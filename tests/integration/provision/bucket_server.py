"""A server for Cloud Storage on this machine, as Google's Python client and Terraform's gcs backend
use it: buckets with labels, objects with generations, conditions and earlier versions, and folders,
which an object makes in a hierarchical namespace, and which keep their bucket from being deleted.

fake-gcs-server keeps neither labels nor earlier versions, deletes buckets that have objects, and
ignores conditions of a deletion, all of which the state's bucket rests on.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from email.parser import BytesParser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit


@dataclass
class Version:
    name: str
    generation: int
    data: bytes
    live: bool = True


@dataclass
class StoredBucket:
    settings: dict[str, Any]
    versions: list[Version] = field(default_factory=list)
    folders: dict[str, set[str]] = field(
        default_factory=lambda: {"folders": set(), "managedFolders": set()}
    )
    """By the kind of folder; names end in `/`."""

    @property
    def is_hierarchical(self) -> bool:
        return bool(self.settings.get("hierarchicalNamespace", {}).get("enabled"))

    @property
    def is_empty(self) -> bool:
        return not self.versions and not any(self.folders.values())

    def is_used(self, folder: str) -> bool:
        """Whether something is in a folder."""
        names = [*(each.name for each in self.versions), *self.folders["folders"]]
        return any(each.startswith(folder) and each != folder for each in names)

    @property
    def keeps_versions(self) -> bool:
        return bool(self.settings.get("versioning", {}).get("enabled"))

    def live(self, name: str) -> Version | None:
        return next((each for each in self.versions if each.name == name and each.live), None)


@dataclass
class BucketServer:
    """`buckets` is what there is. `on_request` sees method and path before each answer, and may
    wait or raise; `refused`: paths (patterns) that answer 403."""

    buckets: dict[str, StoredBucket] = field(default_factory=dict)
    on_request: Callable[[str, str], None] = lambda method, path: None
    on_deleted: Callable[[str], None] = lambda bucket: None
    """Called when a client has deleted a bucket."""
    refused: str = ""
    number: str = "123456789012"
    """Of the project whose buckets these are."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._generation = int(time.time() * 1e6)
        server = self

        class Handler(_Handler):
            store = server

        self._server = _Server(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def names(self, bucket: str) -> list[str]:
        """The names of the live objects of a bucket."""
        return sorted(each.name for each in self.buckets[bucket].versions if each.live)

    def text(self, bucket: str, name: str) -> str:
        found = self.buckets[bucket].live(name)
        assert found is not None, name
        return found.data.decode()

    def put(self, bucket: str, name: str, data: bytes) -> Version:
        """Write an object; an earlier one becomes an earlier version, or goes."""
        place = self.buckets[bucket]
        self.drop(place, place.live(name))
        self._generation += 1
        made = Version(name, self._generation, data)
        place.versions.append(made)
        if place.is_hierarchical:
            parts = name.split("/")[:-1]
            place.folders["folders"] |= {
                "/".join(parts[:end]) + "/" for end in range(1, len(parts) + 1)
            }
        return made

    @staticmethod
    def drop(place: StoredBucket, found: Version | None) -> None:
        if found is not None:
            found.live = False
            if not place.keeps_versions:
                place.versions.remove(found)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that was killed reads no answer."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    store: BucketServer

    def log_message(self, *arguments: Any) -> None:
        pass

    def _handle(self) -> None:
        url = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        body = self._body()
        try:
            self.store.on_request(self.command, url.path)
        except ConnectionError:
            self.close_connection = True
            return
        if self.store.refused and re.search(self.store.refused, url.path):
            return self._fail(403, "caller does not have storage.objects.list access")
        path = re.sub(r"^/(upload|download)(?=/storage/)", "", url.path)
        with self.store.lock:
            if not path.startswith("/storage/v1/"):
                bucket, _, name = path.lstrip("/").partition("/")
                return self._object(bucket, unquote(name), {"alt": "media", **query}, body)
            bucket, _, rest = path.removeprefix("/storage/v1/b").lstrip("/").partition("/")
            if not rest:
                return self._bucket(bucket, query, body)
            kind, _, folder = rest.partition("/")
            if kind in ("folders", "managedFolders"):
                return self._folders(bucket, kind, unquote(folder), query)
            name = unquote(rest.removeprefix("o").lstrip("/"))
            if name:
                return self._object(bucket, name, query, body)
            return self._objects(bucket, query, body)

    do_GET = do_POST = do_PATCH = do_DELETE = _handle

    def _bucket(self, name: str, query: dict[str, str], body: bytes) -> None:
        buckets = self.store.buckets
        if self.command == "GET" and not name:
            named = [each for each in buckets if each.startswith(query.get("prefix", ""))]
            found = [buckets[each].settings for each in named]
            of = query["project"]
            own = [self._shown(each) for each in found if each.get("of", of) == of]
            return self._answer({"items": own})
        if self.command == "POST":
            settings = json.loads(body)
            if settings["name"] in buckets:
                return self._fail(409, "You already own this bucket")
            buckets[settings["name"]] = StoredBucket(settings)
            return self._answer(self._shown(settings))
        if name not in buckets:
            return self._fail(404, "The specified bucket does not exist.")
        if self.command == "DELETE":
            if not buckets[name].is_empty:
                return self._fail(409, "The bucket you tried to delete is not empty.")
            del buckets[name]
            self.store.on_deleted(name)
            return self._send(204, b"")
        if self.command == "PATCH":
            buckets[name].settings.update(json.loads(body))
        return self._answer(self._shown(buckets[name].settings))

    def _shown(self, settings: dict[str, Any]) -> dict[str, Any]:
        return {"projectNumber": self.store.number, **settings}

    def _objects(self, bucket: str, query: dict[str, str], body: bytes) -> None:
        place = self.store.buckets.get(bucket)
        if place is None:
            return self._fail(404, "The specified bucket does not exist.")
        if self.command == "POST":
            metadata, data = self._uploaded(query, body)
            name = metadata.get("name") or query["name"]
            if not self._meets(place.live(name), query):
                return self._fail(412, "conditionNotMet")
            return self._answer(_shown(bucket, self.store.put(bucket, name, data)))
        found = [
            each
            for each in place.versions
            if each.name.startswith(query.get("prefix", ""))
            and (each.live or query.get("versions", "").lower() == "true")
        ]
        most = int(query.get("maxResults", len(found) or 1))
        return self._answer({"items": [_shown(bucket, each) for each in found[:most]]})

    def _folders(self, bucket: str, kind: str, name: str, query: dict[str, str]) -> None:
        place = self.store.buckets.get(bucket)
        if place is None or (name and name not in place.folders[kind]):
            return self._fail(404, "The specified folder or bucket does not exist.")
        if kind == "folders" and not place.is_hierarchical:
            return self._fail(409, "The bucket has no hierarchical namespace.")
        if not name:
            # In pages, as the service gives them.
            found = sorted(place.folders[kind])
            begin = int(query.get("pageToken", 0))
            more = {"nextPageToken": str(begin + 2)} if len(found) > begin + 2 else {}
            items = [{"name": each, "bucket": bucket} for each in found[begin : begin + 2]]
            return self._answer({"items": items, **more})
        if place.is_used(name):
            return self._fail(409, "The folder you tried to delete is not empty.")
        place.folders[kind].discard(name)
        place.folders["managedFolders"].discard(name)
        return self._send(204, b"")

    def _object(self, bucket: str, name: str, query: dict[str, str], body: bytes) -> None:
        place = self.store.buckets.get(bucket)
        found = None if place is None else place.live(name)
        if place is not None and "generation" in query:
            wanted = int(query["generation"])
            found = next((each for each in place.versions if each.generation == wanted), None)
        if found is None or place is None:
            return self._fail(404, f"No such object: {bucket}/{name}")
        if not self._meets(found, query):
            return self._fail(412, "conditionNotMet")
        if self.command == "DELETE":
            if "generation" in query:
                place.versions.remove(found)
            else:
                self.store.drop(place, found)
            return self._send(204, b"")
        if query.get("alt") == "media":
            return self._send(200, found.data, {"x-goog-generation": str(found.generation)})
        return self._answer(_shown(bucket, found))

    @staticmethod
    def _meets(found: Version | None, query: dict[str, str]) -> bool:
        wanted = query.get("ifGenerationMatch")
        return wanted is None or int(wanted) == (found.generation if found else 0)

    def _uploaded(self, query: dict[str, str], body: bytes) -> tuple[dict[str, Any], bytes]:
        if query.get("uploadType") != "multipart":
            return {}, body
        kind = f"Content-Type: {self.headers['Content-Type']}\r\n\r\n".encode()
        first, second = BytesParser().parsebytes(kind + body).get_payload()
        payload = second.get_payload(decode=True)  # type: ignore[union-attr]
        return json.loads(first.get_payload()), payload  # type: ignore[union-attr,arg-type,return-value]

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _answer(self, content: Any) -> None:
        self._send(200, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def _fail(self, status: int, message: str) -> None:
        content = {"error": {"code": status, "message": message, "errors": [{"reason": "x"}]}}
        self._send(status, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, data: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)


def _shown(bucket: str, version: Version) -> dict[str, Any]:
    return {
        "kind": "storage#object",
        "bucket": bucket,
        "name": version.name,
        "generation": str(version.generation),
        "metageneration": "1",
        "size": str(len(version.data)),
    }
