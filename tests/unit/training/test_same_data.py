"""Hosts with sources of their own must have the same data: otherwise each would train on another
order in silence."""

from __future__ import annotations

import types
from typing import Any

import pytest

from drillyard.errors import UserError
from drillyard.training import run


def test_a_rank_with_other_data_than_rank_0_is_named_on_all_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gathered = ["a", "a", "b", "a"]
    monkeypatch.setattr(run, "gather", lambda fingerprint: gathered)
    data: Any = types.SimpleNamespace(train=types.SimpleNamespace(fingerprint="a"))
    with pytest.raises(UserError, match=r"rank 2: .*data.* rank 0"):
        run.require_same_data(data)
    gathered[2] = "a"
    run.require_same_data(data)
