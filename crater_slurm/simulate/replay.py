"""Replay in time: jobs arrive, wait in order of arrival, start with backfill, and end.

Time goes from event to event; at each, jobs that end leave first, then arrivals join the queue,
then the queue is gone through. Placement is a policy's, the same that the fill-up uses.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from crater_slurm.placement.packing.kernels import WHOLE, Floats, Ints
from crater_slurm.placement.packing.score import fragmented
from crater_slurm.placement.packing.state import Mix, Need, Placed
from crater_slurm.simulate.backfill import Needs, Promise, Running
from crater_slurm.simulate.policies import POLICIES
from crater_slurm.simulate.trace import Nodes
from crater_slurm.simulate.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How a replay goes. ``depth`` is how many waiting jobs each pass tests (bf_max_job_test).

    ``warm_up`` is the share of the arrivals' span that no figure counts, since the cluster starts
    empty; nor is anything measured after the last arrival, except waits and the makespan.
    """

    depth: int = 500
    warm_up: float = 0.0
    samples: int = 200


@dataclass(frozen=True, slots=True)
class Sample:
    """The cluster at a time, in %: GPU allocated and GPU that is really used, mean since the
    sample before; CPU likewise; fragmented share of the idle GPU and jobs that wait, just then."""

    time: float
    allocated: float
    used: float
    cpu: float
    fragmented: float
    waiting: int


@dataclass(frozen=True, slots=True)
class Replayed:
    """One replay. Times are seconds, shares are %; ``waits`` is of each job that counts, and
    ``milli`` the milli-GPU that it asks of all its nodes."""

    policy: str
    seed: int
    jobs: int
    span: float
    makespan: float
    waits: Floats
    milli: Ints
    samples: tuple[Sample, ...]
    warm_up: float
    starts: Floats
    ends: Floats

    @property
    def counted(self) -> list[Sample]:
        """Samples after the warm-up; all of them if that leaves none."""
        return [s for s in self.samples if s.time > self.warm_up] or list(self.samples)

    def mean(self, name: str) -> float:
        """Mean of a sample's value over the time that counts."""
        return float(np.mean([getattr(sample, name) for sample in self.counted] or [0.0]))


class Meter:
    """Integrals over time of what is allocated, cut into samples of equal length."""

    def __init__(self, nodes: Nodes, span: float, samples: int) -> None:
        # Where nodes have no GPU, a share of it is 0 of 1.
        self._gpu = max(1, sum(nodes.gpus) * WHOLE)
        self._cpu = max(1, sum(rest[0] for rest in nodes.rest))
        self._width = span / samples if span else 0.0
        self._left = samples if span else 0
        self.taken = self.used = self.cpu = 0
        self._areas = np.zeros(3)
        self._last = 0.0
        self._edge = self._width
        self.samples: list[Sample] = []

    def until(self, now: float, state: Callable[[], tuple[float, int]]) -> None:
        """Time goes on to ``now`` with nothing changed."""
        while self._left and now >= self._edge:
            self._add(self._edge)
            taken, used, cpu = (float(area) for area in 100 * self._areas / self._width)
            strewn, waiting = state()
            self.samples.append(
                Sample(
                    time=self._edge,
                    allocated=taken / self._gpu,
                    used=used / self._gpu,
                    cpu=cpu / self._cpu,
                    fragmented=strewn,
                    waiting=waiting,
                )
            )
            self._areas[:] = 0
            self._left -= 1
            self._edge = self._width * (len(self.samples) + 1)
        if self._left:
            self._add(now)

    def _add(self, now: float) -> None:
        self._areas += np.asarray((self.taken, self.used, self.cpu)) * (now - self._last)
        self._last = now


class Queue:
    """Jobs that wait, in order; one leaves from near the front without the rest being moved."""

    def __init__(self, jobs: int) -> None:
        self._jobs: Ints = np.empty(jobs, np.int64)
        self._begin = self._end = 0

    def __len__(self) -> int:
        return self._end - self._begin

    def join(self, job: int) -> None:
        self._jobs[self._end] = job
        self._end += 1

    def window(self, depth: int) -> Ints:
        """The first ``depth`` that wait."""
        return self._jobs[self._begin : min(self._end, self._begin + depth)]

    def leave(self, position: int) -> None:
        begin = self._begin
        self._jobs[begin + 1 : begin + position + 1] = self._jobs[begin : begin + position].copy()
        self._begin += 1


