"""What is to be said beside the figures of a prediction: what is taken for what, and which settings of the run
cost time that is in no figure.

A setting that is neither in a figure nor said here would be ignored in silence, so whoever adds one to the config that
takes time or money adds it to the predictor or here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from drillyard.config import RunConfig
from drillyard.estimation.formatting import duration
from drillyard.estimation.memory import MemoryEstimate
from drillyard.estimation.request import EstimateRequest
from drillyard.estimation.run_time import RunTime

MUCH_PADDING = 0.25
"""The share of padding in the shards from which it is told."""


def estimate_notes(
    question: EstimateRequest,
    memory: MemoryEstimate | None,
    notes_on_speed: Iterable[str],
    run: RunTime | None,
) -> Iterator[str]:
    """Sentences for the user, the gravest first; some may come twice."""
    yield from question.model.spec.notes
    if memory is not None:
        yield from memory.notes
        yield from _on_padding(memory)
    yield from notes_on_speed
    if run is not None:
        yield from run.warnings
        yield from _on_storage(question)
        yield from _on_time_limit(question, run)
    yield from _not_counted(question.config)


def _on_padding(memory: MemoryEstimate) -> Iterator[str]:
    """Where shards are mostly padding, as experts' are over more ranks than there are experts."""
    share = memory.state_bytes["padding"] / memory.state_bytes["parameters"]
    if share > MUCH_PADDING:
        yield (
            f"{share:.0%} of each GPU's shard is padding: FSDP2 cuts a tensor along its first dimension (of experts: "
            "their number), and sharding over more ranks than it has rows saves no memory; the time to send padding is "
            "not counted"
        )


def _on_storage(question: EstimateRequest) -> Iterator[str]:
    """Where checkpoints go to other storage than the one whose bandwidth is taken."""
    place, storage = question.place, question.place.machine.storage
    if question.failures.storage_gb_per_s or storage is None:
        return
    directory = None if place.cluster is None else place.cluster.storage.directory
    if directory is not None:
        yield (
            f"the bandwidth of storage.directory {directory} is not known, and that of {storage.kind} is taken; give "
            "--storage-gb-per-s"
        )
    elif storage.kind == "ebs" and place.num_nodes > 1:
        yield (
            f"storage is taken as {place.num_nodes} x {storage.per_node_gb_per_s:g} GB/s, each node's own volumes; a "
            "shared file system (FSx for Lustre, EFS) scales with its size instead: give --storage-gb-per-s"
        )


def _on_time_limit(question: EstimateRequest, run: RunTime) -> Iterator[str]:
    """The time limit of a job, where it is shorter than the run."""
    cluster = question.place.cluster
    limit = None if cluster is None else cluster.section.limit_seconds
    longest = run.longest.high.value
    if cluster is not None and limit is not None and limit < longest:
        yield (
            f"{cluster.platform}.time_limit: a job ends after {duration(limit)}, and the run may take "
            f"{duration(longest)}: "
            "it then goes on in another job from its last checkpoint, whose wait and start are not counted"
        )


def _not_counted(config: RunConfig) -> Iterator[str]:
    """Settings that take time which is in no figure."""
    every_steps = config.evaluation.every_steps
    if every_steps is not None:
        yield f"evaluation.every_steps: the time of evaluating every {every_steps} steps is not counted"
    if not config.data.packing:
        yield "data.packing: false: padding counts as tokens here, and how much of it there is is not known"
    if config.training.deterministic:
        yield "training.deterministic: measured runs are not, and what it costs in speed is not counted"
