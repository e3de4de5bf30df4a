"""The chart `drillyard-cluster` on a real control plane, with two versions of Kueue: each way of
buying has a queue that admits a run, and nothing is left in the end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.integration.kubernetes import kwok
from tests.integration.kubernetes.cluster import KUEUES, Cluster, started
from tests.integration.kubernetes.team import until
from tests.integration.provision.kubernetes_admin import CONTEXT, Admin

from drillyard.config.yaml_document import parse_document
from drillyard.provision.launch_file import launch_values, with_values
from drillyard.provision.provisioner import plan_file

MODES = ("on-demand", "reservation", "spot", "flex-start", "flex-start-queued", "calendar")
PRIVILEGED = "runs-privileged"
INSTALL = "stage.install_releases(plan, context, notice=said.append)"
STATUS = "stage.cluster_objects_status(plan, context)"
PLACED = "cloud.google.com/gce-topology-"
FILE: dict[str, Any] = {
    "name": "c",
    "platform": "gke",
    "location": {"project": "p", "region": "us-central1", "zone": "us-central1-b"},
    "machine": "a3-ultragpu-8g",
    "nodes": 2,
    "consumption": "on-demand",
    "storage": {"bucket": "my-bucket"},
    "image": "i:1",
    "cluster": {
        "pools": [
            {"consumption": each, "nodes": 2, "reservations": [f"r-{each}"]}
            if each in ("reservation", "calendar")
            else {"consumption": each, "nodes": 2}
            for each in MODES[1:]
        ]
    },
}


ONE_KUEUE = pytest.mark.parametrize("cluster", ["kueue"], indirect=True, scope="module")
"""For what does not depend on Kueue's version."""


@pytest.fixture(scope="module", params=list(KUEUES))
def cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """With GKE's network objects, and simulated nodes for each way of buying but the queued one."""
    with started(tmp_path_factory.mktemp(request.param), kueue=request.param) as made:
        kwok.start_kwok(made)
        made.kubectl("apply", "--filename", str(Path(__file__).with_name("gke_objects.yaml")))
        made.kubectl("wait", "--for", "condition=Established", "crd", "--all", "--timeout", "60s")
        nodes = [node(mode, n) for mode in MODES if mode != "flex-start-queued" for n in range(2)]
        kwok.add_nodes(made, nodes)
        yield made


def node(mode: str, number: int, **more: str) -> dict[str, Any]:
    """A node of a pool with the labels that GKE sets."""
    labels = {
        "cloud.google.com/gke-accelerator": "nvidia-h200-141gb",
        "kubernetes.io/arch": "amd64",
        **more,
    }
    if mode in ("spot", "flex-start"):
        labels[f"cloud.google.com/gke-{mode}"] = "true"
    if mode in ("reservation", "calendar"):
        place = "cloud.google.com/reservation-"
        labels |= {f"{place}name": f"r-{mode}", f"{place}affinity": "specific"}
        labels |= {f"{PLACED}subblock": "s", f"{PLACED}host": f"h{number}"}
    return kwok.node(f"{mode}-{number}", f"c-{mode}", "b", **labels)


@pytest.fixture(scope="module")
def admin(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Admin]:
    """With the plan's releases installed: JobSet and Kueue are there, so only our own is."""
    made = Admin(cluster, tmp_path_factory.mktemp("admin"))
    made.value(INSTALL, config(made))
    cluster.kubectl(
        "wait", "--for", "condition=Active", "clusterqueue", "--all", "--timeout", "60s"
    )
    yield made
    made.close()


def config(admin: Admin, **changes: Any) -> Path:
    """The file of the cluster, whose first pool is that of on-demand nodes."""
    path = admin.directory / "cluster.yaml"
    path.write_text(yaml.safe_dump({**FILE, **changes}))
    return path


