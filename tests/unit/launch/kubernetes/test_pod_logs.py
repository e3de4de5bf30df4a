"""Lines of pods as the readers of logs know them."""

from __future__ import annotations

import pytest

from drillyard.launch.kubernetes.pod_logs import _stamped
from drillyard.launch.logs.line_selection import RankFilter
from drillyard.launch.logs.merge import all_stamped


@pytest.mark.parametrize(
    ("stamp", "shown"),
    [
        ("2026-11-26T21:00:08.435928772Z", "2026-11-26T21:00:08.435928Z"),
        ("2026-11-26T21:00:08.4Z", "2026-11-26T21:00:08.400000Z"),
        ("2026-11-26T21:00:08Z", "2026-11-26T21:00:08.000000Z"),
        ("2026-11-26T23:00:08.435928772+02:00", "2026-11-26T21:00:08.435928Z"),
        ("2026-11-26T23:00:08+02:00", "2026-11-26T21:00:08.000000Z"),
    ],
)
def test_a_line_has_the_stamp_of_all_logs_and_its_rank_is_known(stamp: str, shown: str) -> None:
    line = _stamped(f"{stamp} [default1]:this is 3\n".encode())
    assert line == f"{shown} [default1]:this is 3\n".encode()
    assert all_stamped([line[:28]])
    assert RankFilter(3, 1, 2)(line) and not RankFilter(2, 1, 2)(line)
