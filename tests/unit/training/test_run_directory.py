"""What a run may go on with from a checkpoint, what is refused, and that the advice of a refusal
works."""

from __future__ import annotations

import itertools
import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xxhash

from drillyard.config.load import load_run_config, save_resolved
from drillyard.config.run import RunConfig
from drillyard.config.run_checks import require_valid
from drillyard.errors import UserError
from drillyard.training import resume
from drillyard.training.checkpoint.inventory import CheckpointInfo, inspect
from drillyard.training.checkpoint.manifest import Manifest, write_manifest
from drillyard.training.order_check import require_same_order
from drillyard.training.replay import plan_replay
from drillyard.training.run_directory import (
    claim_run_directory,
    is_finished,
    named_beginning,
    origin_to_record,
)

MakeRun = Callable[..., Path]


def changed(config: RunConfig, *overrides: str) -> RunConfig:
    """The config with settings as `--set` gives them."""
    given = Path(config.output) / "given.yaml"
    given.parent.mkdir(exist_ok=True)
    save_resolved(config, given)
    return load_run_config(given, list(overrides))


@pytest.fixture
def ended(make_run: MakeRun) -> Path:
    """A run directory after its 40 steps of 4 sequences."""
    directory = make_run((2, 40, 1), checkpoints=(38,))
    path = directory / "checkpoints" / "step-00000040"
    path.mkdir()
    settings = {
        "training.steps": 40,
        "training.epochs": None,
        "training.optimizer.learning_rate": 1e-3,
    }
    metadata = {"global_batch_size": 4, "settings": settings}
    write_manifest(
        path, Manifest(40, 1, "2.11.0", "2026-01-01T00:00:00.000Z", {}, metadata=metadata)
    )
    (directory / "final").mkdir()
    (directory / "final" / "config.json").write_text("{}")
    # What an export leaves, so that the next one may replace it.
    written = {"config.json": [{"bytes": 2, "xxh3_128": xxhash.xxh3_128_hexdigest(b"{}")}]}
    record = {"version": 1, "files": written, "writing": []}
    (directory / "final" / ".drillyard-export.json").write_text(json.dumps(record))
    (directory / "summary.json").write_text(json.dumps({"status": "completed", "steps": 40}))
    (directory / "summary.txt").write_text("completed")
    return directory


def batch_of_four(config: RunConfig) -> RunConfig:
    return changed(config, "training.global_batch_size=4")


def test_an_ended_run_is_left_as_it_is(ended: Path, config: RunConfig) -> None:
    before = {path: path.read_bytes() for path in ended.rglob("*") if path.is_file()}
    claim_run_directory(batch_of_four(config), 1)
    assert is_finished(config)
    assert {path: path.read_bytes() for path in ended.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    "longer", [["training.steps=60"], ["training.steps=null", "training.epochs=99"]]
)
def test_an_ended_run_goes_on_with_more(ended: Path, config: RunConfig, longer: list[str]) -> None:
    wanted = changed(batch_of_four(config), *longer, "training.optimizer.learning_rate=5e-4")
    assert not is_finished(wanted)
    claim_run_directory(wanted, 1)
    assert not is_finished(wanted)
    # A start that is refused later leaves what is there; one that trains removes the summary first.
    assert (ended / "summary.json").exists()
    assert load_run_config(ended / "run.yaml").training == wanted.training
    assert (ended / "final" / "config.json").exists()


def test_fewer_steps_than_are_done_are_refused(ended: Path, config: RunConfig) -> None:
    before = (ended / "run.yaml").read_bytes()
    with pytest.raises(UserError, match=r"40 steps.*training\.steps=40"):
        claim_run_directory(changed(batch_of_four(config), "training.steps=39"), 1)
    assert (ended / "run.yaml").read_bytes() == before


@pytest.mark.parametrize(
    ("by_epoch", "overrides", "words"),
    [
        (True, ["training.steps=null", "training.epochs=1"], r"40 steps.*training\.epochs"),
        (True, ["training.steps=60"], r"training\.epochs instead of training\.steps"),
        (
            False,
            ["training.steps=null", "training.epochs=9"],
            r"training\.epochs=null and training\.steps=40",
        ),
        (
            True,
            ["training.steps=null", "training.epochs=9", "training.schedule.warmup_steps=99"],
            r"99 warmup .*63 steps",
        ),
    ],
)
def test_a_refused_length_leaves_the_saved_config(
    ended: Path, config: RunConfig, by_epoch: bool, overrides: list[str], words: str
) -> None:
    """26 sequences, 4 per step: an epoch is 7 steps, and its last step is short."""
    metadata = {
        "global_batch_size": 4,
        "total_steps": 40,
        "by_epoch": by_epoch,
        "num_sequences": 26,
    }
    manifest = Manifest(40, 1, "2.11.0", "2026-01-01T00:00:00.000Z", {}, metadata=metadata)
    write_manifest(ended / "checkpoints" / "step-00000040", manifest)
    before = (ended / "run.yaml").read_bytes()
    with pytest.raises(UserError, match=words):
        claim_run_directory(changed(batch_of_four(config), *overrides), 1)
    assert (ended / "run.yaml").read_bytes() == before


