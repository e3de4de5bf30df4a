"""One rank of a replay: load the checkpoint, train up to the step, compare. See replay.py."""

from __future__ import annotations

import torch

from drillyard.data import prepare
from drillyard.data.data_record import read_record
from drillyard.errors import UserError
from drillyard.parallel.model_setup import set_determinism
from drillyard.parallel.ranks import Ranks, start_ranks, stop_ranks
from drillyard.telemetry import RunLog
from drillyard.training.batch_lookup import OTHER_BATCHES
from drillyard.training.build import RunParts, build_run
from drillyard.training.checkpoint import DamagedCheckpoint, LoadedCheckpoint, load_checkpoint
from drillyard.training.replay import ReplayPlan, ReplayVerdict, compare, require_same_conditions
from drillyard.training.resume import finish_load, seed_rank, state_for
from drillyard.training.sample_order import require_same_order
from drillyard.training.trainer import StepWindow


def replay(plan: ReplayPlan) -> None:
    """Repeat the steps as one of `plan.world_size` ranks; rank 0 writes the verdict into `plan.directory`.

    Raises UserError when the conditions are not those of the run.
    """
    config = plan.config
    set_determinism(config)
    ranks = start_ranks(config.training, config.parallelism)
    if ranks.world_size != plan.world_size:
        raise UserError(
            f"--replay {plan.step}: the step was done on {plan.ranks_in_words}, here are {ranks.world_size}: another "
            "number of ranks adds up gradients in another order. Start as many"
        )
    known = read_record(plan.run_directory)
    data = ranks.in_turn(lambda first: prepare(config, known=known, if_changed=OTHER_BATCHES, only_open=not first))
    with RunLog(plan.directory, rank=ranks.rank, config=config, console="none") as log:
        parts = build_run(config, ranks, data, log)
        require_same_conditions(plan, parts.numerics)
        seed_rank(config.training.seed, 0, ranks)
        loaded = _load(plan, parts, ranks)
        found = _train(plan, parts, loaded.step)
    if ranks.rank == 0:
        verdict = ReplayVerdict(plan.step, str(loaded.info.path), list(found), compare(plan.expected, found))
        verdict.write(plan.directory)
    stop_ranks()


def _load(plan: ReplayPlan, parts: RunParts, ranks: Ranks) -> LoadedCheckpoint:
    """Load the newest undamaged checkpoint before the step. UserError when there is none."""
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
        finish_load(loaded, plan.config, parts.trainer.optimizer, ranks)
        return loaded
    raise UserError(f"--replay {plan.step}: every checkpoint before this step is damaged: {damages[0]}")


def _train(plan: ReplayPlan, parts: RunParts, first: int) -> dict[int, list[float]]:
    """(loss, gradient norm) of the logged steps from `first` (from 0) to the plan's."""
    found = {}
    for step in range(first, plan.step):
        loss, norm = parts.trainer.train_step(step, StepWindow(0.0))
        if step + 1 in plan.expected:
            found[step + 1] = torch.stack([loss, norm]).tolist()
    return found
