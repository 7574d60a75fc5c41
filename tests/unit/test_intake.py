"""Taking tasks in: at most once, whatever dies where; the same answer to the same task."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from task_samples import LLAMA, Clock, FakeSubmitter, account, llama, open_store, settings

from crater_slurm.alldata.document import TaskError
from crater_slurm.alldata.intake import ConflictError, Intake
from crater_slurm.alldata.marker import Marker
from crater_slurm.alldata.recover import Recoverer
from crater_slurm.alldata.run_as import Account, UserError
from crater_slurm.alldata.submission import AwayError, DoubtError, RefusedError
from crater_slurm.errors import StoreError
from crater_slurm.store.repository import Store
from crater_slurm.store.task_records import StoredTask


class Killed(BaseException):
    """The process dies here."""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(tmp_path) as store:
        yield store


class World:
    def __init__(self, store: Store) -> None:
        self.store, self.clock, self.slurm = store, Clock(), FakeSubmitter()
        self.restart()

    def restart(self) -> None:
        """Another process, over the same store and Slurm."""
        self.slurm.error = self.slurm.after = None
        self.intake = Intake(
            settings(),
            lambda: self.store,
            self.slurm,
            written=lambda: None,
            clock=self.clock,
            find_account=account,
        )
        self.recoverer = Recoverer(self.intake, lambda: self.store, self.slurm, clock=self.clock)

    def take(self, body: str | None = None) -> StoredTask:
        taken = self.intake.take("alldata", body or llama(), user=None, source="api")
        return taken.task

    def recover(self, seconds: float) -> None:
        """What the follower has done for tasks without a job, after a while."""
        self.clock.now += seconds
        for task in self.store.due_tasks(self.clock.now, 10):
            self.recoverer.recover_now(task)

    @property
    def task(self) -> StoredTask:
        found = self.store.task("alldata", "t1")
        assert found
        return found

    def told(self) -> list[str]:
        return [one.status for one in self.store.callbacks(oldest_first=True)]


@pytest.fixture
def world(store: Store) -> World:
    return World(store)


def test_a_task_becomes_one_job_and_the_same_task_again_the_same(world: World) -> None:
    first = world.take()
    assert (first.state, first.job_id, first.plan_id, first.user) == (
        "submitted",
        100,
        "plan1",
        "alice",
    )
    assert world.take() == first
    spelled = json.dumps(json.loads(llama()), indent=3)
    assert world.take(spelled) == first, "white space is no other task"
    assert world.slurm.submitted == ["t1"]


def test_another_task_under_the_same_id_is_refused(world: World) -> None:
    world.take()
    with pytest.raises(ConflictError, match="was sent before with another content"):
        world.take(llama(task_type="inference"))
    assert world.slurm.submitted == ["t1"]


def test_an_invalid_task_leaves_nothing_behind(world: World) -> None:
    with pytest.raises(TaskError):
        world.take(llama(task_type=7))
    assert world.store.tasks() == []


def test_a_client_without_a_user_can_not_submit(world: World) -> None:
    with pytest.raises(UserError, match=r"the client other has no cluster user.*--user"):
        world.intake.take("other", llama(), user=None, source="api")
    task = world.intake.take("other", llama(), user="bob", source="api").task
    assert task.user == "bob"


def test_what_slurm_refuses_is_told_and_stays_refused(world: World) -> None:
    world.slurm.error = RefusedError("invalid partition specified: gold")
    with pytest.raises(RefusedError):
        world.take()
    assert (world.task.state, world.task.settled) == ("rejected", True)
    assert world.told() == ["rejected"]
    world.restart()
    with pytest.raises(RefusedError, match="gold"):
        world.take()
    assert world.slurm.submitted == []
    assert world.told() == ["rejected"]


def test_while_slurm_is_away_the_task_is_kept_and_submitted_later(world: World) -> None:
    world.slurm.error = AwayError("Unable to contact slurm controller")
    task = world.take()
    assert (task.state, task.job_id) == ("submitting", None)
    assert "Unable to contact" in task.reason
    assert world.take().number == task.number
    world.recover(6)
    assert world.task.job_id is None
    world.slurm.error = None
    world.recover(6)
    assert (world.task.state, world.task.job_id, world.task.reason) == ("submitted", 100, "")
    world.recover(1000)
    assert world.slurm.submitted == ["t1"]


def test_a_crash_before_slurm_was_asked_loses_no_task(world: World) -> None:
    world.slurm.error = Killed()
    with pytest.raises(Killed):
        world.take()
    assert (world.task.state, world.task.attempt) == ("submitting", world.clock.now)
    world.restart()
    world.recover(11)
    assert world.slurm.submitted == [], "an sbatch of before may still be under way"
    for _ in range(40):
        world.recover(6)
    assert world.task.job_id == 100
    assert world.slurm.submitted == ["t1"]


def test_a_crash_between_sbatch_and_commit_finds_the_job_and_sends_nothing(world: World) -> None:
    world.slurm.after = Killed()
    with pytest.raises(Killed):
        world.take()
    assert world.task.job_id is None
    world.restart()
    world.recover(11)
    assert (world.task.state, world.task.job_id) == ("submitted", 100)
    world.recover(1000)
    assert world.slurm.submitted == ["t1"]


def test_a_store_that_goes_away_behind_sbatch_costs_no_second_job(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: Any) -> bool:
        raise StoreError("the store is locked by another writer")

    with monkeypatch.context() as patched:
        patched.setattr(world.store, "change_task", away)
        with pytest.raises(StoreError):
            world.take()
    assert world.take().state == "submitting"
    world.recover(11)
    assert world.task.job_id == 100
    assert world.slurm.submitted == ["t1"]


def test_an_sbatch_without_an_answer_is_looked_for_before_it_is_sent_again(world: World) -> None:
    world.slurm.after = DoubtError("Socket timed out on send/recv operation")
    assert world.take().state == "submitting"
    world.slurm.after = None
    world.recover(2)
    assert world.task.job_id == 100
    assert world.slurm.submitted == ["t1"]


def test_a_job_that_appears_late_is_found_within_the_grace(world: World) -> None:
    world.slurm.error = DoubtError("timed out")
    world.take()
    world.slurm.error = None
    world.recover(30)
    assert world.task.job_id is None
    world.slurm.jobs[world.task.token] = [55]
    world.recover(30)
    assert world.task.job_id == 55
    assert world.slurm.submitted == []


def test_of_two_jobs_of_one_task_the_second_is_cancelled(world: World) -> None:
    world.slurm.error = DoubtError("timed out")
    world.take()
    world.slurm.error = None
    for _ in range(40):
        world.recover(6)
    assert world.task.job_id == 100
    world.slurm.cancelled.clear()
    world.recoverer._end_doubles(world.task, [101])
    assert world.slurm.cancelled == [101]


def test_a_lost_submission_that_went_through_after_all_does_not_run_twice(world: World) -> None:
    """It arrives between the last search and the second attempt's own."""
    world.slurm.error = DoubtError("timed out")
    world.take()
    world.slurm.error = None
    submit = world.slurm.submit

    def late(task: Any, user: Account, token: str) -> Any:
        world.slurm.jobs[token] = [55]
        return submit(task, user, token)

    world.slurm.submit = late  # type: ignore[method-assign]
    for _ in range(40):
        world.recover(6)
    assert world.task.job_id == 100
    assert world.slurm.cancelled == [55]


