"""Whether kernels of our own can run on a GPU: those of the loss, of the optimizer and of nf4."""

from __future__ import annotations

import functools
import subprocess
import warnings

import torch


@functools.cache
def builds_kernels(device: torch.device) -> bool:
    """Whether triton can build kernels for this GPU, and its driver starts them: triton compiles a
    part of its own in C, with Python's headers (triton.backends.nvidia.driver), and what it
    assembles may be too new for the driver, or too old for the GPU. Warns, once, where not. Raises
    torch.OutOfMemoryError, which says nothing of that."""
    try:
        _start_kernel(device)
    except torch.OutOfMemoryError:
        raise
    except (ImportError, OSError, RuntimeError, subprocess.SubprocessError) as error:
        warnings.warn(
            "the loss and the optimizer are computed by torch's own operators, which move 28"
            " instead of 6 bytes per logit and 12 more per parameter, and need memory for a chunk's"
            " logits in fp32; weights in nf4 are unpacked by them, more slowly: triton cannot build"
            f" its kernels ({error}). It needs a C compiler and Python's headers (apt-get install"
            f" gcc python3-dev), and a driver of the GPU for CUDA {torch.version.cuda}",
            stacklevel=2,
        )
        return False
    return True


def _start_kernel(device: torch.device) -> None:
    from triton.errors import TritonError
    from triton.runtime import driver

    # Made, and compiled, at the first look.
    getattr(driver.active, "utils")  # noqa: B009
    from drillyard.models import loss_kernel

    logits, target = torch.zeros(1, 1, device=device), torch.zeros(1, device=device).long()
    try:
        loss_kernel.turn_into_gradient(logits, target, 1.0, ignored=-1)
    except TritonError as error:
        raise RuntimeError(str(error)) from error
