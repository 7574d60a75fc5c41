"""The errors that crater raises on purpose.

Every message says what was asked, what is there and what to do; the command line prints it as
one sentence and exits with the class's code, so each class has exactly one meaning.
"""

from __future__ import annotations


class CraterError(Exception):
    """Base of all errors with a message meant for a person; exit code 1."""

    exit_code = 1


class UsageError(CraterError):
    """The input itself is wrong: a directive, an option, a file; exit code 2."""

    exit_code = 2


class ConfigError(UsageError):
    """A setting is unknown, of the wrong type or contradicts another; exit code 2."""


class StoreError(CraterError):
    """The node-profile store can't be opened, is locked or lacks its migrations; exit code 3."""

    exit_code = 3


class SlurmError(CraterError):
    """A Slurm command failed, timed out or printed what this version can't read; exit code 4."""

    exit_code = 4


class UnavailableError(CraterError):
    """A crater service does not answer; exit code 5."""

    exit_code = 5


class LabError(CraterError):
    """A lab can't be built or started; exit code 6."""

    exit_code = 6


def nearest(word: str, known: list[str] | tuple[str, ...]) -> str | None:
    """The known word closest to ``word``, or None when nothing is near enough to be meant."""
    import difflib

    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return close[0] if close else None
