"""Figures of a logged step that are read one logged step later, as on a GPU: the same numbers, all
of them, however training ends; and a step that asks the device for nothing."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.distributed.memory_case import Case, assemble, fake_ranks
from tests.distributed.ranks import run_ranks
from tests.distributed.test_memory_tracker import EXPERTS, LORA, llama
from tests.distributed.training_case import build, make_config, write_documents
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from drillyard.errors import UserError
from drillyard.training.late_figures import PendingFigures
from drillyard.training.trainer import LoggedStep, StepWindow, Trainer

MEASURED = ("step_seconds", "data_seconds", "memory_gib", "compile_seconds")


class Calls:
    """Callbacks that note what they are given, and stop after a step of the test."""

    def __init__(self, trainer: Trainer, stop_after: int | None = None) -> None:
        self.trainer = trainer
        self.stop_after = stop_after
        self.order: list[str] = []
        self.figures: list[Any] = []

    def first_step(self, step: int) -> None:
        pass

    def logged_step(self, figures: LoggedStep) -> None:
        record = {
            name: value for name, value in asdict(figures.record).items() if name not in MEASURED
        }
        self.figures.append((record, figures.longest_skipped_row, figures.recent))
        self.order.append(f"figures of {figures.record.step}")
        figures.require_finite(self.trainer.config.training.max_nonfinite_steps)

    def after_step(self, steps_done: int) -> tuple[float, bool]:
        stopping = steps_done == self.stop_after
        if stopping:
            self.trainer.deliver_figures()
        self.order.append(f"after {steps_done}")
        return 0.0, stopping


def trained(directory: str, late: bool, **changes: Any) -> tuple[Trainer, Calls]:
    stop_after = changes.pop("stop_after", None)
    config = make_config(Path(directory), training__precision="fp32", training__steps=7, **changes)
    trainer, _ = build(config)
    trainer.reads_late = late
    return trainer, Calls(trainer, stop_after)


def every_way(directory: str) -> dict[str, Any]:
    """What the callbacks get, read early and late, for each of several ends of training."""
    found: dict[str, Any] = {}
    for late in (False, True):
        for every in (1, 3):
            trainer, calls = trained(directory, late, logging__every_steps=every)
            assert trainer.train(0, calls)
            found[f"every {every}", late] = calls.figures, calls.order
        trainer, calls = trained(directory, late, stop_after=4)
        assert not trainer.train(0, calls)
        found["stop", late] = calls.figures, calls.order
        found["exception", late] = ended_by_exception(directory, late)
        found["skipped", late] = ended_by_skipped_steps(directory, late)
    found["hung", True] = ended_by_exception(directory, True, arrived=False)
    return found


def ended_by_exception(directory: str, late: bool, *, arrived: bool = True) -> Any:
    trainer, calls = trained(directory, late)
    step = trainer.train_step

    def fails(number: int, window: StepWindow) -> Any:
        if number == 3:
            raise OSError("the disk is gone")
        return step(number, window)

    trainer.train_step = fails  # type: ignore[method-assign]
    with pytest.MonkeyPatch.context() as patch, pytest.raises(OSError, match="the disk is gone"):
        patch.setattr(PendingFigures, "have_arrived", lambda self: arrived)
        trainer.train(0, calls)
    return calls.figures, calls.order


def ended_by_skipped_steps(directory: str, late: bool) -> Any:
    trainer, calls = trained(directory, late, training__max_nonfinite_steps=2)
    forward = trainer.root.forward

    def poisoned(*args: Any, **inputs: Any) -> torch.Tensor:
        return forward(*args, **inputs) * (float("nan") if trainer.steps_done in (2, 3) else 1.0)

    trainer.root.forward = poisoned  # type: ignore[method-assign]
    with pytest.raises(UserError):
        trainer.train(0, calls)
    return [str(figures) for figures in calls.figures], calls.order, trainer.steps_done


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    directory = tmp_path_factory.mktemp("late")
    write_documents(directory)
    return run_ranks(every_way, 1, str(directory))[0]


@pytest.mark.parametrize("end", ["every 1", "every 3", "stop", "exception"])
def test_late_figures_are_the_early_ones(found: dict[Any, Any], end: str) -> None:
    early, late = found[end, False][0], found[end, True][0]
    assert late == early
    steps = {"every 1": 7, "every 3": 3, "stop": 4, "exception": 3}
    assert len(early) == steps[end]


def test_figures_arrive_one_logged_step_later_and_before_a_stop(found: dict[Any, Any]) -> None:
    assert found["every 3", True][1] == [
        *(f"after {step}" for step in (1, 2, 3, 4, 5)),
        "figures of 3",
        "after 6",
        "figures of 6",
        "after 7",
        "figures of 7",
    ]
    assert found["stop", True][1][-3:] == ["figures of 3", "figures of 4", "after 4"]


def test_a_device_that_does_not_answer_hides_no_error(found: dict[Any, Any]) -> None:
    assert found["hung", True][1][-2:] == ["figures of 2", "after 3"]


def test_too_many_skipped_steps_end_training_one_step_later_with_the_same_figures(
    found: dict[Any, Any],
) -> None:
    early, late = found["skipped", False], found["skipped", True]
    assert late[0] == early[0] and len(early[0]) == 4
    assert (early[2], late[2]) == (4, 5)


class HostReads(TorchDispatchMode):
    """Operators whose value or size the host would have to know."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        tags = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
        # Tagged because of masks, whose number of rows is not known; by numbers of rows it is.
        by_numbers = operator is torch.ops.aten.index.Tensor and all(
            index is None or index.dtype == torch.int64 for index in args[1]
        )
        if tags.intersection(operator.tags) and not by_numbers:
            self.found.add(str(operator))
        return operator(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "case",
    [
        Case(llama()),
        Case(llama(), accumulation=2, keeps_unsharded=True),
        Case(llama(), shard=1, keeps_unsharded=True),
        Case(llama(), shard=1, keeps_unsharded=True, lora=LORA),
        Case(llama(), checkpointing="full", micro_batch_size=2),
        Case(llama(architecture="mixtral", **EXPERTS)),
    ],
)
def test_a_logged_step_reads_nothing_from_the_device(case: Case) -> None:
    with (
        fake_ranks(case.shard, case.replicate) as ranks,
        FakeTensorMode(allow_non_fake_inputs=True),
    ):
        trainer = assemble(case, ranks)
        trainer.data.epoch_of = lambda step, shape: None  # type: ignore[method-assign]
        window = StepWindow(0.0)
        trainer.train_step(0, window)
        with HostReads() as reads:
            loss, norm = trainer.train_step(1, window)
            trainer.recent.keep(1, loss, norm)
            window.steps = 2
            trainer.queue_figures(1, loss, norm, window)
        assert reads.found == set()
