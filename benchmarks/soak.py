"""At least 100 faults on a small model and two ranks, with real processes, and a table of the
verdicts.

`make soak` runs it: kills of any rank and of the supervisor in steps, in saves, in the cache build,
in the export and in the first second of a resumed attempt, stopped ranks, SIGTERM, full disks and
flipped bits, drawn from a seed. Every loss and gradient norm, redone steps included, and the final
weights must equal the undisturbed run's to the bit.

    python benchmarks/soak.py [--count 100] [--seed 0] [--markdown build/soak.md] [--directory DIR]

Cost: about a start of two ranks per fault, so 15 to 20 minutes on two quiet cores. Exit code 0 when
every fault passed.

    python benchmarks/soak.py --slurm 5 [--only rank agent ...]

strikes runs of two nodes on a real Slurm cluster of four (as root; `make test` has installed it):
as often as said each of the kinds in `STRIKES`, at moments drawn from a seed. The command is a
chain of hashes that saves every tenth step; its result must be equal to the bit, the failures as
the restart policy counts them, no two starts may write at once, and nothing may be left.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console
from tests.integration.launch.desk import Desk
from tests.integration.launch.slurm_cluster import SlurmCluster, slurm_cluster, until
from tests.integration.launch.test_slurm import sit_down
from tests.integration.tiny_run import write_config, write_rows

from drillyard.config.load import load_run_config
from drillyard.faults.campaign import Campaign, CampaignResult, run_campaign
from drillyard.faults.campaign_report import print_campaign, summary_lines
from drillyard.faults.fault_verdicts import FaultVerdict
from drillyard.faults.plan import FAULT_KINDS, INJECTION_POINTS, FaultKind, InjectionPoint

STEPS = 60
SAVE_EVERY = 4
CHAIN_STEPS = 60
CHAIN = """
import hashlib, json, os, pathlib, signal, sys, time
run, node, begun = pathlib.Path(os.environ["RUN"]), os.environ["NODE_RANK"], os.environ["ROUND"]
saved = run / "saved" / f"{node}.json"
saved.parent.mkdir(exist_ok=True)
step, chain = json.loads(saved.read_text()) if saved.exists() else (0, "")
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
def save():
    saved.with_suffix(".new").write_text(json.dumps([step, chain]))
    os.replace(saved.with_suffix(".new"), saved)
while step < STEPS or asked:
    with open(run / "written", "a") as file:
        file.write(f"{begun} {time.time()}\\n")
    if asked:
        save()
        sys.exit(85)
    if step == int(os.environ["HOLD"]) and not (run / "go").exists():
        (run / f"held-{node}").touch()
        time.sleep(0.02)
        continue
    chain, step = hashlib.sha256(f"{chain}{step}{node}".encode()).hexdigest(), step + 1
    if step % 10 == 0 or step == STEPS:
        save()
    time.sleep(0.02)
""".replace("STEPS", str(CHAIN_STEPS))
"""Runs once on each node, and waits before a step until it has been struck there."""


def main() -> None:
    """Run the campaign, print its table and write it as Markdown."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--markdown", type=Path, default=Path("build/soak.md"))
    parser.add_argument(
        "--directory", type=Path, help="where to work, kept afterwards; default: a temporary one"
    )
    parser.add_argument(
        "--slurm", type=int, metavar="SEEDS", help="strike runs on Slurm, each kind so often"
    )
    parser.add_argument("--only", nargs="+", choices=STRIKES, default=list(STRIKES))
    arguments = parser.parse_args()
    if arguments.slurm:
        sys.exit(0 if soak_slurm(arguments.only, range(arguments.slurm)) else 1)
    with tempfile.TemporaryDirectory(prefix="drillyard-soak-") as temporary:
        inputs = Path(temporary)
        write_rows(inputs / "rows.jsonl")
        config = write_config(
            inputs, "soak", training__steps=STEPS, checkpoint={"every_steps": SAVE_EVERY}
        )
        campaign = Campaign(
            config=config,
            directory=(arguments.directory or inputs / "campaign").resolve(),
            kinds=FAULT_KINDS,
            count=arguments.count,
            seed=arguments.seed,
            num_ranks=2,
            keep=arguments.directory is not None,
        )
        result = run_campaign(campaign, load_run_config(config), print_progress)
    arguments.markdown.parent.mkdir(parents=True, exist_ok=True)
    arguments.markdown.write_text(as_markdown(result), encoding="utf-8")
    print_campaign(result, Console(highlight=False))
    print(f"written: {arguments.markdown}")
    sys.exit(0 if result.passed else 1)