def test_another_rate_for_an_ended_run_is_refused_and_its_advice_works(
    ended: Path, config: RunConfig
) -> None:
    rate = changed(batch_of_four(config), "training.optimizer.learning_rate=5e-4")
    with pytest.raises(UserError, match=r"learning_rate: 0\.001 -> 0\.0005.*training\.steps"):
        claim_run_directory(rate, 1)
    assert (ended / "summary.json").exists()
    claim_run_directory(changed(rate, "training.steps=41"), 1)


def checkpoint(path: Path, step: int, **metadata: Any) -> CheckpointInfo:
    path.mkdir(parents=True)
    batch = {"global_batch_size": 4}
    write_manifest(
        path, Manifest(step, 1, "2.11.0", "2026-01-01T00:00:00.000Z", {}, metadata=batch | metadata)
    )
    return inspect(path)


def test_a_run_goes_on_from_its_own_checkpoints_however_its_beginning_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = tmp_path / "b/checkpoints/step-00000006"
    begun.mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "b")
    monkeypatch.chdir(tmp_path)
    spellings = [
        "b/checkpoints/step-00000006",
        "./b/checkpoints/step-00000006/",
        str(begun),
        f"link/checkpoints/{begun.name}",
    ]
    for number, first in enumerate(spellings):
        assert named_beginning(first, None) == Path(first)
        origin = origin_to_record(first, {"resume": "auto"})
        # A start without a name in between changes nothing.
        later = origin_to_record("auto", {"resume": origin})
        own = checkpoint(tmp_path / f"m{number}/checkpoints/step-00000112", 112, resume=later)
        assert [named_beginning(each, own) for each in spellings] == [None] * len(spellings)
        assert named_beginning("auto", own) is None
        assert named_beginning(str(own.path), own) is None
        assert named_beginning("b", own) == Path("b")
    assert origin_to_record("auto", None) == "auto"
    assert origin_to_record("auto", {}) == "auto"


def test_a_start_elsewhere_would_replace_what_the_run_has_saved_and_is_refused(
    ended: Path, config: RunConfig, tmp_path: Path
) -> None:
    elsewhere = checkpoint(tmp_path / "b/checkpoints/step-00000006", 6).path
    before = {path: path.read_bytes() for path in ended.rglob("*") if path.is_file()}
    longer = changed(batch_of_four(config), "training.steps=60", f"checkpoint.resume={elsewhere}")
    with pytest.raises(
        UserError, match=r"checkpoint\.resume: .* began at step 0.*`name`.*checkpoint\.resume=auto"
    ):
        claim_run_directory(longer, 1)
    assert {path: path.read_bytes() for path in ended.rglob("*") if path.is_file()} == before
    # What the message recommends.
    claim_run_directory(changed(longer, "checkpoint.resume=auto"), 1)
    claim_run_directory(changed(longer, "name=another"), 1)


def test_a_run_goes_on_where_the_checkpoint_at_which_it_began_was_deleted(
    ended: Path, config: RunConfig, tmp_path: Path
) -> None:
    gone = tmp_path / "b/checkpoints/step-00000006"
    longer = changed(batch_of_four(config), "training.steps=60", f"checkpoint.resume={gone}")
    with pytest.raises(UserError, match="no directory"):
        claim_run_directory(longer, 1)
    metadata = {"global_batch_size": 4, "resume": str(gone)}
    manifest = Manifest(40, 1, "2.11.0", "2026-01-01T00:00:00.000Z", {}, metadata=metadata)
    write_manifest(ended / "checkpoints/step-00000040", manifest)
    claim_run_directory(longer, 1)


def test_a_run_goes_back_to_an_earlier_checkpoint_of_its_own(
    ended: Path, config: RunConfig
) -> None:
    earlier = checkpoint(ended / "checkpoints/step-00000020", 20).path
    claim_run_directory(
        changed(batch_of_four(config), "training.steps=60", f"checkpoint.resume={earlier}"), 1
    )


@pytest.mark.parametrize(
    "override", ["training.seed=1", "data.sequence_length=32", "data.packing=false"]
)
def test_what_would_change_samples_is_refused_by_name(
    ended: Path, config: RunConfig, override: str
) -> None:
    key = override.partition("=")[0]
    with pytest.raises(UserError, match=f"a different run.*{key}"):
        claim_run_directory(changed(batch_of_four(config), override, "training.steps=60"), 1)


IDENTITY = {
    "data": "d",
    "global_batch_size": 4,
    "total_steps": 42,
    "by_epoch": True,
    "num_sequences": 166,
    "seed": 0,
    "sequence_length": 64,
}


