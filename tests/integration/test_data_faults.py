"""Data that change, break or vanish under a run of two ranks: the same bits as undisturbed, or a
clear refusal."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.facts import says
from tests.integration.conftest import Reference
from tests.integration.held import Holds
from tests.integration.tiny_run import Run, contents, drillyard, train, wait_until, write_config


def test_no_fault_of_the_data_changes_a_sample(
    workplace: Path, reference: Reference, tmp_path: Path
) -> None:
    rows = workplace / "changing.jsonl"
    content = (workplace / "rows.jsonl").read_bytes()
    rows.write_bytes(content)
    config = write_config(
        workplace,
        "data-faults",
        data__source={"path": str(rows), "name": "rows"},
        data__cache_directory=str(workplace / "changing-cache"),
        checkpoint={"every_steps": 5, "keep": 9},
        evaluation={"metrics": ["loss"]},
    )
    run = Run(config)

    # A bit of every sequence flips on the disk while the ranks train: they notice, and the next
    # attempt makes it again.
    holds = Holds(tmp_path, "attempt-0-step-20", "attempt-1-step-18")
    process = run.start(holds=holds)
    wait_until(lambda: run.last_step() >= 12, process)
    (cache,) = (workplace / "changing-cache" / "tokenized").iterdir()
    flip_every_eighth_byte(cache / "train.tokens")
    holds.release("attempt-0-step-20")
    wait_until(lambda: holds.reached("attempt-1-step-18", 0, 1), process)
    assert len(run.events("resume")) == 1
    run.send(signal.SIGTERM, rank=1)
    assert process.wait() == 85, process.communicate()[1]
    (failure,) = run.events("failure")
    assert says(failure["reason"], "cache ... rows ... damaged: ... sequence")
    assert says(run.events("data")[1]["notes"][0], "rebuilt")

    # A row is appended while the run is down: refused, and nothing of the run is touched.
    rows.write_bytes(content + content.splitlines(keepends=True)[0])
    saved = contents(run.directory / "checkpoints")
    refused = train(config)
    assert refused.returncode == 2
    assert says(refused.stderr, f"data.source rows ({rows}) changed")
    assert contents(run.directory / "checkpoints") == saved

    # The same content written again is the same source. Its batches can be shown.
    rows.write_bytes(content)
    shown = drillyard("data", "show", run.directory, "--step", 3, "--rank", 1, "--limit", 1)
    assert shown.returncode == 0, shown.stderr
    assert f"{rows}, line " in shown.stdout
    assert says(shown.stdout, "1 of 2 sequences ... step 3 ... rank 1")

    # The source vanishes: the run goes on from its cache to its end, and says so.
    rows.unlink()
    ended = train(config, "--console", "text")
    assert ended.returncode == 0, ended.stderr
    assert says(ended.stdout, f"{rows} (rows): ... missing ... cache")
    assert set(run.figures()) == set(reference.run.figures())
    assert run.weights() == reference.run.weights()

    # A stretch of it repeats to the bit, on as many ranks, without the source: from step 10 to step
    # 15, which are saved on schedule. The step that the signal met is saved too, a later one.
    replayed = drillyard("train", config, "--replay", 15)
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    assert says(replayed.stdout, "equal: ... 5 logged steps (11 to 15)")


def flip_every_eighth_byte(path: Path) -> None:
    """In place, as a disk does it: a process that has mapped the file sees it."""
    content = bytearray(path.read_bytes())
    for place in range(0, len(content), 8):
        content[place] ^= 0x01
    with path.open("r+b") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
