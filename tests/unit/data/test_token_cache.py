"""The tokenised cache is whole or rebuilt, and two builders never disturb each other."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from tests.facts import says

from drillyard.config.run import RunConfig
from drillyard.data import token_cache
from drillyard.data.mapped_sequences import (
    BULK,
    DAMAGED_FILE,
    FILES,
    ORIGINS,
    DamagedSequence,
    row_checksum,
)
from drillyard.data.prepared_data import prepare
from drillyard.data.raw_batches import hash_bytes_of, json_digest
from drillyard.data.token_cache import DamagedCache, open_cache, remove_leftovers
from drillyard.errors import UserError
from drillyard.supervise.process_identity import start_time

MakeConfig = Callable[..., RunConfig]
WriteRows = Callable[..., Path]


@pytest.fixture
def config(make_config: MakeConfig, write_rows: WriteRows) -> RunConfig:
    return make_config(
        write_rows([{"text": f"text number {n}"} for n in range(30)]), held_out={"fraction": 0.3}
    )


def cache_directory(config: RunConfig) -> Path:
    assert config.data.cache_directory is not None
    (directory,) = (Path(config.data.cache_directory) / "tokenized").iterdir()
    return directory


def test_a_whole_cache_opens(config: RunConfig) -> None:
    prepare(config)
    manifest = open_cache(cache_directory(config), "all")
    assert set(manifest["parts"]) == {"train", "held_out"}


@pytest.mark.parametrize("tokenizer", [None, {"train": "bpe", "vocab_size": 300}])
def test_the_same_bytes_under_another_kind_of_file_are_another_source(
    tokenizer: object, make_config: MakeConfig, tmp_path: Path
) -> None:
    settings = {} if tokenizer is None else {"tokenizer": tokenizer}
    text, lines = tmp_path / "a.txt", tmp_path / "a.jsonl"
    text.write_text("".join(json.dumps({"text": f"text {n}"}) + "\n" for n in range(3)))
    first = prepare(make_config(text, **settings))
    text.rename(lines)
    second = prepare(make_config(lines, **settings))
    assert first.report.parts["a"]["documents"] == 1
    assert second.report.parts["a"]["documents"] == 3
    assert (first.text_tokenizer.key == second.text_tokenizer.key) == (tokenizer is None)


@pytest.mark.slow
def test_a_cut_or_a_flipped_bit_is_noticed_wherever_it_is(config: RunConfig) -> None:
    prepare(config)
    directory = cache_directory(config)
    names = {
        "manifest.json",
        *(f"{part}.{name}" for part in ("train", "held_out") for name in (*FILES, ORIGINS)),
    }
    assert {path.name for path in directory.iterdir()} == names
    for name in sorted(names):
        path = directory / name
        content = path.read_bytes()
        step = max(1, len(content) // 40)
        for place in range(0, len(content), step):
            path.write_bytes(content[:place])
            with pytest.raises(DamagedCache):
                open_cache(directory, "all")
            changed = bytearray(content)
            changed[place] ^= 0x10
            path.write_bytes(changed)
            with pytest.raises(DamagedCache):
                open_cache(directory, "all")
        path.write_bytes(content)
    open_cache(directory, "all")


def test_a_missing_file_is_noticed(config: RunConfig) -> None:
    prepare(config)
    directory = cache_directory(config)
    for path in sorted(directory.iterdir()):
        content = path.read_bytes()
        path.unlink()
        with pytest.raises(DamagedCache):
            open_cache(directory, "sizes")
        path.write_bytes(content)


def test_a_damaged_cache_is_reported_and_made_again(config: RunConfig) -> None:
    before = prepare(config)
    tokens = cache_directory(config) / "train.tokens"
    good = tokens.read_bytes()
    tokens.write_bytes(b"\0" * len(good))
    after = prepare(config)
    assert tokens.read_bytes() == good
    assert after.train.fingerprint == before.train.fingerprint
    (note,) = after.report.notes
    assert says(note, "damaged ... train.tokens ... rebuilt")


def test_a_rank_that_only_opens_never_builds(config: RunConfig) -> None:
    with pytest.raises(UserError, match="all hosts share"):
        prepare(config, only_open=True)
    prepare(config)
    (cache_directory(config) / "train.tokens").write_bytes(b"")
    with pytest.raises(UserError, match="damaged"):
        prepare(config, only_open=True)


def test_the_second_of_two_builders_takes_the_first_one_s_cache(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first builder finishes while the second has all but renamed."""
    write_manifest = token_cache._write_manifest
    first_done: list[int] = []

    def overtaken(directory: Path, manifest: dict[str, object]) -> None:
        write_manifest(directory, manifest)
        if not first_done:
            first_done.append(1)
            prepare(config)

    monkeypatch.setattr(token_cache, "_write_manifest", overtaken)
    second = prepare(config)
    assert any(says(note, "another run built") for note in second.report.notes)
    open_cache(cache_directory(config), "all")