class Replay:
    """The state of one replay; ``run`` does it."""

    def __init__(
        self, work: Workload, nodes: Nodes, policy: str, *, seed: int = 42,
        rules: Rules = Rules(), mix: Mix | None = None,
        tick: Callable[[float], None] = lambda _: None,
    ) -> None:  # fmt: skip
        self.work, self.rules, self.policy, self.seed = work, rules, policy, seed
        self.cluster = nodes.cluster()
        self.mix = mix or work.mix()
        random = np.random.default_rng([seed, 1])
        self._chooser = POLICIES[policy].make(self.cluster, self.mix, random)
        kinds = len(nodes.kinds)
        self._needs, self._running = Needs(work.needs, kinds), Running(kinds)
        self._queue = Queue(work.jobs)
        self._meter = Meter(nodes, work.span, rules.samples)
        self._pieces: dict[int, list[tuple[Placed, int]]] = {}
        self._ends: list[tuple[float, int]] = []
        self._starts: Floats = np.full(work.jobs, -1.0)
        self._finished: Floats = np.full(work.jobs, -1.0)
        self._promise: tuple[int, Promise] | None = None
        self._tick = tick

    def run(self) -> Replayed:
        """All jobs until the last has ended."""
        arrival, following, now = self.work.arrival, 0, 0.0
        jobs = self.work.jobs
        while following < jobs or self._ends:
            now = min(
                float(arrival[following]) if following < jobs else np.inf,
                self._ends[0][0] if self._ends else np.inf,
            )
            self._meter.until(now, self._state)
            left = self._leave(now)
            before = len(self._queue)
            while following < jobs and arrival[following] <= now:
                self._queue.join(following)
                self._chooser.arrived(self.work.needs[int(self.work.need[following])])
                following += 1
                if following % 256 == 0:
                    self._tick(following / jobs)
            self._pass(now, 0 if left else before)
        self._tick(1.0)
        begin = self.rules.warm_up * self.work.span
        counts = arrival >= begin
        return Replayed(
            policy=self.policy, seed=self.seed, jobs=jobs, span=self.work.span, makespan=now,
            waits=(self._starts - arrival)[counts], milli=self._asked()[counts],
            samples=tuple(self._meter.samples),
            warm_up=begin, starts=self._starts, ends=self._finished,
        )  # fmt: skip

    def _asked(self) -> Ints:
        of_need = np.asarray([need.gpu for need in self.work.needs], np.int64)
        found: Ints = of_need[self.work.need] * self.work.nodes
        return found

    def _state(self) -> tuple[float, int]:
        return 100 * fragmented(self.cluster, self.mix), len(self._queue)

    def _leave(self, now: float) -> bool:
        """Jobs whose time has come end; whether there was any."""
        any_left = False
        while self._ends and self._ends[0][0] <= now:
            job = heapq.heappop(self._ends)[1]
            need = self.work.needs[self.work.need[job]]
            for placed, slot in self._pieces.pop(job):
                self._give_back(need, placed)
                self._running.remove(slot)
                self._needs.left(self.cluster, placed.node)
                self._count(job, need, -1)
            self._finished[job] = now
            any_left = True
        if any_left:
            self._promise = None
        return any_left

    def _pass(self, now: float, position: int) -> None:
        """Go through the queue from a position on and start what may start."""
        while True:
            window = self._queue.window(self.rules.depth)
            open_ = np.flatnonzero(self._needs.may[self.work.need[window[position:]]])
            if not open_.size:
                return
            position += int(open_[0])
            if self._start(int(window[position]), now, first=position == 0):
                self._queue.leave(position)
            else:
                position += 1

    def _start(self, job: int, now: float, *, first: bool) -> bool:
        """Start a job if it fits and, unless it is the first, does not delay the first."""
        work = self.work
        index, wanted = int(work.need[job]), int(work.nodes[job])
        need = work.needs[index]
        room = int(self.cluster.fitting(need).sum())
        if room < wanted:
            self._needs.may[index] = room > 0
            return False
        end = now + float(work.limit[job])
        promise = None if first else self._promised(int(self._queue.window(1)[0]))
        placed = self._place(need, wanted, promise, end)
        if placed is None:
            return False
        for piece in placed:
            if promise:
                promise.keep(need, piece, end)
            self._count(job, need, 1)
        self._pieces[job] = [(p, self._running.add(need, p, end)) for p in placed]
        self._starts[job] = now
        heapq.heappush(self._ends, (now + float(work.duration[job]), job))
        return True

    def _promised(self, job: int) -> Promise:
        if self._promise is None or self._promise[0] != job:
            need, nodes = self.work.needs[self.work.need[job]], int(self.work.nodes[job])
            self._promise = job, Promise.of(self.cluster, self._running, need, nodes)
        return self._promise[1]

    def _place(
        self, need: Need, wanted: int, promise: Promise | None, end: float
    ) -> list[Placed] | None:
        """Take a need from ``wanted`` nodes that differ and break no promise; all or nothing."""
        placed: list[Placed] = []
        closed: list[tuple[Need, Placed]] = []
        while len(placed) < wanted:
            choice = self._chooser.choose(need)
            if choice is None or any(choice[0] == hold.node for _, hold in closed):
                break
            piece = self.cluster.place(need, *choice)
            if promise and promise.breaks(need, piece, end):
                self.cluster.release(need, piece)
                closed.append(self._close(piece.node))
                continue
            self._chooser.placed(need, piece.node)
            placed.append(piece)
            if len(placed) < wanted:
                closed.append(self._close(piece.node))
        for hold, at in closed:
            self.cluster.release(hold, at)
        if len(placed) == wanted:
            return placed
        for piece in placed:
            self._give_back(need, piece)
        return None

    def _close(self, node: int) -> tuple[Need, Placed]:
        """Take all that is counted on a node for the moment, so that no policy chooses it."""
        hold = Need(take=tuple(int(amount) for amount in self.cluster.rest[node]))
        return hold, self.cluster.place(hold, node)

    def _give_back(self, need: Need, placed: Placed) -> None:
        self.cluster.release(need, placed)
        self._chooser.released(need, placed.node)

    def _count(self, job: int, need: Need, sign: int) -> None:
        """One piece more or less is allocated."""
        meter = self._meter
        meter.taken += sign * need.gpu
        meter.used += sign * int(self.work.worth[job])
        meter.cpu += sign * (need.take[0] if need.take else 0)
