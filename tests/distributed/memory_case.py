"""The trainer's own step under torch's memory tracker, on tensors without contents and ranks that
are not there.

`measure(case)` puts a model through the trainer's own path (`set_up_model`, `ShardedAdamW`,
`Trainer.train_step`) with a fake process group of any size, in torch's FakeTensorMode, so that
sizes are free: nothing is computed and nothing is allocated. The second step runs under
`FSDPMemTracker`. What it counts are storages: those of sharded parameters, optimizer state and
buffers from the start, and every storage that an operator returns, until it is released.

Not counted by the tracker: memory that an operator takes and gives back inside itself.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker, _FSDPRefType, _FSDPState
from torch.distributed._tools.mod_tracker import ModTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakIdKeyDictionary

from drillyard.config.kernel_rules import resolve_loss_chunk
from drillyard.config.run import RunConfig
from drillyard.config.run_model import LoraConfig
from drillyard.data.mapped_sequences import Batch
from drillyard.data.sampler import BatchShape
from drillyard.estimation import resolved_setup
from drillyard.estimation.setup import Setup, lora_setup
from drillyard.models import loss as loss_room
from drillyard.models import nf4
from drillyard.modelspec import ModelSpec, model_spec
from drillyard.parallel.ranks import Ranks
from drillyard.training import model_setup
from drillyard.training.build import batch_shape
from drillyard.training.optimizer import ShardedAdamW
from drillyard.training.trainer import StepWindow, Trainer


@dataclass(frozen=True)
class Case:
    """What is trained, and how. `model` is the inline config of a run, `architecture` included."""

    model: dict[str, Any]
    sequence_length: int = 512
    micro_batch_size: int = 1
    accumulation: int = 1
    precision: str = "bf16"
    checkpointing: str = "none"
    shard: int = 8
    replicate: int = 1
    keeps_unsharded: bool = False
    attention: str = "sdpa"
    chunk: int | None = None
    clipping: float | None = 1.0
    lora: dict[str, Any] | None = None
    """`model.lora` of the run."""
    quantization: str | None = None
    keeps_frozen_whole: bool | None = None
    """None: where gathered weights are kept too, as what is small."""

    @property
    def frozen_whole(self) -> bool:
        """Whether every rank holds the weights beside adapters whole."""
        kept = self.keeps_unsharded if self.keeps_frozen_whole is None else self.keeps_frozen_whole
        return self.lora is not None and kept


@dataclass(frozen=True)
class Measured:
    """Bytes by the tracker's kinds at the peak of the step, the phase it was in, and state when
    gradients are there."""

    peak: int
    kinds: dict[str, int]
    phase: str
    parameters: int
    gradients: int
    optimizer: int
    at_optimizer_step: int

    def without(self, *kinds: str) -> int:
        """The peak's bytes but those of some of the tracker's kinds."""
        return self.peak - sum(self.kinds[kind] for kind in kinds)


class Tokenizer:
    """As much of a tokenizer as the model's assembly reads."""

    eos_token_id = bos_token_id = pad_token_id = 0

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size


class Sequences:
    """Sequences of one document each, all of whose tokens carry loss: what a packed pretraining
    batch comes to."""

    def __init__(self, length: int) -> None:
        self.length = length

    def read_step(
        self, step: int, shape: BatchShape, data_rank: int
    ) -> tuple[list[int], Iterator[Batch]]:
        batches = (self.read(shape.micro_batch_size) for _ in range(shape.accumulation))
        return list(range(shape.global_batch_size)), batches

    def valid_tokens(self, references: list[int]) -> int:
        return len(references) * self.length

    def read(self, size: int) -> Batch:
        shape = (size, self.length)
        positions = np.broadcast_to(np.arange(self.length, dtype=np.int64), shape).copy()
        return Batch(
            np.ones(shape, np.int64), np.ones(shape, np.int64), positions, np.zeros(shape, np.int32)
        )


@contextlib.contextmanager
def fake_ranks(shard: int, replicate: int) -> Iterator[Ranks]:
    """Rank 0 of shard x replicate ranks, of which it is the only one."""
    size = shard * replicate
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        mesh = init_device_mesh("cpu", (replicate, shard), mesh_dim_names=("replicate", "shard"))
        yield Ranks(0, size, 0, 1, torch.device("cpu"), mesh, 1)
    finally:
        dist.destroy_process_group()


