"""Runs that were measured: published ones as facts (measured_runs.yaml), and a user's own from its
run directory.

A row is a `Setup` and a speed, so it can be estimated like any setup, and the ratio of the two is
the efficiency that was reached. Figures are converted to tokens/s per GPU by exact arithmetic:
tokens/s of all GPUs over their number; tokens of a step over its seconds and GPUs; MFU times the
dense peak over the FLOPs per token of the formula that the publisher names (MFU by another formula
is another number, so a row without a formula is no row).

Limits: published figures are their publishers' claims; what a row does not say of its network is
not assumed.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from pydantic import PositiveFloat, PositiveInt

from drillyard.config.kernel_rules import AttentionKernel
from drillyard.errors import UserError
from drillyard.estimation.setup import Checkpointing, LoraSetup, Precision, Setup
from drillyard.estimation.target import USUAL_GPUS_PER_NODE
from drillyard.guarded_files import is_there
from drillyard.hardware import Accelerator, Catalog, Fact, FactSource, Machine, catalog
from drillyard.hardware.facts import CatalogRow, Provenance, read_row
from drillyard.hardware.machines import Nics
from drillyard.modelspec import FORMULAS, ModelSpec, flops_per_token, model_spec
from drillyard.packaged_yaml import read_packaged_yaml

WARM_UP_LINES: Final = 5
"""Logged steps at the start of a run that say nothing of its speed: they compile, and caches are
cold."""
LEAST_LINES: Final = 10
"""Logged steps that a run of one's own must have after those."""
ROWS_PER_LOSS_CHUNK: Final = 2048
FIGURES: Final = ("tokens_per_second_per_gpu", "tokens_per_second", "step_seconds", "mfu")

Sharding = Literal["single", "replicated", "sharded"]


class RunClass(NamedTuple):
    """Properties that two runs must share for the efficiency of one to apply to the other.

    FSDP and HSDP are one kind of sharding: they differ by an all-reduce, which is counted.
    """

    accelerator: str
    precision: str
    activation_checkpointing: str
    sharding: Sharding

    def __str__(self) -> str:
        return (
            f"{self.accelerator}, {self.precision}, checkpointing {self.activation_checkpointing},"
            f" {self.sharding}"
        )


@dataclass(frozen=True, slots=True, eq=False)
class MeasuredRun:
    """One measured run. `publisher` names whose it is; rows of one publisher are left out together.

    `machine` is None where its network is not known. A row equals itself alone.
    """

    name: str
    publisher: str
    accelerator: Accelerator
    machine: Machine | None
    setup: Setup
    tokens_per_second_per_gpu: Fact[float]

    @property
    def seconds(self) -> float:
        return self.setup.tokens_per_step_per_gpu / self.tokens_per_second_per_gpu.value

    @property
    def run_class(self) -> RunClass:
        return run_class(self.setup, self.accelerator.name)


