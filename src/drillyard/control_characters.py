"""Standard output and standard error without control characters: they are shown as escapes, not
sent to the terminal.

Run names, failure reasons, log lines, host names and model names come from other users, hosts and
programs. Their raw bytes could set a terminal's title, clear its screen, write to the clipboard
(OSC 52) or reorder its lines. While a command runs, `sys.stdout` and `sys.stderr` are
`CleanStream`s, for files and pipes too: `less -R` or `tee` bring those to a terminal later. Our own
colours and cursor movements come from `drillyard.console.SafeConsole`, which cleans its texts first
and marks its output as `CleanedText`. The streams have no `buffer`: use `write_lines` for bytes.
"""

from __future__ import annotations

import re
import sys
from typing import Any, TextIO

from drillyard.redaction import redact, redact_lines

_COLOUR = r"\x1b\[[0-9;:]*m"
"""SGR (ECMA-48 8.3.117): colours, bold, underlined."""
_PLAIN = "\x1b[0m"
_COLOURED_TO_THE_END = re.compile(r"\x1b\[(?!0?m)[^\x1b]*\Z")
"""The last sequence of a line is a colour, not a reset."""
_SEQUENCE = re.compile(rf"({_COLOUR})|\x1b\[[0-?]*[ -/]*[@-~]")
"""A complete control sequence of ECMA-48 5.4: colours (group 1), cursor movements, erasing. Linear
time."""
_UNSAFE_CHARACTERS = r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
"""C0 except newline and tab, DEL, C1, Unicode's embeddings, overrides and isolates (UAX #9), and
surrogates, which no encoding accepts."""
_UNSAFE = re.compile(_UNSAFE_CHARACTERS)
_COLOUR_OR_UNSAFE = re.compile(f"({_COLOUR})|{_UNSAFE_CHARACTERS}")
_CONTROL_BYTES = bytes(code for code in (*range(32), 127) if code not in b"\t\n")


class CleanedText(str):
    """Text whose only control sequences are ours: written unchanged."""


def clean(text: str, *, colours: bool = False) -> str:
    r"""`text` without control sequences, and with escapes such as `\u001b` for other control
    characters.

    JSON has the same escapes, so a JSON text keeps its value. `colours`: keep SGR sequences.
    """
    if text.isprintable() or _UNSAFE.search(text) is None:
        return text
    if "\x1b" in text:
        text = _SEQUENCE.sub(r"\1" if colours else "", text)
    return _COLOUR_OR_UNSAFE.sub(_shown, text) if colours else _UNSAFE.sub(_escaped, text)


def clean_lines(data: bytes, *, colours: bool = False) -> bytes:
    r"""The same for bytes of whole log lines; bytes that are not UTF-8 become escapes such as
    `\x9b`."""
    if data.isascii() and len(data.translate(None, _CONTROL_BYTES)) == len(data):
        return data
    text = clean(data.replace(b"\r\n", b"\n").decode("utf-8", "backslashreplace"), colours=colours)
    if "\x1b" in text:
        # Reset colours at the end of each line: black on black or concealed text (SGR 8) would hide
        # other lines.
        text = "\n".join(
            line + _PLAIN if _COLOURED_TO_THE_END.search(line) else line
            for line in text.split("\n")
        )
    return text.encode()


def _shown(found: re.Match[str]) -> str:
    return found[0] if found[1] else _escaped(found)


def _escaped(found: re.Match[str]) -> str:
    return f"\\u{ord(found[0]):04x}"


class CleanStream:
    """A text stream that cleans and redacts what is written to it; all else is passed to the
    stream."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write `text`, cleaned; a carriage return may begin it (progress bars). Returns the
        characters of `text`."""
        safe = redact(text)
        if isinstance(text, CleanedText):
            self._stream.write(safe)
            return len(text)
        begin = "\r" if text.startswith("\r") else ""
        self._stream.write(begin + clean(safe[len(begin) :].replace("\r\n", "\n")))
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Write each of `lines`."""
        for line in lines:
            self.write(line)

    def write_lines(self, data: bytes, *, colours: bool = False) -> None:
        """Write whole lines of bytes, cleaned."""
        self._stream.flush()
        self._stream.buffer.write(clean_lines(redact_lines(data), colours=colours))
        self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        if name == "buffer":
            # click would write to it, uncleaned, if the encoding is ASCII.
            raise AttributeError(name)
        return getattr(self._stream, name)

    def __iter__(self) -> Any:
        return iter(self._stream)


def standard_output() -> CleanStream:
    """Standard output, cleaned from now on."""
    clean_standard_streams()
    stream: Any = sys.stdout
    assert isinstance(stream, CleanStream)
    return stream


def clean_standard_streams() -> None:
    """Clean the output of this process from now on, and escape characters that the encoding
    lacks."""
    for name in ("stdout", "stderr"):
        if (stream := getattr(sys, name)) is not None and not isinstance(stream, CleanStream):
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="backslashreplace")
            setattr(sys, name, CleanStream(stream))
