"""Time stamps of many styles become UTC microseconds; many at once are the same as one by one."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drillyard.errors import UserError
from drillyard.loglines.stamps import NO_TIME, Stamps, find_stamp, time_zone

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MOMENTS = st.datetimes(datetime(1971, 1, 1), datetime(2090, 1, 1))


def microseconds(moment: datetime) -> int:
    return (moment - EPOCH) // timedelta(microseconds=1)


@pytest.mark.parametrize(
    ("text", "style", "moment"),
    [
        (b"2026-01-02T03:04:05.123456789Z x", "iso", datetime(2026, 1, 2, 3, 4, 5, 123456, UTC)),
        (b"[2026-01-02 03:04:05,123] x", "iso", datetime(2026, 1, 2, 3, 4, 5, 123000, UTC)),
        (
            b"[NeMo I 2026-01-02 03:04:05 nemo_logging:393] x",
            "iso",
            datetime(2026, 1, 2, 3, 4, 5, 0, UTC),
        ),
        (b"2026/01/02 03:04:05 x", "iso", datetime(2026, 1, 2, 3, 4, 5, 0, UTC)),
        (b"2026-01-02T03:04:05+08:00] x", "iso", datetime(2026, 1, 1, 19, 4, 5, 0, UTC)),
        (b"2026-01-02T03:04:05.5-0330 x", "iso", datetime(2026, 1, 2, 6, 34, 5, 500000, UTC)),
        (b"Fri Jan  2 03:04:05 2026 x", "ctime", datetime(2026, 1, 2, 3, 4, 5, 0, UTC)),
        (b"Fri Jan  2 03:04:05 UTC 2026 x", "ctime", datetime(2026, 1, 2, 3, 4, 5, 0, UTC)),
        (b"t=1767323045.25 x", "epoch", datetime(2026, 1, 2, 3, 4, 5, 250000, UTC)),
        (b"I0102 03:04:05.250000 77 x.py:1] x", "glog", datetime(2026, 1, 2, 3, 4, 5, 250000, UTC)),
    ],
)
def test_styles(text: bytes, style: str, moment: datetime) -> None:
    found = find_stamp(text)
    assert found is not None
    stamps = Stamps(not_after=datetime(2026, 6, 1, tzinfo=UTC))
    assert found[0] == style
    assert stamps.convert(style, [text[found[1] : found[2]]]) == [microseconds(moment)]


@pytest.mark.parametrize(
    "text", [b"no stamp", b"12:34:56 only", b"2026-01-02", b"version 1.2.3", b"port 29500"]
)
def test_what_is_no_stamp(text: bytes) -> None:
    assert find_stamp(text) is None


def test_what_is_no_date_has_no_time() -> None:
    assert Stamps().convert("iso", [b"2026-13-02 03:04:05", b"2026-02-30T00:00:00Z"]) == [
        None,
        None,
    ]


@given(
    st.lists(MOMENTS, min_size=1, max_size=80),
    st.sampled_from([0, 1, 3, 6, 9]),
    st.sampled_from(["", "Z", "+02:00"]),
)
def test_a_column_is_the_same_as_one_by_one(
    moments: list[datetime], digits: int, zone: str
) -> None:
    texts = []
    for moment in moments:
        fraction = f".{moment.microsecond:06}000"[: digits + 1] if digits else ""
        texts.append(f"{moment:%Y-%m-%d %H:%M:%S}{fraction}{zone}".encode())
    offset = timezone(timedelta(hours=2)) if zone == "+02:00" else UTC
    keep = 10 ** (6 - min(digits, 6))
    expected = [
        microseconds(m.replace(microsecond=m.microsecond // keep * keep, tzinfo=offset))
        for m in moments
    ]
    assert Stamps().convert("iso", texts) == expected
    assert Stamps().column("iso", texts * 40).tolist() == expected * 40


def test_a_column_with_strange_stamps_among_others() -> None:
    texts = [b"2026-01-02T03:04:05Z"] * 40 + [b"2026-99-02T03:04:05Z", b"2026-01-02T03:04:061"]
    column = Stamps().column("iso", texts[:41])
    assert column[40] == NO_TIME
    assert (column[:40] == column[0]).all()


def test_zones() -> None:
    naive = b"2026-07-01 12:00:00"
    stamps = Stamps(time_zone("America/New_York"))
    assert stamps.convert("iso", [naive]) == [microseconds(datetime(2026, 7, 1, 16, tzinfo=UTC))]
    assert (stamps.zoned, stamps.zoneless) == (False, True)
    assert Stamps(time_zone("-05:30")).convert("iso", [naive]) == [
        microseconds(datetime(2026, 7, 1, 17, 30, tzinfo=UTC))
    ]
    with pytest.raises(UserError, match="Nowhere/Land"):
        time_zone("Nowhere/Land")


def test_glog_gets_the_year_before_the_files_change_and_goes_over_new_year() -> None:
    stamps = Stamps(not_after=datetime(2026, 1, 5, tzinfo=UTC))
    times = stamps.convert(
        "glog", [b"I1231 23:59:59.000000", b"I0101 00:00:01.000000", b"I1231 23:59:58.500000"]
    )
    assert times == [
        microseconds(datetime(2025, 12, 31, 23, 59, 59, tzinfo=UTC)),
        microseconds(datetime(2026, 1, 1, 0, 0, 1, tzinfo=UTC)),
        microseconds(datetime(2025, 12, 31, 23, 59, 58, 500000, UTC)),
    ]


@pytest.mark.parametrize(
    ("stamp", "unit"), [(b"2026-01-02 03:04:05", 10**6), (b"2026-01-02 03:04:05,123", 1000)]
)
def test_the_unit_of_the_last_digit_is_known(stamp: bytes, unit: int) -> None:
    stamps = Stamps()
    stamps.convert("iso", [stamp])
    assert stamps.coarsest_us == unit
