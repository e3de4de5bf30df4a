"""What node 0 does beside its own probes: it waits for the other nodes, runs the schedule step by
step, and writes what was observed.

A node that does not join, does not answer in time or is lost is an observation too: the other nodes
go on.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .messages import NodeConnection
from .search import PairResult, next_round

FORMAT = 1
GRACE_SECONDS = 10.0
"""After a step's own limit until a node that has not answered counts as silent."""
_FIRST_RANKS_PORT = 1
"""Ports above the job's own, on which ranks of torch probes meet, one per pair."""


class Coordinator:
    """The nodes of a job as node 0 sees them, by rank."""

    def __init__(self, nodes: int, processes: int, listener: socket.socket) -> None:
        self.nodes, self.processes = nodes, processes
        self._listener = listener
        self._port = int(listener.getsockname()[1])
        self._connections: dict[int, NodeConnection] = {}
        self.identities: dict[int, dict[str, Any]] = {}
        self._answers: dict[int, queue.Queue[tuple[int, list[list[Any]] | str]]] = {}
        self._task_ids = iter(range(1, 1 << 30))
        self._changed = threading.Condition()
        self.observations: list[dict[str, Any]] = []

    def wait_for_nodes(self, seconds: float) -> list[int]:
        """Accept nodes until all are there or `seconds` have passed; returns the missing ranks."""
        threading.Thread(target=self._accept, daemon=True).start()
        with self._changed:
            self._changed.wait_for(lambda: len(self._connections) == self.nodes, seconds)
            return [rank for rank in range(self.nodes) if rank not in self._connections]

    def run(self, schedule: Sequence[dict[str, Any]], report: Callable[[str], None]) -> None:
        """Every step in order."""
        for step in schedule:
            report(f"{step['probe']} ({step['scope']})")
            getattr(self, f"_run_{step['scope']}")(step)

    def end(self, code: int) -> None:
        """Tell the nodes that the job is over."""
        for connection in list(self._connections.values()):
            with contextlib.suppress(OSError):
                connection.send({"end": code})

    # Scopes of steps.

    def _run_node(self, step: dict[str, Any]) -> None:
        """On each node by itself, all at the same time."""
        self._observe(step, [[rank] for rank in self._present()])

    def _run_all(self, step: dict[str, Any]) -> None:
        """On all nodes together."""
        self._observe(step, [self._present()])

    def _run_pairs(self, step: dict[str, Any]) -> None:
        """On pairs of nodes, in rounds, as the search for bad nodes asks for."""
        results: list[PairResult] = []
        at_least = (step.get("judge") or {}).get("at_least")
        figure = (step.get("judge") or {}).get("figure")
        racks = step.get("racks") or {}
        for number in range(3):
            pairs = next_round(self._present(), racks, results)
            if not pairs:
                return
            seen = self._observe(step, [list(pair) for pair in pairs], number)
            values = [_figure(each, figure) for each in seen]
            for pair, value in zip(pairs, values):
                passed = None if at_least is None or value is None else value >= at_least
                results.append(PairResult(pair, value, passed, number))

    # One step on groups of nodes at once.

    def _observe(
        self, step: dict[str, Any], groups: Sequence[list[int]], number: int | None = None
    ) -> list[dict[str, Any]]:
        """Run a step's probe on disjoint groups of nodes at the same time; one observation each."""
        began, clock = time.time(), time.monotonic()
        limit = float(step["seconds"])
        waiting: dict[int, tuple[int, int]] = {}
        answers: queue.Queue[tuple[int, list[list[Any]] | str]] = queue.Queue()
        ended: dict[int, list[list[Any]] | str] = {}
        for place, group in enumerate(groups):
            for position, rank in enumerate(group):
                task = next(self._task_ids)
                message = {
                    "task": task,
                    "probe": step["probe"],
                    "arguments": step.get("arguments") or {},
                    "seconds": limit,
                }
                if step.get("ranks"):
                    message["ranks"] = {
                        "first": position * self.processes,
                        "world": len(group) * self.processes,
                        "master_addr": self.identities[group[0]]["address"],
                        "master_port": self._port + _FIRST_RANKS_PORT + place,
                    }
                self._answers[task] = answers
                waiting[task] = (rank, place)
                try:
                    self._connections[rank].send(message)
                except OSError as error:
                    answers.put((task, f"is lost: {error}"))
        deadline = clock + limit + GRACE_SECONDS
        while len(ended) < len(waiting) and (left := deadline - time.monotonic()) > 0:
            try:
                task, answer = answers.get(timeout=left)
            except queue.Empty:
                break
            ended[task] = answer
        for task in waiting.keys() - ended.keys():
            ended[task] = f"did not answer within {limit + GRACE_SECONDS:.0f} s"
        for task in waiting:
            self._answers.pop(task, None)
        seen = [
            self._observation(
                step,
                group,
                number,
                {rank: ended[task] for task, (rank, at) in waiting.items() if at == place},
            )
            for place, group in enumerate(groups)
        ]
        for each in seen:
            each["started_at"], each["seconds"] = began, time.monotonic() - clock
        self.observations += seen
        return seen

    def _observation(
        self,
        step: dict[str, Any],
        group: list[int],
        number: int | None,
        ended: dict[int, list[list[Any]] | str],
    ) -> dict[str, Any]:
        lost = {rank: answer for rank, answer in ended.items() if isinstance(answer, str)}
        seen: dict[str, Any] = {
            "probe": step["probe"],
            "scope": step["scope"],
            "nodes": group,
            "round": number,
            "arguments": step.get("arguments") or {},
            "values": None,
            "error": None,
            "silent": sorted(lost),
        }
        if lost:
            seen["error"] = "; ".join(f"node {rank} {why}" for rank, why in sorted(lost.items()))
        if step.get("ranks"):
            ranks = []
            for position, rank in enumerate(group):
                answer = ended[rank]
                for local, (values, error) in enumerate([] if isinstance(answer, str) else answer):
                    ranks.append(
                        {
                            "rank": position * self.processes + local,
                            "node": rank,
                            "local_rank": local,
                            "values": values,
                            "error": error,
                        }
                    )
            seen["values"] = {"ranks": ranks}
            if seen["error"] is None:
                failed = next((each for each in ranks if each["error"]), None)
                seen["error"] = failed and f"rank {failed['rank']}: {failed['error']}"
        else:
            answer = ended[group[0]]
            if not isinstance(answer, str):
                seen["values"], seen["error"] = answer[0]
        return seen

    # Connections.

    def _present(self) -> list[int]:
        with self._changed:
            return sorted(self._connections)

    def _accept(self) -> None:
        while True:
            try:
                connected, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(
                target=self._serve, args=(NodeConnection(connected),), daemon=True
            ).start()

    def _serve(self, connection: NodeConnection) -> None:
        rank: int | None = None
        try:
            hello = connection.receive() or {}
            rank = hello.get("joins")
            with self._changed:
                if not isinstance(rank, int) or not 0 <= rank < self.nodes:
                    connection.close()
                    return
                if rank in self._connections:
                    connection.close()
                    return
                self._connections[rank] = connection
                self.identities[rank] = {
                    "rank": rank,
                    "name": str(hello.get("name")),
                    "address": connection.socket.getpeername()[0],
                }
                self._changed.notify_all()
            while (message := connection.receive()) is not None:
                answers = self._answers.get(message["task"])
                if answers is not None:
                    answers.put((message["task"], message["ended"]))
        except (OSError, ValueError, KeyError):
            pass
        with self._changed:
            if isinstance(rank, int) and self._connections.get(rank) is connection:
                del self._connections[rank]


def _figure(observation: dict[str, Any], name: str | None) -> float | None:
    """The figure by which a pair is judged: that of its first rank."""
    ranks = (observation.get("values") or {}).get("ranks") or []
    values = ranks[0]["values"] if ranks and observation["error"] is None else None
    value = (values or {}).get(name)
    return float(value) if isinstance(value, (int, float)) else None


def write_evidence(path: Path, evidence: dict[str, Any]) -> None:
    """Write the document in one piece: a reader sees all of it or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.part")
    partial.write_text(json.dumps(evidence, indent=1) + "\n", encoding="utf-8")
    os.replace(partial, path)
