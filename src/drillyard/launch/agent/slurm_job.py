"""The verb `slurm-job`: one start of a Slurm job on its first node, from srun to what follows.

The job script (launch/slurm/job.sh) starts it again where it is killed; `record` names its srun. A
requeue's reason is in the job's comment, which can be read without the storage. `scontrol requeue`
also revives a cancelled job: PreemptTime and Reason=TimeLimit mark one that continues.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import time
from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from drillyard.supervise import launch_contract as codes
from drillyard.supervise.process_identity import process_of, running_process
from drillyard.supervise.restart_policy import FollowUp, LeaderEnd, follow_up

from .scheduler_env import leader_end
from .state_file import exit_code_of, forget_secrets, last_state, read_json_object, replace_file

_SIGNALS = {signal.SIGUSR1, signal.SIGTERM, signal.SIGCHLD}
"""Blocked, and taken one by one: none ends this program, and none is lost."""
_NUM_REQUESTS, _REQUEST_PAUSE_SECONDS = 10, 30.0
"""Of a requeue: the controller may be away for a while."""


def run(options: Namespace) -> int:
    """Run this start; returns the job's exit code."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    start = _JobStart(options)
    if options.failed:
        return start.end(FollowUp(options.failed[1], int(options.failed[0]) or codes.EXIT_FAILED))
    try:
        code = start.run()
    except OSError as error:
        code = start.end(FollowUp(f"the job's program cannot go on: {error}"))
    with contextlib.suppress(OSError):
        start.record.unlink()
        if start.script == os.getppid():
            replace_file(start.record, f"{code}\n")
    return code


