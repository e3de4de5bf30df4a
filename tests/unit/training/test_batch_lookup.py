"""The batch of any step is computed again from the run directory, or the reason why it cannot be is
given."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.facts import says
from tests.unit.training.conftest import append_metrics
from typer import Typer
from typer.testing import CliRunner

from drillyard.cli.data import register
from drillyard.config.load import save_resolved
from drillyard.config.run import RunConfig
from drillyard.data.data_changes import write_record
from drillyard.data.prepared_data import prepare
from drillyard.data.sampler import BatchShape
from drillyard.errors import UserError
from drillyard.telemetry.events import append_event, read_events
from drillyard.training.batch_lookup import batch_of_step
from drillyard.training.order_check import num_steps

MakeRun = Callable[..., Path]


def test_the_samples_are_those_that_the_step_drew(make_run: MakeRun, config: RunConfig) -> None:
    batch = batch_of_step(make_run((2, 10, 2)), 7)
    assert [sample.ref for sample in batch.samples] == prepare(config).train.indices(
        6, BatchShape(4)
    )


def test_ranks_have_what_the_trainer_dealt_out(make_run: MakeRun) -> None:
    """As in Mixture.read_step: micro-batch k of the global batch goes to rank k mod ranks."""
    batch = batch_of_step(make_run((2, 10, 2)), 7)
    assert [(sample.rank, sample.micro_batch) for sample in batch.samples] == [
        (0, 0),
        (1, 0),
        (0, 1),
        (1, 1),
    ]
    assert [sample.number for sample in batch.of_rank(1)] == [1, 3]
    with pytest.raises(UserError, match="ranks 0 to 1"):
        batch.of_rank(2)


def test_the_layout_is_that_of_the_attempt_that_did_the_step(make_run: MakeRun) -> None:
    """Steps 6 to 10 were done on one rank and again, after going back to step 6, on four."""
    directory = make_run((2, 6, 2), (8, 10, 1), (8, 12, 4))
    assert [batch_of_step(directory, step).num_data_ranks for step in (1, 6, 7, 10, 12, 13)] == [
        2,
        2,
        4,
        4,
        4,
        4,
    ]


def test_an_unlogged_step_belongs_to_the_start_that_did_it_last(make_run: MakeRun) -> None:
    """Steps 1 to 7 on two ranks, logged up to 6; after a crash from step 7 on four, so that step 7
    is not redone."""
    directory = make_run((2, 6, 2))
    append_event(directory, "checkpoint_begin", round=0, step=7)
    order = read_events(directory)[1]
    append_event(
        directory,
        "order",
        **{name: order[name] for name in order if name not in ("time", "event")}
        | {
            "world_size": 4,
            "gradient_accumulation": 1,
        },
    )
    append_event(directory, "resume", round=1, step=7)
    # The new start has done nothing yet: nothing is its own, except what is still to come.
    assert [batch_of_step(directory, step).num_data_ranks for step in (6, 7, 8)] == [2, 2, 4]
    append_event(directory, "first_step", round=1, step=8)
    append_metrics(directory, 10, num_gpus=4)
    assert [batch_of_step(directory, step).num_data_ranks for step in (6, 7, 8, 9, 10, 11)] == [
        2,
        2,
        4,
        4,
        4,
        4,
    ]


def test_a_step_that_was_lost_and_not_done_again_belongs_to_the_start_that_did_it(
    make_run: MakeRun,
) -> None:
    directory = make_run((2, 12, 2), (6, 8, 4))
    assert [batch_of_step(directory, step).num_data_ranks for step in (4, 5, 8, 9, 12, 13)] == [
        2,
        4,
        4,
        2,
        2,
        4,
    ]


def test_documents_are_found_in_their_files(
    make_run: MakeRun, config: RunConfig, tmp_path: Path
) -> None:
    directory = make_run((2, 4, 2))
    lines = (tmp_path / "rows.jsonl").read_text().splitlines()
    found: set[str] = set()
    for step in range(1, 9):
        batch = batch_of_step(directory, step)
        backend = batch.data.tokenizer.backend_tokenizer
        for sample in batch.samples:
            read = batch.data.train.read([sample.ref])
            text = backend.decode(read.input_ids[0].tolist())
            for place in batch.places(sample):
                file, _, line = place.partition(", line ")
                found.add(file)
                if line:
                    assert json.loads(lines[int(line) - 1])["text"].rstrip() in text
    assert found == {
        str(tmp_path / "rows.jsonl"),
        str(tmp_path / "docs" / "a.txt"),
        str(tmp_path / "docs" / "b.txt"),
    }


def test_a_cache_that_is_gone_is_made_again(make_run: MakeRun, tmp_path: Path) -> None:
    directory = make_run((2, 4, 2))
    before = batch_of_step(directory, 3).samples
    for path in sorted((tmp_path / "cache").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    assert batch_of_step(directory, 3).samples == before


def test_other_data_are_refused(make_run: MakeRun, tmp_path: Path) -> None:
    directory = make_run((2, 4, 2))
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write('{"text": "one more"}\n')
    with pytest.raises(UserError, match=r"data\.source rows .*changed"):
        batch_of_step(directory, 3)
    (directory / "data.json").unlink()
    with pytest.raises(UserError, match="trained on"):
        batch_of_step(directory, 3)


def test_a_step_outside_the_run_and_a_directory_without_a_run_are_refused(
    make_run: MakeRun, tmp_path: Path
) -> None:
    directory = make_run((2, 4, 2))
    for step in (0, 41, -3):
        with pytest.raises(UserError, match="steps 1 to 40"):
            batch_of_step(directory, step)
    with pytest.raises(UserError, match=r"no run\.yaml"):
        batch_of_step(tmp_path, 3)
    (directory / "events.jsonl").write_text("")
    with pytest.raises(UserError, match="not begun"):
        batch_of_step(directory, 3)


def test_the_command_prints_places_text_and_counts(make_run: MakeRun, tmp_path: Path) -> None:
    app = Typer()
    register(app)
    app.callback()(lambda: None)
    arguments = [
        "data",
        "show",
        str(make_run((2, 4, 2))),
        "--step",
        "3",
        "--rank",
        "1",
        "--limit",
        "1",
    ]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "step 3, sample 1 (rank 1, micro-batch 0)" in result.output
    assert "document 1: " in result.output
    assert says(result.output, "1 of 2 sequences ... step 3 ... rank 1")


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 7, 166])
def test_data_show_prints_each_sequence_of_an_epoch_once(tmp_path: Path, size: int) -> None:
    """On 1 to 4 ranks, of which some have nothing in the last step."""
    batch = 12
    rows = [{"text": f"row {n} " + "and so on " * (n % 9)} for n in range(size)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = RunConfig.model_validate(
        {
            "name": "run",
            "output": str(tmp_path),
            "model": {"config": {"architecture": "llama"}, "init": "random"},
            "data": {
                "source": str(tmp_path / "rows.jsonl"),
                "sequence_length": 64,
                "packing": False,
                "too_long": "truncate",
                "tokenizer": {"train": "bpe", "vocab_size": 300},
                "cache_directory": str(tmp_path / "cache"),
            },
            "training": {
                "epochs": 1,
                "global_batch_size": batch,
                "optimizer": {"learning_rate": 1e-3},
            },
        }
    )
    directory = tmp_path / "run"
    directory.mkdir()
    save_resolved(config, directory / "run.yaml")
    data = prepare(config)
    write_record(directory, data.record)
    app = Typer()
    register(app)
    app.callback()(lambda: None)
    for ranks in (1, 2, 3, 4):
        order = {"data": data.train.fingerprint, "global_batch_size": batch, "by_epoch": True}
        steps = num_steps(config, data.train.num_sequences, batch)
        layout = {
            "micro_batch_size": 1,
            "gradient_accumulation": batch // ranks,
            "world_size": ranks,
        }
        append_event(directory, "order", round=0, total_steps=steps, **order, **layout)
        shown: list[str] = []
        for step in range(1, steps + 1):
            for rank in range(ranks):
                arguments = [
                    "data",
                    "show",
                    str(directory),
                    "--step",
                    str(step),
                    "--rank",
                    str(rank),
                    "--limit",
                    "99",
                ]
                result = CliRunner().invoke(app, arguments)
                assert result.exit_code == 0, result.output
                shown += re.findall(r"sequence (\d+):", result.output)
        assert sorted(map(int, shown)) == list(range(size))


def test_torch_is_not_needed() -> None:
    code = (
        "import sys, drillyard.training.batch_lookup, drillyard.training.replay; sys.exit('torch'"
        " in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
