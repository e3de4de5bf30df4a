"""Every kind of source gives the same rows, and every broken one an error that names the place."""

from __future__ import annotations

import gzip
import json
import os
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.facts import says
from tests.module_time import set_time

from drillyard.config.run import RunConfig
from drillyard.config.run_data import SourceConfig
from drillyard.data import file_readers, raw_batches, sources
from drillyard.data.held_out_parts import evaluation_rows
from drillyard.data.prepared_data import prepare
from drillyard.data.raw_batches import decoded_row
from drillyard.data.sources import file_hash, resolve_source, resolve_sources
from drillyard.errors import UserError

MakeConfig = Callable[..., RunConfig]

ROWS = [{"text": f'row {n}, "quoted", naïve ✓\nsecond line', "other": str(n)} for n in range(40)]


def read(path: Path | str, **settings: Any) -> list[dict[str, Any]]:
    source = resolve_source(SourceConfig(path=str(path), **settings))
    return [decoded_row(row) for batch in source.batches() for _, row in batch.rows()]


def failure(path: Path | str, **settings: Any) -> str:
    with pytest.raises(UserError) as caught:
        read(path, **settings)
    message = str(caught.value)
    assert message.count("\n") <= 1
    return message


def set_batch_bytes(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    for module in (raw_batches, file_readers):
        monkeypatch.setattr(module, "BATCH_BYTES", size)


def json_lines() -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()


def csv_text() -> bytes:
    quoted = [[value.replace('"', '""') for value in row.values()] for row in ROWS]
    return ("text,other\n" + "".join(f'"{text}",{other}\n' for text, other in quoted)).encode()


@pytest.mark.parametrize("small_batches", [False, True])
@pytest.mark.parametrize(
    "name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.csv", "a.csv.gz", "a.csv.zst"]
)
def test_text_formats_give_the_same_rows_compressed_or_not(
    name: str, small_batches: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if small_batches:
        set_batch_bytes(monkeypatch, 37)
    content = csv_text() if ".csv" in name else json_lines()
    pack = {".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}.get(
        Path(name).suffix, bytes
    )
    (tmp_path / name).write_bytes(pack(content))
    assert read(tmp_path / name) == ROWS


@pytest.mark.parametrize("row_group_size", [7, 1000])
def test_parquet_gives_the_same_rows_whatever_its_row_groups(
    row_group_size: int, tmp_path: Path
) -> None:
    pq.write_table(
        pa.Table.from_pylist(ROWS), tmp_path / "a.parquet", row_group_size=row_group_size
    )
    assert read(tmp_path / "a.parquet") == ROWS


def test_plain_text_is_one_document_per_file(tmp_path: Path) -> None:
    (tmp_path / "b.md").write_text("\ufeffsecond\n")
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"first\r\n"))
    assert [row["text"] for row in read(tmp_path)] == ["first\r\n", "second\n"]


def test_a_directory_is_read_in_the_order_of_its_paths(tmp_path: Path) -> None:
    for name in (
        "b/1.txt",
        "a.txt",
        "c.jsonl",
        "b/0.txt",
        ".hidden/x.txt",
        ".y.txt",
        "b/image.png",
    ):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text('{"text": "c"}\n' if name.endswith("jsonl") else name)
    assert [row["text"] for row in read(tmp_path)] == ["a.txt", "b/0.txt", "b/1.txt", "c"]


def test_links_are_followed_and_each_file_is_read_once(tmp_path: Path) -> None:
    source, other = tmp_path / "source", tmp_path / "other"
    for directory in (source / "b", other):
        directory.mkdir(parents=True)
    for path in (source / "b" / "own.txt", other / "a.txt", other / "z.txt"):
        path.write_text(path.name)
    (source / "again.txt").symlink_to(source / "b" / "own.txt")
    (source / "linked.txt").symlink_to(other / "a.txt")
    (source / "0").symlink_to(other)
    (source / "1").symlink_to(other)
    for number in range(3):
        (source / f"loop{number}").symlink_to(source)
        (source / "b" / f"up{number}").symlink_to(tmp_path)
        (other / f"back{number}").symlink_to(source)
    assert sorted(row["text"] for row in read(source)) == ["a.txt", "own.txt", "z.txt"]
    names = [
        file.relative_to(source).as_posix()
        for file in resolve_source(SourceConfig(path=str(source))).files
    ]
    assert "b/own.txt" in names
    assert len(names) == 3


