"""What leader and followers tell each other, checked field by field when it comes: a bad message ends its connection.

No message carries a command or an address. Of what came over the network a node's command sees only two whole numbers,
the round and the port of its rendezvous; host names, which reach job scripts through state.json, have no character that
a shell could read otherwise.
"""

from __future__ import annotations

import dataclasses
import re
import signal
from dataclasses import dataclass
from typing import Any

from .borrowed import launched, signals
from .wire import ConnectionLost

_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._:-]{0,253}[A-Za-z0-9])?")
"""Names (RFC 1123, and underscores, which some clusters use) and IP addresses."""
_STOP_SIGNALS = (*signals.STOP_SIGNALS, signal.SIGKILL)
_REPORT: dict[str, tuple[type, ...]] = {
    "node": (int,),
    "host": (str,),
    "rank": (int, type(None)),
    "exit_code": (int,),
    "status": (int,),
    "reason": (str,),
    "lines": (list,),
    "lost_peer": (bool,),
    "asked": (bool,),
    "final": (bool,),
    "told": (bool,),
    "ended_at": (int, float),
    "left": (list,),
}
"""Fields of a report (`records.make_report`) and their types."""


def is_host(text: object) -> bool:
    """Whether it is a host name or an IP address."""
    return isinstance(text, str) and _HOST.fullmatch(text) is not None


@dataclass(frozen=True)
class StartMessage:
    """The leader has the node start its command. `port`: where rank 0 of the round is met."""

    epoch: int
    round: int
    port: int


@dataclass(frozen=True)
class StopMessage:
    """The leader has the node end its command: see `Node.stop`."""

    signal: int
    patience_seconds: float
    why: str | None
    elsewhere: launched.FailureElsewhere | None


def start_of(content: object) -> StartMessage:
    """The content of a message `start`. Raises ConnectionLost."""
    told = _fields(content, {"epoch": (int,), "round": (int,), "port": (int,)})
    start = StartMessage(**told)
    if start.epoch < 1 or start.round < 0 or not 0 < start.port < 1 << 16:
        raise ConnectionLost(f"no epoch, round and port: {told}")
    return start


def stop_of(content: object) -> StopMessage:
    """The content of a message `stop`. Raises ConnectionLost."""
    types: dict[str, tuple[type, ...]] = {
        "signal": (int,),
        "patience_seconds": (int, float),
        "why": (str, type(None)),
        "elsewhere": (dict, type(None)),
    }
    told = _fields(content, types)
    if told["signal"] not in _STOP_SIGNALS:
        raise ConnectionLost(f"signal {told['signal']} stops no command")
    if told["elsewhere"] is not None:
        optional = (int, type(None))
        fields = _fields(told["elsewhere"], {"reason": (str,), "rank": optional, "exit_code": optional})
        told["elsewhere"] = launched.FailureElsewhere(**fields)
    return StopMessage(**told)


def request_of(content: object) -> tuple[int, bool]:
    """The content of a message `asked`: a stop signal, and whether it came again. Raises ConnectionLost."""
    told = _fields(content, {"signal": (int,), "insisted": (bool,)})
    if told["signal"] not in signals.STOP_SIGNALS:
        raise ConnectionLost(f"signal {told['signal']} is no request to stop")
    return told["signal"], told["insisted"]


def report_of(content: object, node: int) -> dict[str, Any]:
    """The content of a message `exited` of a node: how its command ended. Raises ConnectionLost."""
    told = _fields(content, _REPORT)
    if told["node"] != node:
        raise ConnectionLost(f"a report of node {told['node']}")
    return told


def exit_code_of(content: object) -> int:
    """The content of a message `leave`. Raises ConnectionLost."""
    return int(_fields({"code": content}, {"code": (int,)})["code"])


def as_content(message: StartMessage | StopMessage) -> dict[str, Any]:
    """A message's content as it is sent."""
    return dataclasses.asdict(message)


def _fields(content: object, types: dict[str, tuple[type, ...]]) -> dict[str, Any]:
    if not isinstance(content, dict) or content.keys() != types.keys():
        raise ConnectionLost(f"a message needs the fields {', '.join(types)}")
    for name, value in content.items():
        # A bool is an int to isinstance.
        if not isinstance(value, types[name]) or (isinstance(value, bool) and bool not in types[name]):
            raise ConnectionLost(f"{name} of a message cannot be {type(value).__name__}")
    return dict(content)
