"""Runs whose directory is a bucket behind the real gcsfuse: killed in mid-save, mount gone, bucket
not answering.

Needs root for mounting, and the two programs that `.ci/tools/gcsfuse` builds.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.facts import says
from tests.integration.conftest import Reference
from tests.integration.gcs import Bucket
from tests.integration.held import Holds
from tests.integration.tiny_run import STEPS, Run, contents, train, write_config, write_rows
from tests.integration.watched import WatchedRun

from drillyard.training.checkpoint.inventory import CheckpointInfo, list_checkpoints
from drillyard.training.checkpoint.verification import verify


@pytest.fixture
def bucket(tmp_path: Path) -> Iterator[Bucket]:
    bucket = Bucket(tmp_path)
    bucket.start_server()
    bucket.mount()
    yield bucket
    bucket.discard()


@contextlib.contextmanager
def slow(bucket: Bucket) -> Iterator[None]:
    """Requests take some 50 ms each, so that a save lasts long enough to be hit."""
    over = threading.Event()

    def hold_and_release() -> None:
        while not over.is_set():
            bucket.hold_server()
            time.sleep(0.05)
            bucket.release_server()
            time.sleep(0.002)

    thread = threading.Thread(target=hold_and_release)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def last_figures(run: Run) -> list[tuple[int, float, float]]:
    """(step, loss, gradient norm) of each step, as it was last done."""
    figures = {step: (step, loss, norm) for step, loss, norm in run.figures()}
    return [figures[step] for step in sorted(figures)]


def good(run: Run) -> list[CheckpointInfo]:
    """The complete checkpoints of which every file is as written."""
    found = list_checkpoints(run.directory)
    return [
        info for info in found if info.complete and all(v.verdict == "ok" for v in verify(info))
    ]


def test_a_run_on_a_bucket_is_killed_in_mid_save_and_resumes_to_the_bit(
    bucket: Bucket, reference: Reference, watch: Callable[..., WatchedRun], tmp_path: Path
) -> None:
    # Config, data, cache and run: all of it is in the bucket.
    write_rows(bucket.place / "rows.jsonl")
    config = write_config(bucket.place, "killed", checkpoint={"every_steps": 10, "keep": 2})
    # The save is killed wherever it is, but never when it is done.
    holds = Holds(tmp_path, "attempt-0-step-15", "attempt-0-manifest-20")
    watched = watch(config, holds)
    run = watched.run
    watched.wait_for_event("checkpoint", step=10)
    saving = run.directory / "checkpoints" / "step-00000020"
    with slow(bucket):
        holds.release("attempt-0-step-15")
        while not (saving.is_dir() and list(saving.glob("*.distcp"))):
            assert watched.process.poll() is None, watched.errors
        watched.kill()
    assert not (saving / "manifest.json").exists(), "killed too late: the save was complete"
    assert [info.step for info in good(run)] == [10]

    ended = train(config)
    assert ended.returncode == 0, ended.stderr
    assert [event["step"] for event in run.events("resume")] == [10]
    assert run.events("checkpoint_removed")[0]["step"] == 20, (
        "what is left of the torn save goes first"
    )
    assert last_figures(run) == reference.run.figures()
    assert run.weights() == reference.run.weights()
    assert (
        contents(run.directory / "final").keys()
        == contents(reference.run.directory / "final").keys()
    )
    assert [info.step for info in good(run)] == [30, 40]

    # What another host sees, which mounts the bucket again, is the same.
    before = contents(run.directory)
    bucket.unmount()
    bucket.mount()
    assert contents(run.directory) == before
    again = train(config)
    assert again.returncode == 0 and says(
        again.stdout, "finished ... summary.txt ... training.steps"
    )


def test_a_run_outlives_its_mount_and_a_bucket_that_does_not_answer(
    bucket: Bucket,
    reference: Reference,
    workplace: Path,
    watch: Callable[..., WatchedRun],
    tmp_path: Path,
) -> None:
    config = write_config(
        bucket.place,
        "mount-gone",
        data__source=str(workplace / "rows.jsonl"),
        data__cache_directory=str(workplace / "cache"),
        checkpoint={"every_steps": 5, "keep": 2},
    )
    holds = Holds(tmp_path, "attempt-0-step-8", "attempt-0-step-30")
    watched = watch(config, holds)
    run = watched.run
    saved = watched.wait_for_event("checkpoint", step=5)["step"]
    bucket.kill_mount()
    holds.release("attempt-0-step-8")
    failed = watched.wait_for_event("checkpoint_failed")
    assert failed["step"] > saved
    watched.wait_for(
        lambda line: (
            line["event"] == "warning" and says(line["text"], "metrics.jsonl ... cannot be written")
        )
    )
    for rank in (0, 1):
        run.send(signal.SIGSTOP, rank)
    bucket.mount()
    assert saved in [info.step for info in good(run)]
    for rank in (0, 1):
        run.send(signal.SIGCONT, rank)
    holds.release("attempt-0-step-30")
    back = watched.wait_for_event("checkpoint", step=failed["step"])
    bucket.hold_server()
    time.sleep(2)
    bucket.release_server()
    assert watched.end() == 0, "".join(watched.errors)
    assert back["step"] < STEPS

    assert run.events("checkpoint_failed")[0]["step"] == failed["step"]
    assert watched.lines_with("metrics.jsonl: ... again") and not watched.lines_with("lost")
    assert run.events("failure") == []
    assert run.figures() == reference.run.figures(), (
        "no line of a step is lost, and none is there twice"
    )
    assert run.weights() == reference.run.weights()
    assert good(run)[-1].step == STEPS
