"""Which Terraform or OpenTofu is used."""

from __future__ import annotations

from pathlib import Path

import pytest

from drillyard.errors import NotFoundError, UserError
from drillyard.provision.terraform_program import find_terraform, minimum_version


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory that is all of PATH, but for the shell."""
    monkeypatch.setenv("PATH", f"{tmp_path}")
    return tmp_path


def make(directory: Path, name: str, printed: str) -> None:
    program = directory / name
    program.write_text(f"#!/bin/sh\nprintf '%s\\n' '{printed}'\n", encoding="utf-8")
    program.chmod(0o755)


def test_terraform_is_preferred_and_an_old_one_is_passed_over(programs: Path) -> None:
    make(programs, "terraform", '{"terraform_version": "1.11.4"}')
    make(programs, "tofu", '{"terraform_version": "1.10.2"}')
    found = find_terraform((1, 9, 0))
    assert (found.name, found.version) == ("terraform", (1, 11, 4))
    make(programs, "terraform", '{"terraform_version": "1.5.7"}')
    assert find_terraform((1, 9, 0)).name == "tofu"


@pytest.mark.parametrize("printed", ['{"terraform_version": "1.8.9-beta1"}', "Terraform v0.12.29"])
def test_a_terraform_that_is_too_old_is_named_with_its_version(
    programs: Path, printed: str
) -> None:
    make(programs, "terraform", printed)
    with pytest.raises(UserError, match=r"1\.9\.0 or newer.*terraform is (1\.8\.9|0\.12\.29)"):
        find_terraform((1, 9, 0))


def test_without_any_the_error_says_how_to_install_one(programs: Path) -> None:
    with pytest.raises(NotFoundError, match=r"developer\.hashicorp\.com/terraform/install"):
        find_terraform((1, 9, 0))


def test_the_minimum_is_that_of_the_document() -> None:
    assert minimum_version({"terraform": {"required_version": ">= 1.9.0, < 2"}}) == (1, 9, 0)
    assert minimum_version({}) == (0,)