def print_progress(text: str) -> None:
    """Progress, with the time of day."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def as_markdown(result: CampaignResult) -> str:
    """One row per kind and injection point, the totals, then the problems."""
    rows: dict[tuple[FaultKind, InjectionPoint], list[FaultVerdict]] = {}
    for verdict in result.verdicts:
        rows.setdefault((verdict.fault.kind, verdict.fault.place), []).append(verdict)
    lines = [
        "| fault | place | struck | times | hit | passed | steps redone | seconds lost, median |",
        "|---|---|---|---|---|---|---|---|",
    ]
    order = [(kind, place) for kind in FAULT_KINDS for place in INJECTION_POINTS]
    for kind, place in sorted(rows, key=order.index):
        found = rows[kind, place]
        lost = [
            verdict.seconds_lost
            for verdict in found
            if verdict.seconds_lost is not None and verdict.hit
        ]
        lines.append(
            f"| {kind} | {INJECTION_POINTS[place]} | {_targets(found)} | {len(found)} |"
            f" {sum(v.hit for v in found)} | {sum(v.passed for v in found)} |"
            f" {sum(v.steps_redone for v in found)} |"
            f" {f'{statistics.median(lost):.1f}' if lost else '-'} |"
        )
    failed = [
        f"- fault {v.fault.number} ({v.fault.name}, {v.moment}): {problem}"
        for v in result.verdicts
        for problem in v.problems
    ]
    return (
        "\n".join([*lines, "", *summary_lines(result), *([""] if failed else []), *failed]) + "\n"
    )


def _targets(found: Sequence[FaultVerdict]) -> str:
    """`rank 0: 5, rank 1: 4, supervisor: 5`; a full disk has no target."""
    counts = Counter(verdict.fault.target for verdict in found if verdict.fault.kind != "disk-full")
    targets = sorted(counts, key=lambda target: (target is None, target or 0))
    return (
        ", ".join(f"{'supervisor' if t is None else f'rank {t}'}: {counts[t]}" for t in targets)
        or "-"
    )


def kill(cluster: SlurmCluster, run: Path, word: str, others: str = "") -> None:
    """SIGKILL to the process of a run with `word` in its command line, one of several."""
    found = [
        pid
        for pid, said in cluster.processes(str(run)).items()
        if word in said and not (others and others in said)
    ]
    os.kill(random.choice(found), signal.SIGKILL)


def preempt(cluster: SlurmCluster, desk: Desk, handle: str, _hosts: list[str]) -> None:
    """Take all nodes for a job of a higher tier, until the run waits."""
    urgent = ["--partition=urgent", "--nodes=4", "--exclusive", "--output=/dev/null"]
    other = cluster.run("sbatch", "--parsable", *urgent, "--wrap=sleep 1000").stdout.strip()
    job = job_of(desk, handle)
    until(lambda: cluster.job(job) == "PENDING", "preemption")
    cluster.run("scancel", other)


def reach_limit(cluster: SlurmCluster, desk: Desk, handle: str, _hosts: list[str]) -> None:
    """Move the time limit near, until the run waits."""
    job = job_of(desk, handle)
    minutes = 3 + cluster.elapsed_seconds(job) // 60
    cluster.run("scontrol", "update", f"JobId={job}", f"TimeLimit={minutes}")
    until(lambda: cluster.job(job) == "PENDING", "the time limit")
    cluster.run("scontrol", "update", f"JobId={job}", "TimeLimit=50")


def lose_slurmd(cluster: SlurmCluster, desk: Desk, handle: str, hosts: list[str]) -> None:
    """Kill a node's slurmd; what runs there goes on until the run is started elsewhere."""
    cluster.kill_node(random.choice(hosts))
    desk.wait_for(handle, lambda status: status["round"] == 1)


def job_of(desk: Desk, handle: str) -> str:
    return str(desk.status(handle)["native"]["job_id"])


def run_of(desk: Desk, handle: str) -> Path:
    return desk.directory / "runs" / handle.rpartition("/")[2]


