"""One epoch trains each sequence once and alike on 1 to 4 ranks, also where the last step leaves
ranks without any.

And a run of 60 steps that is given 30 more is the run of 90 steps to the bit.
"""

from __future__ import annotations

import json
import re
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
from typer.testing import CliRunner

from drillyard.cli.main import app
from drillyard.data.sampler import Mixture
from drillyard.supervise.rank_supervision import RankSupervision
from drillyard.training import run

SIZES = (1, 7, 166)
BATCH = 12  # divides into micro-batches on 1, 2, 3 and 4 ranks
MICRO_BATCHES = {1: 2, 2: 3, 3: 2, 4: 1}


def write_rows(directory: Path) -> None:
    """A file for each size: so many documents of uneven length, each of which is one sequence."""
    for size in SIZES:
        rows = [{"prompt": f"{n}:", "completion": "alpha beta " * (1 + n % 5)} for n in range(size)]
        (directory / f"{size}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def one_epoch(directory: str, ranks: int) -> dict[int, list[int]]:
    """Train one epoch of each size, as `drillyard train` does; the sequences that this rank has
    read, in order."""
    # The ranks' process group is that of the test.
    run.stop_ranks = lambda: None
    read: list[int] = []
    inner = Mixture.read
    Mixture.read = lambda self, refs: read.extend(index for _, index in refs) or inner(self, refs)  # type: ignore[method-assign,func-returns-value]
    found = {}
    for size in SIZES:
        config = make_config(
            Path(directory),
            name=run_name(size, ranks),
            data__source=f"{directory}/{size}.jsonl",
            data__packing=False,
            training__steps=None,
            training__epochs=1,
            training__global_batch_size=BATCH,
            training__micro_batch_size=MICRO_BATCHES[ranks],
            training__schedule={"name": "cosine"},
            logging={"every_steps": 1, "tensorboard": False},
        )
        side = RankSupervision(Path(config.output) / config.name, 0.0, attempt=0, is_claimed=False)
        assert run.train(config, side) == 0
        found[size] = list(read)
        read.clear()
    Mixture.read = inner  # type: ignore[method-assign]
    return found


def run_name(size: int, ranks: int) -> str:
    return f"{size}-on-{ranks}"


def longer(directory: str, ranks: int) -> dict[str, Any]:
    """Figures and samples of 60 steps and then 90, and of 90 at once; and of 1 epoch and then 2,
    and of 2 at once."""
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
    return {
        "epochs": one_epoch(directory, ranks),
        "longer": longer(directory, ranks) if ranks <= 2 else None,
    }


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the data are, and the run directories below runs/."""
    folder = tmp_path_factory.mktemp("epochs")
    write_rows(folder)
    write_documents(folder)
    return folder


@pytest.fixture(scope="module")
def found(directory: Path) -> dict[int, list[dict[str, Any]]]:
    """What each rank found, by the number of ranks."""
    return {ranks: run_ranks(cases, ranks, str(directory), ranks) for ranks in MICRO_BATCHES}


def shown(run_directory: Path, step: int) -> list[tuple[int, int]]:
    """(rank, sequence) of each sample that `drillyard data show` prints of a step."""
    result = CliRunner().invoke(
        app, ["data", "show", str(run_directory), "--step", str(step), "--limit", str(BATCH)]
    )
    assert result.exit_code == 0, result.output
    return [
        (int(rank), int(index))
        for rank, index in re.findall(r"\(rank (\d+), .*, sequence (\d+):", result.output)
    ]


@pytest.mark.parametrize("size", SIZES)
def test_each_sequence_is_read_once_and_shown_where_it_was_read(
    directory: Path, found: dict[int, list[dict[str, Any]]], size: int
) -> None:
    for ranks in MICRO_BATCHES:
        run_directory = directory / "runs" / run_name(size, ranks)
        logged = [
            json.loads(line)["step"]
            for line in (run_directory / "metrics.jsonl").read_text().splitlines()
        ]
        assert logged == list(range(1, -(-size // BATCH) + 1)), ranks
        printed = [sample for step in logged for sample in shown(run_directory, step)]
        assert Counter(index for _, index in printed) == Counter(range(size)), ranks
        for rank, of_rank in enumerate(found[ranks]):
            assert of_rank["epochs"][size] == [
                index for reader, index in printed if reader == rank
            ], (ranks, rank)


@pytest.mark.parametrize("size", SIZES)
def test_losses_do_not_depend_on_the_number_of_ranks(
    directory: Path, found: dict[int, list[dict[str, Any]]], size: int
) -> None:
    curves = {}
    for ranks in MICRO_BATCHES:
        run_directory = directory / "runs" / run_name(size, ranks)
        lines = [
            json.loads(line) for line in (run_directory / "metrics.jsonl").read_text().splitlines()
        ]
        curves[ranks] = [(line["loss"], line["grad_norm"]) for line in lines]
        final_loss = json.loads((run_directory / "summary.json").read_text())["final_loss"]
        assert final_loss == curves[ranks][-1][0]
    for curve in curves.values():
        np.testing.assert_allclose(curve, curves[1], rtol=1e-9)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("unit", "steps"), [("steps", (60, 90)), ("epochs", None)])
def test_a_run_that_is_made_longer_is_the_long_run_to_the_bit(
    found: dict[int, list[dict[str, Any]]], ranks: int, unit: str, steps: tuple[int, int] | None
) -> None:
    extended, whole, end = found[ranks][0]["longer"][unit]
    assert steps is None or (end, len(whole)) == steps
    assert len(whole) > end
    assert extended.tobytes() == whole.tobytes()
