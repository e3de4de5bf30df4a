"""Ordered map over all cores: worker processes that turn raw batches into pieces.

Workers are fresh interpreters, not forks: forking after threads or CUDA have started is unsafe, and
multiprocessing's spawn would import the caller's main module (torch and all) in each. A worker
imports only numpy and tokenizers, about 60 MB. It reads batches from a socket and ends when that
closes, so none outlives its parent.

Processes are faster than the tokenizer's own threads: JSON parsing, cutting and the conversion of
ids run in Python and would be serial. Results are in the order of the batches, and at most two
batches per worker are in flight: memory is constant.
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
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain, islice
from multiprocessing.connection import Connection

from drillyard.data.encoder import Encoded, Encoder, EncodeSettings
from drillyard.data.raw_batches import RawBatch
from drillyard.errors import UserError

IN_PROCESS_BYTES = 4 << 20
"""Up to this size batches are encoded in the calling process: starting workers would take
longer."""
_WORKER = "import sys; from drillyard.data.encoding_pool import work; work(int(sys.argv[1]))"


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def encode_all(
    batches: Iterator[RawBatch], settings: EncodeSettings, num_workers: int | None = None
) -> Iterator[Encoded]:
    """Encode batches in order. `num_workers` 0: in this process; None: on all cores, or here for
    little data."""
    if num_workers is None:
        head: list[RawBatch] = []
        while (
            sum(batch.nbytes for batch in head) < IN_PROCESS_BYTES
            and (batch := next(batches, None)) is not None
        ):
            head.append(batch)
        num_workers = (
            available_cores() if sum(batch.nbytes for batch in head) >= IN_PROCESS_BYTES else 0
        )
        batches = chain(head, batches)
        del head
    if num_workers == 0:
        encoder = Encoder(settings)
        for batch in batches:
            yield encoder.encode(batch)
        return
    with _Pool(num_workers, settings) as pool:
        waiting: deque[Future[Encoded]] = deque(map(pool.submit, islice(batches, 2 * num_workers)))
        while waiting:
            yield waiting.popleft().result()
            waiting.extend(map(pool.submit, islice(batches, 1)))


class _Pool:
    """Threads, each of which feeds a worker process of its own."""

    def __init__(self, size: int, settings: EncodeSettings) -> None:
        self._settings = settings
        self._workers: list[tuple[subprocess.Popen[bytes], Connection]] = []
        self._of_thread = threading.local()
        self._threads = ThreadPoolExecutor(size, "tokenise")

    def __enter__(self) -> _Pool:
        return self

    def submit(self, batch: RawBatch) -> Future[Encoded]:
        return self._threads.submit(self._encode, batch)

    def _encode(self, batch: RawBatch) -> Encoded:
        is_new = not hasattr(self._of_thread, "worker")
        if is_new:
            self._of_thread.worker = self._start()
        process, connection = self._of_thread.worker
        try:
            if is_new:
                connection.send(self._settings)
            connection.send_bytes(pickle.dumps(batch, protocol=5))
            answer: Encoded | Exception = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            code = process.wait()
            raise UserError(
                f"a tokenising process ended with exit code {code} (-9: killed, often for lack of"
                " memory). Free memory and start again."
            ) from None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _start(self) -> tuple[subprocess.Popen[bytes], Connection]:
        environment = {
            **os.environ,
            "TOKENIZERS_PARALLELISM": "false",
            "USE_TORCH": "0",
            "OMP_NUM_THREADS": "1",
        }
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-c", _WORKER, str(theirs.fileno())]
            process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL
            )
        connection = Connection(ours.detach())
        self._workers.append((process, connection))
        return process, connection

    def __exit__(self, *_details: object) -> None:
        self._threads.shutdown(cancel_futures=True)
        for _, connection in self._workers:
            connection.close()
        for process, _ in self._workers:
            process.wait()


def work(descriptor: int) -> None:
    """A worker process: read the settings, then batches; answer each with its pieces or the
    exception it raised."""
    connection = Connection(descriptor)
    try:
        encoder = Encoder(connection.recv())
        while True:
            batch: RawBatch = pickle.loads(connection.recv_bytes())
            try:
                answer: Encoded | Exception = encoder.encode(batch)
            except Exception as error:  # the parent raises it
                answer = error
            connection.send_bytes(pickle.dumps(answer, protocol=5))
    except (EOFError, BrokenPipeError, ConnectionResetError, KeyboardInterrupt):
        return
