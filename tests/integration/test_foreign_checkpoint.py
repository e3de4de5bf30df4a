"""A run directory from somebody else whose checkpoint is code: every command that loads it refuses
and runs nothing.

The places of a checkpoint, one by one, are in tests/security/test_checkpoints.py; tokenizers and
models with code of their own in tests/security/test_models.py.
"""

from __future__ import annotations

import dataclasses
import json
import pickle
import shutil
from pathlib import Path

import pytest
from tests.integration.conftest import Reference
from tests.integration.tiny_run import STEPS, drillyard, train, write_config
from tests.security.foreign_checkpoints import Code

from drillyard.training.checkpoint.manifest import FileRecord, checksum, encode, read_manifest


@pytest.fixture
def ran(tmp_path: Path) -> Path:
    """What the attack makes when it runs."""
    return tmp_path / "ran"


@pytest.fixture
def foreign(reference: Reference, tmp_path: Path, ran: Path) -> Path:
    """The last checkpoint of a copy of the reference run, its index replaced by code and its
    manifest made to fit."""
    run = Path(shutil.copytree(reference.run.directory, tmp_path / "received"))
    checkpoint = run / "checkpoints" / f"step-{STEPS:08d}"
    index = pickle.dumps(Code(ran))
    (checkpoint / ".metadata").write_bytes(index)
    manifest = read_manifest(checkpoint)
    files = {**manifest.files, ".metadata": FileRecord(len(index), checksum(index))}
    (checkpoint / "manifest.json").write_bytes(encode(dataclasses.replace(manifest, files=files)))
    return checkpoint


def test_commands_that_load_a_checkpoint_refuse_one_that_is_code(
    foreign: Path, workplace: Path, tmp_path: Path, ran: Path
) -> None:
    resumed = write_config(
        workplace, "resumed", checkpoint__resume=str(foreign), training__steps=STEPS + 1
    )
    ended = {
        "verify": drillyard("checkpoint", "verify", foreign),
        "list": drillyard("checkpoint", "list", foreign.parent),
        "export": drillyard("export", foreign, tmp_path / "model"),
        "eval": drillyard("eval", foreign, "--output", tmp_path / "figures"),
        "resume": train(resumed),
    }
    for name, command in ended.items():
        assert command.returncode == 2, (name, command.stdout, command.stderr)
        assert ".metadata: refused" in command.stderr and "mkdir" in command.stderr, (
            name,
            command.stderr,
        )
        assert "Traceback" not in command.stderr, (name, command.stderr)
    assert not ran.exists()
    # `data show` reads data and settings; it opens no checkpoint.
    shown = drillyard("data", "show", foreign.parent.parent, "--step", 1)
    assert shown.returncode == 0 and not ran.exists(), shown.stderr


def test_train_refuses_a_tokenizer_with_code_and_asks_nothing(
    workplace: Path, tmp_path: Path, ran: Path
) -> None:
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "evil.py").write_text(f"import os; os.mkdir({str(ran)!r})")
    content = {
        "tokenizer_class": "EvilTokenizer",
        "auto_map": {"AutoTokenizer": ["evil.Evil", None]},
    }
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(content))
    config = write_config(workplace, "foreign-tokenizer", data__tokenizer=str(tokenizer))
    ended = drillyard("train", config, "--nproc-per-node", 2, input="y\n" * 9)
    assert ended.returncode == 2 and "auto_map" in ended.stderr, ended.stderr
    assert "Do you wish" not in ended.stdout + ended.stderr and not ran.exists()
