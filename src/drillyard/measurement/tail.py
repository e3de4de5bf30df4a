"""One source that still grows: text is read on from where it ended, documents and event files are read anew.

The idea: lines can be appended to without looking back; a trainer_state.json is replaced as a whole, and the records of
an event file belong together over many of them. So the first bytes of a file decide, as they do for `read`; but they
may be on their way still, so a file counts as text for good only with a step in it or once all of those bytes are read.

Cost: of text, that of what is new; of the others the whole file whenever it changed.
"""

from __future__ import annotations

import os
from datetime import tzinfo
from typing import Final

from drillyard.errors import UserError
from drillyard.loglines.followers import follower
from drillyard.loglines.sources import LogFile, open_log
from drillyard.measurement.source_reader import SourceContent, TextSourceReader, document_format, read_source

_HEAD_BYTES: Final = 1 << 16


class FollowedSource:
    """A source that is followed. Raises UserError for what cannot be followed."""

    def __init__(self, file: LogFile, number: int, zone: tzinfo | None, only: str | None) -> None:
        self.file = file
        self._number, self._zone, self._only = number, zone, only
        self._follower = follower(file)
        self._text = self._new()
        self._is_text = self._cannot_be_document
        self._document: SourceContent | None = None
        self._seen: tuple[int, int, int] | None = None

    def _new(self) -> TextSourceReader:
        return TextSourceReader(self.file, self._number, self._zone, self._only)

    @property
    def _cannot_be_document(self) -> bool:
        return self.file.path is None

    @property
    def ended(self) -> bool:
        """Whether nothing can come any more."""
        return self._follower.ended

    @property
    def behind(self) -> bool:
        """Whether the last poll ended before all that was there had been read."""
        return self._follower.behind

    def absent(self) -> bool:
        """Whether it is not there yet."""
        return self._follower.absent()

    def close(self) -> None:
        """Let go of it."""
        self._follower.close()

    def poll(self) -> bool:
        """Read what is new; whether there was anything. Raises UserError."""
        if self.ended:
            return False
        try:
            return self._read_on() if self._is_text or not self._is_document() else self._read_anew()
        except OSError as error:
            raise UserError(f"{self.file.name}: cannot be read: {error.strerror}") from error

    def reading(self) -> SourceContent:
        """What was read so far."""
        if self._document is not None:
            return self._document
        return self._text.content()

    def _read_on(self) -> bool:
        news = False
        for piece in self._follower.poll():
            news = True
            if piece is None:
                self._text = self._new()
                self._is_text = self._cannot_be_document
            else:
                self._text.feed(piece)
        if news and not self._is_text:
            found = self._text.content().found
            self._is_text = self._text.source.bytes >= _HEAD_BYTES or any(one.lanes for one in found)
        if self._is_text:
            self._document = None
        if self.ended:
            self._text.finish()
        return news or self.ended

    def _is_document(self) -> bool:
        assert self.file.path is not None
        try:
            with self.file.path.open("rb") as stream:
                head = stream.read(_HEAD_BYTES)
        except FileNotFoundError:
            return False
        return document_format(head, self._only) is not None

    def _read_anew(self) -> bool:
        status = os.stat(self.file.name)
        now = (status.st_ino, status.st_size, status.st_mtime_ns)
        if now == self._seen:
            return False
        self._seen = now
        # Should it turn into text, that is read from its beginning.
        self._follower.close()
        self._text = self._new()
        with open_log(self.file) as stream:
            self._document = read_source(self.file, self._number, stream, self._zone, self._only)
        return True
