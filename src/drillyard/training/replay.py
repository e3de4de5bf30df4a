"""`--replay STEP`: do a step again from the checkpoint before it, and compare bits. What is asked, and what came out.

On the same layout, software and hardware a step repeats its loss and its gradient norm to the bit: nothing in a run
depends on time or chance (docs/architecture.md). So a step that comes out otherwise was computed wrongly, now or then:
memory, a GPU, or a link that changes bits in silence. Training does not notice that; doing a stretch of it again does,
at the price of that stretch, and replaying it on another host of the same kind says which of the two is at fault.

A replay is a run of its own in RUN_DIR/replays/step-N: it reads the run's config, data and checkpoint, and writes
nothing else there. This file needs no torch; the ranks' part is in replay_rank.py.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from drillyard.config import load_run_config
from drillyard.config.run import LoggingConfig, RunConfig
from drillyard.errors import UserError
from drillyard.telemetry.events import read_events
from drillyard.telemetry.jsonlines import decode, encode
from drillyard.telemetry.metrics import read_metrics
from drillyard.training.batch import order_of_step
from drillyard.training.checkpoint import CheckpointInfo, list_checkpoints
from drillyard.training.directory import SAVED_CONFIG

VERDICT = "verdict.json"
MUST_AGREE = ("torch", "transformers", "hardware", "threads")
"""What decides how a step is rounded, besides the config and the layout."""


@dataclass(frozen=True)
class ReplayPlan:
    """What is to be done again: from which checkpoints (newest first), on how many ranks, against which figures.

    expected: (loss, gradient norm) of the logged steps after the newest of them, by step (from 1). conditions: under
    what they were computed, by `MUST_AGREE`.
    """

    step: int
    run_directory: Path
    checkpoints: list[CheckpointInfo]
    world_size: int
    expected: dict[int, tuple[float | None, float | None]]
    conditions: dict[str, Any]
    config: RunConfig

    @property
    def ranks_in_words(self) -> str:
        return "1 rank" if self.world_size == 1 else f"{self.world_size} ranks"

    @property
    def directory(self) -> Path:
        """Where the replay leaves its logs and its verdict."""
        return self.run_directory / "replays" / f"step-{self.step:08d}"


@dataclass(frozen=True)
class Difference:
    """One step that came out otherwise: what was logged, and what it is now."""

    step: int
    metric: str
    logged: float | None
    replayed: float


@dataclass(frozen=True)
class Verdict:
    """How a replay ended: the steps compared and those that differ, in order."""

    step: int
    checkpoint: str
    compared: list[int]
    differences: list[Difference]

    @property
    def equal(self) -> bool:
        return not self.differences

    def write(self, directory: Path) -> None:
        """Leave the verdict for whoever started the ranks."""
        line = encode({"version": 1, "equal": self.equal, **asdict(self)})
        (directory / VERDICT).write_text(line + "\n", encoding="utf-8")

    def in_words(self) -> str:
        """The verdict in a few lines for people."""
        where = f"from {self.checkpoint}"
        if self.equal:
            return (
                f"equal: loss and gradient norm of {_steps(self.compared)} are the same to the bit, {where}\n"
                "The stretch was computed rightly, both times (or wrongly in the same way, as a bug would)."
            )
        first = self.differences[0]
        differing = sorted({difference.step for difference in self.differences})
        lines = [f"different: {len(differing)} of {len(self.compared)} logged steps, {where}"]
        for difference in (d for d in self.differences if d.step == first.step):
            lines.append(
                f"  step {difference.step}, {difference.metric}: {difference.logged!r} was logged, "
                f"{difference.replayed!r} is computed now ({_by(difference)})"
            )
        lines.append(
            f"Step {first.step} or one since the logged step before it was computed wrongly, now or then. Replay it "
            "again, on another host of the same kind: a host that disagrees with itself or with others is at fault."
        )
        return "\n".join(lines)


def read_verdict(directory: Path) -> Verdict:
    """The verdict that the ranks left."""
    content = decode((directory / VERDICT).read_bytes())
    assert content is not None, directory
    differences = [Difference(**difference) for difference in content["differences"]]
    return Verdict(content["step"], content["checkpoint"], content["compared"], differences)


def compare(
    expected: Mapping[int, tuple[float | None, float | None]], found: Mapping[int, Sequence[float]]
) -> list[Difference]:
    """Where bits differ; `repr` tells equal bits apart from equal-looking ones, and nan from a number."""
    return [
        Difference(step, metric, logged, now)
        for step in sorted(found)
        for metric, logged, now in zip(("loss", "grad_norm"), expected[step], found[step], strict=True)
        if repr(logged) != repr(now)
    ]


def plan_replay(run_directory: Path, step: int) -> ReplayPlan:
    """What doing `step` (from 1) again takes. UserError when it cannot be done, or would prove nothing."""
    if not (run_directory / SAVED_CONFIG).is_file():
        raise UserError(f"{run_directory}: holds no run (no {SAVED_CONFIG}): nothing can be replayed")
    logged = {record["step"]: record for record in read_metrics(run_directory)}
    if step not in logged:
        raise UserError(f"--replay {step}: {_not_logged(step, sorted(logged))}")
    complete = [info for info in list_checkpoints(run_directory) if info.complete]
    earlier = [info for info in reversed(complete) if info.step < step]
    if not earlier:
        kept = ", ".join(str(info.step) for info in complete) or "none"
        raise UserError(
            f"--replay {step}: no checkpoint before this step is kept (there are: {kept}); replay a step after the "
            "first of them, or keep more (checkpoint.keep)"
        )
    order = order_of_step(run_directory, step)
    stretch = {number: record for number, record in logged.items() if earlier[0].step < number <= step}
    ranks = {record["num_gpus"] for record in stretch.values()}
    if len(ranks) > 1:
        raise UserError(
            f"--replay {step}: the steps after checkpoint {earlier[0].step} were done on "
            f"{' and '.join(map(str, sorted(ranks)))} ranks in turn: no one layout repeats them to the bit"
        )
    return ReplayPlan(
        step,
        run_directory,
        earlier,
        order["world_size"],
        {number: (record["loss"], record["grad_norm"]) for number, record in logged.items() if number <= step},
        {"hardware": order["hardware"], **_round_of(run_directory, order)},
        _config_of(run_directory, order),
    )


def require_same_conditions(plan: ReplayPlan, here: Mapping[str, Any]) -> None:
    """Raise UserError where other software or hardware computes: there bits may differ without a fault."""
    other = [
        f"{name} {plan.conditions[name]} then, {here[name]} here"
        for name in MUST_AGREE
        if plan.conditions.get(name) != here[name]
    ]
    if other:
        raise UserError(
            f"--replay {plan.step}: the run was computed under other conditions ({'; '.join(other)}), which round "
            "otherwise: a difference would prove nothing. Replay it where they are the same"
        )


def clear(plan: ReplayPlan) -> None:
    """Remove what an earlier replay of this step left."""
    for path in plan.directory.iterdir() if plan.directory.is_dir() else ():
        if path.name == "logs":
            continue  # held by the lock of this replay
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _config_of(run_directory: Path, order: Mapping[str, Any]) -> RunConfig:
    """The run's config with the layout of the round that did the step; trackers stay out of it."""
    config = load_run_config(run_directory / SAVED_CONFIG, resolve_environment=False)
    training = {
        "micro_batch_size": order["micro_batch_size"],
        "gradient_accumulation": order["gradient_accumulation"],
        "global_batch_size": order["global_batch_size"],
    }
    return config.model_copy(
        update={
            "training": config.training.model_copy(update=training),
            "evaluation": config.evaluation.model_copy(update={"metrics": ["loss"]}),
            "logging": LoggingConfig(every_steps=config.logging.every_steps, tensorboard=False),
        }
    )


def _round_of(run_directory: Path, order: Mapping[str, Any]) -> dict[str, Any]:
    """What the round of this `order` said of itself when it began."""
    rounds = [e for e in read_events(run_directory) if e["event"] == "round_start" and e["time"] <= order["time"]]
    return {name: rounds[-1].get(name) for name in MUST_AGREE if name != "hardware"} if rounds else {}


def _not_logged(step: int, logged: list[int]) -> str:
    if not logged:
        return "the run has logged no step yet"
    nearest = sorted(sorted(logged, key=lambda other: (abs(other - step), other))[:2])
    near = " and ".join(map(str, nearest))
    return f"this step was not logged, so there are no bits to compare; the nearest that were are {near}"


def _steps(steps: list[int]) -> str:
    return f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)} logged steps ({steps[0]} to {steps[-1]})"


def _by(difference: Difference) -> str:
    logged, now = difference.logged, difference.replayed
    if logged is None or not (math.isfinite(logged) and math.isfinite(now)):
        return "not finite"
    return f"by {abs(now - logged):.3g}, relative {abs(now - logged) / max(abs(now), abs(logged)):.3g}"
