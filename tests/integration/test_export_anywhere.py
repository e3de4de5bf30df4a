"""What comes out of a fine-tuned model: its base's dtype, from any directory, without the base
model."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from safetensors import safe_open
from tests.integration.fine_tuned import (
    DOCUMENTS,
    KEPT_IN_FP32,
    STEPS,
    FineTuned,
    called,
    fine_tune,
)
from tests.integration.held import Holds
from tests.integration.tiny_run import STARTED, Run, contents, drillyard, wait_until
from transformers import AutoConfig, AutoTokenizer


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> FineTuned:
    return fine_tune(tmp_path_factory.mktemp("tuned"))


@pytest.fixture
def alone(tuned: FineTuned, tmp_path: Path) -> FineTuned:
    """The run directory, copied to where its base model and its data are not."""
    run = tmp_path / "elsewhere" / "tuned"
    shutil.copytree(tuned.run, run)
    return FineTuned(tmp_path, run)


def dtypes(model: Path) -> dict[str, str]:
    with safe_open(str(model / "model.safetensors"), "pt") as file:
        return {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118


def declared(model: Path) -> str:
    return str(json.loads((model / "config.json").read_text())["torch_dtype"])


def test_a_bf16_model_comes_back_as_bf16_with_the_weights_that_it_had_in_fp32(
    tuned: FineTuned,
) -> None:
    assert dtypes(tuned.run / "final") == dtypes(tuned.place / "base-model")
    assert set(dtypes(tuned.run / "final").values()) == {"BF16", "F32"}
    assert (
        dtypes(tuned.run / "final")[KEPT_IN_FP32] == "F32"
        and declared(tuned.run / "final") == "bfloat16"
    )


def test_the_documents_and_the_tokenizer_are_those_of_the_base(tuned: FineTuned) -> None:
    base = contents(tuned.place / "base-model")
    final = contents(tuned.run / "final")
    assert {name: final[name] for name in DOCUMENTS} == {name: base[name] for name in DOCUMENTS}
    assert final.keys() - base.keys() == {".drillyard-export.json"}
    kept = contents(tuned.run / "base") | contents(tuned.run / "tokenizer")
    assert kept.keys() == {*DOCUMENTS, "base.json"}
    assert {name: kept[name] for name in DOCUMENTS} == {name: base[name] for name in DOCUMENTS}


def test_what_an_earlier_version_kept_of_the_base_is_exported_for_transformers_4(
    alone: FineTuned, tuned: FineTuned, tmp_path: Path
) -> None:
    """It kept what transformers 5 saves."""
    (alone.run / "base" / "config.json").unlink()
    AutoConfig.from_pretrained(tuned.place / "base-model").save_pretrained(alone.run / "base")
    for path in (alone.run / "tokenizer").iterdir():
        path.unlink()
    loaded = AutoTokenizer.from_pretrained(tuned.place / "base-model")
    loaded.save_pretrained(alone.run / "tokenizer")
    code, errors = called("export", alone.checkpoint, tmp_path / "model", cwd=tmp_path)
    assert code == 0, errors
    content, wanted = (
        json.loads((place / "config.json").read_text())
        for place in (tmp_path / "model", tuned.place / "base-model")
    )
    older = ("rope_theta", "rope_scaling", "torch_dtype")
    assert {key: content[key] for key in older} == {key: wanted[key] for key in older}
    tokenizer = json.loads((tmp_path / "model" / "tokenizer_config.json").read_text())
    assert tokenizer["tokenizer_class"] == "PreTrainedTokenizerFast"


def test_an_export_needs_the_run_directory_alone(alone: FineTuned, tmp_path: Path) -> None:
    code, errors = called("export", alone.checkpoint, tmp_path / "model", cwd=tmp_path)
    assert code == 0, errors
    assert contents(tmp_path / "model") == contents(alone.run / "final")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_an_export_has_the_dtype_that_is_asked_for(
    alone: FineTuned, dtype: str, tmp_path: Path
) -> None:
    code, errors = called(
        "export", alone.checkpoint, tmp_path / "model", "--dtype", dtype, cwd=tmp_path
    )
    assert code == 0, errors
    stored = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}[dtype]
    assert (
        set(dtypes(tmp_path / "model").values()) == {stored}
        and declared(tmp_path / "model") == dtype
    )


def test_a_run_that_recorded_nothing_of_its_base_takes_it_from_there(
    alone: FineTuned, tuned: FineTuned
) -> None:
    shutil.rmtree(alone.run / "base")
    code, errors = called("export", alone.checkpoint, alone.place / "model", cwd=tuned.place)
    assert code == 0, errors
    assert contents(alone.place / "model") == contents(alone.run / "final")
    # Its path is stored absolute, so it is found from every directory.
    code, errors = called("export", alone.checkpoint, alone.place / "other", cwd=alone.place)
    assert code == 0, errors


def test_a_checkpoint_is_measured_without_its_base_model(alone: FineTuned) -> None:
    there = drillyard("eval", alone.checkpoint, "--output", alone.place / "out", cwd=alone.place)
    final = drillyard("eval", alone.run / "final", "--output", alone.place / "out", cwd=alone.place)
    assert there.returncode == final.returncode == 0, there.stderr + final.stderr
    assert there.stdout.splitlines()[0] == final.stdout.splitlines()[0]


def test_a_model_that_is_trained_is_kept_wherever_final_is_taken(
    tuned: FineTuned, tmp_path: Path
) -> None:
    place = tmp_path / "place"
    shutil.copytree(tuned.place, place, ignore=shutil.ignore_patterns("runs"))
    config = place / "tuned.yaml"
    run = Run(config)
    notes = run.directory / "final" / "notes.txt"
    notes.parent.mkdir(parents=True)
    notes.write_text("mine")

    refused = drillyard("train", config, cwd=place)
    assert (
        refused.returncode == 2
        and "notes.txt" in refused.stderr
        and not run.records("metrics.jsonl")
    )
    advised = refused.stderr.split("mv ")[1].split()
    assert advised == ["runs/tuned/final", "runs/tuned/final-before"]
    shutil.move(place / advised[0], place / advised[1])

    # In the way only when it is too late to say so.
    holds = Holds(tmp_path, "attempt-0-step-2")
    process = subprocess.Popen(
        [*holds.program, "train", config], cwd=place, stderr=subprocess.PIPE, text=True
    )
    STARTED.append(process)
    wait_until(lambda: holds.reached("attempt-0-step-2", 0), process)
    notes.parent.mkdir()
    notes.write_text("mine")
    holds.release("attempt-0-step-2")
    assert process.wait() == 0
    beside = run.directory / f"final-step-{STEPS:08d}"
    assert contents(notes.parent).keys() == {"notes.txt"} and notes.read_text() == "mine"
    assert dtypes(beside) == dtypes(tuned.run / "final")
    assert run.summary()["model"] == beside.name
    assert any(
        str(beside.relative_to(place)) in warning["text"] for warning in run.events("warning")
    )

    # The same run once more: what it wrote itself is replaced, and nothing is left over.
    shutil.rmtree(notes.parent)
    (run.directory / "summary.json").unlink()
    for _ in range(2):
        again = drillyard("train", config, cwd=place)
        assert again.returncode == 0, again.stderr
        (run.directory / "summary.json").unlink()
        assert contents(run.directory / "final") == contents(tuned.run / "final")