def run_config(case: Case) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "memory",
            "model": {
                "config": case.model,
                "init": "random",
                "attention": case.attention,
                "lora": case.lora,
                "quantization": case.quantization,
            },
            "data": {"source": "builtin:python-stdlib", "sequence_length": case.sequence_length},
            "training": {
                "steps": 3,
                "micro_batch_size": case.micro_batch_size,
                "gradient_accumulation": case.accumulation,
                "precision": case.precision,
                "optimizer": {"learning_rate": 1.0e-3},
                "schedule": {"name": "constant"},
                "activation_checkpointing": case.checkpointing,
                "gradient_clipping": case.clipping,
                "loss_chunk_tokens": case.chunk,
                "compile": False,
                "device": "cpu",
            },
            "parallelism": {"shard": case.shard, "replicate": case.replicate},
        }
    )


@contextlib.contextmanager
def to_empty_of_plain_tensors() -> Iterator[None]:
    """Torch's own swaps plain fake tensors in place, which it cannot where anything refers to
    them."""

    def to_empty(self: torch.nn.Module, *, device: torch.device) -> torch.nn.Module:
        plain: list[tuple[dict[str, Any], str, torch.Tensor]] = []
        for module in self.modules():
            tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
            for table in tables:
                for name, old in table.items():
                    if old is not None and not isinstance(old, DTensor):
                        new: torch.Tensor = torch.empty_like(old, device=device)
                        if isinstance(old, torch.nn.Parameter):
                            new = torch.nn.Parameter(new, old.requires_grad)
                        plain.append((table, name, new))
                        table[name] = None
        own(self, device=device)
        for table, name, new in plain:
            table[name] = new
        return self

    own = torch.nn.Module.to_empty
    with mock.patch.object(torch.nn.Module, "to_empty", to_empty):
        yield


def assemble(case: Case, ranks: Ranks) -> Trainer:
    """What `training.assemble` puts together, without the files of a run."""
    config = run_config(case)
    vocab = case.model["vocab_size"]
    tokenizer: Any = Tokenizer(vocab)

    def keep_whole(setup: Setup, memory_gib: float) -> Setup:
        return replace(setup, keeps_frozen_whole=case.frozen_whole)

    with (
        mock.patch.object(resolved_setup, "unsharded_is_small", lambda *_: case.keeps_unsharded),
        mock.patch.object(resolved_setup, "keep_whole", keep_whole),
        to_empty_of_plain_tensors(),
    ):
        model = model_setup.build_sharded_model(config, tokenizer, ranks, memory_gib=1e6)
    assert model.small == case.keeps_unsharded
    assert model.resolved.setup.keeps_frozen_whole == case.frozen_whole
    optimizer = ShardedAdamW(model.root, config.training.optimizer, case.clipping, ranks)
    data: Any = Sequences(case.sequence_length)
    return Trainer(
        config,
        ranks,
        model,
        optimizer,
        data,
        batch_shape(config, ranks.num_data_ranks),
        3,
    )


class Modules(ModTracker):
    """Which sharded modules run, for torch's tracker.

    It follows every module by hooks on tensors, which keep those of the loss alive until garbage is
    collected; and it takes the end of the loss's own small backward for that of the step's. Neither
    is the trainer's memory, so only modules that FSDP2 shards are followed, and leaving one twice
    is no error.
    """

    def _fw_pre_hook(self, mod: Any, input: Any) -> None:
        if isinstance(mod, FSDPModule):
            super()._fw_pre_hook(mod, input)

    def _fw_post_hook(self, mod: Any, input: Any, output: Any) -> None:
        if isinstance(mod, FSDPModule):
            super()._fw_post_hook(mod, input, output)

    def _get_pop_fn(self, w_mod: Any, name: str, is_bw: bool) -> Any:
        leave = super()._get_pop_fn(w_mod, name, is_bw)
        return lambda *args: leave(*args) if name in self.parents else None


