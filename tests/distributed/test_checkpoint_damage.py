"""Damage to a checkpoint on two ranks: noticed by all of them together, named, and the older
checkpoint really loaded.

Every case damages the newer of two checkpoints with different values and loads into a state of
other values still, so that what was loaded shows in the bits. Starting ranks costs seconds: one
start does it all, tests judge it.
"""

from __future__ import annotations

import errno
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.distributed.checkpoint_case import (
    Recorder,
    differences,
    emptied,
    make_checkpointer,
    make_state,
    save_layout,
    sharded,
)
from tests.distributed.ranks import run_ranks
from tests.facts import says

from drillyard.errors import UserError
from drillyard.telemetry import append_event
from drillyard.training.checkpoint import verification
from drillyard.training.checkpoint.dcp_storage import CheckpointReader
from drillyard.training.checkpoint.inventory import list_checkpoints
from drillyard.training.checkpoint.manifest import (
    FORMAT_VERSION,
    file_checksum,
    read_manifest,
    write_manifest,
)

FILES = ["__0_0.distcp", "__1_0.distcp", ".metadata", "manifest.json"]
SAMPLED_FLIPS = 40


def flip(path: Path, position: int | None = None, mask: int = 0x10) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if position is None else position] ^= mask
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def zero_tail(path: Path) -> None:
    """As after a power failure: the size is there, the last pages never reached the disk."""
    data = path.read_bytes()
    keep = len(data) // 2
    path.write_bytes(data[:keep] + bytes(len(data) - keep))


def swap(first: Path, second: Path) -> None:
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)


def replace_by_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def replace_by_dangling_link(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.parent / "gone")


def copy_from(step: str, name: str) -> Callable[[Path], Any]:
    """Put the file of another checkpoint of the run, or of another run, in the place of the newest
    one's."""
    return lambda newest: shutil.copy(newest.parent / step / name, newest / name)


def later_format(newest: Path) -> None:
    write_manifest(newest, replace(read_manifest(newest), format_version=FORMAT_VERSION + 1))


# Damage by name: the file that must be named, and what is done to the newest checkpoint's
# directory.
Damage = tuple[str, Callable[[Path], Any]]
DAMAGE: dict[str, Damage] = {
    **{f"flipped {n}": (n, lambda d, n=n: flip(d / n)) for n in FILES},
    **{f"cut {n}": (n, lambda d, n=n: cut(d / n)) for n in FILES},
    **{f"emptied {n}": (n, lambda d, n=n: (d / n).write_bytes(b"")) for n in FILES},
    **{f"missing {n}": (n, lambda d, n=n: (d / n).unlink()) for n in FILES},
    **{f"zero-filled tail of {n}": (n, lambda d, n=n: zero_tail(d / n)) for n in FILES},
    **{
        f"directory in place of {n}": (n, lambda d, n=n: replace_by_directory(d / n)) for n in FILES
    },
    **{
        f"dangling link in place of {n}": (n, lambda d, n=n: replace_by_dangling_link(d / n))
        for n in FILES
    },
    **{f"older save's {n}": (n, copy_from("step-00000010", n)) for n in FILES[:2]},
    "older save's manifest": ("manifest.json", copy_from("step-00000010", "manifest.json")),
    "other run's manifest": (
        "__0_0.distcp",
        copy_from("../../other/checkpoints/step-00000020", "manifest.json"),
    ),
    "other run's shard": (
        "__1_0.distcp",
        copy_from("../../other/checkpoints/step-00000020", "__1_0.distcp"),
    ),
    "longer manifest": (
        "manifest.json",
        lambda d: (d / FILES[3]).write_bytes((d / FILES[3]).read_bytes() + b"\n"),
    ),
    "swapped shards": ("__0_0.distcp", lambda d: swap(d / FILES[0], d / FILES[1])),
    "swapped shard and index": (".metadata", lambda d: swap(d / FILES[0], d / FILES[2])),
}


def really_loaded(run: Path) -> tuple[int, list[str], list[tuple[str, str]]]:
    """Load the newest good checkpoint of `run`: its step, entries whose bits are not step 10's, and
    the messages."""
    events = Recorder()
    checkpointer = make_checkpointer(run, events)
    state = emptied(make_state(10, 1))
    loaded = checkpointer.load(state)
    checkpointer.close()
    assert loaded is not None
    message = [(name, fields["reason"]) for name, fields in events.events]
    return loaded.step, differences(state, 10, 1), message


@contextmanager
def copy_of(good: Path, label: str, damage: Callable[[Path], Any]) -> Iterator[Path]:
    """A copy of the good run whose newest checkpoint is damaged, seen by all ranks."""
    run = good.parent / label.replace(" ", "-").replace("/", "-")
    if dist.get_rank() == 0:
        shutil.copytree(good, run)
        damage(run / "checkpoints" / "step-00000020")
    dist.barrier()
    yield run
    dist.barrier()


