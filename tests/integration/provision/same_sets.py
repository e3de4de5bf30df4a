"""Many clusters in one project, made by one apply of the real Terraform: what their plans say, what
Terraform's state has, and what `leaks` lists."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.integration.provision.bucket_server import BucketServer, StoredBucket
from tests.integration.provision.fake_cloud import FakeCloud
from tests.integration.provision.made_at_google import NOT_LISTED, REGION, MadeAtGoogle, computed
from tests.integration.provision.plugin_protocol import Provider
from tests.integration.provision.project import terraform
from tests.unit.provision import clusters
from tests.unit.provision.google.google_cloud import PROJECT, GoogleCloud, LocalServer

from drillyard.provision.cluster_plan import ClusterPlan
from drillyard.provision.google.api import GoogleApis
from drillyard.provision.google.endpoints import Endpoints
from drillyard.provision.google.leaks import find_leaks
from drillyard.provision.google.resource_marks import plain_kind
from drillyard.provision.google.terraform_state import state_keys

_SHARED = "google_project_service"
"""Of all clusters of a project."""
_ADDRESS = re.compile(r"\b(google_[a-z0-9_]+)\.(?=[A-Za-z])")


def differences(
    directory: Path,
    offers: Sequence[tuple[str, str]],
    config: Callable[..., dict[str, Any]] = clusters.config,
) -> list[str]:
    """Make a cluster for each machine and way of buying it, by `config`; where plan, state and
    `leaks` differ, and what `leaks` shows although the state has it."""
    plans = {
        f"k{number:03}": _plan(directory, f"k{number:03}", config, machine, mode)
        for number, (machine, mode) in enumerate(offers)
    }
    google = GoogleCloud(page_size=500)
    at_google = MadeAtGoogle(google)
    cloud = FakeCloud(on_change=at_google.change, computed=computed)
    provider = Provider(cloud)
    server = LocalServer()
    server.serve(google)
    try:
        states = _applied(directory, plans, provider.environment)
        for plan in plans.values():
            labels = dict(plan.labels or {})
            google.add("storage", f"b/{plan.state_bucket}", labels=labels, location=REGION.upper())
        apis = _OneInventory(server.address)
        found: list[str] = []
        for (machine, mode), (name, plan) in zip(offers, plans.items(), strict=True):
            found += [f"{machine} {mode}: {each}" for each in _compared(plan, states[name], apis)]
        return found
    finally:
        provider.close()
        server.stop()


def _plan(
    directory: Path, name: str, config: Callable[..., dict[str, Any]], machine: str, mode: str
) -> ClusterPlan:
    place = {"project": PROJECT, "region": REGION, "zone": f"{REGION}-b"}
    bucket = {"bucket": f"{name}-runs"}
    content = config(machine, mode, name=name, location=place, storage=bucket)
    return clusters.plan(directory, content)


def _applied(
    directory: Path, plans: Mapping[str, ClusterPlan], environment: Mapping[str, str]
) -> dict[str, list[dict[str, Any]]]:
    """The resources of the state after one apply, by cluster."""
    resources: dict[str, dict[str, Any]] = defaultdict(dict)
    for name, plan in plans.items():
        text = json.dumps(plan.terraform["resource"])
        text = _ADDRESS.sub(lambda match, own=name: _renamed(match, own), text)
        for kind, bodies in json.loads(text).items():
            prefix = "" if kind == _SHARED else f"{name}_"
            resources[kind] |= {f"{prefix}{label}": body for label, body in bodies.items()}
    # In a bucket: a state in a file is written again after each resource.
    store = BucketServer({"state": StoredBucket({"name": "state"})})
    backend = {"terraform": {"backend": {"gcs": {"bucket": "state", "prefix": "all"}}}}
    first = next(iter(plans.values())).terraform
    for name, document in (("main", {**first, "resource": resources}), ("backend", backend)):
        (directory / f"{name}.tf.json").write_text(json.dumps(document))
    emulator = {
        "STORAGE_EMULATOR_HOST": store.endpoint,
        "GOOGLE_OAUTH_ACCESS_TOKEN": "emulator",
    }
    for words in (["init"], ["apply", "-auto-approve", "-refresh=false", "-parallelism=8"]):
        subprocess.run(
            [terraform(), f"-chdir={directory}", *words, "-input=false", "-no-color"],
            env={**os.environ, **environment, **emulator},
            capture_output=True,
            check=True,
        )
    state = json.loads(store.text("state", "all/default.tfstate"))
    store.close()
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in plans}
    for each in state["resources"]:
        if each["type"] == _SHARED:
            for name in plans:
                found[name].append(each)
        else:
            name, _, label = each["name"].partition("_")
            found[name].append({**each, "name": label})
    return found


def _renamed(match: re.Match[str], name: str) -> str:
    return match[0] if match[1] == _SHARED else f"{match[0]}{name}_"


def _compared(
    plan: ClusterPlan, state: Sequence[dict[str, Any]], apis: GoogleApis
) -> Iterator[str]:
    planned = {each.address for each in plan.made_by_terraform}
    made = {f"{each['type']}.{each['name']}" for each in state}
    if made != planned:
        yield f"Terraform made {sorted(made ^ planned)} otherwise than planned"
    listed = {
        f"{each.kind}/{each.location or ''}/{each.name}"
        for each in plan.resources
        if each.kind not in NOT_LISTED
    }
    in_state = {
        each for each in state_keys({"resources": state}) if each.split("/")[0] not in NOT_LISTED
    }
    state_bucket = f"google_storage_bucket/{plan.region}/{plan.state_bucket}"
    if in_state | {state_bucket} != listed:
        yield f"the state names {sorted((in_state | {state_bucket}) ^ listed)} otherwise"
    report = find_leaks(plan, apis)
    shown = {f"{each.kind}/{each.location}/{each.name}" for each in report.leaks}
    # Google's list of a kind has the regional ones, too, by the same name; the place is compared.
    shown, listed = ({_plain(each) for each in keys} for keys in (shown, listed))
    if shown != listed or report.unknown or report.doubtful:
        yield f"leaks lists {sorted(shown ^ listed)} otherwise; {report.unknown}, {report.doubtful}"
    report = find_leaks(plan, apis, frozenset(in_state))
    if report.exit_code:
        yield f"leaks shows what the state has: {[each.name for each in report.leaks]}"


def _plain(key: str) -> str:
    kind, _, rest = key.partition("/")
    return f"{plain_kind(kind)}/{rest}"


class _OneInventory(GoogleApis):
    """Asks each list once, however many clusters there are."""

    def __init__(self, address: str) -> None:
        super().__init__(PROJECT, Endpoints(address), None)
        self._pages: dict[str, list[dict[str, Any]]] = {}

    def pages(self, service: str, method: str, **parameters: Any) -> Iterator[dict[str, Any]]:
        key = repr((service, method, sorted(parameters.items())))
        if key not in self._pages:
            self._pages[key] = list(super().pages(service, method, **parameters))
        yield from self._pages[key]
