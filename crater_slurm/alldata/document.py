"""Reads a task's JSON text, which anybody may have written, and says where it is wrong.

Sizes are checked before anything is read, and the text before anything is understood: no value
that could end a line or hide in one ever gets further. JSON that may mean two things (a key given
twice, NaN) is refused instead of guessed.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from crater_slurm.errors import UsageError

#: Of one task; the source text's has 700 bytes.
MOST_BYTES = 256 * 1024
MOST_DEPTH = 12
MOST_ITEMS = 1024
LONGEST_TEXT = 4096
LONGEST_KEY = 128
#: Of more mistakes than this the first are told.
MOST_PROBLEMS = 100
_LONGEST_SHOWN = 80
#: More digits are above every bound, and turning them into a number would take long.
_MOST_DIGITS = 40


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake: where (a JSON pointer, RFC 6901), which kind, what is there, what is valid.

    ``value`` is JSON, shortened and escaped, and None where there is none.
    """

    pointer: str
    code: str
    value: str | None
    message: str

    def __str__(self) -> str:
        said = f"{self.pointer or '(the task)'}: {self.message}"
        return said if self.value is None else f"{said}; it is {self.value}"

    def as_json(self) -> dict[str, str | None]:
        return {
            "pointer": self.pointer,
            "code": self.code,
            "value": self.value,
            "message": self.message,
        }


class TaskError(UsageError):
    """A task is not valid; ``problems`` are all that is wrong with it."""

    def __init__(self, problems: list[Problem]) -> None:
        shown = [str(problem) for problem in problems[:MOST_PROBLEMS]]
        if len(problems) > MOST_PROBLEMS:
            shown.append(f"and {len(problems) - MOST_PROBLEMS} more problems")
        super().__init__("\n".join(shown))
        self.problems = tuple(problems[:MOST_PROBLEMS])


class _Object(dict[str, Any]):
    """An object that remembers which of its keys were given twice."""

    twice: tuple[str, ...] = ()


def pointer(*path: str | int) -> str:
    """JSON pointer of a path: ``pointer("a", 0)`` is ``/a/0``."""
    return "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in path)


def shown(value: Any) -> str:
    """A value as JSON for a message: short, on one line, nothing unprintable in it."""
    if isinstance(value, dict):
        return "an object" if value else "an empty object"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}" if value else "an empty list"
    if isinstance(value, float) and not math.isfinite(value):
        return "a number without bounds"
    cut = value[: _LONGEST_SHOWN + 1] if isinstance(value, str) else value
    text = json.dumps(cut, ensure_ascii=not (isinstance(cut, str) and cut.isprintable()))
    return text if len(text) <= _LONGEST_SHOWN else text[:_LONGEST_SHOWN] + "..."


def read(data: bytes | str) -> tuple[dict[str, Any], list[Problem]]:
    """The object in a task's text, and what is wrong with its values wherever they stand.

    Raises TaskError for what is no JSON object at all, or too large or deep to be read.
    """
    text = _text(data)
    try:
        document = json.loads(
            text,
            object_pairs_hook=_object,
            parse_constant=lambda word: math.nan,
            parse_int=_integer,
        )
    except RecursionError:
        raise _whole("depth", f"is nested deeper than {MOST_DEPTH} levels") from None
    except json.JSONDecodeError as error:
        raise _whole(
            "json", f"is no JSON: {error.msg} in line {error.lineno}, column {error.colno}"
        ) from None
    if not isinstance(document, dict):
        raise TaskError([Problem("", "type", shown(document), "must be a JSON object")])
    return document, list(_problems(document, ()))


def _whole(code: str, message: str) -> TaskError:
    return TaskError([Problem("", code, None, message)])


def _text(data: bytes | str) -> str:
    if len(data) > MOST_BYTES:
        raise _whole("size", f"has {len(data):,} bytes; a task has at most {MOST_BYTES:,}")
    if isinstance(data, str):
        return data.removeprefix("\ufeff")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _whole("json", f"is not UTF-8: byte {error.start} can't be read") from None


def _object(pairs: list[tuple[str, Any]]) -> _Object:
    found = _Object(pairs)
    if len(found) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        found.twice = tuple(key for key, count in counts.items() if count > 1)
    return found


def _integer(digits: str) -> int | float:
    if len(digits) > _MOST_DIGITS:
        return -math.inf if digits.startswith("-") else math.inf
    return int(digits)


def _problems(value: Any, path: tuple[str | int, ...]) -> Iterator[Problem]:
    at = pointer(*path)
    if len(path) > MOST_DEPTH:
        yield Problem(at, "depth", None, f"is nested deeper than {MOST_DEPTH} levels")
    elif isinstance(value, str):
        yield from _text_problems(value, at)
    elif isinstance(value, float) and not math.isfinite(value):
        what = "is NaN, which is no JSON number" if math.isnan(value) else "is no finite number"
        yield Problem(at, "number", None, what)
    elif isinstance(value, dict | list):
        if len(value) > MOST_ITEMS:
            yield Problem(
                at, "size", None, f"has {len(value):,} entries; at most {MOST_ITEMS:,} are read"
            )
            return
        yield from _entries(value, path)


def _entries(value: dict[str, Any] | list[Any], path: tuple[str | int, ...]) -> Iterator[Problem]:
    if isinstance(value, list):
        for index, one in enumerate(value):
            yield from _problems(one, (*path, index))
        return
    for key in getattr(value, "twice", ()):
        yield Problem(
            pointer(*path, _short_key(key)), "twice", None, "is given twice; keep one of them"
        )
    for key, one in value.items():
        if len(key) <= LONGEST_KEY and key.isprintable():
            yield from _problems(one, (*path, key))


def _text_problems(text: str, at: str) -> Iterator[Problem]:
    if len(text) > LONGEST_TEXT:
        yield Problem(
            at,
            "size",
            shown(text),
            f"has {len(text):,} characters; a text has at most {LONGEST_TEXT:,}",
        )
    elif not text.isprintable():
        yield Problem(
            at,
            "text",
            shown(text),
            "must not hold control characters, line breaks or other unprintable characters",
        )


def _short_key(key: str) -> str:
    """A key as it may be told: without quotes, and nothing unprintable in it."""
    return shown(key)[1:-1] if len(key) > LONGEST_KEY or not key.isprintable() else key


def key_for_people(key: str | int) -> str | int:
    """A path's part for a pointer that people read; an ordinary key stays as it is."""
    return key if isinstance(key, int) else _short_key(key)
