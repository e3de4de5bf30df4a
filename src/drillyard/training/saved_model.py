"""A saved model: where it is, what it was trained with, its weights in memory, and its export.

Looking a model up needs no torch, so mistakes are reported at once; `load_saved_model` and
`export_checkpoint` import it. Models load sharded over any number of ranks: the layout of the
training run does not matter.

RUN_DIR/base/ keeps the base's config.json and generation_config.json as they were when training
began, and base.json: what `model.id` named, and the dtype of each parameter in its files. So
checkpoints need nothing but the run directory, and an export has the base's dtypes: a bf16 model
comes back as bf16, except for the weights that it stored in fp32. A model with an inline config is
exported in the dtype that its config declares, or else as it was trained.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from drillyard import export_directory
from drillyard.config.environment import hide_secrets
from drillyard.config.fetch_limits import FetchLimits, limited
from drillyard.config.load import config_from_options, resolve_section_secrets
from drillyard.config.model_files import (
    ADAPTER_CONFIG,
    read_adapted_layers,
    read_adapter_config,
)
from drillyard.config.problems import on_one_line, shown_address
from drillyard.config.run import LoraConfig, ModelConfig, ParallelismConfig, RunConfig
from drillyard.config.saved_config import load_saved_config, settings_to_fetch
from drillyard.errors import NotFoundError, UserError
from drillyard.guarded_files import is_there, read_json, require_usual_files
from drillyard.safe_files import describe_os_error, make_directory
from drillyard.telemetry.events import EVENTS_FILE
from drillyard.training.checkpoint.inventory import (
    CHECKPOINTS_NAME,
    incomplete_error,
    inspect,
    list_checkpoints,
    newest_usable,
)
from drillyard.training.checkpoint.manifest import MANIFEST_NAME, write_durably
from drillyard.training.run_directory import (
    SAVED_BASE,
    SAVED_CONFIG,
    SAVED_TOKENIZER,
    require_usual_run_files,
)

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

    from drillyard.parallel.ranks import Ranks
    from drillyard.training.model_setup import ShardedModel

BASE_RECORD = "base.json"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
Dtypes: TypeAlias = "dict[str, torch.dtype]"
"""The dtype of each parameter in an export, by name."""


@dataclass(frozen=True)
class SavedModel:
    """Location of a saved model, and the config it was trained with (None for a model from
    elsewhere)."""

    path: Path
    is_checkpoint: bool
    config: RunConfig | None

    @property
    def tokenizer_directory(self) -> Path | None:
        """Directory of the model's tokenizer: with the weights, or in the run directory. None where
        there is none, as peft leaves an adapter."""
        owner = run_directory_above(self.path)
        if self.is_checkpoint and owner:
            return owner / SAVED_TOKENIZER
        return self.path if any((self.path / name).is_file() for name in _TOKENIZER_FILES) else None

    @property
    def base(self) -> dict[str, Any] | None:
        """Record of the base model that the checkpoint's run wrote; None where it has no base model
        or wrote none."""
        owner = run_directory_above(self.path)
        return (
            None
            if owner is None or self.config is None
            else read_base_record(owner, self.config.model.id)
        )

    def config_from_run(self) -> RunConfig:
        """The run config of a checkpoint, with the base's config as the run kept it: the base need
        not be there."""
        owner = run_directory_above(self.path)
        assert self.config is not None and owner is not None, "a checkpoint is in a run directory"
        if self.config.model.lora is not None:
            # Its checkpoints lack the base's weights, which are read where they were.
            base = (self.base or {}).get("path") or self.config.model.id
            model = self.config.model.model_copy(update={"id": base})
            return resolve_section_secrets(self.config.model_copy(update={"model": model}), "model")
        if self.base is None:
            return resolve_section_secrets(self.config, "model")
        model = self.config.model.model_copy(update={"id": str(owner / SAVED_BASE)})
        return self.config.model_copy(update={"model": model})


def read_base_record(run_directory: Path, model_id: str | None) -> dict[str, Any] | None:
    """Read a run's record of the base model `model_id`; None where it has none."""
    try:
        record = read_json(run_directory / SAVED_BASE / BASE_RECORD)
        is_known = (
            record["version"] == 1
            # Earlier versions recorded a reference to the environment as its value.
            and record["id"] in (hide_secrets(model_id), model_id)
            and isinstance(record["dtypes"], dict)
        )
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return dict(record) if is_known else None


