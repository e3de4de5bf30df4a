"""Redaction: the value of each secret `${env:NAME}` in a text is replaced by `${env:NAME}`.

All that we write goes through `redact`: the output of commands, events, summaries, reports, and on
the nodes a run's logs, state.json and exits/. The secrets of a process are the values that its
configs refer to, and those of the variables that a launcher lists in `DRILLYARD_SECRETS`.

Found: a value as it is, quoted for a URL, in JSON, Python or HTML, and within base64 text (an
Authorization header). Not found: other encodings, values cut in two, and values of fewer than
`SHORTEST` characters, which also occur in unrelated texts. Never secret: `NOT_SECRET` and paths
that exist on this machine (`${env:SCRATCH}`).

Cost: 0.15 ms per MiB and form. Standard library only, and nothing newer than Python 3.9: shipped
with the agents.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

SHORTEST = 8
"""Characters. Settings such as `eu-west` or `true` are shorter and would be replaced in every text;
secrets are longer."""
NOT_SECRET = frozenset({"HOME", "HOSTNAME", "LOGNAME", "PWD", "SHELL", "TMPDIR", "USER"})
"""Set by the system, and part of most paths."""
GIVEN_NAMES = "DRILLYARD_SECRETS"
"""Comma-separated names of a run's secrets; their values are in the environment too."""


class Redactor:
    """Replaces secrets in texts. `secrets`: values by the name of their variable."""

    def __init__(self, secrets: Mapping[str, str] | None = None) -> None:
        # The replacement of each form of a value, longest form first; and a pattern of all forms in
        # that order.
        self._texts: dict[str, str] = {}
        self._bytes: dict[bytes, bytes] = {}
        self._text_pattern = re.compile("")
        self._bytes_pattern = re.compile(b"")
        for name, value in (secrets or {}).items():
            self.add(name, value)

    def add(self, name: str, value: str) -> None:
        """Add the value of a variable."""
        shown = dict(self._texts)
        for form in _forms(value) if _is_secret(name, value) else ():
            shown.setdefault(form, f"${{env:{name}}}")
        if len(shown) > len(self._texts):
            # Keep references that are in the text already, even if a value is part of their name.
            shown |= {reference: reference for reference in shown.values()}
            # Longest first: one value may begin with another.
            self._texts = dict(sorted(shown.items(), key=lambda row: -len(row[0])))
            pairs = [
                (form.encode(errors="surrogateescape"), text.encode())
                for form, text in self._texts.items()
            ]
            self._bytes = dict(
                sorted(
                    (pair for pair in pairs if b"\n" not in pair[0]), key=lambda row: -len(row[0])
                )
            )
            self._text_pattern = re.compile("|".join(map(re.escape, self._texts)))
            self._bytes_pattern = re.compile(b"|".join(map(re.escape, self._bytes)))

    def text(self, text: str) -> str:
        """`text` with references instead of values."""
        if not any(form in text for form in self._texts):
            return text
        return self._text_pattern.sub(lambda found: self._texts[found[0]], text)

    def lines(self, data: bytes) -> bytes:
        """The same for bytes of lines; of a value of several lines, each line is replaced."""
        return self.piece(data, len(data))[0]

    def piece(self, data: bytes, end: int) -> tuple[bytes, bytes]:
        """`data` with references for all values that begin before `end`; and the rest,
        unchanged."""
        parts, place = [], 0
        if any(form in data for form in self._bytes):
            for found in self._bytes_pattern.finditer(data):
                if found.start() >= end:
                    break
                parts += [data[place : found.start()], self._bytes[found[0]]]
                place = found.end()
        end = max(end, place)
        return b"".join([*parts, data[place:end]]), data[end:]

    def tree(self, value: Any) -> Any:
        """The same for every text in a JSON value, keys included."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, list):
            return [self.tree(item) for item in value]
        return (
            {self.tree(key): self.tree(item) for key, item in value.items()}
            if isinstance(value, dict)
            else value
        )

    def begun(self, data: bytes) -> int:
        """The number of bytes at the end of `data` that may be the begin of a value that continues
        after `data`."""
        if not self._bytes or data.endswith(b"\n"):
            return 0
        longest = len(next(iter(self._bytes)))
        end = data[max(data.rfind(b"\n") + 1, len(data) - longest + 1, 0) :]
        firsts = {form[0] for form in self._bytes}
        for place, byte in enumerate(end):
            left = len(end) - place
            if byte in firsts and any(
                len(form) > left and form.startswith(end[place:]) for form in self._bytes
            ):
                return left
        return 0


class RedactedStream:
    """Redacts bytes that arrive in pieces cut anywhere: the possible begin of a value waits for the
    next piece."""

    def __init__(self, redactor: Redactor) -> None:
        self._redactor = redactor
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        """The redacted bytes that are complete now; pass empty `data` at the end to get the
        rest."""
        data, ends = self._held + data, not data
        held = 0 if ends else self._redactor.begun(data)
        safe, self._held = self._redactor.piece(data, len(data) - held)
        return safe


_known = Redactor()
"""The secrets of this process."""


def add_secret(name: str, value: str) -> None:
    """Redact this value in this process from now on."""
    _known.add(name, value)


def add_inherited_secrets() -> None:
    """Redact the secrets of the run that this process was launched for."""
    for name in filter(None, os.environ.get(GIVEN_NAMES, "").split(",")):
        if name in os.environ:
            add_secret(name, os.environ[name])


def redact(text: str) -> str:
    """`text` without the secrets of this process."""
    return _known.text(text)


def redact_lines(data: bytes) -> bytes:
    """The same for bytes of whole lines."""
    return _known.lines(data)


def _is_secret(name: str, value: str) -> bool:
    return name not in NOT_SECRET and not (os.path.isabs(value) and os.path.exists(value))


def _forms(value: str) -> list[str]:
    """The forms in which a value may occur in a text; for several lines also each line."""
    parts = [value, *(line.strip() for line in value.splitlines())]
    written = [form for part in dict.fromkeys(parts) for form in _written(part)]
    return [form for form in dict.fromkeys(written) if len(form) >= SHORTEST]


def _written(value: str) -> Iterable[str]:
    if len(value) < SHORTEST:
        return
    # Imported only for secrets: these take longer than an agent's other imports.
    import base64
    import html
    from urllib.parse import quote, quote_plus

    yield value
    yield json.dumps(value)[1:-1]
    yield json.dumps(value, ensure_ascii=False)[1:-1]
    yield repr(value)[1:-1]
    # repr escapes quotes differently if the text has both kinds.
    yield repr("'\"" + value)[4:-1]
    yield ascii("'\"" + value)[4:-1]
    # A variable may have bytes that are not UTF-8.
    data = value.encode(errors="surrogateescape")
    yield repr(data)[2:-1]
    yield value.replace("'", "'\"'\"'")  # shlex.quote
    yield value.replace("'", r"'\''")  # sh -x
    yield html.escape(value)
    for quoted in (quote(data, safe=""), quote(data), quote_plus(data)):
        yield quoted
        yield _lower_escapes(quoted)
    for alphabet in (base64.b64encode, base64.urlsafe_b64encode):
        for before in range(3):
            # Without the letters that also encode bytes before or after the value: 6 bits per
            # letter.
            encoded = alphabet(b"\0" * before + data).rstrip(b"=").decode()
            yield encoded[-(-8 * before // 6) : 8 * (before + len(data)) // 6]


def _lower_escapes(quoted: str) -> str:
    """%2f, as some programs write %2F."""
    first, *others = quoted.split("%")
    return "%".join([first, *(each[:2].lower() + each[2:] for each in others)])
