"""Number of steps of a run, and whether a config continues a checkpoint's order of samples.

The samples of a step follow from the data, the seed, the sequence length, the global batch and how
epochs are cut into steps (data/sampler.py). `require_order_of` compares what needs no data, so a
refused start does not modify the run directory; `require_same_order` compares everything once the
data are open. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from drillyard.config.problems import dotted
from drillyard.config.run import RunConfig
from drillyard.config.run_checks import schedule_problems, steps_for_epochs
from drillyard.errors import UserError


def num_steps(config: RunConfig, num_sequences: int, global_batch_size: int) -> int:
    """Optimizer steps of the run: as configured, or as many as `epochs` passes over `num_sequences`
    take.

    Raises UserError where the schedule does not fit into that many.
    """
    training = config.training
    if training.steps is not None:
        return training.steps
    assert training.epochs is not None
    steps = steps_for_epochs(training.epochs, num_sequences, global_batch_size)
    for problem in schedule_problems(training.schedule, steps):
        raise UserError(
            f"{dotted(problem.path)}: {problem.message} (training.epochs: {training.epochs:g} of"
            f" {num_sequences} sequences, {global_batch_size} per step)"
        )
    return steps


def order_identity(
    config: RunConfig,
    fingerprint: str | None,
    num_sequences: int,
    global_batch_size: int,
    total_steps: int,
) -> dict[str, Any]:
    """Values that a checkpoint must agree with so that training continues in the same sample order.

    `fingerprint`, `num_sequences`: of the training data.
    """
    return {
        "data": fingerprint,
        "global_batch_size": global_batch_size,
        "total_steps": total_steps,
        "by_epoch": config.training.epochs is not None,
        "num_sequences": num_sequences,
        "seed": config.training.seed,
        "sequence_length": config.data.sequence_length,
    }


def require_order_of(saved: Mapping[str, Any], config: RunConfig, global_batch_size: int) -> None:
    """Raise UserError as `require_same_order` would if the data are those of `saved`, a
    checkpoint's metadata."""
    # Older checkpoints do not record the number of sequences: they are compared when the data are
    # open.
    sequences = saved.get("num_sequences", 0)
    total_steps = (
        num_steps(config, sequences, global_batch_size) if sequences else config.training.steps
    )
    if total_steps is None:
        total_steps = saved["step"]
    require_same_order(
        saved, order_identity(config, saved.get("data"), sequences, global_batch_size, total_steps)
    )


def require_same_order(saved: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
    """Raise UserError where going on from `saved`, a checkpoint's metadata, would not be the run of
    this config.

    `identity` is what the config and its data come to (build.py). Other settings may differ
    (config/run_identity.py).
    """
    for problem in _other_orders(saved, identity):
        raise UserError(f"cannot go on from {saved.get('path', 'the checkpoint')}: {problem}")


def _other_orders(saved: Mapping[str, Any], identity: Mapping[str, Any]) -> Iterator[str]:
    """List the reasons why the samples of a checkpoint's steps, or the next ones, differ from those
    of the config."""
    step, data, batch = saved.get("step", 0), saved.get("data"), saved.get("global_batch_size")
    own_run = "or begin a run of its own: another `name`, without checkpoint.resume"
    for key, setting in (("seed", "training.seed"), ("sequence_length", "data.sequence_length")):
        if key in saved and saved[key] != identity[key]:
            yield (
                f"it was trained with {setting}: {saved[key]}, and this config has {identity[key]},"
                f" which gives other samples; set {setting}={saved[key]}, {own_run}"
            )
    if data != identity["data"]:
        yield (
            "the data (source, weights, tokenizer, format or drillyard version) are not what it"
            f" was trained on (fingerprint {data}, now {identity['data']}); undo the change,"
            f" {own_run}"
        )
    if batch != identity["global_batch_size"]:
        yield (
            f"it was trained with {batch} sequences per step, and this start has"
            f" {identity['global_batch_size']}; set training.global_batch_size={batch}, {own_run}"
        )
    if None not in (saved.get("base"), identity.get("base")) and saved["base"] != identity["base"]:
        yield (
            "its adapters were trained on other weights than model.id has now; give those,"
            f" {own_run}"
        )
    if not _same_cut(saved, identity):
        yield (
            "the last batch of each of its epochs is short, as with training.epochs, and after its"
            f" step {step} those of training.steps are others; give training.epochs instead of"
            f" training.steps, {own_run}"
            if saved.get("by_epoch")
            else (
                "its batches go on over the ends of epochs, as with training.steps, and after its"
                f" step {step} those of training.epochs are others; set training.epochs=null and"
                f" training.steps={saved.get('total_steps')} (or more), {own_run}"
            )
        )
    if step > (total := identity["total_steps"]):
        more = (
            "raise training.epochs"
            if identity["by_epoch"]
            else f"give training.steps={step} or more"
        )
        yield (
            f"it has done {step} steps, and this run ends after {total}; {more}, name an earlier"
            f" checkpoint by checkpoint.resume, {own_run}"
        )


def _same_cut(saved: Mapping[str, Any], identity: Mapping[str, Any]) -> bool:
    """Whether the samples are cut into the same steps: always until the first epoch ends within a
    batch."""
    # Checkpoints of earlier versions do not record it; all their batches continue over the ends of
    # epochs.
    batch, sequences = identity["global_batch_size"], identity["num_sequences"]
    same = saved.get("by_epoch", False) == identity["by_epoch"]
    return same or bool(sequences % batch == 0) or bool(saved.get("step", 0) <= sequences // batch)
