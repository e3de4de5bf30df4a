"""Requests for the tests of launching: a small training run, a workload, and clusters, from YAML as
users write it."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from textwrap import dedent
from typing import Any

from drillyard.config.load import load_cluster_config, load_launch_config
from drillyard.hardware import catalog
from drillyard.launch.launcher import launcher_for
from drillyard.launch.plan import Plan
from drillyard.launch.request import LaunchRequest

TRAINING = """
name: llama-8b
model: {id: meta-llama/Llama-3.1-8B}
data: {source: org/documents, sequence_length: 4096}
training: {steps: 100, optimizer: {learning_rate: 2.0e-5}}
"""
WORKLOAD = """
name: nccl
workload: {command: [all_reduce_perf, -b, 8M]}
"""


def request(
    cluster: str, run: str = TRAINING, here: str = "/home/me/project", **options: Any
) -> LaunchRequest:
    """A request to launch `run` on `cluster`, both YAML; files and lines are run.yaml's and
    cluster.yaml's."""
    with tempfile.TemporaryDirectory() as directory, contextlib.chdir(directory):
        Path("run.yaml").write_text(dedent(run).lstrip(), encoding="utf-8")
        Path("cluster.yaml").write_text(dedent(cluster).lstrip(), encoding="utf-8")
        return LaunchRequest(
            run=load_launch_config("run.yaml", resolve_environment=False),
            cluster=load_cluster_config("cluster.yaml", resolve_environment=False),
            facts=catalog(),
            here=here,
            python="/usr/bin/python3",
            **options,
        )


def planned(asked: LaunchRequest) -> Plan:
    """The plan of its platform's launcher."""
    return launcher_for(asked.cluster).plan(asked)


def cluster(
    platform: str = "slurm", machine: str | None = "a3-megagpu-8g", nodes: int = 2, **more: Any
) -> str:
    """A cluster config; more settings as YAML text: cluster(slurm="{segment: 2}")."""
    message: dict[str, Any] = {
        "name": "c",
        "platform": platform,
        "machine": machine,
        "nodes": nodes,
        **more,
    }
    if platform == "vertex":
        message = {
            "location": "{project: p, region: us-central1}",
            "storage": "{bucket: my-bucket}",
            **message,
        }
        message = {"consumption": "on-demand", "image": "us-docker.pkg.dev/p/r/i:1", **message}
    if platform == "ssh":
        message = {
            "ssh": f"{{hosts: [{', '.join(f'n{node}' for node in range(nodes))}]}}",
            **message,
        }
    return (
        "\n".join(f"{key}: {value}" for key, value in message.items() if value is not None) + "\n"
    )
