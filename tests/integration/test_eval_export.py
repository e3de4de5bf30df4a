"""`drillyard eval` and `drillyard export` on a finished run: the same numbers and the same bits,
wherever from."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.facts import says
from tests.integration.conftest import Reference
from tests.integration.tiny_run import STEPS, TIMEOUT_SECONDS, Run, contents, drillyard

WITHOUT_DRILLYARD = """
import sys
class NoDrillyard:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "drillyard":
            raise ImportError("blocked")
sys.meta_path.insert(0, NoDrillyard())
import json, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
for line in open(sys.argv[2], encoding="utf-8"):
    row = json.loads(line)
    inputs = tokenizer(row["prompt"], return_tensors="pt")
    with torch.no_grad():
        output = model.generate(**inputs, do_sample=False, max_new_tokens=row["max_new_tokens"])
    text = tokenizer.decode(output[0, inputs["input_ids"].shape[1]:], skip_special_tokens=True).strip()
    assert text == row["predicted"], (text, row["predicted"])
print(sum(parameter.numel() for parameter in model.parameters()))
"""  # noqa: E501


SQL_ON_TEXT = ["--metric", "sql-execution", "--format", "text", "--data", "{rows}"]


def evaluate(model: Path, output: Path, *arguments: object) -> str:
    """The figures that `drillyard eval` prints, as text between the table's bars."""
    ended = drillyard("eval", model, "--output", output, *arguments)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def table(printed: str) -> dict[str, str]:
    """The one row of a printed table: column -> cell."""
    head, *_, row = [
        re.split("[┃│]", line)[1:-1] for line in printed.splitlines() if line.startswith(("┃", "│"))
    ]
    return {column.strip(): cell.strip() for column, cell in zip(head, row, strict=True)}


