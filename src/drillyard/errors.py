"""The one exception for users' mistakes: the CLI prints its text and exits with code 2, without a traceback."""

from __future__ import annotations


class UserError(Exception):
    """What is wrong, where, and what to do next, in one or two lines that a user can act on.

    Raise it for anything a user can mend (a file, a config, a full disk). Our own invariants use `assert`.
    """
