"""Facts about `builtin:python-stdlib`: what it takes, what it holds out, and that near-duplicates
do not leak."""

from __future__ import annotations

from pathlib import Path

import pytest

from drillyard.data.builtin import content_key, documents, held_out_parts
from drillyard.data.builtin import python_stdlib as stdlib
from drillyard.errors import UserError

LINES = "".join(f"    value_{i} = compute_something({i})\n" for i in range(40))


def names(root: Path, *, held_out: bool, count: int) -> list[str]:
    """File names of which all are, or none is, held out."""
    return [name for i in range(5000) if stdlib.is_held_out(name := f"module_{i}.py") == held_out][
        :count
    ]


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")


def paths(part: str, root: Path) -> list[str]:
    return [row["path"] for row in stdlib.documents(part, root)]


@pytest.mark.slow
def test_the_running_library_gives_two_disjoint_parts() -> None:
    train = list(documents("python-stdlib", {}, "train"))
    held_out = list(documents("python-stdlib", {}, "files"))
    assert held_out_parts("python-stdlib") == ["files"]
    assert not {row["path"] for row in train} & {row["path"] for row in held_out}
    assert not {row["text"] for row in train} & {row["text"] for row in held_out}
    size = sum(len(row["text"].encode()) for row in held_out)
    total = size + sum(len(row["text"].encode()) for row in train)
    assert total > 5_000_000
    assert 0.02 < size / total < 0.12
    assert all(stdlib.EXCLUDED.isdisjoint(row["path"].split("/")[:-1]) for row in train + held_out)


def test_excluded_directories_and_empty_files_are_left_out(tmp_path: Path) -> None:
    write(tmp_path, {f"{name}/a.py": "x = 1\n" for name in stdlib.EXCLUDED})
    write(
        tmp_path,
        {"kept/a.py": "x = 1\n", "empty.py": "", "a.txt": "no", "_sysconfigdata_x.py": "y = 2\n"},
    )
    assert paths("train", tmp_path) + paths("files", tmp_path) == ["kept/a.py"]


def test_a_training_file_that_nearly_repeats_a_held_out_one_is_dropped(tmp_path: Path) -> None:
    (held,) = names(tmp_path, held_out=True, count=1)
    near, far, half_a_line_less = names(tmp_path, held_out=False, count=3)
    ours = LINES.splitlines(keepends=True)
    other = [line.replace("value", "result").replace("compute", "derive") for line in ours]
    write(tmp_path, {held: LINES, near: "".join(ours[:20] + other[20:]), far: "".join(other)})
    write(tmp_path, {half_a_line_less: "".join(ours[:19] + other[19:])})
    assert paths("files", tmp_path) == [held]
    assert sorted(paths("train", tmp_path)) == sorted([far, half_a_line_less])


def test_a_file_that_holds_a_held_out_one_whole_is_dropped(tmp_path: Path) -> None:
    (held,) = names(tmp_path, held_out=True, count=1)
    (container,) = names(tmp_path, held_out=False, count=1)
    more = "".join(f"    another_{i} = quite_different({i})\n" for i in range(400))
    write(tmp_path, {held: LINES, container: LINES + more})
    assert paths("train", tmp_path) == []


def test_short_files_are_dropped_only_when_equal(tmp_path: Path) -> None:
    (held,) = names(tmp_path, held_out=True, count=1)
    same, other = names(tmp_path, held_out=False, count=2)
    write(
        tmp_path, {held: "from a import b\n", same: "from a import b\n", other: "from a import c\n"}
    )
    assert paths("train", tmp_path) == [other]


def test_a_file_is_read_in_the_encoding_that_it_declares(tmp_path: Path) -> None:
    (tmp_path / "latin.py").write_bytes(
        "# -*- coding: latin-1 -*-\r\nname = 'café'\r\n".encode("latin-1")
    )
    assert stdlib.read_source(tmp_path / "latin.py") == "# -*- coding: latin-1 -*-\nname = 'café'\n"


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_bytes(b"name = '\xff\xfe'\n")
    with pytest.raises(UserError, match=r"broken\.py"):
        stdlib.read_source(tmp_path / "broken.py")


def test_a_library_without_sources_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no Python source files"):
        next(stdlib.documents("train", tmp_path))


def test_the_content_key_follows_every_file(tmp_path: Path) -> None:
    write(tmp_path, {"a.py": "x = 1\n", "b.py": "y = 1\n"})
    keys = {stdlib.content_key(tmp_path)}
    write(tmp_path, {"a.py": "x = 2\n"})
    keys.add(stdlib.content_key(tmp_path))
    (tmp_path / "b.py").rename(tmp_path / "c.py")
    keys.add(stdlib.content_key(tmp_path))
    assert len(keys) == 3
    assert content_key("python-stdlib", {}) == content_key("python-stdlib", {})
