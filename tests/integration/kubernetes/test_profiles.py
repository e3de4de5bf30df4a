"""The network profiles, as Helm renders them for every machine of the catalog, against tables
written by hand."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.integration.kubernetes.cluster import ROOT, tool
from tests.integration.kubernetes.manifest_rules import RULES, broken_rules
from tests.integration.kubernetes.test_chart import at
from tests.unit.launch.requests import cluster, planned, request

from drillyard.config.load import load_cluster_config, load_launch_config
from drillyard.hardware import catalog, load_catalog
from drillyard.hardware.machines import Machine
from drillyard.launch.kubernetes.release import VALUES
from drillyard.launch.launcher import launcher_for
from drillyard.launch.plan import Plan
from drillyard.launch.plan_output import write_plan
from drillyard.launch.request import LaunchRequest

RUN = "name: w\nworkload: {command: [train]}\n"
MACHINES = sorted(name for name, each in catalog().machines.items() if each.cloud is not None)
POD = "spec.replicatedJobs.0.template.spec.template"


def config(
    machine: str, section: str = "", nodes: int = 2, consumption: str | None = None, **more: str
) -> str:
    """A cluster config for a machine: platform gke on Google Cloud, else kubernetes."""
    row = catalog().machines[machine]
    image = {"image": "i:1", **more}
    if row.cloud != "gcp":
        section = f"{{volume_claim: shared, {section}}}"
        return cluster(
            "kubernetes", machine, nodes, kubernetes=section, storage="{directory: /data}", **image
        )
    bought = consumption or row.consumption[0]
    queue = "queue: q" if "queue:" not in section else ""
    words = ", ".join(filter(None, [queue, section]))
    reserved = {"reservation": "mine"} if bought in ("reservation", "calendar") else {}
    zone = {
        "location": "{project: p, region: r, zone: z}",
        "storage": "{bucket: my-bucket}",
        **reserved,
    }
    return cluster(
        "gke", machine, nodes, kubernetes=f"{{{words}}}", consumption=bought, **zone, **image
    )


def helm(directory: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Helm on a written plan: `template` or `lint` with its values."""
    home = {
        **os.environ,
        **{f"HELM_{name}_HOME": str(directory) for name in ("CACHE", "CONFIG", "DATA")},
    }
    name = ("r",) if words[0] == "template" else ()
    chart = (
        str(directory / "launch/chart/drillyard-run"),
        "--values",
        str(directory / "launch" / VALUES),
        "--kube-version",
        "1.34",
    )
    return subprocess.run(
        [tool("helm"), *words, *name, *chart], capture_output=True, text=True, env=home, check=False
    )


@pytest.fixture
def written(tmp_path: Path) -> Callable[[str], Path]:
    """Writes the plan of a cluster config as `launch --output` does; its directory."""

    def write(text: str) -> Path:
        directory = tmp_path / "plan"
        write_plan(planned(request(text, RUN)), directory, overwrite=True)
        return directory

    return write


def rendered(directory: Path) -> str:
    done = helm(directory, "template")
    assert done.returncode == 0, done.stderr
    return str(done.stdout)


def jobset(manifests: str) -> dict[str, Any]:
    return next(each for each in yaml.safe_load_all(manifests) if each and each["kind"] == "JobSet")


@pytest.mark.parametrize("machine", MACHINES)
def test_every_machine_of_the_catalog_passes_lint_and_all_rules(
    machine: str, written: Callable[[str], Path]
) -> None:
    directory = written(config(machine))
    done = helm(directory, "lint", "--strict")
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(broken_rules(rendered(directory), catalog().machines[machine])) == []


