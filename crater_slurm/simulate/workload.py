"""Jobs of a trace as arrays, ready to be replayed: a million of them take some 60 MB.

Here a trace gets the load that is wanted, time limits where it has none, and, for comparison, the
requests that users write on a cluster without shares.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np

from crater_slurm.errors import UsageError
from crater_slurm.placement.packing.kernels import WHOLE, Floats, Ints
from crater_slurm.placement.packing.state import Mix, Need
from crater_slurm.simulate.trace import Nodes, Notes, Task

HOUR = 3600.0
DAY = 24 * HOUR
#: Time limits that users ask where a trace has none: the next of these above the run time.
LIMITS = (HOUR, 4 * HOUR, 12 * HOUR, DAY, 3 * DAY, 7 * DAY, 14 * DAY, 30 * DAY, 90 * DAY, 365 * DAY)
#: Run times are cut here when a load is made up, as MaxTime of a partition does.
LONGEST = 7 * DAY


@dataclass(frozen=True, slots=True)
class Workload:
    """Jobs in order of arrival: seconds from the first, and indexes into ``needs``.

    ``worth`` is the milli-GPU that a job really uses on each of its nodes; ``need`` may ask more.
    Jobs that arrive at one time are in order of their need, nodes, limit and run time, so that the
    order of a file's rows never matters.
    """

    needs: tuple[Need, ...]
    arrival: Floats
    duration: Floats
    limit: Floats
    need: Ints
    nodes: Ints
    worth: Ints

    @property
    def jobs(self) -> int:
        return len(self.arrival)

    @property
    def span(self) -> float:
        """Seconds from the first arrival to the last."""
        return float(self.arrival[-1] - self.arrival[0]) if self.jobs else 0.0

    def take(self, picked: Ints, arrival: Floats) -> Workload:
        """These jobs, at these times of arrival."""
        return _ordered(
            self.needs, arrival, self.duration[picked], self.limit[picked],
            self.need[picked], self.nodes[picked], self.worth[picked],
        )  # fmt: skip

    def work(self, nodes: Nodes) -> Floats:
        """Resource-seconds of each job: of GPU, or of CPU where the nodes have no GPU."""
        of_need = [need.gpu if sum(nodes.gpus) else need.take[0] for need in self.needs]
        return self.duration * self.nodes * np.asarray(of_need, np.float64)[self.need]

    def load(self, nodes: Nodes) -> float:
        """Work that arrives, over what the nodes could do between first and last arrival."""
        able = capacity(nodes) * self.span
        return float(self.work(nodes).sum() / able) if able else 0.0

    def mix(self) -> Mix:
        """The target mix: needs by how often they are asked."""
        often = np.bincount(self.need, weights=self.nodes, minlength=len(self.needs))
        return Mix.target({n: int(c) for n, c in zip(self.needs, often, strict=True) if c})


def everything(workload: Workload) -> Ints:
    """Indexes of all jobs."""
    return np.arange(workload.jobs, dtype=np.int64)


def mix_of(needs: Iterable[Need]) -> Mix:
    """The target mix of these needs."""
    return Mix.target(Counter(needs))


def capacity(nodes: Nodes) -> int:
    """Milli-GPU of the nodes, or milli-CPU where they have no GPU."""
    return sum(nodes.gpus) * WHOLE or sum(rest[0] for rest in nodes.rest)


def collect(tasks: Iterable[Task], notes: Notes, tick: Callable[[int], None]) -> Workload:
    """All tasks of a trace. UsageError when there is none. ``tick`` hears how many were read."""
    known: dict[Need, int] = {}
    arrival, duration, limit = array("d"), array("d"), array("d")
    need, nodes = array("q"), array("q")
    shares = 0
    for task in tasks:
        arrival.append(task.arrival)
        duration.append(task.duration)
        limit.append(-1.0 if task.limit is None else max(task.limit, task.duration))
        need.append(known.setdefault(task.need, len(known)))
        nodes.append(task.nodes)
        shares += 0 < task.need.milli < WHOLE
        if len(arrival) % 1000 == 0:
            tick(len(arrival))
    if not arrival:
        raise UsageError("the trace has no job that ran")
    tick(len(arrival))
    if not shares:
        notes.say("GPU shares: none in this trace, all whole")
    limits = np.array(limit)
    if (limits < 0).any():
        notes.say(
            "time limits: where a job has none, it asks the next of 1, 4, 12, 24 h, 3, 7 ... days"
        )
    times = np.array(arrival)
    needs = tuple(known)
    indexes = np.array(need, np.int64)
    gpu = np.asarray([one.gpu for one in needs], np.int64)
    runs = np.array(duration)
    return _ordered(
        needs, times - times.min(), runs, np.where(limits < 0, asked_limits(runs), limits),
        indexes, np.array(nodes, np.int64), gpu[indexes],
    )  # fmt: skip


def asked_limits(duration: Floats) -> Floats:
    """The round limit above each run time."""
    steps = np.asarray(LIMITS)
    place = np.minimum(np.searchsorted(steps, duration, side="right"), len(LIMITS) - 1)
    found: Floats = np.maximum(steps[place], duration)
    return found


def _ordered(
    needs: tuple[Need, ...], arrival: Floats, duration: Floats, limit: Floats, need: Ints,
    nodes: Ints, worth: Ints,
) -> Workload:  # fmt: skip
    """Needs and jobs in the order that a workload promises."""
    order = sorted(range(len(needs)), key=lambda i: _key(needs[i]))
    place = np.empty(len(needs), np.int64)
    place[order] = np.arange(len(needs))
    need = place[need]
    by = np.lexsort((worth, duration, limit, nodes, need, arrival))
    return Workload(
        needs=tuple(needs[i] for i in order),
        arrival=arrival[by],
        duration=duration[by],
        limit=limit[by],
        need=need[by],
        nodes=nodes[by],
        worth=worth[by],
    )


def _key(need: Need) -> tuple[int, int, tuple[int, ...], int]:
    return need.count, need.milli, need.take, need.allowed


def cut(workload: Workload, longest: float) -> tuple[Workload, int]:
    """Run times and limits of at most ``longest`` seconds, and how many were cut."""
    over = int((workload.duration > longest).sum())
    shorter = replace(
        workload,
        duration=np.minimum(workload.duration, longest),
        limit=np.minimum(workload.limit, longest),
    )
    return shorter, over


def compressed(workload: Workload, nodes: Nodes, load: float) -> Workload:
    """The recorded arrivals, closer together or further apart, so that ``load`` is offered."""
    now = workload.load(nodes)
    if now == 0:
        raise UsageError("the trace has no span of arrivals or no work, so it can't have a load")
    return replace(workload, arrival=workload.arrival * (now / load))


def drawn(workload: Workload, nodes: Nodes, load: float, jobs: int, seed: int) -> Workload:
    """``jobs`` of the trace at random times (a Poisson process), so that ``load`` is offered.

    Each job of the trace comes as often as the others, to within one.
    """
    random = np.random.default_rng([seed, 2])
    rounds = [random.permutation(workload.jobs) for _ in range(-(-jobs // workload.jobs))]
    picked = np.concatenate(rounds)[:jobs]
    span = workload.work(nodes)[picked].sum() / (capacity(nodes) * load)
    if span <= 0:
        raise UsageError("the trace has no work on these nodes, so it can't have a load")
    times = np.sort(random.random(jobs))
    low, high = times[0], times[-1]
    even = (times - low) / (high - low) if high > low else times * 0
    return workload.take(picked, even * span)


def whole_gpus(workload: Workload, cpu_milli_per_gpu: int) -> Workload:
    """The same work as users ask it on a stock cluster: whole GPUs, and a fixed CPU for each.

    A share becomes a whole GPU; run times, memory and jobs without GPU stay as they are.
    """
    changed = [whole_need(need, cpu_milli_per_gpu) for need in workload.needs]
    known: dict[Need, int] = {}
    place = np.asarray([known.setdefault(need, len(known)) for need in changed], np.int64)
    return _ordered(
        tuple(known), workload.arrival, workload.duration, workload.limit,
        place[workload.need], workload.nodes, workload.worth,
    )  # fmt: skip


def whole_need(need: Need, cpu_milli_per_gpu: int) -> Need:
    """One need as users ask it on a stock cluster."""
    if not need.count:
        return need
    take = (cpu_milli_per_gpu * need.count, *need.take[1:])
    return replace(need, milli=WHOLE, take=take)


def cpu_milli_per_gpu(nodes: Nodes) -> int:
    """Milli-CPU a GPU on the node with the fewest, so that every node's GPUs can be used."""
    found = [rest[0] // gpus for rest, gpus in zip(nodes.rest, nodes.gpus, strict=True) if gpus]
    return min(found, default=0) // 1000 * 1000


def possible(workload: Workload, nodes: Nodes) -> tuple[Workload, int]:
    """Without the jobs that the empty cluster can't hold, and how many those are."""
    cluster = nodes.cluster()
    room = np.asarray([int(cluster.fitting(need).sum()) for need in workload.needs], np.int64)
    fits = np.flatnonzero(room[workload.need] >= workload.nodes)
    if not fits.size:
        raise UsageError("no job of the trace fits on these nodes")
    kept = workload.take(fits, workload.arrival[fits])
    return kept, workload.jobs - fits.size
