"""What Terraform and Cluster Toolkit get, as files: one for each shape of virtual machines, Slurm
clusters, places for Vertex AI's jobs and clusters of Nebius' Kubernetes. It changes on purpose only.

    DRILLYARD_UPDATE_GOLDEN=1 pytest tests/unit/provision/test_golden.py    # then read the difference
"""  # noqa: E501

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from tests.unit.provision import (
    clusters,
    job_clusters,
    nebius_clusters,
    slurm_clusters,
    vm_clusters,
)
from tests.unit.provision.job_clusters import NUMBER

GOLDEN = Path(__file__).with_name("golden")
UPDATE = bool(os.environ.get("DRILLYARD_UPDATE_GOLDEN"))
SHARED = {"network": {"project": "net-host", "name": "corp", "subnet": "gpu-nodes"}}
OWN = {"vertex": {"network": f"projects/{NUMBER}/global/networks/team"}}

CASES: dict[str, Any] = {
    "gce-a4-highgpu-8g-spot": vm_clusters.config(),
    "gce-a3-ultragpu-8g-flex-start-shared-vpc": vm_clusters.config(
        "a3-ultragpu-8g", "flex-start", cluster=SHARED
    ),
    "slurm-a3-megagpu-8g-reservation": slurm_clusters.config("a3-megagpu-8g", "reservation"),
    "slurm-a4-highgpu-8g-flex-start-shared-vpc-lustre": slurm_clusters.config(
        "a4-highgpu-8g", "flex-start", cluster={**SHARED, "head": {"home": "lustre"}}
    ),
    "nebius-kubernetes-gpu-h100-sxm-on-demand": nebius_clusters.kubernetes_config(),
    "vertex-a3-highgpu-8g-spot-own-vpc": job_clusters.config("a3-highgpu-8g", "spot", **OWN),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_deployed_is_as_it_was(name: str, tmp_path: Path) -> None:
    found = clusters.plan(tmp_path, CASES[name])
    if found.toolkit is None:
        text = json.dumps(found.terraform, indent=1) + "\n"
    else:
        files = found.toolkit.files
        text = "---\n".join(files[each][0] for each in ("deployment.yaml", "blueprint.yaml"))
    path = GOLDEN / f"{name}.txt"
    if UPDATE:
        GOLDEN.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == text, (
        "run with DRILLYARD_UPDATE_GOLDEN=1 and read what it writes"
    )


def test_no_golden_file_is_left_over() -> None:
    assert {each.stem for each in GOLDEN.iterdir()} == set(CASES)