class PublishedRow(CatalogRow):
    """A row of the data file, as it is written."""

    name: str
    publisher: str
    accelerator: str
    num_gpus: PositiveInt
    model: str
    precision: Precision
    sequence_length: PositiveInt
    micro_batch_size: PositiveInt
    activation_checkpointing: Checkpointing
    compiled: bool
    kernel: AttentionKernel
    gradient_accumulation: PositiveInt = 1
    gpus_per_node: PositiveInt = 8
    replicate: PositiveInt = 1
    clips_gradients: bool = True
    lora_rank: PositiveInt | None = None
    machine: str | None = None
    node_network_gbps: PositiveFloat | None = None
    tokens_per_second_per_gpu: PositiveFloat | None = None
    tokens_per_second: PositiveFloat | None = None
    step_seconds: PositiveFloat | None = None
    mfu: PositiveFloat | None = None
    mfu_formula: str | None = None

    def measured(self, spec: ModelSpec) -> MeasuredRun:
        """The run as a setup of `spec` and a speed."""
        stated = {
            one.name: getattr(self, one.name)
            for one in fields(Setup)
            if one.name in type(self).model_fields
        }
        setup = Setup(
            spec=spec,
            shard=self.num_gpus // self.replicate,
            loss_chunk_tokens=ROWS_PER_LOSS_CHUNK,
            adapters=None if self.lora_rank is None else LoraSetup(self.lora_rank, "all-linear"),
            **stated,
        )
        accelerator = catalog().accelerator(self.accelerator)
        return MeasuredRun(
            self.name,
            self.publisher,
            accelerator,
            self._machine(),
            setup,
            self._speed(setup, accelerator),
        )

    def _machine(self) -> Machine | None:
        """The machine that is named, or a node with the network that is stated."""
        if self.machine is not None:
            return catalog().machine(self.machine)
        if self.node_network_gbps is None:
            return None
        return Machine.create(
            Provenance(self.provenance.of("node_network_gbps")),
            name=f"a node of {self.name}",
            accelerator=self.accelerator,
            num_accelerators=self.gpus_per_node,
            network_stack="infiniband",
            data_nics=Nics(count=1, gbps=self.node_network_gbps),
        )

    def _speed(self, setup: Setup, accelerator: Accelerator) -> Fact[float]:
        """Tokens per second and GPU from the one figure that the row gives."""
        given = [name for name in FIGURES if getattr(self, name) is not None]
        assert len(given) == 1, f"{self.name}: exactly one figure is needed, found {given}"
        figure: Fact[float] = self.fact(given[0])
        if given[0] == "tokens_per_second":
            return figure / setup.world_size
        if given[0] == "step_seconds":
            return setup.tokens_per_step_per_gpu / figure
        if given[0] == "mfu":
            formula = next(known for known in FORMULAS if known == self.mfu_formula)
            peak = accelerator.peak(self.precision)
            assert peak is not None, self.name
            return figure * peak / flops_per_token(setup.spec, formula, self.sequence_length)
        return figure


def run_class(setup: Setup, accelerator: str) -> RunClass:
    sharding: Sharding = (
        "single" if setup.world_size == 1 else "replicated" if setup.shard == 1 else "sharded"
    )
    return RunClass(accelerator, setup.precision, setup.activation_checkpointing, sharding)


@cache
def published_runs() -> dict[str, MeasuredRun]:
    """The published runs by name, in the order of the data file."""
    data = _data()
    known = {
        key: FactSource(row["text"], str(row["date"]), row.get("unverified", False))
        for key, row in data["sources"].items()
    }
    rows = [read_row(PublishedRow, raw, known) for raw in data["runs"]]
    return {row.name: row.measured(published_model(row.model, row.sequence_length)) for row in rows}


@cache
def published_model(model: str, sequence_length: int) -> ModelSpec:
    """A model of the data file. Learned positions are as many as a sequence has tokens."""
    config = dict(_data()["models"][model])
    if config["model_type"] == "gpt2":
        config["n_positions"] = sequence_length
    return model_spec(config, source=model)


def estimated_runs() -> tuple[str, ...]:
    """Names of the runs that were chosen to be estimated before anything was estimated."""
    return tuple(_data()["estimated"])


def left_out_runs() -> tuple[Mapping[str, str], ...]:
    """Published runs that are no rows, each with the reason."""
    return tuple(_data()["left_out"])


def read_measured_run(run_directory: Path, facts: Catalog | None = None) -> MeasuredRun:
    """A run of one's own as a row: its setup from run.yaml, with what `auto` became there, its
    speed from the median of its logged steps, its machine from cluster.yaml where there is one
    (else nodes of up to 8 GPUs, joined by something that is not known). `facts` is the catalog that
    names hardware (default: ours).

    The first WARM_UP_LINES lines of the log, and steps that compiled, are left out. Raises
    UserError where there is no run, where fewer than LEAST_LINES lines are left, and where the run
    was on no known accelerator.
    """
    from drillyard.telemetry.events import refusing_odd_values

    with refusing_odd_values(run_directory):
        return _read_measured_run(run_directory, facts)


