"""One epoch trains each sequence once and alike on 1 to 4 ranks, also where the last step leaves ranks without any.

And a run of 60 steps that is given 30 more is the run of 90 steps to the bit.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.distributed.ranks import run_ranks
from tests.distributed.training_case import (
    build,
    make_config,
    resume_from,
    run_steps,
    start_save,
    write_documents,
)

SIZES = (1, 7, 166)
BATCH = 12  # divides into micro-batches on 1, 2, 3 and 4 ranks
MICRO_BATCHES = {1: 2, 2: 3, 3: 2, 4: 1}


def write_rows(directory: Path) -> None:
    """A file for each size: so many documents of uneven length, each of which is one sequence."""
    for size in SIZES:
        rows = [{"prompt": f"{n}:", "completion": "alpha beta " * (1 + n % 5)} for n in range(size)]
        (directory / f"{size}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def one_epoch(directory: str, ranks: int) -> dict[int, dict[str, Any]]:
    """Of each size: the losses of one epoch, and the sequences that this rank has read."""
    found = {}
    for size in SIZES:
        config = make_config(
            Path(directory),
            data__source=f"{directory}/{size}.jsonl",
            data__packing=False,
            training__steps=None,
            training__epochs=1,
            training__global_batch_size=BATCH,
            training__micro_batch_size=MICRO_BATCHES[ranks],
            training__schedule={"name": "cosine"},
        )
        trainer, _ = build(config)
        read: list[tuple[int, int]] = []
        inner = trainer.data.read
        trainer.data.read = lambda refs, inner=inner, read=read: read.extend(refs) or inner(refs)  # type: ignore[method-assign,func-returns-value]
        rows = run_steps(trainer, 0, trainer.total_steps)
        found[size] = {"rows": rows, "read": read, "of": trainer.data.num_sequences}
    return found


def longer(directory: str, ranks: int) -> dict[str, Any]:
    """Figures and samples of 60 steps and then 90, and of 90 at once; and of 1 epoch and then 2, and of 2 at once."""
    found: dict[str, Any] = {}
    for unit, short, long in (("steps", 60, 90), ("epochs", 1, 2)):
        schedule = {"training__schedule": {"name": "constant"}}
        short_run = schedule | {"training__steps": None, f"training__{unit}": short}
        long_run = schedule | {"training__steps": None, f"training__{unit}": long}
        folder = f"{directory}/{unit}-{ranks}"
        first, _ = build(make_config(Path(directory), **short_run))
        end = first.total_steps
        rows = [run_steps(first, 0, end)]
        start_save(first, end, folder).close()
        second, _ = build(make_config(Path(directory), **long_run), filled=False)
        assert resume_from(second, folder) == end
        rows.append(run_steps(second, end, second.total_steps))
        whole, _ = build(make_config(Path(directory), **long_run))
        found[unit] = (np.concatenate(rows), run_steps(whole, 0, whole.total_steps), end)
    return found


def cases(directory: str, ranks: int) -> dict[str, Any]:
    return {"epochs": one_epoch(directory, ranks), "longer": longer(directory, ranks) if ranks <= 2 else None}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    """What each rank found, by the number of ranks."""
    folder = tmp_path_factory.mktemp("epochs")
    write_rows(folder)
    write_documents(folder)
    return {ranks: run_ranks(cases, ranks, str(folder), ranks) for ranks in MICRO_BATCHES}


@pytest.fixture(scope="module")
def epochs(found: dict[int, list[dict[str, Any]]]) -> dict[int, list[dict[int, dict[str, Any]]]]:
    return {ranks: [rank["epochs"] for rank in each] for ranks, each in found.items()}


@pytest.mark.parametrize("size", SIZES)
def test_each_sequence_is_read_once(epochs: dict[int, list[dict[int, dict[str, Any]]]], size: int) -> None:
    for ranks, found in epochs.items():
        assert found[0][size]["of"] == size
        assert len(found[0][size]["rows"]) == -(-size // BATCH), ranks
        read = Counter(index for rank in found for _, index in rank[size]["read"])
        assert read == Counter(range(size)), ranks


@pytest.mark.parametrize("size", SIZES)
def test_losses_do_not_depend_on_the_number_of_ranks(
    epochs: dict[int, list[dict[int, dict[str, Any]]]], size: int
) -> None:
    reference = epochs[1][0][size]["rows"]
    for found in epochs.values():
        np.testing.assert_allclose(found[0][size]["rows"], reference, rtol=1e-9)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("unit", "steps"), [("steps", (60, 90)), ("epochs", None)])
def test_a_run_that_is_made_longer_is_the_long_run_to_the_bit(
    found: dict[int, list[dict[str, Any]]], ranks: int, unit: str, steps: tuple[int, int] | None
) -> None:
    extended, whole, end = found[ranks][0]["longer"][unit]
    assert steps is None or (end, len(whole)) == steps
    assert len(whole) > end
    assert extended.tobytes() == whole.tobytes()
