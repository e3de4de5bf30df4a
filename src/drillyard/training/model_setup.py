"""From a run config to a model that can train: built on meta, sharded, materialised, filled.

No rank holds the whole model, unless the estimate says that it fits.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from drillyard.config.kernel_rules import HALF, AttentionKernel, resolve_fp8_scaling
from drillyard.config.run import RunConfig
from drillyard.errors import DoesNotFitError, UserError
from drillyard.estimation.alternatives import find_alternatives
from drillyard.estimation.resolved_setup import ResolvedSetup, resolve_setup
from drillyard.estimation.setup import Setup
from drillyard.models.adapter_files import load_adapter, require_matching_adapter
from drillyard.models.architectures import blocks, settings_without_effect
from drillyard.models.attention import resolve_attention
from drillyard.models.fp8_gather import gather_in_fp8
from drillyard.models.loss import LanguageModelLoss
from drillyard.models.meta_model import build_model, load_config
from drillyard.models.nf4 import count_parameters
from drillyard.models.pretrained import frozen_in_files, load_pretrained, require_matching_weights
from drillyard.models.random_init import init_buffers, init_random
from drillyard.models.sharding import restore_ties
from drillyard.modelspec import model_spec, spec_from_counts
from drillyard.parallel.collectives import gather
from drillyard.parallel.parallelize import (
    COMPUTE_DTYPE,
    MASTER_DTYPE,
    fsdp_modules,
    parallelize_model,
)
from drillyard.parallel.ranks import Ranks

GIB = 2**30


@dataclass(frozen=True)
class ShardedModel:
    """A sharded model in memory, and what was decided on the way; `notes` are for the user to read.

    `resolved` has the step as it can be estimated, and what the settings that were left open
    became. `computes_fp8`: layers multiply in fp8. `left_in_bf16`: under `precision: fp8` the
    layers of a block that do not compute in it. `gathers_fp8`: ranks exchange weights in it.
    """

    root: LanguageModelLoss
    attention: str
    num_parameters: int
    small: bool
    notes: list[str]
    resolved: ResolvedSetup
    computes_fp8: bool = False
    left_in_bf16: list[str] = field(default_factory=list)
    gathers_fp8: bool = False

    @property
    def stores_fp8(self) -> bool:
        """Whether frozen weights rest in fp8, once they are filled."""
        setup = self.resolved.setup
        return self.computes_fp8 and setup.stores_fp8 and setup.holds_frozen_whole

    @property
    def causal_lm(self) -> PreTrainedModel:
        return self.root.causal_lm


def require_trainable(
    config: RunConfig,
    device: torch.device,
    *,
    needs_weights: bool = False,
    fetches_weights: bool = True,
) -> None:
    """Raise UserError when no model can be built from the config, or it cannot train on this device
    as the config asks.

    The model is built on the meta device: no memory, no data, no tokenizer. `needs_weights`:
    nothing was trained yet, so that its pretrained weights, if any, must be there too. Without
    `fetches_weights` those that are not in a directory here are not looked at.
    """
    model = build_model(
        config.model,
        vocab_size=None,
        dtype=MASTER_DTYPE[config.training.precision],
        attention=attention_kernel(config, device),
        sequence_length=config.data.sequence_length,
    )
    add_adapters(config, model)
    use_precision(config, model, device)
    # The frozen weights are in no checkpoint.
    if config.model.init == "pretrained" and (needs_weights or config.model.lora is not None):
        assert config.model.id is not None, "checked before start"
        if fetches_weights or Path(config.model.id).expanduser().is_dir():
            require_matching_weights(model, config.model.id)
    if needs_weights and config.model.lora is not None and config.model.lora.adapter is not None:
        require_matching_adapter(model, config.model.lora.adapter, config.model.id)


def add_adapters(config: RunConfig, model: PreTrainedModel) -> None:
    """Put the adapters of `config`, if any, into its model on the meta device. UserError as
    `inject_adapters`."""
    if config.model.lora is not None:
        precision = config.training.precision
        dtypes = (COMPUTE_DTYPE[precision], MASTER_DTYPE[precision])
        # Imported here: peft takes a second or more, and most runs have no adapters.
        from drillyard.models.adapters import inject_adapters

        quantized = config.model.quantization is not None
        inject_adapters(model, config.model.lora, config.model.id, dtypes, quantized=quantized)


def use_precision(config: RunConfig, model: PreTrainedModel, device: torch.device) -> list[str]:
    """Let the layers of `model`, adapters included, multiply in fp8 where `config` says so. Returns
    those of a block that are left in bf16; UserError as `use_fp8_products`."""
    training = config.training
    if training.precision != "fp8":
        return []
    from drillyard.models.fp8 import use_fp8_products

    return use_fp8_products(model, blocks(model), resolve_fp8_scaling(training), device)


def attention_kernel(config: RunConfig, device: torch.device) -> AttentionKernel:
    """The attention kernel that the model trains with on this device. UserError when the one asked
    for cannot."""
    compute_dtype = COMPUTE_DTYPE[config.training.precision]
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    return resolve_attention(
        config.model.attention, device.type, compute_dtype, load_config(config.model), capability
    )


def build_sharded_model(
    config: RunConfig,
    tokenizer: PreTrainedTokenizerFast,
    ranks: Ranks,
    *,
    purpose: Literal["training", "evaluation", "export"] = "training",
    memory_gib: float | None = None,
) -> ShardedModel:
    """Build, shard and materialise the model of `config`; `fill_weights` or a checkpoint fills its
    parameters.

    What fits is decided by `memory_gib` per rank, which must be the same on all; default: the least
    any has. `purpose`: only training needs gradients and moments, and only an export may have
    frozen weights that exceed the memory. Raises UserError when the model does not fit, or cannot
    train on this device as the config asks.
    """
    training = config.training
    for_training = purpose == "training"
    attention = attention_kernel(config, ranks.device)
    model = build_model(
        config.model,
        vocab_size=len(tokenizer),
        dtype=MASTER_DTYPE[training.precision],
        attention=attention,
        sequence_length=config.data.sequence_length,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.bos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    add_adapters(config, model)
    # What is read to be measured or exported multiplies as its files will be read.
    left_in_bf16 = use_precision(config, model, ranks.device) if for_training else []
    num_parameters = count_parameters(model)
    memory_gib = least_memory_bytes(ranks) / GIB if memory_gib is None else memory_gib
    resolved = resolve_settings(config, model, attention, ranks, memory_gib)
    in_files = weights_in_files(config, model, ranks.device)
    try:
        # An export reads weights in files once, so any memory will do; steps read all of them
        # again.
        apart = in_files if purpose == "export" else set()
        require_state_fits(
            model,
            training.precision,
            ranks,
            memory_gib * GIB,
            training=for_training,
            apart=apart,
            moment_bytes=resolved.setup.moment_bytes,
        )
    except DoesNotFitError as error:
        advice = describe_nearest_fit(resolved.setup, memory_gib) if for_training else ""
        raise DoesNotFitError(f"{error}{advice}") from None
    small = resolved.setup.keeps_unsharded
    whole = frozen_parameters(model) if resolved.setup.holds_frozen_whole else in_files
    root = LanguageModelLoss(model)
    recomputation = {"activation_checkpointing": resolved.setup.activation_checkpointing}
    training = training.model_copy(update=recomputation)
    parallelize_model(root, blocks(model), ranks, training, keep_unsharded=small, unsharded=whole)
    root.to_empty(device=ranks.device)
    restore_ties(model)
    init_buffers(model)
    computes_fp8 = for_training and config.training.precision == "fp8"
    gathers_fp8 = computes_fp8 and resolved.setup.gathers_fp8 and gather_in_fp8(root) > 0
    materialise(root)
    root.train()
    notes = settings_without_effect(load_config(config.model))
    if left_in_bf16:
        notes.append(f"fp8: layers that compute in bf16: {', '.join(left_in_bf16)}")
    if for_training and is_slow_in_half(training.precision, ranks.device):
        notes.append(
            "this CPU has no instructions for bf16, which takes several times as long as fp32: set"
            " training.precision: fp32, and leave it out on a GPU"
        )
    return ShardedModel(
        root,
        attention,
        num_parameters,
        small,
        notes,
        resolved,
        computes_fp8,
        left_in_bf16,
        gathers_fp8,
    )


def is_slow_in_half(precision: str, device: torch.device) -> bool:
    """Whether products in bf16 or fp8 are computed without instructions of the CPU for bf16 (AVX512
    or AMX, or those of ARM)."""
    if precision not in HALF or device.type != "cpu":
        return False
    # A build of torch without oneDNN has no such operator.
    has_instructions = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", bool)
    return not has_instructions()


def frozen_parameters(model: torch.nn.Module) -> set[torch.nn.Parameter]:
    """What no step changes."""
    return {each for each in model.parameters() if not each.requires_grad}


def weights_in_files(
    config: RunConfig, model: PreTrainedModel, device: torch.device
) -> set[torch.nn.Parameter]:
    """The frozen weights that all ranks of a host read from the base's mapped files, so that none
    are gathered even where each rank's memory could not hold them.

    None on a GPU, which has memory of its own. UserError as `load_pretrained`.
    """
    if config.model.lora is None or config.model.init == "random" or device.type != "cpu":
        return set()
    assert config.model.id is not None, "checked before start"
    return frozen_in_files(model, config.model.id)


def resolve_settings(
    config: RunConfig,
    model: PreTrainedModel,
    attention: AttentionKernel,
    ranks: Ranks,
    memory_gib: float,
) -> ResolvedSetup:
    """Every setting of the step resolved, for the `model` that transformers has built.

    A model that cannot be estimated trains all the same: then only its number of parameters is
    known.
    """
    try:
        spec = model_spec(model.config.to_dict(), built=True)
    except UserError:
        spec = spec_from_counts(count_parameters(model))
    return resolve_setup(
        config,
        spec,
        num_gpus=ranks.num_data_ranks,
        gpus_per_node=ranks.local_world_size,
        memory_gib=memory_gib,
        device_type="cuda" if ranks.device.type == "cuda" else "cpu",
        kernel=attention,
    )


def describe_nearest_fit(setup: Setup, memory_gib: float) -> str:
    """A line that names the nearest settings that fit, to end an error with; empty where nothing is
    known to."""
    try:
        changes = find_alternatives(setup, memory_gib)
    except UserError:
        return ""
    return "".join(
        f"\nwhat would fit: {change.in_words()}, at the price of {change.costs}"
        for change in changes[:1]
    )


def fill_weights(config: RunConfig, model: ShardedModel) -> None:
    """Fill the parameters: from the files of `model.id`, or with the model's own random scheme;
    then the adapters.

    Raises UserError for an adapter that is not of this model, before anything is read.
    """
    lora = config.model.lora
    if lora is not None and lora.adapter is not None:
        require_matching_adapter(model.causal_lm, lora.adapter, config.model.id)
    if config.model.init == "random":
        init_random(model.causal_lm, config.training.seed)
    else:
        assert config.model.id is not None, "checked before start"
        load_pretrained(model.causal_lm, config.model.id)
    if lora is not None:
        from drillyard.models.adapters import init_adapters

        if lora.adapter is None:
            init_adapters(model.causal_lm, config.training.seed)
        else:
            load_adapter(model.causal_lm, lora.adapter)
    keep_frozen_weights(model)


def fill_frozen_weights(config: RunConfig, model: ShardedModel) -> None:
    """Fill what no checkpoint holds: beside adapters, the weights of `model.id`. Does nothing where
    all are trained."""
    if config.model.lora is not None:
        assert config.model.id is not None, "checked before start"
        load_pretrained(model.causal_lm, config.model.id)
        keep_frozen_weights(model)


def keep_frozen_weights(model: ShardedModel) -> None:
    """Cast frozen weights that are filled to how they rest in training."""
    if model.stores_fp8:
        from drillyard.models.fp8 import keep_frozen_in_fp8

        keep_frozen_in_fp8(model.causal_lm)


def materialise(root: torch.nn.Module) -> None:
    """Let FSDP2 take hold of the shards now, so that the tensors it uses from here on are the final
    ones."""
    for module in fsdp_modules(root):
        module.unshard()
        module.reshard()


def set_determinism(config: RunConfig) -> None:
    """`deterministic: true`: only kernels that give the same bits every time; an error where there
    is none."""
    if config.training.deterministic:
        # cuBLAS is deterministic only with workspaces of fixed size; it reads this when it starts.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        backends: Any = torch.backends
        backends.cudnn.benchmark = False
        # PyTorch gives cuDNN's attention no deterministic backward, and `varlen_attn` takes cuDNN
        # without regard to the setting (torch 2.15, Hopper and Blackwell); FlashAttention has one.
        backends.cuda.enable_cudnn_sdp(False)


def memory_bytes_per_rank(ranks: Ranks) -> int:
    """Memory that one rank may use: its GPU's, or its share of the host's."""
    return memory_of_device(ranks.device, ranks.local_world_size)


def memory_of_device(device: torch.device, ranks_of_host: int) -> int:
    """Bytes that each of `ranks_of_host` ranks may use: of its GPU, or its share of the host's."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return host_memory_bytes() // ranks_of_host