def load_damaged(good: Path) -> dict[str, Any]:
    outcomes = {}
    for label, (_, damage) in DAMAGE.items():
        with copy_of(good, label, damage) as run:
            outcomes[label] = really_loaded(run)
    return outcomes


def load_sampled_flips(good: Path) -> dict[str, Any]:
    """Single bits, drawn over all bytes of all files (each byte in turn is the unit tests' to
    try)."""
    draw = random.Random(5)
    sizes = {name: (good / "checkpoints" / "step-00000020" / name).stat().st_size for name in FILES}
    outcomes = {}
    for _ in range(SAMPLED_FLIPS):
        name = draw.choice(FILES)
        position, mask = draw.randrange(sizes[name]), 1 << draw.randrange(8)
        label = f"{name} {position} {mask}"
        with copy_of(good, label, lambda d, n=name, p=position, m=mask: flip(d / n, p, m)) as run:
            outcomes[label] = (name, *really_loaded(run))
    return outcomes


def seen_on_one_rank_only(good: Path) -> dict[str, Any]:
    """Rank 1 alone reads other bytes, or gets an I/O error, before the state is touched or after;
    rank 0 sees no harm.

    Each rank verifies the index and the shards that its own state needs: here rank 1 reads its own
    shard.
    """

    def misread(name: str) -> Callable[..., str]:
        def checksum(path: Path, *rest: Any) -> str:
            found = file_checksum(path, *rest)
            return "0" * 32 if path.match(f"step-00000020/{name}") else found

        return checksum

    def unreadable(path: Path, *rest: Any) -> str:
        if path.match("step-00000020/__1_0.distcp"):
            raise OSError(errno.EIO, "Input/output error")
        return file_checksum(path, *rest)

    read_data = CheckpointReader.read_data

    def fails_late(self: Any, plan: Any, planner: Any) -> Any:
        future = read_data(self, plan, planner)
        if "step-00000020" in str(self.path):
            raise OSError(errno.EIO, "Input/output error", "__1_0.distcp")
        return future

    cases: dict[str, tuple[Any, str, Any]] = {
        "shard": (verification, "file_checksum", misread("__1_0.distcp")),
        "index": (verification, "file_checksum", misread(".metadata")),
        "I/O error": (verification, "file_checksum", unreadable),
        "I/O error after the check": (CheckpointReader, "read_data", fails_late),
    }
    outcomes = {}
    for label, (owner, attribute, replacement) in cases.items():
        with pytest.MonkeyPatch.context() as patch:
            if dist.get_rank() == 1:
                patch.setattr(owner, attribute, replacement)
            outcomes[label] = really_loaded(good)
    return outcomes


def refused(run: Path, state: dict[str, Any], source: Path | None = None) -> str:
    checkpointer = make_checkpointer(run, Recorder())
    with pytest.raises(UserError) as refusal:
        checkpointer.load(state, source)
    checkpointer.close()
    return str(refusal.value)


def load_in_vain(good: Path) -> dict[str, str]:
    folder = good.parent
    bad, lost, later = folder / "bad", folder / "lost", folder / "later"
    if dist.get_rank() == 0:
        for run in (bad, lost, later):
            shutil.copytree(good, run)
        for info in list_checkpoints(bad):
            flip(info.path / "__1_0.distcp")
        for info in list_checkpoints(lost):
            append_event(lost, "checkpoint", step=info.step)
            (info.path / "manifest.json").unlink()
        later_format(later / "checkpoints" / "step-00000020")
    dist.barrier()
    before = contents(bad), contents(lost), contents(later)
    state = make_state(10, 1)
    checkpointer = make_checkpointer(folder / "nowhere", Recorder())
    assert checkpointer.load(state) is None
    checkpointer.close()
    messages = {
        "none left": refused(bad, state),
        "all manifests lost": refused(lost, state),
        "later format": refused(later, state),
        "later format by step directory": refused(
            later, state, later / "checkpoints" / "step-00000020"
        ),
        "by step directory": refused(bad, state, bad / "checkpoints" / "step-00000020"),
        "by path": refused(bad, state, bad),
        "nowhere": refused(bad, state, bad / "nowhere"),
        "unknown key": refused(good, {**state, "model": {"extra": sharded(torch.zeros(4, 4), 1)}}),
        "other shape": refused(good, {**state, "model": {"wide": sharded(torch.zeros(8, 34), 1)}}),
    }
    assert before == (
        contents(bad),
        contents(lost),
        contents(later),
    ), "a refused start changes nothing"
    return messages


def contents(run: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(run)): path.read_bytes()
        for path in sorted(run.rglob("*"))
        if path.is_file()
    }