def launch(
    admin: Admin, name: str, cluster: Path, mode: str | None = None, *, check: bool = True
) -> Any:
    """Launch a run, on the pool of nodes that are bought in this way."""
    pool = ["--pool", f"c-{mode}"] if mode else []
    run = admin.directory / "run.yaml"
    run.write_text(yaml.safe_dump({"name": name, "workload": {"command": ["true"]}}))
    return admin.drillyard("launch", run, "--cluster", cluster, *pool, check=check)


def workload(admin: Admin, run: str, namespace: str = PRIVILEGED) -> dict[str, Any]:
    found = admin.cluster.get("--namespace", namespace, "workloads.kueue.x-k8s.io")["items"]
    (own,) = [each for each in found if each["metadata"]["ownerReferences"][0]["name"] == run]
    return dict(own)


def is_admitted(admin: Admin, run: str, namespace: str = PRIVILEGED) -> bool:
    conditions = workload(admin, run, namespace).get("status", {}).get("conditions", ())
    return any(each["type"] == "Admitted" and each["status"] == "True" for each in conditions)


def pods(admin: Admin, run: str, namespace: str = PRIVILEGED) -> list[dict[str, Any]]:
    selector = f"jobset.sigs.k8s.io/jobset-name={run}"
    found: list[dict[str, Any]] = admin.cluster.get(
        "--namespace", namespace, "pods", "--selector", selector
    )["items"]
    return found


@pytest.mark.parametrize("mode", MODES)
def test_the_queue_of_each_way_of_buying_admits_a_run_launched_with_the_same_file(
    mode: str, admin: Admin
) -> None:
    run, path = f"run-{mode}", config(admin)
    # As `up --write` leaves it.
    settings = plan_file(path).plan.launch_settings or {}
    text = path.read_text()
    made = with_values(text, launch_values(parse_document(text, path.name), [], settings))
    assert made is not None
    path.write_text(made)
    assert "queue: c-on-demand\n" in path.read_text()
    launch(admin, run, path, mode)
    if mode == "flex-start-queued":
        found = until(
            lambda: admin.cluster.get("--all-namespaces", "provisioningrequests")["items"]
        )
        (request,) = found
        assert request["spec"]["provisioningClassName"] == "queued-provisioning.gke.io"
        assert [each["count"] for each in request["spec"]["podSets"]] == [2]
        label = {"autoscaling.gke.io/provisioning-request": request["metadata"]["name"]}
        kwok.add_nodes(admin.cluster, [node(mode, n, **label) for n in range(2)])
        kwok.set_conditions(admin.cluster, request, Accepted="Accepted", Provisioned="Provisioned")
    until(lambda: is_admitted(admin, run), seconds=60)
    until(
        lambda: len([1 for each in pods(admin, run) if each["spec"].get("nodeName")]) == 2,
        seconds=60,
    )
    placed = sorted(each["spec"]["nodeName"] for each in pods(admin, run))
    assert placed == [f"{mode}-0", f"{mode}-1"]
    (pod, _) = pods(admin, run)
    assert pod["spec"]["serviceAccountName"] == "trainer"


def test_a_run_without_node_directories_is_admitted_in_the_restricted_namespace(
    admin: Admin,
) -> None:
    admin.cluster.kubectl("--namespace", PRIVILEGED, "delete", "jobset", "run-spot")
    launch(admin, "plain", config(admin, network_stack="ethernet"), "spot")
    until(lambda: is_admitted(admin, "plain", "runs"), seconds=60)
    until(lambda: len(pods(admin, "plain", "runs")) == 2, seconds=60)


NEEDS_PRIVILEGE: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "gib": ({}, ("hostPath",)),
    "tcpxo": ({"machine": "a3-megagpu-8g"}, ("hostPath", "NET_ADMIN")),
    "tcpx": ({"machine": "a3-highgpu-8g"}, ("hostPath", "NET_ADMIN")),
    "host": ({"kubernetes": {"pod_network": "host"}}, ("hostNetwork", "privileged")),
    "dranet": ({"kubernetes": {"pod_network": "dranet"}}, ("hostPath",)),
    "mounts": ({"network_stack": "ethernet", "mounts": ["/mnt:/mnt"]}, ("hostPath",)),
}
"""By the row of the table in docs/kubernetes.md, without infiniband, which Google does not have:
settings of the file, and what is refused."""


