"""What `drillyard accept` finds of faults that are given from outside: a table of every kind with
three seeds, on two sshd hosts of a network of their own, and 20 quick runs without a fault.

    python benchmarks/acceptance_faults.py [--seeds 3] [--healthy 20] [--only WORDS]
        [--markdown FILE]

`make soak` runs it, as root: hosts are namespaces of Linux. The baseline is a first run, as no
published row fits a CPU. The node is drawn by the seed; every second seed lists the hosts in the
other order, so that a verdict that sticks to a rank or a name would be seen. Then four sshd hosts,
one of which has a slow link, and the same run on a real Slurm cluster: its acceptance.json must
have the same results but for figures.

Cost: about 40 s a run on two quiet cores. Exit code 0 when every fault was named first, no other
node was blamed, and all runs without a fault passed.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.integration.acceptance.faults import BY_NAME, FAULTS, Fault, judged
from tests.integration.acceptance.places import Accepted, slurm_place, ssh_place
from tests.integration.launch.slurm_cluster import slurm_cluster
from tests.integration.launch.sshd_hosts import SshHosts, hosts_on_a_network

_FOUR = "a slow link of four hosts"
COLUMNS = "| fault | seed | node | verdict | named first | blamed | seconds | problems |"


def main() -> int:
    """Run all trials, and print and write their table; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--healthy", type=int, default=20)
    parser.add_argument("--only", default="", help="faults whose name has these words")
    parser.add_argument("--without-slurm", action="store_true")
    parser.add_argument("--markdown", type=Path, default=Path("build/acceptance_faults.md"))
    arguments = parser.parse_args()
    lines = [COLUMNS, "|---|---|---|---|---|---|---|---|"]
    failed = 0
    with tempfile.TemporaryDirectory(prefix="drillyard-acceptance-") as temporary:
        directory = Path(temporary)
        with hosts_on_a_network(directory / "hosts") as hosts:
            first = _healthy(hosts, directory, None)
            baseline = directory / "baseline.json"
            baseline.write_text(json.dumps(first.document))
            for number in range(arguments.healthy):
                failed += _report(lines, "none", number, "", _timed_healthy(hosts, baseline))
            for fault in FAULTS:
                for seed in range(arguments.seeds) if arguments.only in fault.name else ():
                    failed += _report(
                        lines, fault.name, seed, *_trial(hosts, fault, seed, baseline)
                    )
        for seed in range(arguments.seeds) if arguments.only in _FOUR else ():
            node, trial = _one_slow_link_of_four(directory / f"four-{seed}", seed)
            failed += _report(lines, _FOUR, seed, node, trial)
        if not arguments.without_slurm:
            failed += _report(lines, "none, on Slurm", 0, "", _on_slurm(directory, first))
    arguments.markdown.parent.mkdir(parents=True, exist_ok=True)
    arguments.markdown.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{failed} trials with a problem; {arguments.markdown}")
    return min(failed, 1)


Trial = tuple[Accepted, float, list[str]]


def _healthy(hosts: SshHosts, directory: Path, baseline: Path | None) -> Accepted:
    options = [] if baseline is None else ["--baseline", baseline]
    return ssh_place(hosts, directory / "desk").accept(*options)


def _timed_healthy(hosts: SshHosts, baseline: Path) -> Trial:
    began = time.monotonic()
    found = _healthy(hosts, baseline.parent, baseline)
    seconds = time.monotonic() - began
    passed = found.code == 0 and found.document["verdict"] == "pass"
    return found, seconds, [] if passed else [f"failed: {', '.join(found.failed)}"]


def _trial(hosts: SshHosts, fault: Fault, seed: int, baseline: Path) -> tuple[str, Trial]:
    draw = random.Random(f"{fault.name} {seed}")
    node = draw.randrange(2)
    order = (1, 0) if seed % 2 else (0, 1)
    place = ssh_place(hosts, baseline.parent / f"desk-{seed % 2}", order)
    began = time.monotonic()
    with fault.give(hosts, hosts.hosts[node], draw):
        found = place.accept("--baseline", baseline)
    seconds = time.monotonic() - began
    return hosts.names[node], (found, seconds, judged(fault, hosts.names[node], found))


def _one_slow_link_of_four(directory: Path, seed: int) -> tuple[str, Trial]:
    draw = random.Random(f"{_FOUR} {seed}")
    with hosts_on_a_network(directory / "hosts", 4) as hosts:
        order = tuple(draw.sample(range(4), 4))
        node = draw.randrange(4)
        place = ssh_place(hosts, directory / "desk", order)
        baseline = directory / "baseline.json"
        baseline.write_text(json.dumps(place.accept().document))
        began = time.monotonic()
        with BY_NAME["a slow link"].give(hosts, hosts.hosts[node], draw):
            found = place.accept("--baseline", baseline)
        seconds = time.monotonic() - began
    problems = judged(BY_NAME["a slow link"], hosts.names[node], found)
    # Those of the search; what each pair's TCP gives comes before it.
    searched = [each for each in found.evidence["observations"] if each["scope"] == "pairs"]
    rounds = max(each["round"] for each in searched) + 1
    if rounds > 3:
        problems.append(f"{rounds} rounds of pairs")
    if not any("slow-pairs" in each["checks"] for each in found.document["culprits"]):
        problems.append("the search proves nothing")
    return hosts.names[node], (found, seconds, problems)


def _on_slurm(directory: Path, first: Accepted) -> Trial:
    began = time.monotonic()
    with slurm_cluster() as cluster:
        found = slurm_place(cluster, directory / "slurm").accept("--nodes", "2")
    here, there = Counter(found.form), Counter(first.form)
    differ = sorted(((here - there) + (there - here)).elements())
    problems = [f"{check} {metric}: {status}" for check, metric, _, status in differ]
    return found, time.monotonic() - began, problems


def _report(lines: list[str], fault: str, seed: int, node: str, trial: Trial) -> int:
    """Add a trial to the table and print it; returns whether it has a problem."""
    found, seconds, problems = trial
    named, blamed = (found.failed or [""])[0], ", ".join(found.culprits)
    lines.append(
        f"| {fault} | {seed} | {node} | {found.document['verdict']} | {named} | {blamed} |"
        f" {seconds:.0f} | {'; '.join(problems)} |"
    )
    print(lines[-1], flush=True)
    if problems:
        print("\n".join(f"    {line}" for line in found.output.splitlines() if "pass" not in line))
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