class _JobStart:
    def __init__(self, options: Namespace) -> None:
        self._options = options
        self._start = {"submission": options.submission, "attempt": options.attempt}
        self._job, self._attempt = str(options.submission), int(options.attempt)
        self._heard = set(options.heard)
        self._directory = Path(options.launch_directory)
        self._log = self._directory / f"slurm-{self._job}.log"
        self.record = self._directory / f"srun-{self._job}-{self._attempt}"
        self.script = os.getppid()
        self._often = f"queued again {options.max_requeues} times before (slurm.max_requeues)"

    def run(self) -> int:
        known = read_json_object(self.record)
        before, child = process_of(known.get("srun")), None
        nodes = os.environ["SLURM_JOB_NODELIST"]
        hosts = (_ask("scontrol", "show", "hostnames", nodes) or nodes).split()
        if before is None:
            if self._attempt > self._options.max_requeues:
                return self.end(FollowUp(f"lost capacity: {self._often}"))
            if self._attempt:
                # Slurm itself may have queued this start: the last reason does not apply to it.
                self._note("")
            (self._directory / "ended.json").unlink(missing_ok=True)
            known = {"begin": self._log.stat().st_size}
            child = self._start_agents(hosts, known["begin"])
            known["srun"] = running_process(child.pid).as_json()
            with contextlib.suppress(OSError):
                replace_file(self.record, json.dumps(known) + "\n")
        while child.poll() is None if child else before is not None and before.alive:
            # Agents take a second request, some time after the first, for an order to end at once.
            if "USR1" in self._heard and not known.get("asked", self._state().get("asked")):
                self._say("the time limit is near: the run saves and is queued again")
                known["asked"] = _ask("scancel", "--signal=TERM", self._job) is not None
            if (heard := signal.sigtimedwait(_SIGNALS, 1.0)) is not None:
                self._heard.add(signal.Signals(heard.si_signo).name[3:])
        state = self._state()
        end = LeaderEnd(hosts[0], exit_code_of(state, {}))
        if end.code is None:
            # Only srun tells of an agent that could not record its end.
            printed = self._log.read_bytes()[known["begin"] :].decode(errors="replace")
            end = leader_end(printed, child.returncode if child else -signal.SIGKILL, hosts[0])
        return self._act(follow_up(state, end, "USR1" in self._heard))

    def _state(self) -> dict[str, Any]:
        """state.json; empty where no leader has begun in this start."""
        state = last_state(self._directory)
        return state if self._start.items() <= state.items() else {}

    def _start_agents(self, hosts: Sequence[str], begin: int) -> subprocess.Popen[bytes]:
        leader = hosts[0]
        try:
            socket.getaddrinfo(leader, None)
        except OSError:
            leader = self._slurm_has("NodeAddr", "node", leader)
        self._say(f"on {os.environ['SLURM_JOB_NODELIST']}, led by {leader}")
        # All cores of the smallest node. Slurm writes 72, 72, 36 as `72(x2),36`.
        cores = os.environ.get("SLURM_CPUS_PER_TASK") or os.environ["SLURM_JOB_CPUS_PER_NODE"]
        cpus = min(int(each.partition("(")[0]) for each in cores.split(","))
        srun, *words = self._options.srun
        argv = [srun, f"--cpus-per-task={cpus}", *words, f"{self._directory}/agent", "run"]
        argv += ["--quiet", "--job", f"{self._directory}/job.json", "--leader", leader]
        argv += [word for name, value in self._start.items() for word in (f"--{name}", value)]
        argv += ["--hosts", ",".join(hosts), "--srun-log", str(self._log), str(begin)]
        unblock = partial(signal.pthread_sigmask, signal.SIG_UNBLOCK, _SIGNALS)
        return subprocess.Popen(argv, stdin=subprocess.DEVNULL, preexec_fn=unblock)

    def _act(self, after: FollowUp) -> int:
        if os.getppid() != self.script:
            # Slurm ends the job as failed, where it does not end this process first.
            self._say(f"{after.reason}; the job script was killed")
            return codes.EXIT_FAILED
        if after.again and not self._is_newest():
            self._say(f"{after.reason}; Slurm itself has queued it again")
            return codes.EXIT_DONE
        if after.again and self._was_cancelled():
            after = FollowUp("cancelled", codes.EXIT_CANCELLED)
        elif after.code == codes.EXIT_CANCELLED:
            # So that the job does not count as failed in Slurm.
            _ask("scancel", self._job)
        elif after.unled and self._unled_starts() > self._options.max_failures:
            after = FollowUp(f"no agent can lead the run, last on {after.unled}")
        elif after.again and self._attempt >= self._options.max_requeues:
            after = FollowUp(f"{after.reason}; {self._often}")
        elif after.again:
            if self._queue_again(after.reason, ",".join(after.without)):
                return codes.EXIT_DONE
            after = FollowUp(f"{after.reason}; scontrol requeue {self._job} failed")
        return self.end(after)

    def end(self, after: FollowUp) -> int:
        """Record the end, for `drillyard runs` on clusters without accounts; returns its code."""
        named = {codes.EXIT_DONE: "succeeded", codes.EXIT_CANCELLED: "cancelled"}
        end = {**self._start, "code": after.code, "state": named.get(after.code, "failed")}
        end |= {"reason": after.reason, "at": round(time.time())}
        self._say(f"{end['state']}: {after.reason} (exit code {after.code})")
        if self._is_newest():
            forget_secrets(self._directory)
            with contextlib.suppress(OSError):
                replace_file(self._directory / "ended.json", json.dumps(end) + "\n")
        return after.code

    def _queue_again(self, reason: str, without: str) -> bool:
        exclude, said = "", reason
        if without:
            before = self._slurm_has("ExcNodeList").replace("(null)", "")
            exclude = f"{without},{before}".strip(",")
            said = f"{reason}; from now on without {without}"
            script = str(self._directory / "job.sbatch")
            if _ask("sbatch", "--test-only", f"--exclude={exclude}", script) is None:
                exclude, said = "", f"{reason}; Slurm has no other node in place of {without}"
        self._say(f"{said}; is queued again")
        for _ in range(_NUM_REQUESTS):
            # Write the reason first: a waiting job never shows that of an earlier start.
            self._note(said)
            if _ask("scontrol", "requeue", self._job) is not None:
                # Slurm changes the excluded nodes of waiting jobs only. This start is still among
                # the job's processes, so the next one cannot begin before the change.
                update = ("scontrol", "update", f"JobId={self._job}", f"ExcNodeList={exclude}")
                if exclude and _ask(*update) is None:
                    self._note(f"{reason}; Slurm did not exclude {without}")
                return True
            time.sleep(_REQUEST_PAUSE_SECONDS)
        return False

    def _is_newest(self) -> bool:
        """Whether Slurm has no newer start: an older one may run on, on a node that Slurm lost."""
        return self._slurm_has("Restarts") in ("", str(self._attempt))

    def _was_cancelled(self) -> bool:
        """Whether Slurm ends the job for good."""
        return (
            "TERM" in self._heard
            and (_ask("squeue", "-h", "-j", self._job, "-o", "%T") or "").strip() != "RUNNING"
            and self._slurm_has("Reason") != "TimeLimit"
            and self._slurm_has("PreemptTime") == "None"
        )

    def _unled_starts(self) -> int:
        with open(self._directory / f"unled-{self._job}", "a+", encoding="utf-8") as file:
            file.write(f"{self._attempt}\n")
            file.seek(0)
            return len(set(file))

    def _slurm_has(self, field: str, kind: str = "job", name: str = "") -> str:
        """A field of this job, or of something else; empty where Slurm does not say."""
        shown = _ask("scontrol", "show", kind, "-o", name or self._job) or ""
        return next(iter(re.findall(rf"(?:^|\s){field}=(\S*)", shown)), "")

    def _note(self, reason: str) -> None:
        said = re.sub(r"[|\n]", " ", reason)[:500]
        _ask("scontrol", "update", f"JobId={self._job}", f"Comment={self._options.handle} {said}")

    def _say(self, text: str) -> None:
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        with contextlib.suppress(OSError):
            print(f"=== {at} job {self._job}, start {self._attempt}: {text}", flush=True)


def _ask(*argv: str) -> str | None:
    """What a program of Slurm prints; None where it fails, or is not on this node."""
    quiet = subprocess.DEVNULL if argv[0] == "sbatch" else None
    try:
        done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=quiet, check=False)
    except OSError:
        return None
    return done.stdout.decode(errors="replace") if done.returncode == 0 else None
