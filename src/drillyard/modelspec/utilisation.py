"""MFU as a result that cannot be misread: with its formula, the peak it is measured against, and a word of doubt where
the figure is higher than the hardware can go.

Nothing is clipped. A figure above what any published matmul reaches on the accelerator, or above the peak itself, is
nearly always an error of units; it is shown as computed and flagged, with the usual causes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

PLAUSIBLE_BF16: Final = 0.80
"""The limit in bf16 where the achievable matmul rate of an accelerator is not published. The published ones lie between
77.6 % (B200) and 86.9 % (A100) of peak, and a training step has more to do than matmuls."""

CAUSES: Final = (
    "another precision's peak (fp8 runs take the fp8 peak), tokens/s of all GPUs taken for one GPU's, "
    "step times in another unit, padding counted as tokens, FLOPs of another sequence length"
)


@dataclass(frozen=True, slots=True)
class Utilisation:
    """What a speed amounts to. FLOP/s are per GPU; `mfu` is a fraction of `peak_flops_per_second`, None without it.

    `warning` says why the figure cannot be right, None where it can.
    """

    formula: str
    flops_per_token: float
    tokens_per_second_per_gpu: float
    accelerator: str | None
    precision: str
    peak_flops_per_second: float | None
    mfu: float | None
    warning: str | None

    @property
    def flops_per_second(self) -> float:
        return self.flops_per_token * self.tokens_per_second_per_gpu

    def __str__(self) -> str:
        rate = f"{self.flops_per_second / 1e12:.1f} TFLOP/s per GPU"
        if self.mfu is None or self.peak_flops_per_second is None:
            device = self.accelerator or "this accelerator"
            return f"{rate} by {self.formula}; no MFU: the {self.precision} peak of {device} is not known"
        peak = f"{self.peak_flops_per_second / 1e12:g} TFLOP/s"
        return f"{rate} by {self.formula}, {self.mfu:.2%} of {peak} ({self.accelerator}, {self.precision})"


def utilisation(
    *,
    formula: str,
    flops_per_token: float,
    tokens_per_second_per_gpu: float,
    accelerator: str | None,
    precision: str,
    peak_flops_per_second: float | None,
    achievable_flops_per_second: float | None = None,
) -> Utilisation:
    """A measured or predicted speed against an accelerator's dense peak at the run's precision.

    `achievable_flops_per_second` is the best published matmul rate at that precision, where there is one.
    """
    fraction = mfu(
        flops_per_token=flops_per_token,
        tokens_per_second_per_gpu=tokens_per_second_per_gpu,
        peak_flops_per_second=peak_flops_per_second,
    )
    warning = None
    if fraction is not None and peak_flops_per_second is not None:
        rate = achievable_flops_per_second
        warning = implausible_mfu(fraction, precision, None if rate is None else rate / peak_flops_per_second)
    return Utilisation(
        formula=formula,
        flops_per_token=flops_per_token,
        tokens_per_second_per_gpu=tokens_per_second_per_gpu,
        accelerator=accelerator,
        precision=precision,
        peak_flops_per_second=peak_flops_per_second,
        mfu=fraction,
        warning=warning,
    )


def implausible_mfu(fraction: float, precision: str, achievable: float | None = None) -> str | None:
    """Why an MFU (or HFU) of `fraction` cannot be right, or None.

    `achievable` is the best published matmul rate as a fraction of the peak. Without it the limit is 80 % in bf16 and
    the peak itself in other precisions.
    """
    if fraction > 1:
        limit = "the peak itself"
    elif achievable is not None and fraction > achievable:
        limit = f"the best matmul rate published for this accelerator, {achievable:.1%} of peak"
    elif achievable is None and precision == "bf16" and fraction > PLAUSIBLE_BF16:
        limit = f"training in bf16 reaches on any accelerator, {PLAUSIBLE_BF16:.0%} of peak"
    else:
        return None
    return f"{fraction:.1%} is more than {limit}: an error of units. Usual causes: {CAUSES}."


def mfu(
    *, flops_per_token: float, tokens_per_second_per_gpu: float, peak_flops_per_second: float | None
) -> float | None:
    """Model FLOPs utilisation as a fraction of the accelerator's dense peak at the precision used; None without a peak.

    Name the formula of `flops_per_token`, the peak and the precision wherever the result is shown.
    """
    if peak_flops_per_second is None:
        return None
    return flops_per_token * tokens_per_second_per_gpu / peak_flops_per_second
