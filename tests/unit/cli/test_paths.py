"""What commands take for a path: a run's name, and what is in object storage and no path."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tests.facts import says
from tests.unit.checkpoint.made import make_checkpoint
from tests.unit.reporting import runs

from drillyard.cli import main as cli
from drillyard.cli import saved_model as cli_saved_model
from drillyard.cli.options import _MOST_SHOWN, find_run
from drillyard.errors import NotFoundError, UserError
from drillyard.loglines.sources import storage_client
from drillyard.supervise import supervisor
from drillyard.training import checkpoint_export, saved_evaluation, saved_model
from drillyard.training.checkpoint.manifest import MANIFEST_NAME
from drillyard.training.saved_evaluation import EvaluationRequest, evaluation_config
from drillyard.training.saved_model import find_saved_model, run_directory_above


def call(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main([str(argument) for argument in arguments])
    return int(ended.value.code or 0)


@pytest.fixture
def named_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    run: Path = runs.write_run(tmp_path / "runs" / "trial", steps=10)
    make_checkpoint(run, 10)
    (run / "run.yaml").unlink()  # a report's part of one, which prune would read
    return run


@pytest.mark.parametrize(
    "command",
    [
        ("report",),
        ("watch",),
        ("checkpoint", "list"),
        ("checkpoint", "verify"),
        ("checkpoint", "prune"),
    ],
)
def test_a_run_is_found_by_its_name(command: tuple[str, ...], named_run: Path) -> None:
    assert call(*command, "trial", *(["--keep", 1] if "prune" in command else [])) == 0
    assert (named_run / "report.html").exists() == (command == ("report",))


@pytest.mark.parametrize(
    "command",
    [("report",), ("watch",), ("export", "trail", "out"), ("checkpoint", "list"), ("data", "show")],
)
def test_a_name_that_no_run_has_is_answered_with_the_runs_there_are(
    command: tuple[str, ...], named_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = (
        command
        if "trail" in command
        else (*command, "trail", *(["--step", 1] if "show" in command else []))
    )
    assert call(*arguments) == 2
    error = capsys.readouterr().err
    assert "runs/trail" in error and "runs/ has: trial" in error


def test_two_runs_are_compared_by_name(named_run: Path) -> None:
    assert call("diff", "trial", "trial") == 0


def test_a_directory_here_goes_before_a_run_of_its_name(
    named_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("trial").mkdir()
    assert call("checkpoint", "list", "trial") == 2 and says(
        capsys.readouterr().err, "no checkpoints"
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ("eval", "gs://b/x"),
        ("eval", "runs/a", "--output", "s3://b/x"),
        ("export", "gs://b/x", "model"),
        ("export", "runs/a/checkpoints/step-00000001", "gs://b/x"),
        ("report", "runs/a", "--output", "gs://b/x.html"),
        ("checkpoint", "prune", "gs://b/x"),
        ("train", "gs://b/run.yaml"),
        ("estimate", "run.yaml", "--cluster", "gs://b/cluster.yaml"),
        ("init", "gs://b/x"),
        ("export", "runs/a/checkpoints/step-00000001", "file:///tmp/x"),
        ("export", "hf://a/b", "model"),
        ("eval", "runs/a", "--output", "abfs://b/x"),
    ],
)
def test_object_storage_is_no_path(
    arguments: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert call(*arguments) == 2
    (url,) = (argument for argument in arguments if "://" in argument)
    assert says(capsys.readouterr().err, f"error: {url}: ... not a path on this machine")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", [("report", "trial"), ("export", "CHECKPOINT", "model")])
def test_a_working_directory_that_was_deleted_is_reported(
    command: tuple[str, ...],
    project: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    checkpoint = make_checkpoint(project, 10)
    (project / "deleted").mkdir()
    monkeypatch.chdir(project / "deleted")
    (project / "deleted").rmdir()
    assert call(*(checkpoint if word == "CHECKPOINT" else word for word in command)) == 2
    assert says(capsys.readouterr().err, "error: ... working directory ... not exist ... cd")


def test_a_machine_without_credentials_reads_public_buckets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from google.auth.exceptions import DefaultCredentialsError
    from google.cloud import storage

    def no_credentials(*_: object) -> None:
        raise DefaultCredentialsError

    monkeypatch.setattr("google.auth.default", lambda **_: no_credentials())
    assert isinstance(storage_client(), storage.Client)


def test_prune_fails_where_every_checkpoint_is_damaged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (10, 20):
        next(make_checkpoint(tmp_path, step).glob("*.distcp")).unlink()
    assert call("checkpoint", "prune", tmp_path, "--keep", 1) == 1
    assert "no undamaged checkpoint" in capsys.readouterr().out


def test_prune_fails_where_no_checkpoint_has_a_manifest_or_there_is_none(tmp_path: Path) -> None:
    lost, empty = make_checkpoint(tmp_path / "lost", 10), tmp_path / "empty/checkpoints"
    (lost / MANIFEST_NAME).unlink()
    empty.mkdir(parents=True)
    for run in ("lost", "empty"):
        assert call("checkpoint", "prune", tmp_path / run, "--keep", 1) == 1
    assert lost.is_dir()


def plain_model(directory: Path, **config: int) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    return directory


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"max_position_embeddings": 128}, 128),
        ({"n_positions": 64}, 64),
        ({"max_position_embeddings": 131072}, 1024),
    ],
)
def test_a_plain_model_is_measured_within_its_positions(
    config: dict[str, int], expected: int, tmp_path: Path
) -> None:
    request = EvaluationRequest(
        plain_model(tmp_path / "model", **config), tmp_path, data="rows.jsonl"
    )
    assert (
        evaluation_config(request, find_saved_model(request.model)).data.sequence_length == expected
    )


def test_a_plain_model_needs_a_source(tmp_path: Path) -> None:
    request = EvaluationRequest(plain_model(tmp_path / "model"), tmp_path)
    with pytest.raises(UserError, match="--data"):
        evaluation_config(request, find_saved_model(request.model))


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A directory with the run.yaml that `drillyard init` writes."""
    assert call("init", tmp_path) == 0
    return tmp_path


