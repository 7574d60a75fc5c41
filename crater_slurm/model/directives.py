"""Reads ``#CRATER`` lines of a batch script, and ``crater: ...`` in a job's comment.

Directives are read exactly as far as sbatch reads its own: up to the first line that is neither
blank nor a comment. Everything wrong in a script is reported at once. A line that looks like a
directive and is none (``# CRATER``, ``##CRATER``, ``#crater``) is pointed out, never obeyed.
"""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from crater_slurm.errors import UsageError, nearest
from crater_slurm.model.request import BY_KEY, Request, Requirement

SENTINEL = "#CRATER"
_NEAR_MISS = re.compile(r"^\s*#+\s*crater[\s:]*(?=[A-Za-z][\w-]*\s*=)", re.IGNORECASE)
_COMMENT_FORM = re.compile(r"(?:^|[;\s])crater:\s*", re.IGNORECASE)
_PLAN_TOKEN = re.compile(r"(?<!\s)\s*crater-plan:\S*")
#: Of more mistakes than this the first are told: a header full of garbage must not cost seconds.
_QUOTING = frozenset("'\"\\")
_MOST_PROBLEMS = 20
_MOST_WORDS = 256
_LONGEST_LINE = 4096
_LONGEST_WORD = 80


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a requirement was written: a script line (1-based), or the comment (line None)."""

    line: int | None
    text: str

    def __str__(self) -> str:
        return f"line {self.line}" if self.line is not None else "--comment"


@dataclass(frozen=True, slots=True)
class Directives:
    """A parsed request, where each part was written, and what the user should be told."""

    request: Request
    origins: dict[str, Origin] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.origins)


class DirectiveError(UsageError):
    """One or more directives can't be obeyed; ``problems`` has one sentence for each."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


def header_lines(script: str) -> Iterator[tuple[int, str]]:
    """Number and text of the lines in which sbatch looks for directives."""
    for number, line in enumerate(script.split("\n"), start=1):
        stripped = line.strip()
        if stripped and not stripped.startswith("#"):
            return
        yield number, line.rstrip("\r")


def parse_script(script: str) -> Directives:
    """Directives of a batch script. Raises DirectiveError listing every problem."""
    found: list[tuple[Origin, str]] = []
    notes: list[str] = []
    last = 0
    for number, line in header_lines(script):
        last = number
        if line.startswith(SENTINEL) and (len(line) == len(SENTINEL) or line[7].isspace()):
            found.append((Origin(number, line), line[len(SENTINEL) :]))
        elif len(notes) < _MOST_PROBLEMS and _NEAR_MISS.match(line):
            notes.append(
                f"line {number}: {_short(line)!r} is not read; a directive starts with "
                f"{SENTINEL} and a space, at the beginning of the line"
            )
    for number, line in enumerate(script.split("\n")[last:], start=last + 1):
        if line.startswith(SENTINEL) and line[len(SENTINEL) :][:1].isspace():
            notes.append(
                f"line {number}: {_short(line)!r} is not read; it stands after the first "
                "command, where sbatch too stops reading directives"
            )
            break
    return _collect(found, notes)


def parse_comment(comment: str) -> Directives:
    """Directives of ``--comment "crater: gpus=2 numa=strict"``; none without the prefix."""
    own = _PLAN_TOKEN.sub("", comment)
    match = _COMMENT_FORM.search(own)
    if not match:
        return Directives(Request())
    return _collect([(Origin(None, comment), own[match.end() :])], [])


def parse_job(script: str | None, comment: str | None) -> Directives:
    """Directives of a job; the comment, given on the command line, wins over the script."""
    first = parse_script(script) if script else Directives(Request())
    second = parse_comment(comment) if comment else Directives(Request())
    if not second:
        return first
    merged = first.request.given() | second.request.given()
    notes = list(first.notes + second.notes)
    for attribute in sorted(first.request.given().keys() & second.request.given().keys()):
        notes.append(
            f"--comment says {attribute.replace('_', '-')} too and wins over "
            f"{first.origins[attribute]} of the script"
        )
    return Directives(Request(**merged), first.origins | second.origins, tuple(notes))


def _collect(found: list[tuple[Origin, str]], notes: list[str]) -> Directives:
    values: dict[str, Any] = {}
    origins: dict[str, Origin] = {}
    problems: list[str] = []
    read = 0
    for origin, text in found:
        for word in _words(origin, text, problems):
            read += 1
            if len(problems) >= _MOST_PROBLEMS or read > _MOST_WORDS:
                problems.append(f"{origin}: nothing is read from here on; mend the script first")
                raise DirectiveError(problems)
            parsed = _pair(origin, word, problems)
            if parsed is None:
                continue
            requirement, value = parsed
            name = requirement.attribute
            if name in values and values[name] != value:
                problems.append(
                    f"{origin}: {requirement.key} is given twice, here and in {origins[name]}; "
                    "keep one of them"
                )
                continue
            values[name] = value
            origins[name] = origin
    if problems:
        raise DirectiveError(problems)
    return Directives(Request(**values), origins, tuple(notes))


def _words(origin: Origin, text: str, problems: list[str]) -> list[str]:
    """Words of a line by shell quoting; a word that begins with # starts a comment."""
    if len(text) > _LONGEST_LINE:
        problems.append(f"{origin}: longer than {_LONGEST_LINE} characters; use several lines")
        return []
    if text.isascii() and text.isprintable() and not _QUOTING.intersection(text):
        # As good as every line; the lexer takes a third of a whole decision.
        plain = itertools.takewhile(lambda word: not word.startswith("#"), text.split())
        return list(plain)
    lexer = shlex.shlex(text, posix=True, punctuation_chars=False)
    lexer.whitespace_split = True
    lexer.commenters = ""
    words: list[str] = []
    try:
        while (word := lexer.get_token()) is not None and not word.startswith("#"):
            words.append(word)
    except ValueError as error:
        what = "a quotation mark is never closed"
        if "escape" in str(error):
            what = "nothing follows the last backslash"
        problems.append(f"{origin}: {what} in {_short(text)!r}")
    return words


def _short(text: str) -> str:
    """A user's text for a message about it."""
    text = text.strip()
    return text if len(text) <= _LONGEST_WORD else text[:_LONGEST_WORD] + "..."


def _pair(origin: Origin, word: str, problems: list[str]) -> tuple[Requirement, Any] | None:
    key, equals, value = word.partition("=")
    key, word = _short(key), _short(word)
    requirement = BY_KEY.get(key.lower().replace("_", "-"))
    if not equals:
        hint = f"{requirement.key}={requirement.example}" if requirement else "gpus=2"
        problems.append(f"{origin}: {word!r} has no value; write key=value, such as {hint}")
        return None
    if requirement is None:
        close = nearest(key.lower().replace("_", "-"), list(BY_KEY))
        meant = f"did you mean {close}? " if close else ""
        problems.append(
            f"{origin}: unknown directive {key!r} in {word!r}; {meant}Valid are {', '.join(BY_KEY)}"
        )
        return None
    try:
        return requirement, requirement.parse(value)
    except ValueError as error:
        problems.append(f"{origin}: {requirement.key}={_short(value)!r}: {error}")
        return None
