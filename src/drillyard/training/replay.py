"""`--replay STEP`: repeat a step from the checkpoint before it, and compare bits with what was
logged.

On the same layout, software and hardware a step repeats its loss and its gradient norm to the bit:
nothing in a run depends on time or chance (docs/decisions-training.md). So a step with another
result was computed wrongly, now or then: by memory, a GPU or a link that changes bits silently.
Training does not notice that. A replay does, at the cost of the repeated steps; a second replay on
another host of the same kind shows which of the two is at fault.

A replay is a run of its own in RUN_DIR/replays/step-N: it reads the run's config, data and
checkpoint, and writes nothing else there. Only `replay_on_ranks` imports torch.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drillyard.config.load import resolve_section_secrets
from drillyard.config.run import LoggingConfig, RunConfig
from drillyard.config.run_identity import with_recorded_settings, with_values
from drillyard.config.saved_config import load_saved_config
from drillyard.errors import UserError
from drillyard.guarded_files import read_bytes
from drillyard.telemetry.events import read_events
from drillyard.telemetry.jsonlines import decode, encode, read_records
from drillyard.telemetry.metrics import METRICS_FILE
from drillyard.training.batch_lookup import OTHER_BATCHES
from drillyard.training.checkpoint.inventory import CheckpointInfo, list_checkpoints
from drillyard.training.order_check import require_same_order
from drillyard.training.run_directory import SAVED_CONFIG
from drillyard.training.step_history import (
    AttemptSteps,
    attempts_between,
    events_until_step,
    steps_by_attempt,
)

if TYPE_CHECKING:
    from drillyard.parallel.ranks import Ranks
    from drillyard.training.build import RunParts
    from drillyard.training.checkpoint.loading import LoadedCheckpoint

VERDICT = "verdict.json"
_LAYOUT = ("world_size", "micro_batch_size", "gradient_accumulation", "global_batch_size")


@dataclass(frozen=True)
class ReplayPlan:
    """Steps to repeat: from which checkpoints (newest first), on how many ranks, compared with
    which figures.

    expected: (loss, gradient norm) of the logged steps up to this one, by step (from 1). numerics:
    their conditions (numerics.py). config: the run's, with layout and settings of the attempt that
    did the step.
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
        """Directory for the logs and the verdict of the replay."""
        return self.run_directory / "replays" / f"step-{self.step:08d}"


@dataclass(frozen=True)
class BitDifference:
    """One value that differs: as logged, and as computed now."""

    step: int
    metric: str
    logged: float | None
    replayed: float


@dataclass(frozen=True)
class ReplayVerdict:
    """The result of a replay: the steps compared and the differences, in order."""

    step: int
    checkpoint: str
    compared: list[int]
    differences: list[BitDifference]

    @property
    def equal(self) -> bool:
        return not self.differences

    def write(self, directory: Path) -> None:
        """Write the verdict for the process that started the ranks."""
        line = encode({"version": 1, "equal": self.equal, **asdict(self)})
        (directory / VERDICT).write_text(line + "\n", encoding="utf-8")

    def in_words(self) -> str:
        """The verdict in a few lines for people."""
        where = f"from {self.checkpoint}"
        if self.equal:
            return (
                f"equal: loss and gradient norm of {_steps(self.compared)} are the same to the bit,"
                f" {where}\nThese steps were computed correctly both times (or wrongly in the same"
                " way, as by a bug)."
            )
        step = self.differences[0].step
        differing = {difference.step for difference in self.differences}
        return "\n".join(
            [
                f"different: {len(differing)} of {len(self.compared)} logged steps, {where}",
                *(
                    f"  step {step}, {each.metric}: {each.logged!r} was logged, "
                    f"{each.replayed!r} is computed now ({_by(each)})"
                    for each in self.differences
                    if each.step == step
                ),
                (
                    f"Step {step} or one since the logged step before it was computed wrongly, now"
                    " or then. Replay it again, on another host of the same kind: a host that"
                    " disagrees with itself or with others is at fault."
                ),
            ]
        )


def read_verdict(directory: Path) -> ReplayVerdict:
    """The verdict that the ranks left."""
    content = decode(read_bytes(directory / VERDICT))
    assert content is not None, directory
    differences = [BitDifference(**difference) for difference in content["differences"]]
    return ReplayVerdict(content["step"], content["checkpoint"], content["compared"], differences)


def compare(
    expected: Mapping[int, tuple[float | None, float | None]], found: Mapping[int, Sequence[float]]
) -> list[BitDifference]:
    """List the differences in bits; compared as `repr`, which distinguishes all bits, and NaN."""
    return [
        BitDifference(step, metric, logged, now)
        for step in sorted(found)
        for metric, logged, now in zip(
            ("loss", "grad_norm"), expected[step], found[step], strict=True
        )
        if repr(logged) != repr(now)
    ]