class Tracker(FSDPMemTracker):
    """Torch's tracker, with the phase of the step in which the peak was."""

    phase = "forward"
    phase_at_peak = ""

    def _update_peak_stats(self, peak_state: Any) -> None:
        before = dict(self._peak_mem)
        super()._update_peak_stats(peak_state)
        if self._peak_mem != before:
            self.phase_at_peak = self.phase

    def add_plain_parameters(self, root: torch.nn.Module) -> None:
        """Count those that every rank holds whole, which torch's own takes for activations."""
        for parameter in root.parameters():
            if not isinstance(parameter, DTensor):
                self._update_and_maybe_create_winfos(parameter, _FSDPRefType.SHARDED_PARAM)

    def _fsdp_param_group_post_backward(self, fsdp_mod: Any, reduce: Any) -> Any:
        """Torch's own holds the last parameter's gradient in a variable while it is reduced."""
        params = fsdp_mod._get_fsdp_state()._fsdp_param_group.fsdp_params

        def inner(*args: Any, **kwargs: Any) -> None:
            self._fsdp_state = _FSDPState.POST_BW
            reduce(*args, **kwargs)
            for param in params:
                if param.sharded_param.grad is not None:
                    self._update_and_maybe_create_winfos(
                        param.sharded_param.grad, _FSDPRefType.SHARDED_GRAD
                    )

        return inner

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        before, self.phase = self.phase, phase
        yield
        self.phase = before

    def total(self) -> int:
        return sum(kinds["Total"] for kinds in self.get_tracker_snapshot().values())


class StorageCount(TorchDispatchMode):
    """Bytes of the storages that operators return, until they are released, and of those that are
    there before. `watched` needs no more of a tracker."""

    def __init__(self) -> None:
        super().__init__()
        self.phase, self.phase_at_peak = "forward", ""
        self.live = self.peak = self.at_optimizer_step = 0
        self._seen: Any = WeakIdKeyDictionary()

    def add(self, tensor: Any) -> Any:
        if isinstance(tensor, torch.Tensor):
            storage = tensor.untyped_storage()
            if storage not in self._seen:
                self._seen[storage] = None
                self._change(storage.nbytes())
                weakref.finalize(storage, self._change, -storage.nbytes())
        return tensor

    def _change(self, nbytes: int) -> None:
        self.live += nbytes
        if self.live > self.peak:
            self.peak, self.phase_at_peak = self.live, self.phase

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return tree_map(self.add, operator(*args, **(kwargs or {})))

    def reset_mod_stats(self) -> None:
        """Nothing here belongs to a module."""

    def get_tracker_snapshot(self) -> dict[str, dict[str, int]]:
        return {"cpu": {"Total": self.live}}

    during = Tracker.during


def measure_whole(case: Case) -> StorageCount:
    """The second step of a `case` without FSDP2, counted; `at_optimizer_step` is what is alive when
    the optimizer begins."""
    with fake_ranks(1, 1) as ranks, FakeTensorMode(allow_non_fake_inputs=True):
        trainer = assemble(case, ranks)
        trainer.train_step(0, StepWindow(0.0))
        gc.collect()
        count, state = StorageCount(), dict[str, int]()
        apart = mock.patch.object(nf4, "nf4_linear", ProductTakenApart.apply)
        weights = vars(trainer.root)["whole_weights"]
        copies = (weights._copies or {}).values()
        with apart, count, watched(trainer, count, state):
            for moments in trainer.optimizer.optimizer.state.values():
                tree_map(count.add, moments)
            for tensor in (*trainer.root.parameters(), *trainer.root.buffers(), *copies):
                count.add(tensor)
            trainer.train_step(1, StepWindow(0.0))
        count.at_optimizer_step = state["Total"]
        return count


def measure(case: Case) -> Measured:
    """The second step of `case` under torch's tracker."""
    with (
        fake_ranks(case.shard, case.replicate) as ranks,
        FakeTensorMode(allow_non_fake_inputs=True),
    ):
        trainer = assemble(case, ranks)
        trainer.train_step(0, StepWindow(0.0))
        # Sharding leaves reference cycles; the trainer collects them before its first step.
        gc.collect()
        tracker = Tracker(trainer.root, trainer.optimizer.optimizer)
        tracker._mod_tracker = Modules()
        state: dict[str, int] = {}
        apart = mock.patch.object(nf4, "nf4_linear", ProductTakenApart.apply)
        with apart, tracker, watched(trainer, tracker, state):
            tracker.add_plain_parameters(trainer.root)
            trainer.train_step(1, StepWindow(0.0))
        (peak,) = tracker.get_tracker_snapshot("peak").values()
        kinds = {getattr(kind, "value", kind): nbytes for kind, nbytes in peak.items()}
        return Measured(
            kinds.pop("Total"),
            kinds,
            tracker.phase_at_peak,
            state["Sharded Param"],
            state["Sharded Grad"],
            state["OptState"],
            state["Total"],
        )


