"""A directory that another host has just made: mkdir says that it exists, and a look right after
that there is none (NFS, virtiofs)."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from drillyard.config.run_data import DataConfig
from drillyard.launch.agent.fence import Epochs
from drillyard.supervise.run_lock import open_logs


def take_run_directory(top: Path) -> Path:
    from drillyard.config.load import config_from_options
    from drillyard.config.run import RunConfig
    from drillyard.training.run_directory import claim_run_directory

    values = {
        "name": "trial",
        "output": str(top),
        "model": {"config": {"architecture": "gpt2"}, "init": "random"},
        "data": {"source": "rows.jsonl", "sequence_length": 64, "tokenizer": "gpt2"},
        "training": {"steps": 1, "optimizer": {"learning_rate": 0.001}},
    }
    claim_run_directory(config_from_options(RunConfig, values), 1)
    return top / "trial"


def begin_save(top: Path) -> Path:
    from drillyard.training.checkpoint.dcp_storage import CheckpointWriter

    path = top / "checkpoints" / "step-00000001"
    make_manifest: Any = None
    CheckpointWriter(path, make_manifest).prepare_global_plan([])
    return path


def open_cache(top: Path) -> Path:
    from drillyard.data.token_cache import cache_root

    data = DataConfig.model_validate(
        {"source": "rows.jsonl", "sequence_length": 64, "cache_directory": str(top / "cache")}
    )
    return cache_root(data) / "tokenized"


def make_logs(top: Path) -> Path:
    with open_logs(top):
        return top / "logs"


def begin_epoch(top: Path) -> Path:
    epochs = Epochs(top)
    epochs.open({"leader": {"pid": 1}})
    return epochs.directory


@pytest.mark.parametrize(
    "make", [take_run_directory, begin_save, open_cache, make_logs, begin_epoch]
)
def test_a_directory_that_shows_up_late_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], Path]
) -> None:
    top, really = tmp_path / "top", os.mkdir
    top.mkdir()
    late: set[str] = set()

    def mkdir(path: Any, *arguments: Any, **options: Any) -> None:
        name = os.fspath(path)
        if name.startswith(str(top)) and not os.path.exists(name) and name not in late:
            late.add(name)
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), name)
        really(path, *arguments, **options)

    monkeypatch.setattr(os, "mkdir", mkdir)
    assert make(top).is_dir()
    assert late


@pytest.mark.parametrize("there", ["file", "link"])
def test_what_is_there_and_no_directory_is_not_waited_for(tmp_path: Path, there: str) -> None:
    from drillyard.safe_files import make_directory

    path = tmp_path / "there"
    path.touch() if there == "file" else path.symlink_to(tmp_path / "nothing")
    with pytest.raises(FileExistsError):
        make_directory(path)
