"""Objects at addresses: the bits of the local file however the server fails, or one clear error."""

from __future__ import annotations

import gzip
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from tests.unit.data.object_server import ObjectServer, serving

from drillyard.config.problems import shown_address
from drillyard.config.run import RunConfig
from drillyard.config.run_checks import check_run
from drillyard.config.run_data import SourceConfig
from drillyard.data import remote_objects
from drillyard.data.data_report import file_of_source
from drillyard.data.mapped_sequences import Sequences
from drillyard.data.prepared_data import prepare
from drillyard.data.sources import resolve_source
from drillyard.errors import MissingExtraError, UserError

MakeConfig = Callable[..., RunConfig]
ROWS = [{"text": f"row {n}: naïve ✓ " + "word " * (n % 50)} for n in range(600)]


def json_lines(rows: list[dict[str, str]] = ROWS) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def parquet() -> bytes:
    stream = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(ROWS), stream, row_group_size=100)
    return stream.getvalue()


CONTENTS = {
    "rows.jsonl": json_lines,
    "rows.jsonl.gz": lambda: gzip.compress(json_lines()),
    "rows.jsonl.zst": lambda: zstandard.ZstdCompressor().compress(json_lines()),
    "rows.parquet": parquet,
    "rows.csv": lambda: ("text\n" + "".join(f'"{row["text"]}"\n' for row in ROWS)).encode(),
}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_objects, "FIRST_PAUSE_SECONDS", 1e-4)


@pytest.fixture
def server() -> Iterator[ObjectServer]:
    with serving({f"/{name}": content() for name, content in CONTENTS.items()}) as served:
        yield served


def rows_of(address: str) -> list[dict[str, Any]]:
    source = resolve_source(SourceConfig(path=address))
    return [{"text": row["text"]} for batch in source.batches() for _, row in batch.rows()]


def failure(address: str) -> str:
    with pytest.raises(UserError) as caught:
        rows_of(address)
    message = str(caught.value)
    assert message.count("\n") <= 1
    return message


def stored(sequences: Sequences) -> bytes:
    batch = sequences.read(np.arange(len(sequences)))
    return b"".join(part.tobytes() for part in (batch.input_ids, batch.labels, batch.document_ids))


@pytest.mark.parametrize("name", CONTENTS)
@pytest.mark.parametrize("cut", [None, 5000, 1100])
def test_rows_are_those_of_the_file_however_short_each_answer_is(
    name: str, cut: int | None, server: ObjectServer
) -> None:
    server.cut = cut
    assert rows_of(f"{server.url}/{name}") == ROWS


