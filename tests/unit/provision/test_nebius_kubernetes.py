"""A cluster of Nebius' Managed Kubernetes: its rules, what is rendered against the provider's names,
and what runs get of it."""  # noqa: E501

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.facts import says
from tests.unit.launch.requests import WORKLOAD, planned, request
from tests.unit.provision.chart_plans import chart_values
from tests.unit.provision.clusters import bodies
from tests.unit.provision.nebius_clusters import OFFERS, RESERVED, kubernetes_config, plan
from tests.unit.provision.nebius_schema import document_problems
from tests.unit.provision.offers import every_plan
from tests.unit.provision.test_schema import leaves

from drillyard.config.load import load_cluster_config
from drillyard.errors import UserError
from drillyard.hardware import catalog
from drillyard.launch.kubernetes.release import VALUES
from drillyard.provision import run_guards
from drillyard.provision.cluster_plan import ClusterPlan
from drillyard.provision.plan_directory import plan_directory
from drillyard.provision.plan_document import ClusterPlanDocument, plan_document
from drillyard.provision.terraform_output import Action, Change

CLUSTER, GROUP = "nebius_mk8s_v1_cluster", "nebius_mk8s_v1_node_group"
FILES, JOINED = "nebius_compute_v1_filesystem", "nebius_compute_v1_gpu_cluster"
SMALL = "gpu-h100-sxm_1gpu-16vcpu-200gb"
OWN: dict[str, Any] = {"orchestrator": "kubernetes", "filesystem_gib": 2048}
WAYS: tuple[dict[str, Any], ...] = (
    {},
    {"network_stack": "ethernet", "nodes": 1, "cluster": {"private_nodes": False}},
    {
        "nebius": {
            "orchestrator": "kubernetes",
            "filesystem": "computefilesystem-e00abc",
            "boot_image": "ubuntu22.04-cuda12",
        },
        "cluster": {
            "version": "1.36",
            "cpu_pool": {"machine": "cpu-d3_8vcpu-32gb", "nodes": 2},
            "ranges": {"nodes": "10.1.0.0/16"},
            "labels": {"team": "a"},
            "disk_gib": 512,
        },
        "kubernetes": {"run_as_user": 1000, "pull_secrets": ["registry"]},
    },
)
EVERY = every_plan(OFFERS, len(WAYS))
Plans = dict[tuple[str, str, int], ClusterPlan]


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> Plans:
    directory = tmp_path_factory.mktemp("kubernetes")
    return {
        (machine, mode, way): plan(directory, kubernetes_config(machine, mode, **WAYS[way]))
        for machine, mode, way in EVERY
    }


def section(**settings: Any) -> dict[str, Any]:
    return {"nebius": {**OWN, **settings}}


RULES: list[tuple[dict[str, Any], str]] = [
    (section(orchestrator="slurm"), "nebius.orchestrator"),
    (section(identity_file="key"), "nebius.identity_file"),
    (section(user="ann"), "nebius.user"),
    (section(startup_script="nodes.sh"), "nebius.startup_script"),
    (section(directory="/work"), "nebius.directory"),
    (section(boot_image="ubuntu24.04"), "nebius.boot_image"),
    (section(fabric="fabric-7"), "nebius.fabric"),
    ({"machine": SMALL, "network_stack": "infiniband"}, "network_stack"),
    ({"machine": SMALL, **section(fabric="fabric-2")}, "nebius.fabric"),
    (
        {
            "machine": "gpu-b200-sxm",
            "location": {"project": "project-e00abc", "region": "eu-north1"},
        },
        "location.region",
    ),
    ({"storage": {}, "nebius": {"orchestrator": "kubernetes"}}, "storage.directory"),
    ({"storage": {}}, "storage.directory"),
    ({"storage": {"directory": "/mnt/shared", "bucket": "runs"}}, "storage.bucket"),
    ({"nodes": 101}, "nodes"),
    ({"cluster": {"cpu_pool": {"nodes": 101}}}, "cluster.cpu_pool.nodes"),
    ({"cluster": {"cpu_pool": {"machine": "e2-standard-4"}}}, "cluster.cpu_pool.machine"),
    ({"cluster": {"cpu_pool": {"machine": "cpu-d9"}}}, "cluster.cpu_pool.machine"),
    ({"cluster": {"version": "1.34.1-gke.1829001"}}, "cluster.version"),
    ({"cluster": {"version": "1.29"}}, "cluster.version"),
    (
        {"cluster": {"authorized_networks": [f"10.{n}.0.0/16" for n in range(9)]}},
        "cluster.authorized_networks",
    ),
    ({"cluster": {"pools": [{"consumption": "spot", "nodes": 2}]}}, "cluster.pools"),
    ({"cluster": {"ranges": {"pods": "100.64.0.0/14"}}}, "cluster.ranges.pods"),
    ({"kubernetes": {"namespace": "team"}}, "kubernetes.namespace"),
    ({"kubernetes": {"volume_claim": "mine"}}, "kubernetes.volume_claim"),
    ({"kubernetes": {"queue": "gpus"}}, "kubernetes.queue"),
    (
        {"kubernetes": {"topology": {"required": "rack", "preferred": "block"}}},
        "kubernetes.topology",
    ),
    (section(orchestrator="none", identity_file="key") | {"kubernetes": {}}, "kubernetes"),
]