def test_a_builder_replaces_a_damaged_cache_that_stands_in_its_way(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_manifest = token_cache._write_manifest

    def obstructed(directory: Path, manifest: dict[str, object]) -> None:
        write_manifest(directory, manifest)
        final = directory.with_name(directory.name.split(".")[0])
        shutil.copytree(directory, final)
        (final / "train.tokens").write_bytes(b"half")

    monkeypatch.setattr(token_cache, "_write_manifest", obstructed)
    prepare(config)
    open_cache(cache_directory(config), "all")


@contextlib.contextmanager
def small_disk() -> Iterator[None]:
    """No file may grow beyond 2 KiB: writing more fails like a full disk. Not a fixture: pytest's
    own output may be a file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2048, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_is_an_error_and_leaves_nothing_half_made(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    for number in range(20):
        (tmp_path / "texts").mkdir(exist_ok=True)
        (tmp_path / "texts" / f"{number}.txt").write_text(f"{number} " * 400)
    config = make_config(tmp_path / "texts")
    with small_disk(), pytest.raises(UserError, match="no room left"):
        prepare(config)
    assert config.data.cache_directory is not None
    assert list((Path(config.data.cache_directory) / "tokenized").iterdir()) == []


def test_an_interrupted_build_leaves_nothing(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(token_cache, "_write_manifest", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepare(config)
    assert config.data.cache_directory is not None
    assert list((Path(config.data.cache_directory) / "tokenized").iterdir()) == []


def test_only_what_surely_dead_or_old_builders_left_is_removed(tmp_path: Path) -> None:
    place, pid, started, _ = token_cache._builder_identity().rsplit("-", 3)
    living = tmp_path / f"a.building-{place}-{pid}-{started}-1"
    dead = tmp_path / f"b.building-{place}-{pid}-{int(started) - 1}-2"
    elsewhere = tmp_path / f"c.building-0123456789abcdef4026531836-{pid}-1-3"
    old = tmp_path / f"d.building-0123456789abcdef4026531836-{pid}-1-4"
    doomed = tmp_path / f"e.building-{place}-{pid}-{int(started) - 1}-5-removed"
    users = [tmp_path / "f.building-notes", tmp_path / "g.building-a-plan-for-may"]
    for path in (living, dead, elsewhere, old, doomed, *users):
        path.mkdir()
        (path / "train.tokens").write_bytes(b"x")
    long_ago = time.time() - 2 * token_cache.STALE_SECONDS
    for path in (old / "train.tokens", old, *(users[1] / "train.tokens", users[1])):
        os.utime(path, (long_ago, long_ago))
    remove_leftovers(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([living, elsewhere, *users])


def test_a_builder_that_nobody_has_reaped_yet_is_dead(tmp_path: Path) -> None:
    builder = subprocess.Popen(["sleep", "1000"])
    place, started = token_cache._builder_identity().rsplit("-", 3)[0], start_time(builder.pid)
    left = tmp_path / f"a.building-{place}-{builder.pid}-{started}-1"
    left.mkdir()
    remove_leftovers(tmp_path)
    assert left.is_dir()
    builder.kill()
    os.waitid(os.P_PID, builder.pid, os.WEXITED | os.WNOWAIT)
    remove_leftovers(tmp_path)
    assert not left.exists()
    builder.wait()


def test_a_manifest_of_another_format_version_is_not_read(config: RunConfig) -> None:
    prepare(config)
    path = cache_directory(config) / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest.pop("checksum")
    manifest["format_version"] += 1
    path.write_text(json.dumps({**manifest, "checksum": json_digest(manifest)}))
    with pytest.raises(DamagedCache):
        open_cache(cache_directory(config), "sizes")


def test_a_forged_cache_with_tokens_that_the_model_lacks_is_named(config: RunConfig) -> None:
    """With checksums that are right: they find damage, not forgery."""
    prepare(config)
    directory = cache_directory(config)
    manifest = json.loads((directory / "manifest.json").read_text())
    manifest.pop("checksum")
    part = manifest["parts"]["train"]
    tokens = np.fromfile(directory / "train.tokens", part["token_dtype"])
    tokens[0] = np.iinfo(tokens.dtype).max
    loss, starts = (np.fromfile(directory / f"train.{name}", "u1") for name in ("loss", "starts"))
    offsets = [*np.fromfile(directory / "train.offsets", "i8").tolist(), len(tokens)]
    checksums = np.array(
        [
            row_checksum(tokens[a:b], loss[a >> 3 : b >> 3], starts[a >> 3 : b >> 3])
            for a, b in pairwise(offsets)
        ],
        np.uint64,
    )
    for name, array in (("tokens", tokens), ("checksums", checksums)):
        array.tofile(directory / f"train.{name}")
        forged = hash_bytes_of(directory / f"train.{name}")
        part["files"][f"train.{name}"]["xxh3_128"] = forged
    text = json.dumps({**manifest, "checksum": json_digest(manifest)})
    (directory / "manifest.json").write_text(text)
    (sequences,) = prepare(config).train.sources
    with pytest.raises(UserError, match=r"train\.tokens") as refused:
        sequences.read([0])
    command = shlex.split(str(refused.value).rpartition("Delete it: ")[2])
    subprocess.run(command, check=True)
    (again,) = prepare(config).train.sources
    assert int(again.read([0]).input_ids.max()) < 1000


def test_reading_goes_through_shared_read_only_maps(config: RunConfig) -> None:
    (sequences,) = prepare(config).train.sources
    with pytest.raises(ValueError, match="read-only"):
        sequences.valid_tokens[0] = 1
    assert sequences.valid_tokens.dtype == np.int32


def flip(path: Path, place: int) -> None:
    """Flip a bit in place, as a disk would: maps of the file see it."""
    with path.open("r+b") as file:
        file.seek(place)
        (value,) = file.read(1)
        file.seek(place)
        file.write(bytes([value ^ 0x04]))


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every cache counts as one too large to be verified whole at each start."""
    monkeypatch.setattr(token_cache, "VERIFIED_WHOLE_BYTES", 0)


@pytest.mark.usefixtures("large")
def test_damage_in_a_large_cache_is_noticed_before_the_model_sees_it(config: RunConfig) -> None:
    (sequences,) = prepare(config).train.sources
    directory = cache_directory(config)
    whole = [sequences.read([row]) for row in range(len(sequences))]
    (opened,) = prepare(config, only_open=True).train.sources
    for name in ("tokens", "loss", "starts"):
        path = directory / f"train.{name}"
        for place in range(path.stat().st_size):
            flip(path, place)
            damaged = 0
            for row in range(len(opened)):
                try:
                    assert np.array_equal(opened.read([row]).input_ids, whole[row].input_ids)
                except DamagedSequence as error:
                    damaged += 1
                    assert f"sequence {row} of train" in str(error)
            assert damaged == 1, (name, place)
            flip(path, place)
    (directory / DAMAGED_FILE).unlink()


@pytest.mark.usefixtures("large")
def test_the_index_of_a_large_cache_is_verified_when_it_is_opened(config: RunConfig) -> None:
    prepare(config)
    directory = cache_directory(config)
    for name in {*FILES, ORIGINS} - set(BULK):
        path = directory / f"train.{name}"
        flip(path, path.stat().st_size // 2)
        with pytest.raises(DamagedCache, match=f"checksum of train.{name}"):
            open_cache(directory, "start")
        flip(path, path.stat().st_size // 2)
    open_cache(directory, "start")


@pytest.mark.usefixtures("large")
def test_what_a_reader_met_is_made_again_by_the_next_start(config: RunConfig) -> None:
    before = prepare(config)
    tokens = cache_directory(config) / "train.tokens"
    good = tokens.read_bytes()
    flip(tokens, 0)
    with pytest.raises(DamagedSequence, match="next start"):
        before.train.sources[0].read(range(len(before.train.sources[0])))
    after = prepare(config)
    assert tokens.read_bytes() == good
    assert after.train.fingerprint == before.train.fingerprint
    assert not (cache_directory(config) / DAMAGED_FILE).exists()
    (note,) = after.report.notes
    assert says(note, "damaged ... train.tokens ... rebuilt")


@pytest.mark.usefixtures("large")
def test_a_cache_that_is_whole_after_all_is_kept(config: RunConfig) -> None:
    data = prepare(config)
    tokens = cache_directory(config) / "train.tokens"
    flip(tokens, 0)
    with pytest.raises(DamagedSequence):
        data.train.sources[0].read(range(len(data.train.sources[0])))
    flip(tokens, 0)
    inode = tokens.stat().st_ino
    assert prepare(config).report.notes == []
    assert tokens.stat().st_ino == inode
    assert not (cache_directory(config) / DAMAGED_FILE).exists()


def test_the_places_of_documents_are_kept(
    make_config: MakeConfig, write_rows: WriteRows, tmp_path: Path
) -> None:
    rows = [{"text": f"<{n}> " + "word " * (n % 60)} for n in range(200)]
    write_rows(rows[:90], "rows/a.jsonl")
    write_rows(rows[90:], "rows/deep/b.jsonl")
    (tmp_path / "rows" / "c.txt").write_text("<200> a text")
    config = make_config(tmp_path / "rows", held_out={"fraction": 0.3}, too_long="split")
    data = prepare(config)
    backend = data.tokenizer.backend_tokenizer
    message: dict[int, set[tuple[str, str]]] = {}
    for sequences in (*data.train.sources, *data.held_out.values()):
        for row in range(len(sequences)):
            batch = sequences.read([row])
            places = sequences.places(row)
            assert len(places) == batch.document_ids.max() + 1
            for document, place in enumerate(places):
                text = backend.decode(
                    batch.input_ids[0][batch.document_ids[0] == document].tolist()
                )
                if text.startswith("<"):
                    message.setdefault(int(text[1 : text.index(">")]), set()).add(place)
    expected = {n: {("a.jsonl", f"line {n + 1}")} for n in range(90)}
    expected |= {n: {("deep/b.jsonl", f"line {n - 89}")} for n in range(90, 200)}
    assert message == expected | {200: {("c.txt", "")}}


def test_a_source_of_one_file_gives_lines_alone(config: RunConfig) -> None:
    (sequences,) = prepare(config).train.sources
    assert {name for row in range(len(sequences)) for name, _ in sequences.places(row)} == {""}