NVIDIA_DEVICES = [f"/dev/nvidia{i}" for i in range(8)] + ["/dev/nvidiactl", "/dev/nvidia-uvm"]
TCPXO_HOST = {
    "nvidia": "/home/kubernetes/bin/nvidia",
    "aperture-devices": "/dev/aperture_devices",
    "sys": "/sys",
    "proc-sys": "/proc/sys",
}
GIB_HOST = {"nvidia": "/home/kubernetes/bin/nvidia", "gib": "/home/kubernetes/bin/gib"}
RDMA = [["eth0", "default"]] + [[f"eth{i + 2}", f"rdma-{i}"] for i in range(8)]
DEFAULTS: dict[str, Any] = {
    "interfaces": None,
    "host": {},
    "capabilities": ["drop ALL"],
    "privileged": False,
    "hostNetwork": False,
    "daemon": None,
    "devices": None,
    "limits": {"nvidia.com/gpu": 8},
    "claims": [],
    "shm": None,
    "seccomp": "RuntimeDefault",
}
TABLE: dict[str, tuple[str, dict[str, Any]]] = {
    "tcpx": (
        config("a3-highgpu-8g"),
        {
            "interfaces": [["eth0", "default"]] + [[f"eth{i}", f"vpc{i}"] for i in (1, 2, 3, 4)],
            "host": {
                "nvidia": "/home/kubernetes/bin/nvidia/lib64",
                "tcpx-socket": "/run/tcpx",
                "sys": "/sys",
                "proc-sys": "/proc/sys",
            },
            "capabilities": ["add IPC_LOCK"],
            "daemon": "us-docker.pkg.dev/gce-ai-infra/gpudirect-tcpx/tcpgpudmarxd-dev:v2.0.12",
            "devices": NVIDIA_DEVICES,
            "shm": "250Gi",
            "seccomp": None,
        },
    ),
    "tcpxo": (
        config("a3-megagpu-8g"),
        {
            "interfaces": [["eth0", "default"]] + [[f"eth{i}", f"vpc{i}"] for i in range(1, 9)],
            "host": TCPXO_HOST,
            "capabilities": [],
            "daemon": "us-docker.pkg.dev/gce-ai-infra/gpudirect-tcpxo/tcpgpudmarxd-dev:v1.0.21",
            "devices": [*NVIDIA_DEVICES, "/dev/dmabuf_import_helper"],
            "shm": "250Gi",
            "seccomp": None,
        },
    ),
    "tcpxo, older plugin": (
        config("a3-megagpu-8g", "nccl_plugin: 1.0.14"),
        {
            "interfaces": [["eth0", "default"]] + [[f"eth{i}", f"vpc{i}"] for i in range(1, 9)],
            "host": TCPXO_HOST,
            "capabilities": [],
            "daemon": "us-docker.pkg.dev/gce-ai-infra/gpudirect-tcpxo/tcpgpudmarxd-dev:v1.0.20",
            "devices": [*NVIDIA_DEVICES, "/dev/dmabuf_import_helper"],
            "shm": "250Gi",
            "seccomp": None,
        },
    ),
    "gib": (
        config("a4-highgpu-8g"),
        {"interfaces": RDMA, "host": GIB_HOST, "capabilities": [], "shm": "250Gi", "seccomp": None},
    ),
    "gib on the host's network": (
        config("a3-ultragpu-8g", "pod_network: host"),
        {
            "host": GIB_HOST,
            "capabilities": [],
            "privileged": True,
            "hostNetwork": True,
            "shm": "250Gi",
            "seccomp": None,
        },
    ),
    "gib by DRANET, libraries of the node": (
        config("a3-ultragpu-8g", "pod_network: dranet"),
        {
            "host": GIB_HOST,
            "capabilities": [],
            "claims": ["r-network"],
            "shm": "250Gi",
            "seccomp": None,
        },
    ),
    "gib by DRANET, libraries in the image": (
        config("a4-highgpu-8g", "pod_network: dranet, network_libraries: image"),
        {"claims": ["r-network"], "shm": "250Gi"},
    ),
    "gib on A4X": (
        config("a4x-highgpu-4g"),
        {
            "interfaces": [["eth0", "default"]] + [[f"eth{i + 2}", f"rdma-{i}"] for i in range(4)],
            "host": GIB_HOST,
            "capabilities": [],
            "limits": {"nvidia.com/gpu": 4},
            "claims": ["r-compute-domain"],
            "shm": "250Gi",
            "seccomp": None,
        },
    ),
    "gib on A4X Max": (
        config("a4x-maxgpu-4g-metal"),
        {
            "host": {"nvidia": "/home/kubernetes/bin/nvidia"},
            "capabilities": [],
            "limits": {"nvidia.com/gpu": 4},
            "claims": ["r-network", "r-compute-domain"],
            "shm": "250Gi",
            "seccomp": None,
        },
    ),
    "infiniband": (
        config("gpu-h100-sxm"),
        {
            "host": {"device-0": "/dev/infiniband"},
            "capabilities": [],
            "privileged": True,
            "shm": "250Gi",
            "seccomp": None,
        },
    ),
    "efa": (
        config("p5.48xlarge"),
        {"limits": {"nvidia.com/gpu": 8, "vpc.amazonaws.com/efa": 32}, "shm": "250Gi"},
    ),
    "ethernet": (config("a2-highgpu-8g"), {}),
    "ethernet, as set": (config("a3-megagpu-8g", network_stack="ethernet"), {}),
    "one node": (config("a3-megagpu-8g", nodes=1), {}),
}


