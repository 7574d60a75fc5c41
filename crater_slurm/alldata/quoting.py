"""What a template may write: nothing that was not made harmless for the place where it stands.

A template that forgets a filter does not render, so a value can't reach a shell unquoted, whoever
wrote the template.
"""

from __future__ import annotations

import re
from typing import Any

from crater_slurm.errors import UsageError

#: Written without quotation marks. Not ``=`` and ``~``, which mean something to a shell.
_PLAIN = re.compile(r"[A-Za-z0-9_./:@%+,-]+")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
#: In quotation marks sbatch takes these for its own.
_NOT_FOR_SBATCH = frozenset("\"'\\`$")


class Quoted(str):
    """Text that may stand in a script as it is."""

    __slots__ = ()


def sh(value: Any) -> Quoted:
    """A value as one shell word, a list as one word each."""
    if isinstance(value, str):
        if not value.isprintable():
            raise UsageError(f"{value[:80]!r} holds control characters; no script can have it")
        return Quoted(value if _PLAIN.fullmatch(value) else _in_marks(value))
    if isinstance(value, bool):
        return Quoted("yes" if value else "no")
    if isinstance(value, int | float):
        return Quoted(value)
    if isinstance(value, list | tuple):
        return Quoted(" ".join(sh(each) for each in value))
    str(value)  # what is undefined says so itself
    raise UsageError(f"a template quotes a {type(value).__name__}; only texts and numbers can be")


def _in_marks(value: str) -> str:
    """In quotation marks, where nothing but their end means anything."""
    return "'" + value.replace("'", "'\"'\"'") + "'"


def sbatch(value: Any) -> Quoted:
    """An option behind #SBATCH, where sbatch reads quotation marks by rules of its own."""
    if not isinstance(value, str) or not value.isprintable() or _NOT_FOR_SBATCH.intersection(value):
        raise UsageError(f"{str(value)[:80]!r} can't stand behind #SBATCH; leave out \" ' \\ ` $")
    option, equals, said = value.partition("=")
    return Quoted(value if _PLAIN.fullmatch(said) or not said else f'{option}{equals}"{said}"')


def name(value: str) -> Quoted:
    """The name of a shell variable."""
    if not _NAME.fullmatch(value):
        raise UsageError(f"{value[:80]!r} is no name of a variable")
    return Quoted(value)


def strict(value: Any) -> Any:
    """Jinja's last word on every expression: only what was quoted, and numbers."""
    if isinstance(value, Quoted) or type(value) is int:
        return value
    raise UsageError(
        f"a template writes {str(value)[:80]!r} as it is; put |sh behind it, or |sbatch"
    )
