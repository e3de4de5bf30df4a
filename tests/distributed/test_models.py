"""Models sharded over gloo ranks: initialised, loaded and exported to the same bits as in one
process."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.distributed.ranks import run_ranks
from tests.unit.models.tiny import CONFIGS, meta_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from drillyard.errors import UserError
from drillyard.models.architectures import blocks
from drillyard.models.export import export
from drillyard.models.loss import head_logits
from drillyard.models.pretrained import load_pretrained
from drillyard.models.random_init import init_random
from drillyard.models.sharding import holders, local_region
from drillyard.safe_files import ChecksummedFile

# One architecture per kind of weights: untied, tied with transposed matrices, a mixture, norms
# centred on zero.
KINDS = ["llama", "gpt2", "mixtral", "gemma3_text"]


def sharded(architecture: str, mesh_shape: tuple[int, ...], **changes: Any) -> PreTrainedModel:
    """A model sharded as the trainer does it, its memory NaN everywhere; (copies, shards) is
    HSDP."""
    names = ("shard",) if len(mesh_shape) == 1 else ("replicate", "shard")
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
    model = meta_model(architecture, **changes)
    for block in blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(math.nan)
    return model


def assert_whole_equals(model: PreTrainedModel, expected: PreTrainedModel, what: str) -> None:
    wanted = expected.state_dict()
    found = model.state_dict()
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        assert torch.equal(whole, wanted[name]), f"{what}: {name}"
    buffers = dict(expected.named_buffers())
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, buffers[name]), f"{what}: {name}"


def initialise_export_load(
    mesh_shape: tuple[int, ...], folder: Path, architecture: str, **changes: Any
) -> None:
    alone = meta_model(architecture, **changes).to_empty(device="cpu")
    init_random(alone, seed=3)
    model = sharded(architecture, mesh_shape, **changes)
    init_random(model, seed=3)
    assert_whole_equals(model, alone, f"{architecture} initialised")
    for name, parameter in model.named_parameters():
        assert torch.equal(
            parameter.to_local(), parameter.full_tensor()[local_region(parameter)]
        ), name
        covered = sum(
            math.prod(part.stop - part.start for part in held) for _, held in holders(parameter)
        )
        assert covered == parameter.numel(), name

    export(model, folder / "ours", max_file_bytes=20_000)
    if dist.get_rank() == 0:
        read = AutoModelForCausalLM.from_pretrained(folder / "ours")
        assert_whole_equals(read, alone, f"{architecture} exported")
        read.save_pretrained(folder / "theirs", max_shard_size="20KB")
    dist.barrier()
    loaded = sharded(architecture, mesh_shape, **changes)
    load_pretrained(loaded, folder / "theirs")
    assert_whole_equals(loaded, alone, f"{architecture} loaded")


def every_architecture(folder: str) -> None:
    for architecture in CONFIGS:
        initialise_export_load((2,), Path(folder, architecture), architecture)


def every_mesh(folder: str) -> None:
    # Parts of a few rows, as they are of large tensors.
    sys.modules["drillyard.models.export"].LARGEST_PART_BYTES = 700
    for mesh_shape in ((4,), (2, 2)):
        for architecture in KINDS:
            initialise_export_load(
                mesh_shape, Path(folder, str(mesh_shape), architecture), architecture
            )
    # 50 rows over 4 ranks are 13, 13, 13 and 11; of 3 experts the last rank has none.
    for architecture, changes in (
        ("llama", {"vocab_size": 50}),
        ("mixtral", {"num_local_experts": 3}),
    ):
        initialise_export_load((4,), Path(folder, "uneven", architecture), architecture, **changes)


def test_init_export_and_load_equal_one_process_to_the_bit_for_every_architecture(
    tmp_path: Path,
) -> None:
    run_ranks(every_architecture, 2, str(tmp_path))


def test_init_export_and_load_equal_one_process_to_the_bit_on_four_ranks_and_under_hsdp(
    tmp_path: Path,
) -> None:
    run_ranks(every_mesh, 4, str(tmp_path))


def files_by_rank(folder: str) -> dict[str, Any]:
    """Export on two ranks, recording which files this rank opened for writing."""
    model = sharded("llama", (2,))
    init_random(model, seed=0)
    opened: list[str] = []

    class RecordedFile(ChecksummedFile):
        def __init__(self, path: Path) -> None:
            if (name := path.name.removesuffix(".incomplete")).endswith(".safetensors"):
                opened.append(name)
            super().__init__(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("drillyard.models.export.ChecksummedFile", RecordedFile)
        export(model, folder, max_file_bytes=20_000)
    return {"opened": opened, "bf16": export_half(model, folder)}


def export_half(model: PreTrainedModel, folder: str) -> bool:
    export(model, f"{folder}-half", dtype=torch.bfloat16)
    read = AutoModelForCausalLM.from_pretrained(f"{folder}-half", dtype="auto").state_dict()
    whole = {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}
    return all(torch.equal(read[name], tensor.to(torch.bfloat16)) for name, tensor in whole.items())


def test_files_are_spread_over_the_ranks(tmp_path: Path) -> None:
    results = run_ranks(files_by_rank, 2, str(tmp_path / "model"))
    written = [result["opened"] for result in results]
    everything = sorted(path.name for path in (tmp_path / "model").glob("*.safetensors"))
    assert sorted(written[0] + written[1]) == everything
    assert abs(len(written[0]) - len(written[1])) <= 1
    assert all(result["bf16"] for result in results)


def export_with_a_full_disk(folder: str) -> str:
    import os

    model = sharded("llama", (2,))
    init_random(model, seed=0)
    if dist.get_rank() == 1:

        def full_disk(descriptor: int) -> None:
            raise OSError(28, "No space left on device")

        os.fsync = full_disk
    try:
        export(model, folder, max_file_bytes=20_000)
    except UserError as error:
        return str(error)
    return "no error"


def test_a_full_disk_on_one_rank_is_reported_on_all_and_none_waits(tmp_path: Path) -> None:
    messages = run_ranks(export_with_a_full_disk, 2, str(tmp_path / "model"))
    assert all("No space left" in message for message in messages)
    assert list(tmp_path.iterdir()) == []


class Root(torch.nn.Module):
    """A root as the trainer's: the model's forward is not called, only its halves."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        from torch.utils.checkpoint import checkpoint

        return torch.cat(
            [
                checkpoint(head_logits, self.model, part, use_reentrant=False)
                for part in rows.split(3)
            ]
        )


def head_under_fsdp() -> list[tuple[str, float]]:
    differences = []
    for architecture in ("llama", "gemma3_text", "cohere"):
        alone = meta_model(architecture).to_empty(device="cpu")
        init_random(alone, seed=3)
        rows = torch.randn(8, 32, generator=torch.Generator().manual_seed(0))
        head_logits(alone, rows).square().sum().backward()
        root = Root(meta_model(architecture))
        for block in blocks(root.model):
            fully_shard(block)
        fully_shard(root, reshard_after_forward=False)
        root.to_empty(device="cpu")
        init_random(root.model, seed=3)
        assert torch.equal(
            root(rows), torch.cat([head_logits(alone, part) for part in rows.split(3)])
        )
        root(rows).square().sum().backward()
        gradient = root.model.lm_head.weight.grad.full_tensor()
        differences.append(
            (architecture, float((gradient - alone.lm_head.weight.grad).abs().max()))
        )
    return differences


def test_the_head_works_under_checkpointing_inside_a_sharded_roots_forward() -> None:
    for result in run_ranks(head_under_fsdp, 2):
        for architecture, difference in result:
            assert difference < 1e-6, architecture
