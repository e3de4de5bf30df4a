"""From the options of `drillyard estimate` to a `EstimateRequest`: files are read, the place is found, numbers are
checked.

Flags come before files, so one run config and one cluster config answer every "and if". Nothing is looked up anywhere
but in the files given, the local model cache and the catalog.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from drillyard.config import ClusterConfig, load_cluster_config, load_run_config
from drillyard.config.problems import closest_name
from drillyard.errors import UserError
from drillyard.estimation.cost import PriceOptions
from drillyard.estimation.measured_runs import published_runs, read_measured_run
from drillyard.estimation.model_source import BuildSpec, ModelOptions, find_model
from drillyard.estimation.request import EstimateRequest
from drillyard.estimation.run_time import FailureOptions
from drillyard.estimation.target import Target, accelerator_target, cluster_target, machine_target
from drillyard.hardware import Catalog, load_catalog
from drillyard.hardware.machines import Consumption

NUMBER = re.compile(r"([0-9]*\.?[0-9]+(?:[eE][+]?[0-9]+)?)\s*([kKmMbBtT]?)")
SCALES = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
HOW = "say where: --cluster FILE, --machine M --nodes N, or --accelerator A --num-gpus N"


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetOptions:
    """The options that say where; None where one is not given."""

    cluster: Path | None = None
    machine: str | None = None
    nodes: int | None = None
    accelerator: str | None = None
    num_gpus: int | None = None
    gpus_per_node: int | None = None
    hardware: Path | None = None
    consumption: str | None = None
    region: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateOptions:
    """All options of the command that change the answer, as they were written."""

    run: Path
    where: TargetOptions
    overrides: tuple[str, ...] = ()
    config: Path | None = None
    params: str | None = None
    active_params: str | None = None
    data_tokens: str | None = None
    price: PriceOptions = field(default_factory=PriceOptions)
    failures: FailureOptions = field(default_factory=FailureOptions)
    calibrate: Path | None = None
    without_source: str | None = None


def build_request(options: EstimateOptions, *, build: BuildSpec | None = None) -> EstimateRequest:
    """The question that `options` ask. `build` makes the spec of a model whose family is not known.

    UserError for files that cannot be read or hold mistakes, names that are not known, and options that contradict.
    """
    if build is not None and options.params is not None:
        raise UserError("--build counts the model that transformers builds, --params stands for it: give one of them")
    config = load_run_config(options.run, options.overrides, resolve_environment=False, needs_learning_rate=False)
    own = ModelOptions(
        options.config,
        parse_count("--params", options.params),
        parse_count("--active-params", options.active_params),
    )
    model = find_model(config, own, build=build)
    place, facts = _place(options.where)
    return EstimateRequest(
        config=config,
        model=model,
        place=place,
        facts=facts,
        price=options.price,
        failures=options.failures,
        data_tokens=parse_count("--data-tokens", options.data_tokens),
        without_source=_publisher(options.without_source),
        calibration=None if options.calibrate is None else read_measured_run(options.calibrate, facts),
    )


def parse_count(flag: str, text: str | None) -> int | None:
    """`70.6B`, `7e9` or `7000000000` as a whole number. UserError for anything else, and below 1."""
    if text is None:
        return None
    match = NUMBER.fullmatch(text.replace(",", "").replace("_", "").strip())
    value = math.nan if match is None else float(match[1]) * SCALES[match[2].lower()]
    if not (math.isfinite(value) and value >= 1):
        raise UserError(f"{flag} {text}: not a number above 0; write it like 70.6B, 15T or 7000000000")
    return round(value)


def _publisher(name: str | None) -> str | None:
    """The publisher whose measured runs are left out. UserError where there is none of that name."""
    known = dict.fromkeys(row.publisher for row in published_runs().values()) if name is not None else {}
    if name is None or name in known:
        return name
    meant = closest_name(name, known)
    hint = f"did you mean {meant}?" if meant else f"known: {', '.join(known)}"
    raise UserError(f"--without-source {name}: no measured run is of that publisher; {hint}")


def _place(where: TargetOptions) -> tuple[Target, Catalog]:
    """The place, and the catalog that it was looked up in."""
    _check(where)
    if where.cluster is not None:
        cluster = _cluster(where, where.cluster)
        facts = load_catalog(where.hardware or cluster.hardware)
        place = cluster_target(cluster, facts, machine=where.machine)
        return (place if where.nodes is None else place.with_nodes(where.nodes)), facts
    facts = load_catalog(where.hardware)
    if where.machine is not None:
        count = 1 if where.nodes is None else where.nodes
        bought, region = where.consumption, where.region
        return machine_target(where.machine, count, facts, consumption=bought, region=region), facts
    assert where.accelerator is not None and where.num_gpus is not None
    per_node = where.gpus_per_node
    return accelerator_target(where.accelerator, where.num_gpus, facts, gpus_per_node=per_node), facts


def _check(where: TargetOptions) -> None:
    """UserError unless the options name exactly one place."""
    if where.consumption is not None and where.consumption not in get_args(Consumption):
        meant = closest_name(where.consumption, get_args(Consumption))
        hint = f"did you mean {meant}?" if meant else f"known: {', '.join(get_args(Consumption))}"
        raise UserError(f"--consumption {where.consumption} is not known; {hint}")
    by_gpus = [flag for flag in ("num_gpus", "gpus_per_node") if getattr(where, flag) is not None]
    if where.accelerator is None:
        if by_gpus:
            raise UserError(f"--{by_gpus[0].replace('_', '-')} belongs to --accelerator; {HOW}")
        if where.cluster is None and where.machine is None:
            raise UserError(HOW)
        return
    others = [
        flag for flag in ("cluster", "machine", "nodes", "consumption", "region") if getattr(where, flag) is not None
    ]
    if others:
        raise UserError(f"--accelerator stands for a place of its own and goes with no --{others[0]}; {HOW}")
    if where.num_gpus is None:
        raise UserError(f"--num-gpus is missing: how many {where.accelerator} are there?")


def _cluster(where: TargetOptions, path: Path) -> ClusterConfig:
    """The cluster config, with the way of buying and the region that flags say."""
    cluster = load_cluster_config(path, resolve_environment=False)
    changes: dict[str, Any] = {}
    if where.consumption is not None:
        changes["consumption"] = where.consumption
    if where.region is not None:
        location = cluster.location
        if location is None:
            raise UserError(f"--region: platform {cluster.platform} of {path} has no location")
        changes["location"] = location.model_copy(update={"region": where.region})
    return cluster.model_copy(update=changes) if changes else cluster
