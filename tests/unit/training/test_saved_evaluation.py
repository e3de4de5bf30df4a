"""What `drillyard eval` is asked for, before anything is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from drillyard.errors import UserError
from drillyard.training.saved_evaluation import EvaluationRequest, config_without_run


def test_options_that_no_config_allows_are_reported_in_our_words() -> None:
    request = EvaluationRequest(Path("model"), Path("out"), data="rows.jsonl", format="nonsense")
    with pytest.raises(
        UserError, match=r"^data\.format: found 'nonsense'; allowed: 'text', "
    ) as raised:
        config_without_run(request)
    assert "pydantic" not in str(raised.value)