def test_the_run_yaml_of_a_project_is_not_that_of_its_models(project: Path) -> None:
    for model in (
        plain_model(project / "model"),
        plain_model(project / "models/a"),
        plain_model(project / "a/final"),
    ):
        assert find_saved_model(model).config is None
        assert run_directory_above(model) is None


def test_a_checkpoint_outside_of_a_run_directory_has_no_run(project: Path) -> None:
    made = make_checkpoint(project / "elsewhere", 10)
    (project / "models").mkdir()
    for copied in (project / "step-00000010", project / "models/step-00000010"):
        shutil.copytree(made, copied)
        with pytest.raises(UserError, match=r"run\.yaml .*RUN_DIR/checkpoints/step-00000010"):
            find_saved_model(copied)


@pytest.mark.parametrize("name", ["final", "final-step-00000010", "."])
def test_a_finished_model_has_the_run_of_its_directory(name: str, project: Path) -> None:
    (project / "events.jsonl").touch()
    plain_model(project / "final")
    plain_model(project / "final-step-00000010")
    saved = find_saved_model(project / name)
    assert saved.config is not None and run_directory_above(saved.path) == project


def test_a_checkpoint_and_a_link_to_it_have_the_run_two_directories_above(project: Path) -> None:
    checkpoint = make_checkpoint(project, 10)
    (project / "newest").symlink_to(checkpoint)
    for path in (checkpoint, project / "newest"):
        assert find_saved_model(path).tokenizer_directory == project / "tokenizer"


