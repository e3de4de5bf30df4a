"""Prefixes that launchers and loggers put before a line: its task, rank, pod or node, and the time
it was written.

A prefix is a sequence of known parts, nested in any order, then free text up to the message. It is
parsed once, slowly, into a `PrefixShape`: a pattern for all prefixes that look the same, in which
only numbers and names vary. Reading a line by a known shape is one match in C.

    srun --label              `0: `, ` 12: `
    Open MPI (4, 5)           `[1,0]<stdout>: `, `[prterun-host-77@1,0]<stdout>: `
    torchrun                  `[rank0]: ` (global rank), `[default0]: ` (rank on its node), nested
                              in any of these
    kubectl logs              `[pod/job-0-1/container] ` (--prefix), RFC 3339 with nanoseconds
                              (--timestamps)
    gcloud logging            `INFO 2025-01-01T12:00:00.123456789Z [resource.labels.containerName:
                              job] `
    SkyPilot                  `(head, rank=0, pid=4112) `, `(worker1, rank=1, pid=3432, ip=10.0.0.2)
                              `, `(name, pid=1) `
    torchx, NeMo-Run          `name/0 `

A line's *origin* is the sequence of those names and numbers; a global rank makes it one rank
wherever it is printed. The time is the first stamp of the line, the outermost: the likeliest to
carry a zone.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from drillyard.loglines.blocks import LineBlock
from drillyard.loglines.stamps import STYLES, find_stamp

_STAMP: Final = b"(?:" + STYLES["iso"] + b")"
_SEVERITY: Final = rb"(?:DEFAULT|DEBUG|INFO|NOTICE|WARNING|ERROR|CRITICAL|ALERT|EMERGENCY)"

_NESTED: Final = rb"pod/|rank[ ]?\d|[A-Za-z_]\w*\d\]:|(?:[^\]\n@]*@)?\d+,[ ]?\d+\]<std"

# The plain group distinguishes origins (a container's name does not), `T` is the time stamp.
_PARTS: Final[dict[str, bytes]] = {
    "gcloud": (
        _SEVERITY
        + rb"[ \t]+(?P<T>"
        + _STAMP
        + rb")[ \t]+\[resource\.labels\.container_?[nN]ame: [^\]\n]*\][ \t]?"
    ),
    "gcloud_pod": (
        _SEVERITY
        + rb"[ \t]+(?P<T>"
        + _STAMP
        + rb")[ \t]+\[resource\.labels\.\w+: ([^\]\n]*)\][ \t]?"
    ),
    "kubectl": rb"\[pod/([^/\]\n]+)/[^\]\n]+\][ \t]?",
    "openmpi": rb"\[(?:[^\]\n@]*@)?\d+,[ ]?(\d+)\]<std(?:out|err|diag)>:?[ \t]?",
    "rank": rb"\[rank[ ]?(\d+)\]:?[ \t]?",
    "local": rb"\[[A-Za-z_](?:\w*[A-Za-z_])?(\d++)\]:[ \t]?",
    "skypilot": rb"\(([^()\n]*?),?[ ]?pid=\d+[^()\n]*\)[ \t]?",
    "srun": rb"[ \t]*(\d{1,6}):(?:[ \t]|(?=[^\d\s]))",
    "torchx": rb"([A-Za-z_][\w.-]*/\d+)[ ](?=[ ]?\S|\Z)",
    # Before a dash or bracket it is a logger's own, and the rest of the line is free text, unless
    # launchers nest.
    "stamp": rb"(?P<T>" + _STAMP + rb")[ \t]+(?![-|\]]|\[(?!" + _NESTED + rb"))",
}
_ORDER: Final = tuple((name, re.compile(pattern)) for name, pattern in _PARTS.items())
_RANK_IN_TEXT: Final = re.compile(rb"\[(?:RANK|Rank|rank):?[ ]?(\d+)\b")
_BARE: Final = re.compile(rb"[\r \t]*(?:\d+%\||\{)")
"""Lines that begin with a progress bar or an object: known without looking for a launcher's
parts."""
_LONGEST_LOGGER: Final = 100
_LONGEST: Final = 1024
_MOST_PARTS: Final = 8
"""Launchers nest a few parts of some 100 bytes. What follows is the message."""
_MOST_SHAPES: Final = 64
_RANK_DIGITS: Final = 9
_SKYPILOT_RANK: Final = re.compile(rb"rank=(\d+)")


@dataclass(frozen=True, slots=True)
class PrefixShape:
    """Prefixes that look the same. `pattern` matches one from the start of its line up to the
    message and has the groups `stamp` (if `style` is not None) and `o0`, `o1`, ... for the `parts`
    that name an origin."""

    pattern: bytes
    style: str | None
    parts: tuple[str, ...]


@dataclass(frozen=True, slots=True, order=True)
class Origin:
    """Origin of a line. `rank` is global, or None where the prefix has none; `names` distinguishes
    origins without one, and sorts so that rank 0 comes first."""

    rank: int | None
    names: tuple[tuple[int, str], ...] = ()


NOWHERE: Final = Origin(None)
_NO_PREFIX: Final = PrefixShape(b"", None, ())


def shape_of(prefix: bytes, *, loose: bool = False) -> PrefixShape:
    """Return the shape of everything on a line before the message. `loose`: its free text may be
    any other text."""
    position, style = 0, None
    pieces: list[bytes] = []
    parts: list[str] = []
    searching = True
    while searching and len(pieces) < _MOST_PARTS:
        searching = False
        for name, pattern in _ORDER:
            match = pattern.match(prefix, position)
            if match is None or match.end() == position or (name == "stamp" and style is not None):
                continue
            source = _PARTS[name]
            if "T" in pattern.groupindex:
                source = source.replace(b"(?P<T>", b"(?P<stamp>" if style is None else b"(?:")
                style = style or "iso"
            source, named = re.subn(rb"(?<!\\)\((?!\?)", b"(?P<o%d>" % len(parts), source, count=1)
            parts += [name] * named
            pieces.append(source)
            position, searching = match.end(), True
            break
    rest, style, rank = _free_text(prefix[position:], style, len(parts), loose)
    return PrefixShape(b"".join(pieces) + rest, style, tuple(parts + (["rank"] if rank else [])))


def _free_text(
    text: bytes, style: str | None, group: int, loose: bool
) -> tuple[bytes, str | None, bool]:
    """Build a pattern for the rest before the message: its first stamp and rank are captured,
    numbers may vary."""
    found_parts: list[tuple[int, int, bytes]] = []
    found = find_stamp(text)
    if style is None and found is not None:
        style, begin, end = found
        found_parts.append((begin, end, b"(?P<stamp>" + STYLES[style] + b")"))
    elif found is not None:
        found_parts.append((found[1], found[2], b"(?:" + STYLES[found[0]] + b")"))
    rank = _RANK_IN_TEXT.search(text)
    if rank is not None and all(
        rank.end() <= begin or rank.start() >= end for begin, end, _ in found_parts
    ):
        found_parts.append((rank.start(1), rank.end(1), b"(?P<o%d>\\d+)" % group))
    else:
        rank = None
    pieces, position = [], 0
    for begin, end, pattern in sorted(found_parts):
        pieces += [_plain_text(text[position:begin], loose=loose), pattern]
        position = end
    return b"".join([*pieces, _plain_text(text[position:], loose=loose)]), style, rank is not None


def _plain_text(text: bytes, *, loose: bool) -> bytes:
    """Build a pattern for text in which only numbers and white space vary; for any text if
    `loose`."""
    if loose:
        return rb"[^\n]{0,500}?" if text else b""
    # re.escape also escapes blanks.
    escaped = re.escape(text).replace(rb"\ ", b" ").replace(b"\\\t", b"\t")
    return re.sub(
        rb"\d+|[ \t]+", lambda run: rb"\d++" if run[0][:1].isdigit() else rb"[ \t]++", escaped
    )


def parse_origin(parts: Sequence[str], values: Sequence[bytes]) -> Origin:
    """Return the origin that the captured values of a shape's parts name."""
    rank: int | None = None
    names: list[tuple[int, str]] = []
    for part, value in zip(parts, values, strict=True):
        text = value.decode("utf-8", "replace")
        if part == "rank" and rank_of(text) is not None:
            rank = rank_of(text)
        elif part == "skypilot":
            node = _SKYPILOT_RANK.search(value)
            number = rank_of(node[1].decode()) if node else None
            names.append((-1, text) if number is None else (number, ""))
        else:
            numbers = re.findall(r"\d+", text)
            number = rank_of(numbers[-1]) if numbers else None
            names.append(
                (
                    -1 if number is None else number,
                    "" if number is not None and text.isdecimal() else text,
                )
            )
    if rank is not None:
        return Origin(rank)
    only_tasks = len(names) == 1 and set(parts) & {"srun", "openmpi"} and names[0][0] >= 0
    return Origin(names[0][0]) if only_tasks else Origin(None, tuple(names))


