"""Recompute the batch of a step from the run directory: its samples, where they come from, and
which rank read them.

The sample order is a pure function of seed, epoch and step, so this works for any step of the run,
logged or not, done or still to come. data.json and the event `order` of each attempt record how
samples were dealt out, and which data they were. Needs no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from drillyard.config.data_checks import normalized_sources
from drillyard.config.fetch_limits import FetchLimits, limited
from drillyard.config.load import resolve_section_secrets
from drillyard.config.run import RunConfig
from drillyard.config.run_identity import with_values
from drillyard.config.saved_config import load_saved_config, settings_to_fetch
from drillyard.data.data_changes import read_record
from drillyard.data.data_report import file_of_source
from drillyard.data.prepared_data import OnProgress, PreparedData, prepare
from drillyard.data.sampler import BatchShape, SampleRef
from drillyard.errors import UserError
from drillyard.telemetry.events import read_events, refusing_odd_values
from drillyard.training.run_directory import SAVED_CONFIG
from drillyard.training.step_history import order_event_of_step

OTHER_BATCHES = "Its batches cannot be recomputed from the data that are there now: undo the change"


@dataclass(frozen=True)
class BatchSample:
    """One sequence of a global batch: its number there, and the data rank and micro-batch that read
    it, all from 0."""

    number: int
    rank: int
    micro_batch: int
    ref: SampleRef


@dataclass(frozen=True)
class StepBatch:
    """The global batch of a step, and the data to read it from; `paths`: of the sources, as
    configured."""

    step: int
    data: PreparedData
    samples: list[BatchSample]
    num_data_ranks: int
    paths: list[str]

    def of_rank(self, rank: int) -> list[BatchSample]:
        """The samples of one rank. UserError when there was no such rank."""
        if not 0 <= rank < self.num_data_ranks:
            raise UserError(
                f"--rank {rank}: step {self.step} was dealt out to ranks 0 to"
                f" {self.num_data_ranks - 1}"
            )
        return [sample for sample in self.samples if sample.rank == rank]

    def places(self, sample: BatchSample) -> list[str]:
        """List the origin of each document of a sample: `data/rows.jsonl, line 7`."""
        source, index = sample.ref
        path = self.paths[source]
        return [
            ", ".join(part for part in (file_of_source(path, name), line) if part)
            for name, line in self.data.train.sources[source].places(index)
        ]


def batch_of_step(
    run_directory: Path,
    step: int,
    on_progress: OnProgress | None = None,
    *,
    trust_config: bool = False,
) -> StepBatch:
    """The batch of a step (from 1) of the run in `run_directory`.

    A tokenised cache that is gone is made again, but fetches nothing unless `trust_config`
    (`fetch_limits.py`). Raises UserError when there is no such run or
    step, or when the data are not those of the run any more.
    """
    config = _saved_config(run_directory)
    limits = None if trust_config else limits_of_run(run_directory)
    with refusing_odd_values(run_directory):
        order = order_event_of_step(read_events(run_directory), step)
        if order is None:
            raise UserError(
                f"{run_directory}: events.jsonl names no order of samples: the run has not begun to"
                " train"
            )
        if not 1 <= step <= order["total_steps"]:
            raise UserError(f"--step {step}: the run has steps 1 to {order['total_steps']}")
    config = with_values(
        config, {"evaluation.metrics": ["loss"]}
    )  # rows are not needed to show tokens
    with limited(limits):
        data = prepare(
            resolve_section_secrets(config, "model"),
            on_progress=on_progress,
            known=read_record(run_directory),
            if_changed=OTHER_BATCHES,
        )
    if data.train.fingerprint != order["data"]:
        raise UserError(
            f"{run_directory}: the data are not what this run was trained on (fingerprint"
            f" {data.train.fingerprint}, it had {order['data']}): its batches cannot be recomputed"
            " from them"
        )
    size, accumulation = order["micro_batch_size"], order["gradient_accumulation"]
    num_data_ranks = order["global_batch_size"] // (size * accumulation)
    shape = BatchShape(size, accumulation, num_data_ranks, order.get("by_epoch", False))
    refs = data.train.indices(step - 1, shape)
    paths = [source.path for source in normalized_sources(config.data.source)]
    samples = [
        BatchSample(number, *shape.reader_of(number), ref) for number, ref in enumerate(refs)
    ]
    return StepBatch(step, data, samples, num_data_ranks, paths)


def limits_of_run(run_directory: Path) -> FetchLimits:
    """What `batch_of_step` may not fetch unless the config is trusted. UserError for no run."""
    config = _saved_config(run_directory)
    return FetchLimits(settings_to_fetch(config, run_directory / SAVED_CONFIG))


def _saved_config(run_directory: Path) -> RunConfig:
    if not (run_directory / SAVED_CONFIG).is_file():
        raise UserError(
            f"{run_directory}: no {SAVED_CONFIG}: give the directory of a run, such as runs/NAME"
        )
    return load_saved_config(run_directory / SAVED_CONFIG)
