"""Agent of node 0: connects the nodes, starts attempts on all of them, and applies the restart
policy.

An attempt is the command started once on every node, on a rendezvous port that was never used
before. It ends when all commands have ended, by themselves or stopped. A node is lost when nothing
comes from its agent for half of `lease_seconds`. Only the counts outlive an attempt; they are in
state.json and so outlive the leader too.

One thread, one `poll`: `_turn` looks at everything once, and the steps of a run are loops over it.
"""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

from drillyard.supervise import restart_policy
from drillyard.supervise.cause import error_line
from drillyard.supervise.launch_contract import (
    EXIT_CHECKPOINTED,
    EXIT_FAILED,
    EXIT_NODE_LOST,
    FailureElsewhere,
)
from drillyard.supervise.restart_policy import (
    AttemptEnd,
    AttemptFailure,
    RestartDecision,
    RestartLimits,
)
from drillyard.supervise.sockets import free_port, wait_for
from drillyard.supervise.stop_requests import FORWARDED_AS, STOP_SIGNALS

from . import exit_report, state_file
from .exit_report import clean_exit_text, reason_with_node
from .fence import Predecessors
from .job import SECONDS_AFTER_FAILURE
from .members import Members, RemoteMember
from .messages import StartMessage, StopMessage
from .node_agent import AgentExit, NodeAgent
from .node_command import NodeCommand
from .protocol import NUM_PORTS, ConnectionLost

_TURN_SECONDS = 0.2
_SECONDS_FOR_LATE_SIGNALS = 1.0
_SECONDS_BETWEEN_LOOKS = 2.0
"""Between looks at the scheduler's log of this start, which is read as a whole. When one node's
agent has ended before it joined, others may end for the same reason before the next look."""
_CODES_OF_A_REQUEST = {EXIT_CHECKPOINTED, *(128 + int(number) for number in STOP_SIGNALS)}


