"""Nodes that are set apart for others: told, never refused, because a reservation ends.

Slurm starts no job on a node whose reservation begins before the job's time limit is over, so a
job without a short limit waits for a maintenance that is still days away.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from crater_slurm.model.cluster import Reservation
from crater_slurm.placement.need import Need
from crater_slurm.placement.partitions import duration
from crater_slurm.placement.tally import enough

#: Reservations and the node sets they hold.
Held = Sequence[tuple[Reservation, int]]
#: Ends of reservations that are tried for the time when the job can start.
_MOST_ENDS = 64


def confined(held: Held, names: Sequence[str]) -> int | None:
    """Nodes of the reservations that a job names; None where they don't confine it."""
    nodes, found = 0, set()
    for reservation, there in held:
        if reservation.name in names:
            if not reservation.confines:
                return None
            nodes |= there
            found.add(reservation.name)
    return nodes if found and found == set(names) else None


def note(held: Held, need: Need, passed: int, named: int, now: float, minutes: float) -> str | None:
    """A sentence when reservations leave too few of the nodes that can run the job.

    ``minutes`` is the job's time limit, infinite when it has none.
    """
    ahead = [(r, nodes & passed) for r, nodes in held if r.blocks and r.end > now]
    ahead = [(r, nodes) for r, nodes in ahead if nodes]

    def free(start: float, among: Held = ahead) -> int:
        return passed & ~_blocked(among, start, minutes)

    if enough(free(now), need, named):
        return None
    blocking = [r for r, _ in ahead if r.start < now + minutes * 60]
    ends = sorted({r.end for r, _ in ahead})[:_MOST_ENDS]
    end = next((t for t in ends if enough(free(t), need, named)), None)
    until = f"until {_clock(end)}" if end is not None else "for longer than can be told"
    names = ", ".join(sorted({r.name for r in blocking}))
    count = passed.bit_count()
    who = f"of the {count} nodes that can run this job {free(now).bit_count() or 'none'}"
    who += f" can start it now because of reservations ({names})"
    if not enough(free(now, [(r, n) for r, n in ahead if r.start <= now]), need, named):
        return f"{who}: it waits {until}"
    first = min(r.start for r in blocking if r.start > now)
    text = f"{who}, which its time limit reaches into: it waits {until}"
    left = int((first - now) // 60)
    return f"{text}; with --time={duration(left)} it could start before" if left else text


def _blocked(ahead: Held, start: float, minutes: float) -> int:
    """Nodes on which a job that starts then would run into a reservation."""
    nodes = 0
    for reservation, there in ahead:
        if reservation.start < start + minutes * 60 and reservation.end > start:
            nodes |= there
    return nodes


def _clock(seconds: float) -> str:
    """Local time, as Slurm's commands print it."""
    return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M")
