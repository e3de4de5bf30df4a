"""What a command may fetch, and which variables it may fill in, for the config of a run directory.

A run directory may come from somebody else. Its run.yaml is data then: an address in it would be
sent the value of `${env:NAME}`, and a hub id is fetched with the user's token. So a command that
works on a saved config opens `limited`: within it nothing is fetched and no reference is resolved,
except for the texts that the user typed himself. What is on this machine already (token caches, the
Hugging Face cache, files of the run) is used.

The limits are a context variable and not an argument: what fetches is at the end of long chains of
calls, where one argument left out would fetch. Threads and processes started within it do not
inherit it: list and resolve before starting them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from drillyard.errors import UserError


@dataclass(frozen=True)
class FetchLimits:
    """Limits of a command on a saved config.

    `settings`: a line for each setting that would be fetched or has a variable
    (`saved_config.settings_to_fetch`). `typed`: texts that the user typed, references unresolved,
    which are not limited. `accepts_data`: the command has `--data`, which was not given.
    """

    settings: tuple[str, ...] = ()
    typed: frozenset[str] = frozenset()
    accepts_data: bool = False


class WithheldError(UserError):
    """A saved config names what is neither on this machine nor typed by the user."""


_LIMITS: ContextVar[FetchLimits | None] = ContextVar("fetch_limits", default=None)


@contextmanager
def limited(limits: FetchLimits | None) -> Iterator[None]:
    """Fetch and resolve within `limits`; None: without limits."""
    token = _LIMITS.set(limits)
    try:
        yield
    finally:
        _LIMITS.reset(token)


def is_withheld(text: str) -> bool:
    """Whether `text` (an address, a hub id, a text with references) may not be fetched or
    resolved."""
    limits = _LIMITS.get()
    return limits is not None and getattr(text, "reference", text) not in limits.typed


def withheld_error(named: str, *, is_data: bool = False) -> WithheldError:
    """The error for what is needed and withheld: all settings that are, and the flags that help.

    `named`: what is needed, where it is in none of those settings. `is_data`: it is a source of
    documents.
    """
    limits = _LIMITS.get()
    assert limits is not None, "nothing is withheld"
    lines = [*(limits.settings or [named])]
    own = "name documents of your own by --data, or " if is_data and limits.accepts_data else ""
    return WithheldError(
        "\n".join(
            [
                *lines,
                "not fetched or filled in: a run directory may come from somebody else, who would"
                " receive the value or the request",
                f"{own}give --trust-config to fetch and fill in all of these",
            ]
        )
    )
