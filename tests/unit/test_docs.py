"""docs/architecture.md and docs/rooms.md name files that exist; every module has its line in the
second."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src/drillyard"
USER_FILES = {"run.yaml", "cluster.yaml"}
NOT_LISTED = {"__init__.py", "__main__.py", "packaged_yaml.py", "sources.yaml"}


def named_files(page: str) -> tuple[set[Path], list[str]]:
    """The files that a page names, and the names of none: a name is below the room of its
    section, or below src."""
    found: set[Path] = set()
    missing = []
    room = SOURCE
    for line in (ROOT / "docs" / page).read_text(encoding="utf-8").splitlines():
        if heading := re.match(r"##+ (.*)", line):
            room = SOURCE / heading[1] if (SOURCE / heading[1]).is_dir() else SOURCE
        for name in re.findall(r"`([\w./-]+\.(?:py|yaml|sh))(?::\w+)?`", line):
            paths = [
                top / name for top in (room, SOURCE, SOURCE / "training") if (top / name).is_file()
            ]
            found.update(paths[:1])
            if not paths and name not in USER_FILES and not (ROOT / name).is_file():
                missing.append(name)
    return found, missing


@pytest.mark.parametrize("page", ["architecture.md", "rooms.md"])
def test_the_files_that_a_page_names_exist(page: str) -> None:
    files, missing = named_files(page)
    assert files and missing == []


def test_the_page_of_rooms_names_every_module() -> None:
    every = {path for path in SOURCE.rglob("*.py") if path.name not in NOT_LISTED}
    launchers = {
        path
        for path in every
        if path.name in ("launcher.py", "config.py", "rules.py") and "launch" in path.parts
    }
    formats = set((SOURCE / "measurement/formats").glob("*.py"))
    assert sorted(every - named_files("rooms.md")[0] - launchers - formats) == []


def test_links_between_documents_lead_to_files() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    links = [
        (page, target.partition("#")[0])
        for page in pages
        for target in re.findall(r"\]\(([^)]+)\)", page.read_text("utf-8"))
        if not target.startswith(("http", "#"))
    ]
    assert len(links) > 30
    assert [link for link in links if not (link[0].parent / link[1]).exists()] == []


def test_the_index_names_every_page() -> None:
    index = (ROOT / "docs/README.md").read_text("utf-8")
    pages = {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert {name for name in pages if f"({name})" not in index} == set()
