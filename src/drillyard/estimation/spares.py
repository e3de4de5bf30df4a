"""How long a job waits for nodes with a given number of spares, in closed form: the machine-repair model.

Nodes fail one by one and come back after a repair; with k of them away and S spares, max(0, k - S) are missing and the
job stands still. Failures that cost a node come at (N - missing) times the rate of one node, repairs at k over the mean
repair time: a birth-death chain whose stationary distribution is a product (Feller, vol. I, XVII.7; Erlang's formula is
the case without missing nodes). It is exact for exponential repairs, and the cross check of `simulate`.

Limits: stationary, so pessimistic for a run shorter than a repair, which starts with all nodes; one repair time.
"""

from __future__ import annotations

import math

from drillyard.hardware.facts import FactSource

REPAIR_MODEL = FactSource("machine-repair model: birth-death chain of nodes away, W. Feller vol. I, XVII.7", None)


def waiting_share(num_nodes: int, spares: int, failures_per_node_second: float, repair_seconds: float) -> float:
    """The share of time, 0 to 1, in which the job stands still for a node; `failures` are those that cost a node.

    Cost: in proportion to the number of nodes away in the mean, about 1 ms for a thousand.
    """
    load = failures_per_node_second * repair_seconds
    if not load:
        return 0.0
    offered = num_nodes * load
    largest = min(num_nodes + spares, math.ceil(offered + 12 * math.sqrt(offered) + 30 + spares))
    logs = [0.0]
    for away in range(1, largest + 1):
        in_job = num_nodes - max(0, away - 1 - spares)
        logs.append(logs[-1] + math.log(in_job * load / away))
    top = max(logs)
    weights = [math.exp(log - top) for log in logs]
    return sum(weights[spares + 1 :]) / sum(weights)


def cheapest_spares(num_nodes: int, failures_per_node_second: float, repair_seconds: float) -> int:
    """The number of spares with the least node-hours per useful hour, (N + S) / (1 - waiting share).

    Found by walking up: the cost falls, then rises by one node at a time once nobody waits. The walk begins four
    standard deviations below the mean number of nodes away, where the job would stand still nearly always.
    """
    offered = num_nodes * failures_per_node_second * repair_seconds
    best, best_cost = 0, math.inf
    spares = max(0, math.floor(offered - 4 * math.sqrt(offered)))
    while num_nodes + spares < best_cost:
        active = 1 - waiting_share(num_nodes, spares, failures_per_node_second, repair_seconds)
        cost = (num_nodes + spares) / active if active > 0 else math.inf
        if cost < best_cost:
            best, best_cost = spares, cost
        spares += 1
    return best
