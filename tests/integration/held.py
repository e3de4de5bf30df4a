"""A run that waits at named moments until the test that watches it has done its part, however fast
either of them is.

`python held.py DIRECTORY -- train run.yaml ...` is `drillyard train run.yaml ...`, but that a rank
which comes to a moment waits there for as long as DIRECTORY has a file of that name. It goes on
when the test removes the file, or when it is asked to stop: then it removes the file itself.
Moments are `attempt-R-...` with

    step-N        before step N of training (from 1)
    forward-N     before the Nth forward of this attempt's evaluations
    tokenising    with the first rows tokenised and no cache made yet, on the rank that tokenises
    manifest-N    in the save of step N with all shards durable, on rank 0

So a test may look, take its time and then strike: the run cannot have gone past the moment
meanwhile.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

_FORKED_START = "tests.integration.forked_start"


class Holds:
    """The test's side: the moments at which a run is held."""

    def __init__(self, directory: Path, *moments: str) -> None:
        self.directory = directory / f"holds-{time.monotonic_ns()}"
        self.directory.mkdir()
        for moment in moments:
            (self.directory / moment).touch()

    @property
    def program(self) -> list[str]:
        """What stands in place of `python -m drillyard`."""
        return [sys.executable, __file__, str(self.directory), "--"]

    def interpreter(self, path: Path) -> str:
        """Write a program that stands in place of `python` where a launcher starts `python -m
        drillyard`; its path."""
        path.write_text(f'#!/bin/sh\nshift 2\nexec {shlex.join(self.program)} "$@"\n')
        path.chmod(0o755)
        return str(path)

    def reached(self, moment: str, *ranks: int) -> bool:
        """Whether these ranks wait, or have waited, at a moment."""
        return all(_arrival(self.directory / moment, rank).exists() for rank in ranks)

    def release(self, moment: str) -> None:
        """Let the ranks go on there."""
        (self.directory / moment).unlink(missing_ok=True)


def _arrival(moment: Path, rank: int) -> Path:
    return moment.with_name(f"{moment.name}.rank-{rank}")


class Held:
    """A rank's side; `side` is its RankSide."""

    def __init__(self, directory: Path, side: Any) -> None:
        self._directory = directory
        self._side = side
        self._forwards = 0

    def arm(self) -> None:
        """Replace what leads to a moment by the same with a wait before it."""
        from drillyard.faults.injection_points import patch_function, step_of

        def before_step(train_step: Any, trainer: Any, step: int, *arguments: Any) -> Any:
            self.wait(f"step-{step + 1}")
            return train_step(trainer, step, *arguments)

        def before_manifest(write_manifest: Any, directory: Path, *arguments: Any) -> Any:
            self.wait(f"manifest-{step_of(directory)}")
            return write_manifest(directory, *arguments)

        def during_tokenising(
            prepare: Any, *arguments: Any, on_progress: Callable[..., None], **options: Any
        ) -> Any:
            def progress(*done: Any) -> None:
                on_progress(*done)
                self.wait("tokenising")

            return prepare(*arguments, on_progress=progress, **options)

        def before_forwards(beat_at_forwards: Any, model: Any, *arguments: Any) -> None:
            beat_at_forwards(model, *arguments)
            for module in (model.root, model.causal_lm):
                module.register_forward_pre_hook(self._before_forward, prepend=True)

        patch_function("drillyard.training.trainer", "Trainer.train_step", before_step)
        patch_function(
            "drillyard.training.checkpoint.dcp_storage", "write_manifest", before_manifest
        )
        patch_function("drillyard.training.run", "prepare", during_tokenising)
        patch_function("drillyard.training.run", "beat_at_forwards", before_forwards)

    def wait(self, moment: str) -> None:
        """Wait while this moment of this attempt is held."""
        file = self._directory / f"attempt-{self._side.attempt}-{moment}"
        if not file.exists():
            return
        _arrival(file, int(os.environ["RANK"])).touch()
        while file.exists():
            if self._side.received is not None:
                file.unlink(missing_ok=True)
            time.sleep(0.002)

    def _before_forward(self, module: Any, arguments: object) -> None:
        if not module.training:
            self._forwards += 1
            self.wait(f"forward-{self._forwards}")


def main(arguments: Sequence[str]) -> None:
    """Be a rank that waits, or the supervisor of such ranks."""
    directory, separator, *command = arguments
    assert separator == "--"
    if "RANK" in os.environ:
        _hold_this_rank(Path(directory))
    else:
        _start_ranks_through_here(directory)
        _fork_ranks_of_a_launch()
    from drillyard.cli.main import main as drillyard

    drillyard(command)


def _hold_this_rank(directory: Path) -> None:
    """Arm this rank once it hears signals, and no earlier: what is replaced imports torch."""
    from drillyard.supervise import rank_supervision

    attend = rank_supervision.RankSupervision

    def attend_and_arm(*arguments: Any, **options: Any) -> Any:
        side = attend(*arguments, **options)
        Held(directory, side).arm()
        return side

    rank_supervision.RankSupervision = attend_and_arm


def _start_ranks_through_here(directory: str) -> None:
    """Let the supervisor of this process start `held.py DIRECTORY -- train ...` instead of
    `drillyard train ...`."""
    from drillyard.supervise import supervisor

    start = supervisor.supervise_training

    def supervise_training(command: Sequence[str], *arguments: Any, **options: Any) -> int:
        python, dash_m, package, *rest = command
        assert (dash_m, package) == ("-m", "drillyard"), (
            f"the ranks' command has changed: {command}"
        )
        return start([python, __file__, directory, "--", *rest], *arguments, **options)

    supervisor.supervise_training = supervise_training


def _fork_ranks_of_a_launch() -> None:
    """Have the ranks of a supervisor that an agent has started be forks (forked_start.py): of each
    node one process imports, and the others, and those of its restarts, do not."""
    of_an_agent = "DRILLYARD_LAUNCH_ROUND" in os.environ and _FORKED_START not in sys.modules
    if of_an_agent and int(os.environ["NPROC_PER_NODE"]) > 1:
        sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
        from tests.integration.forked_start import COMPUTING, ForkedStarts

        del sys.path[0]
        ForkedStarts(COMPUTING).wanted = True


if __name__ == "__main__":
    main(sys.argv[1:])
