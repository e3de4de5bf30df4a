"""Ranks with different memory, only one of which sees the run directory, train with the same
settings."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

from tests.distributed.ranks import run_ranks
from tests.distributed.training_case import make_config, write_documents

from drillyard.data.prepared_data import prepare
from drillyard.estimation.resolved_setup import ResolvedSetup
from drillyard.parallel.ranks import Ranks, start_ranks
from drillyard.training import model_setup, resolved_record
from drillyard.training.model_setup import build_sharded_model
from drillyard.training.resolved_record import AutoSettings, load_auto_settings, save_auto_settings

MIB = 2**20


FULL, NONE = (f'"training.activation_checkpointing": "{mode}"' for mode in ("full", "none"))


def two_starts(directory: str) -> list[tuple[float, str, bool]]:
    """For a first start and one that finds its record: the memory that a rank goes by, what it
    recomputes, and whether it keeps weights whole."""
    place = Path(directory)
    config = make_config(
        place, training__activation_checkpointing="auto", training__micro_batch_size=2
    )
    ranks = start_ranks(config.training, config.parallelism)
    with ranks.in_turn() as is_first:
        data = prepare(config, only_open=not is_first)
    # Only rank 0 finds the run's directory: on the other host nothing is mounted.
    run = place / "run" if ranks.rank == 0 else place / "not mounted here"
    found = []
    for _ in range(2):
        with mock.patch.object(model_setup, "memory_bytes_per_rank", memory_of):
            kept = load_auto_settings(config, ranks, run)
        model = build_sharded_model(kept.config, data.tokenizer, ranks, memory_gib=kept.memory_gib)
        found.append((kept.memory_gib, model.resolved.setup.activation_checkpointing, model.small))
        if ranks.rank == 0:
            record_as_another_version(run, kept, model.resolved)
    return found


def record_as_another_version(run: Path, kept: AutoSettings, resolved: ResolvedSetup) -> None:
    """The record of a run that has begun to train, with another mode than this version resolves."""
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    save_auto_settings(kept, resolved, run, mock.Mock())
    record = run / resolved_record.RESOLVED_RECORD
    record.write_text(record.read_text().replace(FULL, NONE))
    assert NONE in record.read_text()


def memory_of(ranks: Ranks) -> int:
    """Rank 1 has too little for anything, rank 0 more than enough."""
    return 1 * MIB if ranks.rank == 1 else 4096 * MIB


def test_all_ranks_resolve_by_the_least_memory_and_keep_what_rank_0_has_recorded(
    tmp_path: Path,
) -> None:
    write_documents(tmp_path)
    (tmp_path / "run").mkdir()
    least = 1 / 1024
    assert (
        run_ranks(two_starts, 2, str(tmp_path))
        == [[(least, "full", False), (least, "none", False)]] * 2
    )
