"""Access to the Hugging Face hub: whether an id may be fetched, which of the hub's errors mean that
access is denied, and the page on which to ask for it.

The libraries wrap the hub's answer in errors of their own, so its status is looked for along the
chain of causes. The token that was sent is in none of the texts made here.
"""

from __future__ import annotations

from drillyard.config.environment import OPENING
from drillyard.config.fetch_limits import is_withheld, withheld_error

DENIED = (401, 403)


def require_cached_only(name: str, setting: str) -> bool:
    """Whether the hub id `name` may only be read from the local Hugging Face cache.

    `setting`: the one that names it, for the error. Raises WithheldError for a name with an
    unresolved reference (`fetch_limits.py`).
    """
    if not is_withheld(name):
        return False
    if OPENING in name:
        raise withheld_error(f"{setting}: {name}")
    return True


def denied_status(error: BaseException | None) -> int | None:
    """The status, 401 or 403, with which a hub refused access; None if the error has another
    cause."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status in DENIED:
            return int(status)
        error = error.__cause__ or error.__context__
    return None


def access_advice(repository: str) -> str:
    """How to get access to a repository: `org/model`, or `datasets/org/name`."""
    from huggingface_hub import constants

    return (
        f"Ask for access on {constants.ENDPOINT}/{repository}, then set HF_TOKEN to a token of that"
        " account"
    )


def denied_access(repository: str, error: BaseException) -> str | None:
    """What to tell the user where the hub denied access; None if the error has another cause."""
    status = denied_status(error)
    if status is None:
        return None
    return (
        f"{repository}: access is denied, or the hub has none of that name"
        f" ({status}).\n{access_advice(repository)}."
    )
