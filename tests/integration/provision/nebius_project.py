"""A project of Nebius on this machine: its object storage (moto's server, with Terraform's own
conditional writes), its things behind Terraform's provider, and a program in place of Nebius' CLI
that answers in the JSON of Nebius' API (https://github.com/nebius/api) from what is there."""

from __future__ import annotations

import json
import os
import socketserver
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import yaml
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from moto.s3.models import s3_backends
from tests.integration.provision.fake_cloud import FakeCloud
from tests.integration.provision.plugin_protocol import Provider
from tests.integration.provision.project import TIMEOUT_SECONDS, terraform
from tests.unit.provision.nebius_clusters import config
from tests.unit.provision.nebius_schema import resource_schemas
from tests.unit.provision.vm_clusters import KEY
from werkzeug.serving import make_server

from drillyard.config.load import load_cluster_config
from drillyard.provision.cluster_plan import ClusterPlan
from drillyard.provision.nebius.listings import BY_KIND
from drillyard.provision.nebius.nebius_plan import BUCKET_KIND
from drillyard.provision.nebius.nebius_settings import PROVIDER
from drillyard.provision.provisioner import plan_cluster

VM, FILES = "nebius_compute_v1_instance", "nebius_compute_v1_filesystem"
CONTROL_PLANE, GROUP = "nebius_mk8s_v1_cluster", "nebius_mk8s_v1_node_group"
PROJECT, TENANT, STATE = "project-e00abc", "tenant-e00t", "project-e00abc-team-tfstate"
SECRET, TOKEN = "storage-secret-of-the-test", "iam-token-of-the-test"
CREATED = "2026-11-28T10:00:00Z"
_ADDRESS = {"address": {"type": "string", "computed": True}}
_VERBS = ("list", "get", "create", "delete")
_KINDS = {each.words: each.kind for each in BY_KIND.values()}


def shapes() -> dict[str, Any]:
    """The provider's schema as the protocol has it; `status` as far as a plan reads it."""
    resources = {kind: _block(each) for kind, each in resource_schemas().items()}
    one = {"nested": _ADDRESS, "nesting": "single", "computed": True}
    interface = {"ip_address": one, "public_ip_address": one}
    found = {"nested": interface, "nesting": "list", "computed": True}
    resources[VM]["attributes"]["status"] = {
        "nested": {"network_interfaces": found},
        "nesting": "single",
        "computed": True,
    }
    endpoints = {"public_endpoint": {"type": "string", "computed": True}}
    auth = {"cluster_ca_certificate": {"type": "string", "computed": True}}
    parts = {
        name: {"nested": each, "nesting": "single", "computed": True}
        for name, each in (("endpoints", endpoints), ("auth", auth))
    }
    resources[CONTROL_PLANE]["attributes"]["status"] = {
        "nested": {"control_plane": {"nested": parts, "nesting": "single", "computed": True}},
        "nesting": "single",
        "computed": True,
    }
    provider = {"domain": {"type": "string", "optional": True}}
    return {"provider": {"attributes": provider, "blocks": {}}, "resources": resources}


def _block(schema: dict[str, Any]) -> dict[str, Any]:
    computed = {name: {"type": "string", "computed": True} for name in ("id", "created_at")}
    own = {name: _attribute(each) for name, each in schema["attributes"].items()}
    return {"attributes": {**own, **computed}, "blocks": {}}


def _attribute(attribute: dict[str, Any]) -> dict[str, Any]:
    required = bool(attribute.get("required"))
    flags = {"required": required, "optional": not required}
    kind, nesting = attribute["type"], "single"
    if isinstance(kind, list) and isinstance(kind[1], dict):
        kind, nesting = kind[1], "list" if kind[0] == "list" else "map"
    if isinstance(kind, dict):
        members = {name: _attribute(each) for name, each in kind["object"].items()}
        return {"nested": members, "nesting": nesting, **flags}
    return {"type": kind, **flags}


