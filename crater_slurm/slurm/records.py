"""Records as ``scontrol --oneliner`` prints them: ``Key=value`` pairs on one line."""

from __future__ import annotations

import itertools
import re

_PAIR = re.compile(r"(?:^|\s)([A-Z][\w:/]*)=")
#: A job's comment may be full of ``gpus=2``; Slurm prints the output files right behind it.
_COMMENT = re.compile(r".*\sComment=(.*)\sStdErr=")


def parse_record(line: str) -> dict[str, str]:
    """``Key=value`` fields of one ``scontrol -o`` line; values may hold spaces.

    A free-text value (name, command) that itself contains ``Word=`` is cut there, and the first
    occurrence of a key counts, so that a user's text never replaces a field of Slurm's. The
    comment, which carries the plan, is read whole where Slurm shows what ends it.
    """
    record: dict[str, str] = {}
    matches = list(_PAIR.finditer(line))
    for match, following in itertools.zip_longest(matches, matches[1:]):
        end = following.start() if following else len(line)
        record.setdefault(match.group(1), line[match.end() : end].strip())
    if comment := _COMMENT.match(line):
        record["Comment"] = comment.group(1).strip()
    return record
