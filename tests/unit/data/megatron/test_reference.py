"""Files and orders against those of megatron-core 0.16.1, kept in `reference/` with the script that
made them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from drillyard.data.mapped_sequences import IGNORED
from drillyard.data.megatron.indexed_file import IndexedFileWriter, open_indexed
from drillyard.data.megatron.sample_order import (
    blend,
    sample_order,
    samples_of_sources,
    split_bounds,
)
from drillyard.data.megatron.sequences import CutSettings, MegatronSequences

REFERENCE = Path(__file__).parent / "reference"
ORDERS = np.load(REFERENCE / "orders.npz")
LENGTH = 32
SEED = 1234
WEIGHTS = [0.5, 0.3, 0.2]
CASES = {
    "a": (1000, "100,0,0"),
    "a-one-epoch": (1, "100,0,0"),
    "a-whole-last-epoch": (330, "100,0,0"),
    "a-split": (1000, "80,15,5"),
    "c": (1000, "100,0,0"),
}


def sequences(
    name: str, num_samples: int, split: str = "100,0,0", *, isolated: bool = False
) -> MegatronSequences:
    file = open_indexed(REFERENCE / f"{name}.bin", REFERENCE / f"{name}.idx")
    bounds = split_bounds(split, "train", len(file.lengths))
    order = sample_order(file.lengths, *bounds, LENGTH, num_samples, SEED)
    return MegatronSequences(name, "key", file, bounds, CutSettings(LENGTH, isolated, 0), order)


@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_writer_makes_the_bytes_of_megatron(name: str, tmp_path: Path) -> None:
    file = open_indexed(REFERENCE / f"{name}.bin", REFERENCE / f"{name}.idx")
    with IndexedFileWriter(tmp_path / name, 100_000 if name == "b" else 300) as writer:
        half = int(file.offsets[45]) // file.tokens.itemsize
        writer.add(file.tokens[:half], file.lengths[:45])
        writer.add(file.tokens[half:], file.lengths[45:])
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"{name}{suffix}").read_bytes() == (
            REFERENCE / f"{name}{suffix}"
        ).read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{name}.bin", f"{name}.idx"]


@pytest.mark.parametrize("case", CASES)
def test_orders_are_those_of_megatron(case: str) -> None:
    num_samples, split = CASES[case]
    file = open_indexed(REFERENCE / f"{case[0]}.bin", REFERENCE / f"{case[0]}.idx")
    order = sample_order(
        file.lengths, *split_bounds(split, "train", len(file.lengths)), LENGTH, num_samples, SEED
    )
    assert (
        order.documents.dtype == np.int32 and order.samples.dtype == ORDERS[f"{case}.order"].dtype
    )
    np.testing.assert_array_equal(order.documents, ORDERS[f"{case}.documents"])
    np.testing.assert_array_equal(order.samples, ORDERS[f"{case}.order"])
    # Megatron's sample index has (document of the stream, token in it) of each cut; ours are
    # multiples of the length.
    ends = np.cumsum(file.lengths[order.documents], dtype=np.int64)
    begins = (ends - file.lengths[order.documents])[ORDERS[f"{case}.samples"][:, 0]] + ORDERS[
        f"{case}.samples"
    ][:, 1]
    np.testing.assert_array_equal(begins, np.arange(len(order.samples) + 1) * LENGTH)


@pytest.mark.parametrize("case", CASES)
def test_samples_have_the_tokens_of_megatron(case: str) -> None:
    num_samples, split = CASES[case]
    reference = ORDERS[f"{case}.tokens"]
    assert len(reference) >= min(num_samples, 1000)
    samples = sequences(case[0], num_samples, split)
    np.testing.assert_array_equal(
        [samples.tokens(index) for index in range(len(reference))], reference
    )


def test_blend_of_three_is_that_of_megatron() -> None:
    sources = blend(WEIGHTS, 1000)
    rows = np.zeros(1000, np.int64)
    for number in range(3):
        rows[sources == number] = np.arange((sources == number).sum())
    np.testing.assert_array_equal(sources, ORDERS["blend.sources"])
    np.testing.assert_array_equal(rows, ORDERS["blend.rows"])
    parts = [
        sequences(name, wanted)
        for name, (_, wanted) in zip("abc", samples_of_sources(WEIGHTS, 1000), strict=True)
    ]
    tokens = [parts[source].tokens(row) for source, row in zip(sources, rows, strict=True)]
    np.testing.assert_array_equal(tokens, ORDERS["blend.tokens"])


def test_a_batch_without_isolation_learns_every_label() -> None:
    batch = sequences("a", 1000).read(range(50))
    expected: npt.NDArray[np.uint16] = ORDERS["a.tokens"][:50]
    np.testing.assert_array_equal(batch.input_ids, expected[:, :-1])
    np.testing.assert_array_equal(batch.labels, expected[:, 1:])
    assert (batch.document_ids == 0).all()
    assert (batch.position_ids == np.arange(LENGTH)).all()


@pytest.mark.parametrize("name", ["a", "c"])
def test_isolated_documents_do_not_predict_each_other(name: str) -> None:
    samples = sequences(name, 1000, isolated=True)
    file = open_indexed(REFERENCE / f"{name}.bin", REFERENCE / f"{name}.idx")
    order = sample_order(file.lengths, 0, len(file.lengths), LENGTH, 1000, SEED)
    documents = np.repeat(np.arange(len(order.documents)), file.lengths[order.documents])
    batch = samples.read(range(200))
    for number in range(200):
        begin = int(order.samples[number]) * LENGTH
        of = documents[begin : begin + LENGTH + 1]
        learnt = of[:-1] == of[1:]
        np.testing.assert_array_equal(batch.labels[number] != IGNORED, learnt)
        assert samples.valid_tokens[number] == learnt.sum()
        np.testing.assert_array_equal(
            batch.labels[number][learnt], ORDERS[f"{name}.tokens"][number][1:][learnt]
        )
        starts = np.append(True, of[1:-1] != of[:-2])
        np.testing.assert_array_equal(batch.document_ids[number], np.cumsum(starts) - 1)
        np.testing.assert_array_equal(batch.position_ids[number] == 0, starts)
