"""What one ``crater simulate`` does: each policy, load and seed in turn, on one trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from crater_slurm.errors import UsageError
from crater_slurm.placement.packing.kernels import Ints
from crater_slurm.placement.packing.score import fragmented
from crater_slurm.placement.packing.state import Cluster, Mix
from crater_slurm.simulate import philly, sacct, workload
from crater_slurm.simulate.fill import Fill, fill
from crater_slurm.simulate.replay import Replay, Replayed, Rules
from crater_slurm.simulate.trace import Nodes, Notes, Task, Trace, openb_tasks
from crater_slurm.simulate.workload import Workload

Requests = Literal["shares", "whole"]
#: Shares of the cluster's GPU that have arrived when a picture of the filling is taken.
PICTURES = (0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is asked. Exactly one of ``fill`` and replay: a replay keeps the recorded times of
    arrival, or offers each of ``loads``. ``jobs`` and ``drawn`` are about made-up arrivals."""

    policies: tuple[str, ...]
    seeds: tuple[int, ...]
    fill: float | None = None
    loads: tuple[float, ...] = ()
    requests: tuple[Requests, ...] = ("shares",)
    cpu_milli_per_gpu: int | None = None
    jobs: int | None = None
    drawn: bool | None = None
    longest: float | None = None
    rules: Rules = field(default_factory=Rules)


@dataclass(frozen=True, slots=True)
class Filled:
    """A fill-up with what its curve does not have: fragmentation, and pictures of the cluster.

    A picture is the milli-GPU in use, [node, GPU], -1 for a GPU that a node does not have.
    """

    fill: Fill
    fragments: tuple[tuple[float, float], ...]
    pictures: tuple[tuple[float, Ints], ...]


@dataclass(slots=True)
class Run:
    """One policy on one kind of requests and one load, by seed."""

    policy: str
    requests: Requests
    load: float | None
    offered: list[float] = field(default_factory=list)
    fills: list[Filled] = field(default_factory=list)
    replays: list[Replayed] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Watched(Nodes):
    """Nodes that keep hold of the clusters made of them."""

    made: list[Cluster] = field(default_factory=list)

    def cluster(self) -> Cluster:
        self.made.append(Cluster(self.gpus, self.models, self.rest))
        return self.made[-1]

    @classmethod
    def of(cls, nodes: Nodes) -> Watched:
        return cls(
            nodes.names, nodes.gpus, nodes.models, nodes.rest, nodes.model_names, nodes.kinds,
            nodes.bandwidth_mb_s_per_cpu, nodes.notes,
        )  # fmt: skip


def read_trace(file: Path, nodes: Nodes, *, shards: int = 100) -> Trace:
    """A trace of any form that is known by its first line; UsageError when it is none."""
    notes = Notes()
    for note in nodes.notes:
        notes.say(note)
    try:
        with file.open(encoding="utf-8", errors="replace") as opened:
            first = opened.readline(4096).strip()
    except OSError as error:
        raise UsageError(f"can't read {file}: {error.strerror}") from error
    columns = {name.strip().lower() for name in first.replace("|", ",").split(",")}
    if {"cpu_milli", "num_gpu"} <= columns:
        return Trace("openb", openb_tasks(file, nodes), notes, recorded=False)
    if "runtime" in columns:
        recorded = "submit" in columns
        return Trace("philly", philly.tasks(file, nodes, notes), notes, recorded)
    if "jobid" in columns or first.startswith(("{", "JobId=")):
        return Trace("slurm", sacct.tasks(file, nodes, notes, shards=shards), notes, recorded=True)
    raise UsageError(
        f"{file} is no trace: its first line has neither cpu_milli and num_gpu (openb), nor "
        f"runtime (Philly), nor JobID (sacct --parsable2); it is {first[:60]!r}"
    )


def study(trace: Trace, nodes: Nodes, plan: Plan, tick: Callable[[str, float], None]) -> list[Run]:
    """All runs of a plan. ``tick`` hears what is being done, and how far it is, 0..1."""
    if plan.fill is not None:
        return list(_fills(trace, nodes, plan, tick))
    work = workload.collect(trace.tasks, trace.notes, lambda n: tick(f"{n:,} jobs read", 0.0))
    if not work.duration.any():
        raise UsageError("no job of the trace has a run time, so it can only fill up; use --fill")
    return list(_replays(trace, work, nodes, plan, tick))


def _fills(
    trace: Trace, nodes: Nodes, plan: Plan, tick: Callable[[str, float], None]
) -> Iterator[Run]:
    assert plan.fill is not None
    tasks = [piece for task in trace.tasks for piece in _pieces(task)]
    if not any(task.need.count for task in tasks) or not sum(nodes.gpus):
        raise UsageError("a fill-up needs jobs with GPUs and nodes with GPUs")
    for requests in plan.requests:
        asked = _requested(tasks, nodes, plan, trace.notes) if requests == "whole" else tasks
        mix = workload.mix_of(task.need for task in asked)
        for policy in plan.policies:
            run = Run(policy, requests, None)
            for seed in plan.seeds:
                run.fills.append(_fill(asked, nodes, policy, plan.fill, seed, mix, tick))
            yield run


