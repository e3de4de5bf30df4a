"""Entry point of `drillyard` and `python -m drillyard`; handles Ctrl-C before anything large is
imported."""

import os
import signal
import sys

INTERRUPTED = 130
"""128 + SIGINT, as a shell shows it."""


def main() -> None:
    """Run the command line. Ctrl-C is a KeyboardInterrupt while a command runs, and exits at once
    before and after.

    During imports or the interpreter's shutdown a KeyboardInterrupt would show a traceback of
    library code.
    """
    _leave_on_interrupt()
    _open_standard_streams()
    from drillyard.cli.main import main as run

    try:
        run()
    except KeyboardInterrupt:
        os._exit(INTERRUPTED)
    finally:
        _leave_on_interrupt()


def _open_standard_streams() -> None:
    """Open /dev/null for each standard descriptor that the caller closed (`>&-`).

    Otherwise the next open file, a checkpoint perhaps, would get that number, and ranks would print
    into it.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    for name, number in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w", closefd=False))


def _leave_on_interrupt() -> None:
    # A shell without job control ignores SIGINT in background processes: keep that.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))


if __name__ == "__main__":
    main()
