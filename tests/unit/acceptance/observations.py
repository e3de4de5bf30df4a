"""Evidence of ranks as the probes with PyTorch print it, for planting faults."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

from drillyard.acceptance.check import Check, Expected
from drillyard.acceptance.evidence import AcceptanceEvidence, parse_evidence
from drillyard.acceptance.results import CheckResult
from drillyard.acceptance.training_phases import LARGE, SMALL
from drillyard.hardware import load_catalog

CATALOG = load_catalog(None)
CPU = {"device": "cpu", "device_name": "a processor", "torch": "2.6.0", "waiting_left_out": True}
H100 = {
    "device": "cuda",
    "device_name": "NVIDIA H100 80GB HBM3",
    "torch": "2.6.0",
    "cuda": "12.4",
    "waiting_left_out": False,
}

Change = Callable[[int, int, dict[str, Any]], None]
"""Changes what one rank printed: node, local rank, values."""


def expected(machine: str | None = None, baseline: AcceptanceEvidence | None = None) -> Expected:
    """What is known of a machine by its name."""
    if machine is None:
        return Expected(CATALOG, None, None, None, baseline=baseline)
    row = CATALOG.machines[machine]
    return Expected(CATALOG, row, CATALOG.accelerators[row.accelerator], None, baseline=baseline)


def devices_of(facts: dict[str, Any], node: int, local: int) -> dict[str, Any]:
    """What a healthy rank of the devices probe prints; rates differ by up to 3 %."""
    near = 1 + 0.01 * ((node * 3 + local) % 4)
    rounds = [{"digest": f"{number:032x}", "wrong": 0} for number in range(2)]
    values: dict[str, Any] = {
        **facts,
        "product": {"rows": 256, "inner": 256, "seed": 1, "type": "float32", "rounds": rounds},
    }

    def rates(middle: float) -> list[float]:
        return [middle * near * by for by in (0.98, 1.0, 0.99, 1.01, 1.0)]

    if facts["device"] == "cpu":
        values["matmul"] = [{"type": "fp32", "tflops": rates(0.1)}]
        values["memory"] = {"gb_per_s": rates(20)}
        return values
    values["matmul"] = [
        {"type": "bf16", "tflops": rates(650)},
        {"type": "bf16", "tflops": rates(700)},
        {"type": "fp8", "tflops": rates(1250)},
    ]
    values["memory"] = {"gb_per_s": rates(2500)}
    values["host_to_device"] = {"gb_per_s": rates(54)}
    values["device_to_host"] = {"gb_per_s": rates(53)}
    return values


def training_of(facts: dict[str, Any], nodes: int, ranks: int) -> dict[str, Any]:
    """What a healthy rank of the training probe prints: of a step of 25 ms (on an accelerator
    200 ms) 20 (160) are local time."""
    shape, scale = (SMALL, 1) if facts["device"] == "cpu" else (LARGE, 8)
    phases = [("device", 1, 1), ("node", ranks, 1)]
    if nodes > 1:
        phases += [("all", nodes * ranks, 1), ("work of all on a node", ranks, nodes)]
    return {
        **facts,
        "shape": shape,
        "gradients": {"sums": ["a1", "a1", "b2"]},
        "phases": [
            {
                "name": name,
                "ranks": among,
                "tokens_per_rank": shape["sequence"] * shape["sequences"] * accumulated,
                "blocks": [
                    {
                        "step": [0.025 * scale * accumulated * by, 0.026 * scale * accumulated],
                        "local": [0.020 * scale * accumulated * by, 0.021 * scale * accumulated],
                    }
                    for by in (1.0, 1.02, 0.99, 1.01, 1.03)
                ],
            }
            for name, among, accumulated in phases
        ],
    }


def collective_of(facts: dict[str, Any], ranks: int, seconds: float) -> dict[str, Any]:
    """A healthy rank of the collective probe at two sizes."""
    rows = [
        {"bytes": size, "seconds": [seconds * size / 2**30] * 5, "wrong": 0}
        for size in (2**26, 2**30)
    ]
    return {**facts, "collective": "all_reduce", "ranks": ranks, "rows": rows}


def evidence(
    facts: dict[str, Any] | None = None,
    *,
    nodes: int = 2,
    ranks: int = 2,
    peers: bool = False,
    devices: Change | None = None,
    training: Change | None = None,
    collective: Change | None = None,
    document: Callable[[dict[str, Any]], None] | None = None,
) -> AcceptanceEvidence:
    """Observations of healthy ranks with the changes given, read back as a document is."""
    facts = CPU if facts is None else facts
    seen = []
    types = ["fp32"] if facts["device"] == "cpu" else ["bf16", "fp8"]
    asked = {"matmul": [{"type": each} for each in types], "peers": peers}
    for node in range(nodes):
        values = [devices_of(facts, node, local) for local in range(ranks)]
        for local, each in enumerate(values):
            if peers:
                each["peers"] = {
                    str(peer): {"gb_per_s": [376.0, 375.0]}
                    for peer in range(ranks)
                    if peer != local
                }
        seen.append(_observation("devices", [node], ranks, values, asked, devices))
        values = [collective_of(facts, ranks, 0.005) for _ in range(ranks)]
        asked_sizes = {"collective": "all_reduce", "sizes": [2**26, 2**30]}
        seen.append(_observation("collective", [node], ranks, values, asked_sizes, collective))
    everyone = list(range(nodes))
    if nodes > 1:
        values = [collective_of(facts, ranks * nodes, 0.0052) for _ in range(ranks * nodes)]
        seen.append(_observation("collective", everyone, ranks, values, asked_sizes, collective))
    values = [training_of(facts, nodes, ranks) for _ in range(ranks * nodes)]
    seen.append(_observation("training", everyone, ranks, values, {}, training))
    whole = {
        "format": 1,
        "level": "standard",
        "expected_nodes": nodes,
        "processes_per_node": ranks,
        "nodes": [{"rank": rank, "name": f"node-{rank}"} for rank in range(nodes)],
        "observations": seen,
    }
    if document is not None:
        document(whole)
    return parse_evidence(json.dumps(whole).encode(), "evidence.json")


def _observation(
    probe: str,
    nodes: list[int],
    ranks: int,
    values: list[dict[str, Any]],
    arguments: dict[str, Any],
    change: Change | None,
) -> dict[str, Any]:
    listed = []
    for at, each in enumerate(values):
        node, local = nodes[at // ranks], at % ranks
        printed = copy.deepcopy(each)
        if change is not None:
            change(node, local, printed)
        place = {"rank": at, "node": node, "local_rank": local}
        listed.append({**place, "values": printed, "error": None})
    return {
        "probe": probe,
        "scope": "node" if len(nodes) == 1 else "all",
        "nodes": nodes,
        "arguments": arguments,
        "values": {"ranks": listed},
    }


def results(check: Check, seen: AcceptanceEvidence, known: Expected) -> list[CheckResult]:
    """The check's results."""
    return list(check.judge(seen, known))