class ObjectStorage:
    """A server of S3. Conditional writes are atomic; a key named `wrong` is refused."""

    def __init__(self) -> None:
        s3_backends.reset()
        self.on_request: Callable[..., None] = lambda *words: None
        self._app = DomainDispatcherApplication(create_backend_app)
        self._lock = threading.Lock()
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self.client = boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            region_name="us-east-1",
            aws_access_key_id="a",
            aws_secret_access_key="b",
        )

    def _answer(self, environ: dict[str, Any], start: Any) -> Any:
        if "Credential=wrong/" in environ.get("HTTP_AUTHORIZATION", ""):
            start("403 Forbidden", [("Content-Type", "application/xml")])
            return [b"<Error><Code>InvalidAccessKeyId</Code><Message>no such key</Message></Error>"]
        # The test's own client is not a part of the command.
        if "Credential=a/" not in environ.get("HTTP_AUTHORIZATION", ""):
            self.on_request(environ["REQUEST_METHOD"], environ["PATH_INFO"])
        with self._lock:
            return self._app(environ, start)

    @property
    def buckets(self) -> list[str]:
        return [each["Name"] for each in self.client.list_buckets()["Buckets"]]

    def names(self, bucket: str) -> list[str]:
        found = self.client.list_objects_v2(Bucket=bucket).get("Contents", [])
        return [each["Key"] for each in found]

    def text(self, bucket: str, name: str) -> str:
        found = self.client.get_object(Bucket=bucket, Key=name)
        return str(found["Body"].read().decode())

    def put(self, bucket: str, name: str, text: str) -> str:
        """Write an object; its version."""
        made = self.client.put_object(Bucket=bucket, Key=name, Body=text.encode())
        return str(made["VersionId"])

    def close(self) -> None:
        self._server.shutdown()


class Refusal(Exception):
    """What the program prints in place of an answer."""


