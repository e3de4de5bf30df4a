"""Numbers as text for people: durations, dollars, sizes, shares, counts, rates and losses."""

from __future__ import annotations

import math


def significant(value: float, digits: int = 4) -> str:
    """`value` with at least `digits` significant digits and no exponent: 14.54, 0.06712, 2254, 954.0, nan."""
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    decimals = digits - 1 - math.floor(math.log10(abs(value)))
    return f"{value:.{max(decimals, 0)}f}"


def count(value: float) -> str:
    """A count in the field's short form: 70.55B, 1.24B, 493.0M, 1.23T, 512."""
    for suffix, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if value >= scale:
            return f"{value / scale:.2f}{suffix}"
    return f"{value:.0f}"


def duration(seconds: float) -> str:
    """A length of time to about three digits: 0.7 ms, 37.9 ms, 14.54 s, 2:05 min, 3:12:45 h, 4 d 03:12 h."""
    if not math.isfinite(seconds):
        return "-"
    if seconds < 0.9995:
        return f"{significant(seconds * 1e3, 3)} ms"
    if seconds < 100:
        return f"{significant(seconds, 4)} s"
    whole = round(seconds)
    minutes, second = divmod(whole, 60)
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


def number(value: float, digits: int = 4) -> str:
    """A rate or a loss: thousands are grouped (12,345), small values keep `digits` significant ones; NaN is a word."""
    if not math.isfinite(value):
        return f"{value:g}"
    if value and not 1e-5 <= abs(value) < 1e15:
        return f"{value:.{digits - 1}e}"
    return f"{value:,.0f}" if abs(value) >= 10 ** (digits - 1) else significant(value, digits)


def plural(count: int, one: str, many: str = "") -> str:
    """`1 restart`, `2 restarts`."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"
