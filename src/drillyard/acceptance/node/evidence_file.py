"""The document that node 0 writes, after each step and at the end.

Where node 0's program is gone, or stands still on a host that answers, another node adds that to
the document, if the nodes share the run directory.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

FORMAT = 1
UNFINISHED = "node 0 wrote nothing more"
"""Why the job ended before its last step, in each document but the last."""
_MOST_BYTES = 512 << 20
_ANSWER_SECONDS = 5.0


def write_evidence(path: Path, evidence: dict[str, Any]) -> None:
    """Write the document in one piece: a reader sees all of it or nothing. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.part")
    text = json.dumps(evidence, separators=(",", ":"))
    try:
        partial.write_text(f"{text}\n", encoding="utf-8")
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


def add_loss_of_node_0(path: Path, submission: str, address: str, port: int) -> None:
    """Name node 0 in the document of this job, where its host proves that its program is gone or
    stands still. A host that does not answer proves nothing: it may be this node that is cut
    off."""
    why = _state_of_node_0(address, port)
    if why is None:
        return
    try:
        if path.stat().st_size > _MOST_BYTES:
            return
        document = json.loads(path.read_bytes())
        if document["submission"] != submission or document["interrupted"] != UNFINISHED:
            return
        observations = [*document["observations"]]
    except (OSError, ValueError, KeyError, TypeError):
        return
    observations.append(
        {
            "probe": "connection",
            "scope": "node",
            "nodes": [0],
            "error": f"node 0 {why}",
            "silent": [0],
            "started_at": time.time(),
        }
    )
    try:
        write_evidence(path, {**document, "observations": observations})
    except OSError:
        return


def _state_of_node_0(address: str, port: int) -> str | None:
    """What its host proves of node 0's program, which greets everybody who connects; None where it
    proves nothing."""
    try:
        connected = socket.create_connection((address, port), timeout=_ANSWER_SECONDS)
    except ConnectionRefusedError:
        return "ended"
    except OSError:
        return None
    with connected:
        try:
            return None if connected.recv(1) else "ended"
        except (TimeoutError, socket.timeout):
            return "stands still: its host accepts connections, its program does not greet"
        except OSError:
            return "ended"
