"""What a Dockerfile starts from, the base of its last stage with build arguments filled in, and
which files it copies.

Read by the rules of https://docs.docker.com/reference/dockerfile; nothing is fetched. Only FROM,
the ARGs before it, COPY and ADD are looked at.
"""

from __future__ import annotations

import contextlib
import json
import posixpath
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from drillyard.errors import UserError

_VARIABLE = re.compile(
    r"\$(?:(?P<plain>\w+)|\{(?P<name>\w+)(?::?(?P<sign>[-+])(?P<word>[^}]*))?\})"
)
_ADDRESS = re.compile(r"\w+(://|@)")
_HEREDOC = re.compile(r"<<-?([\"']?)(\w+)\1")
_INSTRUCTION = re.compile(r"\s*([A-Za-z]+)\s+(.*)", re.DOTALL)


@dataclass(frozen=True)
class BaseImage:
    """The image that a Dockerfile's last stage starts from; `argument`: the build argument that
    sets all of it."""

    image: str
    line: int
    argument: str | None


def base_image(text: str, arguments: Mapping[str, str], name: str) -> BaseImage:
    """The base of the Dockerfile `text` called `name`, built with `arguments`. Raises UserError
    where there is none, or where it depends on an argument without a value."""
    values: dict[str, str] = {}
    stages: dict[str, BaseImage] = {}
    last: BaseImage | None = None
    for line, instruction, rest in _instructions(text):
        if instruction == "ARG" and last is None:
            for word in rest.split():
                key, has_default, default = word.partition("=")
                if key in arguments:
                    values[key] = arguments[key]
                elif has_default:
                    values[key] = _filled(default.strip("\"'"), values, f"{name}:{line}")
        elif instruction == "FROM":
            words = [word for word in rest.split() if not word.startswith("--")]
            if not words:
                raise UserError(f"{name}:{line}: FROM names no image; write FROM IMAGE")
            found = _VARIABLE.fullmatch(words[0])
            image = _filled(words[0], values, f"{name}:{line}")
            last = stages.get(image.lower()) or BaseImage(
                image, line, (found["plain"] or found["name"]) if found else None
            )
            if len(words) >= 3 and words[1].upper() == "AS":
                stages[words[2].lower()] = last
    if last is None:
        raise UserError(f"{name}: has no FROM, so it is not a Dockerfile; --file names another one")
    return last


def missing_sources(text: str, files: Collection[str]) -> Iterator[tuple[int, str]]:
    """Line and source of each COPY and ADD that the context lacks; `files` are paths below it. A
    source that is an address, a pattern (which may match nothing) or depends on a variable is not
    looked at."""
    places = {parent.as_posix() for name in files for parent in PurePosixPath(name).parents}
    every = places.union(files)
    for line, instruction, rest in _instructions(text):
        if instruction not in ("COPY", "ADD"):
            continue
        flags, words = _copied(rest)
        if any(flag.startswith("--from=") for flag in flags):
            continue
        for source in words[:-1]:
            # A path that leads out of the context ends at its top.
            name = posixpath.normpath(f"/{source}").lstrip("/") or "."
            is_known = not set(source) & set("$*?[<") and _ADDRESS.match(source) is None
            if is_known and name not in every:
                yield line, source


def _copied(rest: str) -> tuple[list[str], list[str]]:
    """The flags, and the sources with the target, of a COPY or ADD in one of its two forms."""
    words = rest.split()
    number = next((index for index, word in enumerate(words) if not word.startswith("--")), 0)
    named = " ".join(words[number:])
    if named.startswith("["):
        with contextlib.suppress(ValueError):
            return words[:number], [str(each) for each in json.loads(named)]
    return words[:number], words[number:]


def _filled(text: str, values: Mapping[str, str], place: str) -> str:
    def value(found: re.Match[str]) -> str:
        key = found["plain"] or found["name"]
        given = values.get(key, "")
        if found["sign"] == "+":
            return found["word"] if given else ""
        if not given and found["sign"] is None:
            raise UserError(f"{place}: ${key} has no value: --build-arg {key}=IMAGE gives it one")
        return given or found["word"] or ""

    return _VARIABLE.sub(value, text)


def _instructions(text: str) -> Iterator[tuple[int, str, str]]:
    """Line, instruction in capitals, and the rest of each instruction; without comments and the
    contents of here-documents."""
    lines = enumerate(text.splitlines(), 1)
    for number, line in lines:
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        whole = line.rstrip()
        while whole.endswith("\\"):
            _, more = next(lines, (0, ""))
            whole = whole[:-1] + ("\\" if more.lstrip().startswith("#") else " " + more.rstrip())
        if found := _INSTRUCTION.fullmatch(whole):
            instruction = found[1].upper()
            yield number, instruction, found[2].strip()
            if instruction in ("RUN", "COPY", "ADD"):
                for _, end in _HEREDOC.findall(whole):
                    next((each for _, each in lines if each.strip() == end), None)