Strike = Callable[[SlurmCluster, Desk, str, list[str]], object]
STRIKES: dict[str, tuple[Strike, int, str]] = {
    "rank": (lambda c, d, h, _: kill(c, run_of(d, h), "import hashlib", "agent"), 1, ""),
    "agent": (lambda c, _d, _h, hosts: c.kill_agent(hosts[1]), 0, ""),
    "leader": (lambda c, _d, _h, hosts: c.kill_agent(hosts[0]), 0, ""),
    "program": (lambda c, d, h, _: kill(c, run_of(d, h), " slurm-job "), 0, ""),
    "bash": (lambda c, _d, _h, _: kill(c, c.directory, "slurm_script"), 0, "failed"),
    "slurmd": (lose_slurmd, 0, ""),
    "preemption": (preempt, 0, ""),
    "requeue": (lambda c, d, h, _: c.run("scontrol", "requeue", job_of(d, h)), 0, ""),
    "limit": (reach_limit, 0, ""),
    "scancel": (lambda c, d, h, _: c.run("scancel", job_of(d, h)), 0, "cancelled"),
}
"""What strikes, how many failures it counts, and as what the run ends; empty: it goes on by
itself."""


def soak_slurm(kinds: Sequence[str], seeds: Sequence[int]) -> bool:
    """Strike runs, print a row for each; returns whether all passed."""
    passed = True
    temporary = tempfile.TemporaryDirectory(prefix="drillyard-soak-")
    with temporary as directory, slurm_cluster() as cluster:
        desk = sit_down(cluster, Path(directory))
        for kind, seed in itertools.product(kinds, seeds):
            begun = time.monotonic()
            problems = struck(cluster, desk, kind, seed)
            cluster.reset()
            seconds = time.monotonic() - begun
            print_progress(f"{kind} {seed}: {'; '.join(problems) or 'passed'}, {seconds:.0f} s")
            passed = passed and not problems
    return passed


def struck(cluster: SlurmCluster, desk: Desk, kind: str, seed: int) -> list[str]:
    """Strike one run; returns what is not as it should be."""
    random.seed(f"{kind} {seed}")
    strike, failures, ends = STRIKES[kind]
    environment = {"RUN": "{run_directory}", "ROUND": "{round}"}
    environment["HOLD"] = str(random.randint(10, CHAIN_STEPS - 1))
    workload = {"command": [sys.executable, "-c", CHAIN], "checkpoints": "saved/*.json"}
    config = desk.write_run(f"{kind}-{seed}", workload | {"environment": environment})
    handle = desk.launch(config)
    run = run_of(desk, handle)
    until(lambda: {path.name for path in run.glob("held-*")} == {"held-0", "held-1"}, "the hold")
    status = desk.status(handle)
    strike(cluster, desk, handle, status["hosts"])
    problems = []
    if ends:
        desk.wait_for(handle, lambda status: status["state"] == ends)
        until(lambda: not cluster.processes(str(run)), "the end of all processes")
        (run / "go").touch()
        resumed = desk.say("runs", "resume", handle)
        problems += [] if resumed.returncode == 0 else [resumed.stderr.strip()]
    (run / "go").touch()
    waited = desk.say("runs", "wait", handle)
    status = desk.status(handle)
    if (waited.returncode, status["state"], status["failures"]) != (0, "succeeded", failures):
        problems.append(f"{status['state']}, {status['failures']} failures: {status['reason']}")
    for node in ("0", "1"):
        chain = ""
        for step in range(CHAIN_STEPS):
            chain = hashlib.sha256(f"{chain}{step}{node}".encode()).hexdigest()
        if chain not in (run / "saved" / f"{node}.json").read_text():
            problems.append(f"node {node} has other bits")
    spans: dict[int, list[float]] = {}
    for line in (run / "written").read_text().splitlines():
        with contextlib.suppress(ValueError):
            begun, at = line.split()
            spans.setdefault(int(begun), []).append(float(at))
    ordered = [spans[begun] for begun in sorted(spans)]
    if any(max(old) >= min(new) for old, new in itertools.pairwise(ordered)):
        problems.append("two starts wrote at once")
    deadline = time.monotonic() + 60.0
    while (left := cluster.processes(str(run))) and time.monotonic() < deadline:
        time.sleep(0.2)
    problems += [f"left: {left}"] if left else []
    return problems + [f"left: {path.name}" for path in (run / "launch").glob("srun-*")]


if __name__ == "__main__":
    main()
