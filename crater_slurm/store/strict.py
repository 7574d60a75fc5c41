"""Readers of single values from YAML or JSON that refuse what they don't understand.

Each reader takes a value and its path and returns it typed, or raises UsageError with the path,
the value and what would be valid. Nothing is converted silently: a number in quotes, a ``yes``
or a NaN is somebody's mistake, and a profile with a mistake in it places jobs wrongly.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Collection, Mapping
from datetime import UTC, datetime
from enum import StrEnum
from functools import cache
from typing import Any, TypeVar

from crater_slurm.errors import UsageError, nearest
from crater_slurm.model.cpuset import parse_cpulist

Reader = Callable[[object, str], Any]
T = TypeVar("T")
E = TypeVar("E", bound=StrEnum)

_WORD = re.compile(r"[a-z0-9][a-z0-9_.+-]*")
#: Longest text of a profile; the columns of the store are as wide.
TEXT_LIMIT = 255


def shown(value: object) -> str:
    """A value as a message quotes it: never longer than a line."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def refuse(path: str, value: object, wanted: str) -> UsageError:
    """The error for a value that is not what its path wants."""
    return UsageError(f"{path}: {shown(value)} is not {wanted}")


def whole(low: int, high: int, unit: str = "") -> Reader:
    """Reader of an integer between the bounds, both included."""
    wanted = f"a whole number from {low} to {high}{_spaced(unit)}"

    def read(value: object, path: str) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise refuse(path, value, wanted)
        return value

    return read


def number(low: float, high: float, unit: str = "", *, above: bool = False) -> Reader:
    """Reader of a finite number between the bounds; ``above`` leaves the lower bound out."""
    wanted = f"a number {'above' if above else 'from'} {low:g} {'up ' if above else ''}to {high:g}"
    wanted += _spaced(unit)

    def read(value: object, path: str) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise refuse(path, value, wanted)
        if not math.isfinite(value) or not low <= value <= high or (above and value == low):
            raise refuse(path, value, wanted)
        return float(value)

    return read


def text(value: object, path: str) -> str:
    """A non-empty printable text of at most 255 characters."""
    if not isinstance(value, str) or not value.strip() or not value.isprintable():
        raise refuse(path, value, "a printable text (put it in quotes if it looks like a number)")
    if len(value) > TEXT_LIMIT:
        raise UsageError(f"{path}: {len(value)} characters are more than {TEXT_LIMIT}")
    return value


def flag(value: object, path: str) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise refuse(path, value, "true or false")
    return value


def choice(kind: type[E]) -> Reader:
    """Reader of one of an enumeration's words."""
    wanted = f"one of {', '.join(kind)}"

    def read(value: object, path: str) -> E:
        if not isinstance(value, str) or value not in list(kind):
            raise refuse(path, value, wanted)
        return kind(value)

    return read


def words(known: Collection[str] = ()) -> Reader:
    """Reader of a list of lower-case words as a set; ``known`` are the only ones if given."""

    def read(value: object, path: str) -> frozenset[str]:
        found = set()
        for i, word in enumerate(_items(value, path)):
            if not isinstance(word, str) or not _WORD.fullmatch(word) or len(word) > TEXT_LIMIT:
                raise refuse(f"{path}[{i}]", word, "a lower-case word")
            if known and word not in known:
                raise UsageError(f"{path}[{i}]: {unknown(word, known)}")
            found.add(word)
        return frozenset(found)

    return read


def sequence(reader: Reader) -> Reader:
    """Reader of a list whose elements ``reader`` reads, as a tuple."""

    def read(value: object, path: str) -> tuple[Any, ...]:
        return tuple(reader(item, f"{path}[{i}]") for i, item in enumerate(_items(value, path)))

    return read


def cpulist(value: object, path: str) -> tuple[int, ...]:
    """CPU numbers of ``"0-7,64-71"``, ``3``, ``[0-31]`` or ``[0, 1, "8-15"]``."""
    parts = value if isinstance(value, list | tuple) else [value]
    numbers: set[int] = set()
    for part in parts:
        if isinstance(part, bool) or not isinstance(part, int | str):
            raise refuse(path, value, 'a list of CPUs such as "0-7,64-71"')
        try:
            numbers.update(parse_cpulist(str(part)))
        except ValueError as error:
            raise UsageError(f"{path}: {error}") from error
    return tuple(sorted(numbers))


def moment(value: object, path: str) -> datetime:
    """A time in ISO 8601 as UTC; one without zone is UTC. YAML's own timestamps are fine too."""
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value)
        except ValueError as error:
            raise refuse(path, value, "an ISO time such as 2026-03-01T12:00:00Z") from error
    if not isinstance(value, datetime):
        raise refuse(path, value, "an ISO time such as 2026-03-01T12:00:00Z")
    return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


def mapping(value: object, path: str) -> Mapping[str, Any]:
    """A mapping whose keys are all text."""
    if not isinstance(value, Mapping):
        raise refuse(path, value, "a mapping of names to values")
    for key in value:
        if not isinstance(key, str):
            raise UsageError(f"{path}: the key {shown(key)} must be a text; put it in quotes")
    return value


def build(kind: type[T], readers: Mapping[str, Reader], data: object, path: str) -> T:
    """An instance of dataclass ``kind`` from a mapping; ``null`` counts as absent.

    Raises UsageError for an unknown key, with the nearest known, and for a missing one.
    """
    entries = mapping(data, path)
    check_keys(entries, readers, path)
    fields = {
        key: readers[key](value, join(path, key))
        for key, value in entries.items()
        if value is not None
    }
    for name in _required(kind):  # type: ignore[arg-type]
        if name not in fields:
            raise UsageError(f"{join(path, name)} is missing")
    return kind(**fields)


@cache
def _required(kind: type) -> tuple[str, ...]:
    return tuple(
        entry.name
        for entry in dataclasses.fields(kind)
        if entry.default is dataclasses.MISSING and entry.default_factory is dataclasses.MISSING
    )


def check_keys(entries: Mapping[str, Any], known: Collection[str], path: str) -> None:
    """UsageError for the first key that is not known."""
    for key in entries:
        if key not in known:
            raise UsageError(f"{join(path, key)}: {unknown(key, known)}")


def unknown(word: str, known: Collection[str]) -> str:
    """``unknown 'x'; did you mean y? Known are ...``"""
    close = nearest(word, sorted(known))
    hint = f"; did you mean {close}?" if close else "."
    return f"unknown {shown(word)}{hint} Known are {', '.join(sorted(known))}"


def join(path: str, key: str) -> str:
    """Path of a key; ``gn1:`` is the head of a node's paths."""
    if not path:
        return key
    return f"{path} {key}" if path.endswith(":") else f"{path}.{key}"


def _items(value: object, path: str) -> list[Any] | tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise refuse(path, value, "a list")
    return value


def _spaced(unit: str) -> str:
    return f" {unit}" if unit else ""
