"""The run directory at the start of a run: is it this run's, may it be written, and what is already
in it.

A directory that holds another run is never touched: the saved run.yaml is compared with the config
that is about to start, and what differs in a way that matters is said. A start that failed before
its first logged step, as on a mistake in the config, has left nothing to protect: the corrected
config takes its place.

A run that has ended continues when it is given more steps or epochs. Its summary is removed when it
does, since a run with a summary counts as complete, and is written again with `final/` at the new
end.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from drillyard import export_directory
from drillyard.config.load import save_resolved
from drillyard.config.model_files import require_usual_model_files
from drillyard.config.run import RunConfig
from drillyard.config.run_checks import num_data_ranks, resolve_global_batch
from drillyard.config.run_identity import (
    changed_settings,
    describe_changes,
    differences,
    recorded_settings,
)
from drillyard.config.saved_config import load_saved_config
from drillyard.data import DATA_RECORD
from drillyard.errors import UserError
from drillyard.guarded_files import (
    LARGEST_DOCUMENT_BYTES,
    is_there,
    read_json,
    require_documents,
    require_inside,
    require_lines,
    require_regular,
    require_usual_files,
)
from drillyard.safe_files import describe_os_error, make_directory
from drillyard.telemetry.events import EVENTS_FILE
from drillyard.telemetry.metrics import METRICS_FILE
from drillyard.telemetry.runlog import DLLOGGER_FILE
from drillyard.training.checkpoint.inventory import (
    CHECKPOINTS_NAME,
    CheckpointInfo,
    inspect,
    list_checkpoints,
)
from drillyard.training.order_check import require_order_of

SAVED_CONFIG = "run.yaml"
SAVED_TOKENIZER = "tokenizer"
SAVED_BASE = "base"
RESOLVED_RECORD = "resolved.json"
SUMMARY_FILE = "summary.json"
SUMMARY_TEXT = "summary.txt"


def run_directory_of(config: RunConfig) -> Path:
    """`<output>/<name>`."""
    return Path(config.output) / config.name


def require_usual_run_files(directory: Path) -> None:
    """Raise UnsafeFileError for a pipe, a device or something else odd in the place of a file of a
    run, before torch is imported to read it, and for links out of it to what exports copy."""
    require_lines(*(directory / name for name in (EVENTS_FILE, METRICS_FILE, DLLOGGER_FILE)))
    documents = (SAVED_CONFIG, DATA_RECORD, RESOLVED_RECORD, SUMMARY_FILE)
    require_documents((directory / name for name in documents), LARGEST_DOCUMENT_BYTES)
    require_regular(*directory.glob("logs/rank-*.log"))
    require_inside(directory, directory / SAVED_CONFIG)
    for name in (SAVED_BASE, SAVED_TOKENIZER, "final"):
        require_usual_files(directory / name)
        if name != "final":
            require_inside(directory, *(directory / name).glob("*"))


def claim_run_directory(config: RunConfig, num_ranks: int, *, goes_on: bool = False) -> None:
    """Create or reuse the run directory of `config` and save the resolved config there.

    A finished run is left as it is, unless the config makes it longer. Raises UserError when the
    directory cannot be written, holds a different run (one of another global batch, too) or
    checkpoints that `resume: never` would pass over, or when the checkpoint to resume from is not
    there or would replace those of another beginning. `goes_on`: what is in the directory is of
    this very run, whose launcher starts it again, so that `resume: never`, which is about how a run
    begins, is over.
    """
    directory = run_directory_of(config)
    try:
        make_directory(directory, parents=True)
    except OSError as error:
        raise UserError(
            f"{directory}: cannot be created ({error.strerror}); choose another `output`"
        ) from None
    _require_writable(directory)
    check_run_directory(config, num_ranks, goes_on=goes_on)
    saved = directory / SAVED_CONFIG
    if not is_finished(config) and not _is_saved(config, saved):
        save_resolved(config, saved)


def check_run_directory(config: RunConfig, num_ranks: int, *, goes_on: bool = False) -> None:
    """Raise UserError as `claim_run_directory` for what is in the run directory. Writes nothing."""
    directory = run_directory_of(config)
    require_usual_run_files(directory)
    require_usual_model_files(config)
    saved = directory / SAVED_CONFIG
    old = None
    if is_there(saved) and holds_training(directory):
        old = load_saved_config(saved)
        require_same_run(directory, old, config)
    if config.checkpoint.resume == "never" and not goes_on and list_checkpoints(directory):
        raise UserError(
            f"{directory}: holds checkpoints, and checkpoint.resume is never; "
            "set `resume: auto` to go on from them, or choose another name"
        )
    _require_resumable(config, num_ranks)
    finished = is_finished(config)
    if old is not None and (finished or _is_done(config, directory)):
        _require_no_idle_change(directory, old, config)
    if not finished:
        _require_room_for_model(directory / "final")


def is_finished(config: RunConfig) -> bool:
    """Whether the run of `config` has nothing left to do: its summary, its model and its last
    checkpoint are there.

    One that is given more steps or epochs than it ended with has.
    """
    directory, training = run_directory_of(config), config.training
    steps, newest = _completed_steps(directory), _newest_checkpoint(directory)
    if (
        newest is None
        or newest.step != steps
        or not export_directory.holds_model(directory / "final")
    ):
        return False
    if training.epochs is not None:
        ended_with = newest.metadata.get("settings") or _saved_settings(directory)
        is_long_enough = training.epochs == ended_with.get("training.epochs")
    else:
        is_long_enough = training.steps == steps
    wanted = config.checkpoint.resume
    return is_long_enough and wanted != "never" and named_beginning(wanted, newest) is None


def named_beginning(wanted: str, newest: CheckpointInfo | None) -> Path | None:
    """The checkpoint that `checkpoint.resume` names, where a start loads it; None where it goes on
    from `newest`, the run's own.

    The one that a user names is where the run begins: once it has saved, it continues from its own,
    however the path is written and whatever the starts in between were given.
    """
    if wanted in ("auto", "never"):
        return None
    path = os.path.realpath(wanted)
    if newest is not None and path in (os.path.realpath(newest.path), _real_origin(newest)):
        return None
    return Path(wanted)


def origin_to_record(wanted: str, loaded: Mapping[str, Any] | None) -> str:
    """Value that checkpoints record as `resume`: the real path of the checkpoint that a user named
    as the start, by this start or, in the metadata of the `loaded` one, by an earlier one; else
    `auto` or `never`."""
    if wanted not in ("auto", "never"):
        return os.path.realpath(wanted)
    return wanted if loaded is None else str(loaded.get("resume", wanted))


def _real_origin(info: CheckpointInfo) -> str | None:
    """The checkpoint at which the run of `info` began; None for step 0. Earlier versions recorded
    the path as given."""
    origin = info.metadata.get("resume", "auto")
    return None if origin in ("auto", "never") else os.path.realpath(origin)


def remove_summary(directory: Path) -> None:
    """Remove what says that the run of `directory` is complete, as it goes on. Raises OSError."""
    for name in (SUMMARY_FILE, SUMMARY_TEXT):
        (directory / name).unlink(missing_ok=True)


def _newest_checkpoint(directory: Path) -> CheckpointInfo | None:
    return next((info for info in reversed(list_checkpoints(directory)) if info.complete), None)


def _completed_steps(directory: Path) -> int | None:
    """The steps of the run whose summary says that it is complete; None where there is no such
    summary."""
    try:
        summary = read_json(directory / SUMMARY_FILE)
        return int(summary["steps"]) if summary["status"] == "completed" else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _saved_settings(directory: Path) -> dict[str, Any]:
    """The recorded settings of run.yaml, for checkpoints of earlier versions, which have none."""
    try:
        return recorded_settings(load_saved_config(directory / SAVED_CONFIG))
    except UserError:
        return {}


def _is_done(config: RunConfig, directory: Path) -> bool:
    """Whether the last step is saved, so that only the summary or `final/` may be missing."""
    newest, wanted = _newest_checkpoint(directory), config.checkpoint.resume
    is_last = newest is not None and newest.step == config.training.steps
    return is_last and wanted != "never" and named_beginning(wanted, newest) is None


def _require_no_idle_change(directory: Path, old: RunConfig, new: RunConfig) -> None:
    """Raise UserError for a change to a run that has ended: no step is left that it could
    change."""
    newest = _newest_checkpoint(directory)
    ended_with = newest.metadata.get("settings") if newest is not None else None
    changes = changed_settings(ended_with or recorded_settings(old), recorded_settings(new))
    idle = {
        key: values
        for key, values in changes.items()
        if key not in ("training.steps", "training.epochs")
    }
    if idle:
        length = "training.steps" if new.training.epochs is None else "training.epochs"
        raise UserError(
            f"{directory}: this run has ended, and the change would train nothing"
            f" ({describe_changes(idle)}); raise {length} to go on from its end, undo the change,"
            " or choose another `name`"
        )


def holds_training(directory: Path) -> bool:
    """Whether there are logged steps, checkpoints or a model: what two different runs must not
    share."""
    metrics = directory / METRICS_FILE
    return (
        (is_there(metrics) and metrics.stat().st_size > 0)
        or (directory / "final").exists()
        or bool(list_checkpoints(directory))
    )


def _require_resumable(config: RunConfig, num_ranks: int) -> None:
    """Raise UserError when the checkpoint that the run would go on from is not there or was of
    other samples.

    Said before anything is written, so that the saved config stays the one that the checkpoints
    belong to.
    """
    wanted = config.checkpoint.resume
    own = run_directory_of(config) / CHECKPOINTS_NAME
    newest = _newest_checkpoint(run_directory_of(config))
    if (named := _require_named_checkpoint(config)) is not None:
        if newest is not None and os.path.realpath(named.parent) != os.path.realpath(own):
            began = _real_origin(newest) or "step 0"
            raise UserError(
                f"checkpoint.resume: {own} holds checkpoints of a run that began at {began}, and"
                f" going on from {wanted} would replace them; choose another `name`, or go on from"
                " them with checkpoint.resume=auto"
            )
        newest = inspect(named)
    if newest is None or not newest.complete or wanted == "never":
        return
    saved = newest.metadata.get("global_batch_size")
    batch = resolve_global_batch(config, num_data_ranks(config, num_ranks))
    if saved is not None and saved != batch:
        ranks = newest.metadata.get("world_size", num_ranks)
        as_before = (
            ""
            if ranks == num_ranks
            else f"start {ranks} ranks as before (this start has {num_ranks}), or "
        )
        raise UserError(
            f"{newest.path}: was trained with {saved} sequences per step, and this start has"
            f" {batch}; {as_before}set training.global_batch_size: {saved}, or choose another"
            " `name`"
        )
    if not is_finished(config):
        known = {
            "global_batch_size": batch,
            **newest.metadata,
            "step": newest.step,
            "path": str(newest.path),
        }
        require_order_of(known, config, batch)


def _require_named_checkpoint(config: RunConfig) -> Path | None:
    """The checkpoint that a start would load because it is named. UserError where it is not
    there."""
    wanted = config.checkpoint.resume
    # The checkpoint that the run began from may be deleted: it continues from its own.
    named = named_beginning(wanted, _newest_checkpoint(run_directory_of(config)))
    if named is not None and not named.is_dir():
        raise UserError(
            f"checkpoint.resume: there is no directory {wanted}; "
            "give a checkpoint (RUN_DIR/checkpoints/step-N), auto or never"
        )
    return named


def require_same_run(directory: Path, old: RunConfig, new: RunConfig) -> None:
    """Raise UserError where `new` is another run than `old`, the one that `directory` holds.

    What is wrong with `new` itself is said first: a path with a mistake in it is another path, too.
    """
    changed = differences(old, new)
    if changed:
        _require_named_checkpoint(new)
        # Imported here: it needs torch, and only a start that is refused does.
        from drillyard.training.usable_config import require_usable

        require_usable(new)
        shown = "; ".join(changed[:5]) + (
            f"; and {len(changed) - 5} more" if len(changed) > 5 else ""
        )
        raise UserError(
            f"{directory}: holds a different run ({shown}); choose another `name`, or undo the"
            f" change{_on_other_data(directory, changed, old, new)}"
        )


def _on_other_data(directory: Path, changed: list[str], old: RunConfig, new: RunConfig) -> str:
    """How to train the model of a run further on other data, where nothing else changed."""
    final = directory / "final"
    if not all(change.startswith("data.") for change in changed) or (
        not export_directory.holds_model(final)
    ):
        return ""
    model: dict[str, Any] = {"id": str(final), "init": "pretrained"}
    settings = [f"name={old.name[:55]}-further"]
    if old.model.lora is not None:
        settings.append(f"model.lora.adapter={final}")
    else:
        settings.append(f"model={json.dumps(model)}")
        if not isinstance(new.data.tokenizer, str | None):
            settings.append("data.tokenizer=null")
    flags = " ".join(f"--set {shlex.quote(setting)}" for setting in settings)
    return f"\nto train its model further on these data, start a new run from it: {flags}"


def _require_writable(directory: Path) -> None:
    """Raise UserError unless a file can really be made: root passes every permission check, also on
    a read-only mount.

    A disk without room for content is good enough: what an interrupted save has left there is
    deleted first.
    """
    probe = directory / f".probe-{os.getpid()}"
    try:
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(
            f"{directory}: the run directory cannot be written ({describe_os_error(error)}), or"
            " choose another `output`"
        ) from None


def _require_room_for_model(final: Path) -> None:
    """Raise UserError when the model that is to be trained could not be written at the end: `final`
    holds anything but an earlier export."""
    try:
        refused = export_directory.reason_to_refuse(Path(os.path.realpath(final)), overwrite=True)
    except OSError as error:
        raise UserError(f"{final}: cannot be read: {describe_os_error(error)}") from None
    if refused is not None:
        raise UserError(
            f"{final}: {refused}, so the model could not be written there at the end; move it away:"
            f" mv {shlex.quote(str(final))} {shlex.quote(f'{final}-before')}"
        )


def _is_saved(config: RunConfig, saved: Path) -> bool:
    """Whether `saved` says the same already: a start on a full disk need not write what is
    there."""
    if not is_there(saved):
        return False
    try:
        old = load_saved_config(saved)
    except UserError:
        return False  # of another version, or damaged: written again
    return old.model_dump(mode="json") == config.model_dump(mode="json")
