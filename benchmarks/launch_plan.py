"""How long the plan of a run on 1,000 nodes takes, and its text, on each launcher (goal: under 1
s).

    python benchmarks/launch_plan.py [--nodes 1000] [--repeats 5]

`plan` is the launcher's pure function, `text` what `--dry-run` prints of it; configs are read and
the hardware catalog is loaded before. The first plan of the process, which imports the launcher, is
listed separately. Medians with the extremes.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from drillyard.config.load import load_cluster_config, load_launch_config
from drillyard.hardware import load_catalog
from drillyard.launch.launcher import launcher_for
from drillyard.launch.plan_output import plan_text
from drillyard.launch.request import LaunchRequest

RUN = """\
name: llama-8b
model: {id: meta-llama/Llama-3.1-8B}
data: {source: org/documents, sequence_length: 4096}
training: {steps: 100, optimizer: {learning_rate: 2.0e-5}}
"""
CLOUD = "location: {project: p, region: us-central1}\nconsumption: spot\n"
CLUSTERS = {
    "slurm": "machine: a4-highgpu-8g\nstorage: {directory: /shared}\n",
    "ssh": "machine: gpu-h100-sxm\nstorage: {directory: /shared}\nssh: {hosts: [HOSTS]}\n",
    "kubernetes": (
        "machine: a4-highgpu-8g\nnetwork_stack: ethernet\nimage: r/i:1\nstorage: {directory:"
        " /shared}\nkubernetes: {queue: train, volume_claim: shared}\n"
    ),
    "vertex": (
        f"machine: a4-highgpu-8g\n{CLOUD}storage: {{bucket: bucket}}\nimage:"
        " us-docker.pkg.dev/p/r/i:1\n"
    ),
}


def request_of(platform: str, nodes: int, directory: Path) -> LaunchRequest:
    """A training run on so many nodes of eight GPUs."""
    hosts = ", ".join(f"node-{number}" for number in range(nodes))
    head = f"name: large\nplatform: {platform}\nnodes: {nodes}\n"
    (directory / "run.yaml").write_text(RUN)
    (directory / "cluster.yaml").write_text(head + CLUSTERS[platform].replace("HOSTS", hosts))
    cluster = load_cluster_config(directory / "cluster.yaml", resolve_environment=False)
    run = load_launch_config(directory / "run.yaml", resolve_environment=False)
    return LaunchRequest(
        run, cluster, load_catalog(cluster.hardware), here="/home/me/project", python="python3"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    for platform in CLUSTERS:
        with tempfile.TemporaryDirectory() as temporary:
            request = request_of(platform, arguments.nodes, Path(temporary))
        plans, texts = [], []
        for _ in range(arguments.repeats + 1):
            started = time.perf_counter()
            plan = launcher_for(request.cluster).plan(request)
            planned = time.perf_counter()
            size = len(plan_text(plan))
            plans.append(planned - started)
            texts.append(time.perf_counter() - planned)
        first, *others = plans
        low, middle, high = min(others), statistics.median(others), max(others)
        print(
            f"{platform:10} plan {middle:.3f} s  ({low:.3f} to {high:.3f}; first {first:.3f})"
            f"  text {statistics.median(texts):.3f} s, {size / 1e3:.0f} kB, {len(plan.steps)} steps"
        )


if __name__ == "__main__":
    main()
