"""What `drillyard cluster status` says, and its exit code, where it cannot ask."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from tests.unit.provision.chart_plans import plan

from drillyard.cli.main import main
from drillyard.provision import cluster_status
from drillyard.provision.cluster_status import drift_from_engine

CONFIG = """\
name: team-a
platform: kubernetes
nodes: 2
machine: gpu-h100-sxm
storage: {directory: /data}
kubernetes: {namespace: team-a, queue: gpus, volume_claim: shared, context: ours}
"""
LOGIN = "kubectl --context ours get namespaces"
ANONYMOUS = 'namespaces is forbidden: User "system:anonymous" cannot list resource "namespaces"'


@pytest.fixture
def server() -> Iterator[Callable[[int, str], str]]:
    """Starts an API server that answers everything with a code and a message; its address."""
    started: list[ThreadingHTTPServer] = []

    def start(code: int, message: str) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = json.dumps({"kind": "Status", "message": message, "code": code}).encode()
                self.send_response(code)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        started.append(made)
        threading.Thread(target=made.serve_forever, args=(0.02,), daemon=True).start()
        return f"http://127.0.0.1:{made.server_port}"

    yield start
    for each in started:
        each.shutdown()
        each.server_close()


@pytest.fixture
def status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[Any, str]]:
    """Exit code and output of `status`, for a server and a user of the kubeconfig."""
    config, kubeconfig = tmp_path / "team.yaml", tmp_path / "kubeconfig"
    config.write_text(CONFIG)
    # The client reads KUBECONFIG when it is imported.
    default = "kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION"
    monkeypatch.setattr(default, str(kubeconfig))

    def run(address: str = "", user: dict[str, Any] | None = None) -> tuple[Any, str]:
        if address:
            content = {
                "clusters": [{"name": "a", "cluster": {"server": address}}],
                "users": [{"name": "a", "user": user or {"token": "t"}}],
                "contexts": [{"name": "ours", "context": {"cluster": "a", "user": "a"}}],
                "current-context": "",
            }
            kubeconfig.write_text(yaml.safe_dump(content))
        with pytest.raises(SystemExit) as ended:
            main(["cluster", "status", str(config)])
        printed = capsys.readouterr()
        assert printed.err == ""
        return ended.value.code, printed.out

    return run


def test_an_api_server_that_is_down_is_named_with_what_to_look_at(status: Any) -> None:
    code, text = status("http://127.0.0.1:1")
    assert code == 3 and "http://127.0.0.1:1: cannot be reached" in text
    assert "kubectl --context ours cluster-info" in text and "Max retries" not in text


@pytest.mark.parametrize(("code", "message"), [(401, "Unauthorized"), (403, ANONYMOUS)])
def test_credentials_that_have_expired_are_named_with_the_command_that_must_work(
    code: int, message: str, status: Any, server: Any
) -> None:
    found, text = status(server(code, message))
    assert found == 3 and message in text and LOGIN in text


def test_a_login_program_that_fails_is_named_and_nothing_is_asked_without_credentials(
    status: Any, server: Any
) -> None:
    login = {
        "apiVersion": "client.authentication.k8s.io/v1beta1",
        "command": "/bin/sh",
        "args": ["-c", "echo reauthenticate >&2; exit 1"],
        "interactiveMode": "Never",
    }
    found, text = status(server(403, ANONYMOUS), {"exec": login})
    assert found == 3 and "its login has failed" in text and "reauthenticate" in text
    assert LOGIN in text and "anonymous" not in text


def test_an_api_server_that_fails_and_a_missing_context_have_a_line_with_what_to_do(
    status: Any, server: Any
) -> None:
    found, text = status()
    assert found == 3 and "kubectl config get-contexts" in text
    found, text = status(server(500, "etcd leader changed"))
    assert found == 3 and "get --raw /readyz" in text


def test_a_cluster_that_was_never_made_is_said_without_terraform(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bucket = SimpleNamespace(find=lambda: None, title="gs://p-c-tfstate")
    cloud = SimpleNamespace(state_bucket=lambda plan: bucket)
    monkeypatch.setattr(cluster_status, "cloud_of", lambda plan: cloud)
    monkeypatch.setenv("PATH", "")
    (line,) = drift_from_engine(plan("g2-standard-48", "on-demand"))
    assert "gs://p-c-tfstate" in line


def test_what_was_never_made_is_one_line_and_the_next_command_makes_it() -> None:
    found = cluster_status.ClusterStatus(
        "c", None, None, ("not made yet: a",), None, ("Kubernetes",)
    )
    assert "next: drillyard cluster up c.yaml" in cluster_status.status_text(found, "c.yaml")


def test_without_googles_client_the_error_is_of_clusters_and_of_no_other_platform() -> None:
    program = "import sys; sys.modules['google.cloud'] = None; import drillyard.provision.{}"
    command = [sys.executable, "-c", program.format("google.cloud")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = done.stderr.splitlines()[-1]
    assert "MissingExtraError" in said and "cluster" in said and "vertex" not in said
    assert "pip install 'drillyard[gcp]'" in said