def least_memory_bytes(ranks: Ranks) -> int:
    """The least memory of any rank, so that all ranks lay the model out alike, also on unequal
    hosts. Collective."""
    return min(gather(memory_bytes_per_rank(ranks)))


def host_memory_bytes(root: Path = Path("/")) -> int:
    """The host's memory, or the lowest limit of the control groups around this process: a
    container's, a Slurm job's.

    `root` has proc/ and sys/.
    """
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([total, *_control_group_limits(root)])


def _control_group_limits(root: Path) -> Iterator[int]:
    """Memory limits of this process's control groups and of all above them, of version 1 and 2
    (cgroups(7)).

    In a container, the path may be the host's, and only the container's own group be mounted: then
    that is the top.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        where, file = ("memory", "memory.limit_in_bytes") if controllers else ("", "memory.max")
        group = Path(path.lstrip("/"))
        for each in (group, *group.parents):
            # `max`: no limit.
            with contextlib.suppress(OSError, ValueError):
                yield int((root / "sys/fs/cgroup" / where / each / file).read_text())


def require_state_fits(
    model: PreTrainedModel,
    precision: str,
    ranks: Ranks,
    available_bytes: float,
    *,
    training: bool = True,
    apart: Collection[torch.nn.Parameter] = (),
    moment_bytes: float | None = None,
) -> None:
    """Raise DoesNotFitError when weights not in `apart` (in training also gradients and moments)
    exceed the memory. `moment_bytes`: of one moment of a parameter; None: as of the parameter."""
    item = MASTER_DTYPE[precision].itemsize
    moments = 2 * (item if moment_bytes is None else moment_bytes)
    each, what = (
        (2 * item + moments, "weights, gradients and AdamW moments")
        if training
        else (item, "weights")
    )
    parameters = [parameter for parameter in model.parameters() if parameter not in apart]
    num_parameters = count_parameters(model)
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    state_bytes = int(each * trained)
    state_bytes += sum(
        each.numel() * each.itemsize for each in parameters if not each.requires_grad
    )
    state_bytes //= ranks.mesh.size(1)
    if state_bytes > available_bytes:
        where = "its GPU has" if ranks.device.type == "cuda" else "its share of this host is"
        raise DoesNotFitError(
            f"the model does not fit: {what} of {num_parameters / 1e9:.2f}B parameters take"
            f" {state_bytes / GIB:.1f} GiB per rank, {where} {available_bytes / GIB:.1f} GiB; use"
            " more ranks or hosts, or a smaller model"
        )