def seen(manifests: str) -> dict[str, Any]:
    """What the table has of a profile."""
    pod = at(jobset(manifests), POD)
    notes, spec = pod["metadata"].get("annotations", {}), pod["spec"]
    train = spec["containers"][0]
    security, daemons = train.get("securityContext", {}), spec.get("initContainers", [])
    interfaces = json.loads(notes.get("networking.gke.io/interfaces", "null"))
    devices = next(
        (text for name, text in notes.items() if name.startswith("devices.gke.io/")), None
    )
    volumes = {each["name"]: each for each in spec["volumes"]}
    return {
        "interfaces": (
            interfaces and [[each["interfaceName"], each["network"]] for each in interfaces]
        ),
        "host": {
            name: each["hostPath"]["path"] for name, each in volumes.items() if "hostPath" in each
        },
        "capabilities": [
            f"{verb} {name}"
            for verb, names in (security.get("capabilities") or {}).items()
            for name in names or ()
        ],
        "privileged": security.get("privileged", False),
        "hostNetwork": spec.get("hostNetwork", False),
        "daemon": daemons[0]["image"] if daemons else None,
        "devices": devices and [each["path"] for each in yaml.safe_load(devices)],
        "limits": train["resources"]["limits"],
        "claims": [each["resourceClaimTemplateName"] for each in spec.get("resourceClaims", [])],
        "shm": volumes["shared-memory"]["emptyDir"].get("sizeLimit"),
        "seccomp": spec.get("securityContext", {}).get("seccompProfile", {}).get("type"),
    }


@pytest.mark.parametrize("profile", TABLE)
def test_a_profile_is_as_the_table_has_it(profile: str, written: Callable[[str], Path]) -> None:
    text, expected = TABLE[profile]
    assert seen(rendered(written(text))) == {**DEFAULTS, **expected}


def test_the_daemon_of_tcpxo_is_a_native_sidecar_with_what_it_needs(
    written: Callable[[str], Path],
) -> None:
    spec = at(jobset(rendered(written(config("a3-megagpu-8g")))), f"{POD}.spec")
    (daemon,) = spec["initContainers"]
    assert (daemon["name"], daemon["restartPolicy"]) == ("tcpxo-daemon", "Always")
    assert daemon["securityContext"] == {"capabilities": {"add": ["NET_ADMIN", "NET_BIND_SERVICE"]}}
    assert {each["name"]: each["mountPath"] for each in daemon["volumeMounts"]} == {
        "nvidia": "/usr/local/nvidia",
        "sys": "/hostsysfs",
        "proc-sys": "/hostprocsysfs",
    }
    mounts = {each["name"]: each["mountPath"] for each in spec["containers"][0]["volumeMounts"]}
    assert (
        mounts["nvidia"] == "/usr/local/nvidia"
        and mounts["aperture-devices"] == "/dev/aperture_devices"
    )
    assert (
        daemon["command"][2].count("--num_hops=2") == 1 and "--num_nics" not in daemon["command"][2]
    )


@pytest.mark.parametrize(
    ("machine", "script"),
    [
        ("a3-megagpu-8g", "/usr/local/nvidia/lib64/nccl-env-profile.sh"),
        ("a4-highgpu-8g", "/usr/local/gib/scripts/set_nccl_env.sh"),
    ],
)
def test_settings_that_the_stack_checks_are_sourced_in_the_ranks_shell_and_never_copied(
    machine: str, script: str, written: Callable[[str], Path]
) -> None:
    values = json.loads((written(config(machine)) / "launch" / VALUES).read_text())
    stack = catalog().network_stack(catalog().machines[machine].network_stack)
    assert f". {script}\n" in values["networkScript"]
    assert not set(values["environment"]) & (
        set(stack.profile_environment) - set(stack.environment)
    )


