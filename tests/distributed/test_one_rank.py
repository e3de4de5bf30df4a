"""One rank that holds its weights whole trains as FSDP2 does among one rank: losses, gradient norms
and weights to the bit, and checkpoints that either continues."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.distributed.adapter_case import LORA, adapter_config, write_base
from tests.distributed.ranks import run_ranks
from tests.distributed.training_case import (
    LLAMA,
    build,
    full_parameters,
    make_config,
    resume_from,
    run_steps,
    start_save,
    write_documents,
)

from drillyard.data.mapped_sequences import Batch
from drillyard.estimation.memory.fsdp import REWRITTEN_IN
from drillyard.estimation.setup import installed_torch
from drillyard.evaluation.held_out_loss import evaluate_loss
from drillyard.parallel import parallelize
from drillyard.parallel.parallelize import fsdp_modules
from drillyard.training import optimizer

STEPS = 6
SMALL_EXPERTS = LLAMA | {
    "architecture": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
BF16 = {"training__precision": "bf16", "training__global_batch_size": 1}
CASES: dict[str, dict[str, Any]] = {
    "bf16": BF16,
    "bf16-tied": BF16 | {"model__config": LLAMA | {"tie_word_embeddings": True}},
    "bf16-experts": BF16 | {"model__config": SMALL_EXPERTS},
    "bf16-recomputed": BF16 | {"training__activation_checkpointing": "full"},
    "bf16-partly-recomputed": BF16 | {"training__activation_checkpointing": "selective"},
    "bf16-four-micro-batches": {"training__precision": "bf16"},
    "fp32": {"training__precision": "fp32"},
    "fp64": {},
}
ADAPTERS: dict[str, dict[str, Any]] = {
    "adapters": {},
    "adapters-with-magnitudes": {"model__lora": LORA | {"variant": "dora"}},
    "adapters-on-nf4": {
        "model__quantization": "nf4",
        "model__lora": LORA | {"target_modules": ["q_proj", "v_proj"]},
    },
}


def config_of(directory: str, name: str) -> Any:
    if name in ADAPTERS:
        return adapter_config(Path(directory), **(BF16 | ADAPTERS[name]))
    return make_config(Path(directory), **CASES[name])


SUMS_DIFFER_BY = 0.02
"""The most that a loss or a norm differs by where `sums_differ`; measured: 0.004."""


def sums_differ(name: str) -> bool:
    """Whether FSDP2 of the installed torch leaves the sums of the head's gradient in bf16, where a
    rank that is alone has them in fp32."""
    return name.startswith("bf16") and installed_torch() < REWRITTEN_IN


def with_fsdp2() -> None:
    parallelize.holds_whole = lambda *_, **__: False


def trained(directory: str, name: str, *, whole: bool) -> tuple[np.ndarray, dict[str, Any]]:
    """Losses and norms of some steps with an evaluation between them, and the weights after
    them."""
    if not whole:
        with_fsdp2()
    trainer, model = build(config_of(directory, name))
    assert bool(fsdp_modules(model.root)) != whole
    first = run_steps(trainer, 0, STEPS // 2)
    rows = trainer.data.read(trainer.data.indices(0, trainer.shape))
    held_out = evaluate_loss(
        model.root,
        _Rows(rows),
        trainer.ranks,
        attention=model.attention,
        batch_size=1,
        limit=None,
        chunk_tokens=None,
    )["loss"]
    second = run_steps(trainer, STEPS // 2, STEPS)
    figures = np.concatenate([first, second, [[held_out, 0.0]]])
    return figures, {n: p.detach().clone() for n, p in full_parameters(model.root).items()}


class _Rows:
    """The sequences of a batch as an evaluation reads them."""

    document_bytes = None

    def __init__(self, batch: Batch) -> None:
        self.batch = batch

    def __len__(self) -> int:
        return len(self.batch.labels)

    def read(self, indices: np.ndarray) -> Batch:
        return self.batch.rows(indices)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = tmp_path_factory.mktemp("one-rank")
    write_documents(made)
    write_base(made, LLAMA | {"hidden_size": 64}, dtype=torch.bfloat16)
    return str(made)


def both_ways(directory: str, name: str) -> list[Any]:
    """What training gives without FSDP2 and with it."""
    return [trained(directory, name, whole=whole) for whole in (True, False)]


@pytest.mark.parametrize("name", [*CASES, *ADAPTERS])
def test_whole_weights_train_as_fsdp2_to_the_bit(directory: str, name: str) -> None:
    (figures, weights), (expected, expected_weights) = run_ranks(both_ways, 1, directory, name)[0]
    assert weights.keys() == expected_weights.keys()
    if sums_differ(name):
        assert np.abs(figures - expected).max() < SUMS_DIFFER_BY
        return
    assert figures.tolist() == expected.tolist()
    for key, weight in weights.items():
        assert weight.dtype == expected_weights[key].dtype, key
        # As bytes: nf4 rests in bf16 tensors, where some of it looks like NaN.
        assert torch.equal(weight.view(torch.uint8), expected_weights[key].view(torch.uint8)), key


def with_the_kernel(directory: str, name: str) -> list[Any]:
    """What training gives with torch's AdamW, and with the kernel of GPUs, interpreted; whether its
    masters still are those whose copies it has written."""
    expected = trained(directory, name, whole=True)
    optimizer._fits_one_pass = lambda *_: True
    found = trained(directory, name, whole=True)
    trainer, model = build(config_of(directory, name))
    assert trainer.optimizer.one_pass
    run_steps(trainer, 0, 2)
    whole = vars(model.root)["whole_weights"]
    stale = [each for each in whole.copies if whole._written.get(each) != each._version]
    apart = [float((c - m).abs().max() / m.abs().max()) for m, c in whole.copies.items()]
    master = next(iter(whole.copies), None)
    if master is not None:
        with torch.no_grad():
            master.fill_(2.0)
        whole.use()
        assert whole.copies[master].eq(2.0).all()
    return [expected, found, len(whole.copies), len(stale), max(apart, default=0.0)]


@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_the_optimizer_of_gpus_trains_as_that_of_torch(
    directory: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It writes the copies itself, and what something else changes is copied as before."""
    pytest.importorskip("triton", reason="comes with builds of torch for GPUs")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    (figures, weights), (found, found_weights), copies, stale, apart = run_ranks(
        with_the_kernel, 1, directory, name
    )[0]
    assert stale == 0
    if name == "bf16":
        # The interpreter cuts bf16 where a GPU rounds.
        assert copies == len(weights)
        assert 0 < apart < 2**-7
        np.testing.assert_allclose(found, figures, rtol=0.05)
        return
    assert copies == 0
    np.testing.assert_allclose(found, figures, rtol=1e-5)
    for key, weight in weights.items():
        torch.testing.assert_close(found_weights[key], weight, rtol=1e-4, atol=1e-6)


