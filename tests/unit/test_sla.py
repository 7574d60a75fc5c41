"""Promises of max-wait: when a step is due, which one, for whom, and when none is."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from queue_samples import NOW, array, queued

from crater_slurm.model.queue import QueuedJob
from crater_slurm.model.request import Request
from crater_slurm.placement import sla
from crater_slurm.placement.sla import Policy, Step, Watched

BOTH = Policy(steps=("priority", "qos"), qos="urgent", least_wait_seconds=1)
ONE = Policy(least_wait_seconds=1)


def step(
    job: QueuedJob, waited: float, *taken: str, policy: Policy = BOTH, promise: float = 1000
) -> Step | None:
    watched = Watched(job=job, promise_seconds=promise)
    return sla.next_step(watched, job.label, frozenset(taken), NOW + waited, policy)


def kind(*args: Any, **more: Any) -> str | None:
    found = step(*args, **more)
    return found and found.kind


@pytest.mark.parametrize(
    ("waited", "taken", "due"),
    [
        (0, (), None),
        (799, (), None),
        (800, (), "priority"),
        (899, ("priority",), None),
        (900, ("priority",), "qos"),
        (950, (), "priority"),
        (950, ("priority", "qos"), None),
        (5000, ("priority",), "qos"),
        (5000, ("priority", "qos"), None),
    ],
)
def test_steps_come_in_order_each_once_and_before_the_promise_is_broken(
    waited: float, taken: tuple[str, ...], due: str | None
) -> None:
    assert kind(queued(), waited, *taken) == due


def test_the_step_says_what_and_why() -> None:
    assert step(queued(nice=5), 812) == Step(
        label="7", kind="priority", value="-995", why="waited 812 s of max-wait=1000s (81%)"
    )
    found = step(queued(), 900, "priority")
    assert found is not None
    assert found.value == "urgent"


@pytest.mark.parametrize(
    ("start", "due"),
    [
        (None, "priority"),
        (NOW + 1000, None),  # in time to the second
        (NOW + 1001, "priority"),
        (NOW + 849, "priority"),  # an estimate that has passed says nothing
    ],
)
def test_nothing_is_done_for_a_job_that_slurm_will_start_in_time(
    start: float | None, due: str | None
) -> None:
    assert kind(queued(start=start), 850) == due


@pytest.mark.parametrize(
    "fields",
    [
        {"state": "RUNNING"},
        {"eligible": None},
        {"eligible": NOW + 6000},
        {"priority": 0, "reason": "JobHeldUser"},
        {"reason": "Dependency"},
        {"reason": "QOSMaxJobsPerUserLimit"},
        {"reason": "AssocGrpGRES"},
        {"reason": "JobArrayTaskLimit"},
        {"reason": "BadConstraints"},
    ],
)
def test_a_job_that_does_not_wait_for_its_turn_is_helped_by_nothing(
    fields: dict[str, Any],
) -> None:
    assert kind(queued(**fields), 5000) is None


def test_the_clock_runs_from_the_moment_the_job_could_start() -> None:
    late = queued(submitted=NOW - 10_000, eligible=NOW + 500)
    assert kind(late, 1299) is None
    assert kind(late, 1300) == "priority"


def test_a_promise_shorter_than_the_admin_s_least_counts_as_that() -> None:
    policy = Policy(least_wait_seconds=600)
    assert kind(queued(), 479, promise=1, policy=policy) is None
    assert kind(queued(), 480, promise=1, policy=policy) == "priority"


@pytest.mark.parametrize(
    ("priority", "limit", "value"),
    [(100, None, "-1000"), (100, 400, "-300"), (400, 400, None), (900, 400, None)],
)
def test_no_priority_goes_above_the_limit(
    priority: int, limit: int | None, value: str | None
) -> None:
    policy = Policy(priority_limit=limit, least_wait_seconds=1)
    found = step(queued(priority=priority), 999, policy=policy)
    assert (found and found.value) == value


def test_a_step_that_would_change_nothing_makes_room_for_the_next() -> None:
    policy = Policy(steps=("priority", "qos"), qos="urgent", priority_limit=1, least_wait_seconds=1)
    assert kind(queued(), 900, policy=policy) == "qos"
    assert kind(queued(qos="urgent"), 900, policy=policy) is None
    assert kind(queued(), 900, policy=Policy(steps=("qos",), least_wait_seconds=1)) is None


def test_nice_stays_in_slurm_s_range() -> None:
    found = step(queued(nice=-2_147_483_000), 999)
    assert found is not None
    assert found.value == "-2147483645"


def watched(job: QueuedJob, promise: float = 1000, **taken: str) -> Watched:
    return Watched(
        job=job,
        promise_seconds=promise,
        taken={label[1:]: frozenset(kinds.split()) for label, kinds in taken.items()},
    )


def labels(steps: list[Step]) -> list[str]:
    return [found.label for found in steps]


def test_a_user_has_so_many_places_and_the_most_urgent_jobs_get_them() -> None:
    jobs = [watched(queued(n), promise=1000 - n) for n in (1, 2, 3, 4)]
    other = watched(queued(9, user_id=2000))
    assert labels(sla.due([*jobs, other], NOW + 999, ONE)) == ["4", "3", "9"]


def test_a_job_that_was_helped_holds_its_place_until_it_starts() -> None:
    helped = [watched(queued(1), _1="priority"), watched(queued(2), _2="priority")]
    assert sla.due([*helped, watched(queued(3))], NOW + 999, ONE) == []
    assert labels(sla.due([helped[0], watched(queued(3))], NOW + 999, ONE)) == ["3"]


def test_a_further_step_needs_no_further_place() -> None:
    helped = [watched(queued(n), **{f"_{n}": "priority"}) for n in (1, 2)]
    assert [(s.label, s.kind) for s in sla.due(helped, NOW + 999, BOTH)] == [
        ("1", "qos"),
        ("2", "qos"),
    ]


def test_of_an_array_only_as_many_tasks_are_helped_as_there_are_places() -> None:
    assert labels(sla.due([watched(array(5, "3-900"))], NOW + 999, ONE)) == ["5_3", "5_4"]
    helped = watched(array(5, "3-900"), _5_3="priority")
    assert labels(sla.due([helped], NOW + 999, ONE)) == ["5_4"]
    split = [watched(queued(6, array_id=5, tasks="3"), _5_3="priority"), watched(array(5, "4-9"))]
    assert labels(sla.due(split, NOW + 999, ONE)) == ["5_4"]


_JOBS = st.lists(
    st.builds(
        lambda n, user, wait, start, reason, promise, taken: Watched(
            job=queued(
                n,
                user_id=user,
                eligible=NOW - wait,
                start=None if start is None else NOW + start,
                reason=reason,
            ),
            promise_seconds=promise,
            taken={str(n): frozenset(taken)} if taken else {},
        ),
        st.integers(1, 10**9),
        st.integers(1, 3),
        st.floats(0, 5000),
        st.none() | st.floats(-100, 5000),
        st.sampled_from(["Priority", "Resources", "Dependency"]),
        st.integers(1, 4000),
        st.sets(st.sampled_from(["priority", "qos"])),
    ),
    max_size=12,
    unique_by=lambda w: w.job.id,
)


@given(_JOBS, st.integers(1, 4))
def test_whatever_waits_the_admin_s_limits_hold(jobs: list[Watched], places: int) -> None:
    policy = Policy(steps=("priority", "qos"), qos="urgent", jobs_per_user=places)
    steps = sla.due(jobs, NOW, policy)
    by_label = {w.job.label: w for w in jobs}
    assert len({s.label for s in steps}) == len(steps)
    for found in steps:
        entry = by_label[found.label]
        assert found.kind not in entry.taken.get(found.label, frozenset())
        assert entry.job.reason != "Dependency"
        promise = max(entry.promise_seconds, policy.least_wait_seconds)
        assert NOW - (entry.job.eligible or 0) >= 0.8 * promise - 1e-6
        start = entry.job.start
        if start is not None and NOW < start <= (entry.job.eligible or 0) + promise:
            assert (entry.job.eligible or 0) + promise < NOW
    for user in {w.job.user_id for w in jobs}:
        before = [w for w in jobs if w.job.user_id == user and w.taken]
        new = [
            s
            for s in steps
            if by_label[s.label].job.user_id == user and not by_label[s.label].taken
        ]
        assert len(new) <= max(0, places - len(before))


@pytest.mark.parametrize(
    ("wanted", "percent", "seconds", "words"),
    [
        (
            65,
            64.4,
            600,
            "its GPUs are 64 % busy in the mean of 10 min, below min-gpu-utilization=65",
        ),
        (65, 65.0, 600, ""),
        (65, 10.0, 599, ""),
        (65, None, 6000, ""),
        (None, 0.0, 6000, ""),
    ],
)
def test_gpu_use_below_what_was_promised_is_said_when_it_is_known(
    wanted: int | None, percent: float | None, seconds: float, words: str
) -> None:
    assert sla.below(Request(min_gpu_utilization_percent=wanted), percent, seconds) == words