def plan_replay(run_directory: Path, step: int) -> ReplayPlan:
    """Plan to repeat `step` (from 1). Raises UserError when that is impossible, or would prove
    nothing."""
    if not (run_directory / SAVED_CONFIG).is_file():
        raise UserError(
            f"{run_directory}: holds no run (no {SAVED_CONFIG}): nothing can be replayed"
        )
    expected = _logged_until(run_directory, step)
    events = read_events(run_directory)
    so_far = _until_logged(events, step)
    begun = {
        event["step"]: index
        for index, event in enumerate(events)
        if event["event"] == "checkpoint_begin"
    }
    complete = [info for info in list_checkpoints(run_directory) if info.complete]
    # One saved after the step was logged may be of a later attempt, which computed the steps before
    # it differently.
    earlier = [
        info
        for info in reversed(complete)
        if info.step < step and begun.get(info.step, -1) < len(so_far)
    ]
    if not earlier:
        kept = ", ".join(str(info.step) for info in complete) or "none"
        raise UserError(
            f"--replay {step}: no checkpoint before this step is kept (there are: {kept}); replay a"
            " step after the first of them, or keep more (checkpoint.keep)"
        )
    chain = steps_by_attempt(so_far)
    _require_one_way(step, earlier[0].step, attempts_between(chain, earlier[0].step, step))
    order = attempts_between(chain, earlier[0].step, step)[-1].order
    if "numerics" not in order:
        raise UserError(
            f"--replay {step}: the run did not record how its steps were rounded (another version"
            " of Drillyard wrote it), so a difference would prove nothing"
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
    """(loss, gradient norm) of the steps up to `step`, as logged when it was done last. UserError
    if it was not.

    Ordered by line, not by time: clocks are set back, and steps are repeated on another layout
    later.
    """
    records = [
        record
        for record in read_records(run_directory / METRICS_FILE)
        if isinstance(record.get("step"), int)
    ]
    places = [place for place, record in enumerate(records) if record["step"] == step]
    if not places:
        raise UserError(
            f"--replay {step}: {_not_logged(step, sorted({record['step'] for record in records}))}"
        )
    so_far = records[: places[-1] + 1]
    return {
        record["step"]: (record["loss"], record["grad_norm"])
        for record in so_far
        if record["step"] <= step
    }


def _until_logged(events: Sequence[Mapping[str, Any]], step: int) -> Sequence[Mapping[str, Any]]:
    """The events up to where `step` was logged last."""
    logged = [
        index
        for index, event in enumerate(events)
        if event["event"] == "step" and event["step"] == step
    ]
    return events[: logged[-1] + 1] if logged else events_until_step(events, step)


def _require_one_way(step: int, first: int, chain: Sequence[AttemptSteps]) -> None:
    """Raise UserError where the attempts of `chain` computed their steps in more than one way."""
    ways = _ways(chain)
    if ways:
        starts = " and ".join(str(stretch.after + 1) for stretch in chain[1:])
        raise UserError(
            f"--replay {step}: the steps after checkpoint {first} were computed in more than one"
            f" way (the run was started again at step {starts}: {'; '.join(ways)}), so no one start"
            " repeats them to the bit. Replay a step between two such starts"
        )


def _ways(chain: Sequence[AttemptSteps]) -> list[str]:
    """List the differences between consecutive attempts: `training.compile False, then True`."""
    return [
        f"{name} {old}, then {new}"
        for one, other in pairwise(chain)
        for name, old, new in _differing(_all_of(one.order), _all_of(other.order))
    ]


def _all_of(order: Mapping[str, Any]) -> dict[str, Any]:
    """Everything in an event `order` that decides how steps are computed."""
    named = {name: order[name] for name in (*_LAYOUT, "total_steps") if name in order}
    return named | dict(order.get("settings", {})) | _flat(order.get("numerics", {}))


def _flat(numerics: Mapping[str, Any]) -> dict[str, Any]:
    return {**numerics.get("settings", {}), **numerics.get("conditions", {})}


def _differing(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    values = [
        (name, old.get(name, "not set"), new.get(name, "not set"))
        for name in dict.fromkeys([*old, *new])
    ]
    return [(name, before, after) for name, before, after in values if before != after]


def require_same_conditions(plan: ReplayPlan, here: Mapping[str, Any]) -> None:
    """Raise UserError where settings, software or hardware differ: bits may then differ without a
    fault.

    `here` is the record of numerics.py for this start.
    """
    other = [
        f"{name}: {then} then, {now} here"
        for name, then, now in _differing(_flat(plan.numerics), _flat(here))
    ]
    if other:
        raise UserError(
            f"--replay {plan.step}: bits cannot be compared, as the step was computed under other"
            f" conditions, which round otherwise ({'; '.join(other)}). That is no sign of a fault."
            " Replay it where they are the same"
        )


def remove_earlier_replay(plan: ReplayPlan) -> None:
    """Remove the files of an earlier replay of this step."""
    for path in plan.directory.iterdir() if plan.directory.is_dir() else ():
        if path.name == "logs":
            continue  # held by the lock of this replay
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _config_of(run_directory: Path, order: Mapping[str, Any]) -> RunConfig:
    """The run's config with the layout and the settings of the attempt that did the step, without
    trackers."""
    config = load_saved_config(run_directory / SAVED_CONFIG)
    # Earlier versions recorded only the length, in steps of whole batches.
    length = {"training.steps": order["total_steps"], "training.epochs": None}
    config = with_recorded_settings(config, order.get("settings", length))
    layout = {f"training.{name}": order[name] for name in _LAYOUT if name != "world_size"}
    config = with_values(
        config, {**layout, "evaluation.metrics": ["loss"], **order["numerics"]["settings"]}
    )
    logging = LoggingConfig(every_steps=config.logging.every_steps, tensorboard=False)
    return config.model_copy(update={"logging": logging})


def _not_logged(step: int, logged: list[int]) -> str:
    if not logged:
        return "the run has logged no step yet"
    nearest = sorted(sorted(logged, key=lambda other: (abs(other - step), other))[:2])
    near = " and ".join(map(str, nearest))
    return (
        "this step was not logged, so there are no bits to compare; the nearest that were are"
        f" {near}"
    )


def _steps(steps: list[int]) -> str:
    return (
        f"step {steps[0]}"
        if len(steps) == 1
        else f"{len(steps)} logged steps ({steps[0]} to {steps[-1]})"
    )


def _by(difference: BitDifference) -> str:
    logged, now = difference.logged, difference.replayed
    if logged is None or not (math.isfinite(logged) and math.isfinite(now)):
        return "not finite"
    return (
        f"by {abs(now - logged):.3g}, relative {abs(now - logged) / max(abs(now), abs(logged)):.3g}"
    )


def replay_on_ranks(plan: ReplayPlan) -> None:
    """Repeat the steps as one of `plan.world_size` ranks; rank 0 writes the verdict into
    `plan.directory`.

    Raises UserError when the conditions are not those of the run.
    """
    from drillyard.data.data_changes import read_record
    from drillyard.data.prepared_data import prepare
    from drillyard.parallel.ranks import start_ranks, stop_ranks
    from drillyard.telemetry import RunLog
    from drillyard.training.build import build_run
    from drillyard.training.model_setup import set_determinism
    from drillyard.training.resume import seed_rank

    config = resolve_section_secrets(plan.config, "model")
    set_determinism(config)
    ranks = start_ranks(config.training, config.parallelism)
    if ranks.world_size != plan.world_size:
        raise UserError(
            f"--replay {plan.step}: the step was done on {plan.ranks_in_words}, here are"
            f" {ranks.world_size}: another number of ranks adds up gradients in another order."
            " Start as many"
        )
    known = read_record(plan.run_directory)
    with ranks.in_turn() as is_first:
        data = prepare(config, known=known, if_changed=OTHER_BATCHES, only_open=not is_first)
    with RunLog(plan.directory, rank=ranks.rank, config=config, console="none") as log:
        parts = build_run(config, ranks, data, log)
        require_same_conditions(plan, parts.numerics)
        seed_rank(config.training.seed, 0, ranks)
        loaded = _load(plan, config, parts, ranks)
        found = _train(plan, parts, loaded.step)
    if ranks.rank == 0:
        verdict = ReplayVerdict(
            plan.step, str(loaded.info.path), list(found), compare(plan.expected, found)
        )
        verdict.write(plan.directory)
    stop_ranks()


def _load(plan: ReplayPlan, config: RunConfig, parts: RunParts, ranks: Ranks) -> LoadedCheckpoint:
    """Load the newest undamaged checkpoint before the step. UserError when there is none."""
    from drillyard.training.checkpoint.dcp_storage import DamagedCheckpoint
    from drillyard.training.checkpoint.loading import load_checkpoint
    from drillyard.training.model_setup import fill_frozen_weights
    from drillyard.training.resume import finish_load, state_for

    damages = []
    for info in plan.checkpoints:
        try:
            loaded = load_checkpoint(
                info.path,
                state_for(parts.trainer.optimizer, ranks),
                accept=lambda saved: require_same_order(saved, parts.identity),
            )
        except DamagedCheckpoint as damage:
            damages.append(str(damage))
            continue
        fill_frozen_weights(config, parts.model)
        finish_load(loaded, config.training.seed, parts.trainer.optimizer, ranks)
        return loaded
    raise UserError(
        f"--replay {plan.step}: every checkpoint before this step is damaged: {damages[0]}"
    )


def _train(plan: ReplayPlan, parts: RunParts, first: int) -> dict[int, list[float]]:
    """(loss, gradient norm) of the logged steps from `first` (from 0) to the plan's."""
    import torch

    from drillyard.training.trainer import StepWindow

    found = {}
    for step in range(first, plan.step):
        loss, norm = parts.trainer.train_step(step, StepWindow(0.0))
        if step + 1 in plan.expected:
            found[step + 1] = torch.stack([loss, norm]).tolist()
    return found
