"""Agent of every other node: joins the leader, follows its messages, and joins again after a lost
connection.

A follower that lost its leader ends its command, which could not be restarted in step with the
others, and tries to join for `join_seconds`: the leader may have been started again (respawn.py).
So does one that has not joined yet. Both exit at once if the leader or state.json reports that the
run is over. A follower that sees a newer epoch of another start of the run kills its command and
exits: the run continues elsewhere.
"""

from __future__ import annotations

import time
from typing import Any

from drillyard.supervise.launch_contract import EXIT_CANCELLED, EXIT_CHECKPOINTED, EXIT_NODE_LOST
from drillyard.supervise.sockets import wait_for

from .fence import Predecessors
from .job import SECONDS_AFTER_FAILURE
from .messages import StartMessage, parse_leave, parse_start, parse_stop
from .node_agent import AgentExit, NodeAgent
from .protocol import Connection, ConnectionLost, join
from .state_file import exit_code_of, is_cancelled, last_state

_SECONDS_BETWEEN_TRIES = 0.5
# Used if the job waits for no node: Slurm starts the first node's agent at about the same time as
# this one.
_SECONDS_FOR_LEADER = 600.0


class Follower(NodeAgent):
    def __post_init__(self) -> None:
        super().__post_init__()
        self._due: StartMessage | None = None
        self._state_before = last_state(self._directory)

    def run(self) -> int:
        with self._stop:
            try:
                while True:
                    connection, epoch = self._find_leader()
                    try:
                        self._belong_to(epoch, connection)
                        self._follow(connection)
                    except ConnectionLost as lost:
                        self._node.say(f"the leader on {self._node.address} is lost: {lost}")
                    finally:
                        connection.close()
                        self._due = None
                        self._end_command(SECONDS_AFTER_FAILURE)
            except AgentExit as left:
                self._lease.release()
                return left.code

    def _find_leader(self) -> tuple[Connection, int]:
        deadline = time.monotonic() + (self._job.join_seconds or _SECONDS_FOR_LEADER)
        last_words = ""
        silence = self._job.lease_seconds / 2
        described = {**self._start, "node": self._node.rank, "host": self._me.host}
        while True:
            try:
                return join(
                    self._node.address,
                    self._job.port,
                    self._secret,
                    described,
                    silence,
                    self._is_asked,
                )
            except ConnectionLost as error:
                words = (
                    f"node {self._node.rank} cannot join the leader on {self._node.address} yet:"
                    f" {error}"
                )
            if words != last_words:
                last_words = words
                self._node.say(words)
            if self._is_asked():
                # Nothing runs on this node, so nothing is lost.
                cancelled = is_cancelled(self._directory, self._start["submission"])
                raise AgentExit(EXIT_CANCELLED if cancelled else EXIT_CHECKPOINTED)
            self._require_directory()
            if time.monotonic() > deadline or self._fenced_for_good():
                raise AgentExit(EXIT_NODE_LOST)
            if (code := self._code_of_run()) is not None or 0 in self._allocation.ended():
                # srun does not restart an agent.
                raise AgentExit(EXIT_NODE_LOST if code is None else code)
            time.sleep(_SECONDS_BETWEEN_TRIES)

    def _is_asked(self) -> bool:
        self._stop.take()
        return self._stop.first is not None

    def _belong_to(self, epoch: int, connection: Connection) -> None:
        """Take this node's lease in an epoch, once an agent that had it before has ended. Raises
        ConnectionLost."""
        if self._lease.epoch != epoch:
            mine = self._epochs.lease(epoch, self._node.rank)
            earlier = Predecessors(lambda: [mine], self._job.lease_seconds)
            while earlier.waiting_for(time.monotonic()):
                wait_for([connection], 0.2)
                for message in connection.receive():
                    self._do(message)
                connection.beat()
        try:
            self._lease.claim(epoch)
        except OSError as error:
            time.sleep(_SECONDS_BETWEEN_TRIES)
            raise ConnectionLost(f"this node cannot take its place in the run: {error}") from None

    def _follow(self, connection: Connection) -> None:
        """Follow the leader's messages. Raises ConnectionLost, and AgentExit."""
        connection.send(ready=1)
        while True:
            wait_for([self._stop, connection], self._node.poll_seconds)
            for message in connection.receive():
                self._do(message)
            if self._due is not None and self._lease.fresh:
                start, self._due = self._due, None
                self._node.start(start)
            for number in self._stop.take():
                connection.send(asked={"signal": int(number), "insisted": self._stop.insisted})
            for report in self._node.tick():
                connection.send(exited=report)
            connection.beat()
            self._look_at_fence()

    def _do(self, message: dict[str, Any]) -> None:
        if "start" in message:
            self._due = parse_start(message["start"])
        elif "stop" in message:
            stop = parse_stop(message["stop"])
            if self._due is not None:
                # Its lease was too old to start anything, so there is nothing to stop.
                raise ConnectionLost("stopped before the command could be started")
            self._node.stop(stop)
        elif "leave" in message:
            raise AgentExit(parse_leave(message["leave"]))

    def _leave_to(self, newer_epoch: int) -> None:
        self._node.kill("the run was started again")
        raise ConnectionLost(f"the run was started again (epoch {newer_epoch})")

    def _code_of_run(self) -> int | None:
        """The run's exit code, where it ended while this node was not connected."""
        state = last_state(self._directory)
        # A state from before this agent's start may be that of an earlier start of the same name.
        return exit_code_of(state, self._start) if state != self._state_before else None

    def _fenced_for_good(self) -> bool:
        """Whether the newest epoch is of another start of the run; releases the lease then."""
        if self._lease.fenced_by is None:
            return False
        self._lease.release()
        newest = self._epochs.leader_of(self._epochs.newest())
        return bool(newest) and not self._start.items() <= newest.items()