def on_two_ranks(folder: Path) -> dict[str, Any]:
    good = folder / "good"
    for step in (10, 20):
        save_layout(good, step, 1)
    checkpointer = make_checkpointer(folder / "other", Recorder())
    checkpointer.save(20, make_state(90, 1), metadata={})
    checkpointer.close()
    if dist.get_rank() == 0:
        (good / "checkpoints" / "step-00000020" / "notes.txt").write_text("nobody reads this")
    dist.barrier()
    scenarios = (load_damaged, load_sampled_flips, seen_on_one_rank_only, load_in_vain)
    outcomes = {scenario.__name__: scenario(good) for scenario in scenarios}
    state = emptied(make_state(20, 1))
    checkpointer = make_checkpointer(good, Recorder())
    checkpointer.load(state)
    checkpointer.close()
    return {**outcomes, "undamaged": differences(state, 20, 1)}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(on_two_ranks, 2, tmp_path_factory.mktemp("damage"))


def test_without_damage_the_newest_is_loaded_and_a_file_of_nobodys_does_no_harm(
    two_ranks: list[dict[str, Any]],
) -> None:
    assert [rank["undamaged"] for rank in two_ranks] == [[], []]


@pytest.mark.parametrize("label", DAMAGE)
def test_damage_to_any_file_is_noticed_named_and_the_older_checkpoint_used_by_all(
    label: str, two_ranks: list[dict[str, Any]]
) -> None:
    (step, wrong, message), (other_step, other_wrong, _) = (
        rank["load_damaged"][label] for rank in two_ranks
    )
    assert (step, wrong, other_step, other_wrong) == (10, [], 10, [])
    ((event, reason),) = message
    assert event == (
        "checkpoint_incomplete" if label == "missing manifest.json" else "checkpoint_damaged"
    )
    assert "step-00000020" in reason and DAMAGE[label][0] in reason


def test_a_single_flipped_bit_anywhere_makes_all_ranks_load_the_older_checkpoint(
    two_ranks: list[dict[str, Any]],
) -> None:
    outcomes, others = (rank["load_sampled_flips"] for rank in two_ranks)
    assert len(outcomes) == SAMPLED_FLIPS and {name for name, *_ in outcomes.values()} == set(FILES)
    for label, (name, step, wrong, message) in outcomes.items():
        assert (step, wrong, others[label][1:3]) == (10, [], (10, [])), label
        assert len(message) == 1 and name in message[0][1], label


@pytest.mark.parametrize(
    ("label", "said"),
    [
        ("shard", "__1_0.distcp: wrong checksum"),
        ("index", ".metadata: wrong checksum"),
        ("I/O error", "__1_0.distcp: unreadable ... errno 5"),
        ("I/O error after the check", "error: '__1_0.distcp'"),
    ],
)
def test_what_only_one_rank_sees_makes_all_ranks_turn_to_the_same_older_checkpoint(
    label: str, said: str, two_ranks: list[dict[str, Any]]
) -> None:
    (step, wrong, message), (other_step, other_wrong, _) = (
        rank["seen_on_one_rank_only"][label] for rank in two_ranks
    )
    assert (step, wrong, other_step, other_wrong) == (10, [], 10, [])
    assert len(message) == 1 and says(message[0][1], said)


def test_a_start_is_refused_when_every_checkpoint_is_damaged_or_the_one_asked_for_is(
    two_ranks: list[dict[str, Any]],
) -> None:
    for messages in (rank["load_in_vain"] for rank in two_ranks):
        assert says(
            messages["none left"], "none of its 2 checkpoints ... __1_0.distcp: wrong checksum"
        )
        assert "step-00000020/__1_0.distcp: wrong checksum" in messages["by step directory"]
        assert "step-00000020/__1_0.distcp: wrong checksum" in messages["by path"]
        assert says(messages["nowhere"], "nowhere: ... no checkpoint")


def test_a_start_is_refused_when_all_manifests_of_once_complete_checkpoints_are_gone(
    two_ranks: list[dict[str, Any]],
) -> None:
    for messages in (rank["load_in_vain"] for rank in two_ranks):
        assert says(
            messages["all manifests lost"], "none of its 2 checkpoints ... manifest.json ... gone"
        )


def test_a_checkpoint_of_a_later_format_is_refused_and_no_older_one_used_in_its_place(
    two_ranks: list[dict[str, Any]],
) -> None:
    for messages in (rank["load_in_vain"] for rank in two_ranks):
        for label in ("later format", "later format by step directory"):
            assert says(
                messages[label],
                f"step-00000020: manifest.json: ... version {FORMAT_VERSION + 1} ..."
                f" {FORMAT_VERSION}",
            )


def test_a_state_that_does_not_fit_is_an_error_and_no_reason_for_an_older_checkpoint(
    two_ranks: list[dict[str, Any]],
) -> None:
    for messages in (rank["load_in_vain"] for rank in two_ranks):
        assert says(messages["unknown key"], "not fit ... model.extra")
        assert says(messages["other shape"], "not fit ... model.wide")