@ONE_KUEUE
@pytest.mark.parametrize("row", NEEDS_PRIVILEGE)
def test_the_restricted_namespace_refuses_what_needs_privilege(row: str, admin: Admin) -> None:
    settings, words = NEEDS_PRIVILEGE[row]
    section = {**settings.get("kubernetes", {}), "namespace": "runs"}
    path = config(admin, **{**settings, "kubernetes": section})
    done = launch(admin, "forbidden", path, "spot", check=False)
    assert done.returncode == 2
    assert "violates PodSecurity" in done.stderr
    assert [word for word in words if word not in done.stderr] == []
    found = admin.cluster.get("--namespace", "runs", "jobsets")["items"]
    assert [each["metadata"]["name"] for each in found] == ["plain"]


@ONE_KUEUE
def test_the_restricted_namespace_takes_no_run_of_root(admin: Admin) -> None:
    section = {"namespace": "runs", "run_as_user": 0}
    path = config(admin, network_stack="ethernet", kubernetes=section)
    done = launch(admin, "root", path, "spot", check=False)
    assert done.returncode == 2 and "violates PodSecurity" in done.stderr, done.stderr


def test_the_status_has_pools_queues_releases_and_nothing_missing(admin: Admin) -> None:
    found = admin.value(STATUS, config(admin))
    pools = {each["name"]: each for each in found["pools"]}
    assert set(pools) == {f"c-{mode}" for mode in MODES}
    assert {each["ready"] for each in pools.values()} == {2}
    queues = {each["name"]: each for each in found["queues"]}
    assert all(each["active"] for each in queues.values())
    assert queues["c-reservation"]["admitted"] == 1
    states = {each["name"]: each["state"] for each in found["releases"]}
    assert states == {"jobset": "foreign", "kueue": "foreign", "drillyard-cluster": "deployed"}
    assert found["missing"] == []
    admin.cluster.kubectl("delete", "clusterqueue", "c-calendar", "--wait=false")
    admin.cluster.kubectl("--namespace", "runs", "delete", "serviceaccount", "trainer")
    missing = admin.value(STATUS, config(admin))["missing"]
    assert any("service account trainer in namespace runs" in each for each in missing)


@ONE_KUEUE
def test_an_installation_that_was_killed_is_continued(admin: Admin) -> None:
    """What a killed Helm leaves: a record in the state pending-upgrade, which Helm itself refuses
    to go on from."""
    secrets = admin.cluster.get(
        "--namespace", "drillyard-system", "secrets", "--selector", "owner=helm"
    )
    last = max(secrets["items"], key=lambda each: int(each["metadata"]["labels"]["version"]))
    place = {"namespace": "drillyard-system", "name": "sh.helm.release.v1.drillyard-cluster.v9"}
    labels = {**last["metadata"]["labels"], "version": "9", "status": "pending-upgrade"}
    admin.cluster.apply({**last, "metadata": {**place, "labels": labels, "annotations": {}}})
    path = config(admin)
    assert any("pending-upgrade" in each for each in admin.stage(INSTALL, path)["said"])
    until(lambda: admin.value(STATUS, path)["missing"] == [], seconds=60)


@ONE_KUEUE
def test_of_two_installations_at_once_one_is_refused(admin: Admin) -> None:
    both = [admin.stage_process() for _ in range(2)]
    for each in both:  # both have imported what they need
        admin.ask(each, "1")
        assert admin.answer(each)["found"] == 1
    for each in both:
        admin.ask(each, INSTALL, config(admin))
    answers = [admin.answer(each) for each in both]
    for each in both:
        each.communicate()
    (refused,) = [each["refused"] for each in answers if "refused" in each]
    assert "installed by another command (process" in refused