class ProductTakenApart(torch.autograd.Function):
    """`nf4_linear` in the operators that it has inside, into which the tracker does not look."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.save_for_backward(packed)
        return torch.nn.functional.linear(x, nf4.unpack_nf4(packed, x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0] @ nf4.unpack_nf4(*ctx.saved_tensors, gradients[0].dtype), None, None


@contextlib.contextmanager
def watched(trainer: Trainer, tracker: Any, state: dict[str, int]) -> Iterator[None]:
    """Tell the tracker where the step is, and keep what it counts when the optimizer begins."""
    between, update, apply_loss = (
        trainer.synchronise_gradients,
        trainer.optimizer.step,
        loss_room._LossWithGradients.apply,
    )
    backward = torch.Tensor.backward

    def at_micro_batch(*, last: bool) -> None:
        # The tracker takes a second forward of a module for a mistake otherwise.
        tracker.reset_mod_stats()
        between(last=last)

    def at_loss(*args: Any) -> Any:
        with tracker.during("loss"):
            return apply_loss(*args)

    def at_backward(loss: torch.Tensor) -> None:
        with tracker.during("backward"):
            backward(loss)

    def at_optimizer_step(*args: Any) -> Any:
        (kinds,) = tracker.get_tracker_snapshot().values()
        state.update({getattr(kind, "value", kind): nbytes for kind, nbytes in kinds.items()})
        with tracker.during("optimizer step"):
            return update(*args)

    with (
        contextlib.nullcontext() if case_is_whole(trainer) else at_last_reduction(trainer, tracker),
        mock.patch.object(trainer, "synchronise_gradients", at_micro_batch),
        mock.patch.object(trainer.optimizer, "step", at_optimizer_step),
        mock.patch.object(loss_room._LossWithGradients, "apply", at_loss),
        mock.patch.object(torch.Tensor, "backward", at_backward),
    ):
        yield


def case_is_whole(trainer: Trainer) -> bool:
    return not isinstance(trainer.root, FSDPModule)


@contextlib.contextmanager
def at_last_reduction(trainer: Trainer, tracker: Any) -> Iterator[None]:
    """Tell the tracker when FSDP2 reduces what it has left to the end of backward."""
    root: Any = trainer.root
    state = root._get_fsdp_state()
    finish = state._root_post_backward_final_callback

    def reduce() -> None:
        with tracker.during("last reduction"):
            finish()

    with mock.patch.object(state, "_root_post_backward_final_callback", reduce):
        yield


def specification(case: Case) -> ModelSpec:
    """The model of a case as the estimate knows it."""
    return model_spec(
        {
            ("model_type" if key == "architecture" else key): value
            for key, value in case.model.items()
        }
    )


def setup_of(case: Case) -> Setup:
    """The case as the estimate takes it."""
    kernel: Any = case.attention
    precision: Any = case.precision
    checkpointing: Any = case.checkpointing
    return Setup(
        spec=specification(case),
        precision=precision,
        sequence_length=case.sequence_length,
        micro_batch_size=case.micro_batch_size,
        gradient_accumulation=case.accumulation,
        activation_checkpointing=checkpointing,
        shard=case.shard,
        replicate=case.replicate,
        gpus_per_node=8,
        kernel=kernel,
        compiled=False,
        loss_chunk_tokens=resolve_loss_chunk(
            case.sequence_length * case.micro_batch_size, case.chunk
        ),
        clips_gradients=case.clipping is not None,
        adapters=lora_setup(LoraConfig(**case.lora)) if case.lora else None,
        quantized=case.quantization is not None,
        keeps_unsharded=case.keeps_unsharded,
        keeps_frozen_whole=case.frozen_whole,
        device_type="cpu",
    )