def saved(step: int, **changes: Any) -> dict[str, Any]:
    """A checkpoint's metadata."""
    return {**IDENTITY, "step": step, "path": "runs/a/checkpoints/step-1", **changes}


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        (saved(3, seed=1, data="e"), r"training\.seed: 1.*set training\.seed=1"),
        (saved(3, sequence_length=32, data="e"), r"set data\.sequence_length=32"),
        (saved(3, data="e"), r"data .*trained on"),
        (saved(3, global_batch_size=8), r"set training\.global_batch_size=8"),
        (saved(50), r"50 steps.* 42; .*training\.epochs"),
    ],
)
def test_a_checkpoint_of_other_samples_is_refused_by_name(
    metadata: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        require_same_order(metadata, IDENTITY)


def test_other_lengths_are_gone_on_with() -> None:
    for total in (10, 41, 42, 90):
        require_same_order(saved(10, total_steps=total), IDENTITY)


def test_a_run_of_epochs_begun_by_an_earlier_version_keeps_its_order_or_is_refused() -> None:
    """Its batches go over the ends of epochs, and it ended after whole batches."""
    old = {key: saved(0)[key] for key in ("data", "global_batch_size", "path")} | {
        "total_steps": 124
    }
    three_epochs = IDENTITY | {"total_steps": 126}
    # Up to the last whole batch of the first epoch both are the same.
    require_same_order(old | {"step": 41}, three_epochs)
    with pytest.raises(UserError, match=r"training\.epochs=null and training\.steps=124"):
        require_same_order(old | {"step": 42}, three_epochs)
    # The advice: its own order and its own length.
    require_same_order(old | {"step": 42}, IDENTITY | {"by_epoch": False, "total_steps": 124})
    with pytest.raises(UserError, match=r"training\.epochs instead of training\.steps"):
        require_same_order(saved(42), IDENTITY | {"by_epoch": False, "total_steps": 90})
    # Where batches divide an epoch there is only one order.
    even = IDENTITY | {"num_sequences": 168}
    require_same_order(old | {"step": 100}, even | {"total_steps": 126})


def test_what_changed_is_reported_with_old_and_new_values(config: RunConfig) -> None:
    now = changed(config, "training.steps=60")
    settings = {
        "training.steps": 40,
        "training.schedule.name": "cosine",
        "training.optimizer.epsilon": 1e-8,
    }
    identity = IDENTITY | {"total_steps": 60}
    assert resume.settings_changed({"settings": settings}, identity, now) == {
        "training.steps": [40, 60]
    }
    assert resume.settings_changed({"total_steps": 40}, identity, now) == {"total_steps": [40, 60]}
    assert resume.settings_changed({"total_steps": 60}, identity, now) == {}


def test_a_step_is_replayed_under_the_settings_that_it_was_done_with(
    ended: Path, config: RunConfig
) -> None:
    longer = changed(
        batch_of_four(config), "training.steps=60", "training.optimizer.learning_rate=5e-4"
    )
    claim_run_directory(longer, 1)
    # That start recorded no settings but its 40 steps.
    assert plan_replay(ended, 40).config.training.steps == 40


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("data.source=rowz.jsonl", "rowz.jsonl"),
        ("data.held_out.source=rowz.jsonl", "rowz.jsonl"),
        ("data.tokenizer=./nosuch", "/nosuch"),
        ("data.columns={text: txt}", "'txt'"),
        ("data.format=chat", "'messages'"),
        ("data.held_out={fraction: 0.2, split_by: nosuch}", "'nosuch'"),
        ("model={id: ./nosuch, init: pretrained}", "/nosuch"),
        ("model.config={architecture: llama, num_attention_heads: 7}", "model.config"),
        ("checkpoint.resume=/nosuch/step-1", "/nosuch/step-1"),
    ],
)
def test_what_is_wrong_with_a_config_is_said_before_it_is_another_run(
    ended: Path, config: RunConfig, override: str, named: str
) -> None:
    wrong = changed(batch_of_four(config), override, "training.seed=9")
    with pytest.raises(UserError, match=re.escape(named)) as refused:
        claim_run_directory(wrong, 1)
    assert "different run" not in str(refused.value)


def test_the_advice_for_other_data_starts_a_run_from_the_trained_model(
    ended: Path, config: RunConfig, tmp_path: Path
) -> None:
    (tmp_path / "more.jsonl").write_text('{"text": "more"}\n')
    other = changed(batch_of_four(config), f"data.source={tmp_path / 'more.jsonl'}")
    with pytest.raises(UserError) as refused:
        claim_run_directory(other, 1)
    words = shlex.split(str(refused.value).splitlines()[-1])
    settings = [word for before, word in itertools.pairwise(words) if before == "--set"]
    further = changed(other, *settings)
    require_valid(further, 1)
    claim_run_directory(further, 1)
    assert (further.model.id, further.name) == (str(ended / "final"), "run-further")
