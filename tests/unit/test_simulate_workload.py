"""Loads, limits and requests that a trace is given before it is replayed."""

from __future__ import annotations

import numpy as np
import pytest

from crater_slurm.errors import UsageError
from crater_slurm.simulate import workload
from crater_slurm.simulate.trace import Notes, Task
from tests.unit.simulate_samples import job, nodes, work

HOUR = 3600


def test_load_is_the_work_over_what_the_cluster_could_do_while_jobs_arrive() -> None:
    """2 jobs x 1 GPU x 10 s on 2 GPUs, over 20 s of arrivals: 20 of 40 GPU-seconds."""
    on = nodes(2)
    assert work([job(on, 0, 1, 10), job(on, 20, 1, 10)]).load(on) == 0.5


def test_recorded_arrivals_come_closer_together_for_more_load() -> None:
    on = nodes(2)
    jobs = work([job(on, 0, 1, 10), job(on, 8, 1, 5), job(on, 20, 1, 5)])
    assert jobs.load(on) == 0.5
    assert workload.compressed(jobs, on, 1.0).arrival.tolist() == [0, 4, 10]


def test_a_cluster_without_gpus_has_its_load_in_cpus() -> None:
    on = nodes(0, cpus=4)
    assert work([job(on, 0, 0, 10, cpus=2), job(on, 10, 0, 10, cpus=2)]).load(on) == 1.0


def test_a_job_of_two_nodes_is_twice_the_work() -> None:
    on = nodes(2, 2)
    assert work([job(on, 0, 2, 10, wide=2), job(on, 20, 1, 0)]).load(on) == 0.5


def test_drawn_arrivals_offer_the_load_exactly_and_each_job_as_often_as_the_others() -> None:
    on = nodes(8)
    jobs = work([job(on, 0, 1, 10), job(on, 0, 2, 30), job(on, 0, 4, 7)])
    made = workload.drawn(jobs, on, 0.9, 300, seed=1)
    assert made.load(on) == pytest.approx(0.9)
    assert sorted(np.bincount(made.need).tolist()) == [100, 100, 100]
    assert np.array_equal(made.arrival, workload.drawn(jobs, on, 0.9, 300, seed=1).arrival)
    assert not np.array_equal(made.arrival, workload.drawn(jobs, on, 0.9, 300, seed=2).arrival)


def test_a_job_without_a_limit_asks_the_next_round_time() -> None:
    on = nodes(1)
    tasks = [Task(str(s), on.need(cpu_milli=1, memory_mib=1), s, s) for s in (60, HOUR, 90_000)]
    notes = Notes()
    jobs = workload.collect(tasks, notes, lambda _: None)
    assert jobs.limit.tolist() == [HOUR, 4 * HOUR, 72 * HOUR]
    assert any(line.startswith("time limits:") for line in notes.lines())
    assert "GPU shares: none in this trace, all whole" in notes.lines()


def test_a_limit_is_never_below_the_run_time() -> None:
    on = nodes(1)
    assert work([job(on, 0, 1, 100, limit=60)]).limit.tolist() == [100]


def test_run_times_are_cut_with_their_limits() -> None:
    on = nodes(1)
    jobs, over = workload.cut(work([job(on, 0, 1, 100, limit=500), job(on, 1, 1, 5)]), 50)
    assert over == 1
    assert jobs.duration.tolist() == [50, 5]
    assert jobs.limit.tolist() == [50, 5]


def test_whole_gpu_requests_round_shares_up_and_fix_the_cpus() -> None:
    on = nodes(4, cpus=64)
    tasks = [
        job(on, 0, 1, 9, milli=250, cpus=2),
        job(on, 1, 2, 9, cpus=30),
        job(on, 2, 0, 9, cpus=7),
    ]
    whole = workload.whole_gpus(work(tasks), workload.cpu_milli_per_gpu(on))
    asked = [whole.needs[i] for i in whole.need]
    assert [(n.count, n.milli, n.take[0]) for n in asked] == [
        (1, 1000, 16_000), (2, 1000, 32_000), (0, 0, 7_000),
    ]  # fmt: skip
    assert whole.worth.tolist() == [250, 2000, 0]


def test_jobs_that_no_empty_cluster_holds_are_left_out() -> None:
    on = nodes(4, 2)
    tasks = [job(on, 0, 5, 1), job(on, 1, 4, 1, wide=2), job(on, 2, 2, 1, wide=2)]
    kept, lost = workload.possible(work(tasks), on)
    assert (kept.jobs, lost) == (1, 2)
    with pytest.raises(UsageError, match="no job of the trace fits"):
        workload.possible(work(tasks[:1]), on)


def test_a_trace_without_jobs_is_an_error() -> None:
    with pytest.raises(UsageError, match="no job that ran"):
        work([])
