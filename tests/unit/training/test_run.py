"""The end of a rank's run: what is written, and under which condition."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from drillyard.supervise.scheduler_restarts import write_claim
from drillyard.training import run


class Ended(Exception):
    """Stands for the end of the process."""


def test_a_start_that_loses_its_claim_during_the_export_writes_no_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(_code: int) -> None:
        raise Ended

    def losing_export(*_: Any, before_write: Callable[[], None], **__: Any) -> Path:
        before_write()
        mine = os.environ["DRILLYARD_START"]
        write_claim(tmp_path)
        monkeypatch.setenv("DRILLYARD_START", mine)
        before_write()
        raise AssertionError("it would go on")

    @contextlib.contextmanager
    def span(*_: Any) -> Iterator[dict[str, Any]]:
        yield {}

    monkeypatch.setenv("DRILLYARD_RESTARTED_BY", "jobset")
    monkeypatch.setattr("time.sleep", lambda _: None)
    monkeypatch.setattr(os, "_exit", ended)
    monkeypatch.setattr(run, "export", losing_export)
    write_claim(tmp_path)
    nothing = SimpleNamespace(
        begin=lambda *_: None,
        answer=lambda *_: None,
        close=lambda: None,
        end_at=lambda _: None,
        saves_failed=0,
        span=span,
    )
    config = SimpleNamespace(model=SimpleNamespace(lora=None, id=None))
    trainer = SimpleNamespace(total_steps=4, in_nonfinite_row=lambda: False, config=config)
    parts: Any = SimpleNamespace(trainer=trainer, model=SimpleNamespace(causal_lm=None))
    callbacks: Any = SimpleNamespace(
        side=nothing,
        log=nothing,
        checkpointer=nothing,
        save=lambda *_, **__: None,
        evaluate=lambda _: None,
        ranks=SimpleNamespace(rank=0),
    )
    with pytest.raises(Ended):
        run.finish(parts, callbacks, SimpleNamespace(tokenizer_files={}), tmp_path, {})  # type: ignore[arg-type]
