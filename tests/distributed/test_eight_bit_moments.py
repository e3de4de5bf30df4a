"""Runs with `adamw-8bit`: a resume gives the same bits on as many ranks, and near-equal losses on
another number, which cuts the packed moments again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from tests.distributed.ranks import run_ranks
from tests.distributed.training_case import (
    LLAMA,
    build,
    make_config,
    resume_from,
    run_steps,
    start_save,
    write_documents,
)

STEPS, SAVED = 8, 4
SIZES = {"hidden_size": 256, "intermediate_size": 512}


def run(directory: str, micro_batch: int, resumed: bool) -> np.ndarray:
    config = make_config(
        Path(directory),
        model={"config": LLAMA | SIZES, "init": "random"},
        training__precision="fp32",
        training__steps=STEPS,
        training__micro_batch_size=micro_batch,
        training__optimizer={"name": "adamw-8bit", "learning_rate": 1e-3},
    )
    trainer, _ = build(config, filled=not resumed)
    folder = f"{directory}/checkpoints"
    if resumed:
        assert resume_from(trainer, folder) == SAVED
        return run_steps(trainer, SAVED, STEPS)
    states = trainer.optimizer.optimizer.state.values()
    assert any(state["exp_avg"].dtype.itemsize == 1 for state in states)
    rows = run_steps(trainer, 0, SAVED)
    start_save(trainer, SAVED, folder).close()
    return np.concatenate([rows, run_steps(trainer, SAVED, STEPS)])


def test_a_resume_goes_on_with_the_packed_moments(tmp_path: Path) -> None:
    write_documents(tmp_path)
    whole = run_ranks(run, 2, str(tmp_path), 2, False)[0]
    again = run_ranks(run, 2, str(tmp_path), 2, True)[0]
    assert np.array_equal(whole[SAVED:], again)
    alone = run_ranks(run, 1, str(tmp_path), 4, True)[0]
    np.testing.assert_allclose(alone[:, 0], again[:, 0], rtol=1e-3)
    np.testing.assert_allclose(alone[0, 0], again[0, 0], rtol=1e-6)