@pytest.mark.parametrize("name", CONTENTS)
def test_rows_are_those_of_the_file_wherever_it_is_cut(name: str, server: ObjectServer) -> None:
    size = len(server.objects[f"/{name}"])
    server.cut_at = {0, 1, size // 3, size // 2, size - 1}
    server.failures = [503, 500, 429]
    assert rows_of(f"{server.url}/{name}") == ROWS
    assert not server.cut_at and not server.failures


def test_reading_goes_on_at_the_byte_reached(
    server: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_objects, "RANGE_BYTES", 4096)
    server.cut_at = {20_000}
    rows_of(f"{server.url}/rows.jsonl")
    failed = next(
        number
        for number, (_, begin, size) in enumerate(server.ranges)
        if size not in (4096,) and size
    )
    begins = [begin for _, begin, _ in server.ranges]
    assert begins[failed + 1] == begins[failed] == 20_000 // 4096 * 4096


def test_the_cache_has_the_bits_of_the_local_file(
    server: ObjectServer, make_config: MakeConfig, tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_bytes(json_lines())
    server.cut = 3000
    remote, local = (
        prepare(make_config(path)).train.sources[0]
        for path in (f"{server.url}/rows.jsonl", tmp_path / "rows.jsonl")
    )
    assert remote.name == local.name == "rows"
    assert stored(remote) == stored(local)
    assert remote.places(0) == local.places(0)


def test_an_object_is_read_once(server: ObjectServer, make_config: MakeConfig) -> None:
    config = make_config(f"{server.url}/rows.jsonl")
    first = prepare(config)
    asked = len(server.ranges)
    assert prepare(config, known=first.record).train.fingerprint == first.train.fingerprint
    assert len(server.ranges) == asked > 0


def test_a_run_continues_from_its_cache_while_the_object_is_out_of_reach(
    server: ObjectServer, make_config: MakeConfig
) -> None:
    config = make_config(f"{server.url}/rows.jsonl")
    first = prepare(config)
    server.refused = 503
    again = prepare(config, known=first.record)
    assert again.train.fingerprint == first.train.fingerprint
    assert len(again.report.notes) == 1 and "rows.jsonl" in again.report.notes[0]


def test_a_changed_object_is_refused_on_resume(
    server: ObjectServer, make_config: MakeConfig
) -> None:
    config = make_config(f"{server.url}/rows.jsonl")
    record = prepare(config).record
    server.objects["/rows.jsonl"] = json_lines(ROWS[1:])
    with pytest.raises(UserError, match="changed since this run began"):
        prepare(config, known=record)


@pytest.mark.parametrize(
    "new", [json_lines(ROWS[:300]), json_lines()[::-1], json_lines().replace(b"word", b"WORD")]
)
def test_an_object_that_changes_under_the_reader_gives_no_cache(
    new: bytes,
    server: ObjectServer,
    make_config: MakeConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remote_objects, "RANGE_BYTES", 4096)
    server.change_after = (2, "/rows.jsonl", new)
    with pytest.raises(UserError) as caught:
        prepare(make_config(f"{server.url}/rows.jsonl"))
    assert "changed while" in str(caught.value) and str(caught.value).count("\n") == 0
    assert list((tmp_path / "cache" / "tokenized").iterdir()) == []


def test_an_object_that_changes_during_an_interruption_is_refused_at_once(
    server: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_objects, "RANGE_BYTES", 4096)
    server.change_after, server.cut_at = (2, "/rows.jsonl", b"{}\n"), {9000}
    assert "changed while it was read" in failure(f"{server.url}/rows.jsonl")


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_refusal_is_an_error_at_once(status: int, server: ObjectServer) -> None:
    server.refused = status
    message = failure(f"{server.url}/rows.jsonl?X-Signature=secret")
    assert f"{server.url}/rows.jsonl" in message and "secret" not in message
    assert server.ranges == []


def test_a_server_that_stays_broken_is_given_up(server: ObjectServer) -> None:
    source = resolve_source(SourceConfig(path=f"{server.url}/rows.jsonl"))
    server.failures = [503] * 1000
    with pytest.raises(UserError, match="at byte 0 after 10 attempts"):
        list(source.batches())
    assert len(server.failures) == 1000 - remote_objects.ATTEMPTS


def test_a_server_without_ranges_is_refused(
    server: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_objects, "RANGE_BYTES", 4096)
    server.has_ranges = False
    assert "whole object" in failure(f"{server.url}/rows.jsonl")


def test_a_directory_is_the_readable_objects_below_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fsspec

    files = fsspec.filesystem("memory")
    for name in ("b.jsonl", "a/c.jsonl", "notes.bin", ".hidden.jsonl"):
        with files.open(f"/bucket/{name}", "wb") as stream:
            stream.write(b'{"text": "x"}\n')

    def with_tags(function: Callable[..., Any]) -> Callable[..., Any]:
        def tagged(*arguments: Any, **settings: Any) -> Any:
            found = function(*arguments, **settings)
            each = [found] if "type" in found else found.values()
            for info in each:
                info["etag"] = "1"
            return found

        return tagged

    monkeypatch.setattr(files, "info", with_tags(files.info))
    monkeypatch.setattr(files, "find", with_tags(files.find))
    monkeypatch.setattr(files, "_strip_protocol", lambda path: path.removeprefix("gs:/"))
    monkeypatch.setattr(remote_objects, "_filesystem", lambda scheme: files)
    source = resolve_source(SourceConfig(path="gs://bucket"))
    assert [str(file) for file in source.files] == ["gs://bucket/a/c.jsonl", "gs://bucket/b.jsonl"]
    assert list(source.contents(tmp_path).files) == ["a/c.jsonl", "b.jsonl"]
    assert file_of_source("gs://bucket", "a/c.jsonl") == "gs://bucket/a/c.jsonl"


def test_megatron_data_and_unknown_kinds_are_refused_by_address(server: ObjectServer) -> None:
    server.objects["/a.bin"] = b"x"
    assert "a.bin" in failure(f"{server.url}/a.bin")


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(remote_objects._PACKAGES, "s3", "no_such_package")
    with pytest.raises(MissingExtraError, match=r"pip install 'drillyard\[remote\]'"):
        resolve_source(SourceConfig(path="s3://bucket/a.jsonl"))


@pytest.mark.parametrize("scheme", ["gs", "s3", "hf", "https"])
def test_addresses_are_allowed_for_data_only(scheme: str, make_config: MakeConfig) -> None:
    address = f"{scheme}://bucket/rows.jsonl"
    assert (
        check_run(make_config(address, held_out={"source": f"{scheme}://bucket/other.jsonl"})) == []
    )
    assert [problem.path for problem in check_run(make_config("ftp://host/rows.jsonl"))] == [
        ("data", "source")
    ]
    assert [problem.path for problem in check_run(make_config(address, tokenizer=address))] == [
        ("data", "tokenizer")
    ]


GATED = """
import sys
from drillyard.config.run_data import SourceConfig
from drillyard.data.sources import resolve_source
from drillyard.errors import UserError
try:
    resolve_source(SourceConfig(path="hf://datasets/org/gated/rows.jsonl"))
except UserError as error:
    sys.exit(str(error))
"""


@pytest.mark.parametrize("status", [401, 403])
def test_a_gated_data_set_names_the_page_and_never_the_token(
    status: int, server: ObjectServer, tmp_path: Path
) -> None:
    server.refused = status
    settings = {
        "HF_ENDPOINT": server.url,
        "HF_TOKEN": "hf_secret",
        "HF_HOME": str(tmp_path),
        "HF_HUB_OFFLINE": "0",
    }
    result = subprocess.run(
        [sys.executable, "-c", GATED],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1
    assert f"{server.url}/datasets/org/gated" in result.stderr and str(status) in result.stderr
    assert "hf_secret" not in result.stderr + result.stdout
    assert not [
        path for path in tmp_path.rglob("*") if path.is_file() and b"hf_secret" in path.read_bytes()
    ]


def test_a_password_in_an_address_is_not_shown() -> None:
    assert shown_address("https://me:word@host/a@b.jsonl?token=1#x") == "https://host/a@b.jsonl"
    assert shown_address("gs://bucket/a@b/c.jsonl") == "gs://bucket/a@b/c.jsonl"
