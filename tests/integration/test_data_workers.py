"""Tokenising processes: the same result as in one process, errors brought back, nobody left
behind."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from drillyard.config.run import RunConfig
from drillyard.data import encoding_pool, file_readers, raw_batches
from drillyard.data.encoder import EncodeSettings, HeldOutSplit
from drillyard.data.file_readers import json_lines_batch
from drillyard.data.prepared_data import prepare
from drillyard.data.row_formats import RowFormat
from drillyard.data.tokenizer import _as_pretrained, _train
from drillyard.errors import UserError

TEXTS = [f"line {n} of some text, {n * n}\n" * (1 + n % 9) for n in range(400)]


@pytest.fixture(autouse=True)
def many_small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (raw_batches, file_readers):
        monkeypatch.setattr(module, "BATCH_BYTES", 2000)


@pytest.fixture
def make_config(tmp_path: Path) -> Callable[[str], RunConfig]:
    _as_pretrained(_train(300, iter(TEXTS))).save_pretrained(str(tmp_path / "tokenizer"))

    def make(cache: str) -> RunConfig:
        return RunConfig.model_validate(
            {
                "name": "test",
                "model": {"config": {"architecture": "llama"}, "init": "random"},
                "data": {
                    "source": str(tmp_path / "data.jsonl"),
                    "sequence_length": 64,
                    "tokenizer": str(tmp_path / "tokenizer"),
                    "cache_directory": str(tmp_path / cache),
                    "on_error": "refuse",
                },
                "training": {"steps": 1, "optimizer": {"learning_rate": 1e-3}},
            }
        )

    return make


def test_the_number_of_workers_changes_no_byte(
    tmp_path: Path, make_config: Callable[[str], RunConfig]
) -> None:
    (tmp_path / "data.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)
    )
    contents = []
    for number in (0, 1, 3):
        prepare(make_config(str(number)), num_workers=number)
        (directory,) = (tmp_path / str(number) / "tokenized").iterdir()
        contents.append({path.name: path.read_bytes() for path in directory.iterdir()})
    assert contents[0] == contents[1] == contents[2]


def test_an_error_in_a_worker_names_the_row_and_leaves_nothing(
    tmp_path: Path, make_config: Callable[[str], RunConfig]
) -> None:
    lines = [json.dumps({"text": text}) for text in TEXTS]
    lines[250] = '{"text": 3}'
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    with pytest.raises(UserError, match=r"data\.jsonl, line 251: column 'text' .*int"):
        prepare(make_config("cache"), num_workers=2)
    assert list((tmp_path / "cache" / "tokenized").iterdir()) == []


def test_a_worker_that_is_killed_is_an_error_and_the_others_end() -> None:
    tokenizer = _as_pretrained(_train(300, iter(TEXTS))).backend_tokenizer.to_str()
    settings = EncodeSettings(
        RowFormat("text", loss_on="all"),
        64,
        "split",
        HeldOutSplit(),
        tokenizer,
        False,
        (0,),
        0,
        None,
        {},
    )
    batch = json_lines_batch("a.jsonl", 1, 0, b'{"text": "a"}\n')
    with encoding_pool._Pool(2, settings) as pool:
        assert all(future.result().parts for future in [pool.submit(batch) for _ in range(4)])
        processes = [process for process, _ in pool._workers]
        for process in processes:
            process.kill()
        with pytest.raises(UserError, match="exit code -9"):
            pool.submit(batch).result()
    assert processes and all(process.returncode is not None for process in processes)
