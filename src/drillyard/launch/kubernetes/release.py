"""The plan of a run on Kubernetes: the values of the chart, and the `helm install` that submits
them. Pure.

The chart `drillyard-run` is the one description of a run: restart rules, queue, volumes and
security are in its templates, and a value here says what differs from run to run. Helm keeps chart
and values, so a run is resumed from the cluster alone.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from drillyard.config.cluster import ClusterConfig
from drillyard.config.environment import REFERENCE
from drillyard.errors import UserError
from drillyard.hardware.machines import Machine
from drillyard.launch.kubernetes import gke, pod_network
from drillyard.launch.kubernetes.config import BUCKET_MOUNT, FILES_MOUNT, KubernetesConfig
from drillyard.launch.kubernetes.created_cluster import section_defaults
from drillyard.launch.kubernetes.rights import READS, rights_for
from drillyard.launch.kubernetes.rules import findings, storage_root
from drillyard.launch.kubernetes.run_status import RUN_DIRECTORY
from drillyard.launch.network import NETWORK_FILE
from drillyard.launch.plan import Plan, Program
from drillyard.launch.prepared_run import ClusterPaths, prepare
from drillyard.launch.request import LaunchRequest
from drillyard.plan_files import ExplainedField, PlanFile, explained, packaged_chart

CHART, VALUES = "chart/drillyard-run", "values.json"
CLUSTER_LABEL, RUN_LABEL = "drillyard/cluster", "drillyard/run"
MASTER_PORT = 29500
MOST_BYTES = 1 << 20
"""Of a ConfigMap (https://kubernetes.io/docs/concepts/configuration/configmap/), and of a Secret,
Helm's record."""
_GPU = "nvidia.com/gpu"
_MOUNT_OPTIONS = "implicit-dirs,metadata-cache:ttl-secs:0,metadata-cache:negative-ttl-secs:0"
"""Nodes see each other's checkpoints and claims at once: cached metadata would show an earlier
state."""
_VARIABLES = {
    "node_rank": "$(NODE_RANK)",
    "nodes": "$(NNODES)",
    "processes_per_node": "$(NPROC_PER_NODE)",
    "master_addr": "$(MASTER_ADDR)",
    "master_port": "$(MASTER_PORT)",
    "round": "$(DRILLYARD_LAUNCH_ROUND)",
}
"""Placeholders of a command, and the pod's variables that the kubelet puts in their place."""


def plan_of(request: LaunchRequest) -> Plan:
    """The plan of a request. Raises UserError for every mistake in it."""
    cluster = request.cluster
    section = cluster.section_as(KubernetesConfig)
    root = storage_root(cluster)
    output = posixpath.normpath(posixpath.join(root, request.run.output))
    paths = ClusterPaths(root, output, cluster.python or "python3")
    prepared = prepare(
        request, checks=[findings], paths=paths, agents=False, launch_directory=FILES_MOUNT
    )
    _require_secrets(prepared, section)
    machine = _machine(request)
    values = values_of(prepared, request, machine)
    values_file = PlanFile(VALUES, json.dumps(values, indent=2) + "\n", 0o600)
    if (size := len(values_file.content.encode())) > MOST_BYTES:
        raise UserError(
            f"run config: its files have {size:,} bytes, and a ConfigMap has at most"
            f" {MOST_BYTES:,}; put large files on the shared storage, {root}"
        )
    sent = (values_file, *chart_files())
    install = Program(
        "install the run's release",
        install_argv(section, cluster.name, request.run.name),
        reads=tuple(file.path for file in sent),
    )
    return replace(
        prepared,
        code=f"in the image {prepared.image}",
        files=sent,
        steps=(install,),
        fields=(
            *prepared.fields,
            *_created_fields(cluster),
            *pod_network.fields(request, machine),
            *_fields(values),
        ),
        warnings=(
            *prepared.warnings,
            *_restart_warnings(section),
            *_namespace_warnings(values, section),
        ),
        script=VALUES,
    )


_CREATED = {
    "context": "of the cluster that drillyard cluster up makes",
    "namespace": "its level of Pod Security allows what runs on the cluster's machines need",
    "queue": "of the pool that drillyard cluster up makes for this machine and consumption",
    "service_account": "drillyard cluster up makes it in each namespace",
    "run_as_user": "user of the image of docker/Dockerfile; 0: the image's own",
}


def _created_fields(cluster: ClusterConfig) -> Iterator[ExplainedField]:
    """The settings that a created cluster's names have given."""
    section = cluster.section_as(KubernetesConfig)
    for key, value in section_defaults(cluster).items():
        if getattr(section, key) == value:
            source = "default of a cluster that drillyard cluster up makes"
            yield explained(f"kubernetes.{key}", value, _CREATED[key], source)


def _machine(request: LaunchRequest) -> Machine | None:
    name = request.cluster.machine
    return None if name is None else request.facts.machine(name)


def _restart_warnings(section: KubernetesConfig) -> Iterator[str]:
    if section.controller == "job":
        yield (
            "kubernetes.controller is job: nothing restarts the run after a failure, a lost node or"
            " a preemption, and --max-failures has no effect; drillyard runs resume goes on from"
            " its last checkpoint"
        )


def _namespace_warnings(values: Mapping[str, Any], section: KubernetesConfig) -> Iterator[str]:
    if needed := pod_network.privileges(values):
        yield (
            f"namespace {section.namespace} must allow pods of the Pod Security level privileged,"
            f" for {'; '.join(needed)}: kubectl label namespace {section.namespace}"
            " pod-security.kubernetes.io/enforce=privileged --overwrite"
        )


def helm_argv(section: KubernetesConfig, *words: str) -> tuple[str, ...]:
    """A call of Helm on the cluster's namespace."""
    context = ("--kube-context", section.context) if section.context else ()
    return ("helm", *words, "--namespace", section.namespace, *context)


def install_argv(section: KubernetesConfig, cluster: str, run: str) -> tuple[str, ...]:
    """The call that submits a run. Helm's record gets the labels by which `runs list` finds
    cancelled runs."""
    labels = f"{CLUSTER_LABEL}={cluster},{RUN_LABEL}={run}"
    return helm_argv(section, "install", run, CHART, "--values", VALUES, "--labels", labels)


def chart_files() -> tuple[PlanFile, ...]:
    """The chart's files, in order of their paths."""
    return tuple(
        PlanFile(f"{CHART}/{path}", content)
        for path, content in packaged_chart("drillyard-run").items()
    )


def values_of(prepared: Plan, request: LaunchRequest, machine: Machine | None) -> dict[str, Any]:
    """The chart's values for a run: only those that differ from the chart's own."""
    job, cluster = prepared.job, request.cluster
    section = cluster.section_as(KubernetesConfig)
    own = {file.path: file for file in prepared.files if file.path != NETWORK_FILE}
    script = next((file.content for file in prepared.files if file.path == NETWORK_FILE), "")
    replaced = {
        **_VARIABLES,
        "run_directory": job.run_directory,
        "launch_directory": job.launch_directory,
    }
    resources = pod_network.container_resources(section.resources)
    limits = pod_network.machine_resources(request, machine)
    if request.uses_gpus and machine is not None:
        limits = {_GPU: job.processes_per_node, **limits}
    if limits:
        resources["limits"] = {**limits, **resources.get("limits", {})}
    on_gke = cluster.platform == "gke"
    limit = section.limit_seconds or 0
    values: dict[str, Any] = {
        "nodes": job.nodes,
        "processesPerNode": job.processes_per_node,
        "image": prepared.image,
        "command": [expanded(word, replaced) for word in job.command],
        "masterPort": MASTER_PORT,
        "environment": {name: expanded(value, replaced) for name, value in job.environment.items()},
        "files": {
            path: {"content": file.content, "mode": 0o755 if file.mode & 0o100 else 0o644}
            for path, file in own.items()
        },
        "networkScript": script,
        "controller": section.controller,
        "maxRestarts": job.max_failures,
        "gracePeriodSeconds": section.grace_seconds,
        "lostNodeSeconds": section.lost_node_seconds,
        "labels": {CLUSTER_LABEL: job.cluster, RUN_LABEL: job.run, **section.labels},
        "annotations": {RUN_DIRECTORY: job.run_directory},
        "workingDir": _working_directory(request, job.working_directory),
        "imagePullSecrets": section.pull_secrets,
        "secrets": {
            name: dict(zip(("secret", "key"), each.split("/"), strict=True))
            for name, each in section.secrets.items()
        },
        "queue": section.queue or "",
        "kueuePriorityClass": section.priority_class or "",
        "maxRunSeconds": limit,
        "provisioning": {
            "maxRunSeconds": (
                limit
                if section.queue and (not on_gke or cluster.consumption == "flex-start-queued")
                else 0
            )
        },
        "serviceAccount": section.service_account or "",
        "topology": _topology(section),
        "securityContext": {"runAsUser": section.run_as_user, "fsGroup": section.file_group},
        "tolerations": [
            *(gke.tolerations(cluster.consumption, machine) if on_gke else []),
            *section.tolerations,
        ],
        "nodeSelector": node_labels(request),
        **({"excludeNodes": list(request.exclude)} if request.exclude else {}),
        "resources": resources,
        **pod_network.network_values(request, machine),
    }
    if section.volume_claim is not None:
        values["volumeClaim"] = {
            "name": section.volume_claim,
            "mountPath": cluster.storage.directory,
        }
    else:
        mount = f"{BUCKET_MOUNT}/{cluster.storage.bucket}"
        values["bucket"] = {
            "name": cluster.storage.bucket,
            "mountPath": mount,
            "mountOptions": _MOUNT_OPTIONS,
        }
    return values


def node_labels(request: LaunchRequest) -> dict[str, str]:
    """The labels of the nodes on which the pods may run."""
    cluster = request.cluster
    own = gke.node_selector(request, _machine(request)) if cluster.platform == "gke" else {}
    return {**own, **cluster.section_as(KubernetesConfig).node_selector}


def expanded(text: str, replaced: Mapping[str, str]) -> str:
    """`text` for a container's command or environment: placeholders of the job become the pod's
    variables, and `$(` that the user wrote stays as it is."""
    pattern = re.compile(r"\{(" + "|".join(replaced) + r")\}")
    return pattern.sub(lambda match: replaced[match[1]], text.replace("$(", "$$("))


def _working_directory(request: LaunchRequest, planned: str | None) -> str:
    """Only a workload names one; else the command starts where the image does."""
    return planned or "" if request.workload and request.workload.working_directory else ""


def _topology(section: KubernetesConfig) -> dict[str, str]:
    for mode in ("required", "preferred"):
        if level := getattr(section.topology, mode):
            return {"mode": mode, "level": level}
    return {"mode": "none", "level": ""}


def _require_secrets(prepared: Plan, section: KubernetesConfig) -> None:
    """Raise UserError where run.yaml refers to a variable that no Secret provides."""
    texts = [file.content for file in prepared.files if file.path == "run.yaml"]
    for name in sorted({name for text in texts for name in REFERENCE.findall(text)}):
        if name not in section.secrets:
            raise UserError(
                f"run config: refers to ${{env:{name}}}, and kubernetes.secrets of the cluster"
                f" config has no {name}\n"
                f"kubectl -n {section.namespace} create secret generic drillyard --from-literal"
                f' {name}="${name}"\n'
                f"then set kubernetes.secrets: {{{name}: drillyard/{name}}}"
            )


_REASONS = {
    "nodes": ("pods, one per node: they start together or not at all", "cluster.yaml: nodes"),
    "processesPerNode": ("ranks of each pod", "cluster.yaml: machine or processes_per_node"),
    "image": ("the run's image", "run.yaml: workload.image or cluster.yaml: image"),
    "command": ("first process of each pod; JobSet restarts it, so there is no agent", "drillyard"),
    "masterPort": ("pods have addresses of their own, so the port is free", "drillyard"),
    "controller": (
        "jobset restarts the run; a job is never restarted",
        "cluster.yaml: kubernetes.controller",
    ),
    "maxRestarts": ("restarts that count; 85 and disruptions do not", "--max-failures"),
    "gracePeriodSeconds": ("time to save after SIGTERM", "cluster.yaml: kubernetes.grace_seconds"),
    "lostNodeSeconds": (
        "then the pods of a lost node are deleted",
        "cluster.yaml: kubernetes.lost_node_seconds",
    ),
    "queue": (
        "Kueue admits the run when its quota has room",
        "cluster.yaml: kubernetes.queue, or the pool of the run",
    ),
    "maxRunSeconds": ("counted by Kueue from admission", "cluster.yaml: kubernetes.max_run_hours"),
    "provisioning": (
        "what a queue with flex-start asks the cloud for",
        "cluster.yaml: kubernetes.max_run_hours",
    ),
    "volumeClaim": ("run directories, seen by every node", "cluster.yaml: kubernetes.volume_claim"),
    "bucket": ("run directories, seen by every node", "cluster.yaml: storage.bucket"),
    "resources": (
        "all GPUs of a node, and what is set besides",
        "cluster.yaml: machine, kubernetes.resources",
    ),
    "topology": ("nodes near each other", "cluster.yaml: kubernetes.topology"),
    "network": (
        "how the pods reach the data NICs",
        "cluster.yaml: machine, and kubernetes.pod_network",
    ),
    "hostPaths": ("directories of the node", "the network stack, and cluster.yaml: mounts"),
    "capabilities": ("what the network stack needs to pin memory", "the network stack"),
    "privileged": (
        "the container opens devices of the node",
        "the network stack, and kubernetes.pod_network",
    ),
    "sharedMemory": ("for NCCL's and the data loaders' buffers", "the network stack"),
    "nodeSelector": (
        "the machine, and how it is bought",
        "cluster.yaml: machine, consumption, kubernetes",
    ),
    "excludeNodes": ("nodes not to use", "--exclude"),
    "tolerations": ("taints of such nodes", "cluster.yaml: machine, consumption, kubernetes"),
}


def _fields(values: Mapping[str, Any]) -> list[ExplainedField]:
    set_by_user = ("as set", "cluster.yaml: kubernetes")
    own = {
        name: value
        for name, value in values.items()
        if value not in ("", 0, {}, []) and name != "files"
    }
    role = ExplainedField(
        "Role",
        _role((*rights_for(values), *READS)),
        "the least rights in the namespace to launch, read and cancel",
        "drillyard",
    )
    return [
        role,
        *(
            explained(f"{VALUES}: {name}", value, *_REASONS.get(name, set_by_user))
            for name, value in own.items()
        ),
    ]


def _role(rights: tuple[tuple[str, str, str], ...]) -> str:
    rules: dict[tuple[str, str], list[str]] = {}
    for verb, group, resource in rights:
        rules.setdefault((group, resource), []).append(verb)
    lines = [
        f'- {{apiGroups: ["{group}"], resources: ["{resource}"], verbs: [{", ".join(verbs)}]}}'
        for (group, resource), verbs in rules.items()
    ]
    head = [
        "apiVersion: rbac.authorization.k8s.io/v1",
        "kind: Role",
        "metadata: {name: drillyard}",
        "rules:",
    ]
    return "\n".join([*head, *lines])
