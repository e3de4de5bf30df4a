"""Time stamps of many styles -> UTC microseconds since 1970. Converting one costs 1 to 2
microseconds.

    iso        2025-01-01T12:00:00.123456789Z, 2025-01-01 12:00:00,123, with or without a zone;
               2025/01/01 also
    glog       I0101 12:00:00.123456 (glog, absl, torch): no year and no zone
    ctime      Wed Jan  1 12:00:00 2025, also with UTC or GMT before the year
    epoch      1735732800.123456

Stamps without a zone are read in the zone given (`--timezone`), else as UTC; in the hour that
daylight saving time repeats, the first is taken. A glog stamp gets the year that puts it last
before `not_after` (the file's time of last change), and is carried over New Year. Digits beyond the
microsecond are cut off.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta, tzinfo
from datetime import timezone as tz
from typing import TYPE_CHECKING, Final
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from drillyard.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

NO_TIME: Final = -(2**63)
"""Missing time, in arrays of times."""

STYLES: Final[dict[str, bytes]] = {
    "iso": rb"\d{4}[-/]\d\d[-/]\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d(?!\d))?",
    "glog": rb"[IWEF]\d{4} \d\d:\d\d:\d\d\.\d{1,9}",
    "ctime": (
        rb"(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun) [A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d (?:(?:UTC|GMT)"
        rb" )?\d{4}"
    ),
    "epoch": rb"(?<![\d.])1\d{9}\.\d{1,9}",
}
"""Patterns without groups. Their order decides which is tried first on an unknown line."""

_MONTHS: Final = {
    name: number
    for number, name in enumerate(b"Jan Feb Mar Apr May Jun Jul Aug Sep Oct Nov Dec".split(), 1)
}
_FIRST: Final = re.compile(
    b"|".join(b"(?P<%s>%s)" % (name.encode(), pattern) for name, pattern in STYLES.items())
)
_HALF_A_YEAR: Final = 182 * 86_400_000_000
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def find_stamp(text: bytes) -> tuple[str, int, int] | None:
    """Find the first time stamp in `text`: its style, begin and end; None where there is none."""
    match = _FIRST.search(text)
    return None if match is None else (str(match.lastgroup), match.start(), match.end())


def time_zone(name: str) -> tzinfo:
    """The zone of a name such as `Europe/Zurich`, `UTC` or an offset `+02:00`. Raises ConfigError
    for others."""
    if offset := re.fullmatch(r"([+-])(\d\d):?(\d\d)", name):
        minutes = int(offset[2]) * 60 + int(offset[3])
        return (
            UTC if not minutes else tz(timedelta(minutes=minutes if offset[1] == "+" else -minutes))
        )
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise ConfigError(
            f"--timezone {name}: not a time zone. Give a name such as Europe/Zurich or"
            " America/New_York, or +02:00."
        ) from error


class Stamps:
    """Converter of one log's stamps. `zone` is for stamps without one; None reads them as UTC and
    remembers it.

    After conversions, `zoned` and `zoneless` are whether stamps with and without a zone were seen,
    and `coarsest_us` is the coarsest printed unit in microseconds.
    """

    def __init__(self, zone: tzinfo | None = None, not_after: datetime | None = None) -> None:
        self._zone = zone or UTC
        self._not_after = not_after
        self._year: int | None = None
        self._near: int | None = None
        self.zoned = False
        self.zoneless = False
        self.coarsest_us = 1

    def convert(self, style: str, stamps: Sequence[bytes]) -> list[int | None]:
        """Convert stamps of one style in the log's order to UTC microseconds; None for what is no
        date (month 13)."""
        convert = {
            "iso": self._iso,
            "glog": self._glog,
            "ctime": self._ctime,
            "epoch": self._epoch,
        }[style]
        if len(stamps):
            self.coarsest_us = max(self.coarsest_us, _unit_us(style, stamps[0]))
        return [convert(stamp) for stamp in stamps]

    def column(self, style: str, stamps: Sequence[bytes]) -> NDArray[np.int64]:
        """Do the same as an array, with `NO_TIME` for what is no date."""
        import numpy as np

        times = self.convert(style, stamps)
        return np.array([NO_TIME if time is None else time for time in times], np.int64)

    def _iso(self, stamp: bytes) -> int | None:
        try:
            # ValueError: where a program writes its times in a field of their own, it may write
            # anything there.
            moment = datetime.fromisoformat(stamp.decode().replace("/", "-"))
        except ValueError:
            return None
        if moment.tzinfo is None:
            self.zoneless = True
            return _microseconds(moment.replace(tzinfo=self._zone))
        self.zoned = True
        return _microseconds(moment)

    def _glog(self, stamp: bytes) -> int | None:
        # I0317 10:00:12.743313
        year = self._year or self._last_year(stamp)
        time = self._glog_of(stamp, year)
        if time is None or self._near is None:
            self._year, self._near = year, time
            return time
        if abs(time - self._near) > _HALF_A_YEAR:
            # The stamp crosses New Year, in either direction: several files may be read by turns.
            year += 1 if time < self._near else -1
            time = self._glog_of(stamp, year)
        self._year, self._near = year, time
        return time

    def _glog_of(self, stamp: bytes, year: int) -> int | None:
        month, day, hour, minute, second = (int(stamp[at : at + 2]) for at in (1, 3, 6, 9, 12))
        try:
            moment = datetime(year, month, day, hour, minute, second, tzinfo=self._zone)
        except ValueError:
            return None
        return _microseconds(moment) + int((stamp[15:21] + b"000000")[:6])

    def _last_year(self, stamp: bytes) -> int:
        """Latest year that puts a stamp before `not_after`, with a day's margin for clocks and
        zones that differ."""
        self.zoneless = True
        latest = (self._not_after or datetime.now(UTC)).astimezone(self._zone) + timedelta(days=1)
        return (
            latest.year
            if (int(stamp[1:3]), int(stamp[3:5])) <= (latest.month, latest.day)
            else latest.year - 1
        )

    def _ctime(self, stamp: bytes) -> int | None:
        words = stamp.split()
        zoned = words[-2] in (b"UTC", b"GMT")
        hour, minute, second = (int(part) for part in words[3].split(b":"))
        try:
            moment = datetime(
                int(words[-1]), _MONTHS[words[1]], int(words[2]), hour, minute, second
            )
        except (KeyError, ValueError):
            return None
        self.zoned |= zoned
        self.zoneless |= not zoned
        self.coarsest_us = 1_000_000
        return _microseconds(moment.replace(tzinfo=UTC if zoned else self._zone))

    def _epoch(self, stamp: bytes) -> int | None:
        self.zoned = True
        seconds, _, fraction = stamp.partition(b".")
        return int(seconds) * 1_000_000 + int((fraction + b"000000")[:6])


def _unit_us(style: str, stamp: bytes) -> int:
    """The unit of a stamp's last digit, in microseconds; at least 1."""
    fraction = {"iso": stamp[19:], "glog": stamp[14:], "epoch": stamp[10:]}.get(style, b"")
    digits = re.match(rb"[.,](\d+)", fraction)
    return 10 ** max(0, 6 - len(digits[1])) if digits else 1_000_000


def _microseconds(moment: datetime) -> int:
    delta = moment - _EPOCH
    return (delta.days * 86_400 + delta.seconds) * 1_000_000 + delta.microseconds
