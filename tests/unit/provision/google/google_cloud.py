"""A project of Google Cloud on loopback: keeps state and speaks the REST paths of the services that
`drillyard cluster` asks, so that Google's own client can be tested against it.

It answers in small pages, and does what the cloud does wrong: refuses lists, throttles, fails,
drops connections, leaves places out and loses deletions.
"""

from __future__ import annotations

import json
import re
import threading
import urllib.parse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PROJECT, NUMBER = "acme-ml", "123456789012"
COMPUTE_SCOPES = ("zones/us-central1-b", "zones/us-east1-b", "regions/us-central1", "global")
Body = dict[str, Any]
DENIED, DISABLED, DROP = "IAM_PERMISSION_DENIED", "SERVICE_DISABLED", "DROP"


@dataclass
class Fault:
    """What happens to requests of `service` whose path and method match, so many times."""

    service: str
    pattern: str
    status: int = 403
    reason: str = DENIED
    times: int | None = None
    consumer: str = f"projects/{NUMBER}"
    skip: int = 0
    """So many requests are answered first."""

    def takes(self, service: str, path: str) -> bool:
        if self.times == 0 or service != self.service or not re.search(self.pattern, path):
            return False
        if self.skip:
            self.skip -= 1
            return False
        if self.times is not None:
            self.times -= 1
        return True


