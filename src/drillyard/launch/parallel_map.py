"""The same thing for many hosts or runs at the same time, which Ctrl-C leaves at once.

Threads of concurrent.futures are waited for: when a pool is left, and again when the interpreter ends. What they do
here is to wait for hosts, for minutes at times, and nobody who has pressed Ctrl-C waits along. So these are daemons.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import TypeVar

_Item = TypeVar("_Item")
_Answer = TypeVar("_Answer")


def parallel_map(function: Callable[[_Item], _Answer], items: Sequence[_Item], most: int) -> list[_Answer]:
    """What `function` returns for each item, in their order; at most so many are asked at the same time.

    Raises what it raised for the first item that it failed for, once all have ended; KeyboardInterrupt at once.
    """
    waiting: queue.SimpleQueue[tuple[_Item, Future[_Answer]]] = queue.SimpleQueue()
    futures: list[Future[_Answer]] = []
    for item in items:
        future: Future[_Answer] = Future()
        futures.append(future)
        waiting.put((item, future))

    def work() -> None:
        while True:
            try:
                item, future = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                future.set_result(function(item))
            except BaseException as error:
                # Whatever it is: who waits for this future would wait for ever.
                future.set_exception(error)

    for _ in range(min(most, len(futures))):
        threading.Thread(target=work, daemon=True).start()
    wait(futures)
    return [future.result() for future in futures]
