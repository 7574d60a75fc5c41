"""The word in a job's comment by which a task's job is found again.

It is not signed and need not be: only jobs of the own user are searched, and who may submit as a
user may also write that user's comments.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from crater_slurm.errors import UsageError
from crater_slurm.model import token

PREFIX = "crater-task:"
_WORD = re.compile(r"(?<![^\s=])crater-task:([A-Za-z0-9._:-]+)/([0-9a-f]{12})(?!\S)")
#: Slurm stops comments at 1,024 characters, and the filter puts the plan behind ours.
_LONGEST_OWN = 512


@dataclass(frozen=True, slots=True)
class Marker:
    """One task with one content."""

    task_id: str
    fingerprint: str

    def __str__(self) -> str:
        return f"{PREFIX}{self.task_id}/{self.fingerprint}"


def find(text: str, task_id: str) -> Marker | None:
    """The marker of that task in a comment or command line; the first one counts."""
    for match in _WORD.finditer(text.replace("'", " ").replace('"', " ")):
        if match.group(1) == task_id:
            return Marker(*match.groups())
    return None


def first(text: str) -> Marker | None:
    """The first marker of any task in a comment."""
    match = _WORD.search(text)
    return Marker(*match.groups()) if match else None


def comment(marker: Marker, own: str | None) -> str:
    """A comment with the marker before the user's own, whose ``crater:`` directives reach to its
    end. Raises UsageError for one that leaves no room."""
    if not own:
        return str(marker)
    if len(own) > _LONGEST_OWN or not own.isprintable():
        raise UsageError(
            f"--comment must be printable and have at most {_LONGEST_OWN} characters beside a task"
        )
    if token.PREFIX in own or PREFIX in own:
        raise UsageError("--comment holds a word that crater writes itself; leave it out")
    return f"{marker} {own}"