@pytest.mark.parametrize("nodes", [2, 3])
def test_a_release_makes_one_jobset_of_its_name_and_a_pod_per_node(
    nodes: int, written: Callable[[str], Path]
) -> None:
    directory = written(config("a3-megagpu-8g", nodes=nodes))
    first, second = rendered(directory), rendered(directory)
    assert first == second
    assert (jobset(first)["metadata"]["name"], at(jobset(first), f"{POD[:-9]}.completions")) == (
        "r",
        nodes,
    )


def test_a_rank_waits_until_the_name_of_node_0_resolves(written: Callable[[str], Path]) -> None:
    spec = at(jobset(rendered(written(config("a3-megagpu-8g")))), f"{POD}.spec")
    found = {each["name"]: each.get("value") for each in spec["containers"][0]["env"]}
    assert found["MASTER_ADDR"] == "r-w-0-0.r"
    start = (ROOT / "charts/drillyard-run/files/start.sh").read_text()
    assert start.index('getent hosts "$MASTER_ADDR"') < start.index('exec "$@"')


BOUGHT = {
    "on-demand": ({}, []),
    "spot": ({"gke-spot": "true"}, [["gke-spot", "true"]]),
    "flex-start": ({"gke-flex-start": "true"}, []),
    "flex-start-queued": ({}, [["gke-queued", "true"]]),
    "reservation": ({"reservation-name": "mine", "reservation-affinity": "specific"}, []),
    "calendar": ({"reservation-name": "mine", "reservation-affinity": "specific"}, []),
}


@pytest.mark.parametrize("consumption", BOUGHT)
def test_a_way_of_buying_selects_its_nodes_and_tolerates_their_taints(
    consumption: str, written: Callable[[str], Path]
) -> None:
    labels, taints = BOUGHT[consumption]
    spec = at(
        jobset(rendered(written(config("a3-megagpu-8g", consumption=consumption)))), f"{POD}.spec"
    )
    google = "cloud.google.com/"
    wanted = {"gke-accelerator": "nvidia-h100-mega-80gb", **labels}
    assert spec["nodeSelector"] == {f"{google}{name}": value for name, value in wanted.items()}
    found = [each for each in spec["tolerations"] if each["effect"] == "NoSchedule"]
    gpus = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    wanted_taints = [
        {"key": f"{google}{name}", "operator": "Equal", "value": value, "effect": "NoSchedule"}
        for name, value in taints
    ]
    assert found == [gpus, *wanted_taints]


def test_only_queued_flex_start_asks_the_cloud_for_the_longest_run_time(
    written: Callable[[str], Path],
) -> None:
    for consumption, wanted in (("flex-start-queued", "86400"), ("spot", None)):
        text = config("a4-highgpu-8g", "queue: q, max_run_hours: 24", consumption=consumption)
        found = jobset(rendered(written(text)))
        assert (
            found["metadata"]["annotations"].get("provreq.kueue.x-k8s.io/maxRunDurationSeconds")
            == wanted
        )
        assert found["metadata"]["labels"]["kueue.x-k8s.io/max-exec-time-seconds"] == "86400"


def test_a_bucket_is_mounted_without_cached_metadata_and_its_sidecar_has_no_limits(
    written: Callable[[str], Path],
) -> None:
    pod = at(jobset(rendered(written(config("a4-highgpu-8g")))), POD)
    limits = {
        name: value for name, value in pod["metadata"]["annotations"].items() if "gcsfuse" in name
    }
    names = ("cpu-limit", "memory-limit", "ephemeral-storage-limit")
    assert limits == {
        "gke-gcsfuse/volumes": "true",
        **{f"gke-gcsfuse/{name}": "0" for name in names},
    }
    (volume,) = [each for each in pod["spec"]["volumes"] if each["name"] == "bucket"]
    assert volume["csi"]["volumeAttributes"] == {
        "bucketName": "my-bucket",
        "mountOptions": (
            "implicit-dirs,metadata-cache:ttl-secs:0,metadata-cache:negative-ttl-secs:0"
        ),
    }


# Charts that real projects shipped, as edits of ours: each is refused by the rule that it breaks.

