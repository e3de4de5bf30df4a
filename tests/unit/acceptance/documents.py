"""A made-up acceptance.json: twelve nodes, one of them bad, with every status."""

from __future__ import annotations

from typing import Any

from drillyard.acceptance.acceptance_document import (
    AcceptanceDocument,
    CulpritEntry,
    MatrixEntry,
    NodeEntry,
    PointEntry,
    ResultEntry,
    ThresholdEntry,
)

NAMES = [f"node-{rank}" for rank in range(12)]
BAD = 3
SIZES = [2.0**power for power in range(20, 34)]
CURVE = [11.0, 17, 31, 52, 81, 150, 196, 221, 251, 262, 270, 274, 276, 277.25]


def points(scale: float = 1.0) -> list[PointEntry]:
    return [
        PointEntry(bytes=size, gb_per_s=value * scale)
        for size, value in zip(SIZES, CURVE, strict=True)
    ]


def result(status: str = "pass", **changes: Any) -> ResultEntry:
    """A bandwidth of two nodes."""
    values: dict[str, Any] = {
        "check": "all-gather",
        "title": "all_gather",
        "metric": "bus bandwidth",
        "nodes": NAMES[:2],
        "ranks": [0, 1],
        "device": None,
        "status": status,
        "required": status not in ("skipped", "recorded"),
        "reason": "node-0 and node-1 reach 277.2 GB/s",
        "observed": 277.25,
        "interval": [276.5, 277.25],
        "unit": "GB/s",
        "threshold": ThresholdEntry(
            value=251.0,
            unit="GB/s",
            at_least=True,
            source="a row, 2026-01-31",
            reference=280.0,
            bound=400.0,
        ),
        "expected": "",
        "action": "",
        "culprits": [],
        "evidence": [],
        "series": points(),
        "reference_series": points(1.01),
    }
    return ResultEntry(**{**values, **changes})


def bandwidth_of(i: int, j: int) -> float | None:
    """Of a pair: little with the bad node; some were not measured."""
    if i == j or (i + j) % 7 == 0:
        return None
    return 31.5 if BAD in (i, j) else 180.0 + (i * j) % 11


def document(**changes: Any) -> AcceptanceDocument:
    """One bad node; a text with markup and characters that XML cannot hold."""
    odd = '<script>alert("x")</script> \x00\x1b[31m'
    results = [
        result(),
        result(
            "fail",
            check="tcp-bandwidth",
            title="TCP bandwidth",
            nodes=[NAMES[BAD]],
            ranks=[BAD],
            reason=f"{NAMES[BAD]} reaches 31.5 Gbit/s {odd}",
            observed=31.5,
            interval=None,
            action="take it out",
            culprits=[NAMES[BAD]],
            evidence=[odd],
            series=[],
            reference_series=[],
        ),
        result("incomplete", check="dcgm", observed=None, interval=None, threshold=None, series=[]),
        result(
            "warn", check="versions", observed="1 & 2", interval=None, threshold=None, series=[]
        ),
        result(
            "skipped", check="training", observed=None, interval=None, threshold=None, series=[]
        ),
        result("recorded", check="sendrecv", threshold=None, reference_series=[]),
    ]
    values: dict[str, Any] = {
        "version": 1,
        "drillyard": "0.0",
        "verdict": "fail",
        "level": "quick",
        "recorded": False,
        "machine": "a3-megagpu-8g",
        "accelerator": "h100",
        "network_stack": "tcpxo",
        "started_at": "2026-01-31T12:00:00+00:00",
        "ended_at": "2026-01-31T12:00:50+00:00",
        "nodes": [
            NodeEntry(
                rank=rank,
                name=name,
                address=f"10.0.0.{rank}",
                rack="",
                joined=rank != 7,
                at_fault=rank == BAD,
            )
            for rank, name in enumerate(NAMES)
        ],
        "culprits": [
            CulpritEntry(
                rank=BAD,
                name=NAMES[BAD],
                checks=["tcp-bandwidth"],
                reasons=[results[1].reason],
                actions=["take it out"],
                evidence=[odd],
            )
        ],
        "results": results,
        "matrices": [
            MatrixEntry(
                check="tcp-bandwidth",
                metric="TCP bandwidth",
                unit="Gbit/s",
                nodes=NAMES,
                values=[[bandwidth_of(i, j) for j in range(12)] for i in range(12)],
            ),
            MatrixEntry(
                check="clock",
                metric="offset",
                unit="ms",
                nodes=NAMES[:3],
                values=[[None, 0.5, -2003.0], [0.5, None, 2.0], [-2003.0, 2.0, None]],
            ),
        ],
        "evidence": {},
    }
    return AcceptanceDocument(**{**values, **changes})
