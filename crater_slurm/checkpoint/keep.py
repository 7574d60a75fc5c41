"""Which steps may go, by keep_last and keep_every; pure rules, for the cache and the destination.

Never to go: the newest complete step, one that is not safe yet, one being read, and what is not a
complete step, for nobody knows what it may still become, unless a newer one makes it needless.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Item:
    """One step of one run in one place.

    ``safe``: losing it here loses nothing, or only what the rules give up. In a cache with a
    destination that is a flushed step; at the destination every complete one. ``busy``: being
    restored from, or otherwise read.
    """

    name: str
    step: int
    run: str
    time: float
    complete: bool = True
    safe: bool = True
    busy: bool = False


def age(item: Item) -> tuple[int, float]:
    """Sorts the newest last, as a restart sees it: the highest step, of one step the last save."""
    return (item.step, item.time)


def kept(items: Iterable[Item], keep_last: int, keep_every: int) -> list[Item]:
    """Complete steps that the rules keep, newest first; all of them when keep_last is 0.

    Of one step saved by several runs only the newest save counts. A run may go back and save lower
    steps than are there: the last by number and the last by time both stay, since one of them is
    what a restart takes and the other is what was saved just now.
    """
    newest: dict[tuple[str, int], Item] = {}
    for item in sorted((i for i in items if i.complete), key=age):
        newest[item.name, item.step] = item
    found = sorted(newest.values(), key=age, reverse=True)
    if keep_last <= 0:
        return found
    chosen = {id(item) for item in found if keep_every > 0 and item.step % keep_every == 0}
    for name in {item.name for item in found}:
        named = [item for item in found if item.name == name]
        by_time = sorted(named, key=lambda item: (item.time, item.step), reverse=True)
        chosen |= {id(item) for item in (*named[:keep_last], *by_time[:keep_last])}
    return [item for item in found if id(item) in chosen]


def removable(items: Sequence[Item], keep_last: int, keep_every: int) -> list[Item]:
    """Steps that may be removed, oldest first. Duplicates of a step go with any rules."""
    stay = {id(item) for item in kept(items, keep_last, keep_every)}
    gone = (i for i in items if i.complete and i.safe and not i.busy and id(i) not in stay)
    return sorted(gone, key=age)


def superseded(item: Item, complete: Sequence[Item], keep_last: int, keep_every: int) -> bool:
    """Whether the rules would remove this step from a place at once, if it came there now.

    ``complete`` is what is complete there. Without a newer complete step, by number and by time,
    nothing is superseded.
    """
    if not any(
        other.name == item.name and other.step > item.step and other.time > item.time
        for other in complete
    ):
        return False
    whole = dataclasses.replace(item, complete=True)
    return all(other is not whole for other in kept([*complete, whole], keep_last, keep_every))


def evictable(items: Sequence[Item]) -> list[Item]:
    """Steps that may go when a cache is full, whatever the rules keep; oldest first.

    The newest complete step of each name stays, since a restart wants it first.
    """
    newest = {id(item) for item in kept(items, 1, 0)}
    gone = (i for i in items if i.complete and i.safe and not i.busy and id(i) not in newest)
    return sorted(gone, key=age)
