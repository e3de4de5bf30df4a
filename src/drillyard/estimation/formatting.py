"""How numbers are told: three digits, a unit that suits their size, both ends of a range, and a mark where one doubts.

A range of which only the better end is known is told as a bound (`at least 12.1 s`). `?` marks what rests on a value
that no primary source confirms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from drillyard.estimation.quantity import Quantity, Range

DOUBT = "?"
TIMES = ((1e-3, "ms"), (1.0, "s"), (60.0, "min"), (3600.0, "h"), (86_400.0, "days"))
COUNTS = ((1.0, ""), (1e3, "K"), (1e6, "M"), (1e9, "B"), (1e12, "T"))


def three_digits(value: float) -> str:
    """Three digits or all those before the point, thousands apart."""
    if value == 0:
        return "0"
    if abs(value) >= 1e9 or abs(value) < 1e-3:
        return f"{value:.2e}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def expected_count(value: float) -> str:
    """An expected number of events; of one in a thousand runs nobody needs the digits."""
    return "<0.001" if 0 < value < 0.001 else three_digits(value)


def every_steps(steps: str) -> str:
    """`every step` or `every 2 to 5 steps`."""
    return "every step" if steps == "1" else f"every {steps} steps"


def number_list(numbers: Iterable[int]) -> str:
    """`1, 3-5`: numbers in order, neighbours together."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}" if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def dollars(value: float) -> str:
    """Cents below 1,000 dollars, two digits below 10 cents, millions by their name."""
    if value >= 1e6:
        return f"${short_count(value)}"
    if value >= 1000:
        return f"${value:,.0f}"
    return f"${value:.2f}" if value >= 0.1 else f"${value:.2g}"


def gpu_hours(value: float) -> str:
    """In full below a million."""
    return three_digits(value) if value < 1e6 else short_count(value)


def percent(value: float) -> str:
    """One decimal; two where it is nearly all, three where it is nearly nothing."""
    if 0 < value < 0.001:
        return f"{value:.3%}"
    if 0.9999 < value < 1:
        return ">99.99%"
    return f"{value:.2%}" if 0.99 < value < 1 else f"{value:.1%}"


def short_count(value: float) -> str:
    """`70.6 B`: three digits with K, M, B or T."""
    scale, letter = _unit(value, COUNTS)
    return f"{three_digits(value / scale)}{f' {letter}' if letter else ''}"


def duration(value: float) -> str:
    """In milliseconds, seconds, minutes, hours or days."""
    scale, unit = _unit(value, TIMES)
    return f"{three_digits(value / scale)} {unit}"


def time_range(times: Range, better: str = "at least") -> str:
    """Both ends in the unit that suits the higher one."""
    scale, unit = _unit(times.high.value, TIMES)
    return range_text(times, lambda value: three_digits(value / scale), better) + f" {unit}{doubt_mark(times)}"


def number_range(numbers: Range, unit: str, better: str, scale: float = 1.0) -> str:
    """Both ends over `scale`, with `unit`; `better` says which side of a bound is possible (`at most`)."""
    return range_text(numbers, lambda value: three_digits(value / scale), better) + f"{unit}{doubt_mark(numbers)}"


def range_text(numbers: Range, told: Callable[[float], str], better: str) -> str:
    """`low to high`, one number where both read the same, or `at least x` where it is a bound."""
    low, high = told(numbers.low.value), told(numbers.high.value)
    if numbers.is_bound:
        return f"{better} {low}"
    return low if low == high else f"{low} to {high}"


def extent_text(values: Sequence[float], told: Callable[[float], str]) -> str:
    """The least and the greatest of `values`."""
    low, high = told(min(values)), told(max(values))
    return low if low == high else f"{low} to {high}"


def doubt_mark(value: Quantity | Range) -> str:
    """The mark of what is not confirmed."""
    return DOUBT if value.unverified else ""


def _unit(value: float, units: Sequence[tuple[float, str]]) -> tuple[float, str]:
    """The largest unit of which there is at least one."""
    return next((unit for unit in reversed(units) if abs(value) >= unit[0]), units[0])
