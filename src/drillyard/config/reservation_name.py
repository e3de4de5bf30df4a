"""The name of a Google Cloud reservation as a config gives it.

    NAME    projects/PROJECT/reservations/NAME
    NAME/reservationBlocks/BLOCK    NAME/reservationBlocks/BLOCK/reservationSubBlocks/SUB_BLOCK

https://cloud.google.com/kubernetes-engine/docs/how-to/consuming-reservations
"""

from __future__ import annotations

import re
from dataclasses import dataclass

RESERVATION_FORMS = (
    "NAME, projects/PROJECT/reservations/NAME, or NAME/reservationBlocks/BLOCK and behind that"
    " /reservationSubBlocks/SUB_BLOCK"
)
_NAME = "[a-z](?:[a-z0-9-]{0,61}[a-z0-9])?"
_FORM = re.compile(
    rf"(?:projects/(?P<project>[^/]+)/reservations/)?(?P<name>{_NAME})"
    rf"(?P<block>/reservationBlocks/{_NAME}(?:/reservationSubBlocks/{_NAME})?)?"
)


@dataclass(frozen=True)
class ReservationName:
    """`project`: None for the cluster's own; `block`: its path below the reservation, or empty."""

    name: str
    project: str | None = None
    block: str = ""


def read_reservation(text: str) -> ReservationName | None:
    """The parts of the name; None where it has another form."""
    found = _FORM.fullmatch(text)
    if found is None:
        return None
    return ReservationName(found["name"], found["project"], found["block"] or "")