def find_saved_model(path: Path) -> SavedModel:
    """Find the model of `path`: a checkpoint directory, a model directory in Hugging Face format,
    or a run directory's final/.

    Raises UserError when it is none of them, or has something odd in the place of a file.
    """
    if not path.is_dir():
        raise NotFoundError(
            f"{path}: no such directory; give a checkpoint, a final/ directory or a run directory"
        )
    owner = run_directory_above(path)
    require_usual_files(path)
    if owner is not None:
        require_usual_run_files(owner)
    config = load_saved_config(owner / SAVED_CONFIG) if owner else None
    if export_directory.holds_model(path):
        return SavedModel(path, False, config)
    if (path / MANIFEST_NAME).is_file():
        if config is None:
            raise UserError(
                f"{path}: a checkpoint needs the run.yaml of its run; give"
                f" RUN_DIR/{CHECKPOINTS_NAME}/{path.name}"
            )
        if (info := inspect(path)) is not None and not info.complete:
            raise incomplete_error(info)
        return SavedModel(path, True, config)
    if export_directory.holds_model(path / "final"):
        return SavedModel(path / "final", False, config)
    raise UserError(
        f"{path}: neither a complete checkpoint (manifest.json) nor a model (config.json) nor a run"
        " with final/ or a checkpoint"
    )


def find_in_run(path: Path, *, checkpoint_only: bool = False) -> Path:
    """The model to take where `path` is a run directory: final/, else the newest complete
    checkpoint. Any other path is returned as it is.

    `checkpoint_only`: not final/, which needs no export. UserError where no checkpoint is complete,
    with those there are, or where a newer one is of a later format.
    """
    if (path / MANIFEST_NAME).is_file() or export_directory.holds_model(path):
        return path
    checkpoints = list_checkpoints(path)
    has_final = export_directory.holds_model(path / "final")
    if has_final and not checkpoint_only:
        return path / "final"
    if (newest := newest_usable(checkpoints)) is not None:
        return newest.path
    if checkpoints:
        listed = "; ".join(f"{info.path.name}: {info.reason}" for info in checkpoints[-5:])
        raise UserError(
            f"{path}: none of the checkpoints of this run is complete ({listed}). Let the run save"
            " another, or start it again"
        )
    if has_final:
        raise UserError(
            f"{path}: this run has no checkpoint to export; {path / 'final'} is its model in"
            " Hugging Face format already: copy that"
        )
    return path


def fetch_limits_of(
    saved: SavedModel, *, typed: Collection[str] = (), accepts_data: bool = False
) -> FetchLimits:
    """The limits of a command on a saved model; the arguments are those of `FetchLimits`.

    Its settings are those of the run's config, and the base that the model's own files name.
    """
    settings: tuple[str, ...] = ()
    owner = run_directory_above(saved.path)
    if saved.config is not None and owner is not None:
        settings = settings_to_fetch(saved.config, owner / SAVED_CONFIG, typed=typed)
    if saved.is_checkpoint:
        file, key, base = SAVED_BASE + "/" + BASE_RECORD, "path", (saved.base or {}).get("path")
        directory = owner
    else:
        file, key, directory = ADAPTER_CONFIG, "base_model_name_or_path", saved.path
        is_adapter = not (saved.path / "config.json").is_file()
        base = read_adapter_config(saved.path).get(key) if is_adapter else None
    if isinstance(base, str) and base not in typed and not Path(base).expanduser().is_dir():
        settings = (*settings, on_one_line(f"{directory}/{file}: {key}: {shown_address(base)}"))
    return FetchLimits(settings, frozenset(typed), accepts_data)