@ONE_KUEUE
def test_what_does_not_become_ready_is_named_with_its_reason(admin: Admin) -> None:
    selector = "k8s-app=nccl-rdma-installer"
    (pod, *_) = admin.cluster.get("--namespace", "kube-system", "pods", "--selector", selector)[
        "items"
    ]
    waiting = {"waiting": {"reason": "ImagePullBackOff", "message": "not found"}}
    status = {
        "conditions": [{"type": "Ready", "status": "False"}],
        "containerStatuses": [
            {
                **each,
                "ready": False,
                "state": waiting,
            }
            for each in pod["status"]["containerStatuses"]
        ],
    }
    name = pod["metadata"]["name"]
    admin.cluster.kubectl(
        *("--namespace", "kube-system", "patch", "pod", name, "--subresource=status"),
        *("--type=merge", "--patch", json.dumps({"status": status})),
    )
    expression = "stage.install_releases(plan, context, ready_seconds=1, notice=said.append)"
    refused = admin.stage(expression, config(admin))["refused"]
    assert "DaemonSet kube-system/nccl-rdma-installer" in refused
    assert f"pod {name}" in refused and "ImagePullBackOff: not found" in refused
    admin.cluster.kubectl("--namespace", "kube-system", "delete", "pod", name)


@ONE_KUEUE
def test_a_secret_goes_from_the_environment_to_each_namespace_and_nowhere_else(
    admin: Admin,
) -> None:
    expression = 'stage.write_secret(context, ["runs", "runs-privileged"], "HF_TOKEN")'
    assert admin.value(expression, HF_TOKEN="hf_first") == "drillyard/HF_TOKEN"
    admin.value(expression, HF_TOKEN="hf_second")
    admin.value(expression.replace("HF_TOKEN", "WANDB_API_KEY"), WANDB_API_KEY="other")
    for namespace in ("runs", PRIVILEGED):
        data = admin.cluster.get("--namespace", namespace, "secret/drillyard")["data"]
        assert sorted(data) == ["HF_TOKEN", "WANDB_API_KEY"]
        assert data["HF_TOKEN"] == "aGZfc2Vjb25k"
    assert "export it" in admin.stage(expression)["refused"]


def jobset(name: str, namespace: str) -> dict[str, Any]:
    pod = {"restartPolicy": "Never", "containers": [{"name": "a", "image": "i:1"}]}
    job = {"template": {"spec": {"parallelism": 1, "completions": 1, "template": {"spec": pod}}}}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"replicatedJobs": [{"name": "w", "replicas": 1, **job}]},
    }


def test_everybodys_workloads_are_seen_and_deleted_with_their_volumes(admin: Admin) -> None:
    """The last test of the cluster: nothing is left on it."""
    other = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "other"}}
    place = {"name": "mine", "namespace": "other"}
    gpu = {"requests": {"nvidia.com/gpu": "1"}, "limits": {"nvidia.com/gpu": "1"}}
    pod = {"containers": [{"name": "a", "image": "i:1", "resources": gpu}]}
    size = {"resources": {"requests": {"storage": "1Gi"}}, "accessModes": ["ReadWriteOnce"]}
    service = {"type": "LoadBalancer", "ports": [{"port": 80}], "selector": {"a": "b"}}
    admin.cluster.apply(other)
    until(
        lambda: admin.cluster.kubectl(
            "--namespace", "other", "get", "serviceaccount", "default", check=False
        )
    )
    admin.cluster.apply(
        jobset("theirs", "other"),
        {"apiVersion": "v1", "kind": "Pod", "metadata": place, "spec": pod},
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": place,
            "spec": {**size, "storageClassName": ""},
        },
        {"apiVersion": "v1", "kind": "Service", "metadata": place, "spec": service},
    )

    def workloads() -> dict[tuple[str, str, str], Any]:
        found = admin.value("stage.running_workloads(context)")
        return {(each["kind"], each["namespace"], each["name"]): each for each in found}

    # Jobs of runs that other tests have removed may still be ending.
    until(lambda: {kind for kind, _, _ in workloads()} == {"JobSet", "Pod"})
    seen = workloads()
    assert ("JobSet", "other", "theirs") in seen
    assert seen["Pod", "other", "mine"]["gpus"] == 1
    assert seen["JobSet", PRIVILEGED, "run-on-demand"]["gpus"] == 16
    assert admin.value("stage.delete_workloads(context, seconds=60, notice=said.append)") == []
    for kind in ("jobsets", "jobs", "persistentvolumeclaims", "ingresses"):
        assert admin.cluster.get("--all-namespaces", kind)["items"] == [], kind
    services = admin.cluster.get("--all-namespaces", "services")["items"]
    assert [each for each in services if each["spec"]["type"] == "LoadBalancer"] == []
    left = admin.value("stage.running_workloads(context)")
    assert [each["name"] for each in left] in ([], ["mine"])