def _read_measured_run(run_directory: Path, facts: Catalog | None) -> MeasuredRun:
    from drillyard.config.saved_config import load_saved_config
    from drillyard.estimation.model_source import ModelOptions, find_model
    from drillyard.estimation.resolved_setup import resolve_setup
    from drillyard.telemetry.events import read_events
    from drillyard.telemetry.metrics import read_metrics

    config_file = run_directory / "run.yaml"
    if not is_there(config_file):
        raise UserError(
            f"{run_directory}: no run.yaml there; give the directory of a run, such as runs/NAME"
        )
    events = read_events(run_directory)
    config = load_saved_config(config_file, _settled(events))
    lines = [line for line in read_metrics(run_directory)[WARM_UP_LINES:] if _counts(line)]
    # A restart may have changed the number of GPUs: the last one counts.
    lines = [line for line in lines if line["num_gpus"] == lines[-1]["num_gpus"]]
    if len(lines) < LEAST_LINES:
        raise UserError(
            f"{run_directory}: {len(lines)} logged steps after {WARM_UP_LINES} of warm-up; at least"
            f" {LEAST_LINES} are needed to know its speed\ngive a longer run, or one with a smaller"
            " logging.every_steps"
        )
    known = catalog() if facts is None else facts
    accelerator = _accelerator_of(run_directory, events, known)
    machine = _machine_of(run_directory, known)
    num_gpus = int(lines[-1]["num_gpus"])
    model = find_model(config, ModelOptions())
    resolved = resolve_setup(
        config,
        model.spec,
        num_gpus=num_gpus,
        gpus_per_node=min(
            num_gpus, USUAL_GPUS_PER_NODE if machine is None else machine.num_accelerators
        ),
        memory_gib=accelerator.memory_gib,
        device_type="cuda",
        model_config=model.config,
    )
    seconds = statistics.median(line["step_seconds"] for line in lines)
    source = FactSource(f"your run {run_directory.name}: median of {len(lines)} logged steps", None)
    speed = Fact(resolved.setup.tokens_per_step_per_gpu / seconds, (source,))
    return MeasuredRun(
        run_directory.name, "your own run", accelerator, machine, resolved.setup, speed
    )


def _settled(events: Sequence[Mapping[str, Any]]) -> list[str]:
    """The values of the open settings of run.yaml, by the last `resolved` event, as overrides."""
    settled = [
        one
        for one in events
        if one["event"] == "resolved" and isinstance(one.get("settings"), dict)
    ]
    return [
        f"{key}={json.dumps(value)}"
        for one in settled[-1:]
        for key, value in one["settings"].items()
    ]


def _accelerator_of(
    run_directory: Path, events: Sequence[Mapping[str, Any]], facts: Catalog
) -> Accelerator:
    """Find the run's accelerator by the last `parameters` event."""
    described = [one for one in events if one["event"] == "parameters"]
    name = described[-1].get("accelerator") if described else None
    found = facts.find_accelerator(name) if isinstance(name, str) else None
    if found is None:
        raise UserError(
            f"{run_directory}: the run was on no accelerator that is known, so its speed says"
            " nothing of another run\n`drillyard hardware` lists the known ones; calibrate by a"
            " run on one of them"
        )
    return found


def _machine_of(run_directory: Path, facts: Catalog) -> Machine | None:
    """The machine of the run's cluster config, or None where it has none."""
    from drillyard.config.load import load_cluster_config

    file = run_directory / "cluster.yaml"
    if not is_there(file):
        return None
    name = load_cluster_config(file, resolve_environment=False).machine
    return None if name is None else facts.find_machine(name)


def _counts(line: Mapping[str, Any]) -> bool:
    """Whether a line of metrics says how long a step took on how many GPUs, and did not compile."""
    seconds, num_gpus = line.get("step_seconds"), line.get("num_gpus")
    timed = isinstance(seconds, int | float) and not isinstance(seconds, bool) and seconds > 0
    return timed and isinstance(num_gpus, int) and num_gpus > 0 and not line.get("compile_seconds")


@cache
def _data() -> dict[str, Any]:
    data: dict[str, Any] = read_packaged_yaml("drillyard.estimation", "measured_runs.yaml")
    return data
