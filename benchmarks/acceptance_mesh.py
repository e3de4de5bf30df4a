"""All pairs of many node programs on this machine: clock offsets, ports, MTU and names.

    python benchmarks/acceptance_mesh.py [--nodes 64] [--seed 1]

Each node's clock is off by an amount drawn between 20 ms and 5 s (libfaketime around its program).
Prints the seconds of the step, and the largest error of an offset.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, os.fspath(Path(__file__).resolve().parent.parent))

from tests.integration.acceptance.node_jobs import NodeJob, judged

from drillyard.acceptance.results import Status

FAKETIME = "/usr/$LIB/faketime/libfaketime.so.1"
STEP = {"probe": "network", "scope": "mesh", "seconds": 120}


def main() -> None:
    """Measure once, and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes", type=int, default=64)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    draw = random.Random(options.seed)
    planted = {
        rank: draw.choice((-1, 1)) * math.exp(draw.uniform(math.log(0.02), math.log(5.0)))
        for rank in range(1, options.nodes)
    }
    faked = {
        rank: {"LD_PRELOAD": FAKETIME, "FAKETIME": f"{seconds:+.6f}s"}
        for rank, seconds in planted.items()
    }
    planted[0] = 0.0
    with tempfile.TemporaryDirectory() as directory:
        began = time.monotonic()
        job = NodeJob(
            Path(directory), [STEP], options.nodes, environments=faked, join_seconds=120.0
        )
        evidence = job.wait(300)
        whole = time.monotonic() - began
        size = job.path.stat().st_size
    errors, trips = [], []
    for seen in evidence.of("network"):
        assert seen.values is not None, seen.error
        for peer in seen.values["peers"]:
            expected = planted[peer["node"]] - planted[seen.nodes[0]]
            assert peer["clock"] is not None, "no answer"
            errors.append(abs(peer["clock"]["offset"] - expected))
            trips.append(peer["clock"]["round_trip"])
    began = time.monotonic()
    outcome = judged(evidence)
    judging = time.monotonic() - began
    bad = sorted(
        {
            each.check
            for each in outcome.results
            if each.check in ("ports", "path-mtu", "clock") and each.status is Status.incomplete
        }
    )
    print(
        f"{options.nodes} nodes, {len(errors)} ordered pairs:"
        f" step {max(seen.seconds for seen in evidence.of('network')):.1f} s, job {whole:.1f} s,"
        f" largest error {max(errors) * 1000:.2f} ms, longest best round trip"
        f" {max(trips) * 1000:.2f} ms, evidence {size / 1e6:.1f} MB, judged in {judging:.2f} s,"
        f" incomplete: {', '.join(bad) or 'nothing'}"
    )


if __name__ == "__main__":
    main()
