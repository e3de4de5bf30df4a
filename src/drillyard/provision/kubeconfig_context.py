"""The context of a GKE cluster in the user's kubeconfig, by which everything else reaches it.

It has the name that gcloud gives it, `gke_PROJECT_REGION_NAME`, and logs in by the program
gke-gcloud-auth-plugin, as gcloud's does; it contains no secret.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from drillyard.errors import UserError
from drillyard.provision.cluster_plan import ClusterPlan
from drillyard.safe_files import replace_file

AUTH_PLUGIN = "gke-gcloud-auth-plugin"
_MARK = "drillyard"
"""The extension of a context that this has written."""


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
    """Add the cluster's context to the kubeconfig; its name. `cluster`: the attributes of
    google_container_cluster, `endpoint` and `master_auth` among them.

    A context of that name for the same control plane is kept, one that this has written for an
    earlier cluster is replaced. Raises UserError for any other of that name, and for a kubeconfig
    that cannot be read.
    """
    name = context_name(plan)
    assert name is not None
    require_plugin(plan)
    path = kubeconfig_path()
    content = _read(path)
    server = f"https://{cluster['endpoint']}"
    authority = str((cluster.get("master_auth") or [{}])[0].get("cluster_ca_certificate") or "")
    clusters, contexts = (_named(content, key) for key in ("clusters", "contexts"))
    if name in contexts:
        target = clusters.get(str(contexts[name].get("cluster")), {})
        same = target.get("server") == server
        if same and target.get("certificate-authority-data") == authority:
            return name
        marks = [each.get("name") for each in contexts[name].get("extensions") or ()]
        if not same and _MARK not in marks:
            raise UserError(
                f"{path}: context {name} is of another cluster ({target.get('server')}), and"
                f" {plan.name} needs that name\nkubectl config rename-context {name} {name}-old"
            )
    mark = {"name": _MARK, "extension": {"cluster": plan.name}}
    for key, entry in (
        ("clusters", {"cluster": {"server": server, "certificate-authority-data": authority}}),
        ("users", {"user": {"exec": _login()}}),
        ("contexts", {"context": {"cluster": name, "user": name, "extensions": [mark]}}),
    ):
        kept = [each for each in content.get(key) or () if each.get("name") != name]
        content[key] = [*kept, {"name": name, **entry}]
    content.setdefault("current-context", "")
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    _write(path, content)
    return name


def remove_context(plan: ClusterPlan) -> None:
    """Remove the context of a cluster that is gone, where this has written it."""
    name, path = context_name(plan), kubeconfig_path()
    if name is None or not path.exists():
        return
    content = _read(path)
    context = _named(content, "contexts").get(name, {})
    if _MARK not in [each.get("name") for each in context.get("extensions") or ()]:
        return
    for key in ("clusters", "users", "contexts"):
        content[key] = [each for each in content.get(key) or () if each.get("name") != name]
    if content.get("current-context") == name:
        content["current-context"] = ""
    _write(path, content)


def _login() -> dict[str, Any]:
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
    lists = ("clusters", "users", "contexts")
    if not isinstance(content, dict) or not all(
        isinstance(content.get(key) or [], list) for key in lists
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
    draft = place.with_name(f".{place.name}.{secrets.token_hex(4)}")
    try:
        # Other contexts may contain passwords.
        draft.touch(0o600)
        replace_file(place, text.encode(), draft=draft)
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}") from None
