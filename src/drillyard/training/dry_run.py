"""`drillyard train --dry-run`: what a run would do, in ten lines, and every mistake that can be
found before its first step. Nothing is written, and of the data only the first rows are read.

Looked at are the config, the run directory, the model with its weights' headers, the first rows of
each source, memory and disk. Time and cost are estimates, and unknown where no speed or price of
this machine is on record.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch

from drillyard.config.kernel_rules import MASTER_BYTES
from drillyard.config.model_files import require_weight_files
from drillyard.config.run import RunConfig
from drillyard.config.run_checks import num_data_ranks, resolve_global_batch
from drillyard.config.run_data import TrainTokenizer
from drillyard.data.prepared_data import PreparedData, prepare_sample
from drillyard.errors import UserError
from drillyard.estimation.model_source import ModelOptions, find_model
from drillyard.estimation.request import EstimateRequest
from drillyard.estimation.resolved_setup import GIB, ResolvedSetup, resolve_setup
from drillyard.estimation.run_estimate import RunEstimate, estimate_run
from drillyard.estimation.run_time import planned_steps, saved_state
from drillyard.estimation.setup import Setup
from drillyard.estimation.startup_estimate import startup_estimate
from drillyard.estimation.target import accelerator_target
from drillyard.formatting import duration, percent, plural, rounded_count, size
from drillyard.hardware import Accelerator, catalog, find_accelerator
from drillyard.parallel.ranks import choose_device
from drillyard.training.checkpoint.inventory import list_checkpoints, newest_usable
from drillyard.training.model_setup import memory_of_device, require_trainable
from drillyard.training.run_directory import (
    check_run_directory,
    holds_training,
    is_finished,
    run_directory_of,
)

SAMPLED_SEQUENCES = 8


def dry_run(config: RunConfig, *, num_ranks: int, num_nodes: int = 1) -> Iterator[str]:
    """The lines of a dry run of `config` on `num_ranks` ranks of all `num_nodes` nodes together.

    Raises UserError for a mistake that a start would refuse, as far as no row but the first ones
    has to be read for it.
    """
    directory = run_directory_of(config)
    yield f"Run:      {config.name}, into {directory} ({_state_of(config, directory, num_ranks)})"
    device = choose_device(config.training.device, 0)
    begins = not holds_training(directory)
    if begins:
        require_weight_files(config.model)
    require_trainable(config, device, needs_weights=begins)
    with prepare_sample(config, SAMPLED_SEQUENCES) as data:
        yield from _data_lines(config, data)
        tokens = _tokens_of_all(data)
        config = _with_vocabulary(config, len(data.tokenizer))
    memory_gib = memory_of_device(device, max(1, num_ranks // num_nodes)) / GIB
    resolved = resolved_step(config, device, memory_gib, num_ranks, num_nodes)
    yield _model_line(config, resolved.setup)
    steps = planned_steps(config, resolved.setup, tokens)
    yield _length_line(config, resolved.setup, steps, num_ranks)
    hardware = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    accelerator = find_accelerator(hardware)
    startup = startup_estimate(resolved.setup, memory_gib, accelerator, hardware=hardware)
    yield f"Memory:   {startup.memory_words()}"
    yield _disk_line(config, resolved.setup, directory)
    yield from _time_lines(config, num_ranks, num_nodes, accelerator, hardware)


def _state_of(config: RunConfig, directory: Path, num_ranks: int) -> str:
    """What a start would find in the run directory. UserError where it would be refused."""
    if directory.exists():
        check_run_directory(config, num_ranks)
    nearest = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        raise UserError(
            f"{nearest}: no run directory can be made here; choose another `output`, or change its"
            " permissions"
        )
    if not directory.exists():
        return "new"
    if is_finished(config):
        return "finished: a start would train nothing"
    newest = newest_usable(list_checkpoints(directory))
    return "begins at step 0" if newest is None else f"goes on after step {newest.step:,}"


def _data_lines(config: RunConfig, data: PreparedData) -> Iterator[str]:
    """What the first rows became, and the notes on them."""
    train = data.train.sources
    tokens = sum(source.num_tokens for source in train)
    learnt = sum(source.num_valid_tokens for source in train)
    rows = sum(source.counts.get("rows", 0) for source in train)
    sequences = sum(len(source) for source in train)
    read = "first rows" if data.read_shares else "all rows"
    yield (
        f"Data:     {read} of {plural(len(train), 'source')}: {rows:,} rows are {tokens:,} tokens,"
        f" {percent(learnt / max(1, tokens))} with loss, in {sequences:,} sequences of"
        f" {config.data.sequence_length:,}; held out:"
        f" {', '.join(data.held_out) or 'nothing'}"
    )
    for note in data.report.notes:
        yield f"          {note}"


def _tokens_of_all(data: PreparedData) -> float | None:
    """The tokens of all rows, by the shares read; None where the size of a source is unknown."""
    shares = [data.read_shares.get(source.name, 1.0) for source in data.train.sources]
    found = zip(data.train.sources, shares, strict=True)
    if any(share is None for share in shares):
        return None
    # Sequences, filled as they are here: that is what an epoch counts.
    return sum(len(source) * source.sequence_length / (share or 1.0) for source, share in found)


def _with_vocabulary(config: RunConfig, entries: int) -> RunConfig:
    """The config with the entries of the tokenizer that was read as the vocabulary of an inline
    model that names none, as in a start."""
    content, tokenizer = config.model.config, config.data.tokenizer
    if content is None or "vocab_size" in content or isinstance(tokenizer, TrainTokenizer):
        return config
    model = config.model.model_copy(update={"config": {**content, "vocab_size": entries}})
    return config.model_copy(update={"model": model})


def resolved_step(
    config: RunConfig, device: torch.device, memory_gib: float, num_ranks: int, num_nodes: int
) -> ResolvedSetup:
    """The training step as the estimator sees it, with every open setting resolved."""
    model = find_model(config, ModelOptions())
    return resolve_setup(
        config,
        model.spec,
        num_gpus=num_ranks,
        gpus_per_node=max(1, num_ranks // num_nodes),
        memory_gib=memory_gib,
        device_type="cuda" if device.type == "cuda" else "cpu",
        model_config=model.config,
    )


def _model_line(config: RunConfig, setup: Setup) -> str:
    spec = setup.spec
    line = (
        f"Model:    {config.model.id or 'from model.config'}: {spec.model_type},"
        f" {rounded_count(spec.total_parameters)} parameters, {config.model.init}"
    )
    if setup.adapter_parameters is not None:
        line += f"; {rounded_count(setup.adapter_parameters)} of adapters are trained"
    return f"{line}; {config.training.precision}"


def _length_line(config: RunConfig, setup: Setup, steps: int | None, num_ranks: int) -> str:
    batch = resolve_global_batch(config, num_data_ranks(config, num_ranks))
    each = f"{batch} sequences on {plural(num_ranks, 'rank')}"
    if steps is None:
        return f"Length:   {config.training.epochs:g} epochs, in steps of {each}"
    about = "about " if config.training.steps is None else ""
    tokens = rounded_count(steps * setup.tokens_per_step)
    return f"Length:   {about}{steps:,} steps of {each}: {tokens} tokens"


def _disk_line(config: RunConfig, setup: Setup, directory: Path) -> str:
    trained = setup.adapter_parameters or setup.spec.total_parameters
    model = trained * MASTER_BYTES[setup.precision]
    # While one is written, those that are kept are still there.
    kept = config.checkpoint.keep + 1 if config.checkpoint.every_steps else 1
    needed = model + kept * saved_state(setup).value * setup.world_size
    nearest = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    free = shutil.disk_usage(nearest).free
    enough = "" if needed < free else ", which is too little"
    return (
        f"Disk:     up to {size(needed)} for {plural(kept, 'checkpoint')} and the model;"
        f" {size(free)} are free{enough}"
    )


def _time_lines(
    config: RunConfig,
    num_ranks: int,
    num_nodes: int,
    accelerator: Accelerator | None,
    hardware: str,
) -> Iterator[str]:
    """Time and cost where the speed of this hardware is on record."""
    if accelerator is None:
        yield f"Time:     not known: no speed of {hardware} is on record"
        yield "Cost:     not known"
        return
    facts = catalog()
    target = accelerator_target(
        accelerator.name, num_ranks, facts, gpus_per_node=max(1, num_ranks // num_nodes)
    )
    found: RunEstimate = estimate_run(
        EstimateRequest(
            config=config, model=find_model(config, ModelOptions()), target=target, facts=facts
        )
    )
    run = found.run_time
    if run is None:
        yield "Time:     not known" + "".join(f": {each.why}" for each in found.missing[:1])
    else:
        low, high = run.longest.low.value, run.longest.high.value
        yield f"Time:     {duration(low)} to {duration(high)} in all"
    cost = None if found.cost is None else found.cost.of_run
    if cost is None:
        yield (
            "Cost:     not known: no price of this machine is on record (drillyard estimate"
            " --price-per-gpu-hour USD)"
        )
    else:
        yield f"Cost:     ${cost.low.value:,.2f} to ${cost.high.value:,.2f}"
