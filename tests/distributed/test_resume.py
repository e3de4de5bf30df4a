"""Resume: the same bits on the same layout, the same sample order and near-equal losses on another;
faults are seen.

A run of 12 steps that is never disturbed is the reference. The others save after step 6 and go on
in a new set of objects (new model, optimizer and loader, filled from the checkpoint alone), with
dropout, so that random state matters.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
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

STEPS, SAVED = 12, 6
GPT2 = {
    "architecture": "gpt2",
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "resid_pdrop": 0.1,
    "embd_pdrop": 0.1,
    "attn_pdrop": 0.1,
}
FAULTS = ("moments", "random state", "loader position")


def config_of(directory: str, dropout: bool, **changes: Any) -> Any:
    # Llama has what no checkpoint holds: rotary tables.
    model = GPT2 if dropout else LLAMA
    settings = {
        "training__steps": STEPS,
        "training__precision": "fp32",
        "training__schedule": {"name": "constant"},
    }
    return make_config(
        Path(directory), model={"config": model, "init": "random"}, **settings, **changes
    )


def first_half(directory: str, folder: str, dropout: bool, reference: bool) -> dict[str, Any]:
    """Steps 0..5, a save, and, for the reference, steps 6..11 in the same objects."""
    trainer, _ = build(config_of(directory, dropout))
    rows = run_steps(trainer, 0, SAVED)
    checkpointer = start_save(trainer, SAVED, folder)
    if reference:
        rows = np.concatenate([rows, run_steps(trainer, SAVED, STEPS)])
    checkpointer.close()
    return {"rows": rows, "samples": samples(trainer)}


def second_half(
    directory: str, folder: str, dropout: bool, fault: str, changes: dict[str, Any]
) -> dict[str, Any]:
    """Steps 6..11 from the checkpoint, with one part of it left out when `fault` names one."""
    trainer, _ = build(config_of(directory, dropout, **changes), filled=False)
    assert resume_from(trainer, folder) == SAVED
    if fault == "moments":
        for shard in trainer.optimizer.shards:
            for moment in ("exp_avg", "exp_avg_sq"):
                trainer.optimizer.optimizer.state[shard.local][moment].zero_()
    if fault == "random state":
        torch.manual_seed(12345)
    if fault == "loader position":
        indices = trainer.data.indices
        trainer.data.indices = lambda step, shape: indices(step - SAVED, shape)  # type: ignore[method-assign]
    return {"rows": run_steps(trainer, SAVED, STEPS), "samples": samples(trainer)}


def samples(trainer: Any) -> list[str]:
    """A digest of the tokens of every step's global batch."""
    digests = []
    for step in range(STEPS):
        batch = trainer.data.read(trainer.data.indices(step, trainer.shape))
        digests.append(hashlib.blake2b(batch.input_ids.tobytes()).hexdigest())
    return digests


def with_faults(directory: str, folder: str) -> dict[str, np.ndarray]:
    return {
        fault: second_half(directory, folder, True, fault, {})["rows"] for fault in ("", *FAULTS)
    }


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("resume")
    write_documents(folder)
    return str(folder)


@pytest.fixture(scope="module")
def saved_with_dropout(directory: str) -> tuple[str, np.ndarray]:
    folder = f"{directory}/dropout"
    return folder, run_ranks(first_half, 2, directory, folder, True, True)[0]["rows"]


@pytest.fixture(scope="module")
def resumed(directory: str, saved_with_dropout: tuple[str, np.ndarray]) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = run_ranks(with_faults, 2, directory, saved_with_dropout[0])[0]
    return found


def test_same_layout_gives_the_same_bits_with_dropout(
    saved_with_dropout: tuple[str, np.ndarray], resumed: dict[str, np.ndarray]
) -> None:
    reference = saved_with_dropout[1]
    assert reference[SAVED:].tobytes() == resumed[""].tobytes()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_resume_without_part_of_the_state_is_seen(
    saved_with_dropout: tuple[str, np.ndarray], resumed: dict[str, np.ndarray], fault: str
) -> None:
    assert saved_with_dropout[1][SAVED:].tobytes() != resumed[fault].tobytes()


def test_another_number_of_ranks_keeps_sample_order_and_losses(directory: str) -> None:
    folder = f"{directory}/layouts"
    reference = run_ranks(first_half, 2, directory, folder, False, True)[0]
    four = run_ranks(second_half, 4, directory, folder, False, "", {"parallelism__replicate": 2})[0]
    one = run_ranks(
        second_half, 1, directory, folder, False, "", {"training__micro_batch_size": 2}
    )[0]
    for other in (one, four):
        assert other["samples"] == reference["samples"]
        np.testing.assert_allclose(other["rows"][:, 0], reference["rows"][SAVED:, 0], rtol=1e-5)
