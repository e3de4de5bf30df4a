"""Errors that a caller can tell apart. Their text is for a person: what is wrong, where, and what
to do next.

The command line prints it and exits with code 2, without a traceback. Our own invariants use
`assert`.
"""

from __future__ import annotations


class UserError(Exception):
    """Anything a user can fix: a file, a setting, a full disk. All errors raised on purpose derive
    from it."""


class ConfigError(UserError):
    """A config or an option is wrong or contradicts another one. Trying again does not help."""


class NotFoundError(UserError):
    """There is no run, checkpoint, cluster, accelerator, machine or file of that name."""


class UnreachableError(UserError):
    """A host, scheduler or service did not answer. Nothing is known about what it holds; trying
    again may help."""


class DoesNotFitError(UserError):
    """The run does not fit into the memory of its accelerators."""


class UnsafeFileError(UserError):
    """A file from elsewhere holds something that reading it must not do, such as code in a
    checkpoint."""


class MissingExtraError(UserError):
    """A package that only an extra installs is not there."""
