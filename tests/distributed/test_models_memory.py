"""A model of 1 GB on four ranks: no rank ever holds much more than its shard, in initialisation,
load and export.

Load and export are bounded with the process's own imports (about 0.4 GB with a CUDA build of torch)
counted in. Beside adapters the frozen weights take nothing at all on a CPU, in load and steps.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from pathlib import Path

import torch
from tests.distributed import training_case
from tests.distributed.adapter_case import adapter_config, write_base
from tests.distributed.ranks import run_ranks
from tests.distributed.training_case import build, run_steps
from torch.distributed.fsdp import fully_shard

from drillyard.config.run_model import ModelConfig
from drillyard.models.architectures import blocks
from drillyard.models.export import export
from drillyard.models.meta_model import build_model
from drillyard.models.pretrained import load_pretrained
from drillyard.models.random_init import init_random

GIGABYTE = 1e9
ALLOWANCE_BYTES = 0.3 * GIGABYTE
WORLD_SIZE = 4
# 250 million parameters: 1.0 GB in fp32.
CONFIG = {
    "architecture": "llama",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 24_000,
}
# 168 MB in bf16, 34 MB of it in a block.
FROZEN = CONFIG | {"num_hidden_layers": 5, "tie_word_embeddings": True}


def private_bytes() -> int:
    """RssAnon of this process: resident memory that no file backs."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon in /proc/self/status")


class PrivatePeak:
    """The largest private memory of this process while the context is open, sampled every two
    milliseconds."""

    def __enter__(self) -> PrivatePeak:
        self.peak = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def _sample(self) -> None:
        while not self._stop.is_set():
            self.peak = max(self.peak, private_bytes())
            time.sleep(0.002)

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()


def sharded_empty() -> torch.nn.Module:
    model = build_model(
        ModelConfig(config=CONFIG, init="random"),
        vocab_size=None,
        dtype=torch.float32,
        attention="sdpa",
        sequence_length=128,
    )
    for block in blocks(model):
        fully_shard(block)
    fully_shard(model)
    return model.to_empty(device="cpu")


def peaks(folder: str) -> dict[str, float]:
    """Peak private bytes of this rank, imports included, in each phase."""
    found: dict[str, float] = {"imports": private_bytes()}
    model = sharded_empty()
    found["shard"] = sum(parameter.to_local().nbytes for parameter in model.parameters())
    with PrivatePeak() as sampled:
        init_random(model, seed=0)
    found["init"] = sampled.peak
    found["after init"] = private_bytes()
    with PrivatePeak() as sampled:
        export(model, folder)
    found["export"] = sampled.peak
    checksum = [float(parameter.detach().to_local().sum()) for parameter in model.parameters()]
    # FSDP2 keeps modules in reference cycles: without a collection both models are there.
    del model
    gc.collect()
    model = sharded_empty()
    with PrivatePeak() as sampled:
        load_pretrained(model, folder)
    found["load"] = sampled.peak
    assert checksum == [
        float(parameter.detach().to_local().sum()) for parameter in model.parameters()
    ]
    return found


def test_private_memory_of_each_rank_is_bounded_by_its_shard_one_file_and_the_allowance(
    tmp_path: Path,
) -> None:
    results = run_ranks(peaks, WORLD_SIZE, str(tmp_path / "model"))
    files = [path.stat().st_size for path in (tmp_path / "model").glob("*.safetensors")]
    assert sum(files) > GIGABYTE
    assert len(files) >= WORLD_SIZE
    for found in results:
        print({name: f"{value / GIGABYTE:.3f} GB" for name, value in found.items()})
        assert found["shard"] < 1.01 * sum(files) / WORLD_SIZE
        for phase in ("export", "load"):
            assert found[phase] < found["shard"] + max(files) + ALLOWANCE_BYTES, (phase, found)
        assert found["init"] - found["imports"] < found["shard"] + ALLOWANCE_BYTES, found


def growth_beside_adapters(directory: str) -> tuple[int, int]:
    """(the most private bytes that load and two steps add on this rank, 16 bytes per adapter
    parameter)."""
    import drillyard.models.adapters  # noqa: F401 (what it imports is no part of the growth)

    training_case.unset_memory_is_nan = contextlib.nullcontext  # type: ignore[assignment]
    config = adapter_config(
        Path(directory),
        # Longer, products in bf16 take a CPU without instructions for them minutes.
        data__sequence_length=16,
        training__precision="bf16",
        training__steps=2,
        training__activation_checkpointing="full",
    )
    before = private_bytes()
    with PrivatePeak() as sampled:
        trainer, model = build(config)
        run_steps(trainer, 0, 2)
    trained = sum(
        parameter.numel() for parameter in model.root.parameters() if parameter.requires_grad
    )
    return sampled.peak - before, 16 * trained


def test_frozen_weights_beside_adapters_take_no_private_memory(tmp_path: Path) -> None:
    write_base(tmp_path, FROZEN, torch.bfloat16)
    base_bytes = sum(path.stat().st_size for path in (tmp_path / "base").glob("*.safetensors"))
    assert base_bytes > 160e6
    for growth, adapters in run_ranks(growth_beside_adapters, 2, str(tmp_path)):
        # Less than a shard of them.
        assert growth < adapters + base_bytes / 2, (growth, adapters)