def test_a_run_stands_for_its_final_model_or_its_newest_complete_checkpoint(
    project: Path,
) -> None:
    good, cut = make_checkpoint(project, 10), make_checkpoint(project, 20)
    assert saved_model.find_in_run(project) == cut
    (cut / MANIFEST_NAME).unlink()
    assert (
        saved_model.find_in_run(project)
        == saved_model.find_in_run(project, checkpoint_only=True)
        == good
    )
    assert saved_model.find_in_run(good) == good
    final = plain_model(project / "final")
    assert saved_model.find_in_run(project) == saved_model.find_in_run(final) == final
    assert saved_model.find_in_run(project, checkpoint_only=True) == good
    next(good.glob("*.distcp")).unlink()
    with pytest.raises(UserError) as refused:
        saved_model.find_in_run(project, checkpoint_only=True)
    assert all(each.name in str(refused.value) for each in (good, cut))
    shutil.rmtree(project / "checkpoints")
    with pytest.raises(UserError, match=str(final)):
        saved_model.find_in_run(project, checkpoint_only=True)


@pytest.mark.parametrize("name", ["trial", "runs/trial"])
def test_export_of_a_run_writes_its_newest_checkpoint_and_says_which(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("init", tmp_path / "runs/trial") == 0
    newest = [make_checkpoint(tmp_path / "runs/trial", step) for step in (10, 20)][-1]
    monkeypatch.chdir(tmp_path)
    written: list[Path] = []
    monkeypatch.setattr(
        checkpoint_export, "export_checkpoint", lambda path, *_, **__: written.append(path)
    )
    assert call("export", name, "model") == 0
    assert written == [newest.relative_to(tmp_path)]
    assert str(written[0]) in capsys.readouterr().err


def test_ranks_measure_what_was_taken_for_them_and_choose_none_of_their_own(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    newest = make_checkpoint(project, 10)
    started: list[dict[str, str]] = []
    measured: list[Path] = []

    def supervise(command: list[str], environment: dict[str, str], **others: object) -> int:
        started.append(environment)
        return 3

    monkeypatch.setattr(supervisor, "supervise", supervise)
    monkeypatch.setattr(saved_evaluation, "check_request", lambda request: None)
    monkeypatch.setattr(
        saved_evaluation, "evaluate_saved", lambda request, note: measured.append(request.model)
    )
    monkeypatch.setattr(cli_saved_model, "exit_process", lambda code: None)
    assert call("eval", project, "--nproc-per-node", 2) == 3
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    capsys.readouterr()
    assert call("eval", project) == 2
    advised = capsys.readouterr().err.split()[-1]
    assert call("eval", advised) == 0
    for name, value in started[0].items():
        monkeypatch.setenv(name, value)
    make_checkpoint(project, 20)
    assert call("eval", project) == 0
    assert measured == [newest, newest]


def test_settings_in_errors_come_with_their_flags(tmp_path: Path) -> None:
    request = EvaluationRequest(tmp_path, tmp_path, data="rows.jsonl")
    assert "--sequence-length" in saved_evaluation.flags_for(
        "data.sequence_length: 300 is more than 128", request
    )
    assert "--format" in saved_evaluation.flags_for(
        "no column 'text'. Set data.columns: {text: NAME}.", request
    )
    assert "--data run.yaml" in saved_evaluation.flags_for(
        "Set data.tokenizer to one that has", request
    )
    assert (
        saved_evaluation.flags_for(
            "data.sequence_length: 300", EvaluationRequest(tmp_path, tmp_path, data="run.yaml")
        )
        == ""
    )
    assert saved_evaluation.flags_for("out of memory", request) == ""


@pytest.mark.parametrize("count", [1, _MOST_SHOWN, _MOST_SHOWN + 3])
def test_a_name_that_no_run_has_is_refused_with_the_runs_there_are(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for number in range(count):
        (tmp_path / f"runs/run-{number:03d}").mkdir(parents=True)
        (tmp_path / f"runs/run-{number:03d}/events.jsonl").touch()
    with pytest.raises(NotFoundError) as refused:
        find_run(Path("other"))
    shown = [number for number in range(count) if f"run-{number:03d}" in str(refused.value)]
    assert shown == list(range(min(count, _MOST_SHOWN)))
    assert (" more" in str(refused.value), "3 more" in str(refused.value)) == (
        count > _MOST_SHOWN,
    ) * 2
