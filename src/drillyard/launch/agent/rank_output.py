"""Becomes the command of one rank, with what it prints in a pipe of its own: `python -u rank_output.py PROGRAM...`.

torchrun starts it once per rank in place of the program, as the plan of a workload `per: gpu` says. The ranks of a node
share torchrun's output, and who has printed a line could not be told; so the agent offers a named pipe for each of them
(rank_pipes.py), this script puts it in the place of standard output and error, and the kernel makes it the program: no
process stands between a rank and the agent. Where there is no pipe (the script is not under an agent, or that is gone)
the rank prints where torchrun does.

Standard library only, for whatever Python the image or host has; imported for its names as well. Cost: an interpreter's
start per rank and round.
"""

from __future__ import annotations

import os
import signal
import sys

PIPES = "DRILLYARD_RANK_PIPES"
"""The directory of a node's pipes, which are named by local rank."""
SCRIPT = "rank_output.py"


def main() -> None:
    """Become the program, or say why not. Exit codes are a shell's: 127 not found, 126 not to be run."""
    argv = sys.argv[1:]
    _print_into_pipe()
    if argv[0] in ("python", "python3"):
        # As torchrun itself starts a script: with its own interpreter, and lines at once.
        argv = [sys.executable, "-u", *argv[1:]]
    # Python ignores these, and what is ignored stays so in the program that it becomes.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        print(f"error: cannot start the command: {argv[0]}: {error.strerror}", file=sys.stderr, flush=True)
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


def _print_into_pipe() -> None:
    directory, local_rank = os.environ.get(PIPES), os.environ.get("LOCAL_RANK")
    if not directory or not local_rank:
        return
    try:
        # Without a reader this fails at once instead of waiting for one.
        pipe = os.open(os.path.join(directory, local_rank), os.O_WRONLY | os.O_NONBLOCK)
    except OSError as error:
        print(f"drillyard: lines of local rank {local_rank} are not marked: {error}", file=sys.stderr, flush=True)
        return
    os.set_blocking(pipe, True)
    os.dup2(pipe, 1)
    os.dup2(pipe, 2)
    os.close(pipe)


if __name__ == "__main__":
    main()