def test_saved_data_sets_are_read_split_by_split(tmp_path: Path) -> None:
    dataset = datasets.Dataset.from_list(ROWS)
    dataset.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": dataset, "test": dataset.select(range(3))}).save_to_disk(
        tmp_path / "two"
    )
    assert read(tmp_path / "one") == ROWS
    assert read(tmp_path / "two") == ROWS
    assert read(tmp_path / "two", split="test") == ROWS[:3]
    assert says(failure(tmp_path / "two", split="dev"), "split 'dev' ... train, test")


def test_hub_data_sets_are_read_streamed_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = datasets.Dataset.from_list(ROWS)

    def load_dataset(path: str, split: str, streaming: bool, **options: Any) -> Any:
        assert (path, split, options) == ("org/name", "train", {"revision": "abc"})
        return dataset.to_iterable_dataset() if streaming else dataset

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert read("org/name", options={"revision": "abc"}) == ROWS
    assert read("org/name", options={"revision": "abc", "streaming": True}) == ROWS
    assert "unknown option 'speed'" in failure("org/name", options={"speed": 1})


def test_a_hub_data_set_that_cannot_be_loaded_is_an_error() -> None:
    message = failure("no-such-organisation/no-such-set")
    assert "no-such-organisation/no-such-set" in message and "Hugging Face" in message


def test_windows_line_ends_and_blank_lines_are_fine(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\r\n  \n{"text": "b"}')
    assert read(tmp_path / "a.jsonl") == [{"text": "a"}, {"text": "b"}]


def test_an_address_is_refused_as_one() -> None:
    for address in ("ftp://b/x.jsonl", "file:///tmp/x.jsonl"):
        assert says(failure(address), f"data.source: {address}: ... not a path on this machine")


def test_a_pipe_and_a_broken_link_are_reported_as_no_regular_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "gone.jsonl")
    for name in ("pipe.jsonl", "link.jsonl"):
        assert says(
            failure(tmp_path / name), f"{name}: ... not a regular file"
        ) and "?" not in failure(tmp_path / name)


def test_an_empty_file_of_any_kind_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    for suffix in (".jsonl", ".parquet", ".csv", ".jsonl.gz"):
        (tmp_path / f"empty{suffix}").touch()
    assert read(tmp_path) == [{"text": "a"}]


