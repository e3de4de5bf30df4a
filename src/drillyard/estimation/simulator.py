"""Simulate a run failure by failure, for what closed forms leave out: spares, repairs, spread.

Failures of all nodes together are one Poisson process, so only the next failure has to be known.
Between two failures training is deterministic: the number of saves that reached storage is a
division. So the cost grows with failures only.

A node's failure stops the job. It is detected; without a spare the job waits for a node to come
back; it starts, loads the last save on storage and continues. Nodes fail meanwhile too: a failure
that hits a restart begins it again (as in Daly's model); with nodes missing there are fewer that
can fail. Spares and nodes in repair do not fail. Repair times are exponential.

The times of failures do not depend on spares: the same seed gives every choice the same failures
(common random numbers), so a difference of two choices is far better known than either.

The outcome of a run without a failure and its probability, e^-(T/M), are known exactly, so only
runs with a failure are drawn; `sample_statistics` puts both together.

Cost: about 10 microseconds per failure; 100,000 GPUs for 60 days have 5,000 at the highest named
rate. Limits: exponential gaps (no early life, no bad node that fails again and again), preemptions
without warning, one tier of checkpoints.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final

from drillyard.errors import UserError
from drillyard.estimation.checkpoint_interval import SaveSchedule, expected_wall_seconds
from drillyard.estimation.confidence import LEAST_VALUES, SampleStatistics, sample_statistics
from drillyard.estimation.quantity import SECONDS_PER_DAY

MOST_FAILURES: Final = 5_000_000
"""Failures over all replicas that one simulation may take, some 20 s."""
WANTED_FAILURES: Final = 20_000
"""Failures over all replicas that a simulation draws by default, some 0.2 s."""
FEWEST_REPLICAS, MOST_REPLICAS = 20, 2000


@dataclass(frozen=True, slots=True)
class Hazard:
    """One way to be interrupted, by its rate per node. Where it `takes_node`, the node is repaired
    or replaced after `away_seconds` in the mean."""

    name: str
    per_node_second: float
    takes_node: bool = False
    away_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Scenario:
    """Run to simulate. `spares` None: a node is always available, as the closed forms assume."""

    num_nodes: int
    schedule: SaveSchedule
    detect_seconds: float
    start_seconds: float
    hazards: tuple[Hazard, ...]
    spares: int | None = None

    @property
    def restart_seconds(self) -> float:
        """Seconds from a failure to the next step, where no node is waited for."""
        return self.detect_seconds + self.start_seconds

    @property
    def failures_per_second(self) -> float:
        return self.num_nodes * sum(hazard.per_node_second for hazard in self.hazards)

    @property
    def mtbf_seconds(self) -> float:
        """Mean time between failures of the whole job."""
        return 1 / self.failures_per_second if self.failures_per_second else math.inf

    @property
    def no_failure_share(self) -> float:
        """The probability of a run without any failure."""
        return math.exp(-self.failures_per_second * self.schedule.failure_free_seconds)

    @property
    def node_losses_per_node_second(self) -> float:
        return sum(hazard.per_node_second for hazard in self.hazards if hazard.takes_node)

    @property
    def mean_away_seconds(self) -> float:
        """Mean time that a node is away, over all hazards that take one; 0 where none does."""
        taking = [hazard for hazard in self.hazards if hazard.takes_node]
        rate = self.node_losses_per_node_second
        return sum(one.per_node_second * one.away_seconds for one in taking) / rate if rate else 0.0

    def waiting_share(self) -> float:
        """The share of time in which the job waits for a node, by the machine-repair model."""
        if self.spares is None:
            return 0.0
        return waiting_share(
            self.num_nodes, self.spares, self.node_losses_per_node_second, self.mean_away_seconds
        )


@dataclass(slots=True)
class SimulatedOutcome:
    """Time of one simulated run by category, in seconds; the categories sum to the wall time.

    `lost` is work that was done again, its saves included; `draining` the last save's transfer to
    storage.
    """

    productive: float = 0.0
    saving: float = 0.0
    lost: float = 0.0
    restarting: float = 0.0
    waiting: float = 0.0
    draining: float = 0.0
    failures: int = 0
    by_hazard: dict[str, int] = field(default_factory=dict)

    @property
    def wall_seconds(self) -> float:
        return (
            self.productive
            + self.saving
            + self.lost
            + self.restarting
            + self.waiting
            + self.draining
        )

    @property
    def goodput(self) -> float:
        """Work over wall time: ETTR without queue wait."""
        return self.productive / self.wall_seconds


@dataclass(frozen=True, slots=True)
class Simulation:
    """Replicas of one scenario, each with failures of its own and at least one; no others where
    nothing fails."""

    scenario: Scenario
    seed: int
    outcomes: tuple[SimulatedOutcome, ...]

    @property
    def goodput(self) -> SampleStatistics:
        """Goodput of a run: ETTR without queue wait."""
        schedule = self.scenario.schedule
        wall = schedule.failure_free_seconds
        unseen = schedule.work_seconds / wall - schedule.work_seconds / (
            wall + self._unseen_wait_seconds
        )
        goodput = self.spread_of(lambda outcome: outcome.goodput, unseen)
        return replace(goodput, low=max(goodput.low, 0.0))

    @property
    def wall_seconds(self) -> SampleStatistics:
        return self.spread_of(lambda outcome: outcome.wall_seconds, self._unseen_wait_seconds)

    @property
    def failures_per_day(self) -> SampleStatistics:
        """Interruptions per day of wall time."""
        return self.spread_of(
            lambda outcome: outcome.failures / outcome.wall_seconds * SECONDS_PER_DAY
        )

    def spread_of(
        self, figure: Callable[[SimulatedOutcome], float], unseen: float = 0.0
    ) -> SampleStatistics:
        """The spread of a figure that no failure makes better; `unseen` as in
        `sample_statistics`."""
        return sample_statistics(
            [figure(outcome) for outcome in self.outcomes],
            known_share=self.scenario.no_failure_share,
            known_value=figure(_without_failure(self.scenario.schedule)),
            unseen=unseen,
        )

    @property
    def replicas(self) -> int:
        return len(self.outcomes)

    @property
    def waits(self) -> int:
        """In how many of the simulated runs the job had to wait for a node."""
        return sum(outcome.waiting > 0 for outcome in self.outcomes)

    @property
    def _unseen_wait_seconds(self) -> float:
        """The mean wait for the first of all nodes that are away to come back, which no replica may
        have had."""
        spares = self.scenario.spares
        return 0.0 if spares is None else self.scenario.mean_away_seconds / (spares + 1)


def simulate_scenario(
    scenario: Scenario, *, replicas: int | None = None, seed: int = 0
) -> Simulation:
    """`replicas` runs of `scenario` with at least one failure each; by default as many as
    `enough_replicas` says.

    The same seed gives the same result, and the same failures to a scenario with other spares.
    UserError for fewer than 5 replicas (no spread to speak of), and where the run would fail
    millions of times.
    """
    if replicas is None:
        replicas = enough_replicas(scenario)
    if replicas < LEAST_VALUES:
        raise UserError(
            f"found {replicas} replicas; at least {LEAST_VALUES} are needed to know a spread"
        )
    check_length(scenario, replicas)
    if scenario.no_failure_share == 1:
        return Simulation(scenario, seed, ())
    horizon = scenario.schedule.failure_free_seconds
    return Simulation(
        scenario,
        seed,
        tuple(simulate_once(scenario, seed, replica, horizon) for replica in range(replicas)),
    )


def enough_replicas(scenario: Scenario) -> int:
    """Replicas that together meet about WANTED_FAILURES failures, however many spares there are."""
    if scenario.no_failure_share == 1:
        return FEWEST_REPLICAS
    wall = expected_wall_seconds(scenario.schedule, scenario.restart_seconds, scenario.mtbf_seconds)
    failures = wall / scenario.mtbf_seconds / (1 - scenario.no_failure_share)
    return min(max(FEWEST_REPLICAS, math.ceil(WANTED_FAILURES / failures)), MOST_REPLICAS)


def check_length(scenario: Scenario, replicas: int) -> None:
    """UserError where a simulation would take more than MOST_FAILURES failures, by the closed
    forms."""
    active = 1 - scenario.waiting_share()
    wall = expected_wall_seconds(scenario.schedule, scenario.restart_seconds, scenario.mtbf_seconds)
    expected = replicas * wall / scenario.mtbf_seconds / active if active > 0 else math.inf
    if not expected <= MOST_FAILURES:
        raise UserError(
            f"the run makes hardly any progress: about {expected:.2g} failures in {replicas}"
            f" replicas, more than the {MOST_FAILURES:.0e} that are simulated\nuse fewer replicas,"
            " a shorter restart, more spares or fewer nodes"
        )


def simulate_once(
    scenario: Scenario, seed: int, replica: int = 0, fails_within_seconds: float = math.inf
) -> SimulatedOutcome:
    """One run from its first step to its last save on storage.

    Of all runs those whose first failure comes `fails_within_seconds` of the start; it is drawn
    from the exponential distribution cut off there.
    """
    schedule = scenario.schedule
    cycle, drain = schedule.cycle_seconds, schedule.drain_seconds
    outcome = _without_failure(schedule)
    cluster = _Cluster(scenario, random.Random(f"{seed}/{replica}"), outcome, fails_within_seconds)
    secured, saves = 0, schedule.saves
    left = schedule.work_seconds + saves * schedule.blocking_seconds
    while cluster.next_failure < cluster.now + left + drain:
        ran = cluster.next_failure - cluster.now
        # The last save ends the run, so it is not among those that a failure finds on storage.
        newly = min(max(0, math.floor((ran - drain) / cycle)), saves - secured - 1)
        secured += newly
        left -= newly * cycle
        outcome.lost += ran - newly * cycle
        cluster.recover()
    return outcome


def _without_failure(schedule: SaveSchedule) -> SimulatedOutcome:
    return SimulatedOutcome(
        productive=schedule.work_seconds,
        saving=schedule.saves * schedule.blocking_seconds,
        draining=schedule.drain_seconds,
    )


class _Cluster:
    """The clock, the next failure, and the nodes that are away."""

    def __init__(
        self,
        scenario: Scenario,
        draws: random.Random,
        outcome: SimulatedOutcome,
        first_within: float,
    ) -> None:
        self.scenario = scenario
        self.draws = draws
        self.outcome = outcome
        self.now = 0.0
        self.rate = scenario.failures_per_second
        share = -math.expm1(-self.rate * first_within) if self.rate else 0.0
        self.next_failure = (
            -math.log1p(-share * draws.random()) / self.rate if self.rate else math.inf
        )
        self.returns: list[float] = []
        self.hazards: list[tuple[float, Hazard]] = []
        total = 0.0
        for hazard in scenario.hazards:
            total += hazard.per_node_second * scenario.num_nodes
            self.hazards.append((total, hazard))

    @property
    def missing(self) -> int:
        """Nodes that the job lacks: those away beyond the spares."""
        return (
            0 if self.scenario.spares is None else max(0, len(self.returns) - self.scenario.spares)
        )

    def recover(self) -> None:
        """From the failure at `next_failure` to the moment when training goes on."""
        began, waited = self.next_failure, 0.0
        self.strike()
        while True:
            if self.interrupted(self.scenario.detect_seconds):
                continue
            waiting_since = self.now
            self.wait_for_nodes()
            waited += self.now - waiting_since
            if not self.interrupted(self.scenario.start_seconds):
                break
        self.outcome.waiting += waited
        self.outcome.restarting += self.now - began - waited

    def interrupted(self, seconds: float) -> bool:
        """Let a part of the restart pass; True where a failure of one of the job's nodes cut it
        short."""
        end = self.now + seconds
        while self.next_failure < end:
            if self.strike():
                return True
        self.now = end
        self.come_back()
        return False

    def wait_for_nodes(self) -> None:
        """Until no node is missing. The nodes that are there fail meanwhile as well."""
        while self.missing:
            if self.next_failure < self.returns[0]:
                self.strike()
            else:
                self.now = self.returns[0]
                self.come_back()

    def strike(self) -> bool:
        """The failure at `next_failure`; False where it would have hit a node that is not there
        (thinning).

        Draws three numbers in any case, so that the failures of other scenarios with this seed stay
        the same.
        """
        self.now = self.next_failure
        gap, place, away = (
            self.draws.expovariate(self.rate),
            self.draws.random(),
            self.draws.expovariate(1.0),
        )
        self.next_failure = self.now + gap
        self.come_back()
        present = 1 - self.missing / self.scenario.num_nodes
        if place >= present:
            return False
        at = place / present * self.rate
        hazard = next((one for upto, one in self.hazards if at < upto), self.hazards[-1][1])
        self.outcome.failures += 1
        self.outcome.by_hazard[hazard.name] = self.outcome.by_hazard.get(hazard.name, 0) + 1
        if hazard.takes_node and self.scenario.spares is not None:
            heapq.heappush(self.returns, self.now + away * hazard.away_seconds)
        return True

    def come_back(self) -> None:
        """Nodes whose time is over are spares again, or take their places in the job."""
        while self.returns and self.returns[0] <= self.now:
            heapq.heappop(self.returns)


def waiting_share(
    num_nodes: int, spares: int, failures_per_node_second: float, repair_seconds: float
) -> float:
    """The share of time, 0 to 1, in which the job waits for a node; `failures` are those that cost
    a node.

    The machine-repair model in closed form, and the cross check of the simulation: nodes fail one
    by one and come back after a repair; with k of them away and S spares, max(0, k - S) are
    missing. Failures come at (N - missing) times the rate of one node, repairs at k over the mean
    repair time: a birth-death chain whose stationary distribution is a product (Feller, vol. I,
    XVII.7; Erlang's formula is the case without missing nodes). Exact for exponential repairs.
    Limits: stationary, so pessimistic for a run shorter than a repair; one repair time. Cost: about
    1 ms for a thousand nodes away in the mean.
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
    """The number of spares with the least node-hours per useful hour, (N + S) / (1 - waiting
    share).

    Found by walking up: the cost falls, then rises by one node at a time once no run waits. The
    walk begins four standard deviations below the mean number of nodes away, where the job would
    wait nearly always.
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
