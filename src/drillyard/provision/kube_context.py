"""The kubeconfig context of a GKE cluster, under the name that gcloud gives it.

It holds no secret: kubectl gets a token from gke-gcloud-auth-plugin each time
(https://cloud.google.com/kubernetes-engine/docs/how-to/cluster-access-for-kubectl).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from drillyard.errors import NotFoundError, UserError
from drillyard.launch.completion_cache import write_atomically
from drillyard.provision.cluster_plan import ClusterPlan

PLUGIN = "gke-gcloud-auth-plugin"
_INSTALL = f"gcloud components install {PLUGIN} (or apt install google-cloud-cli-{PLUGIN})"


def context_name(plan: ClusterPlan) -> str:
    """The name of the context: gke_PROJECT_REGION_NAME."""
    return f"gke_{plan.project}_{plan.region}_{plan.name}"


def require_plugin(plan: ClusterPlan) -> None:
    """Raise NotFoundError where kubectl and our own client could not log in to the cluster."""
    if shutil.which(PLUGIN) is None:
        raise NotFoundError(
            f"{PLUGIN}: is not on PATH; without it nobody can log in to {plan.name}\nInstall it:"
            f" {_INSTALL}"
        )


def write_context(plan: ClusterPlan, cluster: Mapping[str, Any]) -> str:
    """Put the context into the first file of $KUBECONFIG (default ~/.kube/config), replacing its
    own earlier entries; its name. `cluster`: the attributes of google_container_cluster. The
    current context stays what it is, unless there is none. Raises UserError for a file that is not
    a kubeconfig."""
    import yaml

    name = context_name(plan)
    path = _kubeconfig()
    try:
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        content = yaml.safe_load(text) or {}
        if not isinstance(content, dict):
            raise UserError(f"{path}: is not a kubeconfig; move it away, or set KUBECONFIG")
        auth = (cluster.get("master_auth") or [{}])[0]
        entries: dict[str, dict[str, Any]] = {
            "clusters": {
                "cluster": {
                    "certificate-authority-data": auth.get("cluster_ca_certificate") or "",
                    "server": f"https://{cluster['endpoint']}",
                }
            },
            "contexts": {"context": {"cluster": name, "user": name}},
            "users": {
                "user": {
                    "exec": {
                        "apiVersion": "client.authentication.k8s.io/v1beta1",
                        "command": PLUGIN,
                        "installHint": f"Install it: {_INSTALL}",
                        "provideClusterInfo": True,
                    }
                }
            },
        }
        content = {"apiVersion": "v1", "kind": "Config", "preferences": {}, **content}
        for key, value in entries.items():
            others = [each for each in content.get(key) or [] if each.get("name") != name]
            content[key] = [*others, {"name": name, **value}]
        content["current-context"] = content.get("current-context") or name
        write_atomically(path, yaml.safe_dump(content, sort_keys=False))
    except (yaml.YAMLError, AttributeError):
        raise UserError(f"{path}: is not a kubeconfig; move it away, or set KUBECONFIG") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror}); set KUBECONFIG") from None
    return name


def _kubeconfig() -> Path:
    named = [each for each in os.environ.get("KUBECONFIG", "").split(os.pathsep) if each]
    return Path(named[0]) if named else Path.home() / ".kube" / "config"
