"""Where triton cannot build its kernels, or a GPU's driver does not start them, torch's operators
compute the same."""

from __future__ import annotations

import sys
import types
import warnings

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.runtime.errors import PTXASError

from drillyard.models import nf4
from drillyard.models.kernels import builds_kernels


@pytest.mark.parametrize("lacking", ["triton", "a GPU's driver", "a driver as new", "nothing"])
def test_where_no_kernel_can_be_built_torchs_operators_take_its_place(
    lacking: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This machine has no driver for triton to build for: two cases have a made one."""

    def start_kernel(*_: object, **__: object) -> None:
        if lacking == "a driver as new":
            raise PTXASError("the provided PTX was compiled with an unsupported toolchain")

    device = torch.device("cpu")
    if lacking == "triton":
        monkeypatch.setitem(sys.modules, "triton.runtime", None)
    elif lacking != "a GPU's driver":
        made = types.SimpleNamespace(active=types.SimpleNamespace(utils=None))
        monkeypatch.setattr("triton.runtime.driver", made)
        monkeypatch.setattr("drillyard.models.loss_kernel.turn_into_gradient", start_kernel)
    builds_kernels.cache_clear()
    if lacking == "nothing":
        assert builds_kernels(device)
    else:
        with pytest.warns(UserWarning, match="cannot build its kernels"):
            assert not builds_kernels(device)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert builds_kernels(device) == (lacking == "nothing")
    builds_kernels.cache_clear()


def test_memory_that_is_full_is_no_reason_to_do_without_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def start_kernel(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    made = types.SimpleNamespace(active=types.SimpleNamespace(utils=None))
    monkeypatch.setattr("triton.runtime.driver", made)
    monkeypatch.setattr("drillyard.models.loss_kernel.turn_into_gradient", start_kernel)
    builds_kernels.cache_clear()
    with pytest.raises(torch.OutOfMemoryError):
        builds_kernels(torch.device("cpu"))


def test_weights_in_nf4_are_unpacked_on_a_gpu_without_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nf4, "builds_kernels", lambda device: False)
    with FakeTensorMode():
        packed = torch.empty(8, nf4.packed_bytes(128), dtype=torch.uint8, device="cuda")
        whole = nf4.unpack(packed, torch.bfloat16)
    assert whole.shape == (8, 128) and whole.device.type == "cuda"
