"""DCGM's diagnostic (`dcgmi diag -j`), of versions 3 and 4, parsed: the result of each test on each
GPU, with the severity of its warnings.

Version 3 writes `DCGM GPU Diagnostic` and `gpu_id` (before 3.1 `gpu_ids`, a list as text); version
4 `DCGM Diagnostic`, `entity_group` and `entity_id`. Another version is refused: the meaning of its
fields is not known. Severities: dcgm_errors.h of NVIDIA/DCGM@72fa3fe.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from drillyard.acceptance.evidence import Observation
from drillyard.acceptance.parsers.errors import MOST_CHARACTERS, NotThisOutput

_ROOTS = {"DCGM GPU Diagnostic": 3, "DCGM Diagnostic": 4}
_STATUSES = {
    "pass": "pass",
    "passed": "pass",
    "fail": "fail",
    "failed": "fail",
    "warn": "warn",
    "warning": "warn",
    "skip": "skip",
    "skipped": "skip",
    "not run": "skip",
    "notrun": "skip",
}


class DcgmSeverity(IntEnum):
    """How bad an error is, and what DCGM asks for."""

    NONE = 0
    MONITOR = 1
    ISOLATE = 2
    UNKNOWN = 3
    TRIAGE = 4
    CONFIG = 5
    RESET = 6

    @property
    def remedy(self) -> str:
        """What to do."""
        return _REMEDIES[self]


_REMEDIES = {
    DcgmSeverity.NONE: "run dcgmi diag on the node again",
    DcgmSeverity.MONITOR: "the GPU can be used; look at it again",
    DcgmSeverity.ISOLATE: "drain the node: the GPU cannot be used",
    DcgmSeverity.UNKNOWN: "drain the node; run dcgmi diag -r 3 on it",
    DcgmSeverity.TRIAGE: "drain the node; have the GPU examined (dcgmi diag -r 3)",
    DcgmSeverity.CONFIG: "correct the node's configuration as the message says",
    DcgmSeverity.RESET: "drain the node and reset the GPU (nvidia-smi -r)",
}


@dataclass(frozen=True)
class DcgmWarning:
    """A message of a test. `severity` None: the document gives none."""

    text: str
    severity: DcgmSeverity | None


@dataclass(frozen=True)
class DcgmResult:
    """One test on one GPU. `gpu` None: on something else, which `entity` names. `status`: pass,
    fail, warn, skip, or DCGM's own word where it is none of them."""

    test: str
    gpu: int | None
    entity: str
    status: str
    warnings: tuple[DcgmWarning, ...]

    @property
    def good(self) -> bool:
        """It passed or was skipped, without a warning."""
        return self.status in ("pass", "skip") and not self.warnings

    @property
    def severity(self) -> DcgmSeverity | None:
        """The worst of its warnings; those that need an action come first."""
        order = [
            DcgmSeverity.ISOLATE,
            DcgmSeverity.TRIAGE,
            DcgmSeverity.RESET,
            DcgmSeverity.CONFIG,
            DcgmSeverity.UNKNOWN,
            DcgmSeverity.MONITOR,
            DcgmSeverity.NONE,
        ]
        found = {each.severity for each in self.warnings}
        return next((each for each in order if each in found), None)


@dataclass(frozen=True)
class DcgmReport:
    """A diagnostic. `version` as the document gives it; None: it gives none (DCGM 3)."""

    version: str | None
    results: tuple[DcgmResult, ...]

    @property
    def gpus(self) -> frozenset[int]:
        """GPUs on which at least one test ran."""
        return frozenset(
            each.gpu for each in self.results if each.gpu is not None and each.status != "skip"
        )


