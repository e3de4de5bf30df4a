"""Gloo ranks for tests: `run_ranks(fn, world_size, ...)` runs a function on every rank and brings
the results back.

Ranks are forks of a server that has imported torch and the trainer once, which takes seconds, and
computed nothing: a fork of a process that has computed inherits torch's thread pools in a state
that can hang. `fn` must be a function of an importable module (not a closure), and its arguments
and result are pickled. Results travel through files, so a tensor in them never needs shared memory
that ends with the rank.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# What ranks import sooner or later.
_IMPORTED_ONCE = [
    "torch",
    "torch.distributed.fsdp",
    "transformers.generation.utils",
    "transformers.models.auto",
    "transformers.models.encoder_decoder",
    "drillyard.models.adapters",
    "drillyard.training.run",
    __name__,
]
COLLECTIVE_TIMEOUT = timedelta(seconds=600)


class RankFailed(AssertionError):
    """A rank raised; the text is its traceback."""


def _rank_main(
    rank: int,
    fn: Callable[..., Any],
    world_size: int,
    folder: str,
    threads: int,
    environment: dict[str, str],
    args: tuple[Any, ...],
) -> None:
    # Else a collection writes to, and so copies, all that the server has imported.
    gc.freeze()
    # The server has the environment of the first call.
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(threads)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
    )
    store = dist.FileStore(f"{folder}/store", world_size)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=COLLECTIVE_TIMEOUT
    )
    try:
        result = fn(*args)
        Path(folder, f"result-{rank}").write_bytes(pickle.dumps(result))
        dist.barrier()
    except BaseException:
        Path(folder, f"error-{rank}-{time.monotonic_ns()}").write_text(traceback.format_exc())
        # The other ranks may wait for this one in a collective; the parent ends them.
        os._exit(1)
    dist.destroy_process_group()
    # As ranks of a run leave: gloo's threads may abort a process while its interpreter shuts down.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def run_ranks(
    fn: Callable[..., Any], world_size: int, *args: Any, threads: int = 1, timeout: float = 800.0
) -> list[Any]:
    """`[fn(*args) on rank 0, on rank 1, ...]`, run in `world_size` gloo processes with `threads`
    CPU threads each.

    When a rank raises, the others are ended and `RankFailed` carries the traceback of the rank that
    failed first. The rendezvous is a file of its own, so calls may run side by side without a port
    to collide on.
    """
    multiprocessing.set_forkserver_preload(_IMPORTED_ONCE)
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        context = mp.start_processes(
            _rank_main,
            (fn, world_size, folder, threads, dict(os.environ), args),
            nprocs=world_size,
            join=False,
            start_method="forkserver",
        )
        end = time.monotonic() + timeout
        try:
            while not context.join(timeout=1.0):
                if time.monotonic() > end:
                    raise RankFailed(
                        f"{fn.__name__} on {world_size} ranks did not end within {timeout:.0f} s"
                    )
        except (mp.ProcessExitedException, mp.ProcessRaisedException) as failure:
            errors = sorted(
                Path(folder).glob("error-*"), key=lambda path: int(path.name.rsplit("-", 1)[1])
            )
            shown = [
                f"rank {path.name.split('-')[1]}:\n{path.read_text()}" for path in errors[:1]
            ] or [str(failure)]
            raise RankFailed("\n".join(shown)) from None
        finally:
            for process in context.processes:
                if process.is_alive():
                    process.kill()
                process.join()
        return [
            pickle.loads(Path(folder, f"result-{rank}").read_bytes()) for rank in range(world_size)
        ]
