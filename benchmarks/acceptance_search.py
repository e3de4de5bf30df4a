"""The search for bad nodes on simulated clusters: what it finds, what it leaves open, and whom it
blames.

    python benchmarks/acceptance_search.py [--clusters 10000] [--first-seed 0] [--relative]

A cluster has 4 to 64 nodes in racks of 4 to 16 or in one, and one kind of fault: bad nodes (0 to 6,
at 20 to 80 % of the speed), bad links, a rack that is badly joined to the others, or results that
are bad by chance (2 % of them). Every result has noise: a standard deviation of 5 %, or of --noise.
A pair is as fast as the slower of its nodes and the way between them.
"""

from __future__ import annotations

import argparse
import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from drillyard.acceptance.checks.slow_pairs import Conclusion, conclude
from drillyard.acceptance.node.search import PairResult, next_round

NOISE = 0.05
BY_CHANCE = 0.02
AT_LEAST = 0.9
KINDS = ("healthy", "nodes", "links", "rack", "chance", "nodes and chance")


@dataclass(frozen=True)
class Cluster:
    """A simulated cluster. `speed` of nodes, links and joints of racks; what is missing has 1."""

    seed: int
    kind: str
    nodes: int
    racks: Mapping[str, str]
    slow_nodes: Mapping[int, float] = field(default_factory=dict)
    slow_links: Mapping[frozenset[int], float] = field(default_factory=dict)
    slow_racks: Mapping[str, float] = field(default_factory=dict)
    by_chance: float = 0.0
    noise: float = NOISE

    @classmethod
    def drawn(cls, seed: int, noise: float = NOISE) -> Cluster:
        """The cluster of a seed."""
        draw = random.Random(seed)
        kind = KINDS[seed % len(KINDS)]
        nodes = draw.randint(4, 64)
        size = draw.choice([nodes, 4, 8, 16])
        racks = {str(node): f"r{node // size}" for node in range(nodes)}
        slow_nodes, slow_links, slow_racks = {}, {}, {}
        if "nodes" in kind:
            bad = draw.sample(range(nodes), min(nodes - 1, draw.randint(0, 6)))
            slow_nodes = {node: draw.uniform(0.2, 0.8) for node in bad}
        if kind == "links":
            for _ in range(draw.randint(1, 6)):
                # Half of them where round 1 looks.
                one = (
                    draw.randrange(0, nodes - 1, 2)
                    if draw.random() < 0.5
                    else draw.randrange(nodes)
                )
                other = one + 1 if one % 2 == 0 and one + 1 < nodes else draw.randrange(nodes)
                if one != other:
                    slow_links[frozenset((one, other))] = draw.uniform(0.2, 0.8)
        if kind == "rack":
            slow_racks = {draw.choice(sorted(set(racks.values()))): draw.uniform(0.2, 0.8)}
        chance = BY_CHANCE if "chance" in kind else 0.0
        return cls(seed, kind, nodes, racks, slow_nodes, slow_links, slow_racks, chance, noise)

    def measured(self, one: int, other: int, draw: random.Random) -> float:
        """Speed of a pair."""
        speeds = [self.slow_nodes.get(node, 1.0) for node in (one, other)]
        speeds.append(self.slow_links.get(frozenset((one, other)), 1.0))
        here, there = self.racks[str(one)], self.racks[str(other)]
        if here != there:
            speeds += [self.slow_racks.get(rack, 1.0) for rack in (here, there)]
        if draw.random() < self.by_chance:
            speeds.append(draw.uniform(0.2, 0.85))
        return 100 * min(speeds) * max(0.5, draw.gauss(1.0, self.noise))


Concluding = Callable[[Sequence[int], Mapping[str, str], Sequence[PairResult]], list[Conclusion]]


@dataclass(frozen=True)
class Trial:
    """One search. `blamed` and `bad` are nodes, pairs and names of racks."""

    cluster: Cluster
    rounds: int
    blamed: frozenset[object]
    bad: frozenset[object]
    named: frozenset[object]
    """Those that are named, and not proven."""

    @property
    def wrongly(self) -> frozenset[object]:
        return self.blamed - self.bad


def searched(cluster: Cluster, *, relative: bool = False, by: Concluding = conclude) -> Trial:
    """Run the search on a cluster."""
    draw = random.Random(f"{cluster.seed} results")
    nodes = range(cluster.nodes)
    results: list[PairResult] = []
    rounds = 0
    while pairs := next_round(nodes, cluster.racks, results):
        met = [node for pair in pairs for node in pair]
        assert len(met) == len(set(met)), "a node is in two pairs of one round"
        for one, other in pairs:
            value = cluster.measured(one, other, draw)
            passed = None if relative else value >= 100 * AT_LEAST
            results.append(PairResult((one, other), value, passed, rounds))
        rounds += 1
    blamed: set[object] = set()
    named: set[object] = set()
    for each in by(nodes, cluster.racks, results):
        these = blamed if each.proven else named
        if each.kind == "node":
            these |= set(each.nodes)
        elif each.kind == "link":
            these.add(frozenset(each.nodes))
        elif each.kind == "rack" or each.proven:
            these.add(each.racks)
    measured = {frozenset(each.pair) for each in results}
    bad: set[object] = {*cluster.slow_nodes, *(measured & cluster.slow_links.keys())}
    several = sorted(set(cluster.racks.values()))
    if len(several) == 2 and cluster.slow_racks:
        bad.add(tuple(several))
    elif len(several) > 2:
        bad |= {(rack,) for rack in cluster.slow_racks}
    return Trial(cluster, rounds, frozenset(blamed), frozenset(bad), frozenset(named))


def after_one_bad_pair(
    nodes: Sequence[int], racks: Mapping[str, str], results: Sequence[PairResult]
) -> list[Conclusion]:
    """The control: blames both nodes of any pair that failed."""
    slow = {node for each in results if each.passed is False for node in each.pair}
    return [Conclusion("node", (node,), True, "", ()) for node in sorted(slow)]


def table(trials: Sequence[Trial]) -> str:
    """Markdown: by kind of cluster, what was found."""
    lines = [
        "| kind | clusters | bad | proven | recall | wrongly blamed | bad, not proven"
        " | healthy, suspected | most rounds |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    by_kind: dict[str, list[Trial]] = defaultdict(list)
    for trial in trials:
        by_kind[trial.cluster.kind].append(trial)
    for kind, these in sorted(by_kind.items()):
        bad = sum(len(each.bad) for each in these)
        found = sum(len(each.bad & each.blamed) for each in these)
        wrongly = sum(len(each.wrongly) for each in these)
        left = sum(len(each.bad & each.named) for each in these)
        suspected = sum(len(each.named - each.bad) for each in these)
        rounds = max(each.rounds for each in these)
        recall = f"{found / bad:.1%}" if bad else ""
        lines.append(
            f"| {kind} | {len(these)} | {bad} | {found} | {recall} | {wrongly} | {left}"
            f" | {suspected} | {rounds} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clusters", type=int, default=10_000)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--relative", action="store_true", help="without a threshold")
    parser.add_argument("--noise", type=float, default=NOISE)
    options = parser.parse_args()
    seeds = range(options.first_seed, options.first_seed + options.clusters)
    trials = [
        searched(Cluster.drawn(seed, options.noise), relative=options.relative) for seed in seeds
    ]
    print(table(trials))
    for trial in trials:
        if trial.wrongly:
            print(f"seed {trial.cluster.seed} ({trial.cluster.kind}): wrongly {set(trial.wrongly)}")


if __name__ == "__main__":
    main()
