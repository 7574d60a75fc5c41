"""Whether a waiting job's excluded nodes are to be replaced after the cluster changed. Pure.

Only a list that is exactly what crater set is ever replaced: anything else is somebody's own edit.
A job is never given a list that leaves it no node, since Slurm would hold it for ever.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum


class Act(StrEnum):
    """What becomes of one job."""

    LEAVE = "leave"
    CHANGE = "exclude"
    INFEASIBLE = "infeasible"
    OTHERWISE = "otherwise"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What planning the job again comes to: the nodes that it must not get, the user's own too.

    ``feasible`` False: no node can run it any more. ``same`` False: it could only run with other
    options than those that Slurm was given at submit. ``why`` is for people. ``against`` says why
    the list must not be replaced; with ``unprefer`` crater's own preference has to go with it.
    """

    excluded: frozenset[str] = frozenset()
    feasible: bool = True
    same: bool = True
    why: str = ""
    against: str = ""
    unprefer: bool = False


@dataclass(frozen=True, slots=True)
class Judgement:
    """The act, with a sentence for the log and the record."""

    act: Act
    why: str = ""


def judge(
    current: frozenset[str], set_by_us: Collection[frozenset[str]], wanted: Wanted
) -> Judgement:
    """What to do about a job that now excludes ``current``.

    ``set_by_us`` are the lists that crater gave it so far, at submit and later.
    """
    if current not in set_by_us:
        return Judgement(Act.LEAVE, "its excluded nodes were changed by somebody else")
    if not wanted.feasible:
        return Judgement(Act.INFEASIBLE, wanted.why)
    if not wanted.same:
        return Judgement(Act.OTHERWISE, wanted.why)
    if current == wanted.excluded:
        return Judgement(Act.LEAVE, "nothing changes for it")
    if wanted.against:
        return Judgement(Act.OTHERWISE, wanted.against)
    opened = len(current - wanted.excluded)
    closed = len(wanted.excluded - current)
    parts = [f"{_nodes(opened)} more can run it"] if opened else []
    parts += [f"{_nodes(closed)} left out now"] if closed else []
    return Judgement(Act.CHANGE, " and ".join(parts))


def _nodes(count: int) -> str:
    return f"{count} node" if count == 1 else f"{count} nodes"
