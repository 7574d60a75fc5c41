"""Words of Slurm's configuration files: ``Key=value`` pairs that can't become anything else.

A node's name or a gres type comes from a machine or from a file somebody wrote. One with a
space, a newline or ``=`` in it would be another option or another line, so it is refused here and
never quoted or cut.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from crater_slurm.errors import UsageError

#: Host lists, counts, paths and lists of them; Slurm splits at white space, ``=``, ``#``, quotes.
_VALUE = re.compile(r"[A-Za-z0-9_.,:/@%+*()\[\]-]+")
#: One name: no list, no count and no range may hide in it.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,127}")


def line(words: Mapping[str, str | None]) -> str:
    """``Key=value`` pairs of one line; those without a value are left out."""
    return " ".join(f"{key}={value(key, text)}" for key, text in words.items() if text)


def value(key: str, text: str) -> str:
    """The text, if it is one value for Slurm; UsageError otherwise."""
    if not _VALUE.fullmatch(text):
        raise UsageError(
            f"{key}={text!r} can't stand in Slurm's configuration; letters, digits and "
            "_ . , : / @ % + * - ( ) [ ] can"
        )
    return text


def name(what: str, text: str) -> str:
    """The text, if it can name one thing; ``what`` is what errors call it."""
    if not _NAME.fullmatch(text):
        raise UsageError(
            f"{text!r} can't be {what} in Slurm's configuration; use letters, digits and _ . + -"
        )
    return text


def node_name(text: str) -> str:
    """A node's name. DEFAULT and ALL are none: Slurm would take them for other nodes' values."""
    if text.upper() in ("DEFAULT", "ALL"):
        raise UsageError(f"a node can't be named {text}: Slurm has another meaning for it")
    return name("a node's name", text)


def comment(text: str) -> str:
    """Text for a comment: one line, printable."""
    return "".join(c for c in " ".join(text.split()) if c.isprintable())
