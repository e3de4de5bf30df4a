"""The cluster of a published acceptance test (2 nodes of 8 H100 on Nebius, December 2025), as the page
on Nebius writes it, field by field."""  # noqa: E501

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.unit.provision.chart_plans import chart_values
from tests.unit.provision.clusters import bodies
from tests.unit.provision.nebius_clusters import plan

from drillyard.hardware import catalog
from drillyard.provision.cluster_plan import ClusterPlan
from drillyard.provision.plan_directory import plan_directory

PAGE = Path(__file__).parents[3] / "docs/nebius.md"


@pytest.fixture
def content() -> dict[str, Any]:
    """The first file of the page, with a key that is there, and no startup script."""
    found = re.search(r"```yaml\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    assert found is not None
    written: dict[str, Any] = yaml.safe_load(found[1])
    written["nebius"]["identity_file"] = "key"
    del written["nebius"]["startup_script"]
    return written


@pytest.fixture
def found(content: dict[str, Any], tmp_path: Path) -> ClusterPlan:
    return plan(tmp_path, content)


def test_the_nodes_and_gpus_are_those_of_the_document(found: ClusterPlan) -> None:
    (pool,) = found.pools
    assert pool.nodes == 2
    assert pool.machine.num_accelerators == 8 and pool.machine.accelerator == "h100"
    gpu = catalog().accelerator_of(pool.machine)
    assert gpu.memory_gib == pytest.approx(79.19, abs=1) and 16 * gpu.memory_gib == pytest.approx(
        1267, abs=16
    )
    names = [body["name"] for body in bodies(found, "nebius_compute_v1_instance").values()]
    assert names == ["gpu-node-0", "gpu-node-1"]  # Ranks 0 to 7 and 8 to 15.
    quotas = {each.metric: each.amount for each in found.quotas}
    assert quotas["compute.instance.gpu.h100"] == 16


def test_the_nodes_are_joined_by_nvlink_and_infiniband(found: ClusterPlan) -> None:
    (pool,) = found.pools
    assert pool.machine.network_stack == "infiniband"
    assert (pool.machine.data_nics.count, pool.machine.data_nics.gbps) == (8, 400)
    (joined,) = bodies(found, "nebius_compute_v1_gpu_cluster").values()
    assert joined["infiniband_fabric"] in pool.machine.infiniband_fabrics["eu-north1"]
    for body in bodies(found, "nebius_compute_v1_instance").values():
        assert body["gpu_cluster"]["id"] == "${nebius_compute_v1_gpu_cluster.nodes.id}"
        assert body["resources"] == {"platform": "gpu-h100-sxm", "preset": "8gpu-128vcpu-1600gb"}


def test_the_storage_is_shared_at_the_path_of_the_document(found: ClusterPlan) -> None:
    assert found.launch_settings is not None
    assert found.launch_settings["storage"] == {"directory": "/mnt/shared"}
    for body in bodies(found, "nebius_compute_v1_instance").values():
        assert "virtiofs" in body["cloud_init_user_data"]
        assert "/mnt/shared" in body["cloud_init_user_data"]


def test_a_node_has_what_the_documents_job_of_a_node_asks_for(found: ClusterPlan) -> None:
    """8 GPUs, 64 CPU cores and 1,400 GiB of memory, on each of both nodes."""
    (pool,) = found.pools
    assert pool.machine.num_accelerators >= 8
    assert pool.machine.vcpus is not None and pool.machine.vcpus >= 64
    assert pool.machine.host_memory_gib is not None and pool.machine.host_memory_gib >= 1400


@pytest.fixture
def blocks() -> list[dict[str, Any]]:
    """The files of the page, of machines, Managed Kubernetes and Soperator, in this order."""
    found = re.findall(r"```yaml\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    read = [yaml.safe_load(each) for each in found]
    return [each for each in read if "nebius" in each]


def test_the_documents_job_of_kubernetes_fits_the_nodes_of_the_pages_cluster(
    blocks: list[dict[str, Any]], tmp_path: Path
) -> None:
    """2 nodes, 8 of nvidia.com/gpu, 64 CPU cores and 1,400 Gi each, on InfiniBand."""
    found = plan(tmp_path, blocks[1])
    (group,) = [
        body
        for body in bodies(found, "nebius_mk8s_v1_node_group").values()
        if "gpu_settings" in body["template"]
    ]
    assert group["fixed_node_count"] == 2
    assert group["template"]["resources"] == {
        "platform": "gpu-h100-sxm",
        "preset": "8gpu-128vcpu-1600gb",
    }
    assert group["template"]["gpu_cluster"]["id"] == "${nebius_compute_v1_gpu_cluster.nodes.id}"
    (pool,) = chart_values(found)["pools"]
    amounts = pool["resources"]
    assert int(amounts["nvidia.com/gpu"]) == 16 and int(amounts["cpu"]) >= 2 * 64
    assert int(amounts["memory"].removesuffix("Gi")) >= 2 * 1400
    settings = found.launch_settings
    assert settings is not None and settings["storage"] == {"directory": "/mnt/shared"}
    assert found.quotas[0].amount == 16


def test_the_documents_job_of_slurm_fits_the_nodes_of_soperators_settings(
    blocks: list[dict[str, Any]], content: dict[str, Any], tmp_path: Path
) -> None:
    """`sbatch` on 2 nodes with 8 GPUs each, runs and logs below /mnt/shared."""
    section = {**blocks[2]["nebius"], "identity_file": "key"}
    found = plan(tmp_path, {**content, "nebius": section, "cluster": {}})
    made = json.loads(plan_directory(found, ())["drillyard.auto.tfvars.json"][0])
    (workers,) = made["slurm_nodeset_workers"]
    assert workers["size"] == 2
    assert workers["resource"] == {"platform": "gpu-h100-sxm", "preset": "8gpu-128vcpu-1600gb"}
    assert workers["gpu_cluster"] == {"infiniband_fabric": "fabric-2"}
    assert made["filesystem_jail_submounts"][0]["mount_path"] == "/mnt/shared"
    assert found.launch_settings is not None
    assert found.launch_settings["slurm"]["gres"] == "gpu:nvidia_h100_80gb_hbm3:8"


def test_the_pages_table_of_fabrics_is_that_of_the_machines() -> None:
    rows = dict(re.findall(r"^\| `([\w-]+)` \| (\S+: .*) \|$", PAGE.read_text("utf-8"), re.M))
    known = {each.name: each.infiniband_fabrics for each in catalog().machines.values()}
    assert rows == {
        name: "; ".join(f"{region}: {', '.join(each)}" for region, each in fabrics.items())
        for name, fabrics in known.items()
        if fabrics
    }
