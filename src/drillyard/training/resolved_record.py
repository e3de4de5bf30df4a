"""The values of settings that a run leaves open (`auto`): kept over restarts, recorded, reported
with the estimate.

What `auto` becomes follows from the config, the layout and the memory
(`estimation/resolved_setup.py`), but also from the estimator's code and facts, which change with
versions, and it can decide how a step is rounded. So a run keeps what it has: `resolved.json` in
the run directory holds the settings of every layout that the run has been on, and a start on one of
these takes them from there. A start on another layout (ranks, micro-batch, kind of device, or
another setting that was recorded) resolves them again, and the event `resolved` says what changed.
Nothing that the user has set is touched, and run.yaml keeps saying `auto`, so that the same file
starts a run anywhere.

Where the first step of a start runs out of memory (out_of_memory.py), the rank that did puts the
settings to try next into the record, and the next start takes them: so the estimate chooses, and
one real step decides. That is done only while nothing saved depends on the settings of this layout;
from the first checkpoint on they stay.

All ranks must agree: rank 0 reads the record, and what fits is judged by the least memory that any
rank has. Cost: one small collective and a few estimates, once per attempt.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from drillyard.config.run import RunConfig
from drillyard.config.run_checks import resolve_accumulation
from drillyard.config.run_identity import with_values
from drillyard.estimation.resolved_setup import ResolvedSetup
from drillyard.estimation.startup_estimate import startup_estimate
from drillyard.guarded_files import read_json
from drillyard.hardware import find_accelerator
from drillyard.parallel.collectives import from_first_rank
from drillyard.parallel.ranks import Ranks
from drillyard.telemetry import RunLog
from drillyard.training.checkpoint.manifest import write_durably
from drillyard.training.model_setup import GIB, describe_nearest_fit, least_memory_bytes
from drillyard.training.out_of_memory import CLEARLY_LESS, next_setup
from drillyard.training.run_directory import RESOLVED_RECORD, holds_training

AUTO_KEYS: Final[tuple[str, ...]] = (
    "model.attention",
    "training.activation_checkpointing",
    "training.compile",
    "training.loss_chunk_tokens",
)
"""Settings that may be left open and that decide how a step is rounded; `parallelism.shard` is part
of the layout."""
KEPT_KEYS: Final[tuple[str, ...]] = (*AUTO_KEYS, "training.micro_batch_size")
"""Those whose values a run keeps; the last is in a layout by another name."""


@dataclass(frozen=True)
class AutoSettings:
    """A config with the settings that its run has had on this layout so far in place of what it
    leaves open.

    `written`: the config as it was before. `layout`, `settings`: the layout of this start, and what
    is kept there. `before`: all settings at the newest layout, for a start on another one.
    `hardware`, `memory_gib`: what ranks compute on, and the least memory of any of them.
    `replaced_at`: the step that this run had done when settings of this layout ran out of memory;
    None: they have not.
    """

    config: RunConfig
    written: RunConfig
    layout: dict[str, Any]
    settings: dict[str, Any]
    before: dict[str, Any]
    hardware: str
    memory_gib: float
    replaced_at: int | None = None

    @property
    def trusted_gib(self) -> float:
        """What a step may be estimated to need: less than there is where an estimate was too low,
        so that what was freed is not filled with weights kept whole."""
        return self.memory_gib * (1.0 if self.replaced_at is None else CLEARLY_LESS)


def load_auto_settings(config: RunConfig, ranks: Ranks, directory: Path) -> AutoSettings:
    """Put the values that this run has recorded for this layout into `config`. Collective."""
    hardware = torch.cuda.get_device_name(ranks.device) if ranks.device.type == "cuda" else "cpu"
    memory_gib = least_memory_bytes(ranks) / GIB
    # Hosts may differ in hardware, and not all of them may see the directory: rank 0 decides.
    layout, entries = from_first_rank(
        lambda: (layout_of(config, ranks, hardware), _layouts_of_run(directory, config))
    )
    entry = next((entry for entry in entries if entry["layout"] == layout), {})
    here: dict[str, Any] = entry.get("settings", {})
    before = entries[-1]["settings"] if entries and not here else {}
    kept = {
        key: here[key] for key in KEPT_KEYS if key in here and _value(config, key) in ("auto", None)
    }
    replaced_at = entry.get("replaced", {}).get("at_step")
    return AutoSettings(
        with_values(config, kept), config, layout, kept, before, hardware, memory_gib, replaced_at
    )


def layout_of(config: RunConfig, ranks: Ranks, hardware: str) -> dict[str, Any]:
    """Everything that decides the values of open settings and that may change at a resume."""
    return {
        "world_size": ranks.world_size,
        "ranks_per_node": ranks.local_world_size,
        "shard": ranks.mesh.size(1),
        "device": hardware,
        "micro_batch_size": config.training.micro_batch_size,
        "gradient_accumulation": resolve_accumulation(config, ranks.num_data_ranks),
        **{key: _value(config, key) for key in AUTO_KEYS},
    }


def save_auto_settings(
    kept: AutoSettings,
    resolved: ResolvedSetup,
    directory: Path,
    log: RunLog,
    left_in_bf16: Sequence[str] = (),
    stores_fp8: bool = False,
    gathers_fp8: bool = False,
) -> None:
    """Record the settings of this layout unless they are recorded. And what is true of this start,
    which no later one has to keep: under `precision: fp8` the layers of a block that do not compute
    in it, whether frozen weights rest in it, and whether weights are gathered in it; whether each
    rank holds frozen weights whole. A full disk does not end the run."""
    entries = _layouts_of_run(directory, kept.written)
    of_start = {
        "left_in_bf16": list(left_in_bf16),
        "stores_fp8": stores_fp8,
        "gathers_fp8": gathers_fp8,
        "frozen_whole": resolved.setup.holds_frozen_whole,
    }
    entry = next((each for each in entries if each["layout"] == kept.layout), None)
    if entry is None:
        reasons = {each.key: each.reason for each in resolved.decisions}
        entry = {"layout": kept.layout, "settings": resolved.settings(), "reasons": reasons}
        entries = [*entries, entry]
    elif entry | of_start == entry:
        return
    entry |= of_start
    try:
        _write_layouts(directory, entries)
    except OSError as error:
        log.warn(
            f"{directory / RESOLVED_RECORD}: not written ({error.strerror}): a restart resolves"
            " again what the config leaves open"
        )


def replace_settings(
    kept: AutoSettings, resolved: ResolvedSetup, directory: Path, part: str, *, first_step: int
) -> str | None:
    """Record for this layout what to try after its settings ran out of memory in `part` of the
    first step of this start, which began at `first_step`. Returns the changes in words; None where
    nothing is open, where a checkpoint depends on them, or where the record cannot be written.

    Called by the rank that ran out; several write the same.
    """
    is_new = first_step == 0 or not kept.settings or kept.replaced_at == first_step
    entries = read_layouts(directory)
    entry = next((each for each in entries if each["layout"] == kept.layout), None)
    setup = resolved.setup
    following = next_setup(
        setup,
        open_mode=kept.layout["training.activation_checkpointing"] == "auto",
        open_size=kept.layout["micro_batch_size"] == "auto",
        least=kept.replaced_at is not None,
    )
    if entry is None or following is None or not is_new:
        return None
    fields = ("activation_checkpointing", "micro_batch_size", "loss_chunk_tokens")
    before, after = (
        {f"training.{name}": getattr(each, name) for name in fields} for each in (setup, following)
    )
    changes = {key: value for key, value in after.items() if before[key] != value}
    entry["settings"] |= changes
    entry["reasons"] |= {
        key: f"{before[key]} ran out of memory in the part `{part}` of a step" for key in changes
    }
    entry["replaced"] = {"at_step": first_step, "config": _digest(kept.written)}
    try:
        _write_layouts(directory, entries)
    except OSError:
        # Another rank that ran out may have put the file in its place first.
        if not any(each["settings"] == entry["settings"] for each in read_layouts(directory)):
            return None
    return ", ".join(f"{key}: {value}" for key, value in changes.items())


def _write_layouts(directory: Path, entries: list[dict[str, Any]]) -> None:
    content = {"version": 1, "layouts": entries}
    write_durably(directory / RESOLVED_RECORD, f"{json.dumps(content, indent=1)}\n".encode())


def _digest(config: RunConfig) -> str:
    """Of all that decides what a step needs, and more."""
    sections = config.model_dump(mode="json", include={"model", "data", "training", "parallelism"})
    return hashlib.sha256(json.dumps(sections, sort_keys=True).encode()).hexdigest()


def read_layouts(directory: Path) -> list[dict[str, Any]]:
    """The layouts of a run and their settings, oldest first; none where no record can be read."""
    try:
        content = read_json(directory / RESOLVED_RECORD)
        return [
            {
                "layout": dict(entry["layout"]),
                "settings": dict(entry["settings"]),
                "reasons": dict(entry.get("reasons", {})),
                "left_in_bf16": list(entry.get("left_in_bf16", [])),
                "stores_fp8": bool(entry.get("stores_fp8", False)),
                "gathers_fp8": bool(entry.get("gathers_fp8", False)),
                "frozen_whole": bool(entry.get("frozen_whole", False)),
                "replaced": dict(entry.get("replaced", {})),
            }
            for entry in content["layouts"]
        ]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []  # not written yet, or torn by a crash: resolved again


def _layouts_of_run(directory: Path, config: RunConfig) -> list[dict[str, Any]]:
    """Those of a run that has trained; before that, those that the same config has replaced."""
    entries = read_layouts(directory)
    if holds_training(directory):
        return entries
    return [entry for entry in entries if entry["replaced"].get("config") == _digest(config)]


def report_auto_settings(kept: AutoSettings, resolved: ResolvedSetup, log: RunLog) -> None:
    """Write the event `resolved`, and report what differs from the layout before."""
    settings = resolved.settings()
    changed = {
        key: [old, settings[key]]
        for key, old in kept.before.items()
        if settings.get(key, old) != old
    }
    log.event(
        "resolved",
        settings=settings,
        reasons={decision.key: decision.reason for decision in resolved.decisions},
        kept=sorted(kept.settings) or None,
        changed=changed or None,
    )
    if changed:
        words = "; ".join(f"{key}: {old} -> {new}" for key, (old, new) in changed.items())
        log.message(
            "Another layout than before, so settings that are left open were resolved again:"
            f" {words}"
        )


def report_estimate(kept: AutoSettings, resolved: ResolvedSetup, log: RunLog) -> None:
    """The event `estimate`, one line for people, and a warning with what would fit where it is not
    sure to."""
    startup = startup_estimate(
        resolved.setup, kept.memory_gib, find_accelerator(kept.hardware), hardware=kept.hardware
    )
    log.event("estimate", **startup.fields())
    log.message(startup.line())
    if startup.verdict in ("may not fit", "does not fit"):
        advice = (
            describe_nearest_fit(resolved.setup, kept.memory_gib)
            or "\nno change of its settings is known to fit"
        )
        log.warn(f"the run may end for lack of memory{advice}")


def _value(config: RunConfig, key: str) -> Any:
    section, name = key.split(".")
    return getattr(getattr(config, section), name)
