"""A run's output: all nodes as one stream (LAUNCH_DIR/node-K.log, every line stamped by its agent),
or one rank's (RUN_DIR/logs/rank-R.log, or its lines in its node's log).

Files are read in pieces (`remote_files.py`) as lines are used up (`merge.py`): about 8 MiB of text
at any log size. `since` is found by bisection and `tail` from the end. Following reads all files at
once, four times a second or, where that takes long, in a quarter of the time. Lines older than five
seconds are returned at once, newer ones half a second after they were read, since earlier ones may
follow.
"""

from __future__ import annotations

import glob
import json
import math
import posixpath
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Final

from drillyard.errors import ConfigError, NotFoundError, UserError
from drillyard.launch.agent.state_file import json_object
from drillyard.launch.logs.line_selection import RankFilter, offsets_of_tail, offsets_since
from drillyard.launch.logs.merge import KEY_BYTES, LogMerge, LogSource, all_stamped, key_of
from drillyard.launch.remote_files import Files, ReadRequest, ReadResult, print_notice
from drillyard.launch.request import LogSelection

HELD_BYTES: Final = 8 << 20
"""Text of all files in memory (up to ten times as much as lists of lines)."""
_PIECE_BYTES: Final = (8 << 10, 512 << 10)
POLL_SECONDS: Final = 0.25
HOLD_SECONDS: Final = 0.5
_OLD_SECONDS: Final = 5.0
ASK_SECONDS: Final = 2.0
"""Between two checks whether the run is over."""
_UNKNOWN_TIME_BYTES: Final = 256 << 10
_NODE_LOG: Final = re.compile(r"/node-(\d{1,9})\.log$")
_SUBMISSION_SECONDS: Final = 1.0
"""Schedulers report whole seconds, and a node's clock may be a little behind."""


@dataclass
class _Log:
    """One file that is read."""

    path: str
    source: LogSource
    offset: int = 0
    head: bytes = b""
    fed: int = 0
    """Lines that waited after the last piece."""
    read: int = 0
    """Bytes."""

    def take(self, piece: ReadResult | None, length: int) -> None:
        """Feed what was read; less than `length` is the end for now."""
        head, replaced, data = piece or (self.head, False, b"")
        if replaced:
            self.source.cut()
            self.offset = 0
        self.head = head
        self.offset += len(data)
        self.read += len(data)
        self.source.paused = len(data) < length
        self.source.feed(data)
        self.fed = self.source.held_lines


def run_logs(
    launch_directory: str,
    files: Files,
    wanted: LogSelection,
    *,
    over: Callable[[], bool],
) -> Iterator[bytes]:
    """The lines of a run's logs, `NODE: STAMP TEXT` or `[rankR]: ...`, in pieces of whole lines.

    `over` returns whether the run is over, so that following ends; a thread calls it every few
    seconds. Raises UserError for a node or rank that the run does not have, and where the logs
    cannot be read.
    """
    files.patient = wanted.follow
    reader = _Reader(launch_directory, files, wanted)
    pieces = _tailed(_until_end(reader), wanted.tail)
    if wanted.follow:
        pieces = chain(pieces, _follow(reader, _when_over(over)))
    yield from filter(None, pieces)


def _until_end(reader: _Reader) -> Iterator[bytes]:
    """Yield what is written already. Of a run that is followed, the newest lines are held back, as
    later ones are."""
    follow = reader.wanted.follow
    reader.look()
    while not reader.at_end:
        reader.fill()
        if not follow:
            # At once: a last line that was cut off has its place among the lines of the others.
            for log in reader.logs:
                if log.source.paused:
                    log.source.finish()
        # But the last N are returned together.
        if not (follow and reader.wanted.tail is None and reader.at_end):
            yield reader.merge.final()


def _follow(reader: _Reader, ended: threading.Event) -> Iterator[bytes]:
    """Yield what is written from now on, until the run is over."""
    readings: deque[tuple[float, bytes]] = deque()
    """Times of reading, and the newest key then: lines up to it are returned HOLD_SECONDS later."""
    ends, free = math.inf, b""
    while True:
        began = time.monotonic()
        reader.look()
        if ends == math.inf and ended.is_set():
            # What was written until now is still read.
            ends = began + 2 * HOLD_SECONDS
        reader.fill(all_of_them=True)
        readings.append((began, reader.merge.newest()))
        while readings and began - readings[0][0] >= HOLD_SECONDS:
            free = max(free, readings.popleft()[1])
        old = key_of(round((time.time() - _OLD_SECONDS) * 1e6))
        yield reader.merge.final(max(free, old))
        if reader.at_end:
            if began >= ends:
                break
            time.sleep(max(POLL_SECONDS, 3 * (time.monotonic() - began)))
    for log in reader.logs:
        log.source.finish()
    yield reader.merge.final()