def parse_dcgm(text: str) -> DcgmReport:
    """The diagnostic in a text; what is printed before its JSON is passed over. Raises
    NotThisOutput."""
    if len(text) > MOST_CHARACTERS:
        raise NotThisOutput(f"is longer than {MOST_CHARACTERS >> 20} MiB")
    start = text.find("{")
    if start < 0:
        raise NotThisOutput("has no JSON" + (f": {text.strip()[:120]}" if text.strip() else ""))
    try:
        document, end = json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError):
        raise NotThisOutput("is not whole JSON") from None
    if "}" in text[end:]:
        raise NotThisOutput("has more than one JSON document")
    root = next((name for name in _ROOTS if isinstance(document.get(name), dict)), None)
    if root is None:
        raise NotThisOutput(f"has neither of the keys {' and '.join(_ROOTS)}")
    body = document[root]
    version = _version(document, body)
    if version is not None and (major := int(version.partition(".")[0])) != _ROOTS[root]:
        raise NotThisOutput(
            f"is of DCGM {version}; under '{root}' only {_ROOTS[root]} is known"
            if major in _ROOTS.values()
            else f"is of DCGM {version}, an unknown version"
        )
    if version is None and _ROOTS[root] != 3:
        raise NotThisOutput("does not state its version of DCGM")
    for place in (body, document):
        if error := place.get("runtime_error") or place.get("error"):
            raise NotThisOutput(f"reports an error of DCGM: {str(error)[:200]}")
    try:
        results = tuple(_results(body["test_categories"]))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise NotThisOutput(f"lacks or misplaces a field ({error})") from None
    if not results:
        raise NotThisOutput("has no tests")
    return DcgmReport(version, results)


def recognise(text: str) -> Observation | None:
    """What looks like the JSON of `dcgmi diag -j`, whole or not, as an observation of one node;
    None: it is something else."""
    if not any(f'"{root}"' in text for root in _ROOTS) and '"test_categories"' not in text:
        return None
    answer = {"argv": ["dcgmi"], "code": 0, "text": text, "error": None, "installed": True}
    values = {"tools": {"diagnostic": answer}}
    return Observation(probe="dcgm", scope="node", nodes=(0,), values=values)


def _version(document: dict[str, Any], body: dict[str, Any]) -> str | None:
    metadata = document.get("metadata")
    for place in (metadata if isinstance(metadata, dict) else {}, body):
        for key in ("version", "DCGM Version", "dcgm_version"):
            if (found := place.get(key)) is not None:
                if not re.match(r"[0-9]{1,6}\.[0-9]", str(found)):
                    raise NotThisOutput(f"is of DCGM '{str(found)[:40]}', an unknown version")
                return str(found)
    return None


def _results(categories: list[Any]) -> Iterator[DcgmResult]:
    for category in categories:
        # DCGM 3.0 writes null between tests.
        for test in filter(None, category["tests"]):
            name = str(test["name"])
            found = [
                DcgmResult(name, gpu, entity, *_judged(result))
                for result in test["results"]
                for gpu, entity in _entities(result)
            ]
            yield from found
            # What is wrong with the whole test, and with none of its GPUs.
            whole = DcgmResult(name, None, "the node", *_judged(test.get("test_summary")))
            if not whole.good and all(each.good for each in found):
                yield whole


def _judged(result: dict[str, Any] | None) -> tuple[str, tuple[DcgmWarning, ...]]:
    """Status and warnings; DCGM 3 has no summary of a test."""
    if result is None:
        return "pass", ()
    word = str(result["status"])
    status = _STATUSES.get(" ".join(word.lower().split()), word)
    return status, tuple(_warning(each) for each in _list(result.get("warnings")))


def _entities(result: dict[str, Any]) -> Iterator[tuple[int | None, str]]:
    if "entity_group" in result:
        group, number = str(result["entity_group"]), int(result["entity_id"])
        yield (number, f"GPU {number}") if group == "GPU" else (None, f"{group} {number}")
        return
    for key in ("gpu_id", "gpu_ids"):
        if key in result:
            for part in str(result[key]).split(","):
                yield int(part), f"GPU {int(part)}"
            return
    yield None, "the node"


def _warning(raw: Any) -> DcgmWarning:
    if isinstance(raw, str):
        return DcgmWarning(raw, None)
    severity = raw.get("error_severity")
    if severity is None:
        return DcgmWarning(str(raw["warning"]), None)
    try:
        return DcgmWarning(str(raw["warning"]), DcgmSeverity(int(severity)))
    except ValueError:
        return DcgmWarning(str(raw["warning"]), DcgmSeverity.UNKNOWN)


def _list(value: Any) -> list[Any]:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]
