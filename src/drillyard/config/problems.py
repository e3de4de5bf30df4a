"""Problems of a config: where each is and what is wrong. `raise_all` makes one error of all, in
file order."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import PurePath

from drillyard.errors import ConfigError

Path = tuple[str | int, ...]
"""Keys and list positions from the top of a config: ("data", "source", 0, "weight")."""


@dataclass(frozen=True)
class SourceLocation:
    """Source of a value: `run.yaml:7`, or `--set training.steps=3`. Problems are sorted by
    `order`."""

    label: str
    order: int


SourceLocations = Mapping[Path, SourceLocation]


@dataclass(frozen=True)
class Problem:
    """Problem of the value at `path`; `place` is given where the value was written elsewhere, and
    `depends_on` are other settings without whose values it would not be one."""

    path: Path
    message: str
    place: SourceLocation | None = None
    depends_on: tuple[Path, ...] = ()


REMOTE_SCHEMES = ("gs", "s3", "hf", "https", "http")
"""Schemes of addresses that data can be read from."""


def problem(key: str, message: str) -> Problem:
    """A problem at a dotted key."""
    return Problem(tuple(key.split(".")), message)


def remote_scheme(path: str) -> str | None:
    """The scheme of an address that data can be read from; None for any other text."""
    scheme, found, _ = path.partition("://")
    return scheme if found and scheme in REMOTE_SCHEMES else None


def refused_address(value: object) -> str | None:
    """Reason to refuse an address, scheme://..., as the setting or argument of a path; None for
    what is no address.

    pathlib keeps one slash of several. So a relative path whose first directory ends with a colon
    is refused as well.
    """
    text = str(value)
    if isinstance(value, PurePath):
        text = re.sub(r"^(?:(file:)(?=/)|([a-z][a-z0-9+.-]*:)/)", r"\1\2//", text)
    if not re.match(r"[a-z][a-z0-9+.-]*://", text):
        return None
    return (
        f"{text}: is an address of object storage or of the web, not a path on this machine; mount"
        " the bucket, or copy the files here, and give their path"
    )


HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
"""An id of the Hugging Face hub. A relative path may look like one."""


_FILE_ENDINGS = (
    *(".jsonl", ".json", ".parquet", ".csv", ".txt", ".arrow"),
    *(".gz", ".zst", ".bz2", ".xz", ".bin", ".idx"),
)


def looks_like_file(text: str) -> bool:
    """Whether a text that may be a name is a path by its form: its beginning or its ending."""
    return text.startswith(("/", "~", "./", "../")) or text.endswith(_FILE_ENDINGS)


def shown_address(address: str) -> str:
    """An address for people: without name and password, query and fragment."""
    return re.sub(r"(?<=://)[^/]*@", "", re.split(r"[?#]", address, maxsplit=1)[0])


def dotted(path: Path) -> str:
    """`data.source.0.weight`, as it is written after `--set`."""
    return ".".join(str(part) for part in path)


def location_of(path: Path, places: SourceLocations) -> SourceLocation:
    """Location of `path`, or of the innermost section around it; `places` has at least the top,
    ()."""
    while path not in places:
        path = path[:-1]
    return places[path]


def raise_all(problems: Iterable[Problem], places: SourceLocations | None = None) -> None:
    """Raise one UserError with a line for each problem; do nothing without problems."""
    found = list(dict.fromkeys(problems))
    if not found:
        return
    if places is None:
        raise ConfigError(
            "\n".join(
                on_one_line(f"{dotted(problem.path)}: {problem.message}") for problem in found
            )
        )
    located = [(problem.place or location_of(problem.path, places), problem) for problem in found]
    located.sort(key=lambda pair: pair[0].order)
    raise ConfigError("\n".join(problem_line(place, problem) for place, problem in located))


def problem_line(place: SourceLocation, problem: Problem) -> str:
    """`run.yaml:7: training.steps: what is wrong`."""
    key = f"{dotted(problem.path)}: " if problem.path else ""
    return on_one_line(f"{place.label}: {key}{problem.message}")


def on_one_line(text: str) -> str:
    """`text` with line breaks and control characters escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def closest_name(word: str, words: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The word among `words` that is most similar to `word`, or None; `cutoff` is the least
    similarity, 0 to 1."""
    by_lower = {candidate.lower(): candidate for candidate in words}
    for spelling in (word.lower().replace("-", "_"), word.lower()):
        if close := get_close_matches(spelling, by_lower, n=1, cutoff=cutoff):
            return by_lower[close[0]]
    return None