def _when_over(over: Callable[[], bool]) -> threading.Event:
    """Set once the run is over: a thread asks every few seconds, as a scheduler may fail to answer
    for a while."""
    ended = threading.Event()

    def ask() -> None:
        failing = False
        while True:
            try:
                if over():
                    ended.set()
                    return
                if failing:
                    print_notice("the cluster answers again")
                failing = False
            except UserError as error:
                if not failing:
                    print_notice(f"{str(error).splitlines()[0]}; trying again until it is back")
                failing = True
            time.sleep(ASK_SECONDS)

    threading.Thread(target=ask, daemon=True).start()
    return ended


def _tailed(pieces: Iterator[bytes], tail: int | None) -> Iterator[bytes]:
    if tail is None:
        yield from pieces
    else:
        lines = (line for piece in pieces for line in piece.split(b"\n")[:-1])
        yield b"".join(line + b"\n" for line in deque(lines, maxlen=tail))


class _Reader:
    """The selected log files, as far as they exist."""

    def __init__(self, launch_directory: str, files: Files, wanted: LogSelection) -> None:
        self.wanted = wanted
        self.merge = LogMerge()
        self.logs: list[_Log] = []
        self._files = files
        self._launch_directory = launch_directory
        path = posixpath.join(launch_directory, "job.json")
        (piece,) = files.read([ReadRequest(path, 0, 16 << 20)])
        if piece is None:
            raise NotFoundError(
                f"{path}: is not on {files.title}; without it the run's logs cannot be found"
            )
        job = json_object(piece.data)
        run_directory = job.get("run_directory")
        self._nodes, self._per_node = (
            each if isinstance(each := job.get(name), int) else 0
            for name in ("nodes", "processes_per_node")
        )
        if self._nodes < 1 or self._per_node < 1 or not isinstance(run_directory, str):
            raise UserError(f"{path}: is damaged; without it the run's logs cannot be found")
        ranks = self._nodes * self._per_node
        rank, node = wanted.rank, wanted.node
        if node is not None and not 0 <= node < self._nodes:
            raise ConfigError(f"--node {node}: the run has nodes 0 to {self._nodes - 1}")
        if rank is not None and not 0 <= rank < ranks:
            raise ConfigError(f"--rank {rank}: the run has ranks 0 to {ranks - 1}")
        if rank is not None and node is not None and rank // self._per_node != node:
            raise ConfigError(
                f"--rank {rank}: is on node {rank // self._per_node}; leave --node {node} out"
            )
        self._node = node if rank is None else rank // self._per_node
        """The one that is read; None: all."""
        self._rank_log = (
            None if rank is None else posixpath.join(run_directory, "logs", f"rank-{rank}.log")
        )
        begins = None if wanted.submitted_at is None else wanted.submitted_at - _SUBMISSION_SECONDS
        since = begins if wanted.since is None else wanted.since
        self._since = b"" if since is None else key_of(round(since * 1e6))
        self._keeps_untimed = wanted.since is None

    @property
    def at_end(self) -> bool:
        """Whether all that was written has been read."""
        return all(log.source.paused or log.source.ended for log in self.logs)

    def look(self) -> None:
        """Add files that have appeared, until all of them have."""
        known = {log.path for log in self.logs}
        num_nodes = self._nodes if self._node is None else 1
        if self._rank_log in known or (self._rank_log is None and len(known) == num_nodes):
            return
        patterns = [
            glob.escape(self._launch_directory)
            + f"/node-{'*' if self._node is None else self._node}.log"
        ]
        if self._rank_log is not None:
            patterns.append(glob.escape(self._rank_log))
        found = [
            (path, size)
            for path, size in self._files.find(patterns)
            # A copy that somebody made, such as node-0.old.log, is not a node's log.
            if path not in known and (path == self._rank_log or _NODE_LOG.search(path))
        ]
        if own := [each for each in found if each[0] == self._rank_log]:
            # Until the rank's own log exists, its lines in its node's log are read.
            found = own
            for log in self.logs:
                log.source.finish()
        fresh = [self._log(path) for path, _ in found]
        # What was written before `since` or the `tail` is not read.
        if self._since:
            for log, begin in zip(
                fresh, offsets_since(self._files, found, self._since), strict=True
            ):
                log.offset = begin
        if self.wanted.tail is not None and all(log.source.keep is None for log in fresh):
            for log, begin in zip(
                fresh, offsets_of_tail(self._files, found, self.wanted.tail), strict=True
            ):
                log.offset = max(log.offset, begin)
        self.logs += fresh

    def _log(self, path: str) -> _Log:
        """A file to read, whose lines are merged with the others'."""
        rank = self.wanted.rank
        if rank is None:
            found = _NODE_LOG.search(path)
            assert found is not None
            node = int(found[1])
            prefix, keep = b"%*d: " % (len(str(self._nodes - 1)), node), None
        else:
            node, prefix = rank // self._per_node, b"[rank%d]: " % rank
            keep = None if path == self._rank_log else RankFilter(rank, node, self._per_node)
        source = LogSource(
            node, prefix, keep=keep, since=self._since, keep_untimed=self._keeps_untimed
        )
        return _Log(path, self.merge.add(source))

    def fill(self, *, all_of_them: bool = False) -> None:
        """Read more where lines are used up; `all_of_them`: also of files that were at their end,
        as followers do."""
        going_on = [log for log in self.logs if not log.source.ended]
        # From half of a piece on, so that one request reads many files.
        half = (
            log for log in going_on if log.source.paused or 2 * log.source.held_lines <= log.fed
        )
        hungry = [log for log in half if all_of_them or not log.source.paused]
        least, most = _PIECE_BYTES
        length = min(max(HELD_BYTES // (len(self.logs) or 1), least), most)
        pieces = self._files.read(
            [ReadRequest(log.path, log.offset, length, log.head) for log in hungry]
        )
        for log, piece in zip(hungry, pieces, strict=True):
            log.take(piece, length)
            enough = log.source.paused or log.read > _UNKNOWN_TIME_BYTES
            if not self._keeps_untimed and log.read and enough and not log.source.last_key:
                raise UserError(
                    f"{log.path}: its lines have no time stamps, so --since cannot select; use"
                    " --tail N"
                )


def plain(piece: bytes, *, stamps: bool, prefixes: bool) -> bytes:
    """A piece of a merged log without its stamps, or without its prefixes."""
    if stamps and prefixes:
        return piece
    *lines, _ = piece.split(b"\n")
    text = lines[0].find(b": ") + 2
    end = text + KEY_BYTES
    begins = (
        [line[text - 2 : end] for line in lines]
        if not stamps and all_stamped([lines[0][text:end]])
        else []
    )
    if begins and all_stamped(begins, b": "):
        shown = (
            [line[:text] + line[end:] for line in lines]
            if prefixes
            else [line[end:] for line in lines]
        )
    else:
        # Most lines of a program that writes stamps of its own have a prefix as wide as the first
        # one's, and no other.
        begin, ends = (0 if prefixes else text), (b"" if stamps else b"Z ")
        shown = [
            (
                line[begin:]
                if line[text - 2 : text] == b": " and line[end - 2 : end] != ends
                else _plain_line(line, stamps, prefixes)
            )
            for line in lines
        ]
    return b"\n".join(shown) + b"\n"


def _plain_line(line: bytes, stamps: bool, prefixes: bool) -> bytes:
    text = line.find(b": ") + 2
    end = text if stamps or not all_stamped([line[text : text + KEY_BYTES]]) else text + KEY_BYTES
    return line[:text] + line[end:] if prefixes else line[end:]


def as_json_lines(piece: bytes) -> bytes:
    """A piece of a merged log as JSON, an object a line: `node` or `rank`, `time` (RFC 3339, null
    before the first) and `text`; bytes that are not UTF-8 are replaced."""
    documents = []
    for line in piece.split(b"\n")[:-1]:
        prefix, _, rest = line.partition(b": ")
        number, is_rank = int(prefix.strip(b"[rank]")), prefix.startswith(b"[")
        stamped = all_stamped([rest[:KEY_BYTES]])
        document = {
            "node": None if is_rank else number,
            "rank": number if is_rank else None,
            "time": rest[: KEY_BYTES - 1].decode() if stamped else None,
            "text": rest[KEY_BYTES if stamped else 0 :].decode("utf-8", "replace"),
        }
        documents.append(json.dumps(document, ensure_ascii=False) + "\n")
    return "".join(documents).encode()
