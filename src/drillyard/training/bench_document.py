"""What `drillyard bench` measured: the JSON document, whose schema `drillyard schema bench` prints,
and the same as text. Without torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from pydantic import Field

from drillyard.formatting import percent, plural
from drillyard.json_document import DocumentPart, Number

VERSION: Final = 1


class FlopsEntry(DocumentPart):
    """Speed by one formula of FLOPs per token."""

    formula: str
    tflops_per_rank: Number
    mfu: Number | None = Field(
        description="Over the accelerator's dense peak; null: no peak is on record."
    )


class MemoryUse(DocumentPart):
    """Memory of the rank that needed most, beside the estimate made before."""

    peak_gib: Number
    measured_as: str
    predicted_low_gib: Number | None
    predicted_high_gib: Number | None
    available_gib: Number


class RatesEntry(DocumentPart):
    """What the device reaches alone, measured before the model was built."""

    product_tflops: Number = Field(description="A large product in the compute precision.")
    copy_gb_per_s: Number = Field(description="A large copy: bytes read plus bytes written.")
    fp8_product_tflops: Number | None = Field(
        default=None,
        description="A large product in fp8; null: the run has none, or they are emulated.",
    )


class PartEntry(DocumentPart):
    """A part of the step: medians over the measured steps, of the mean over ranks."""

    part: str
    seconds: Number
    roofline_seconds: Number | None = Field(
        description="FLOPs over the product's rate plus bytes over the copy's; null: no bound."
    )
    flops: Number | None
    moved_bytes: Number | None


class BenchDocument(DocumentPart):
    """A measured training step. Within one version fields may be added."""

    version: int
    name: str
    device: str = Field(description="GPU by its driver's name, or cpu.")
    accelerator: str | None = Field(description="Its row in the catalog, if it has one.")
    ranks: int
    steps: int
    warmup: int
    parameters: int
    tokens_per_step_per_rank: int
    step_seconds: Number = Field(description="Median.")
    slowest_step_seconds: Number
    tokens_per_second_per_rank: Number
    speeds: list[FlopsEntry]
    memory: MemoryUse
    rates: RatesEntry
    parts: list[PartEntry]
    idle_seconds: Number | None = Field(
        description="Of one profiled step, when no kernel ran; null on a CPU."
    )
    settings: dict[str, Any] = Field(description="Open settings as they were resolved.")
    trace: str | None
    notes: list[str]

    def text(self) -> Iterator[str]:
        """The lines for people."""
        where = f"{plural(self.ranks, 'rank')} of {self.device}"
        yield (
            f"{self.name}: {self.tokens_per_step_per_rank:,} tokens a step and rank on {where},"
            f" {plural(self.steps, 'step')} after {self.warmup}"
        )
        yield (
            f"speed    {self.tokens_per_second_per_rank:,.0f} tokens/s per rank; a step takes"
            f" {self.step_seconds:.4g} s (median; slowest {self.slowest_step_seconds:.4g} s)"
        )
        yield f"MFU      {self._mfu_words()}"
        yield f"memory   {self._memory_words()}"
        yield (
            f"device   {self.rates.product_tflops:.4g} TFLOP/s in a large product,"
            f" {self.rates.copy_gb_per_s:.4g} GB/s in a large copy: the roofline is made of these"
        )
        yield from self._table()
        if self.idle_seconds is not None:
            yield f"idle     {self.idle_seconds:.4g} s of a profiled step had no kernel"
        yield "settings " + ", ".join(f"{key}: {value}" for key, value in self.settings.items())
        for note in self.notes:
            yield f"note     {note}"
        if self.trace is not None:
            yield f"trace    {self.trace} (https://ui.perfetto.dev opens it)"

    def _mfu_words(self) -> str:
        each = [f"{percent(one.mfu)} ({one.formula})" for one in self.speeds if one.mfu is not None]
        if each:
            return f"{', '.join(each)} of the peak of {self.accelerator}"
        tflops = ", ".join(f"{one.tflops_per_rank:.4g} ({one.formula})" for one in self.speeds)
        return f"not known: no peak of {self.device} is on record; TFLOP/s per rank {tflops}"

    def _memory_words(self) -> str:
        memory = self.memory
        words = f"{memory.peak_gib:.4g} GiB ({memory.measured_as})"
        if memory.predicted_low_gib is not None and memory.predicted_high_gib is not None:
            words += (
                f"; predicted {memory.predicted_low_gib:.4g} to {memory.predicted_high_gib:.4g}"
            )
        return f"{words}; {memory.available_gib:.4g} GiB are available"

    def _table(self) -> Iterator[str]:
        yield f"{'part':<18}{'seconds':>10}{'share':>8}{'roofline':>10}{'times':>8}"
        total = sum(one.seconds for one in self.parts)
        for one in self.parts:
            line = f"{one.part:<18}{one.seconds:>10.4f}{one.seconds / total:>8.1%}"
            if one.roofline_seconds:
                line += f"{one.roofline_seconds:>10.4f}{one.seconds / one.roofline_seconds:>8.1f}"
            yield line
        bound = sum(one.roofline_seconds or 0.0 for one in self.parts)
        yield f"{'all':<18}{total:>10.4f}{1:>8.0%}{bound:>10.4f}{total / bound:>8.1f}"


def bench_schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of the document."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **BenchDocument.model_json_schema(by_alias=False),
    }