BROKEN = {
    "duration asked for on the pod template": (
        *("_pod.tpl", "  annotations:\n"),
        '  annotations:\n    provreq.kueue.x-k8s.io/maxRunDurationSeconds: "60"\n',
        "provisioning_is_asked_for_on_the_jobset",
    ),
    "a comma after the last interface": (
        *("_helpers.tpl", "networking.gke.io/interfaces: {{ . | toJson | quote }}"),
        'networking.gke.io/interfaces: {{ . | toJson | replace "}]" "},]" | quote }}',
        "interfaces_are_json_and_one_per_nic",
    ),
    "seven interfaces": (
        *("_helpers.tpl", "networking.gke.io/interfaces: {{ . | toJson | quote }}"),
        "networking.gke.io/interfaces: {{ initial . | toJson | quote }}",
        "interfaces_are_json_and_one_per_nic",
    ),
    "a bucket without its sidecar": (
        *("_helpers.tpl", 'gke-gcsfuse/volumes: "true"\n'),
        "",
        "a_bucket_has_its_sidecar",
    ),
    "a daemon that outlives the run": (
        *("_pod.tpl", "    restartPolicy: Always\n"),
        "",
        "daemons_end_with_the_run",
    ),
    "a daemon of another version": (
        *("_pod.tpl", "    image: {{ .image | quote }}\n    restartPolicy"),
        '    image: {{ .image | replace "1.0.21" "1.0.12" | quote }}\n    restartPolicy',
        "plugin_and_daemon_work_together",
    ),
    "devices for another container": (
        *("_helpers.tpl", "devices.gke.io/container.{{ .name }}:"),
        "devices.gke.io/container.rxdm:",
        "the_daemon_has_its_devices",
    ),
    "pods that restart in place": (
        *("_pod.tpl", "  restartPolicy: Never\n"),
        "  restartPolicy: OnFailure\n",
        "pods_are_never_restarted_in_place",
    ),
    "a job per node": (
        *("run.yaml", "    replicas: 1\n"),
        "    replicas: {{ .Values.nodes }}\n",
        "there_is_one_pod_set",
    ),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_chart_is_refused_by_its_rule(fault: str, written: Callable[[str], Path]) -> None:
    file, good, bad, rule = BROKEN[fault]
    directory = written(config("a3-megagpu-8g"))
    path = directory / "launch/chart/drillyard-run/templates" / file
    text = path.read_text()
    assert text.count(good) == 1
    path.write_text(text.replace(good, bad))
    assert list(broken_rules(rendered(directory), catalog().machines["a3-megagpu-8g"])) == [rule]
    assert rule in {each.__name__ for each in RULES}


def test_two_directories_of_one_name_are_refused_by_the_chart(
    written: Callable[[str], Path],
) -> None:
    directory = written(config("a3-megagpu-8g"))
    values = json.loads((directory / "launch" / VALUES).read_text())
    values["hostPaths"][0]["hostPath"] = "/elsewhere"
    (directory / "launch" / VALUES).write_text(json.dumps(values))
    done = helm(directory, "template")
    assert done.returncode != 0 and "nvidia is both" in done.stderr


# The published documents, field by field.


def recipe(name: str, nodes: int | None = None, *overrides: str) -> tuple[Plan, Machine]:
    """The plan of a recipe, launched from the repository's root with `--nodes` and `--set`."""
    here = ROOT / "recipes" / name
    changes = [f"nodes={nodes}"] if nodes else []
    asked = LaunchRequest(
        run=load_launch_config(here / "run.yaml", overrides, resolve_environment=False),
        cluster=load_cluster_config(here / "cluster.yaml", changes, resolve_environment=False),
        facts=load_catalog(None),
        here=str(ROOT),
        python="python3",
    )
    return launcher_for(asked.cluster).plan(asked), asked.facts.machine(asked.cluster.machine or "")


def manifests(plan: Plan, tmp_path: Path) -> str:
    write_plan(plan, tmp_path / "plan", overwrite=True)
    return rendered(tmp_path / "plan")


B200: dict[str, Any] = {
    "metadata.labels.kueue¦x-k8s¦io/queue-name": "dws-local-queue",
    # The document has it on the pod template, where Kueue does not read it.
    "metadata.annotations.provreq¦kueue¦x-k8s¦io/maxRunDurationSeconds": "86400",
    "spec.suspend": True,
    "spec.replicatedJobs.0.template.spec.parallelism": 2,
    f"{POD}.metadata.annotations.networking¦gke¦io/default-interface": "eth0",
    f"{POD}.metadata.annotations.gke-gcsfuse/volumes": "true",
    f"{POD}.spec.nodeSelector.cloud¦google¦com/gke-accelerator": "nvidia-b200",
    f"{POD}.spec.containers.0.resources.limits": {"nvidia.com/gpu": 8},
    f"{POD}.spec.containers.0.image": "us-docker.pkg.dev/my-project/drillyard/drillyard:latest",
}


@pytest.mark.parametrize("path", B200)
def test_the_recipe_of_70b_on_b200s_is_as_published(path: str, tmp_path: Path) -> None:
    plan, _ = recipe("llama31-70b-b200")
    found: Any = jobset(manifests(plan, tmp_path))
    for part in path.split("."):
        found = found[int(part)] if part.isdecimal() else found[part.replace("¦", ".")]
    assert found == B200[path]


def test_the_recipe_of_70b_on_b200s_reaches_rdma_as_published(tmp_path: Path) -> None:
    plan, machine = recipe("llama31-70b-b200")
    text = manifests(plan, tmp_path)
    assert seen(text)["interfaces"] == RDMA and seen(text)["host"] == GIB_HOST
    script = json.loads(plan.file(VALUES).content)["networkScript"]
    assert ". /usr/local/gib/scripts/set_nccl_env.sh\n" in script
    assert list(broken_rules(text, machine)) == []
    words = " ".join(at(jobset(text), f"{POD}.spec.containers.0.args"))
    assert "drillyard train /etc/drillyard/run.yaml" in words and "--nnodes $(NNODES)" in words


def test_the_recipe_of_70b_on_a3_mega_is_as_published(tmp_path: Path) -> None:
    plan, machine = recipe("llama3-70b-nemo-a3mega")
    text = manifests(plan, tmp_path)
    found = jobset(text)
    assert (machine.name, plan.job.nodes, plan.job.processes_per_node) == ("a3-megagpu-8g", 16, 8)
    assert found["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "a3-mega"
    assert found["spec"]["suspend"] is True
    assert (
        at(found, f"{POD}.metadata.annotations")["kueue.x-k8s.io/podset-preferred-topology"]
        == "kubernetes.io/hostname"
    )
    assert seen(text)["daemon"].endswith("tcpgpudmarxd-dev:v1.0.9")
    fields = {field.place: field.value for field in plan.fields}
    assert fields["installer"].endswith("nccl-plugin-gpudirecttcpx-dev:v1.0.3")
    assert plan.image == "us-docker.pkg.dev/my-project/my-repository/nemo_workload:24.07"
    nemo = yaml.safe_load(
        json.loads(plan.file(VALUES).content)["files"]["files/nemo.yaml"]["content"]
    )
    assert nemo["trainer"]["max_steps"] == 50
    assert (nemo["model"]["fp8"], nemo["model"]["fp8_hybrid"]) == (True, True)
    assert nemo["model"]["global_batch_size"] == 1024
    assert (
        nemo["model"]["data"]["data_cache_gcs_dir"]
        == "gs://nemo-megatron-demo/training-data/tokenized/bpe2gpt/wikipedia/"
    )
    command = at(found, f"{POD}.spec.containers.0.args")
    assert "/opt/NeMo/examples/nlp/language_modeling/megatron_gpt_pretraining.py" in command
    assert plan.job.run_directory.startswith("/gcs/my-bucket/")


def test_512_gpus_are_one_override_and_bf16_is_two_arguments(tmp_path: Path) -> None:
    arguments = ["model.fp8=false", "model.fp8_hybrid=false"]
    plan, _ = recipe("llama3-70b-nemo-a3mega", 64, f"workload.arguments=[{', '.join(arguments)}]")
    found = jobset(manifests(plan, tmp_path))
    job = "spec.replicatedJobs.0.template.spec"
    assert (at(found, f"{job}.parallelism"), at(found, f"{job}.completions")) == (64, 64)
    assert at(found, f"{POD}.spec.containers.0.args")[-2:] == arguments