@dataclass
class GoogleCloud:
    """The project. `things` are by service and path: `compute`, `zones/us-central1-b/disks/a`."""

    things: dict[tuple[str, str], Body] = field(default_factory=dict)
    page_size: int = 3
    faults: list[Fault] = field(default_factory=list)
    left_out: dict[str, list[str]] = field(default_factory=dict)
    """Places that a list leaves out, by `service/collection`."""
    lost_deletes: set[str] = field(default_factory=set)
    bindings: list[Body] = field(default_factory=list)
    quotas: dict[str, list[Body]] = field(default_factory=dict)
    quota_metrics: dict[str, Body] = field(default_factory=dict)
    enabled: set[str] | None = None
    permissions: set[str] | None = None
    billing: bool = True
    project: Body | None = field(default_factory=lambda: {"state": "ACTIVE"})
    server_config: Body = field(default_factory=dict)
    host: str = ""
    """The host project of a shared VPC that the project is attached to."""
    host_bindings: list[Body] = field(default_factory=list)
    stale_assets: list[Body] = field(default_factory=list)
    objects: dict[str, bytes] = field(default_factory=dict)
    email: str = "ann@example.com"
    requests: list[str] = field(default_factory=list)
    headers: list[Mapping[str, str]] = field(default_factory=list)

    def add(self, service: str, path: str, /, **body: Any) -> str:
        """Make a thing; its address, as others refer to it."""
        name = path.rpartition("/")[2]
        address = f"https://www.googleapis.com/compute/v1/projects/{PROJECT}/{path}"
        made: Body = {"name": name, **body}
        if service == "compute":
            made = {"selfLink": address, **made}
        elif service == "container":
            made = {"location": path.split("/")[1], **made}
        elif service in ("file", "lustre", "parallelstore", "artifactregistry", "aiplatform"):
            made = {**made, "name": f"projects/{PROJECT}/{path}"}
        elif service == "iam":
            made = {**made, "name": f"projects/{PROJECT}/{path}", "email": name}
        self.things[service, path] = made
        return address if service == "compute" else f"projects/{PROJECT}/{path}"

    def refuse(self, service: str, pattern: str = ".", **how: Any) -> None:
        self.faults.append(Fault(service, pattern, **how))

    # Answers

    def answer(
        self, method: str, service: str, path: str, query: Mapping[str, str], body: Body
    ) -> Any:
        """The JSON of one request; None: there is no such thing."""
        if method == "DELETE":
            return self._delete(service, path)
        if path.endswith("/cancel"):
            return {"kind": "compute#operation", "status": "DONE"}
        if service == "oslogin":
            return self.things.get((service, path))
        host = re.match(r"compute/v1/projects/([^/]+)(/.*)?$", path)
        if service == "compute" and host and host[1] != PROJECT:
            return self._host(host[1], (host[2] or "").strip("/"), query, body)
        if service == "compute" and path.endswith("/getXpnHost"):
            return {"name": self.host} if self.host else {}
        if service == "compute":
            return self._compute(path.removeprefix(f"compute/v1/projects/{PROJECT}"), query)
        if service == "storage":
            return self._storage(path.removeprefix("storage/v1/"), query)
        if service == "cloudasset":
            return self._assets(query)
        if service == "oauth2":
            return {"email": self.email}
        if service == "serviceusage":
            return self._services(path, query)
        if service == "cloudbilling":
            return {"billingEnabled": self.billing}
        if service == "cloudresourcemanager":
            return self._project(path, body)
        if service == "container" and path.endswith("/serverConfig"):
            return self.server_config
        if service == "dns":
            path = path.removeprefix("dns/")
        return self._listed(service, path, query)

    def _host(self, project: str, path: str, query: Mapping[str, str], body: Body) -> Any:
        """Another project, whose things are below `projects/NAME/` and whose rights are all."""
        own = f"projects/{project}/{path}"
        if path.endswith("/testIamPermissions"):
            asked = body["permissions"]
            granted = asked if self.permissions is None else sorted(self.permissions & set(asked))
            return {"permissions": granted}
        if path == "":
            return {"quotas": self.quotas.get(project, [])}
        if ("compute", own) in self.things:
            return self.things["compute", own]
        if path.endswith("/getIamPolicy"):
            return {"bindings": self.host_bindings}
        if re.fullmatch("global/[^/]+|regions/[^/]+/[^/]+", path):
            return self._page(self._below("compute", own), "items", query, "global")
        return None

    def _project(self, path: str, body: Body) -> Any:
        if path.endswith(":getIamPolicy") and f"projects/{self.host}:" in path:
            return {"bindings": self.host_bindings}
        if path.endswith(":getIamPolicy"):
            return {"bindings": self.bindings, "version": 3}
        if path.endswith(":testIamPermissions"):
            asked = body["permissions"]
            granted = asked if self.permissions is None else sorted(self.permissions & set(asked))
            return {"permissions": granted} if granted else {}
        if self.project is None or not path.endswith(f"/{PROJECT}"):
            return None
        return {"name": f"projects/{NUMBER}", "projectId": PROJECT, **self.project}

    def _compute(self, path: str, query: Mapping[str, str]) -> Any:
        path = path.strip("/")
        if path == "":
            return {"quotas": self.quotas.get("global", [])}
        if path.startswith("aggregated/"):
            return self._aggregated(path.removeprefix("aggregated/"), query)
        if re.fullmatch("regions/[^/]+", path):
            return {"name": path, "quotas": self.quotas.get(path.partition("/")[2], [])}
        if ("compute", path) in self.things:
            return self.things["compute", path]
        if re.fullmatch("global/[^/]+|(zones|regions)/[^/]+/[^/]+|.*/resizeRequests", path):
            return self._page(self._below("compute", path), "items", query, "global")
        return None

    def _aggregated(self, collection: str, query: Mapping[str, str]) -> Body:
        found = sorted(
            (path, body)
            for (service, path), body in self.things.items()
            if service == "compute" and path.split("/")[-2] == collection
        )
        out = self.left_out.get(f"compute/{collection}", [])
        found = [each for each in found if _scope(each[0]) not in out]
        if wanted := re.fullmatch(r'name\s*=\s*"?([^"]+)"?', query.get("filter", "")):
            found = [each for each in found if each[1]["name"] == wanted[1]]
        page = self._page(found, "items", query, collection)
        scopes: Body = {}
        for path, body in page.pop("items", []):
            scopes.setdefault(_scope(path), {collection: []})[collection].append(body)
        for scope in COMPUTE_SCOPES:
            nothing = {"warning": {"code": "NO_RESULTS_ON_PAGE", "message": "nothing here"}}
            scopes.setdefault(scope, nothing)
        if out:
            page["unreachables"] = out
        return {**page, "items": scopes}

    def _storage(self, path: str, query: Mapping[str, str]) -> Any:
        if path.startswith("b/") and "/o/" in path:
            bucket, _, name = path.removeprefix("b/").partition("/o/")
            return self.objects.get(f"{bucket}/{urllib.parse.unquote(name)}")
        if path.endswith("/o"):
            bucket = path.removeprefix("b/").removesuffix("/o")
            names = sorted(each for each in self.objects if each.startswith(f"{bucket}/"))
            return {"items": [{"name": each.partition("/")[2]} for each in names]}
        if path != "b":
            return self.things.get(("storage", path))
        found = [
            (key, body)
            for (service, key), body in sorted(self.things.items())
            if service == "storage" and body.get("projectNumber", NUMBER) == NUMBER
        ]
        return self._page(found, "items", query, "storage/b")

    def _listed(self, service: str, path: str, query: Mapping[str, str]) -> Any:
        path = re.sub(f"^v1/projects/{PROJECT}/", "", path)
        if (service, path) in self.things:
            return self.things[service, path]
        collection = path.rpartition("/")[2]
        if collection not in _COLLECTIONS:
            return None
        key = {"serviceAccounts": "accounts"}.get(collection, collection)
        pattern = path.replace("/-/", "/[^/]+/")
        found = [
            (each, body)
            for (owner, each), body in sorted(self.things.items())
            if owner == service and re.fullmatch(f"{pattern}/[^/]+", each)
        ]
        out = self.left_out.get(f"{service}/{collection}", [])
        found = [each for each in found if not any(f"/{place}/" in each[0] for place in out)]
        if wanted := re.fullmatch(r"labels\.([^=]+)=(\S+)", query.get("filter", "")):
            labels = [(each[1].get("labels") or {}).get(wanted[1]) for each in found]
            found = [each for each, label in zip(found, labels, strict=True) if label == wanted[2]]
        page = self._page(found, key, query, collection)
        page[key] = [body for _, body in page.get(key, [])]
        if out:
            page["missingZones" if service == "container" else "unreachable"] = out
        return page

    def _services(self, path: str, query: Mapping[str, str]) -> Any:
        if "consumerQuotaMetrics/" in path:
            return self.quota_metrics.get(urllib.parse.unquote(path.rpartition("/")[2]))
        return {
            "services": [
                {"name": name, "state": self._state(name.rpartition("/")[2])}
                for name in urllib.parse.parse_qs(query["_raw"])["names"]
            ]
        }

    def _state(self, service: str) -> str:
        return "ENABLED" if self.enabled is None or service in self.enabled else "DISABLED"

    def _assets(self, query: Mapping[str, str]) -> Body:
        results = []
        every = [*self.things.items()]
        for (service, path), body in every:
            rest = path.removeprefix("b/") if service == "storage" else f"projects/{PROJECT}/{path}"
            results.append(
                {
                    "name": f"//{service}.googleapis.com/{rest}",
                    "assetType": f"{service}.googleapis.com/{path.split('/')[-2]}",
                    "displayName": path.rpartition("/")[2],
                    "location": path.split("/")[1] if path.count("/") > 2 else "global",
                    "labels": body.get("labels") or body.get("resourceLabels") or {},
                    "description": body.get("description", ""),
                }
            )
        found = [(each["name"], each) for each in (*results, *self.stale_assets)]
        label = re.fullmatch(r"labels\.([^=]+)=(.*)", query["query"])
        if label:
            found = [each for each in found if each[1]["labels"].get(label[1]) == label[2]]
        else:
            name = query["query"].removeprefix("name:")
            found = [each for each in found if name in each[0]]
        page = self._page(found, "results", query, "assets")
        page["results"] = [body for _, body in page.get("results", [])]
        return page

    def _below(self, service: str, path: str) -> list[tuple[str, Body]]:
        return sorted(
            (each, body)
            for (owner, each), body in self.things.items()
            if owner == service and each.rpartition("/")[0] == path
        )

    def _page(
        self, found: list[tuple[str, Body]], key: str, query: Mapping[str, str], collection: str
    ) -> Body:
        begin = int(query.get("pageToken") or 0)
        end = begin + self.page_size
        page: Body = {key: found[begin:end]} if found[begin:end] else {}
        if key == "items" and collection in ("global", "storage/b"):
            page = {each: [body for _, body in items] for each, items in page.items()}
        if end < len(found):
            page["nextPageToken"] = str(end)
        return page

    def _delete(self, service: str, path: str) -> Any:
        path = re.sub(f"^(compute/v1|v1|storage/v1|dns/v1)/(projects/{PROJECT}/)?", "", path)
        return self.delete(service, path)

    def delete(self, service: str, path: str) -> Body | None:
        """Delete a thing. Refused where another one uses it; the answer says done, also where the
        deletion is lost."""
        owner, _, name = path.rpartition("/")
        holder, _, key = owner.rpartition("/")
        if key in self.things.get((service, holder), ()):
            parts = self.things[service, holder][key]
            parts[:] = [each for each in parts if each["name"] != name]
            return {"status": "DONE"}
        if (service, path) not in self.things:
            return None
        if users := self.users(path):
            raise AssertionError(f"{path} is in use by {users}")
        if name not in self.lost_deletes:
            del self.things[service, path]
        return {"kind": "compute#operation", "status": "DONE"}

    def users(self, path: str) -> list[str]:
        """What else names this thing: it must go first."""
        ending = f'projects/{PROJECT}/{path}"'
        found = []
        for (_, other), body in self.things.items():
            shown = {key: value for key, value in body.items() if key not in _NOT_HELD}
            system_route = "nextHopNetwork" in body or "nextHopGateway" in body
            if other != path and not system_route and ending in json.dumps(shown):
                found.append(other)
        return found