def find_checkpoint_to_export(
    path: Path, destination: Path, *, overwrite: bool = False, merge: bool = False
) -> SavedModel:
    """The checkpoint at `path`. UserError when it is none, or when it must not be exported to
    `destination`.

    `merge`: it must be one of adapters.
    """
    saved = find_saved_model(path)
    if not saved.is_checkpoint:
        raise UserError(
            f"{path}: is not a checkpoint; give RUN_DIR/checkpoints/step-N, or RUN_DIR for the"
            " newest"
        )
    if merge and (saved.config is None or saved.config.model.lora is None):
        raise UserError(
            f"{path}: has no adapters to merge: its run trained all weights; leave --merge out"
        )
    target = Path(os.path.realpath(destination))
    checkpoint = Path(os.path.realpath(path))
    here = Path.cwd()
    if target in (here, *here.parents):
        which = "the working directory" if target == here else "above the working directory"
        raise UserError(f"{destination}: is {which}; name a new directory, such as ./model")
    if target in (checkpoint, *checkpoint.parents):
        raise UserError(f"{destination}: holds the checkpoint; name a new directory")
    if checkpoint.parent in target.parents:
        raise UserError(
            f"{destination}: is among the checkpoints, which a run deletes; name a directory"
            " elsewhere"
        )
    if any((above / export_directory.RECORD).is_file() for above in target.parents):
        raise UserError(f"{destination}: is inside an exported model; name a directory elsewhere")
    assert saved.config is not None, "a checkpoint comes with its config"
    known = [saved.config.model.id, saved.config.data.tokenizer, (saved.base or {}).get("path")]
    for base in (
        Path(os.path.realpath(Path(name).expanduser())) for name in known if isinstance(name, str)
    ):
        require_usual_files(base)
        if base.is_dir() and target in (base, *base.parents):
            raise UserError(
                f"{destination}: holds the model or tokenizer that the run began from; name a new"
                " directory"
            )
    try:
        refused = export_directory.reason_to_refuse(target, overwrite=overwrite)
    except OSError as error:
        raise UserError(f"{destination}: cannot be read: {describe_os_error(error)}") from None
    if refused is not None:
        advice = (
            "give --overwrite to replace it"
            if refused == export_directory.EARLIER_EXPORT
            else "move this one away"
        )
        raise UserError(f"{destination}: {refused}; name a new directory, or {advice}")
    return saved


def run_directory_above(path: Path) -> Path | None:
    """The run directory of RUN_DIR/checkpoints/step-N, of RUN_DIR/final, or of itself; None for a
    model from elsewhere.

    The directory of a project has a run.yaml too; that of a run that has started has events as
    well.
    """
    if (path / MANIFEST_NAME).is_file():
        places, needed = (path, Path(os.path.realpath(path))), [SAVED_CONFIG]
        owners = [place.parent.parent for place in places if place.parent.name == CHECKPOINTS_NAME]
    else:
        owners, needed = [path, path.parent], [SAVED_CONFIG, EVENTS_FILE]
    return next((owner for owner in owners if all(is_there(owner / name) for name in needed)), None)


def as_pretrained(config: RunConfig, saved: SavedModel) -> RunConfig:
    """`config` with the model of a Hugging Face directory, or an adapter with the base that it
    names, and with its tokenizer: that of the directory, of the data's config, or of the base."""
    path = saved.path
    changes: dict[str, Any] = {"id": str(path), "config": None, "init": "pretrained", "lora": None}
    if (path / "config.json").is_file():
        changes["quantization"] = None
    else:
        adapter = read_adapter_config(path)
        own = None if saved.config is None else saved.config.model
        lora = _lora_of(adapter, path, None if own is None else own.lora)
        base = adapter.get("base_model_name_or_path")
        if not isinstance(base, str) or not base:
            raise UserError(
                f"{path}: its adapter_config.json names no base: write it into"
                " base_model_name_or_path"
            )
        changes |= {"id": base, "lora": lora}
        if own is not None:
            # The config may be of another run, for its data.
            changes["quantization"] = own.quantization
    tokenizer: Any = config.data.tokenizer if isinstance(config.data.tokenizer, str) else None
    template = config.data.chat_template
    if saved.tokenizer_directory is not None:
        # The template was saved with it.
        tokenizer, template = str(saved.tokenizer_directory), None
    data = config.data.model_copy(update={"tokenizer": tokenizer, "chat_template": template})
    return config.model_copy(
        update={"model": config.model.model_copy(update=changes), "data": data}
    )


def _lora_of(adapter: dict[str, Any], path: Path, of_run: LoraConfig | None) -> LoraConfig:
    """The settings of the adapter at `path`: those of the run that made it, or what its files
    say."""
    if of_run is not None:
        return of_run.model_copy(update={"adapter": str(path)})
    layers = read_adapted_layers(path)
    variants = {"dora": adapter.get("use_dora"), "rslora": adapter.get("use_rslora")}
    settings = {
        "rank": adapter.get("r"),
        "alpha": adapter.get("lora_alpha"),
        # Experts stacked in one tensor have adapters under all-linear alone.
        "target_modules": "all-linear" if {"experts", "base_layer"} & set(layers) else layers,
        "variant": next((name for name, used in variants.items() if used), "lora"),
        "adapter": str(path),
    }
    return config_from_options(LoraConfig, settings)


