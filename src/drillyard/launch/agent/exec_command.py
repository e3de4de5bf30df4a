"""Script that becomes a command: it stands between the agent, or torchrun, and the program that
runs on a node.

`python -I -S exec_command.py PARENT_PID DIRECTORY PROFILE ARGV...` becomes a node's command, in a
directory and after a shell script was sourced (both may be empty). It asks the kernel to kill the
command when its agent dies (PR_SET_PDEATHSIG), as Python code between fork and exec of a process
with threads can hang. Signals that were blocked or ignored before are reset for the command.

`python -u exec_command.py --rank PROGRAM...` becomes a rank's program, with its output in the pipe
that the agent offers for its local rank (output_pump.py); without one it prints where torchrun
does.

Exit codes are a shell's: 127 not found, 126 not executable. Standard library only, for any image's
or host's Python.
"""

from __future__ import annotations

import os
import signal
import sys

RANK_PIPES = "DRILLYARD_RANK_PIPES"
RANK_OPTION = "--rank"
_PR_SET_PDEATHSIG = 1


def main() -> None:
    words = sys.argv[1:]
    if words[0] == RANK_OPTION:
        argv = words[1:]
        _print_into_pipe()
        if argv[0] in ("python", "python3"):
            # As torchrun itself starts a script: with its own interpreter, unbuffered.
            argv = [sys.executable, "-u", *argv[1:]]
        become(argv)
    # Imported here, as an image's Python may lack it.
    import ctypes

    parent, directory, profile, *argv = words
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != int(parent):
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    if profile:
        argv = ["bash", "-c", '. "$0" && exec "$@"', profile, *argv]
    become(argv, directory)


def become(argv: list[str], directory: str = "") -> None:
    """Replace this process by a program; does not return."""
    # Python ignores these, and an ignored signal stays ignored in the new program.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    try:
        if directory:
            os.chdir(directory)
        os.execvp(argv[0], argv)
    except OSError as error:
        what = f"{error.filename or argv[0]}: {error.strerror}"
        print(f"error: cannot start the command: {what}", file=sys.stderr, flush=True)
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


def _print_into_pipe() -> None:
    directory, local_rank = os.environ.get(RANK_PIPES), os.environ.get("LOCAL_RANK")
    if not directory or not local_rank:
        return
    try:
        # Fails at once without a reader, instead of waiting for one.
        pipe = os.open(os.path.join(directory, local_rank), os.O_WRONLY | os.O_NONBLOCK)
    except OSError as error:
        print(
            f"drillyard: lines of local rank {local_rank} are not prefixed: {error}",
            file=sys.stderr,
            flush=True,
        )
        return
    os.set_blocking(pipe, True)
    os.dup2(pipe, 1)
    os.dup2(pipe, 2)
    os.close(pipe)


if __name__ == "__main__":
    main()