class NebiusProject:
    """`settings`: of cluster.yaml, over a small cluster's."""

    content: Callable[..., dict[str, Any]] = staticmethod(config)
    """The content of cluster.yaml."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self.store = ObjectStorage()
        self.cloud = FakeCloud(shapes=shapes(), computed=self._computed)
        self._provider = Provider(self.cloud, PROVIDER)
        self.buckets: dict[str, dict[str, Any]] = {}
        self.public: Callable[[str], str] = lambda name: f"198.51.100.{name.rpartition('-')[2]}"
        self.inside: Callable[[str], str] = lambda name: f"10.0.0.{name.rpartition('-')[2]}"
        self.refuse: Callable[[list[str]], str | None] = lambda words: None
        """What the program prints in place of an answer."""
        self.region, self.fabrics, self.limit = "eu-north1", ["fabric-2", "fabric-3"], "64"
        self.presets = {"gpu-h100-sxm": "8gpu-128vcpu-1600gb"}
        self.filesystems: list[str] = []
        self._command_server = _serve(self._command_answer)
        (directory / "key.pub").write_text(f"{KEY}\n", "utf-8")
        self.config = directory / "team.yaml"
        self.write(**settings)
        programs = directory / "bin"
        programs.mkdir()
        (programs / "terraform").symlink_to(terraform())
        self.program("nebius", _NEBIUS.format(sys.executable, *self._command_server.server_address))
        self.program("ssh", "#!/bin/sh\necho 'ssh: no answer' >&2\nexit 255\n")
        self.environment = {
            **os.environ,
            **self._provider.environment,
            "DRILLYARD_CACHE": str(directory / "cache"),
            "PATH": f"{programs}:{os.environ['PATH']}",
            "AWS_ACCESS_KEY_ID": "user",
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_ENDPOINT_URL_S3": self.store.endpoint,
        }
        self.commands: list[subprocess.Popen[str]] = []

    @property
    def mark(self) -> tuple[str, str]:
        """What the environment of the project's processes has."""
        return self.store.endpoint, "AWS_ENDPOINT_URL_S3"

    def close(self) -> None:
        for command in self.commands:
            if command.poll() is None:
                command.kill()
            command.communicate()
        self.cloud.closed.set()
        self._provider.close()
        self.store.close()
        self._command_server.shutdown()

    def write(self, **settings: Any) -> None:
        self.config.write_text(yaml.safe_dump(self.content(**settings)), encoding="utf-8")

    def program(self, name: str, text: str) -> None:
        """A program of the machine."""
        path = self.directory / "bin" / name
        path.write_text(text, "utf-8")
        path.chmod(0o700)

    @property
    def plan(self) -> ClusterPlan:
        return plan_cluster(load_cluster_config(self.config, resolve_environment=False))

    def start(self, verb: str, *options: str) -> subprocess.Popen[str]:
        started = subprocess.Popen(
            [sys.executable, "-m", "drillyard", "cluster", verb, str(self.config), *options],
            cwd=self.directory,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.commands.append(started)
        return started

    def run(self, verb: str, *options: str) -> subprocess.CompletedProcess[str]:
        """A command to its end. No secret is in what it prints, or in a file that it leaves."""
        started = self.start(verb, *options)
        out, err = started.communicate(timeout=TIMEOUT_SECONDS)
        for path in self.directory.rglob("*"):
            text = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
            assert SECRET.encode() not in text and TOKEN.encode() not in text, path
        assert SECRET not in out + err and TOKEN not in out + err
        return subprocess.CompletedProcess(started.args, started.returncode, out, err)

    def up(self, *options: str) -> subprocess.CompletedProcess[str]:
        """`up --yes`, which succeeds."""
        ended = self.run("up", "--yes", *options)
        assert ended.returncode == 0, ended.stderr
        return ended

    def down(self, *options: str) -> subprocess.CompletedProcess[str]:
        """`down --yes`, after which nothing is left but what it keeps."""
        ended = self.run("down", "--yes", *options)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended

    def leaks(self) -> dict[str, Any]:
        """What `leaks --json` prints; its exit code is in it."""
        ended = self.run("leaks", "--json")
        found: dict[str, Any] = json.loads(ended.stdout)
        assert ended.returncode == found["exit_code"], ended.stderr
        return found

    @property
    def state(self) -> list[str]:
        """The addresses of the state."""
        if STATE not in self.store.buckets:
            return []
        content = json.loads(self.store.text(STATE, "team/default.tfstate"))
        return sorted(f"{each['type']}.{each['name']}" for each in content["resources"])

    def require_whole(self) -> None:
        """The cluster is there, once, with nothing else, and the state has all of it."""
        planned = self.plan.made_by_terraform
        assert self.cloud.kinds() == Counter(each.kind for each in planned)
        assert {value["name"] for value in list(self.cloud.objects.values())} == {
            each.name for each in planned
        }
        assert self.state == sorted(each.address for each in planned)
        assert self.store.names(STATE) == ["team/default.tfstate"]
        assert list(self.buckets) == [STATE]

    def require_nothing(self) -> None:
        assert self.cloud.objects == {}
        assert self.buckets == {} and self.store.buckets == []
        left = [*(self.directory / "cache").rglob("*")]
        assert left == [], left

    def add(self, kind: str, name: str, label: str | None = "team", **values: Any) -> None:
        """Something that Terraform's state does not have."""
        labels = {} if label is None else {"drillyard-cluster": label}
        if kind == BUCKET_KIND:
            self._make_bucket(name, labels)
            return
        value = {"name": name, "labels": labels, "parent_id": PROJECT, **values}
        self.cloud.objects[kind, name] = {**value, "id": _id(kind, name)}

    def type(self, command: str) -> None:
        """A command that was printed for the user."""
        subprocess.run(command, shell=True, check=True, env=self.environment, capture_output=True)

    def _computed(self, kind: str, value: dict[str, Any]) -> dict[str, Any]:
        made = {"id": _id(kind, value["name"]), "created_at": CREATED}
        if kind != VM:
            return made
        inside = {"address": f"{self.inside(value['name'])}/32"}
        nic = {
            "ip_address": inside,
            "public_ip_address": {"address": f"{self.public(value['name'])}/32"},
        }
        return {**made, "status": {"network_interfaces": [nic]}}

    def _command_answer(self, words: list[str]) -> dict[str, Any]:
        """What the program prints and its exit code."""
        self.store.on_request("nebius", *words[:3])
        if (refused := self.refuse(words)) is not None:
            return {"code": 1, "out": "", "err": f"Error: {refused}\n"}
        if words == ["iam", "get-access-token"]:
            return {"code": 0, "out": TOKEN + "\n", "err": ""}
        try:
            found = self._found(words)
        except Refusal as error:
            return {"code": 1, "out": "", "err": f"Error: rpc error: code = {error}\n"}
        return {"code": 0, "out": json.dumps(found), "err": ""}

    def _found(self, words: list[str]) -> Any:
        first = next(n for n, each in enumerate(words) if each in _VERBS)
        place, verb = tuple(words[:first]), words[first]
        options = {words[i]: words[i + 1] for i in range(first + 1, len(words) - 1)}
        if place == ("iam", "project"):
            if options["--id"] != PROJECT:
                raise Refusal("PermissionDenied desc = Permission denied")
            return {
                "metadata": {"id": PROJECT, "parent_id": TENANT, "name": "lab"},
                "spec": {"region": self.region},
                "status": {"container_state": "ACTIVE", "region": self.region},
            }
        if verb == "list":
            rows = list(self._rows(place, options["--parent-id"]))
            if "--all" not in words:
                return {"items": rows[:1], "next_page_token": "more"}
            return {"items": rows} if rows else {}
        if (place, verb) == (("storage", "bucket"), "create"):
            labels = dict(each.split("=") for each in options["--labels"].split(","))
            if options["--name"] in self.buckets:
                raise Refusal("AlreadyExists desc = bucket already exists")
            self._make_bucket(options["--name"], labels, options["--versioning-policy"].upper())
            return self.buckets[options["--name"]]
        if verb == "delete":
            self._delete(place, options["--id"], options.get("--ttl"))
            return {}
        if (place, verb) == (("compute", "filesystem"), "get"):
            if options["--id"] in self.filesystems:
                return {"metadata": {"id": options["--id"]}}
            raise Refusal("NotFound desc = Filesystem not found")
        raise AssertionError(words)

    def _rows(self, place: tuple[str, ...], parent: str) -> Iterator[dict[str, Any]]:
        if place == ("compute", "platform"):
            for name, preset in self.presets.items():
                presets = [{"name": preset, "allow_gpu_clustering": True}]
                yield {"metadata": {"id": name, "name": name}, "spec": {"presets": presets}}
        elif place == ("capacity", "resource-advice"):
            assert parent == TENANT
            for fabric in self.fabrics:
                instance = {"platform": "gpu-h100-sxm", "preset": {"name": "8gpu-128vcpu-1600gb"}}
                spec = {"region": "eu-north1", "fabric": fabric, "compute_instance": instance}
                yield {"metadata": {"parent_id": TENANT}, "spec": spec}
        elif place == ("quotas", "quota-allowance"):
            for quota in self.plan.quotas:
                spec = {"limit": self.limit, "region": quota.region}
                yield {"metadata": {"name": quota.metric}, "spec": spec, "status": {}}
        elif place == ("storage", "bucket"):
            yield from self.buckets.values()
        else:
            kind = _KINDS[place]
            for identity, value in list(self.cloud.objects.items()):
                if identity[0] == kind and value["parent_id"] == parent:
                    yield _item(value)

    def _make_bucket(self, name: str, labels: dict[str, str], versioning: str = "ENABLED") -> None:
        self.store.client.create_bucket(Bucket=name)
        status = {"Status": "Enabled"}
        self.store.client.put_bucket_versioning(Bucket=name, VersioningConfiguration=status)
        metadata = {"id": f"bucket-{name}", "parent_id": PROJECT, "name": name, "labels": labels}
        spec = {"versioning_policy": versioning}
        self.buckets[name] = {"metadata": metadata, "spec": spec, "status": {"state": "ACTIVE"}}

    def _delete(self, place: tuple[str, ...], identifier: str, ttl: str | None) -> None:
        if place == ("storage", "bucket"):
            name = identifier.removeprefix("bucket-")
            if name not in self.buckets:
                raise Refusal("NotFound desc = bucket not found")
            # Without it the bucket would stay for seven days.
            assert ttl == "0"
            self.store.client.delete_bucket(Bucket=name)
            del self.buckets[name]
            return
        for identity, value in list(self.cloud.objects.items()):
            if identity[0] == _KINDS[place] and value["id"] == identifier:
                del self.cloud.objects[identity]
                return
        raise Refusal("NotFound desc = no such thing")


def _id(kind: str, name: str) -> str:
    words = kind.removeprefix("nebius_").replace("_v1alpha1_", "_v1_").split("_v1_")
    return f"{''.join(words).replace('_', '')}-{name}"


def _item(value: dict[str, Any]) -> dict[str, Any]:
    """A thing as Nebius shows it."""
    kept = ("id", "parent_id", "name", "labels", "created_at")
    metadata = {key: value[key] for key in kept if value.get(key)}
    spec = {key: each for key, each in value.items() if key not in kept and key != "status"}
    return {"metadata": metadata, "spec": json.loads(json.dumps(spec, default=str)), "status": {}}


_NEBIUS = """\
#!{} -IS
import json, socket, sys
words = sys.argv[1:]
if words[-2:] == ["--format", "json"]:
    words = words[:-2]
else:
    assert words == ["iam", "get-access-token"] or "delete" in words, words
with socket.create_connection(("{}", {})) as server:
    server.sendall(json.dumps(words).encode() + b"\\n")
    answer = json.loads(server.makefile().read())
sys.stdout.write(answer["out"])
sys.stderr.write(answer["err"])
sys.exit(answer["code"])
"""


def _serve(answer: Callable[[list[str]], dict[str, Any]]) -> socketserver.ThreadingTCPServer:
    """Answers the program: a line of words, a document back."""

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            if line := self.rfile.readline():
                self.wfile.write(json.dumps(answer(json.loads(line))).encode())

    server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server
