"""Becomes a node's command: a script, `python -I -S exec_command.py PARENT_PID DIRECTORY PROFILE ARGV...`.

The kernel is to kill the command when its agent dies (PR_SET_PDEATHSIG). The agent has threads, and Python code between
fork and exec of a process with threads can hang; so this small program asks the kernel and then becomes the command,
for 15 ms per round. The command hears signals whoever launched it: what was blocked or ignored for Ctrl-C's sake on the
way here (launch/submit_secrets.py; a shell's `&`) is no longer. DIRECTORY and PROFILE may be empty. Exit codes are a
shell's: 127 not found, 126 not to be run.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Become the command, or say why not."""
    parent, directory, profile, *argv = sys.argv[1:]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != int(parent):
        os._exit(1)
    # Python ignores these, and what is ignored stays so in the program that it becomes.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    try:
        if directory:
            os.chdir(directory)
        if profile:
            argv = ["bash", "-c", '. "$0" && exec "$@"', profile, *argv]
        os.execvp(argv[0], argv)
    except OSError as error:
        what = error.filename or argv[0]
        print(f"error: cannot start the command: {what}: {error.strerror}", file=sys.stderr, flush=True)
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


if __name__ == "__main__":
    main()
