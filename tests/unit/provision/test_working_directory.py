"""What a cluster's commands leave on this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from drillyard.provision.terraform_engine import remove_working_directory


def test_a_working_directory_goes_but_for_files_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRILLYARD_CACHE", str(tmp_path))
    directory = tmp_path / "clusters" / "p" / "c"
    (directory / ".terraform" / "providers").mkdir(parents=True)
    for name in (
        "main.tf.json",
        "up.tfplan",
        ".terraform.lock.hcl",
        ".terraform/terraform.tfstate",
    ):
        (directory / name).write_text("{}")
    (directory / "notes.txt").write_text("mine")
    remove_working_directory(directory)
    assert [each.name for each in directory.iterdir()] == ["notes.txt"]
    (directory / "notes.txt").unlink()
    remove_working_directory(directory)
    assert not (tmp_path / "clusters").exists()