@ONE_KUEUE
def test_a_claim_that_cannot_go_is_named_with_its_finalizer(admin: Admin) -> None:
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "held", "namespace": "other", "finalizers": ["test/held"]},
        "spec": {
            "resources": {"requests": {"storage": "1Gi"}},
            "accessModes": ["ReadWriteOnce"],
            "storageClassName": "",
        },
    }
    admin.cluster.apply(claim)
    refused = admin.stage("stage.delete_workloads(context, seconds=1, notice=said.append)")[
        "refused"
    ]
    assert "persistentvolumeclaim other/held" in refused and "test/held" in refused
    patch = '{"metadata": {"finalizers": null}}'
    admin.cluster.kubectl(
        *("--namespace", "other", "patch", "persistentvolumeclaim", "held"),
        *("--type", "merge", "--patch", patch),
    )


COMPARE = "stage.compare_existing(plan, context)"
INSTALL_COMPARED = (
    "stage.install_releases(stage.compare_existing(plan, context).plan, context,"
    " notice=said.append)"
)


def existing(admin: Admin, namespace: str) -> Path:
    """A file for the same cluster as one that somebody else has made."""
    path = admin.directory / f"{namespace}.yaml"
    content = {
        **{key: FILE[key] for key in ("name", "machine", "nodes", "image")},
        "platform": "kubernetes",
        "network_stack": "ethernet",
        "storage": {"directory": "/data"},
        "kubernetes": {
            "context": CONTEXT,
            "namespace": namespace,
            "queue": "gpus",
            "volume_claim": "shared",
            "run_as_user": 1000,
            "node_selector": {"cloud.google.com/gke-nodepool": "c-spot"},
        },
    }
    path.write_text(yaml.safe_dump(content))
    return path


def states(admin: Admin, path: Path) -> dict[str, str]:
    """The state of each object by kind and name."""
    found = admin.value(f"dataclasses.asdict({COMPARE})['states']", path)
    return {f"{each['kind']} {each['name']}": each["state"] for each in found}


def kueue_object(admin: Admin, kind: str, name: str, namespace: str = "", **spec: Any) -> Any:
    versions = admin.cluster.kubectl("api-versions").split()
    version = "v1beta2" if "kueue.x-k8s.io/v1beta2" in versions else "v1beta1"
    place = {"name": name, **({"namespace": namespace} if namespace else {})}
    return {
        "apiVersion": f"kueue.x-k8s.io/{version}",
        "kind": kind,
        "metadata": place,
        "spec": spec,
    }


