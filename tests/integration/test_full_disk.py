"""Real runs on a disk that fills up: they say so, go on or end with a clear error, and lose
nothing.

Mounts a tmpfs of a few MB, which needs root.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.facts import says
from tests.integration.conftest import Reference
from tests.integration.disks import MIB, Tmpfs
from tests.integration.held import Holds
from tests.integration.tiny_run import STEPS, train, write_config
from tests.integration.watched import WatchedRun

from drillyard.config.load import load_run_config
from drillyard.data.megatron.export import write_megatron
from drillyard.data.prepared_data import prepare
from drillyard.errors import UserError
from drillyard.reporting.summary import write_summary
from drillyard.training.checkpoint.inventory import list_checkpoints
from drillyard.training.checkpoint.verification import verify


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Tmpfs]:
    disk = Tmpfs(tmp_path / "disk", 12 * MIB)
    disk.mount()
    yield disk
    disk.unmount()


def test_a_run_outlives_a_full_disk_and_ends_in_words_where_it_cannot(
    disk: Tmpfs,
    reference: Reference,
    workplace: Path,
    watch: Callable[..., WatchedRun],
    tmp_path: Path,
) -> None:
    config = write_config(
        disk.place,
        "full",
        data__source=str(workplace / "rows.jsonl"),
        data__cache_directory=str(workplace / "cache"),
        checkpoint={"every_steps": 5, "keep": 2},
        evaluation={
            "metrics": ["loss", "sql-execution"],
            "samples": 40,
            "batch_size": 1,
            "max_new_tokens": 48,
        },
    )
    holds = Holds(tmp_path, "attempt-0-step-8", "attempt-0-step-36", "attempt-0-forward-3")
    watched = watch(config, holds)
    run = watched.run

    # Full for a while: saves fail, the lines of metrics and events wait.
    saved = watched.wait_for_event("checkpoint", step=5)["step"]
    watched.wait_until(lambda: holds.reached("attempt-0-step-8", 0, 1))
    ballast = disk.fill()
    holds.release("attempt-0-step-8")
    failed = watched.wait_for_event("checkpoint_failed")
    watched.wait_for(
        lambda line: (
            line["event"] == "warning" and says(line["text"], "metrics.jsonl ... cannot be written")
        )
    )
    assert f"step-{saved:08d}" in [
        info.path.name for info in list_checkpoints(run.directory) if info.complete
    ]
    ballast.unlink()
    holds.release("attempt-0-step-36")
    watched.wait_for(
        lambda line: line["event"] == "warning" and says(line["text"], "metrics.jsonl: ... again")
    )
    assert says(failed["reason"], "No space left ... keeping 3 ... room for 4")

    # Full from the last evaluation on, when old checkpoints have gone: the predictions are passed
    # over, the export is an error.
    watched.wait_for_event("evaluation_begin", step=STEPS)
    watched.wait_until(lambda: holds.reached("attempt-0-forward-3", 0, 1))
    ballast = disk.fill()
    holds.release("attempt-0-forward-3")
    assert watched.end() == 2
    said = "".join(watched.errors)
    assert says(said, "error: ... final: ... No space left ... free space"), said
    assert watched.lines_with("predictions ... not written: No space left")
    assert len(watched.lines_with("metrics.jsonl: cannot be written")) == 1, (
        "once, not at each step"
    )
    assert (
        not (run.directory / "final").exists()
        and not (run.directory / ".final.incomplete").exists()
    )
    assert run.figures() == reference.run.figures(), "no step's line is lost or torn"
    newest = list_checkpoints(run.directory)[-1]
    assert newest.step == STEPS and all(verdict.verdict == "ok" for verdict in verify(newest))

    # A start on a disk that an interrupted save has filled to the last byte: that save goes, the
    # run goes on.
    torn = run.directory / "checkpoints" / "step-00000099"
    torn.mkdir()
    ballast.unlink()
    disk.fill().rename(torn / "__0_0.distcp")
    again = train(config)
    assert again.returncode == 0, again.stderr
    assert not torn.exists()
    assert run.weights() == reference.run.weights()
    assert run.figures() == reference.run.figures()
    assert run.summary()["status"] == "completed"

    # The summary is replaced as a whole or not at all.
    before = run.summary()
    disk.fill()
    with pytest.raises(UserError, match=r"summary\.txt: .*No space left.*free space"):
        write_summary(run.directory)
    assert run.summary() == before and not list(run.directory.glob("*.tmp"))


def test_a_stop_whose_checkpoint_cannot_be_saved_does_not_claim_one(
    disk: Tmpfs,
    reference: Reference,
    workplace: Path,
    watch: Callable[..., WatchedRun],
    tmp_path: Path,
) -> None:
    config = write_config(
        disk.place,
        "stopped-full",
        data__source=str(workplace / "rows.jsonl"),
        data__cache_directory=str(workplace / "cache"),
        checkpoint={"every_steps": 10, "keep": 2},
    )
    holds = Holds(tmp_path, "attempt-0-step-15")
    watched = watch(config, holds)
    run = watched.run
    watched.wait_for_event("checkpoint", step=10)
    watched.wait_until(lambda: holds.reached("attempt-0-step-15", 0, 1))
    ballast = disk.fill()
    run.send(signal.SIGTERM, 1)
    assert watched.end() == 1
    said = "".join(watched.errors)
    assert says(said, "error: stopped on request ... not be saved") and "Traceback" not in said, (
        said
    )
    assert "exit code 85" not in said and "starts (" not in said, "neither a claim nor a restart"
    assert watched.wait_for_event("checkpoint_failed")["reason"].startswith("rank")
    whole = [info for info in list_checkpoints(run.directory) if info.complete]
    assert whole and all(verdict.verdict == "ok" for info in whole for verdict in verify(info))

    ballast.unlink()
    again = train(config)
    assert again.returncode == 0, again.stderr
    assert run.weights() == reference.run.weights()


def test_a_cache_that_finds_no_room_leaves_none_of_it_behind(disk: Tmpfs, workplace: Path) -> None:
    path = write_config(workplace, "cache-full", data__cache_directory=str(disk.place / "cache"))
    config = load_run_config(path)
    prepare(config)
    caches = sorted((disk.place / "cache" / "tokenized").iterdir())
    longer = load_run_config(path, ["data.sequence_length=32"])
    ballast = disk.fill(leave=8 * 1024)
    with pytest.raises(UserError, match=r"no room left .*data\.cache_directory"):
        prepare(longer)
    assert sorted((disk.place / "cache" / "tokenized").iterdir()) == caches
    ballast.unlink()
    assert len(prepare(longer).train.sources) == 1


def test_a_tokenizer_that_finds_no_room_is_an_error_in_words_and_leaves_nothing(
    disk: Tmpfs, workplace: Path
) -> None:
    """The library that writes it raises no OSError."""
    path = write_config(
        workplace, "tokenizer-full", data__cache_directory=str(disk.place / "cache")
    )
    config = load_run_config(path)
    (disk.place / "cache/tokenizers").mkdir(parents=True)
    (disk.place / "cache/tokenized").mkdir()
    (disk.place / "cache/hashes").mkdir()
    ballast = disk.fill(leave=8 * 1024)
    with pytest.raises(
        UserError, match=r"tokenizer cannot be written .*free space.*data\.cache_directory"
    ):
        prepare(config)
    assert not list((disk.place / "cache/tokenizers").iterdir())
    ballast.unlink()

    indexed = disk.place / "indexed"
    config = load_run_config(
        path, ["data.format=text", f"data.cache_directory={workplace / 'cache'}"]
    )
    write_megatron(config, workplace / "indexed")
    files = sum(each.stat().st_size for each in (workplace / "indexed").glob("*.*"))
    ballast = disk.fill(leave=files + 16 * 1024)
    with pytest.raises(UserError, match=r"indexed: cannot be written .*No space left"):
        write_megatron(config, indexed)
    assert list(indexed.glob("*.idx")), "it was the tokenizer that found no room"
    assert not (indexed / "tokenizer").exists()
    ballast.unlink()
