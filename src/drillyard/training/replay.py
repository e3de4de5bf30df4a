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
from itertools import pairwise
from pathlib import Path
from typing import Any

from drillyard.config import load_run_config
from drillyard.config.run import LoggingConfig, RunConfig
from drillyard.config.run_identity import with_recorded_settings
from drillyard.errors import UserError
from drillyard.telemetry.events import read_events
from drillyard.telemetry.jsonlines import decode, encode, read_records
from drillyard.telemetry.metrics import METRICS_FILE
from drillyard.training.checkpoint import CheckpointInfo, list_checkpoints
from drillyard.training.run_directory import SAVED_CONFIG
from drillyard.training.step_history import AttemptSteps, attempts_between, events_until_step, steps_by_attempt

VERDICT = "verdict.json"
_LAYOUT = ("world_size", "micro_batch_size", "gradient_accumulation", "global_batch_size")


@dataclass(frozen=True)
class ReplayPlan:
    """What is to be done again: from which checkpoints (newest first), on how many ranks, against which figures.

    expected: (loss, gradient norm) of the logged steps up to this one, by step (from 1). numerics: under what they were
    computed (numerics.py). config: the run's, with the layout and the settings of the start that did the step.
    """

    step: int
    run_directory: Path
    checkpoints: list[CheckpointInfo]
    world_size: int
    expected: dict[int, tuple[float | None, float | None]]
    numerics: dict[str, Any]
    config: RunConfig

    @property
    def ranks_in_words(self) -> str:
        return "1 rank" if self.world_size == 1 else f"{self.world_size} ranks"

    @property
    def directory(self) -> Path:
        """Where the replay leaves its logs and its verdict."""
        return self.run_directory / "replays" / f"step-{self.step:08d}"


@dataclass(frozen=True)
class BitDifference:
    """One step that came out otherwise: what was logged, and what it is now."""

    step: int
    metric: str
    logged: float | None
    replayed: float


@dataclass(frozen=True)
class ReplayVerdict:
    """How a replay ended: the steps compared and those that differ, in order."""

    step: int
    checkpoint: str
    compared: list[int]
    differences: list[BitDifference]

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


def read_verdict(directory: Path) -> ReplayVerdict:
    """The verdict that the ranks left."""
    content = decode((directory / VERDICT).read_bytes())
    assert content is not None, directory
    differences = [BitDifference(**difference) for difference in content["differences"]]
    return ReplayVerdict(content["step"], content["checkpoint"], content["compared"], differences)


def compare(
    expected: Mapping[int, tuple[float | None, float | None]], found: Mapping[int, Sequence[float]]
) -> list[BitDifference]:
    """Where bits differ; `repr` tells equal bits apart from equal-looking ones, and nan from a number."""
    return [
        BitDifference(step, metric, logged, now)
        for step in sorted(found)
        for metric, logged, now in zip(("loss", "grad_norm"), expected[step], found[step], strict=True)
        if repr(logged) != repr(now)
    ]


def plan_replay(run_directory: Path, step: int) -> ReplayPlan:
    """What doing `step` (from 1) again takes. UserError when it cannot be done, or would prove nothing."""
    if not (run_directory / SAVED_CONFIG).is_file():
        raise UserError(f"{run_directory}: holds no run (no {SAVED_CONFIG}): nothing can be replayed")
    expected = _logged_until(run_directory, step)
    events = read_events(run_directory)
    so_far = _until_logged(events, step)
    begun = {event["step"]: index for index, event in enumerate(events) if event["event"] == "checkpoint_begin"}
    complete = [info for info in list_checkpoints(run_directory) if info.complete]
    # One that was saved when the step had been logged may be of a later start, which did the steps before it otherwise.
    earlier = [info for info in reversed(complete) if info.step < step and begun.get(info.step, -1) < len(so_far)]
    if not earlier:
        kept = ", ".join(str(info.step) for info in complete) or "none"
        raise UserError(
            f"--replay {step}: no checkpoint before this step is kept (there are: {kept}); replay a step after the "
            "first of them, or keep more (checkpoint.keep)"
        )
    chain = steps_by_attempt(so_far)
    _require_one_way(step, earlier[0].step, attempts_between(chain, earlier[0].step, step))
    order = attempts_between(chain, earlier[0].step, step)[-1].order
    if "numerics" not in order:
        raise UserError(
            f"--replay {step}: the run did not record how its steps were rounded (another version of Drillyard wrote "
            "it), so a difference would prove nothing"
        )
    return ReplayPlan(
        step,
        run_directory,
        [info for info in earlier if not _ways(attempts_between(chain, info.step, step))],
        order["world_size"],
        expected,
        dict(order["numerics"]),
        _config_of(run_directory, order),
    )


