"""Request of an estimate: the run, its model, the target, and what the user knows better than the
catalog.

`EstimateOptions` are the flags of `drillyard estimate` as they are written; `build_request` reads
the files they name and checks numbers and names. Flags override files, so one run config and one
cluster config answer every "what if". Nothing is looked up anywhere but in the files given, the
local model cache and the catalog.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args

from drillyard.config.cluster import ClusterConfig, on_pool
from drillyard.config.load import load_cluster_config, load_run_config
from drillyard.config.problems import closest_name
from drillyard.config.run import RunConfig
from drillyard.errors import ConfigError, NotFoundError
from drillyard.estimation.cost import PriceOptions
from drillyard.estimation.measured_runs import MeasuredRun, published_runs, read_measured_run
from drillyard.estimation.model_source import BuildSpec, ModelOptions, ModelSource, find_model
from drillyard.estimation.run_time import FailureOptions
from drillyard.estimation.target import Target, accelerator_target, cluster_target, machine_target
from drillyard.hardware import Catalog, load_catalog
from drillyard.hardware.machines import Consumption

COUNT = re.compile(r"([0-9]*\.?[0-9]+(?:[eE][+]?[0-9]+)?)\s*([kKmMbBtT]?)")
SCALES = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
HOW = "say where: --cluster FILE, --machine M --nodes N, or --accelerator A --num-gpus N"
WHERE, MODEL, MONEY, FAILURES = "Where", "The model", "Money", "Failures"

DeviceType = Literal["cuda", "cpu"]


class Flag(NamedTuple):
    """An option of the command line (`cli/options.py`): its help, and its name where it is not that
    of the field."""

    help: str
    panel: str | None = None
    metavar: str | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateOptions:
    """The flags that change an estimate, as they are written; None where one is not given."""

    run: Annotated[Path, Flag("The run config.", metavar="RUN")]
    cluster: Annotated[Path | None, Flag("The cluster config.", WHERE, "FILE")] = None
    pool: Annotated[
        str | None, Flag("A further pool of the cluster config (cluster.pools).", WHERE, "NAME")
    ] = None
    machine: Annotated[str | None, Flag("Machine type, in place of the cluster's.", WHERE)] = None
    nodes: Annotated[int | None, Flag("Number of machines, in place of the cluster's.", WHERE)] = (
        None
    )
    accelerator: Annotated[
        str | None, Flag("An accelerator without a machine, with --num-gpus.", WHERE)
    ] = None
    num_gpus: Annotated[int | None, Flag("Number of GPUs.", WHERE)] = None
    gpus_per_node: Annotated[
        int | None, Flag("GPUs in a node, with --accelerator; default: 8.", WHERE)
    ] = None
    hardware: Annotated[
        Path | None,
        Flag("Your own hardware and prices, which win over the built-in ones.", WHERE, "FILE"),
    ] = None
    overrides: Annotated[
        list[str] | None,
        Flag("Change a setting of the run config; repeatable.", metavar="KEY=VALUE", name="--set"),
    ] = None
    config: Annotated[
        Path | None, Flag("The model's config.json, in place of the run config's.", MODEL, "FILE")
    ] = None
    params: Annotated[
        str | None,
        Flag("Number of parameters, such as 70.6B, of a model whose family is not known.", MODEL),
    ] = None
    active_params: Annotated[str | None, Flag("Of these, what one token uses.", MODEL)] = None
    consumption: Annotated[str | None, Flag("How capacity is bought, such as spot.", MONEY)] = None
    region: Annotated[str | None, Flag("Region, for its price.", MONEY)] = None
    price_per_gpu_hour: Annotated[float | None, Flag("Your own price, in dollars.", MONEY)] = None
    price_per_node_hour: Annotated[float | None, Flag("Your own price, in dollars.", MONEY)] = None
    data_tokens: Annotated[
        str | None,
        Flag("Tokens of one epoch, such as 15T, where the run is given in epochs.", MONEY),
    ] = None
    failure_rate: Annotated[
        str | None,
        Flag("llama3, rsc1, rsc2 or failures per 1,000 node-days; default: all three.", FAILURES),
    ] = None
    preemptions_per_node_day: Annotated[float | None, Flag("For spot capacity.", FAILURES)] = None
    restart_seconds: Annotated[float | None, Flag("From a failure to the next step.", FAILURES)] = (
        None
    )
    storage_gb_per_s: Annotated[
        float | None, Flag("Storage bandwidth of all nodes together.", FAILURES)
    ] = None
    host_device_gb_per_s: Annotated[
        float | None, Flag("Copies from one GPU to its host.", FAILURES)
    ] = None
    calibrate: Annotated[
        Path | None, Flag("Take the speed that this run directory has measured.", metavar="RUN_DIR")
    ] = None
    without_source: Annotated[
        str | None, Flag("Leave out the measured runs of one publisher.", metavar="NAME")
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateRequest:
    """One run to estimate. Variations of it (`--sweep`) are made by `replace`.

    `without_source` leaves out the measured runs of one publisher, to estimate a published run
    without itself. `calibration` is a run of the user's own, taken in place of the measured ones.
    `data_tokens`: tokens of one epoch. `tokens`: a length of the run in place of the config's.
    """

    config: RunConfig
    model: ModelSource
    target: Target
    facts: Catalog
    price: PriceOptions = field(default_factory=PriceOptions)
    failures: FailureOptions = field(default_factory=FailureOptions)
    data_tokens: float | None = None
    tokens: float | None = None
    without_source: str | None = None
    calibration: MeasuredRun | None = None

    @property
    def device_type(self) -> DeviceType:
        return "cpu" if self.target.accelerator.name == "cpu" else "cuda"


def build_request(options: EstimateOptions, *, build: BuildSpec | None = None) -> EstimateRequest:
    """The request that `options` describe. `build` makes the spec of a model whose family is not
    known.

    UserError for files that cannot be read or hold mistakes, unknown names, and options that
    contradict.
    """
    price = PriceOptions(options.price_per_gpu_hour, options.price_per_node_hour)
    if build is not None and options.params is not None:
        raise ConfigError("--build counts the parameters, --params gives them: use one of the two")
    config = load_run_config(
        options.run, options.overrides or (), resolve_environment=False, needs_learning_rate=False
    )
    counts = (
        parse_count("--params", options.params),
        parse_count("--active-params", options.active_params),
    )
    model = find_model(config, ModelOptions(options.config, *counts), build=build)
    target, facts = _target(options)
    if options.without_source is not None:
        known = list(dict.fromkeys(row.publisher for row in published_runs().values()))
        if options.without_source not in known:
            raise NotFoundError(
                f"--without-source {options.without_source}: no measured run is of that publisher; "
                f"{_closest(options.without_source, known)}"
            )
    return EstimateRequest(
        config=config,
        model=model,
        target=target,
        facts=facts,
        price=price,
        failures=FailureOptions(
            rate=options.failure_rate,
            preemptions_per_node_day=options.preemptions_per_node_day,
            restart_seconds=options.restart_seconds,
            storage_gb_per_s=options.storage_gb_per_s,
            host_device_gb_per_s=options.host_device_gb_per_s,
        ),
        data_tokens=parse_count("--data-tokens", options.data_tokens),
        without_source=options.without_source,
        calibration=(
            None if options.calibrate is None else read_measured_run(options.calibrate, facts)
        ),
    )


def parse_count(flag_name: str, text: str | None) -> int | None:
    """`70.6B`, `7e9` or `7000000000` as a whole number. ConfigError for anything else, and below
    1."""
    if text is None:
        return None
    match = COUNT.fullmatch(text.replace(",", "").replace("_", "").strip())
    value = math.nan if match is None else float(match[1]) * SCALES[match[2].lower()]
    if not (math.isfinite(value) and value >= 1):
        raise ConfigError(
            f"{flag_name} {text}: not a number above 0; write it like 70.6B, 15T or 7000000000"
        )
    return round(value)


def _closest(name: str, known: list[str]) -> str:
    meant = closest_name(name, known)
    return f"did you mean {meant}?" if meant else f"known: {', '.join(known)}"


def _target(options: EstimateOptions) -> tuple[Target, Catalog]:
    """The target, and the catalog that it was looked up in."""
    _check_target(options)
    if options.cluster is not None:
        cluster = _cluster(options, options.cluster)
        facts = load_catalog(options.hardware or cluster.hardware)
        target = cluster_target(cluster, facts, machine=options.machine)
        return (target if options.nodes is None else target.with_nodes(options.nodes)), facts
    facts = load_catalog(options.hardware)
    if options.machine is not None:
        nodes = 1 if options.nodes is None else options.nodes
        bought, region = options.consumption, options.region
        return (
            machine_target(options.machine, nodes, facts, consumption=bought, region=region),
            facts,
        )
    assert options.accelerator is not None and options.num_gpus is not None
    return (
        accelerator_target(
            options.accelerator, options.num_gpus, facts, gpus_per_node=options.gpus_per_node
        ),
        facts,
    )


def _check_target(options: EstimateOptions) -> None:
    """ConfigError unless the options name exactly one target."""
    ways = list(get_args(Consumption))
    if options.consumption is not None and options.consumption not in ways:
        raise ConfigError(
            f"--consumption {options.consumption} is not known;"
            f" {_closest(options.consumption, ways)}"
        )
    if options.pool is not None and options.cluster is None:
        raise ConfigError("--pool belongs to --cluster FILE")
    if options.accelerator is None:
        for name in ("num_gpus", "gpus_per_node"):
            if getattr(options, name) is not None:
                raise ConfigError(f"--{name.replace('_', '-')} belongs to --accelerator; {HOW}")
        if options.cluster is None and options.machine is None:
            raise ConfigError(HOW)
        return
    for name in ("cluster", "machine", "nodes", "consumption", "region"):
        if getattr(options, name) is not None:
            raise ConfigError(f"--accelerator cannot be combined with --{name}; {HOW}")
    if options.num_gpus is None:
        raise ConfigError(f"--num-gpus is missing: how many {options.accelerator} are there?")


def _cluster(options: EstimateOptions, path: Path) -> ClusterConfig:
    """The cluster config with the flags' consumption and region."""
    cluster = on_pool(load_cluster_config(path, resolve_environment=False), options.pool)
    changes: dict[str, Any] = {}
    if options.consumption is not None:
        changes["consumption"] = options.consumption
    if options.region is not None:
        location = cluster.location
        if location is None:
            raise ConfigError(f"--region: platform {cluster.platform} of {path} has no location")
        changes["location"] = location.model_copy(update={"region": options.region})
    return cluster.model_copy(update=changes) if changes else cluster
