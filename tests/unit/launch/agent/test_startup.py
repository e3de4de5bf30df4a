"""What an agent needs before it runs anything."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from drillyard.launch.agent import startup


def test_a_secret_that_this_host_sees_late_is_waited_for(tmp_path: Path) -> None:
    (tmp_path / "secret").touch()
    writer = threading.Timer(0.2, (tmp_path / "secret").write_text, ["known\n"])
    writer.start()
    assert startup._read_secret(tmp_path) == b"known"
    writer.join()


@pytest.mark.parametrize("is_empty", [True, False])
def test_agents_of_several_nodes_need_the_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_empty: bool
) -> None:
    monkeypatch.setattr(startup, "_SECONDS_FOR_SECRET", 0.0)
    if is_empty:
        (tmp_path / "secret").touch()
    with pytest.raises(startup.UsageError, match="secret"):
        startup._read_secret(tmp_path)
