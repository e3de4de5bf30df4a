"""`drillyard train --dry-run`: ten lines about what a start would do, its refusals, and nothing
written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.facts import says

from drillyard.cli.main import main


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with rows.jsonl, in which commands run without a GPU."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("DRILLYARD_CACHE", str(tmp_path / "cache"))
    for variable in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    rows = [{"prompt": f"What is {n}?", "completion": f" It is {n}."} for n in range(64)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def write_config(**changes: Any) -> None:
    """run.yaml; `changes` are settings with __ for the dot."""
    config: dict[str, Any] = {
        "name": "dry",
        "model": {
            "init": "random",
            "config": {"architecture": "llama", "hidden_size": 64, "num_hidden_layers": 2},
        },
        "data": {
            "source": "rows.jsonl",
            "format": "prompt-completion",
            "sequence_length": 64,
            "tokenizer": {"train": "bpe", "vocab_size": 300},
            "held_out": {"fraction": 0.2},
        },
        "training": {"steps": 5, "optimizer": {"learning_rate": 1e-3}},
    }
    for dotted, value in changes.items():
        section, _, key = dotted.partition("__")
        config[section][key] = value
    Path("run.yaml").write_text(yaml.safe_dump(config))


def dry_run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[str], str]:
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main(["train", "run.yaml", "--dry-run", *arguments])
    caught = capsys.readouterr()
    return int(ended.value.code or 0), caught.out.splitlines(), caught.err


def files_below(directory: Path) -> dict[str, int]:
    return {str(path): path.lstat().st_mtime_ns for path in directory.rglob("*")}


def test_ten_lines_and_nothing_written(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_config()
    before = files_below(place)
    code, lines, errors = dry_run(capsys, "--nproc-per-node", "2")
    assert code == 0, errors
    assert files_below(place) == before
    found = {line.partition(":")[0]: line for line in lines}
    assert list(found) == [
        "Run", "Data", "Model", "Length", "Memory", "Disk", "Time", "Cost", "Next",
    ]  # fmt: skip
    assert says(found["Run"], "dry ... runs/dry ... new")
    assert says(found["Data"], "all rows ... tokens ... % with loss ... rows/held_out")
    assert says(found["Model"], "llama ... parameters, random")
    assert says(found["Length"], "5 steps ... 2 ranks")
    assert says(found["Memory"], "fits ... GiB per rank")
    assert "which is too little" not in found["Disk"]


def test_a_model_that_names_no_vocabulary_has_that_of_its_tokenizer(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = {"data__format": "text", "data__columns": {"text": "prompt"}}
    write_config(**text)
    with pytest.raises(SystemExit) as ended:
        main(["data", "build", "run.yaml", "--to", "megatron", "--output", "built"])
    assert not ended.value.code
    models = []
    for tokenizer in ({"train": "bpe", "vocab_size": 300}, "built/tokenizer"):
        write_config(**text, data__tokenizer=tokenizer)
        code, lines, errors = dry_run(capsys)
        assert code == 0, errors
        models.append(next(line for line in lines if line.startswith("Model:")))
    assert models[0] == models[1]


def test_epochs_are_counted_by_the_rows(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_config(training__steps=None, training__epochs=2)
    code, lines, errors = dry_run(capsys)
    assert code == 0, errors
    (length,) = [line for line in lines if line.startswith("Length")]
    assert says(length, "about ... steps of ... sequences on 1 rank")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"data__source": "missing.jsonl"}, "missing.jsonl"),
        ({"data__format": "chat"}, "messages"),
        ({"model__config": {"architecture": "llama", "hidden_size": 65}}, "hidden size (65)"),
    ],
)
def test_a_mistake_ends_it_as_it_ends_a_start(
    changes: dict[str, Any], named: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_config(**changes)
    before = files_below(place)
    code, _, errors = dry_run(capsys)
    assert (code, named in errors) == (2, True), errors
    assert files_below(place) == before


def test_an_output_that_is_a_file_is_refused(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_config()
    Path("runs").write_text("")
    code, _, errors = dry_run(capsys)
    assert code == 2 and "runs" in errors


def test_the_state_of_the_run_directory(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Another config in the place of the run is refused as at a start; one without training is no
    run yet."""
    write_config()
    directory = Path("runs/dry")
    directory.mkdir(parents=True)
    _, lines, _ = dry_run(capsys)
    assert says(lines[0], "begins at step 0")
    (directory / "run.yaml").write_text(Path("run.yaml").read_text())
    (directory / "metrics.jsonl").write_text('{"step": 1, "loss": 3.0}\n')
    write_config(training__seed=7)
    code, _, errors = dry_run(capsys)
    assert code == 2 and says(errors, "holds a different run ... training.seed")


def test_it_is_of_a_start(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_config()
    code, _, errors = dry_run(capsys, "--replay", "1")
    assert code == 2 and "--replay" in errors