def save_base_record(
    model_config: ModelConfig, model: PreTrainedModel, directory: Path, *, begins: bool
) -> Dtypes:
    """Record the base model of `model.id` in the run directory; returns the dtype of each parameter
    in exports.

    `begins`: training starts from the base's weights now; else an earlier record holds. Raises
    OSError.
    """
    from drillyard.models.export_documents import CONFIG, GENERATION_CONFIG

    if not begins and (record := read_base_record(directory, model_config.id)) is not None:
        return dtypes_of_record(record)
    dtypes = export_dtypes(model_config, model)
    if model_config.id is None:
        return dtypes
    base = directory / SAVED_BASE
    make_directory(base)
    documents = _documents_of(model_config, model_config.id)
    for name in (CONFIG, GENERATION_CONFIG):
        if name in documents:
            write_durably(base / name, documents[name])
        else:
            (base / name).unlink(missing_ok=True)
    local = Path(model_config.id).expanduser()
    record = {
        "version": 1,
        "id": hide_secrets(model_config.id),
        "path": os.path.realpath(local) if local.is_dir() else None,
        "dtypes": {
            name: str(dtype).removeprefix("torch.") for name, dtype in sorted(dtypes.items())
        },
    }
    write_durably(base / BASE_RECORD, f"{json.dumps(record, indent=1)}\n".encode())
    return dtypes


def saved_base_documents(
    run_directory: Path, model_config: ModelConfig, source: str | None
) -> dict[str, bytes]:
    """The documents that an export keeps of the base model `model_config.id`, by name: those that
    the run kept, or where it kept none those of `source`; empty without a base."""
    if model_config.id is None or source is None:
        return {}
    is_kept = read_base_record(run_directory, model_config.id) is not None
    with contextlib.suppress(OSError):
        return _documents_of(model_config, run_directory / SAVED_BASE if is_kept else source)
    return {}


def _documents_of(model_config: ModelConfig, source: str | Path) -> dict[str, bytes]:
    from drillyard.models.export_documents import GENERATION_CONFIG, base_documents

    documents = base_documents(source)
    if model_config.init != "pretrained":
        # Settings of text generation are those of the base's weights and tokenizer.
        documents.pop(GENERATION_CONFIG, None)
    return documents


def dtypes_of_record(record: dict[str, Any]) -> Dtypes:
    """The dtypes in what `read_base_record` returned. Raises UserError for a dtype that no weight
    is stored in."""
    from drillyard.models.weight_layout import DTYPES

    known = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}
    for name, dtype in record["dtypes"].items():
        if not isinstance(dtype, str) or dtype not in known:
            raise UserError(
                f"{SAVED_BASE}/{BASE_RECORD}: {name} has the dtype {dtype!r:.80}; known are"
                f" {', '.join(known)}\ncopy the file again from where the run wrote it"
            )
    return {name: known[dtype] for name, dtype in record["dtypes"].items()}


def export_dtypes(model_config: ModelConfig, model: PreTrainedModel) -> Dtypes:
    """The dtype of each parameter in the base's files, else the one that its config declares, else
    none."""
    from drillyard.models.meta_model import load_config
    from drillyard.models.pretrained import stored_dtypes
    from drillyard.models.weight_layout import named_tensors

    if model_config.init == "pretrained":
        # Where the base's files are gone, its config decides.
        with contextlib.suppress(UserError):
            return stored_dtypes(model, str(model_config.id))
    declared: torch.dtype | None = load_config(model_config).dtype  # type: ignore[assignment]
    return {} if declared is None else dict.fromkeys(named_tensors(model), declared)


def without_training_layout(config: RunConfig) -> RunConfig:
    """`config` for another host and other ranks than those of training: leaves speed and batch
    settings open."""
    training = {
        "device": "auto",
        "compile": False,
        "activation_checkpointing": "none",
        "deterministic": False,
        "gradient_accumulation": None,
        "global_batch_size": None,
    }
    return config.model_copy(
        update={
            "model": config.model.model_copy(update={"attention": "auto"}),
            "training": config.training.model_copy(update=training),
            "parallelism": ParallelismConfig(),
        }
    )