def predictions(path: Path) -> list[dict[str, Any]]:
    """The predictions of a part, one per question."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def checkpoint(reference: Reference) -> Path:
    return reference.run.directory / "checkpoints" / f"step-{STEPS:08d}"


@pytest.fixture(scope="module")
def both_metrics(
    reference: Reference, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path]:
    """Loss and SQL execution of final/, by one rank: what was printed, and where the predictions
    are."""
    output = tmp_path_factory.mktemp("final")
    metrics = ["--metric", "loss", "--metric", "sql-execution"]
    printed = evaluate(reference.run.directory / "final", output, *metrics, "--samples", 7)
    return printed, output / "final" / "rows_held_out.jsonl"


def test_a_models_loss_is_that_of_its_last_evaluation(
    reference: Reference, both_metrics: tuple[str, Path]
) -> None:
    in_training = reference.run.events("evaluation")[-1]["results"]["rows/held_out"]
    row = table(both_metrics[0])
    assert row["held-out part"] == "rows/held_out" and row["loss"] == f"{in_training['loss']:.4f}"
    assert (
        row["perplexity"] == f"{in_training['perplexity']:.4f}"
        and row["tokens"] == f"{in_training['tokens']:,}"
    )


def test_sql_execution_writes_every_prediction(both_metrics: tuple[str, Path]) -> None:
    printed, path = both_metrics
    found = predictions(path)
    assert len(found) == 7 and f"predictions: {path.parent}" in printed
    judged = [line for line in found if line["verdict"] != "unjudged"]
    assert table(printed)["questions"] == str(len(judged)) and judged
    right = sum(line["verdict"] == "correct" for line in judged)
    assert table(printed)["sql_execution"] == f"{right / len(judged):.1%}"
    assert all(
        {"question", "sql", "prompt", "predicted", "reason"} <= line.keys() for line in found
    )


def test_two_ranks_and_a_checkpoint_give_the_same_figures_and_answers(
    checkpoint: Path, both_metrics: tuple[str, Path], tmp_path: Path
) -> None:
    metrics = ["--metric", "loss", "--metric", "sql-execution"]
    printed = evaluate(checkpoint, tmp_path, *metrics, "--samples", 7, "--nproc-per-node", 2)
    assert table(printed) == table(both_metrics[0])
    assert predictions(tmp_path / checkpoint.name / "rows_held_out.jsonl") == predictions(
        both_metrics[1]
    )


def test_a_run_directory_is_measured_on_other_text(
    reference: Reference, workplace: Path, tmp_path: Path
) -> None:
    lines = (workplace / "rows.jsonl").read_text().splitlines()[:20]
    other = tmp_path / "other.jsonl"
    other.write_text("\n".join(lines) + "\n")
    row = table(evaluate(reference.run.directory, tmp_path, "--data", other, "--format", "text"))
    assert row["held-out part"] == "other" and float(row["loss"]) > 0
    size = sum(len(json.loads(line)["text"].encode()) for line in lines)
    bits = float(row["loss"]) * int(row["tokens"].replace(",", "")) / 0.6931471805599453 / size
    assert float(row["bits_per_byte"]) == pytest.approx(bits, rel=1e-3)


def test_a_source_that_changed_since_the_run_is_named_and_not_measured(
    reference: Reference, checkpoint: Path, workplace: Path, tmp_path: Path
) -> None:
    rows = workplace / "rows.jsonl"
    before = rows.read_bytes()
    rows.write_bytes(
        before.replace(b"age of 1?", b"age of I?") + before.splitlines(keepends=True)[0]
    )
    try:
        refused = drillyard("eval", checkpoint, "--output", tmp_path)
    finally:
        rows.write_bytes(before)
    assert refused.returncode == 2, refused.stdout
    assert refused.stderr.startswith("error: data.source rows")
    assert says(refused.stderr, f"{rows} ... changed ... content changed ... --data")
    # What a run that goes on is advised.
    assert "another `name`" not in refused.stderr


def test_a_source_that_is_gone_is_measured_from_what_was_tokenised_of_it(
    reference: Reference, both_metrics: tuple[str, Path], workplace: Path, tmp_path: Path
) -> None:
    rows = workplace / "rows.jsonl"
    rows.rename(tmp_path / "away.jsonl")
    try:
        ended = drillyard("eval", reference.run.directory, "--output", tmp_path, "--metric", "loss")
    finally:
        (tmp_path / "away.jsonl").rename(rows)
    assert ended.returncode == 0, ended.stderr
    assert says(ended.stderr, f"{rows} (rows): ... missing")
    assert table(ended.stdout)["loss"] == table(both_metrics[0])["loss"]


def test_an_exported_checkpoint_is_final_to_the_bit_and_needs_no_drillyard(
    reference: Reference, checkpoint: Path, both_metrics: tuple[str, Path], tmp_path: Path
) -> None:
    exported = drillyard("export", checkpoint, tmp_path / "model")
    assert exported.returncode == 0, exported.stderr
    assert contents(tmp_path / "model") == contents(reference.run.directory / "final")
    program = [
        sys.executable,
        "-c",
        WITHOUT_DRILLYARD,
        str(tmp_path / "model"),
        str(both_metrics[1]),
    ]
    loaded = subprocess.run(program, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
    assert loaded.returncode == 0, loaded.stderr
    (events,) = reference.run.events("parameters")
    assert loaded.stdout.split()[0] == str(events["count"])


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        (["eval", "nowhere"], "nowhere: ... no such directory"),
        (["eval", "{run}/final", *SQL_ON_TEXT], "sql-execution ... data.format"),
        (["export", "{run}/final", "new"], "final: ... RUN_DIR/checkpoints/step-N"),
        (["export", "{checkpoint}", "{workplace}"], "{workplace}: holds ... checkpoint"),
    ],
    ids=["no model", "metric and format", "no checkpoint", "destination in use"],
)
def test_what_cannot_be_measured_or_exported_is_reported(
    workplace: Path,
    reference: Reference,
    checkpoint: Path,
    arguments: list[str],
    facts: str,
    tmp_path: Path,
) -> None:
    run: Run = reference.run
    places = {
        "run": run.directory,
        "checkpoint": checkpoint,
        "workplace": workplace,
        "rows": workplace / "rows.jsonl",
    }
    before = contents(workplace)
    ended = drillyard(*(argument.format(**places) for argument in arguments), cwd=tmp_path)
    assert (
        ended.returncode == 2
        and ended.stderr.startswith("error: ")
        and "Traceback" not in ended.stderr
    )
    assert says(ended.stderr, facts.format(**places)), ended.stderr
    assert contents(workplace) == before and not list(tmp_path.iterdir())
