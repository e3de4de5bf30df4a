"""The context of a made cluster in the user's kubeconfig, by which everything else reaches it.

That of GKE has the name that gcloud gives it, `gke_PROJECT_REGION_NAME`, and logs in by the program
gke-gcloud-auth-plugin, as gcloud's does; that of Nebius logs in by `nebius`, as the one does that
`nebius mk8s cluster get-credentials` writes. It contains no secret.
"""

from __future__ import annotations

import base64
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from drillyard.errors import UserError
from drillyard.provision.cluster_plan import ClusterPlan
from drillyard.safe_files import replace_file

AUTH_PLUGIN = "gke-gcloud-auth-plugin"
_NEBIUS = "nebius"
_MARK = "drillyard"
"""The extension of an entry that this has written."""
_KEYS = ("clusters", "users", "contexts")


@dataclass(frozen=True)
class ControlPlane:
    """Where a control plane is: its address, and the authority of its certificate in base64."""

    server: str
    authority: str


def control_plane_of(cluster: Mapping[str, Any]) -> ControlPlane | None:
    """Of a cluster in Terraform's state (google_container_cluster or nebius_mk8s_v1_cluster); None
    while it has none."""
    if "status" in cluster or "control_plane" in cluster:
        status = (cluster.get("status") or {}).get("control_plane") or {}
        address = str((status.get("endpoints") or {}).get("public_endpoint") or "")
        text = str((status.get("auth") or {}).get("cluster_ca_certificate") or "")
        authority = base64.b64encode(text.encode()).decode()
    else:
        address = str(cluster.get("endpoint") or "")
        first = (cluster.get("master_auth") or [{}])[0]
        authority = str(first.get("cluster_ca_certificate") or "")
    if not address:
        return None
    return ControlPlane(address if "://" in address else f"https://{address}", authority)


def context_name(plan: ClusterPlan) -> str | None:
    """The context of a plan's cluster; None: the kubeconfig's current one."""
    settings = (plan.launch_settings or {}).get("kubernetes", {})
    name: str | None = settings.get("context")
    return name


def require_plugin(plan: ClusterPlan) -> None:
    """Raise UserError where the program is missing by which a kubeconfig logs in to GKE."""
    if plan.platform == "gke" and shutil.which(AUTH_PLUGIN) is None:
        raise UserError(
            f"{AUTH_PLUGIN}: is not installed, and without it nothing can log in to a GKE cluster\n"
            f"gcloud components install {AUTH_PLUGIN}, or apt-get install"
            f" google-cloud-cli-{AUTH_PLUGIN}"
        )


def require_programs(plan: ClusterPlan) -> None:
    """Raise UserError where a program is missing that is needed once the cluster is there."""
    if shutil.which("helm") is None:
        raise UserError(
            "helm: is not installed, and the charts of the cluster are installed with it\nInstall"
            " Helm 3: https://helm.sh/docs/intro/install"
        )
    require_plugin(plan)


def kubeconfig_path() -> Path:
    """The kubeconfig that is written: the first of KUBECONFIG, or the user's own."""
    first = next(filter(None, os.environ.get("KUBECONFIG", "").split(os.pathsep)), None)
    return Path(first or "~/.kube/config").expanduser()


def write_context(plan: ClusterPlan, cluster: Mapping[str, Any]) -> str:
    """Add the cluster's context to the kubeconfig; its name. `cluster`: the attributes of the
    cluster in Terraform's state (`control_plane_of`).

    What is there of that name and reaches the same control plane is kept, what this has written for
    an earlier one of the same cluster is replaced. Raises UserError for anything else of that name,
    and for a kubeconfig that cannot be read.
    """
    name = context_name(plan)
    assert name is not None
    require_plugin(plan)
    path = kubeconfig_path()
    content = _read(path)
    place, login = control_plane_of(cluster), _login(plan)
    if place is None:
        raise UserError(
            f"{plan.name}: its control plane has no address yet\nRepeat the command once it has"
        )
    reached = {"server": place.server, "certificate-authority-data": place.authority}
    clusters, users, contexts = (_named(content, key) for key in _KEYS)
    context = contexts.get(name, {})
    if context and _reaches(clusters.get(str(context.get("cluster")), {}), reached):
        return name
    fits = {
        "contexts": False,
        "clusters": _reaches(clusters.get(name, {}), reached),
        "users": (users.get(name, {}).get("exec") or {}).get("command") == login["command"],
    }
    written: dict[str, dict[str, Any]] = {
        "clusters": reached,
        "users": {"exec": login},
        "contexts": {"cluster": name, "user": name},
    }
    for key, entries in (("contexts", contexts), ("clusters", clusters), ("users", users)):
        if fits[key]:
            continue
        if name in entries and not _is_own(entries[name], plan):
            raise UserError(_taken(path, key, name, clusters, entries[name], plan))
        kept = [each for each in content.get(key) or () if each.get("name") != name]
        entry = {**written[key], "extensions": [_mark(plan)]}
        content[key] = [*kept, {"name": name, key.removesuffix("s"): entry}]
    content.setdefault("current-context", "")
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    _write(path, content)
    return name