def _logged_until(run_directory: Path, step: int) -> dict[int, tuple[float | None, float | None]]:
    """(loss, gradient norm) of the steps up to `step`, as logged when it was done last. UserError when it was not.

    By the order of the lines: clocks are set back, and steps are done again on another layout later.
    """
    records = [record for record in read_records(run_directory / METRICS_FILE) if isinstance(record.get("step"), int)]
    places = [place for place, record in enumerate(records) if record["step"] == step]
    if not places:
        raise UserError(f"--replay {step}: {_not_logged(step, sorted({record['step'] for record in records}))}")
    so_far = records[: places[-1] + 1]
    return {record["step"]: (record["loss"], record["grad_norm"]) for record in so_far if record["step"] <= step}


def _until_logged(events: Sequence[Mapping[str, Any]], step: int) -> Sequence[Mapping[str, Any]]:
    """The events up to where `step` was logged last."""
    logged = [index for index, event in enumerate(events) if event["event"] == "step" and event["step"] == step]
    return events[: logged[-1] + 1] if logged else events_until_step(events, step)


def _require_one_way(step: int, first: int, chain: Sequence[AttemptSteps]) -> None:
    """Raise UserError where the steps of a stretch after `first` were computed in more than one way."""
    ways = _ways(chain)
    if ways:
        starts = " and ".join(str(stretch.after + 1) for stretch in chain[1:])
        raise UserError(
            f"--replay {step}: the steps after checkpoint {first} were computed in more than one way (the run was "
            f"started again at step {starts}: {'; '.join(ways)}), so no one start repeats them to the bit. Replay a "
            "step between two such starts"
        )


def _ways(chain: Sequence[AttemptSteps]) -> list[str]:
    """What differs between the starts of a stretch: `training.compile False, then True`."""
    return [
        f"{name} {old}, then {new}"
        for one, other in pairwise(chain)
        for name, old, new in _differing(_all_of(one.order), _all_of(other.order))
    ]


def _all_of(order: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that an `order` says about how steps are computed."""
    named = {name: order[name] for name in (*_LAYOUT, "total_steps") if name in order}
    return named | dict(order.get("settings", {})) | _flat(order.get("numerics", {}))


def _flat(numerics: Mapping[str, Any]) -> dict[str, Any]:
    return {**numerics.get("settings", {}), **numerics.get("conditions", {})}


def _differing(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    names = dict.fromkeys([*old, *new])
    absent = "not set"
    return [
        (name, old.get(name, absent), new.get(name, absent))
        for name in names
        if old.get(name, absent) != new.get(name, absent)
    ]


def require_same_conditions(plan: ReplayPlan, here: Mapping[str, Any]) -> None:
    """Raise UserError where another setting, software or hardware computes: there bits may differ without a fault.

    `here` is the record of numerics.py for this start.
    """
    other = [f"{name}: {then} then, {now} here" for name, then, now in _differing(_flat(plan.numerics), _flat(here))]
    if other:
        raise UserError(
            f"--replay {plan.step}: bits cannot be compared, as the step was computed under other conditions, which "
            f"round otherwise ({'; '.join(other)}). That is no sign of a fault. Replay it where they are the same"
        )


def remove_earlier_replay(plan: ReplayPlan) -> None:
    """Remove what an earlier replay of this step left."""
    for path in plan.directory.iterdir() if plan.directory.is_dir() else ():
        if path.name == "logs":
            continue  # held by the lock of this replay
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _config_of(run_directory: Path, order: Mapping[str, Any]) -> RunConfig:
    """The run's config with the layout and the settings of the start that did the step; trackers stay out of it."""
    config = load_run_config(run_directory / SAVED_CONFIG, resolve_environment=False)
    # A start of an earlier version has recorded only its length, in steps of whole batches.
    length = {"training.steps": order["total_steps"], "training.epochs": None}
    config = with_recorded_settings(config, order.get("settings", length))
    changes: dict[str, dict[str, Any]] = {
        "training": {name: order[name] for name in _LAYOUT if name != "world_size"},
        "evaluation": {"metrics": ["loss"]},
    }
    for key, value in order["numerics"]["settings"].items():
        section, _, name = key.partition(".")
        changes.setdefault(section, {})[name] = value
    logging = LoggingConfig(every_steps=config.logging.every_steps, tensorboard=False)
    sections = {name: getattr(config, name).model_copy(update=values) for name, values in changes.items()}
    return config.model_copy(update={**sections, "logging": logging})


def _not_logged(step: int, logged: list[int]) -> str:
    if not logged:
        return "the run has logged no step yet"
    nearest = sorted(sorted(logged, key=lambda other: (abs(other - step), other))[:2])
    near = " and ".join(map(str, nearest))
    return f"this step was not logged, so there are no bits to compare; the nearest that were are {near}"


def _steps(steps: list[int]) -> str:
    return f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)} logged steps ({steps[0]} to {steps[-1]})"


def _by(difference: BitDifference) -> str:
    logged, now = difference.logged, difference.replayed
    if logged is None or not (math.isfinite(logged) and math.isfinite(now)):
        return "not finite"
    return f"by {abs(now - logged):.3g}, relative {abs(now - logged) / max(abs(now), abs(logged)):.3g}"
