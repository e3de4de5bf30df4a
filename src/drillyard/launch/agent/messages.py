"""The messages between leader and followers, checked field by field on receipt: a bad message ends
its connection.

No message carries a command or an address. From the network a node's command gets only two whole
numbers, the attempt and the port of its rendezvous; host names, which reach job scripts through
state.json, have no character that a shell interprets.
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from typing import Any

from drillyard.supervise.launch_contract import FailureElsewhere
from drillyard.supervise.stop_requests import STOP_SIGNALS

from .protocol import ConnectionLost

_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._:-]{0,253}[A-Za-z0-9])?")
"""Names (RFC 1123, and underscores, which some clusters use) and IP addresses."""
_COMMAND_SIGNALS = (*STOP_SIGNALS, signal.SIGKILL)
_MOST = 1 << 53
"""Above all epochs, attempts and seconds; larger whole numbers are no longer exact as floats."""
_REPORT: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("node", "exit_code", "status"), (int,)),
    **dict.fromkeys(("rank", "step"), (int, type(None))),
    **dict.fromkeys(("host", "reason"), (str,)),
    **dict.fromkeys(("lost_peer", "asked", "final", "knows_step", "has_record"), (bool,)),
    **dict.fromkeys(("lines", "left"), (list,)),
    "ended_at": (int, float),
}
"""Fields of a report (`exit_report.make_report`) and their types."""


def is_host(text: object) -> bool:
    return isinstance(text, str) and _HOST.fullmatch(text) is not None


@dataclass(frozen=True)
class StartMessage:
    """Order of the leader to start the node's command. `port`: where its rank 0 listens."""

    epoch: int
    attempt: int
    port: int


@dataclass(frozen=True)
class StopMessage:
    """Order of the leader to end the node's command: see `NodeCommand.stop`."""

    signal: int
    grace_seconds: float
    why: str | None = None
    elsewhere: FailureElsewhere | None = None


def parse_start(content: object) -> StartMessage:
    """Parse the content of a message `start`. Raises ConnectionLost."""
    start = StartMessage(**_fields(content, {"epoch": (int,), "attempt": (int,), "port": (int,)}))
    if not (1 <= start.epoch < _MOST and 0 <= start.attempt < _MOST and 0 < start.port < 1 << 16):
        raise ConnectionLost(f"no epoch, attempt and port: {content}")
    return start


def parse_stop(content: object) -> StopMessage:
    """Parse the content of a message `stop`. Raises ConnectionLost."""
    types: dict[str, tuple[type, ...]] = {
        "signal": (int,),
        "patience_seconds": (int, float),
        "why": (str, type(None)),
        "elsewhere": (dict, type(None)),
    }
    fields = _fields(content, types)
    if fields["signal"] not in _COMMAND_SIGNALS:
        raise ConnectionLost(f"signal {fields['signal']} stops no command")
    # JSON of Python has NaN and Infinity, too; no comparison holds for NaN.
    if not 0 <= fields["patience_seconds"] < _MOST:
        raise ConnectionLost("patience_seconds of a message is no time")
    if fields["elsewhere"] is not None:
        optional = (int, type(None))
        failure = _fields(
            fields["elsewhere"], {"reason": (str,), "rank": optional, "exit_code": optional}
        )
        fields["elsewhere"] = FailureElsewhere(**failure)
    return StopMessage(grace_seconds=fields.pop("patience_seconds"), **fields)


def parse_request(content: object) -> tuple[int, bool]:
    """Parse the content of a message `asked`: a stop signal, and whether it came again. Raises
    ConnectionLost."""
    fields = _fields(content, {"signal": (int,), "insisted": (bool,)})
    if fields["signal"] not in STOP_SIGNALS:
        raise ConnectionLost(f"signal {fields['signal']} is no request to stop")
    return fields["signal"], fields["insisted"]


def parse_report(content: object, node: int) -> dict[str, Any]:
    """Parse the content of a message `exited` of a node: the report of its command. Raises
    ConnectionLost."""
    fields = _fields(content, _REPORT)
    if fields["node"] != node:
        raise ConnectionLost(f"a report of node {fields['node']}")
    return fields


def parse_leave(content: object) -> int:
    """Parse the content of a message `leave`. Raises ConnectionLost."""
    return int(_fields({"code": content}, {"code": (int,)})["code"])


def _fields(content: object, types: dict[str, tuple[type, ...]]) -> dict[str, Any]:
    if not isinstance(content, dict) or content.keys() != types.keys():
        raise ConnectionLost(f"a message needs the fields {', '.join(types)}")
    for name, value in content.items():
        # A bool is an int to isinstance.
        if not isinstance(value, types[name]) or (
            isinstance(value, bool) and bool not in types[name]
        ):
            raise ConnectionLost(f"{name} of a message cannot be {type(value).__name__}")
    return dict(content)