def remove_context(plan: ClusterPlan) -> None:
    """Remove what this has written for a cluster that is gone: its context, and the cluster and the
    user of it, unless another context uses them."""
    name, path = context_name(plan), kubeconfig_path()
    if name is None or not path.exists():
        return
    content = _read(path)
    removed: list[str] = []
    for key in ("contexts", "clusters", "users"):
        entry = _named(content, key).get(name, {})
        uses = [each.get(key.removesuffix("s")) for each in _named(content, "contexts").values()]
        if _is_own(entry, plan) and name not in uses:
            content[key] = [each for each in content[key] if each.get("name") != name]
            removed.append(key)
    if "contexts" in removed and content.get("current-context") == name:
        content["current-context"] = ""
    if removed:
        _write(path, content)


def _reaches(entry: Mapping[str, Any], reached: Mapping[str, str]) -> bool:
    """Whether a cluster of the kubeconfig is this control plane. Its certificate counts: two
    private control planes may have the same address."""
    return all(entry.get(key) == value for key, value in reached.items())


def _mark(plan: ClusterPlan) -> dict[str, Any]:
    """The extension by which an entry is this cluster's: two projects may have clusters of one
    name."""
    whose = {"cluster": plan.name, "project": plan.project, "location": plan.region}
    return {"name": _MARK, "extension": whose}


def _is_own(entry: Mapping[str, Any], plan: ClusterPlan) -> bool:
    found = entry.get("extensions")
    return isinstance(found, list) and _mark(plan) in found


def _taken(
    path: Path,
    key: str,
    name: str,
    clusters: Mapping[str, Mapping[str, Any]],
    entry: Mapping[str, Any],
    plan: ClusterPlan,
) -> str:
    what, place = key.removesuffix("s"), entry.get("server")
    if key == "contexts":
        place = clusters.get(str(entry.get("cluster")), {}).get("server")
    of = f" ({place})" if place else ""
    text = f"{path}: {what} {name} is of another cluster{of}, and {plan.name} needs that name"
    rename = (
        f"kubectl config rename-context {name} {name}-old\nOr set" if what == "context" else "Set"
    )
    return f"{text}\n{rename} kubernetes.context of the cluster config to a name that is free"


def _login(plan: ClusterPlan) -> dict[str, Any]:
    """The program that gives a token, each time."""
    if plan.cloud == "nebius":
        return {
            "apiVersion": "client.authentication.k8s.io/v1",
            "command": _NEBIUS,
            "args": ["mk8s", "v1", "cluster", "get-token", "--format", "json"],
            "interactiveMode": "IfAvailable",
        }
    return {
        "apiVersion": "client.authentication.k8s.io/v1beta1",
        "command": AUTH_PLUGIN,
        "provideClusterInfo": True,
    }


def _read(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        content = None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"{path}: is not a kubeconfig that can be read: {first}") from None
    if content is None:
        return {"apiVersion": "v1", "kind": "Config"}
    if not isinstance(content, dict) or not all(
        isinstance(content.get(key) or [], list) for key in _KEYS
    ):
        raise UserError(f"{path}: is not a kubeconfig: clusters, users and contexts are lists")
    return content


def _named(content: dict[str, Any], key: str) -> dict[str, dict[str, Any]]:
    """The entries of a list by name: clusters have `cluster`, contexts `context`."""
    return {
        str(each.get("name")): each.get(key.removesuffix("s")) or {}
        for each in content.get(key) or ()
        if isinstance(each, dict)
    }


def _write(path: Path, content: dict[str, Any]) -> None:
    text = yaml.safe_dump(content, sort_keys=False)
    place = path.resolve()
    try:
        # Other contexts may contain passwords.
        replace_file(place, text.encode(), mode=0o600)
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}") from None