def test_after_a_long_absence_slurm_s_records_say_whether_it_ran(world: World) -> None:
    world.slurm.after = Killed()
    with pytest.raises(Killed):
        world.take()
    world.restart()
    world.slurm.jobs.clear()  # MinJobAge is over
    world.slurm.recorded = [100]
    world.recover(4000)
    assert world.task.job_id == 100
    assert world.slurm.submitted == ["t1"]


def test_records_without_the_job_mean_that_it_never_was(world: World) -> None:
    world.slurm.error = Killed()
    with pytest.raises(Killed):
        world.take()
    world.restart()
    world.slurm.recorded = []
    world.recover(4000)
    assert world.task.job_id == 100


def test_without_records_nobody_knows_and_nothing_is_sent_twice(world: World) -> None:
    world.slurm.after = Killed()
    with pytest.raises(Killed):
        world.take()
    world.restart()
    world.slurm.jobs.clear()
    world.recover(4000)
    assert (world.task.state, world.task.settled) == ("unknown", True)
    assert world.told() == ["unknown"]
    assert world.slurm.submitted == ["t1"]


def test_two_schedulers_that_recover_the_same_task_submit_it_once(world: World) -> None:
    world.slurm.error = AwayError("away")
    stored = world.take()
    world.slurm.error = None
    other = World(world.store)
    other.slurm = world.slurm
    other.restart()
    world.recoverer.recover_now(stored)
    other.recoverer.recover_now(stored)
    assert world.slurm.submitted == ["t1"]


def test_cancelling(world: World) -> None:
    task = world.take()
    world.intake.cancel(task)
    assert world.slurm.cancelled == [100]
    look = world.task.look
    assert look is not None
    assert look <= world.clock.now + 1, "Slurm is asked soon"


def test_a_task_that_slurm_does_not_have_is_cancelled_here(world: World) -> None:
    world.slurm.error = AwayError("away")
    task = world.take()
    after = world.intake.cancel(task)
    assert (after.state, after.settled) == ("cancelled", True)
    assert world.told() == ["cancelled"]
    world.slurm.error = None
    world.recover(100)
    assert world.slurm.submitted == []


def test_a_task_that_may_just_be_submitted_is_not_called_cancelled(world: World) -> None:
    world.slurm.error = DoubtError("timed out")
    task = world.take()
    with pytest.raises(ConflictError, match="is being submitted"):
        world.intake.cancel(task)


def test_a_cancel_that_meets_a_submission_does_not_lose_the_job(world: World) -> None:
    world.slurm.error = AwayError("away")
    before = world.take()
    world.slurm.error = None
    world.recover(6)
    with pytest.raises(ConflictError):
        world.intake.cancel(before)
    assert (world.task.state, world.task.job_id) == ("submitted", 100)


def test_a_task_that_a_user_submits_is_followed_and_never_sent(world: World) -> None:
    marker = Marker("t1", "0123456789ab")
    world.recoverer.adopt("alice", marker, "plan7")
    world.recoverer.adopt("alice", marker, "plan8")
    (task,) = world.store.tasks()
    assert (task.client, task.source, task.plan_id) == ("user:alice", "command", "plan7")
    world.recover(2)
    (task,) = world.store.tasks()
    assert task.job_id is None
    world.slurm.jobs[f"alice/{marker}"] = [55]
    world.recover(6)
    (task,) = world.store.tasks()
    assert (task.job_id, task.state, task.plan_id) == (55, "submitted", "plan7")
    assert world.slurm.submitted == []


def test_a_mere_test_of_a_submission_is_forgotten(world: World) -> None:
    world.recoverer.adopt("alice", Marker("t1", "0123456789ab"), None)
    for _ in range(30):
        world.recover(6)
    assert world.store.tasks() == []
    assert world.told() == []
    assert world.slurm.submitted == []


def test_the_source_text_s_task_is_taken_byte_for_byte(world: World) -> None:
    body = json.dumps(LLAMA, indent=2)
    task = world.take(body)
    assert world.store.task_body(task.number) == body
