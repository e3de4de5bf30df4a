"""Ends `drillyard cluster up` and `down` at every step, and checks what the next command ends with.

A step is a request to the state's bucket or a change of the cloud, over the real Terraform, a
provider of the tests and a bucket server on this machine (tests/integration/provision). Commands
are killed at each step (SIGKILL), fail at each resource, and are met by a second `up` at each step.
After the next `up` the cluster is whole, with nothing twice; after the next `down` nothing is left:
no object, no bucket, no file on this machine.

    python benchmarks/provision_kills.py [--every N] [--part I/N]
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.integration.provision.fake_cloud import Fault
from tests.integration.provision.interruption import Steps
from tests.integration.provision.project import Project

# Long enough that a kill comes while several things are being made.
_SECONDS = 0.02
_LOCKED = "the state is locked by"
_KILLED, _FAILED, _MET = "killed", "failed", "met by a second one"


@dataclass(frozen=True)
class Case:
    """`verb` is ended by `how` at `where`, a step or a change of the cloud; then comes `second`."""

    verb: str
    how: str
    where: int | str
    second: str

    @property
    def kind(self) -> str:
        return f"{self.verb} {self.how}, then {self.second}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--every", type=int, default=1, metavar="N", help="each N-th step only")
    parser.add_argument("--part", default="1/1", metavar="I/N", help="the I-th of N equal parts")
    given = parser.parse_args()
    part, parts = map(int, given.part.split("/"))
    directory = Path(tempfile.mkdtemp(prefix="provision-kills-"))
    begun = time.monotonic()
    failures: list[str] = []
    done: Counter[str] = Counter()
    try:
        cases = _cases(directory / "undisturbed", given.every)[part - 1 :: parts]
        for case in cases:
            problem = _problem(directory / str(done.total()), case)
            done[case.kind] += 1
            if problem:
                failures.append(case.kind)
                print(f"{case.kind}, at {case.where}: {problem}", flush=True)
    finally:
        for kind, number in done.items():
            print(f"{kind}: {number - failures.count(kind)} of {number} as they must be")
        print(f"{time.monotonic() - begun:.0f} s")
        shutil.rmtree(directory)
    return 1 if failures else 0


def _cases(directory: Path, every: int) -> list[Case]:
    """All cases, by the steps and changes of a life that nothing disturbs."""
    project = Project(directory)
    project.cloud.seconds = _SECONDS
    steps = Steps(project)
    try:
        assert steps.run("up") == 0, steps.errors
        project.require_whole()
        num_up, created = steps.count, list(dict.fromkeys(project.cloud.log))
        before = len(project.cloud.log)
        assert steps.run("down") == 0, steps.errors
        project.require_nothing()
        num_down, deleted = steps.count, list(dict.fromkeys(project.cloud.log[before:]))
    finally:
        project.close()
    print(
        f"up has {num_up} steps and {len(created)} changes, down {num_down} and {len(deleted)}",
        flush=True,
    )
    up, down = range(1, num_up + 1, every), range(1, num_down + 1, every)
    return [
        *(Case("up", _KILLED, step, "up") for step in up),
        *(Case("up", _KILLED, step, "down") for step in up),
        *(Case("down", _KILLED, step, "down") for step in down),
        *(Case("up", _FAILED, change, "up") for change in created[::every]),
        *(Case("up", _FAILED, change, "down") for change in created[::every]),
        *(Case("down", _FAILED, change, "down") for change in deleted[::every]),
        *(Case("up", _MET, step, "nothing") for step in up),
    ]


def _problem(directory: Path, case: Case) -> str:
    """What is wrong after the second command; empty: nothing."""
    project = Project(directory)
    project.cloud.seconds = _SECONDS
    steps = Steps(project)
    try:
        if case.verb == "down" and steps.run("up") != 0:
            return steps.errors
        if case.how == _KILLED:
            assert isinstance(case.where, int)
            # A few steps come in another order, and fewer of them, each time: one may end first.
            ended = steps.run(case.verb, kill_at=case.where)
            assert ended == -signal.SIGKILL or steps.count < case.where, steps.errors
        elif case.how == _FAILED:
            project.cloud.faults[str(case.where)] = Fault("googleapi: Error 400: Invalid value")
            assert steps.run(case.verb) == 2, steps.errors
        else:
            return _met(project, steps, case.where)
        if steps.run(case.second) != 0:
            return steps.errors
        if case.second == "up":
            project.require_whole()
        else:
            project.require_nothing()
        return ""
    except AssertionError as error:
        return f"not as it must be: {error}"
    finally:
        project.close()
        shutil.rmtree(directory)


def _met(project: Project, steps: Steps, where: int | str) -> str:
    """What is wrong where a second `up` begins at a step of the first: one works, and the other is
    refused, or finds the cluster made."""
    second: list[int | None] = []

    def begin() -> None:
        while steps.count < int(where) and not ended.is_set():
            time.sleep(0.001)
        command = project.start("up", "--yes")
        said = command.communicate(timeout=600)[1]
        refused = _LOCKED in said
        second.append(command.returncode if refused == (command.returncode == 2) else None)

    ended = threading.Event()
    thread = threading.Thread(target=begin)
    thread.start()
    first = steps.run("up")
    ended.set()
    thread.join()
    if first not in (0, 2) or second[0] not in (0, 2) or 0 not in (first, second[0]):
        return f"exit codes {first} and {second[0]}: {steps.errors}"
    if first == 2 and _LOCKED not in steps.errors:
        return steps.errors
    project.require_whole()
    return ""


if __name__ == "__main__":
    sys.exit(main())
