"""Kills `drillyard cluster up` and `down` at every step, and checks what the next command ends with.

A step is a request to the state's bucket, a change of the cloud or a call of a stage, over the real
Terraform, a provider of the tests and a bucket server on this machine (tests/integration/provision).
For each step: up killed there, then up: the same state as undisturbed; up killed there, then down:
nothing; down killed there, then down: nothing.

    python benchmarks/provision_kills.py [--every N]
"""  # noqa: E501

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.integration.provision.interruption import Steps
from tests.integration.provision.project import Project

# Long enough that a kill comes while several things are being made.
_SECONDS = 0.02


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--every", type=int, default=1, metavar="N", help="each N-th step only")
    every = parser.parse_args().every
    directory = Path(tempfile.mkdtemp(prefix="provision-kills-"))
    begun = time.monotonic()
    try:
        num_up, num_down = _count(directory)
        print(f"up has {num_up} steps, down {num_down}")
        failures: list[str] = []
        done: Counter[str] = Counter()
        cases = [
            *(("up, then up", step) for step in range(1, num_up + 1, every)),
            *(("up, then down", step) for step in range(1, num_up + 1, every)),
            *(("down, then down", step) for step in range(1, num_down + 1, every)),
        ]
        for name, step in cases:
            problem = _case(directory / f"{name[:4]}{len(failures)}-{done.total()}", name, step)
            done[name] += 1
            if problem:
                failures.append(f"{name}, killed at step {step}: {problem}")
                print(failures[-1], flush=True)
        for name, number in done.items():
            failed = sum(each.startswith(f"{name},") for each in failures)
            print(f"{name}: {number - failed} of {number} as they must be")
        print(f"{time.monotonic() - begun:.0f} s")
        return 1 if failures else 0
    finally:
        shutil.rmtree(directory)


def _count(directory: Path) -> tuple[int, int]:
    project = Project(directory / "undisturbed")
    project.cloud.seconds = _SECONDS
    steps = Steps(project)
    try:
        assert steps.run("up") == 0, steps.errors
        project.require_whole()
        num_up = steps.count
        assert steps.run("down") == 0, steps.errors
        project.require_nothing()
        return num_up, steps.count
    finally:
        project.close()


def _case(directory: Path, name: str, step: int) -> str:
    """What is wrong after the second command; empty: nothing."""
    killed, second = name.split(", then ")
    project = Project(directory)
    project.cloud.seconds = _SECONDS
    steps = Steps(project)
    try:
        if killed == "down" and steps.run("up") != 0:
            return steps.errors
        steps.run(killed, kill_at=step)
        if steps.run(second) != 0:
            return steps.errors
        if second == "up":
            project.require_whole()
        else:
            project.require_nothing()
        return ""
    except AssertionError as error:
        return f"not as it must be: {error}"
    finally:
        project.close()
        shutil.rmtree(directory)


if __name__ == "__main__":
    sys.exit(main())
