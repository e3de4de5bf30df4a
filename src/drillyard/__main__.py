"""Where `drillyard` and `python -m drillyard` begin, so that Ctrl-C is answered before anything large is imported."""

import os
import signal

INTERRUPTED = 130
"""128 + SIGINT, as a shell shows it."""


def main() -> None:
    """Run the command line. Ctrl-C is a KeyboardInterrupt while a command runs, and the end at once before and after.

    In the middle of an import or of the interpreter's shutdown it would be a traceback of library code.
    """
    _leave_on_interrupt()
    from drillyard.cli.main import main as run

    try:
        run()
    except KeyboardInterrupt:
        os._exit(INTERRUPTED)
    finally:
        _leave_on_interrupt()


def _leave_on_interrupt() -> None:
    # A shell without job control has SIGINT ignored in what it starts in the background: that stays so.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))


if __name__ == "__main__":
    main()