def rank_of(digits: str) -> int | None:
    """Parse a number that may be a rank's; None for what cannot be one (a date, a hash)."""
    return int(digits) if len(digits) <= _RANK_DIGITS else None


def _origin_of(shape: PrefixShape, match: re.Match[bytes]) -> Origin:
    return parse_origin(shape.parts, [match[f"o{index}"] for index in range(len(shape.parts))])


def split_prefix(line: bytes) -> tuple[PrefixShape, bytes | None, Origin, int]:
    """Split the prefix off a line whose message is not known: its shape, first stamp, origin, and
    the rest's offset."""
    line = line[:_LONGEST]
    end = 0
    for _ in range(_MOST_PARTS):
        ends = next(
            (
                match.end()
                for _, part in _ORDER
                if (match := part.match(line, end)) and match.end() > end
            ),
            end,
        )
        if ends == end:
            break
        end = ends
    if not end:
        return _NO_PREFIX, None, _or_rank_in_text(NOWHERE, line, 0), 0
    shape = shape_of(line[:end])
    match = re.match(shape.pattern, line)
    assert match is not None, "a shape matches what it was made from"
    stamp = match["stamp"] if shape.style else None
    return shape, stamp, _or_rank_in_text(_origin_of(shape, match), line, end), end


def _or_rank_in_text(where: Origin, line: bytes, end: int) -> Origin:
    """Return `where`, or the rank that a logger names within the first words of its line."""
    if where.rank is None and (named := _RANK_IN_TEXT.search(line, end, end + _LONGEST_LOGGER)):
        rank = rank_of(named[1].decode())
        return where if rank is None else Origin(rank)
    return where


class LineOrigins:
    """Origins of a block's lines, each found once, by the shapes that were seen before."""

    def __init__(self) -> None:
        self._shapes: dict[PrefixShape, re.Pattern[bytes]] = {}

    def at(self, block: LineBlock, offsets: Sequence[int]) -> list[Origin]:
        """Return the origins of the file's lines at ascending offsets."""
        origins: list[Origin] = []
        end, where = -1, NOWHERE
        for offset in offsets:
            if offset > end:
                where = self._of(block.line_head(offset))
                end = block.counted.find(b"\n", offset)
                end = len(block.counted) if end < 0 else end
            origins.append(where)
        return origins

    def _of(self, head: bytes) -> Origin:
        if _BARE.match(head):
            return NOWHERE
        for shape, pattern in self._shapes.items():
            match = pattern.match(head)
            if match is not None:
                return _origin_of(shape, match)
        shape, _, where, _ = split_prefix(head)
        pattern = re.compile(shape.pattern)
        match = pattern.match(head)
        if (
            len(self._shapes) < _MOST_SHAPES
            and shape.parts
            and match is not None
            and where == _origin_of(shape, match)
        ):
            self._shapes[shape] = pattern
        return where
