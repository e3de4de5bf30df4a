"""One tokenising process: `python -m drillyard.data.encoding_worker FD`, started by encoding_pool.py, fed through the
socket FD.

Settings come first, then raw batches; each is answered by its pieces or by the exception that it raised. It ends with
the socket.
"""

from __future__ import annotations

import pickle
import sys
from multiprocessing.connection import Connection

from drillyard.data.encoder import Encoded, Encoder
from drillyard.data.raw_batches import RawBatch


def main() -> None:
    """Serve until the other end closes."""
    connection = Connection(int(sys.argv[1]))
    try:
        encoder = Encoder(connection.recv())
        while True:
            batch: RawBatch = pickle.loads(connection.recv_bytes())
            try:
                answer: Encoded | Exception = encoder.encode(batch)
            except Exception as error:  # handed to the parent, which raises it
                answer = error
            connection.send_bytes(pickle.dumps(answer, protocol=5))
    except (EOFError, BrokenPipeError, ConnectionResetError, KeyboardInterrupt):
        return


if __name__ == "__main__":
    main()