def _scope(path: str) -> str:
    return path if path == "global" else path.rsplit("/", 2)[0]


_COLLECTIONS = ("clusters", "repositories", "instances", "serviceAccounts")
_COLLECTIONS += ("customJobs", "persistentResources")
_COLLECTIONS += ("managedZones", "policies", "responsePolicies")
_NOT_HELD = (
    "selfLink",
    "users",
    "metadata",
    "peerings",
    "sourceDisk",
    "sourceInstance",
    "sourceSnapshot",
)
"""Fields that name another thing and do not keep it from being deleted."""


class LocalServer:
    """Serves one project after another; `address` is for DRILLYARD_GOOGLE_ENDPOINT."""

    def __init__(self) -> None:
        class Handler(_Handler):
            owner = GoogleCloud()

        self._handler = Handler
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.address = f"http://127.0.0.1:{self._server.server_port}"

    def serve(self, cloud: GoogleCloud) -> None:
        self._handler.owner = cloud

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    owner: GoogleCloud
    protocol_version = "HTTP/1.1"
    wbufsize = -1
    disable_nagle_algorithm = True

    def _serve(self) -> None:
        address = urllib.parse.urlsplit(self.path)
        service, _, path = address.path.lstrip("/").partition("/")
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length)) if length else {}
        cloud = self.owner
        cloud.requests.append(f"{self.command} {service}/{path}")
        cloud.headers.append(dict(self.headers))
        for fault in cloud.faults:
            if fault.takes(service, path):
                if fault.reason == DROP:
                    self.close_connection = True
                    self.connection.close()
                    return
                self._send(fault.status, _error(fault, service))
                return
        query = {**dict(urllib.parse.parse_qsl(address.query)), "_raw": address.query}
        answer = cloud.answer(self.command, service, path, query, body)
        if answer is None:
            self._send(404, {"error": {"code": 404, "message": f"{path} was not found"}})
        else:
            self._send(200, answer)

    do_GET = do_POST = do_DELETE = _serve

    def _send(self, status: int, answer: Any) -> None:
        data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        if status == 429:
            self.send_header("Retry-After", "1")
        self.end_headers()
        self.wfile.write(data)
        self.wfile.flush()

    def log_message(self, *_: Any) -> None:
        pass


def _error(fault: Fault, service: str) -> Body:
    detail = {
        "@type": "type.googleapis.com/google.rpc.ErrorInfo",
        "reason": fault.reason,
        "domain": "googleapis.com",
        "metadata": {"service": f"{service}.googleapis.com", "consumer": fault.consumer},
    }
    said = f"{fault.reason} of {service} for ya29.not-a-token"
    return {"error": {"code": fault.status, "message": said, "details": [detail]}}


def walk(cloud: GoogleCloud) -> Iterator[str]:
    """Everything that exists, as `service/path`."""
    yield from (f"{service}/{path}" for service, path in cloud.things)