def test_a_missing_file_is_reported_with_the_nearest_name(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("{}")
    assert says(failure(tmp_path / "trian.jsonl"), "trian.jsonl ... train.jsonl")
    assert "train.jsonl?" in failure(tmp_path / "trian.jsonl")
    assert says(failure(tmp_path / "nowhere" / "train.jsonl"), "nowhere")


@pytest.mark.parametrize("small_batches", [False, True])
def test_a_broken_json_line_is_reported_with_line_and_column(
    small_batches: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if small_batches:
        set_batch_bytes(monkeypatch, 10)
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n\n{"text": "b" "c"}\n')
    assert says(failure(tmp_path / "a.jsonl"), f"{tmp_path}/a.jsonl, line 3, column 14: ... JSON")


@pytest.mark.parametrize("line", ["[1, 2]", '"text"', "3"])
def test_a_line_that_is_no_object_is_reported(line: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n' + line + "\n")
    assert says(failure(tmp_path / "a.jsonl"), "line 2: ... JSON object")


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("name", ["a.json", "a.json.gz", "a.json.zst", "a.jsonl"])
@pytest.mark.parametrize("block", [7, 37, 1 << 20])
def test_an_array_of_objects_gives_its_rows(
    block: int, name: str, indent: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack = {".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}.get(
        Path(name).suffix, bytes
    )
    text = f"\ufeff {json.dumps(ROWS, indent=indent, ensure_ascii=False)}\n"
    (tmp_path / name).write_bytes(pack(text.encode()))
    set_batch_bytes(monkeypatch, block)
    assert read(tmp_path / name) == ROWS
    (tmp_path / "empty.json").write_text("[ ]")
    assert read(tmp_path / "empty.json") == []


def test_an_array_is_not_held_in_memory(tmp_path: Path) -> None:
    row = {"text": "x" * 10_000}
    (tmp_path / "a.json").write_text(json.dumps([row] * 4_000))
    batches = resolve_source(SourceConfig(path=str(tmp_path / "a.json"))).batches()
    tracemalloc.start()
    try:
        assert sum(len(list(batch.rows())) for batch in batches) == 4_000
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("block", [3, 1 << 20])
@pytest.mark.parametrize(("content", "message"), [
    ('[{"a": 1},\n {"a" 2}]', "row 2, line 2, column 7: not valid JSON"),
    ('[{"a": 1},\n 7]', "row 2, line 2, column 2: ... a number"),
    ('[["a"], ["b"]]', "row 1, line 1, column 2: ... an array"),
    ('[{"a": 1}\n {"a": 2}]', "line 2, column 2: not valid JSON ... after row 1"),
    ('[{"a": 1},\n{"a": "b', "row 2, line 2, column 7: not valid JSON"),
    ('[{"a": 1},\n', "row 2, line 2, column 1: not valid JSON ... ends here"),
    ('[{"a": 1}', "line 1, column 10: not valid JSON ... ends here"),
    ('[{"a": 1}]\n[{"a": 2}]', "line 2, column 1: ... after the end"),
    ('[' + '{"a":' * 100_000, "row 1, line 1, column 2: ... nested too deeply"),
])  # fmt: skip
def test_a_broken_array_is_reported_with_the_row(
    content: str, message: str, block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_batch_bytes(monkeypatch, block if len(content) < 1000 else 1 << 20)
    (tmp_path / "a.json").write_text(content)
    assert says(failure(tmp_path / "a.json"), f"{tmp_path}/a.json, {message}")


def test_an_array_that_is_not_utf8_is_reported_with_line_and_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_batch_bytes(monkeypatch, 5)
    (tmp_path / "a.json").write_bytes('[{"text": "ä"},\n{"text": "'.encode() + b'\xe9"}]')
    assert says(failure(tmp_path / "a.json"), "a.json, line 2, byte 27: 0xe9 ... UTF-8")


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("block", [1 << 20, 1 << 12])
def test_an_object_that_holds_rows_is_named_with_its_key(
    block: int, indent: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_batch_bytes(monkeypatch, block)
    rows = 500
    held = {"version": "1", "note": ["x"], "data": [{"text": "some text"}] * rows}
    (tmp_path / "a.json").write_text(json.dumps(held, indent=indent))
    message = failure(tmp_path / "a.json")
    assert says(message, f"{tmp_path}/a.json: ... one JSON object ... key 'data'")
    (tmp_path / "b.json").write_text(json.dumps(held["data"]))
    (tmp_path / "c.json").write_text("".join(f"{json.dumps(row)}\n" for row in held["data"]))
    assert read(tmp_path / "b.json") == read(tmp_path / "c.json") == held["data"]


@pytest.mark.parametrize("indent", [None, 1])
def test_an_object_of_columns_is_named_as_such(indent: int | None, tmp_path: Path) -> None:
    columns = {"text": ["a", "b"], "label": [1, 2]}
    (tmp_path / "a.json").write_text(json.dumps(columns, indent=indent))
    assert says(failure(tmp_path / "a.json"), "a.json: ... columns ('text', 'label')")


def test_an_object_over_several_lines_is_no_row_and_one_on_a_line_is(tmp_path: Path) -> None:
    row = {"messages": [{"role": "user", "content": "a"}], "id": "1"}
    (tmp_path / "a.json").write_text(json.dumps(row))
    assert read(tmp_path / "a.json") == [row]
    plain = json.dumps({"text": "a"}, indent=1)
    for content in (plain, f"{plain}\n{plain}\n"):
        (tmp_path / "b.json").write_text(content)
        assert says(failure(tmp_path / "b.json"), "b.json: ... over several lines")
    (tmp_path / "c.json").write_text('{"text": "a"\n{"text": "b"}\n')
    assert "c.json, line 1, column 13" in failure(tmp_path / "c.json")


@pytest.mark.parametrize(("content", "named"), [('"a"', "a string"), ("3", "a number")])
def test_a_scalar_is_named_as_such(content: str, named: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(content)
    assert says(failure(tmp_path / "a.json"), f"a.json, line 1: ... found {named}")


@settings(max_examples=30)
@given(
    before=st.lists(st.sampled_from(["x", "ä", "longer line"]), max_size=6),
    block=st.integers(5, 60),
)
def test_text_that_is_not_utf8_is_reported_with_line_and_byte(
    before: list[str], block: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    lines = (
        "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in before).encode()
        + b'{"text": "'
    )
    path = tmp_path_factory.mktemp("utf8") / "a.jsonl"
    path.write_bytes(lines + b'\xe9"}\n')
    with pytest.MonkeyPatch.context() as patch:
        set_batch_bytes(patch, block)
        message = failure(path)
    assert says(message, f"line {len(before) + 1}, byte {len(lines)}: 0xe9 ... UTF-8")


def test_plain_text_and_csv_that_are_not_utf8_are_asked_too(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"good\nbad \xff\n")
    assert "a.txt, line 2, byte 9: 0xff" in failure(tmp_path / "a.txt")
    (tmp_path / "a.csv").write_bytes(b"text\nbad \xff\n")
    assert "a.csv, line 2, byte 9: 0xff" in failure(tmp_path / "a.csv")


@pytest.mark.parametrize(("content", "message"), [
    ("a,b\n1,2\n3\n", "line 3: 1 values ... 2 columns"),
    ('a,b\n1,"x" y\n', "line 2: not valid CSV"),
    ("a,a\n1,2\n", "line 1: ... twice"),
])  # fmt: skip
def test_a_broken_csv_is_reported_with_its_line(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(content)
    assert says(failure(tmp_path / "a.csv"), message)


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.txt.gz", "a.parquet"])
def test_a_damaged_archive_is_reported(name: str, tmp_path: Path) -> None:
    pack = gzip.compress if name.endswith("gz") else zstandard.ZstdCompressor().compress
    (tmp_path / name).write_bytes(pack(json_lines() * 50)[:-20])
    message = failure(tmp_path / name)
    assert name in message
    assert re.search("cut short|Parquet", message)


def test_unknown_kinds_and_empty_directories_are_reported(tmp_path: Path) -> None:
    (tmp_path / "a.xyz").write_bytes(b"x")
    assert says(failure(tmp_path / "a.xyz"), "unknown kind")
    assert says(failure(tmp_path), "no readable file")


def test_sources_need_distinct_names(tmp_path: Path) -> None:
    for directory in ("a", "b"):
        (tmp_path / directory).mkdir()
        (tmp_path / directory / "x.jsonl").write_text("{}")
    paths: list[str | SourceConfig] = [
        str(tmp_path / "a" / "x.jsonl"),
        str(tmp_path / "b" / "x.jsonl"),
    ]
    with pytest.raises(UserError, match=r"two sources.*'x'"):
        resolve_sources(paths)
    named = resolve_sources([SourceConfig(path=str(paths[0]), name="y", weight=2.0), paths[1]])
    assert [(source.name, source.weight) for source in named] == [("y", 2.0), ("x", 1.0)]


def test_a_file_that_changed_is_hashed_again_and_an_old_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("one")
    first = file_hash(path, tmp_path)
    path.write_text("two")
    assert file_hash(path, tmp_path) != first
    hour_later = sources.time.time_ns() + 3600 * 10**9
    set_time(monkeypatch, sources.__name__, time_ns=lambda: hour_later)
    known = file_hash(path, tmp_path)
    monkeypatch.setattr(sources, "hash_bytes_of", lambda _: "hashed again")
    assert file_hash(path, tmp_path) == known
    path.write_text("six")
    assert file_hash(path, tmp_path) == "hashed again"


def test_an_empty_data_set_is_reported(make_config: MakeConfig, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n\n")
    with pytest.raises(UserError, match=r"\ba: .*empty"):
        prepare(make_config(tmp_path / "a.jsonl"))
    (tmp_path / "b.jsonl").write_text('{"text": ""}\n')
    with pytest.raises(UserError, match=r"no training document.*1 empty"):
        prepare(make_config(tmp_path / "b.jsonl"))


def test_a_held_out_share_without_documents_is_reported(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    config = make_config(tmp_path / "a.jsonl", held_out={"fraction": 1e-9})
    with pytest.raises(UserError, match=r"held-out.*empty"):
        prepare(config)
    with pytest.raises(UserError, match="has no rows"):
        evaluation_rows(config, "a", 3)