@pytest.mark.parametrize(
    ("settings", "key"), RULES, ids=[f"{number}-{key}" for number, (_, key) in enumerate(RULES)]
)
def test_a_broken_rule_is_one_line_at_its_key(
    settings: dict[str, Any], key: str, tmp_path: Path
) -> None:
    if settings.get("nebius", {}).get("orchestrator") == "none":
        settings |= {"cluster": {"private_nodes": False, "authorized_networks": ["203.0.113.0/24"]}}
    with pytest.raises(UserError) as refused:
        plan(tmp_path, kubernetes_config(**settings))
    lines = str(refused.value).splitlines()
    assert len(lines) == 1, lines
    assert f": {key}:" in lines[0] and "cluster.yaml" in lines[0]


def test_machines_have_no_settings_of_kubernetes(tmp_path: Path) -> None:
    access = {"private_nodes": False, "authorized_networks": ["203.0.113.0/24"]}
    for key, value in (("version", "1.35"), ("cpu_pool", {"nodes": 2})):
        settings = section(orchestrator="none", identity_file="key")
        with pytest.raises(UserError) as refused:
            plan(tmp_path, kubernetes_config(**settings, cluster={**access, key: value}))
        assert says(str(refused.value), f"cluster.{key}: ... nebius: {{orchestrator: kubernetes}}")


def test_every_rendered_resource_is_one_of_the_provider(plans: Plans) -> None:
    wrong = {
        each: problems
        for each, found in plans.items()
        if (problems := document_problems(dict(found.terraform)))
    }
    assert not wrong, next(iter(wrong.items()))


def test_every_reference_is_to_a_resource_that_is_there(plans: Plans) -> None:
    for found in plans.values():
        resources = found.terraform["resource"]
        known = {f"{kind}.{label}" for kind, named in resources.items() for label in named}
        text = json.dumps(found.terraform).replace("$${", "")
        references = re.findall(r"\$\{([a-z0-9_]+\.[a-z0-9_]+)\.", text)
        assert text.count("${") == len(references) and set(references) <= known


def test_the_plan_names_each_resource_once_and_explains_each_value(plans: Plans) -> None:
    for found in plans.values():
        resources = found.terraform["resource"]
        assert {each.address for each in found.made_by_terraform} == {
            f"{kind}.{label}" for kind, named in resources.items() for label in named
        }
        explained = {field.place for field in found.fields}
        for kind, named in resources.items():
            for label, body in named.items():
                assert body["labels"]["drillyard-cluster"] == "team"
                own = {key: value for key, value in body.items() if key != "depends_on"}
                for path in leaves(own):
                    ends = [match.start() for match in re.finditer(r"[.\[]|$", path)]
                    assert {f"{kind}.{label}: {path[:end]}" for end in ends} & explained, path


@pytest.mark.parametrize(("machine", "mode"), OFFERS)
def test_the_gpu_nodes_are_what_machine_and_way_of_buying_demand(
    plans: Plans, machine: str, mode: str
) -> None:
    found, facts = plans[machine, mode, 0], catalog().machine(machine)
    group = bodies(found, GROUP)["gpu"]
    assert group["parent_id"] == f"${{{CLUSTER}.cluster.id}}"
    assert group["name"] == f"team-{mode}" and group["fixed_node_count"] == 2
    # A change may not need a node that the quota does not have.
    assert group["strategy"]["max_surge"] == {"count": 0}
    template = group["template"]
    assert template["resources"] == {"platform": machine.split("_")[0], "preset": facts.preset}
    assert (template["os"], template["gpu_settings"]["drivers_preset"]) == (
        "ubuntu24.04",
        "cuda13.0",
    )
    assert template["taints"] == [
        {"key": "nvidia.com/gpu", "value": "present", "effect": "NO_SCHEDULE"}
    ]
    assert template["instance_metadata"]["labels"]["drillyard-cluster"] == "team"
    assert ("preemptible" in template) == (mode == "spot")
    held = {"policy": "STRICT", "reservation_ids": [RESERVED]}
    wanted = {"on-demand": {"policy": "FORBID"}, "reservation": held}
    assert template.get("reservation_policy") == wanted.get(mode)
    joined = template.get("gpu_cluster") == {"id": f"${{{JOINED}.nodes.id}}"}
    assert joined == (facts.num_accelerators == 8) == bool(bodies(found, JOINED))


