"""`drillyard export` into every kind of directory: it changes no byte that an export did not
write."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from tests.integration.fine_tuned import STEPS, FineTuned, called, fine_tune
from tests.integration.gcs import Bucket
from transformers import AutoModelForCausalLM


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> FineTuned:
    return fine_tune(tmp_path_factory.mktemp("tuned"))


@pytest.fixture
def project(tuned: FineTuned, tmp_path: Path) -> Path:
    """A copy of the place where the run was started, under version control."""
    place = tmp_path / "project"
    shutil.copytree(tuned.place, place, symlinks=True)
    subprocess.run(["git", "init", "-q", place], check=True)
    return place


def snapshot(directory: Path) -> dict[str, str]:
    """Every file (a digest), link (where it leads) and directory below a directory, by relative
    path."""
    found = {}
    for parent, directories, files in os.walk(directory):
        for name in [*directories, *files]:
            path = Path(parent, name)
            key = str(path.relative_to(directory))
            if path.is_symlink():
                found[key] = f"-> {os.readlink(path)}"
            elif path.is_dir():
                found[key] = "directory"
            else:
                found[key] = hashlib.blake2b(path.read_bytes()).hexdigest()
    return found


def checkpoint_in(project: Path) -> Path:
    return project / "runs" / "tuned" / "checkpoints" / f"step-{STEPS:08d}"


def export(
    project: Path, directory: object, *options: object, cwd: Path | None = None
) -> tuple[int, str]:
    return called("export", checkpoint_in(project), directory, *options, cwd=cwd or project)


def earlier_export(project: Path, name: str = "exported") -> Path:
    code, errors = export(project, name)
    assert code == 0, errors
    return project / name


def repository(project: Path) -> str:
    place = project / "repository"
    subprocess.run(["git", "init", "-q", place], check=True)
    (place / "config.json").write_text("{}")
    return "repository"


def snapshot_of_a_hub(project: Path) -> str:
    """A model in a cache of the hub: its files are links to blobs."""
    place = project / "hub" / "models--a--b"
    (place / "blobs").mkdir(parents=True)
    (place / "snapshots" / "1234").mkdir(parents=True)
    for number, file in enumerate(sorted((project / "base-model").iterdir())):
        shutil.copy(file, place / "blobs" / f"{number:040d}")
        (place / "snapshots" / "1234" / file.name).symlink_to(f"../../blobs/{number:040d}")
    return str(place / "snapshots" / "1234")


def linked(to: str) -> Callable[[Path], str]:
    def make(project: Path) -> str:
        (project.parent / "link").symlink_to(project / to)
        return str(project.parent / "link")

    return make


def symlink_loop(project: Path) -> str:
    (project / "loop").symlink_to("loop")
    return "loop"


def a_file(project: Path) -> str:
    (project / "thesis.tex").write_text("years of work")
    return "thesis.tex"


def only_a_config(project: Path) -> str:
    (project / "settings").mkdir()
    (project / "settings" / "config.json").write_text('{"mine": 1}')
    return "settings"


def no_config(project: Path) -> str:
    (project / "notes").mkdir()
    (project / "notes" / "notes.txt").write_text("mine")
    return "notes"


def with_a_file_added(project: Path) -> str:
    (earlier_export(project) / "README.md").write_text("my model card")
    return "exported"


def with_a_directory_added(project: Path) -> str:
    subprocess.run(["git", "init", "-q", earlier_export(project)], check=True)
    return "exported"


def with_a_file_edited(project: Path) -> str:
    config = earlier_export(project) / "config.json"
    # As long as before, so that only its content tells.
    config.write_text(config.read_text().replace('"llama"', '"llamb"'))
    return "exported"


def with_weights_edited(project: Path) -> str:
    weights = earlier_export(project) / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    return "exported"


def with_a_record_of_other_files(project: Path) -> str:
    """The record of an export, copied into a directory of other files of the same names."""
    other = project / "copied"
    shutil.copytree(project / "base-model", other)
    shutil.copy(earlier_export(project) / ".drillyard-export.json", other)
    return "copied"


def inside_an_export(project: Path) -> str:
    """A new directory there would keep that export from being replaced."""
    return str(earlier_export(project) / "bf16")


REFUSED: dict[str, Callable[[Path], str]] = {
    "repository": repository,
    "base-model": lambda project: "base-model",
    "project-root": lambda project: str(project),
    "working-directory": lambda project: ".",
    "directory-above": lambda project: "..",
    "run": lambda project: "runs/tuned",
    "runs": lambda project: "runs",
    "checkpoints": lambda project: "runs/tuned/checkpoints",
    "checkpoint": lambda project: str(checkpoint_in(project)),
    "new-among-checkpoints": lambda project: "runs/tuned/checkpoints/step-00000003",
    "link-to-project": linked("."),
    "link-to-base-model": linked("base-model"),
    "link-to-run": linked("runs/tuned"),
    "link-to-checkpoint": linked(f"runs/tuned/checkpoints/step-{STEPS:08d}"),
    "link-to-itself": symlink_loop,
    "file": a_file,
    "only-config.json": only_a_config,
    "no-config.json": no_config,
    "snapshot-of-a-hub": snapshot_of_a_hub,
    "export-and-a-file": with_a_file_added,
    "export-and-a-repository": with_a_directory_added,
    "inside-an-export": inside_an_export,
    "export-with-a-config-edited": with_a_file_edited,
    "export-with-weights-edited": with_weights_edited,
    "record-of-other-files": with_a_record_of_other_files,
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_no_export_wrote_is_refused_and_kept_to_the_byte(kind: str, project: Path) -> None:
    directory = REFUSED[kind](project)
    before = snapshot(project.parent)
    for options in ([], ["--overwrite"]):
        code, errors = export(project, directory, *options)
        assert snapshot(project.parent) == before
        assert code == 2 and errors.startswith("error: ") and "Traceback" not in errors, errors


def an_absent_one(project: Path) -> str:
    return "new/model"


def an_empty_one(project: Path) -> str:
    (project / "empty").mkdir()
    return "empty"


def a_link_to_an_empty_one(project: Path) -> str:
    an_empty_one(project)
    return linked("empty")(project)


def a_link_to_nothing(project: Path) -> str:
    return linked("not-yet-there")(project)


def an_interrupted_export(project: Path) -> str:
    """Killed while it wrote its weights."""
    (project / "begun").mkdir()
    (project / "begun" / "model.safetensors.incomplete").write_bytes(b"half")
    record = {"version": 1, "files": {}, "writing": ["model.safetensors", "config.json"]}
    (project / "begun" / ".drillyard-export.json").write_text(json.dumps(record))
    return "begun"


WRITTEN: dict[str, Callable[[Path], str]] = {
    "absent": an_absent_one,
    "empty": an_empty_one,
    "link-to-empty": a_link_to_an_empty_one,
    "link-to-nothing": a_link_to_nothing,
    "interrupted-export": an_interrupted_export,
}


@pytest.mark.parametrize("kind", WRITTEN)
def test_an_absent_or_empty_directory_is_written_and_replaced_only_on_request(
    kind: str, project: Path
) -> None:
    directory = WRITTEN[kind](project)
    of_exports = "project/begun/"
    before = {
        path: what
        for path, what in snapshot(project.parent).items()
        if not path.startswith(of_exports)
    }
    code, errors = export(project, directory)
    assert code == 0, errors
    after = snapshot(project.parent)
    assert before.items() <= after.items(), "a file that was there is gone or changed"
    real = os.path.relpath(os.path.realpath(project / directory), project.parent)
    new = set(after) - set(before)
    assert all(path == real or path in real or path.startswith(f"{real}/") for path in new), new
    assert AutoModelForCausalLM.from_pretrained(project / directory).num_parameters() > 0

    code, errors = export(project, directory)
    assert code == 2 and "--overwrite" in errors and snapshot(project.parent) == after
    code, errors = export(project, directory, "--overwrite")
    assert code == 0 and snapshot(project.parent) == after, errors


def test_an_earlier_export_of_another_layout_is_replaced_whole(project: Path) -> None:
    exported = earlier_export(project)
    record = json.loads((exported / ".drillyard-export.json").read_text())
    # As an export of a larger model would have left it.
    (exported / "model-00001-of-00009.safetensors").write_bytes(
        (exported / "model.safetensors").read_bytes()
    )
    record["files"]["model-00001-of-00009.safetensors"] = record["files"]["model.safetensors"]
    (exported / ".drillyard-export.json").write_text(json.dumps(record))
    code, errors = export(project, "exported", "--overwrite", "--dtype", "float32")
    assert code == 0, errors
    assert not (exported / "model-00001-of-00009.safetensors").exists()
    config = json.loads((exported / "config.json").read_text())
    assert {config.get("dtype"), config.get("torch_dtype")} <= {"float32", None}
    weights = load_file(exported / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.float32}


def test_a_base_model_that_was_an_export_is_not_replaced(project: Path) -> None:
    exported = earlier_export(project)
    record = project / "runs" / "tuned" / "run.yaml"
    config = yaml.safe_load(record.read_text())
    config["model"]["id"] = str(exported)
    record.write_text(yaml.safe_dump(config))
    before = snapshot(project)
    code, errors = export(project, exported, "--overwrite")
    assert code == 2 and "began from" in errors and snapshot(project) == before


@pytest.fixture
def read_only(project: Path) -> Iterator[Path]:
    place = project.parent / "read-only"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", place], check=True)
    yield place
    subprocess.run(["umount", "--lazy", place], check=True)


def test_a_read_only_directory_is_named(project: Path, read_only: Path) -> None:
    before = snapshot(project)
    code, errors = export(project, read_only)
    assert code == 2 and "Read-only file system" in errors and str(read_only) in errors
    assert snapshot(project) == before


@pytest.fixture
def bucket(tmp_path: Path) -> Iterator[Bucket]:
    bucket = Bucket(tmp_path / "gcs")
    bucket.start_server()
    bucket.mount()
    yield bucket
    bucket.discard()


def test_a_bucket_is_written_replaced_and_never_emptied(project: Path, bucket: Bucket) -> None:
    """The mount point itself: nothing can be renamed in its place."""
    code, errors = export(project, bucket.place)
    assert code == 0, errors
    after = snapshot(bucket.place)
    assert AutoModelForCausalLM.from_pretrained(bucket.place).num_parameters() > 0
    assert export(project, bucket.place)[0] == 2 and snapshot(bucket.place) == after
    code, errors = export(project, bucket.place, "--overwrite")
    assert code == 0 and snapshot(bucket.place) == after, errors
    (bucket.place / "others.txt").write_text("of a colleague")
    assert export(project, bucket.place, "--overwrite")[0] == 2
    assert (bucket.place / "others.txt").read_text() == "of a colleague"
    assert snapshot(bucket.place).items() > after.items()
