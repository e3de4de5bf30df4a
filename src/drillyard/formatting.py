"""Numbers as text for people: durations, dollars, sizes, shares, counts, rates and losses.

Measured figures have clock times and cents; estimates are `rounded_...` to three digits in one
unit, as they are known to no more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

TIMES = ((1e-3, "ms"), (1.0, "s"), (60.0, "min"), (3600.0, "h"), (86_400.0, "days"))
COUNTS = ((1.0, ""), (1e3, "K"), (1e6, "M"), (1e9, "B"), (1e12, "T"))


def significant(value: float, digits: int = 4) -> str:
    """`value` with at least `digits` significant digits and no exponent: 14.54, 0.06712, 2254,
    954.0, nan."""
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    decimals = digits - 1 - math.floor(math.log10(abs(value)))
    return f"{value:.{max(decimals, 0)}f}"


def count(value: float) -> str:
    """A count in the field's short form: 70.55B, 1.24B, 493.0M, 1.23T, 512."""
    scale, suffix = largest_unit(value, COUNTS)
    return f"{value / scale:.2f}{suffix}" if suffix else f"{value:.0f}"


def duration(seconds: float) -> str:
    """A length of time to about three digits: 0.7 ms, 37.9 ms, 14.54 s, 2:05 min, 3:12:45 h, 4 d
    03:12 h."""
    if not math.isfinite(seconds):
        return "-"
    if seconds < 0.9995:
        return f"{significant(seconds * 1e3, 3)} ms"
    if seconds < 100:
        return f"{significant(seconds, 4)} s"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days} d {hour:02}:{minute:02} h"
    return f"{hour}:{minute:02}:{second:02} h" if hours else f"{minute}:{second:02} min"


def dollars(amount: float) -> str:
    """US dollars: $0.0012, $0.992, $12.31, $1,234.50, $1.2 million."""
    if amount >= 1e6:
        return f"${amount / 1e6:,.2f} million"
    return f"${amount:,.2f}" if amount >= 1 or amount == 0 else f"${significant(amount, 3)}"


def percent(fraction: float) -> str:
    """A share of 1: 42.4%, 0.35%, <0.01%, 0%."""
    if fraction == 0:
        return "0%"
    if abs(fraction) < 5e-5:
        return "<0.01%"
    return f"{fraction:.1%}" if abs(fraction) >= 0.1 else f"{fraction:.2%}"


def size(num_bytes: float) -> str:
    """Bytes in units of 1024: 812 bytes, 1.09 MiB, 140 GiB."""
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB"):
        if num_bytes < 1024 or unit == "TiB":
            break
        num_bytes /= 1024
    return f"{num_bytes:.0f} bytes" if unit == "bytes" else f"{significant(num_bytes, 3)} {unit}"


def first_few(names: Sequence[str], most: int) -> str:
    """A list for people, at most `most` of it named: `a, b and 3 more`."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def number(value: float, digits: int = 4) -> str:
    """A rate or a loss: thousands are grouped (12,345), small values keep `digits` significant
    ones; NaN is a word."""
    if not math.isfinite(value):
        return f"{value:g}"
    if value and not 1e-5 <= abs(value) < 1e15:
        return f"{value:.{digits - 1}e}"
    return f"{value:,.0f}" if abs(value) >= 10 ** (digits - 1) else significant(value, digits)


def plural(count: int, one: str, many: str = "") -> str:
    """`1 restart`, `2 restarts`."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def three_digits(value: float) -> str:
    """Three digits or all those before the point, thousands apart."""
    if value == 0:
        return "0"
    if abs(value) >= 1e9 or abs(value) < 1e-3:
        return f"{value:.2e}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def rounded_duration(seconds: float) -> str:
    """Three digits of milliseconds, seconds, minutes, hours or days."""
    scale, unit = largest_unit(seconds, TIMES)
    return f"{three_digits(seconds / scale)} {unit}"


def rounded_dollars(amount: float) -> str:
    """Cents below 1,000 dollars, two digits below 10 cents, millions by their name."""
    if amount >= 1e6:
        return f"${rounded_count(amount)}"
    if amount >= 1000:
        return f"${amount:,.0f}"
    return f"${amount:.2f}" if amount >= 0.1 else f"${amount:.2g}"


def rounded_percent(fraction: float) -> str:
    """One decimal; two where it is nearly all, three where it is nearly nothing."""
    if 0 < fraction < 0.001:
        return f"{fraction:.3%}"
    if 0.9999 < fraction < 1:
        return ">99.99%"
    return f"{fraction:.2%}" if 0.99 < fraction < 1 else f"{fraction:.1%}"


def rounded_count(value: float) -> str:
    """`70.6 B`: three digits with K, M, B or T."""
    scale, letter = largest_unit(value, COUNTS)
    return f"{three_digits(value / scale)}{f' {letter}' if letter else ''}"


def largest_unit(value: float, units: Sequence[tuple[float, str]]) -> tuple[float, str]:
    """The largest unit of which there is at least one."""
    return next((unit for unit in reversed(units) if abs(value) >= unit[0]), units[0])


def every_steps(steps: str) -> str:
    """`every step` or `every 2 to 5 steps`."""
    return "every step" if steps == "1" else f"every {steps} steps"


def extent(values: Sequence[float], write: Callable[[float], str]) -> str:
    """`low to high` of the least and the greatest of `values`, one number where both read the
    same."""
    low, high = write(min(values)), write(max(values))
    return low if low == high else f"{low} to {high}"


def number_list(numbers: Iterable[int]) -> str:
    """`1, 3-5`: numbers in order, neighbours together."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}" if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