def test_queues_of_somebody_else_are_used_as_they_are_or_named(admin: Admin) -> None:
    """On a cluster that exists; the objects of ours that the tests before have made are replaced by
    those of this file, which has the same name."""
    theirs = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "theirs"}}
    gpus = {"name": "nvidia.com/gpu", "nominalQuota": 16}
    group = {"coveredResources": ["nvidia.com/gpu"]}
    group["flavors"] = [{"name": "shared", "resources": [gpus]}]  # type: ignore[list-item]
    nodes = {"cloud.google.com/gke-nodepool": "c-spot"}
    queue = kueue_object(
        admin, "ClusterQueue", "shared", namespaceSelector={}, resourceGroups=[group]
    )
    admin.cluster.apply(
        theirs,
        kueue_object(admin, "ResourceFlavor", "shared", nodeLabels=nodes),
        queue,
        kueue_object(admin, "LocalQueue", "gpus", "theirs", clusterQueue="shared"),
    )
    path = existing(admin, "theirs")
    found = states(admin, path)
    assert found["LocalQueue theirs/gpus"] == found["ClusterQueue shared"] == "used"
    assert found["Namespace theirs"] == "used" and "ClusterQueue gpus" not in found
    assert found["ServiceAccount theirs/trainer"] == found["Role theirs/drillyard"] == "add"
    before = admin.cluster.get("--namespace", "theirs", "localqueue/gpus")["metadata"]

    admin.value(INSTALL_COMPARED, path)
    kept = admin.cluster.get("--namespace", "theirs", "localqueue/gpus")["metadata"]
    assert kept["uid"] == before["uid"] and "labels" not in kept
    assert states(admin, path)["ServiceAccount theirs/trainer"] == "ours"
    launch(admin, "in-theirs", path)
    until(lambda: is_admitted(admin, "in-theirs", "theirs"), seconds=60)
    # Kueue counts a little later.
    until(lambda: admin.value(STATUS, path)["queues"][0]["admitted"] == 1, seconds=30)
    status = admin.value(STATUS, path)
    assert status["missing"] == [] and [each["name"] for each in status["queues"]] == ["shared"]
    shown = admin.drillyard("cluster", "plan", path, "--check")
    assert "LocalQueue" in shown.stdout and "theirs/gpus" in shown.stdout

    selector = {"matchLabels": {"team": "b"}}
    admin.cluster.apply({**queue, "spec": {**queue["spec"], "namespaceSelector": selector}})
    checked = admin.drillyard("cluster", "plan", path, "--check", check=False)
    assert checked.returncode == 1 and "takes no runs of namespace theirs" in checked.stdout
    refused = admin.drillyard("cluster", "up", path, "--yes", check=False)
    assert refused.returncode == 2 and "kubernetes.queue" in refused.stderr
    # What the refusal says to do.
    admin.drillyard("cluster", "plan", path, "--check", "--set", "kubernetes.queue=other")


def test_a_namespace_that_the_file_names_is_made_by_its_user_and_the_rest_added_once(
    admin: Admin,
) -> None:
    path = existing(admin, "mine")
    refused = admin.drillyard("cluster", "up", path, "--yes", check=False)
    assert refused.returncode == 2
    (command,) = [
        line.partition("make it: ")[2] for line in refused.stderr.splitlines() if "make it" in line
    ][-1:]
    assert command.split() == ["kubectl", "create", "namespace", "mine"]
    admin.cluster.kubectl(*command.split()[1:])
    assert states(admin, path)["ClusterQueue gpus"] == "add"
    admin.drillyard("cluster", "up", path, "--yes")
    found = states(admin, path)
    assert found.pop("Namespace mine") == "used"
    assert {each for name, each in found.items() if not name.startswith("chart")} == {"ours"}

    # One of ours that somebody has made again: nothing is changed before its owner is known.
    queue = ("--namespace", "mine", "localqueue/gpus")
    made = admin.cluster.get(*queue)
    admin.cluster.kubectl("--namespace", "mine", "delete", "localqueue", "gpus")
    place = {"name": "gpus", "namespace": "mine"}
    admin.cluster.apply(
        {**{key: made[key] for key in ("apiVersion", "kind", "spec")}, "metadata": place}
    )
    refused = admin.drillyard("cluster", "up", path, "--yes", check=False)
    assert refused.returncode == 2
    assert "labels" not in admin.cluster.get(*queue)["metadata"]
    command = refused.stderr.partition("if it is ours: kubectl ")[2].splitlines()[0]
    admin.cluster.kubectl(*command.split())
    assert states(admin, path)["LocalQueue mine/gpus"] == "ours"
