"""The part of `up`, `down` and `status` that happens inside of the cluster, by a context of the
kubeconfig."""

from __future__ import annotations

import base64
import os
from collections.abc import Sequence

from drillyard import redaction
from drillyard.errors import UserError
from drillyard.provision.cluster_objects import ClusterObjects, cluster_objects_status
from drillyard.provision.cluster_workloads import (
    RunningWorkload,
    delete_workloads,
    running_workloads,
)
from drillyard.provision.existing_objects import compare_existing
from drillyard.provision.helm_releases import install_releases
from drillyard.provision.kubeconfig_context import (
    context_name,
    remove_context,
    require_programs,
    write_context,
)

__all__ = [
    "ClusterObjects",
    "RunningWorkload",
    "cluster_objects_status",
    "compare_existing",
    "context_name",
    "delete_workloads",
    "install_releases",
    "remove_context",
    "require_programs",
    "running_workloads",
    "write_context",
    "write_secret",
]

SECRET = "drillyard"  # noqa: S105
"""The Secret of each namespace that has the values which `--secret` names."""


def write_secret(context: str | None, namespaces: Sequence[str], name: str) -> str:
    """Put the value of this machine's environment variable `name` into a Secret of each namespace;
    returns SECRET/KEY, as `kubernetes.secrets` names it.

    The value goes to the API server alone: to no file, argument, state or release. Raises UserError
    where the variable is not set or empty.
    """
    from drillyard.launch.kubernetes.cluster_api import CORE, ApiServer

    value = os.environ.get(name, "")
    if not value:
        raise UserError(f"--secret {name}: the environment variable {name} is not set: export it")
    redaction.add_secret(name, value)
    data = {name: base64.b64encode(value.encode()).decode()}
    api = ApiServer(context)
    for namespace in namespaces:
        path = f"{CORE}/namespaces/{namespace}/secrets"
        body = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": SECRET}, "data": data}
        if api.created_at(path, body) is None:
            api.merge_at(f"{path}/{SECRET}", {"data": data})
    return f"{SECRET}/{name}"
