"""Make the reference files of this directory with megatron-core 0.16.1, which no test needs.

    pip install --no-deps --target DIRECTORY megatron-core==0.16.1
    PYTHONPATH=DIRECTORY python tests/unit/data/megatron/reference/make.py

Three data sets `a`, `b`, `c` (.bin and .idx), and in `orders.npz` what megatron-core's GPTDataset
and BlendedDataset make of them: the stream's documents, the beginning of each sample, the order of
samples, the blend and its samples.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

HERE = Path(__file__).resolve().parent
DTYPES = {"a": np.uint16, "b": np.int32, "c": np.uint16}
LENGTH = 32
WEIGHTS = [0.5, 0.3, 0.2]
SAMPLES = 1000


def documents(name: str) -> list[np.ndarray]:
    """Documents of 1 to 120 tokens below 300; `c` has documents of no token too."""
    random = np.random.default_rng(ord(name))
    lengths = random.integers(0 if name == "c" else 1, {"a": 120, "b": 60, "c": 9}[name], 90)
    return [random.integers(0, 300, length).astype(DTYPES[name]) for length in lengths]


def build(
    prefixes: list[str], weights: list[float] | None, samples: int | None, split: str
) -> object:
    import tempfile

    config = GPTDatasetConfig(
        random_seed=1234,
        sequence_length=LENGTH,
        blend=([str(HERE / prefix) for prefix in prefixes], weights),
        split=split,
        path_to_cache=tempfile.mkdtemp(),
        tokenizer=SimpleNamespace(eod=0, vocab_size=None, pad=-1, unique_identifiers={}),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
    )
    sizes = [samples, None if samples is None else 0, None if samples is None else 0]
    return BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()[0]


def main() -> None:
    for name, dtype in DTYPES.items():
        builder = IndexedDatasetBuilder(str(HERE / f"{name}.bin"), dtype=dtype)
        for document in documents(name):
            builder.add_document(document, [len(document)])
        builder.finalize(str(HERE / f"{name}.idx"))
    orders = {}
    for case, (samples, split) in CASES.items():
        made = build([case[0]], None, samples, split)
        orders |= {
            f"{case}.documents": made.document_index,
            f"{case}.samples": made.sample_index,
            f"{case}.order": made.shuffle_index,
            f"{case}.tokens": tokens(
                made, SAMPLES if samples is None or samples > SAMPLES else samples
            ),
        }
    blended = build(list(DTYPES), WEIGHTS, SAMPLES, "100,0,0")
    orders |= {
        "blend.sources": blended.dataset_index[:SAMPLES],
        "blend.rows": blended.dataset_sample_index[:SAMPLES],
        "blend.tokens": tokens(blended, SAMPLES),
    }
    np.savez_compressed(HERE / "orders.npz", **orders)


CASES = {
    "a": (SAMPLES, "100,0,0"),
    "a-one-epoch": (None, "100,0,0"),
    "a-whole-last-epoch": (330, "100,0,0"),
    "a-split": (SAMPLES, "80,15,5"),
    "c": (SAMPLES, "100,0,0"),
}


def tokens(made: object, count: int) -> np.ndarray:
    """Tokens of the first samples, T + 1 each."""
    rows = [made[number] for number in range(min(count, len(made)))]
    return np.stack(
        [np.append(row["tokens"].numpy(), row["labels"][-1].item()) for row in rows]
    ).astype(np.uint16)


if __name__ == "__main__":
    import torch

    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    main()