def test_the_nodes_share_a_file_system_that_terraform_never_destroys(plans: Plans) -> None:
    found = plans["gpu-h100-sxm", "on-demand", 0]
    assert bodies(found, FILES)["shared"]["lifecycle"] == {"prevent_destroy": True}
    # Of the controllers' nodes, too: pods without GPUs read runs.
    for label in ("cpu", "gpu"):
        template = bodies(found, GROUP)[label]["template"]
        (mounted,) = template["filesystems"]
        assert mounted["existing_filesystem"] == {"id": f"${{{FILES}.shared.id}}"}
        content = yaml.safe_load(template["cloud_init_user_data"])
        commands = [" ".join(each) for each in content["runcmd"]]
        assert "mount /mnt/shared" in commands and commands[-1] == "chown 10001: /mnt/shared"
    # One that exists stays as it is.
    other = plans["gpu-h100-sxm", "on-demand", 2]
    template = bodies(other, GROUP)["gpu"]["template"]
    assert template["filesystems"][0]["existing_filesystem"] == {"id": "computefilesystem-e00abc"}
    assert "chown" not in template["cloud_init_user_data"] and not bodies(other, FILES)


def test_what_the_config_says_of_the_cluster_is_rendered(plans: Plans) -> None:
    found = plans["gpu-h100-sxm", "on-demand", 2]
    control = bodies(found, CLUSTER)["cluster"]["control_plane"]
    assert control["version"] == "1.36" and control["endpoints"]["public_endpoint"] == {}
    cpu, gpu = bodies(found, GROUP)["cpu"], bodies(found, GROUP)["gpu"]
    assert (cpu["fixed_node_count"], cpu["version"]) == (2, gpu["version"]) == (2, "1.36")
    assert cpu["template"]["resources"] == {"platform": "cpu-d3", "preset": "8vcpu-32gb"}
    assert gpu["template"]["boot_disk"]["size_gibibytes"] == 512
    assert (gpu["template"]["os"], gpu["template"]["gpu_settings"]) == (
        "ubuntu22.04",
        {"drivers_preset": "cuda12"},
    )
    reached = plans["gpu-h100-sxm", "on-demand", 0]
    control = bodies(reached, CLUSTER)["cluster"]["control_plane"]
    assert control["endpoints"]["public_endpoint"] == {"allowed_cidrs": ["203.0.113.0/24"]}
    for way, addressed in ((0, False), (1, True)):
        templates = [
            body["template"]
            for body in bodies(plans["gpu-h100-sxm", "on-demand", way], GROUP).values()
        ]
        assert all(
            ("public_ip_address" in each["network_interfaces"][0]) == addressed
            for each in templates
        )


@pytest.mark.parametrize(("machine", "mode"), OFFERS)
def test_prices_and_quotas_count_the_controllers_nodes(
    plans: Plans, machine: str, mode: str
) -> None:
    found = plans[machine, mode, 0]
    ClusterPlanDocument.model_validate(plan_document(found, ()).model_dump(), strict=False)
    prices = {line.what.partition(":")[0]: line for line in reversed(found.prices)}
    cpu = prices["cpu"].usd_per_hour
    assert cpu is not None and cpu.value == pytest.approx(0.3968)
    assert "nebius-control-plane" in prices["control plane"].missing
    quotas = {quota.metric: quota.amount for quota in found.quotas}
    nodes = sum(body["fixed_node_count"] for body in bodies(found, GROUP).values())
    assert quotas["compute.instance.count"] == quotas["compute.disk.count"] == nodes == 3
    assert quotas["compute.instance.non-gpu.vcpu"] == 16 and quotas["mk8s.cluster.count"] == 1
    kinds = Counter(each.kind for each in found.resources)
    assert quotas.get("compute.gpucluster.count", 0) == kinds[JOINED]