def load_saved_model(
    saved: SavedModel,
    config: RunConfig,
    tokenizer: PreTrainedTokenizerFast,
    ranks: Ranks,
    purpose: Literal["evaluation", "export"],
) -> ShardedModel:
    """The saved model, sharded and filled; `purpose`: see `build_sharded_model`. UserError when a
    file is damaged."""
    from drillyard.training.base_checksum import base_checksum
    from drillyard.training.checkpoint.dcp_storage import DamagedCheckpoint
    from drillyard.training.checkpoint.loading import load_checkpoint
    from drillyard.training.model_setup import (
        build_sharded_model,
        fill_frozen_weights,
        fill_weights,
    )
    from drillyard.training.optimizer import local_shards
    from drillyard.training.resume import model_state

    model = build_sharded_model(config, tokenizer, ranks, purpose=purpose)
    if not saved.is_checkpoint:
        fill_weights(config, model)
        return model
    try:
        loaded = load_checkpoint(saved.path, model_state(local_shards(model.root)))
    except DamagedCheckpoint as damage:
        raise UserError(f"{saved.path}: damaged: {damage}; use another checkpoint") from None
    if config.model.lora is not None and loaded.metadata.get("base") != base_checksum(
        config.model.id
    ):
        raise UserError(
            f"{saved.path}: its adapters were trained on other weights than {config.model.id} has"
            " now\nput those back: the checkpoint holds the adapters alone"
        )
    fill_frozen_weights(config, model)
    return model


def export_checkpoint(
    path: Path,
    destination: Path,
    *,
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
    merge: bool = False,
    trust_config: bool = False,
) -> None:
    """Write the checkpoint at `path` as a Hugging Face directory, as one rank of however many there
    are.

    `dtype`: of all floating-point weights; default: what each has in the base model. Adapters are
    written alone, in PEFT's format, or with `merge` as a model with their update added to its
    weights. Fetches nothing that the run's files name unless `trust_config` (`fetch_limits.py`).
    Raises UserError when `path` is no checkpoint or it must not be exported to
    `destination`.
    """
    saved = find_checkpoint_to_export(path, destination, overwrite=overwrite, merge=merge)
    with limited(None if trust_config else fetch_limits_of(saved)):
        _export(saved, destination, dtype, overwrite=overwrite, merge=merge)


def _export(
    saved: SavedModel,
    destination: Path,
    dtype: torch.dtype | None,
    *,
    overwrite: bool,
    merge: bool,
) -> None:
    """Export a checkpoint that `find_checkpoint_to_export` returned, as one rank."""
    from drillyard.data.tokenizer import open_saved_tokenizer
    from drillyard.data.tokenizer_files import tokenizer_files
    from drillyard.models.export import export
    from drillyard.parallel.ranks import start_ranks, stop_ranks

    config = without_training_layout(saved.config_from_run())
    has_adapters = config.model.lora is not None
    if merge and has_adapters:
        config = _for_merging(config, saved.base, dtype)
    ranks = start_ranks(config.training, config.parallelism)
    assert saved.tokenizer_directory is not None, "a checkpoint is in a run directory"
    try:
        tokenizer = open_saved_tokenizer(saved.tokenizer_directory)
        model = load_saved_model(saved, config, tokenizer.pretrained, ranks, "export")
        base = saved.base
        kept = (
            export_dtypes(config.model, model.causal_lm) if base is None else dtypes_of_record(base)
        )
        owner = run_directory_above(saved.path)
        assert owner is not None and saved.config is not None, "a checkpoint is in a run directory"
        documents = saved_base_documents(owner, saved.config.model, config.model.id)
        export(
            model.causal_lm,
            destination,
            tokenizer=tokenizer_files(tokenizer),
            base=documents,
            dtype=dtype or kept,
            overwrite=overwrite,
            adapters="left out" if not has_adapters else "merged" if merge else "alone",
        )
    finally:
        stop_ranks()


def _for_merging(
    config: RunConfig, base: dict[str, Any] | None, dtype: torch.dtype | None
) -> RunConfig:
    """`config` with a precision in which the sum of weights and update is rounded to the exported
    dtypes only once."""
    import torch

    written = {dtype} if dtype is not None else set(dtypes_of_record(base).values() if base else ())
    if config.training.precision != "bf16" or written == {torch.bfloat16}:
        return config
    return config.model_copy(
        update={"training": config.training.model_copy(update={"precision": "fp32"})}
    )
