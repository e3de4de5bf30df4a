"""acceptance.json."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from drillyard.acceptance.judgement import Outcome


def document_of(outcome: Outcome) -> dict[str, Any]:
    """The document."""
    return {
        "verdict": outcome.verdict.value,
        "culprits": [outcome.evidence.name_of(rank) for rank in outcome.culprits],
        "results": [asdict(each) for each in outcome.results],
        "evidence": outcome.evidence.model_dump(),
    }