def first_half(directory: str, name: str, folder: str, fsdp2: bool) -> list[Any]:
    """Train half of the steps, save, and train the other half: its figures."""
    if fsdp2:
        with_fsdp2()
    trainer, _ = build(config_of(directory, name))
    run_steps(trainer, 0, STEPS // 2)
    start_save(trainer, STEPS // 2, folder).close()
    return run_steps(trainer, STEPS // 2, STEPS).tolist()


def second_half(directory: str, name: str, folder: str, fsdp2: bool) -> list[Any]:
    """The second half of the steps from what was saved."""
    if fsdp2:
        with_fsdp2()
    trainer, _ = build(config_of(directory, name), filled=False)
    assert resume_from(trainer, folder) == STEPS // 2
    return run_steps(trainer, STEPS // 2, STEPS).tolist()


@pytest.mark.parametrize("name", ["bf16-tied", "fp32"])
@pytest.mark.parametrize("first_has_fsdp2", [False, True])
def test_a_checkpoint_continues_with_and_without_fsdp2(
    directory: str, tmp_path: Path, first_has_fsdp2: bool, name: str
) -> None:
    case = directory, name, str(tmp_path)
    expected = run_ranks(first_half, 1, *case, first_has_fsdp2)
    found = run_ranks(second_half, 1, *case, not first_has_fsdp2)
    if sums_differ(name):
        # Loading is exact there, too: so is the first loss after it.
        assert found[0][0][0] == expected[0][0][0]
        assert np.abs(np.subtract(found, expected)).max() < SUMS_DIFFER_BY
        return
    assert found == expected


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_a_checkpoint_continues_on_another_number_of_ranks(
    directory: str, tmp_path: Path, before: int, after: int
) -> None:
    case = directory, "fp64", str(tmp_path)
    expected = run_ranks(first_half, before, *case, False)[0]
    found = run_ranks(second_half, after, *case, False)[0]
    assert np.abs(np.subtract(found, expected)).max() < 1e-12
