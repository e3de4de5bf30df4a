"""`builtin:python-stdlib`: the source text of the running Python's standard library, one row per
file.

About 8.9 MB of real text on every machine, without a download. Excluded, anywhere in a path: tests
(`test`, `tests`), `site-packages` and `dist-packages`, `idlelib`, `encodings`, `pydoc_data` and
`lib2to3`; also empty files and `_sysconfigdata*`, which is generated for one machine. The text, and
`content_key` with it, differs between Python versions.

A file is held out by a hash of its relative path, about 5 % of them: the same files everywhere they
exist. A training file that nearly repeats a held-out one is dropped: of the distinct lines of 20
characters or more (white space at both ends removed) of one of the two, at least half also occur in
the other; with fewer than 5 such lines, only equal texts count.

Cost: a second to read all files and compare them; all texts are in memory while they are compared.
"""

from __future__ import annotations

import sysconfig
import tokenize
from collections.abc import Iterator
from hashlib import blake2b, sha256
from pathlib import Path
from typing import Any

from drillyard.errors import UserError

HELD_OUT_PART = "files"
HELD_OUT_PERCENT = 5
NEAR_DUPLICATE_SHARE = 0.5

VERSION = 1
"""Raised by hand with every change of the excluded, held-out or dropped files; part of the content
key."""

EXCLUDED = frozenset(
    {
        "test",
        "tests",
        "site-packages",
        "dist-packages",
        "idlelib",
        "encodings",
        "pydoc_data",
        "lib2to3",
        "__pycache__",
    }
)
GENERATED_PREFIX = "_sysconfigdata"

_LINE_CHARACTERS = 20
_FEWEST_LINES = 5


def standard_library() -> Path:
    """The directory of the running Python's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def source_files(root: Path) -> list[str]:
    """Relative paths (with `/`) of the source files below `root` that the data set takes,
    sorted."""
    found = (path.relative_to(root) for path in root.rglob("*.py") if path.is_file())
    return sorted(
        path.as_posix()
        for path in found
        if EXCLUDED.isdisjoint(path.parts[:-1]) and not path.name.startswith(GENERATED_PREFIX)
    )


def is_held_out(path: str) -> bool:
    """Whether the file with this relative path is held out."""
    return int.from_bytes(sha256(path.encode()).digest()[:8], "big") % 100 < HELD_OUT_PERCENT


def documents(part: str, root: Path | None = None) -> Iterator[dict[str, Any]]:
    """Rows {text, path} of "train" or "files", sorted by path. Raises UserError if there are no
    source files."""
    root = root or standard_library()
    paths = source_files(root)
    if not paths:
        raise UserError(
            f"builtin:python-stdlib: {root} has no Python source files; install the standard"
            " library's sources, or use another source."
        )
    held_out = {
        path: text for path in paths if is_held_out(path) and (text := read_source(root / path))
    }
    if part == HELD_OUT_PART:
        yield from ({"text": text, "path": path} for path, text in held_out.items())
        return
    fingerprints = [(text, _lines(text)) for text in held_out.values()]
    for path in paths:
        if is_held_out(path) or not (text := read_source(root / path)):
            continue
        lines = _lines(text)
        if not any(
            near_duplicates(text, lines, other, other_lines) for other, other_lines in fingerprints
        ):
            yield {"text": text, "path": path}


def read_source(path: Path) -> str:
    """The text of a Python file in the encoding it declares (UTF-8 unless it says otherwise), line
    ends as `\\n`."""
    try:
        with tokenize.open(path) as file:
            return file.read()
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        raise UserError(
            f"builtin:python-stdlib: {path} cannot be read as Python source: {error}."
        ) from error


def near_duplicates(
    text: str, lines: frozenset[str], other: str, other_lines: frozenset[str]
) -> bool:
    """Whether two files nearly repeat each other, by the rule in this module's docstring."""
    fewest = min(len(lines), len(other_lines))
    return (
        text == other
        if fewest < _FEWEST_LINES
        else len(lines & other_lines) >= NEAR_DUPLICATE_SHARE * fewest
    )


def _lines(text: str) -> frozenset[str]:
    return frozenset(
        line for raw in text.splitlines() if len(line := raw.strip()) >= _LINE_CHARACTERS
    )


def content_key(root: Path | None = None) -> str:
    """A digest of the paths and bytes of all files that the data set takes."""
    root = root or standard_library()
    digest = blake2b(f"version={VERSION}".encode(), digest_size=16)
    for path in source_files(root):
        content = (root / path).read_bytes()
        digest.update(f"\0{path}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()
