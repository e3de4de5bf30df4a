"""What `drillyard accept` measures on one node with PyTorch, by the node side itself, and how it is
judged: products, rates, memory, copies from and to the host, training steps.

The machine is not known here, only its accelerator: by rows of machines nothing is judged.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import torch
from setups import Setting

from drillyard.acceptance.check import Expected, Level
from drillyard.acceptance.evidence import parse_evidence
from drillyard.acceptance.job import DIRECTORY, node_files
from drillyard.acceptance.judgement import judge
from drillyard.acceptance.results import Status
from drillyard.acceptance.torch_steps import torch_steps
from drillyard.hardware import load_catalog
from drillyard.supervise.sockets import free_port

PROBES = {"devices", "training"}


def one_node(setting: Setting) -> dict[str, Any]:
    """Figures by metric. Nothing fails, and every part of the devices' work was measured."""
    facts, accelerator, devices = load_catalog(None), None, 2
    if setting.device == "cuda":
        devices, name = torch.cuda.device_count(), torch.cuda.get_device_name()
        accelerator = next(row for row in facts.accelerators.values() if row.is_called(name))
    expected = Expected(facts, None, accelerator, None)
    level = Level.quick if setting.tiny else Level.standard
    steps = [step for step in torch_steps(level, expected, 1) if step["probe"] in PROBES]
    schedule = {"level": level.value, "join_seconds": 60.0, "steps": steps}
    place = {"NODE_RANK": "0", "NNODES": "1", "NPROC_PER_NODE": str(devices)}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port(set()))}
    directory = setting.directory
    for file in node_files():
        copy = directory / "launch" / file.path
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(file.content, encoding="utf-8")
    command = [sys.executable, str(directory / "launch" / DIRECTORY), "run"]
    command += ["--schedule", json.dumps(schedule), "--run-directory", str(directory)]
    subprocess.run([*command, "--python", sys.executable], env={**os.environ, **place}, check=True)
    text = (directory / "acceptance" / "evidence.json").read_bytes()
    outcome = judge(parse_evidence(text, "evidence.json"), expected)
    results = [each for each in outcome.results if each.observed is not None]
    bad = [
        each.reason
        for each in outcome.results
        if each.status is Status.fail
        or (each.status is Status.incomplete and each.check in {one.check for one in results})
    ]
    assert not bad, "; ".join(bad)
    return {f"{each.metric} [{each.unit}]": each.observed for each in results}