class Leader(NodeAgent):
    def __post_init__(self) -> None:
        super().__post_init__()
        self._limits = RestartLimits(self._job.max_failures, self._job.join_seconds)
        hosts = self._allocation.hosts | {0: self._me.host}
        self._members = Members(
            self._job, {0: self._node}, hosts, self._start, self._secret, self._ask_to_stop
        )
        self._stop_sent = False
        self._ends: list[dict[str, Any]] = []
        self._first_end_at = 0.0
        self._participants: dict[int, NodeCommand | RemoteMember] = {}
        """The nodes of this attempt, or of the last one."""
        self._next_look_at_all = 0.0
        self._used_ports = set(range(self._job.port, self._job.port + NUM_PORTS))
        self._epoch = 0

    def run(self) -> int:
        with self._stop:
            before = self._take_over()
            try:
                code = self._write_end(self._make_attempts(before))
            except AgentExit as exit:
                # The state belongs to the new leader, or is gone.
                code = exit.code
            self._members.dismiss(code)
            self._lease.release()
            return code

    def _take_over(self) -> dict[str, Any]:
        """Take the next epoch, with the counts of an earlier leader of the submission; returns the
        state it left."""
        self._epoch = self._epochs.open(
            {**self._start, "leader": self._me.as_json(), "at": time.time()}
        )
        self._lease.claim(self._epoch)
        try:
            before = state_file.read_state(self._directory)
        except ValueError as error:
            self._node.say(f"state.json cannot be read ({error}): restarts are counted from 0")
            before = {}
        before = before if before.get("submission") == self._start["submission"] else {}
        self._counts = restart_policy.counts_in(before)
        of_job = ("run", "cluster", "platform", "nodes", "run_directory", "launch_directory")
        fields: dict[str, Any] = {
            **{name: getattr(self._job, name) for name in of_job},
            **self._start,
            "epoch": self._epoch,
            "agent": self._me.as_json(),
            "started_at": before.get("started_at"),
            "ended_at": None,
            "round": before.get("round"),
            **self._counts.as_fields(),
            "checkpoint": state_file.newest_checkpoint(self._job.checkpoints),
            "asked": None,
            "hosts": [self._me.host],
            "failure": before.get("failure"),
            "exit_code": None,
        }
        self._attempt = 0 if fields["round"] is None else int(fields["round"]) + 1
        self._state = state_file.StateFile(self._directory, fields, lambda: self._lease.superseded)
        self._state.enter("starting")
        return before

    def _count(self, decision: RestartDecision) -> None:
        self._counts = decision.counts
        self._state.fields.update(self._counts.as_fields())

    def _has_newer_checkpoint(self, before: object) -> bool | None:
        """Whether there is a newer checkpoint than `before`; None where checkpoints cannot be
        seen."""
        newest = state_file.newest_checkpoint(self._job.checkpoints)
        return None if self._job.checkpoints is None else newest is not None and newest != before

    def _make_attempts(self, before: dict[str, Any]) -> RestartDecision:
        if before and before.get("exit_code") is None:
            # The leader that left this state was killed, or its host is gone.
            host = str((before.get("hosts") or [""])[0])
            newer = self._has_newer_checkpoint(before.get("checkpoint"))
            asked = before.get("asked") is not None
            killed = restart_policy.leader_killed(host, asked, newer, self._counts, self._limits)
            self._count(killed)
            self._node.say(f"{killed.reason} (losses by host: {dict(self._counts.losses)})")
            if killed.what == restart_policy.LEAVE:
                return killed
        if self._job.nodes > 1:
            try:
                self._members.listen()
            except OSError as error:
                reason = f"node 0 cannot listen: {error}"
                return RestartDecision(restart_policy.LEAVE, EXIT_FAILED, reason, self._counts)
        self._wait_for_predecessors()
        while True:
            decision = self._gather() or self._make_attempt()
            self._count(decision)
            if decision.what != restart_policy.AGAIN:
                return decision
            failures, limit = self._counts.failures, self._job.max_failures
            counted = f"counted: {failures} of {limit}" if decision.counted else "not counted"
            when = f"; again in {decision.pause_seconds:.0f} s" if decision.pause_seconds else ""
            self._state.enter("restarting", f"{decision.reason} ({counted}){when}")
            self._node.say(f"attempt {self._attempt} ended: {decision.reason} ({counted}){when}")
            self._pause(decision.pause_seconds)
            self._attempt += 1

    def _pause(self, seconds: float) -> None:
        """Start nothing for `seconds`, or until a stop is requested."""
        deadline = time.monotonic() + seconds
        while self._stop.first is None and time.monotonic() < deadline:
            self._turn()

    def _wait_for_predecessors(self) -> None:
        earlier = Predecessors(
            lambda: self._epochs.leases_before(self._epoch), self._job.lease_seconds
        )
        while (waiting := earlier.waiting_for(time.monotonic())) and self._stop.first is None:
            reason = f"waits until an earlier start of this run has ended: {', '.join(waiting[:4])}"
            self._state.enter("starting", reason)
            self._turn()
        if not waiting:
            self._epochs.tidy(self._epoch)

    def _gather(self) -> RestartDecision | None:
        """Wait until all nodes have joined and are ready; a decision when they do not come or a
        stop is requested."""
        wait_seconds = self._job.join_seconds or self._job.start_seconds
        deadline = time.monotonic() + wait_seconds
        num_missing = self._job.nodes
        ended: dict[int, str] = {}
        next_look = 0.0
        while missing := [node for node in range(self._job.nodes) if not self._is_ready(node)]:
            self._turn()
            if self._stop.first is not None:
                break
            now = time.monotonic()
            if now >= next_look:
                next_look = now + _SECONDS_BETWEEN_LOOKS
                before = ended
                ended = {
                    node: why for node, why in self._allocation.ended().items() if node in missing
                }
                if before and ended:
                    return self._never_joined(ended)
            if len(missing) < num_missing and self._job.join_seconds <= 0:
                num_missing, deadline = len(missing), now + wait_seconds
            away = self._members.named(missing)
            if now > deadline:
                why = f"{restart_policy.names(away)} did not come within {wait_seconds:.0f} s"
                return restart_policy.never_joined(away, why, self._counts, self._limits)
            here = self._job.nodes - len(missing)
            state = "starting" if self._state.fields["started_at"] is None else "restarting"
            waits = f"waits for {restart_policy.names(away)}"
            self._state.enter(state, f"{here} of {self._job.nodes} nodes are here; {waits}")
        if self._stop.first is None:
            return None
        # Nothing runs, so nothing is lost.
        reason = f"stopped by {self._stop.first.name} before the attempt began"
        return RestartDecision(restart_policy.LEAVE, EXIT_CHECKPOINTED, reason, self._counts)

    def _never_joined(self, ended: dict[int, str]) -> RestartDecision:
        away, why = self._members.named(ended), next(iter(ended.values()))
        if self._participants:
            # The node had joined, and ended between two attempts.
            lost = AttemptEnd(codes={}, lost=away, cause_of_loss=why)
            return restart_policy.decide(lost, self._counts, self._limits)
        why = f"{restart_policy.names(away)} cannot start: {why}"
        return restart_policy.never_joined(away, why, self._counts, self._limits)

    def _is_ready(self, node: int) -> bool:
        member = self._members.here.get(node)
        return member is not None and not member.busy and (node != 0 or self._lease.fresh)

    def _make_attempt(self) -> RestartDecision:
        before = state_file.newest_checkpoint(self._job.checkpoints)
        start = StartMessage(self._epoch, self._attempt, free_port(self._used_ports))
        self._ends, self._stop_sent = [], False
        self._participants = dict(self._members.here)
        self._state.enter(
            "running",
            None,
            round=self._attempt,
            started_at=self._state.fields["started_at"] or time.time(),
            hosts=list(self._members.named(range(self._job.nodes)).values()),
            checkpoint=before,
        )
        for member in self._participants.values():
            member.start(start)
        self._watch()
        return restart_policy.decide(self._attempt_end(before), self._counts, self._limits)

    def _watch(self) -> None:
        """Wait until all commands of the attempt have ended or their nodes are lost; stop the rest
        after a failure."""
        while len(self._ends) + len(self._lost()) < self._job.nodes:
            self._turn()
            failed = any(not clean_exit_text(each["status"]) for each in self._ends)
            late = (
                bool(self._ends) and time.monotonic() >= self._first_end_at + self._job.stop_seconds
            )
            if self._stop_sent or not (failed or late or self._lost()):
                continue
            why = None
            if late and not failed:
                first, kind = self._ends[0]["node"], clean_exit_text(self._ends[0]["status"])
                why = (
                    f"still ran {self._job.stop_seconds:.0f} s after node {first} had ended with"
                    f" {kind}"
                )
            self._stop_members(
                StopMessage(signal.SIGTERM, SECONDS_AFTER_FAILURE, why, self._failure_elsewhere())
            )
        if any(each["status"] in _CODES_OF_A_REQUEST and not each["asked"] for each in self._ends):
            # Ranks may have been signalled by the scheduler themselves, a moment before the agents.
            self._pause(_SECONDS_FOR_LATE_SIGNALS)

    def _attempt_end(self, before: object) -> AttemptEnd:
        first = exit_report.first_cause(self._ends)
        lost = self._lost()
        if first is not None and first["status"] != EXIT_CHECKPOINTED and not lost:
            self._state.fields["failure"] = exit_report.failure_entry(first)
        return AttemptEnd(
            codes={each["node"]: each["status"] for each in self._ends},
            lost=self._members.named(lost),
            cause_of_loss=next(
                (why for node, why in self._allocation.ended().items() if node in lost), ""
            ),
            failure=None if first is None else self._failure_of(first),
            asked=self._asked_in_time(),
            completed=state_file.summary_completed(Path(self._job.run_directory)),
            newer_checkpoint=self._has_newer_checkpoint(before),
        )

    def _failure_of(self, report: dict[str, Any]) -> AttemptFailure:
        error, cause = error_line(report["lines"]), reason_with_node(report, self._job.nodes)
        return AttemptFailure(
            report["status"], report["step"], error, report["knows_step"], cause, report["final"]
        )

    def _asked_in_time(self) -> str | None:
        """Signal of a request to stop; None where the attempt had failed by itself before: then the
        failure counts."""
        if self._stop.first is None or (
            self._ends and self._stop.at > self._first_end_at + _SECONDS_FOR_LATE_SIGNALS
        ):
            return None
        return self._stop.first.name

    def _write_end(self, decision: RestartDecision) -> int:
        cancelled = state_file.is_cancelled(self._directory, self._start["submission"])
        end = state_file.final_fields(decision, cancelled, self._state.fields["failure"])
        self._state.enter(**end)
        code = int(end["exit_code"])
        self._node.say(f"{end['state']}: {decision.reason} (exit code {code})")
        return code

    def _turn(self) -> None:
        """Look at everything once; waits at most a fifth of a second for input."""
        readable = wait_for([self._stop, *self._members.sources], self._node.poll_seconds)
        if self._stop.take():
            self._act_on_request()
        self._members.admit(self._epoch)
        # One turn serves a thousand nodes that send at the same time.
        look_at_all = time.monotonic() >= self._next_look_at_all
        if look_at_all:
            self._next_look_at_all = time.monotonic() + _TURN_SECONDS
        for node, member in list(self._members.here.items()):
            if (
                not look_at_all
                and isinstance(member, RemoteMember)
                and member.connection.fileno() not in readable
            ):
                continue
            try:
                ends = member.tick()
            except ConnectionLost as lost:
                self._node.say(
                    f"{restart_policy.names(self._members.named([node]))} is lost: {lost}"
                )
                self._members.lose(node)
                continue
            if ends and self._participants.get(node) is member:
                self._first_end_at = self._first_end_at if self._ends else time.monotonic()
                self._ends += ends
        self._look_at_fence()
        self._state.save()

    def _lost(self) -> list[int]:
        """Nodes of this attempt whose agent was lost, also where it has joined again."""
        ended = {each["node"] for each in self._ends}
        return [
            node
            for node, member in self._participants.items()
            if node not in ended and self._members.here.get(node) is not member
        ]

    def _ask_to_stop(self, number: int, insisted: bool) -> None:
        """Handle a stop signal that a node's agent received."""
        self._stop.add(number, insisted)
        self._act_on_request()

    def _act_on_request(self) -> None:
        assert self._stop.first is not None
        if self._state.fields["asked"] is None:
            # A leader that is killed while it stops does not count as a lost node.
            self._state.enter(
                self._state.fields["state"],
                self._state.fields["reason"],
                asked=self._stop.first.name,
            )
        if not self._stop_sent:
            self._node.say(f"{self._stop.first.name}: the run stops")
            forwarded = FORWARDED_AS.get(self._stop.first, self._stop.first)
            self._stop_members(StopMessage(forwarded, self._job.stop_seconds))
        elif self._stop.insisted:
            self._stop_members(StopMessage(signal.SIGKILL, 0.0))

    def _failure_elsewhere(self) -> FailureElsewhere | None:
        """Reason for stopping nodes that are not at fault; None where no other has failed or was
        lost."""
        failed = [each for each in self._ends if not clean_exit_text(each["status"])]
        if (first := exit_report.first_cause(failed)) is not None:
            return FailureElsewhere(
                reason_with_node(first, self._job.nodes), first["rank"], first["status"]
            )
        if lost := self._lost():
            return FailureElsewhere(
                f"lost {restart_policy.names(self._members.named(lost))}", None, None
            )
        return None

    def _stop_members(self, stop: StopMessage) -> None:
        self._stop_sent = True
        for node, member in self._members.here.items():
            if self._participants.get(node) is member:
                member.stop(stop)

    def _leave_to(self, newer_epoch: int) -> None:
        self._node.say(
            f"the run was started elsewhere (epoch {newer_epoch}): everything here ends at once"
        )
        self._end_command(0.0)
        raise AgentExit(EXIT_NODE_LOST)
