"""Replay in time: starts worked out by hand, and what must hold for any trace."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crater_slurm.simulate.backfill import Promise
from crater_slurm.simulate.replay import Queue, Replay, Replayed, Rules
from crater_slurm.simulate.results import waits_by_gpus
from crater_slurm.simulate.trace import Nodes, Task
from tests.unit.simulate_samples import job, nodes, work


def replayed(on: Nodes, tasks: list[Task], policy: str = "firstfit", **rules: float) -> Replayed:
    return Replay(work(tasks), on, policy, rules=Rules(**rules)).run()  # type: ignore[arg-type]


def starts(on: Nodes, *tasks: Task, **rules: float) -> list[float]:
    return replayed(on, list(tasks), **rules).starts.tolist()


def test_a_short_job_is_backfilled_and_the_first_one_keeps_its_time() -> None:
    """4 GPUs: A has 3 until 10, so B (4 GPUs) can start at 10; C (1 GPU) is over by then."""
    on = nodes(4)
    assert starts(on, job(on, 0, 3, 10), job(on, 1, 4, 5), job(on, 2, 1, 8)) == [0, 10, 2]


def test_a_job_that_would_delay_the_first_one_waits_for_it() -> None:
    """C would run until 11, one second too long; B ends at 15."""
    on = nodes(4)
    assert starts(on, job(on, 0, 3, 10), job(on, 1, 4, 5), job(on, 2, 1, 9)) == [0, 10, 15]


def test_it_is_the_time_limit_that_counts_for_backfill_not_the_run_time() -> None:
    on = nodes(4)
    tasks = job(on, 0, 3, 10), job(on, 1, 4, 5), job(on, 2, 1, 2, limit=100)
    assert starts(on, *tasks) == [0, 10, 15]


def test_a_job_that_ends_before_its_limit_lets_the_first_one_start_then() -> None:
    on = nodes(4)
    assert starts(on, job(on, 0, 3, 4, limit=10), job(on, 1, 4, 5)) == [0, 4]


def test_a_long_job_may_start_beside_the_promise_where_it_leaves_room() -> None:
    """B needs 3 GPUs, at 10 there are 4: a job of one GPU may run beside it, a second may not."""
    on = nodes(4)
    tasks = job(on, 0, 2, 10), job(on, 1, 3, 5), job(on, 2, 1, 100), job(on, 3, 1, 100)
    assert starts(on, *tasks) == [0, 10, 2, 15]


def test_a_long_job_goes_to_another_node_than_the_one_that_is_promised() -> None:
    """First fit would take node 0, where B is to start at 10; node 1 has a GPU too."""
    on = nodes(4, 2)
    tasks = job(on, 0, 3, 10), job(on, 0.5, 1, 50), job(on, 1, 4, 5), job(on, 2, 1, 100)
    # 0.5: fits on node 0 beside A until 50.5, so node 0 is promised to B from then on.
    assert starts(on, *tasks) == [0, 0.5, 50.5, 2]
    held = Replay(work(list(tasks)), on, "firstfit")
    held.run()
    on = nodes(4, 1)
    tasks = job(on, 0, 3, 10), job(on, 1, 4, 5), job(on, 2, 1, 100)
    assert starts(on, *tasks) == [0, 10, 2]


def test_jobs_of_two_nodes_start_together_on_nodes_that_differ() -> None:
    """Two nodes of two GPUs. B asks two nodes with one GPU each, A holds node 0 until 10."""
    on = nodes(2, 2)
    assert starts(on, job(on, 0, 2, 10), job(on, 1, 1, 5, wide=2), job(on, 2, 2, 3)) == [0, 10, 2]
    assert starts(on, job(on, 0, 1, 10, wide=2), job(on, 1, 2, 5)) == [0, 10]


def test_only_so_many_waiting_jobs_are_tested_as_the_depth_says() -> None:
    on = nodes(4)
    tasks = job(on, 0, 3, 10), job(on, 1, 4, 5), job(on, 2, 2, 8), job(on, 3, 1, 1)
    assert starts(on, *tasks, depth=3) == [0, 10, 15, 3]
    assert starts(on, *tasks, depth=2) == [0, 10, 15, 15]


def test_shares_run_beside_each_other() -> None:
    on = nodes(1)
    tasks = job(on, 0, 1, 10, milli=600), job(on, 1, 1, 5, milli=400), job(on, 2, 1, 5, milli=100)
    assert starts(on, *tasks) == [0, 1, 6]


def test_utilisation_of_a_tiny_replay() -> None:
    """2 GPUs over 10 s in two samples: one job throughout, a second from 5 on."""
    on = nodes(2, cpus=4)
    tasks = [job(on, 0, 1, 10), job(on, 5, 1, 100, cpus=3), job(on, 10, 1, 1)]
    done = replayed(on, tasks, samples=2)
    assert [(s.time, s.allocated, s.used, s.cpu) for s in done.samples] == [
        (5.0, 50.0, 50.0, 25.0),
        (10.0, 100.0, 100.0, 100.0),
    ]
    assert done.mean("allocated") == 75
    assert done.makespan == 105
    assert done.waits.tolist() == [0, 0, 0]


def test_waits_are_told_by_the_gpus_that_a_job_asks() -> None:
    """One GPU and its 4 CPUs: a share for 10 s, then a whole GPU that waits for it, 8 s."""
    on = nodes(1, cpus=4)
    tasks = [job(on, 0, 1, 10, milli=999), job(on, 2, 1, 5), job(on, 3, 0, 1)]
    assert waits_by_gpus(replayed(on, tasks)) == {"none": 0, "share": 0, "1": 8}


def test_warm_up_is_not_counted() -> None:
    on = nodes(2, cpus=4)
    tasks = [job(on, 0, 1, 10), job(on, 5, 1, 100, cpus=3), job(on, 10, 1, 1)]
    done = replayed(on, tasks, samples=2, warm_up=0.5)
    assert done.mean("allocated") == 100
    assert len(done.waits) == 2


def test_a_job_of_no_length_ends_at_once() -> None:
    on = nodes(1)
    assert starts(on, job(on, 0, 1, 0), job(on, 0, 1, 5), job(on, 1, 1, 0)) == [0, 0, 5]


def test_the_queue_keeps_the_order_of_those_that_stay() -> None:
    queue = Queue(5)
    for i in range(5):
        queue.join(i)
    queue.leave(2)
    queue.leave(0)
    assert queue.window(9).tolist() == [1, 3, 4]
    assert len(queue) == 3


@st.composite
def clusters(draw: st.DrawFn) -> Nodes:
    return nodes(draw(st.integers(1, 4)), *draw(st.lists(st.integers(0, 4), max_size=3)), cpus=8)


@st.composite
def traces(draw: st.DrawFn) -> tuple[Nodes, list[Task]]:
    """A small cluster, and jobs of which some arrive and end at the same time."""
    on = draw(clusters())
    tasks = []
    for i in range(draw(st.integers(1, 25))):
        share = draw(st.booleans())
        runs = draw(st.integers(0, 6))
        tasks.append(
            job(
                on, draw(st.integers(0, 8)), 1 if share else draw(st.integers(0, 4)), runs,
                milli=draw(st.integers(1, 999)) if share else 1000,
                limit=runs + draw(st.integers(0, 5)), cpus=draw(st.integers(1, 8)),
                wide=draw(st.integers(1, 2)), name=f"j{i}",
            )
        )  # fmt: skip
    kept = [task for task in tasks if on.cluster().fitting(task.need).sum() >= task.nodes]
    return on, kept


class Checked(Replay):
    """Notes the first promise that each job got, and looks for what is oversubscribed."""

    def __init__(self, *args: object, **more: object) -> None:
        super().__init__(*args, **more)  # type: ignore[arg-type]
        self.promises: dict[int, float] = {}

    def _promised(self, job: int) -> Promise:
        promise = super()._promised(job)
        self.promises.setdefault(job, promise.time)
        return promise

    def _pass(self, now: float, position: int) -> None:
        super()._pass(now, position)
        assert (self.cluster.gpus >= 0).all()
        assert (self.cluster.rest >= 0).all()
        assert self._meter.taken == self.cluster.total - int(self.cluster.gpus.sum())


@pytest.mark.parametrize("policy", ["firstfit", "random", "bestfit"])
@settings(max_examples=60)
@given(traces(), st.integers(1, 30))
def test_every_job_ends_once_and_nothing_is_oversubscribed(
    policy: str, trace: tuple[Nodes, list[Task]], depth: int
) -> None:
    on, tasks = trace
    if not tasks:
        return
    jobs = work(tasks)
    replay = Checked(jobs, on, policy, rules=Rules(depth=depth))
    done = replay.run()
    assert (done.starts >= jobs.arrival).all()
    assert np.array_equal(done.ends, done.starts + jobs.duration)
    assert done.makespan == done.ends.max()
    assert np.array_equal(replay.cluster.gpus, on.cluster().gpus)
    assert np.array_equal(replay.cluster.rest, replay.cluster.capacity)
    for index, promised in replay.promises.items():
        assert done.starts[index] <= promised


@settings(max_examples=40)
@given(traces(), st.randoms(use_true_random=False))
def test_the_order_of_equal_events_never_matters(
    trace: tuple[Nodes, list[Task]], shuffler: random.Random
) -> None:
    on, tasks = trace
    if not tasks:
        return
    again = list(tasks)
    shuffler.shuffle(again)
    one, other = replayed(on, tasks, "random"), replayed(on, again, "random")
    assert np.array_equal(one.starts, other.starts)
    assert one.samples == other.samples
