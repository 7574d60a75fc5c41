"""When a job's checkpoint folder may go, and what a worker's word is worth."""

from __future__ import annotations

import pytest
from node_fakes import USER

from crater_slurm.node import checkpoints_state as state
from crater_slurm.node.jobs import ENDED, PREPARED, JobRecord


def record(phase: str = ENDED, restarts: int = 0, **checkpoints: object) -> JobRecord:
    return JobRecord(
        job_id="7",
        uid=USER,
        gid=USER,
        cluster="c1",
        phase=phase,
        restarts=restarts,
        checkpoints=dict(checkpoints),
    )


def step(number: int, **more: object) -> dict[str, object]:
    return {"name": "step", "step": number, "run": "7.0", "bytes": 10, "local": True, **more}


@pytest.mark.parametrize(
    ("phase", "checkpoints", "safe"),
    [
        (ENDED, {}, True),
        (PREPARED, {}, False),
        (ENDED, {"used": True}, False),
        (ENDED, {"used": True, "done": True}, True),
        (ENDED, {"used": True, "done": True, "unflushed": 2}, True),  # has nowhere to go
        (ENDED, {"used": True, "done": True, "destination": "/p", "unflushed": 2}, False),
        (ENDED, {"used": True, "done": True, "destination": "/p", "unflushed": 0}, True),
        (ENDED, {"used": True, "destination": "/p", "unflushed": 0}, False),
    ],
)
def test_a_folder_is_safe_to_remove_once_nothing_in_it_is_still_needed(
    phase: str, checkpoints: dict[str, object], safe: bool
) -> None:
    assert state.safe_to_remove(record(phase, **checkpoints)) is safe


@pytest.mark.parametrize(
    ("checkpoints", "keep", "stays"),
    [
        ({}, "remove", False),
        ({}, "keep_checkpoints", True),
        ({"used": True}, "remove", True),  # its worker has not finished
        ({"used": True, "done": True, "saved": True}, "remove", False),
        ({"used": True, "done": True, "saved": True, "requeue": True}, "remove", True),
        ({"used": True, "done": True, "saved": True, "destination": "/p"}, "remove", True),
        ({"used": True, "done": True, "destination": "/p"}, "remove", False),  # empty
    ],
)
def test_what_the_end_of_a_job_leaves(
    checkpoints: dict[str, object], keep: str, stays: bool
) -> None:
    assert state.stays_after_end(record(**checkpoints), keep) is stays


def test_a_worker_s_state_is_counted_whole_and_kept_in_part() -> None:
    job = record(destination="/p", used=True)
    steps = [step(n, flushed=n < 90) for n in range(100)]
    assert state.take(job, {"op": "state", "steps": steps, "done": True})
    assert state.unflushed(job) == 10
    kept = [entry["step"] for entry in job.checkpoints["steps"]]
    assert len(kept) == state.MOST_STEPS
    assert kept == sorted(kept)
    assert set(range(90, 100)) <= set(kept)
    assert not state.take(job, {"op": "state", "steps": steps, "done": True}), "nothing new"


def test_a_running_job_s_worker_is_never_done() -> None:
    job = record(PREPARED, used=True)
    state.take(job, {"done": True, "steps": []})
    assert job.checkpoints["done"] is False


@pytest.mark.parametrize(
    "steps",
    [
        None,
        {"step": 1},
        [1, "x", None, []],
        [step(-1)],
        [step(10**15)],
        [step(True)],
        [step("1")],
        [step(1, name="../../etc")],
        [step(1, name=None)],
        [step(1, name=["x"])],
    ],
)
def test_steps_that_can_t_be_are_left_out(steps: object) -> None:
    job = record()
    state.take(job, {"steps": steps})
    assert job.checkpoints["steps"] == []


def test_texts_and_numbers_of_a_worker_are_bounded() -> None:
    job = record(destination="/p")
    bad = step(1, run="r" * 999, bytes=1 << 80, error="no\nspace\x1b[2J" + "x" * 9999, local="yes")
    counters = {"drained_bytes": 5, "x" * 99: 1, "a b": 1, "ok": True, "inf": 1e300, "é": 1}
    state.take(job, {"steps": [bad], "counters": counters})
    (kept,) = job.checkpoints["steps"]
    assert kept["bytes"] == 0
    assert kept["local"] is False
    assert len(kept["run"]) == 64
    assert kept["error"].startswith("no space [2J")
    assert len(kept["error"]) == 300
    assert job.checkpoints["counters"] == {"drained_bytes": 5}


def test_a_restart_goes_on_with_what_its_last_run_left() -> None:
    before = record(destination="/p", used=True, done=True, unflushed=1, steps=[step(1)], idle=True)
    again = record(PREPARED, restarts=1)
    begun = state.begin(again, before)
    assert begun["unflushed"] == 1
    assert "done" not in begun
    assert state.begin(record(PREPARED, restarts=0), before) == {}
    other = record(PREPARED, restarts=1)
    other.uid = USER + 1
    assert state.begin(other, before) == {}


def test_the_summary_says_what_is_still_to_come() -> None:
    job = record(destination="s3://b/u/7", used=True)
    steps = [step(1, flushed=True, bytes=10**9), step(2, bytes=2 * 10**9, error="403: no access")]
    state.take(job, {"steps": steps})
    assert state.summary(job) == {
        "destination": "s3://b/u/7",
        "newest": 2,
        "steps": 2,
        "gb": 3.0,
        "to_flush": 1,
        "problem": "403: no access",
    }
    assert state.summary(record()) == {}


def test_a_step_that_arrived_is_told_once_whatever_its_worker_says() -> None:
    job = record(PREPARED, destination="/p")
    arrived = {"flushed": True, "arrived": 2, "world": 4}
    state.take(job, {"steps": [step(1, **arrived), step(2, flushed=True), step(3)]})
    (one,) = state.untold(job)
    assert state.arrival(job, one) == {
        "name": "step", "step": 1, "run": "7.0", "bytes": 10, "ranks": 2, "world": 4,
        "destination": "/p", "restarts": 0,
    }  # fmt: skip
    assert state.untold(job) == [one]
    state.note_told(job, one)
    for flushed in (False, True):
        state.take(job, {"steps": [step(1, **{**arrived, "flushed": flushed})]})
        assert state.untold(job) == []
    again = record(PREPARED, restarts=1)
    again.checkpoints = state.begin(again, job)
    assert state.untold(again) == [], "a restart on this node remembers"
    for number in range(1000):
        state.note_told(job, step(number, **arrived))
    assert len(job.checkpoints["told"]) == 256


@pytest.mark.parametrize(
    "arrival",
    [
        {},
        {"arrived": 0, "world": 4},
        {"arrived": 5, "world": 4},
        {"arrived": True, "world": 1},
        {"arrived": 1, "world": 10**7},
        {"arrived": "1", "world": "1"},
    ],
)
def test_an_arrival_that_can_t_be_is_none(arrival: dict[str, object]) -> None:
    job = record(PREPARED, destination="/p")
    state.take(job, {"steps": [step(1, flushed=True, **arrival)]})
    assert state.untold(job) == []


def test_nothing_arrives_without_a_destination_or_at_one_that_nobody_can_reach() -> None:
    arrived = {"flushed": True, "arrived": 1, "world": 1}
    for known in ({}, {"destination": "/p", "unreachable": True}):
        job = record(PREPARED, **known)
        state.take(job, {"steps": [step(1, **arrived)]})
        assert state.untold(job) == []
