"""Draw projects with 500 leaks and decoys, and count what `leaks` misses and wrongly lists.

    python benchmarks/provision_leaks.py [--seeds 20] [--leaks 500]

Google's own client asks tests/unit/provision/google/google_cloud.py over loopback.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.unit.provision.google.conftest import CLUSTER
from tests.unit.provision.google.google_cloud import PROJECT, GoogleCloud, LocalServer
from tests.unit.provision.google.seeded_project import Seeds, named, with_identities

from drillyard.config.load import load_cluster_config
from drillyard.provision.google.api import google_apis
from drillyard.provision.google.leaks import find_leaks
from drillyard.provision.provisioner import plan_cluster


def main() -> None:
    """Print a line for each draw and the sums."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seeds", type=int, default=20)
    options.add_argument("--leaks", type=int, default=500)
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory, "cluster.yaml")
        file.write_text(CLUSTER, encoding="utf-8")
        plan = with_identities(plan_cluster(load_cluster_config(file)))
    server = LocalServer()
    missed = wrong = seeded = 0
    kinds: set[str] = set()
    for seed in range(given.seeds):
        cloud = GoogleCloud(page_size=60)
        server.serve(cloud)
        seeds = Seeds(cloud, random.Random(seed))
        seeds.fill(given.leaks)
        begun = time.monotonic()
        report = find_leaks(plan, google_apis(PROJECT, endpoint=server.address))
        seconds = time.monotonic() - begun
        expected = Counter(map(named, seeds.expected))
        found = Counter((each.name, each.location) for each in report.leaks)
        kinds |= {each.kind for each in report.leaks}
        seeded += expected.total()
        missed += (expected - found).total()
        wrong += (found - expected).total() + len(report.doubtful)
        print(
            f"seed {seed}: {expected.total()} leaks among {len(cloud.things)} things,"
            f" {len(cloud.requests)} requests, {seconds:.1f} s"
        )
    print(f"{seeded} leaks of {len(kinds)} kinds seeded, {missed} missed, {wrong} wrong")
    sys.exit(bool(missed or wrong))


if __name__ == "__main__":
    main()