def _pieces(task: Task) -> list[Task]:
    """A fill-up knows no jobs of several nodes: each of its nodes is a task."""
    if task.nodes == 1:
        return [task]
    return [Task(f"{task.name}/{i:05}", task.need) for i in range(task.nodes)]


def _requested(tasks: Sequence[Task], nodes: Nodes, plan: Plan, notes: Notes) -> list[Task]:
    milli = _cpu_per_gpu(nodes, plan, notes)
    return [Task(task.name, workload.whole_need(task.need, milli)) for task in tasks]


def _cpu_per_gpu(nodes: Nodes, plan: Plan, notes: Notes) -> int:
    milli = plan.cpu_milli_per_gpu
    milli = workload.cpu_milli_per_gpu(nodes) if milli is None else milli
    notes.say(
        f"requests 'whole': a share asks a whole GPU, a job with GPUs asks {milli / 1000:g} CPUs "
        "a GPU instead of its own; memory, run times and jobs without GPU are as with shares"
    )
    return milli


def _fill(
    tasks: Sequence[Task], nodes: Nodes, policy: str, share: float, seed: int, mix: Mix,
    tick: Callable[[str, float], None],
) -> Filled:  # fmt: skip
    watched = Watched.of(nodes)
    fragments: list[tuple[float, float]] = []
    pictures: list[tuple[float, Ints]] = []

    def look(arrived: float) -> None:
        cluster = watched.made[0]
        fragments.append((100 * arrived, 100 * fragmented(cluster, mix)))
        while len(pictures) < len(PICTURES) and arrived >= PICTURES[len(pictures)]:
            pictures.append((100 * PICTURES[len(pictures)], picture(cluster)))
        tick(f"{policy}, seed {seed}", arrived / share)

    done = fill(tasks, watched, policy, share=share, seed=seed, tick=look)
    pictures.append((100 * share, picture(watched.made[0])))
    return Filled(done, tuple(fragments), tuple(pictures))


def picture(cluster: Cluster) -> Ints:
    """Milli-GPU in use, [node, GPU]; -1 for a GPU that a node does not have."""
    used = 1000 - cluster.gpus
    for node, size in enumerate(cluster.sizes):
        used[node, size:] = -1
    return used


def _replays(
    trace: Trace, recorded: Workload, nodes: Nodes, plan: Plan, tick: Callable[[str, float], None]
) -> Iterator[Run]:
    recorded, impossible = workload.possible(recorded, nodes)
    if impossible:
        trace.notes.say(f"jobs that fit on no empty node left out: {impossible} jobs")
    if plan.longest is not None:
        recorded, over = workload.cut(recorded, plan.longest)
        trace.notes.say(f"run times cut to {plan.longest / 3600:g} h: {over} jobs")
    recorded = _fresh(recorded)
    for load in plan.loads or (None,):
        for requests in plan.requests:
            for policy in plan.policies:
                run = Run(policy, requests, load)
                for seed in plan.seeds:
                    work = _at_load(trace, recorded, nodes, plan, load, seed)
                    run.offered.append(work.load(nodes))
                    if requests == "whole":
                        milli = _cpu_per_gpu(nodes, plan, trace.notes)
                        work, lost = workload.possible(workload.whole_gpus(work, milli), nodes)
                        if lost:
                            trace.notes.say(f"requests 'whole': {lost} jobs fit on no empty node")
                    text = f"{policy}, {requests}, seed {seed}" + (f", {load:.0%}" if load else "")
                    told = _teller(tick, text)
                    replay = Replay(work, nodes, policy, seed=seed, rules=plan.rules, tick=told)
                    run.replays.append(replay.run())
                yield run


def _teller(tick: Callable[[str, float], None], text: str) -> Callable[[float], None]:
    return lambda share: tick(text, share)


def _fresh(work: Workload) -> Workload:
    """Arrivals from 0, after jobs were left out."""
    return work.take(workload.everything(work), work.arrival - work.arrival[0])


def _at_load(
    trace: Trace, recorded: Workload, nodes: Nodes, plan: Plan, load: float | None, seed: int
) -> Workload:
    draw = plan.drawn if plan.drawn is not None else not trace.recorded
    if load is None:
        return recorded
    if draw:
        made = workload.drawn(recorded, nodes, load, plan.jobs or recorded.jobs, seed)
        trace.notes.say(
            "arrivals: drawn (a Poisson process), each job of the trace as often as any other"
        )
    else:
        made = workload.compressed(recorded, nodes, load)
        trace.notes.say("arrivals: the recorded ones, all closer together or further apart")
    longest = float(made.duration.max())
    if made.span < 5 * longest:
        trace.notes.say(
            f"load {load:.0%}: jobs arrive over {made.span / 86400:.3g} days and the longest runs "
            f"{longest / 86400:.3g} days, so there is no steady state; take more --jobs, fewer "
            "nodes (--every) or a shorter --longest"
        )
    return made
