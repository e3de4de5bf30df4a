"""Ordered map over all cores: worker processes that turn raw batches into pieces.

Workers are fresh interpreters (`python -m drillyard.data.encoding_worker`), not forks: forking after threads or CUDA
have
started is unsafe, and multiprocessing's spawn would import the caller's main module (torch and all) in each. A worker
imports numpy and tokenizers only, about 60 MB. It is fed through a socket and ends when that closes, so none outlives
its parent.

Processes beat the tokenizer's own threads: JSON parsing, cutting and the conversion of ids run in Python and would be
serial. Results come in the order of the batches, and at most two batches per worker are under way: memory is
constant.
"""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from itertools import chain, islice
from multiprocessing.connection import Connection
from queue import SimpleQueue

from drillyard.data.encoder import Encoded, Encoder, EncodeSettings
from drillyard.data.raw_batches import RawBatch
from drillyard.errors import UserError

IN_PROCESS_BYTES = 4 << 20
"""Up to this size the batches are encoded in the calling process: starting workers would take longer."""


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def encode_all(
    batches: Iterator[RawBatch], settings: EncodeSettings, num_workers: int | None = None
) -> Iterator[Encoded]:
    """Encode batches in order. `num_workers` 0: in this process; None: on all cores, or here for little data."""
    if num_workers is None:
        head: list[RawBatch] = []
        while sum(batch.nbytes for batch in head) < IN_PROCESS_BYTES and (batch := next(batches, None)) is not None:
            head.append(batch)
        num_workers = available_cores() if sum(batch.nbytes for batch in head) >= IN_PROCESS_BYTES else 0
        batches = chain(head, batches)
        del head
    if num_workers == 0:
        encoder = Encoder(settings)
        for batch in batches:
            yield encoder.encode(batch)
        return
    with _Pool(num_workers, settings) as pool:
        waiting: deque[Future[Encoded]] = deque(pool.submit(batch) for batch in islice(batches, 2 * num_workers))
        while waiting:
            yield waiting.popleft().result()
            for batch in islice(batches, 1):
                waiting.append(pool.submit(batch))


class _Pool:
    """Worker processes and one feeding thread for each."""

    def __init__(self, size: int, settings: EncodeSettings) -> None:
        self._tasks: SimpleQueue[tuple[RawBatch, Future[Encoded]] | None] = SimpleQueue()
        self._settings = settings
        self._processes: list[subprocess.Popen[bytes]] = []
        self._threads: list[threading.Thread] = []
        self._size = size

    def __enter__(self) -> _Pool:
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "USE_TORCH": "0", "OMP_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        for number in range(self._size):
            ours, theirs = socket.socketpair()
            command = [sys.executable, "-m", "drillyard.data.encoding_worker", str(theirs.fileno())]
            process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL)
            theirs.close()
            self._processes.append(process)
            thread = threading.Thread(target=self._feed, args=(ours, process), name=f"tokenise-{number}", daemon=True)
            thread.start()
            self._threads.append(thread)
        return self

    def submit(self, batch: RawBatch) -> Future[Encoded]:
        future: Future[Encoded] = Future()
        self._tasks.put((batch, future))
        return future

    def _feed(self, channel: socket.socket, process: subprocess.Popen[bytes]) -> None:
        connection = Connection(channel.detach())
        failure: BaseException | None = None
        try:
            connection.send(self._settings)
        except OSError:
            failure = _died(process)
        while (task := self._tasks.get()) is not None:
            batch, future = task
            if failure is None:
                try:
                    connection.send_bytes(pickle.dumps(batch, protocol=5))
                    answer = pickle.loads(connection.recv_bytes())
                except (EOFError, OSError):
                    failure = answer = _died(process)
            else:
                answer = failure
            if isinstance(answer, BaseException):
                future.set_exception(answer)
            else:
                future.set_result(answer)
        connection.close()

    def __exit__(self, *_details: object) -> None:
        # Drop what is still queued (after an error): each feeding thread then finds its end mark next.
        while not self._tasks.empty():
            self._tasks.get()
        for _thread in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join()
        for process in self._processes:
            process.wait()


def _died(process: subprocess.Popen[bytes]) -> UserError:
    code = process.wait()
    return UserError(
        f"a tokenising process ended with exit code {code} (-9: killed, often for lack of memory). "
        f"Free memory and start again."
    )
