"""A port on which another program listens: whose mistake it is, and that torch's own words do not
reach anybody."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch

from drillyard.errors import UserError
from drillyard.parallel import ranks

PLACE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}


@pytest.fixture
def port_in_use(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        for name, value in {**PLACE, "MASTER_PORT": str(port)}.items():
            monkeypatch.setenv(name, value)
        yield port


def join() -> None:
    ranks._join(0, 1, torch.device("cpu"), timedelta(seconds=20))


def test_a_port_that_the_user_chose_is_the_user_s_to_change(port_in_use: int) -> None:
    with pytest.raises(UserError, match=f"port {port_in_use} .*--master-port"):
        join()


@pytest.mark.parametrize("variable", ["DRILLYARD_SUPERVISED", "DRILLYARD_SUBMISSION"])
def test_a_port_that_a_supervisor_or_launcher_chose_is_chosen_again(
    port_in_use: int, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "1")
    with pytest.raises(RuntimeError, match=f"^port {port_in_use} .*in use") as raised:
        join()
    assert raised.value.__suppress_context__
