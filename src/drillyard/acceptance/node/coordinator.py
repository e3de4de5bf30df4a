"""What node 0 does beside its own probes: it runs the schedule step by step, and keeps what was
observed.

A node that does not join, does not answer in time or is lost is an observation too: the steps after
it leave it out, the other nodes go on.
"""

from __future__ import annotations

import itertools
import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .matchings import matchings, partners
from .members import JobMembers
from .messages import BEAT_SECONDS
from .search import ROUNDS, PairResult, next_round

GRACE_SECONDS = 10.0
"""After a step's own limit until a node that has not answered counts as silent."""
FOLLOW_SECONDS = 3.0
"""After one node of a group failed until the others are stopped: their own errors come first."""
_PORT_SECONDS = 5.0
_MORE_ROUNDS = 3


@dataclass
class _Task:
    """A step's probe on one node of a group, until it is answered. `answer`: values and error of
    each process of the probe; or why the node did not answer."""

    group: int
    rank: int
    deadline: float
    stop_at: float | None = None
    answer: list[list[Any]] | str | None = None
    silent: bool = False


@dataclass
class Coordinator:
    """Runs steps on the members. `steps` is the schedule that every node has."""

    members: JobMembers
    processes: int
    steps: Sequence[dict[str, Any]]
    observations: list[dict[str, Any]] = field(default_factory=list)
    interrupted: str | None = None
    """Why the job ended before its last step."""

    def run(self, step_begins: Callable[[str], None], step_ended: Callable[[], object]) -> None:
        """Every step in order."""
        self._task_ids = iter(range(1, 1 << 62))
        self._named: set[int] = set()
        for index, step in enumerate(self.steps):
            if self.interrupted is not None:
                return
            step_begins(f"{step['probe']} ({step['scope']})")
            getattr(self, f"_run_{step['scope']}")(index)
            self._name_lost()
            step_ended()

    def interrupt(self, why: str) -> None:
        """End the job early; called by another thread. Nodes that have not answered are named."""
        self.interrupted = self.interrupted or why
        self.members.stop_waiting()
        self.members.events.put((-1, None))

    # Scopes of steps.

    def _run_node(self, index: int) -> None:
        """On each node by itself, all at the same time; `on` names the only ones."""
        only = self.steps[index].get("on")
        ranks = [rank for rank in self.members.present() if only is None or rank in only]
        self._observe(index, [[rank] for rank in ranks])

    def _run_all(self, index: int) -> None:
        """On all nodes together."""
        if group := self.members.present():
            self._observe(index, [group])

    def _run_pairs(self, index: int) -> None:
        """On pairs of nodes, in rounds, as the search for bad nodes asks for."""
        step = self.steps[index]
        results: list[PairResult] = []
        at_least = (step.get("judge") or {}).get("at_least")
        figure = (step.get("judge") or {}).get("figure")
        known = self.members.identities.items()
        racks = {str(rank): each["rack"] for rank, each in known if each.get("rack")}
        for number in range(ROUNDS):
            pairs = next_round(self.members.present(), racks, results)
            if not pairs or self.interrupted is not None:
                return
            seen = self._observe(index, [list(pair) for pair in pairs], number)
            values = [_figure(each, figure) for each in seen]
            for pair, value in zip(pairs, values):
                passed = None if at_least is None or value is None else value >= at_least
                results.append(PairResult(pair, value, passed, number))

    def _run_mesh(self, index: int) -> None:
        """Each node against its partners, in at most `rounds`."""
        step = self.steps[index]
        if step.get("disjoint"):
            self._run_disjoint(index)
            return
        present = self.members.present()
        others = partners(present, step.get("rounds"))
        self._observe(index, [[rank] for rank in present], peers=others)

    def _run_disjoint(self, index: int) -> None:
        """In rounds, in which a node is in one pair only, so that measurements do not disturb each
        other. Pairs that look slow are measured again, in a few more rounds: other work on a host
        may have slowed them."""
        step = self.steps[index]
        asked = step.get("judge") or {}
        best: dict[tuple[int, int], float] = {}
        rounds = matchings(self.members.present(), step.get("rounds"))
        for number in itertools.count():
            left = set(self.members.present())
            if number < len(rounds):
                pairs = [pair for pair in rounds[number] if left.issuperset(pair)]
            elif number < len(rounds) + _MORE_ROUNDS and best:
                limit = max(asked.get("at_least") or 0.0, asked["of_best"] * max(best.values()))
                slow = [pair for pair in best if best[pair] < limit and left.issuperset(pair)]
                pairs = _disjoint(sorted(slow, key=lambda pair: best[pair]))
            else:
                return
            if self.interrupted is not None or (not pairs and number >= len(rounds)):
                return
            peers = {a: [b] for a, b in pairs}
            seen = self._observe(index, [list(pair) for pair in pairs], number, peers)
            for pair, each in zip(pairs, seen):
                value = (each["values"] or {}).get(asked.get("figure"))
                if isinstance(value, (int, float)):
                    best[pair] = max(best.get(pair, 0.0), float(value))

    # One step on groups of nodes at once.

    def _observe(
        self,
        index: int,
        groups: Sequence[list[int]],
        number: int | None = None,
        peers: dict[int, list[int]] | None = None,
    ) -> list[dict[str, Any]]:
        """Run a step's probe on disjoint groups of nodes at the same time; one observation each.

        With `peers` it runs on the first node of each group, which measures those others.
        """
        step = self.steps[index]
        began, clock = time.time(), time.monotonic()
        limit = float(step["seconds"])
        ports = self._free_ports([group[0] for group in groups]) if step.get("ranks") else {}
        tasks: dict[int, _Task] = {}
        for place, group in enumerate(groups):
            for position, rank in enumerate(group if peers is None else group[:1]):
                message: dict[str, Any] = {"task": next(self._task_ids), "step": index}
                task = _Task(place, rank, time.monotonic() + limit + GRACE_SECONDS)
                tasks[message["task"]] = task
                if step.get("ranks"):
                    if group[0] not in ports:
                        task.answer = f"node {group[0]} named no free port"
                        continue
                    message["ranks"] = {
                        "first": position * self.processes,
                        "world": len(group) * self.processes,
                        "master_addr": self.members.identities[group[0]]["address"],
                        "master_port": ports[group[0]],
                    }
                if peers is not None:
                    message["peers"] = [self.members.identities[peer] for peer in peers[rank]]
                self.members.send(rank, message)
        self._wait_for(tasks)
        seen = [
            self._observation(
                step, group, number, [each for each in tasks.values() if each.group == place]
            )
            for place, group in enumerate(groups)
        ]
        for each in seen:
            each["started_at"], each["seconds"] = began, time.monotonic() - clock
        self.observations += seen
        return seen

    def _wait_for(self, tasks: dict[int, _Task]) -> None:
        """Until every task has its answer, or the reason why it has none."""
        while pending := {key: each for key, each in tasks.items() if each.answer is None}:
            if self.interrupted is not None:
                self._give_up(pending)
                return
            now = time.monotonic()
            for key, each in pending.items():
                if each.stop_at is not None and now >= each.stop_at:
                    each.stop_at = None
                    each.deadline = min(each.deadline, now + GRACE_SECONDS)
                    why = f"stopped, as {self._failed_in(tasks, each.group)} failed"
                    self.members.send(each.rank, {"stop": key, "why": why})
                elif now >= each.deadline:
                    each.answer, each.silent = "did not answer in time", True
                    self.members.lose(each.rank, each.answer)
            times = [
                min(each.deadline, each.stop_at or each.deadline)
                for each in pending.values()
                if each.answer is None
            ]
            if not times:
                continue
            try:
                rank, message = self.members.events.get(
                    timeout=max(0.0, min(times) - time.monotonic())
                )
            except queue.Empty:
                continue
            self._take(tasks, rank, message)

    def _take(self, tasks: dict[int, _Task], rank: int, message: dict[str, Any] | None) -> None:
        """Use a message of a node, or the news that it is lost."""
        if message is None:
            for each in tasks.values():
                if each.rank == rank and each.answer is None:
                    each.answer, each.silent = self.members.lost.get(rank, "is lost"), True
                    self._stop_group_of(tasks, each)
            return
        key = message.get("task")
        task = tasks.get(key) if isinstance(key, int) else None
        if task is None or task.rank != rank or "ended" not in message:
            return
        if not _is_answer(message["ended"]):
            self.members.lose(rank, "sent an answer that has not its form")
            return
        task.answer = message["ended"]
        if any(error is not None for _, error in message["ended"]):
            self._stop_group_of(tasks, task)

    def _stop_group_of(self, tasks: dict[int, _Task], failed: _Task) -> None:
        """Stop the other nodes of a group soon: without this one they wait in vain."""
        for each in tasks.values():
            if each.group == failed.group and each.answer is None and each.stop_at is None:
                each.stop_at = time.monotonic() + FOLLOW_SECONDS

    def _failed_in(self, tasks: dict[int, _Task], group: int) -> str:
        failed = (
            each.rank
            for each in tasks.values()
            if each.group == group
            and each.answer is not None
            and (isinstance(each.answer, str) or any(error for _, error in each.answer))
        )
        return f"node {next(failed)}"

    def _give_up(self, pending: dict[int, _Task]) -> None:
        """The job ends: those that have been silent are named, the others had no time."""
        for each in pending.values():
            silent = self.members.silent_seconds(each.rank)
            each.silent = silent > 2.5 * BEAT_SECONDS
            each.answer = "had not ended when the job was ended"
            if each.silent:
                each.answer = f"was silent for {silent:.0f} s when the job was ended"

    def _free_ports(self, ranks: Sequence[int]) -> dict[int, int]:
        """A free port of each node, which holds it until its next task has ended."""
        asked = {rank: next(self._task_ids) for rank in ranks}
        for rank, key in asked.items():
            self.members.send(rank, {"port": key})
        found: dict[int, int] = {}
        given_up: set[int] = set()
        deadline = time.monotonic() + _PORT_SECONDS
        while len(found) + len(given_up) < len(asked) and self.interrupted is None:
            try:
                rank, message = self.members.events.get(
                    timeout=max(0.0, deadline - time.monotonic())
                )
            except queue.Empty:
                break
            if message is None:
                given_up |= {rank} & asked.keys()
            elif message.get("task") == asked.get(rank) and isinstance(message.get("port"), int):
                found[rank] = message["port"]
        return found

    def _observation(
        self, step: dict[str, Any], group: list[int], number: int | None, tasks: list[_Task]
    ) -> dict[str, Any]:
        silent = sorted({each.rank for each in tasks if each.silent} | self.members.lost.keys())
        silent = [rank for rank in silent if rank in group]
        self._named.update(silent)
        failed = [
            f"node {each.rank} {each.answer}" for each in tasks if isinstance(each.answer, str)
        ]
        seen: dict[str, Any] = {
            "probe": step["probe"],
            "scope": step["scope"],
            "nodes": group,
            "round": number,
            "arguments": step.get("arguments") or {},
            "values": None,
            "error": "; ".join(failed) or None,
            "silent": silent,
        }
        if not step.get("ranks"):
            if isinstance(tasks[0].answer, list):
                seen["values"], seen["error"] = tasks[0].answer[0]
            return seen
        ranks = [
            {
                "rank": position * self.processes + local,
                "node": each.rank,
                "local_rank": local,
                "values": values,
                "error": error,
            }
            for position, each in enumerate(tasks)
            for local, (values, error) in enumerate(
                each.answer if isinstance(each.answer, list) else []
            )
        ]
        seen["values"] = {"ranks": ranks}
        if seen["error"] is None:
            # Those that were stopped for another's failure say so; the failure comes first.
            errors = sorted(
                (each for each in ranks if each["error"]),
                key=lambda each: str(each["error"]).startswith("stopped, as "),
            )
            if errors:
                seen["error"] = f"rank {errors[0]['rank']}: {errors[0]['error']}"
        return seen

    def _name_lost(self) -> None:
        """Nodes that were lost while nothing was asked of them get an observation, too; so do those
        as which a second program wanted to join."""
        for rank, why in list(self.members.lost.items()):
            if rank not in self._named:
                self._named.add(rank)
                self._add_connection(rank, f"node {rank} {why}", [rank])
        while self.members.refused:
            rank, why = self.members.refused.popitem()
            self._add_connection(rank, why, [])

    def _add_connection(self, rank: int, error: str, silent: list[int]) -> None:
        self.observations.append(
            {
                "probe": "connection",
                "scope": "node",
                "nodes": [rank],
                "error": error,
                "silent": silent,
                "started_at": time.time(),
            }
        )


def _disjoint(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The first pairs that share no node."""
    taken: set[int] = set()
    found = []
    for pair in pairs:
        if taken.isdisjoint(pair):
            taken.update(pair)
            found.append(pair)
    return found


def _is_answer(ended: Any) -> bool:
    return (
        isinstance(ended, list)
        and len(ended) > 0
        and all(
            isinstance(each, list)
            and len(each) == 2
            and (each[0] is None or isinstance(each[0], dict))
            and (each[1] is None or isinstance(each[1], str))
            for each in ended
        )
    )


def _figure(observation: dict[str, Any], name: str | None) -> float | None:
    """The figure by which a pair is judged: that of its first rank."""
    ranks = (observation.get("values") or {}).get("ranks") or []
    values = ranks[0]["values"] if ranks and observation["error"] is None else None
    value = (values or {}).get(name)
    return float(value) if isinstance(value, (int, float)) else None