def written(directory: Path, found: ClusterPlan) -> str:
    """The text of the config for `launch`, checked as `launch` checks it."""
    text = yaml.safe_dump({**(found.launch_settings or {}), "image": "i:1"})
    path = directory / "launch.yaml"
    path.write_text(text)
    load_cluster_config(path, resolve_environment=False)
    return text


@pytest.mark.parametrize(("machine", "mode", "way"), EVERY)
def test_a_run_launched_with_the_file_that_up_writes_meets_what_the_charts_make(
    plans: Plans, machine: str, mode: str, way: int, tmp_path: Path
) -> None:
    found = plans[machine, mode, way]
    content = planned(request(written(tmp_path, found), WORKLOAD)).file(VALUES).content
    run: dict[str, Any] = yaml.safe_load(content)
    assert [each.name for each in found.releases] == ["jobset", "kueue", "drillyard-cluster"]
    made = chart_values(found)
    (pool,) = made["pools"]
    (planned_pool,) = found.pools
    assert run["queue"] == pool["queue"] == pool["name"] == planned_pool.name
    assert run["nodeSelector"] == pool["nodeLabels"] == {"drillyard-pool": planned_pool.name}
    assert run["tolerations"] == pool["tolerations"]
    assert run["serviceAccount"] == made["serviceAccount"]["name"]
    shared = made["sharedDirectory"]
    assert run["volumeClaim"] == {"name": shared["claim"], "mountPath": "/mnt/shared"}
    assert shared["path"] == "/mnt/shared"
    names = {each["name"]: each for each in made["namespaces"]}
    assert found.launch_settings is not None
    space = names[found.launch_settings["kubernetes"]["namespace"]]
    joined = bool(bodies(found, JOINED))
    assert joined == (space["level"] == "privileged") == bool(run.get("privileged"))
    asked = {**run["resources"].get("limits", {}), **run["resources"].get("requests", {})}
    assert set(asked) <= set(pool["resources"])


def test_the_runs_of_infiniband_get_its_devices_and_the_settings_of_the_file(
    plans: Plans, tmp_path: Path
) -> None:
    found = plans["gpu-h100-sxm", "on-demand", 2]
    run = yaml.safe_load(planned(request(written(tmp_path, found), WORKLOAD)).file(VALUES).content)
    assert [each["hostPath"] for each in run["hostPaths"]] == ["/dev/infiniband"]
    assert run["resources"]["limits"]["nvidia.com/gpu"] == 8
    assert run["securityContext"]["runAsUser"] == 1000
    assert run["imagePullSecrets"] == ["registry"]


def test_the_directory_installs_the_charts_and_has_the_file_for_launch(plans: Plans) -> None:
    found = plans["gpu-h100-sxm", "on-demand", 0]
    files = {path: text for path, (text, _) in plan_directory(found, ()).items()}
    launch = yaml.safe_load(files["team-kubernetes.yaml"])
    assert launch == found.launch_settings and launch["platform"] == "kubernetes"
    assert json.loads(files["values/drillyard-cluster.json"]) == chart_values(found)
    assert "charts/drillyard-cluster/Chart.yaml" in files
    context = launch["kubernetes"]["context"]
    steps = [
        line for line in files["apply.sh"].splitlines() if line.startswith(("helm", "nebius mk8s"))
    ]
    assert "get-credentials" in steps[0] and f"--context-name {context}" in steps[0]
    assert len(steps) == 4 and all(f"--kube-context {context}" in each for each in steps[1:])
    assert "terraform output -raw cluster_id" in steps[0]
    assert set(found.terraform["output"]) == {"cluster_id"}
    for text in files.values():
        assert "gcloud storage" not in text and "gke_" not in text
    assert f"terraform state rm {FILES}.shared" in files["README.md"]
    assert files["README.md"].index("helm uninstall kueue") < files["README.md"].index("destroy")


@pytest.mark.parametrize(
    ("action", "because", "shrinks", "takes"),
    [
        ("update", ("labels",), False, False),
        ("update", ("fixed_node_count",), False, False),
        ("update", ("fixed_node_count",), True, True),
        ("update", ("template",), False, True),
        ("update", ("labels", "version"), False, True),
        ("replace", ("parent_id",), False, True),
        ("create", (), False, False),
    ],
)
def test_a_change_that_takes_nodes_of_a_group_is_known(
    action: Action, because: tuple[str, ...], shrinks: bool, takes: bool
) -> None:
    change = Change(f"{GROUP}.gpu", GROUP, action, because, shrinks)
    assert run_guards._takes_nodes(change) == takes
