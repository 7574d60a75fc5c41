"""The platform's parts in crater-scheduler: what the filter sees, and what can't start."""

from __future__ import annotations

import os
import pwd
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from task_samples import NOW, Clock, FakeSlurm, FakeSubmitter, open_store, settings

from crater_slurm.config import Settings
from crater_slurm.config.alldata import AllData, Callback
from crater_slurm.scheduler.tasks import Tasks
from crater_slurm.store.repository import Store

ME = pwd.getpwuid(os.geteuid()).pw_name
MARKER = "crater-task:t1/0123456789ab"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(tmp_path) as store:
        yield store


@pytest.fixture
def make(store: Store) -> Iterator[Callable[..., Tasks]]:
    made: list[Tasks] = []

    def build(own: AllData | None = None) -> Tasks:
        tasks = Tasks(
            Settings(alldata=own or settings()),
            lambda: store,
            FakeSlurm(),  # type: ignore[arg-type]
            FakeSubmitter(),
            CollectorRegistry(),
            Clock(),
        )
        made.append(tasks)
        return tasks

    yield build
    for tasks in made:
        tasks.recoverer.stop()


def submission(comment: str, **more: str) -> dict[str, str]:
    return {"op": "submit", "uid": str(os.geteuid()), "field.comment": comment} | more


def test_a_task_by_command_is_followed_from_the_filter_on(
    make: Callable[..., Tasks], store: Store
) -> None:
    tasks = make()
    tasks.saw(submission(f"{MARKER} my own words"), "plan1")
    tasks.recoverer.stop()  # waits for what was begun
    (task,) = store.tasks()
    assert (task.task_id, task.user, task.plan_id) == ("t1", ME, "plan1")


@pytest.mark.parametrize(
    "message",
    [
        submission(""),
        submission("crater: gpus=2"),
        submission("crater-task:odd"),
        submission(MARKER, op="modify"),
        submission(MARKER, check="nonce"),
        submission(MARKER, uid="4000000000"),
        submission(MARKER, uid="x"),
        submission(f"{MARKER} crater-run:0123456789abcdef01234567"),
        {},
    ],
)
def test_what_is_no_task_by_command_is_none(
    make: Callable[..., Tasks], store: Store, message: dict[str, str]
) -> None:
    tasks = make()
    tasks.saw(message, "plan1")
    tasks.recoverer.stop()
    assert store.tasks() == []


def test_where_nobody_is_told_nothing_is_followed(make: Callable[..., Tasks], store: Store) -> None:
    tasks = make(AllData())
    tasks.saw(submission(MARKER), "plan1")
    tasks.recoverer.stop()
    assert store.tasks() == []
    assert tasks.deliverer is None


def test_the_decision_of_a_task_that_is_being_submitted_is_remembered(
    make: Callable[..., Tasks],
) -> None:
    tasks = make()
    for i in range(2000):
        tasks.saw(submission(f"{MARKER} crater-run:{i:024x}"), f"plan{i}")
    assert tasks.intake._plan_of(f"{1999:024x}") == "plan1999"
    assert tasks.intake._plan_of(f"{0:024x}") is None, "only so many are kept"


def test_what_can_not_start_is_a_problem_and_the_rest_goes_on(
    make: Callable[..., Tasks], tmp_path: Path
) -> None:
    tasks = make(AllData(callback=Callback(url="http://alldata.example/"), poll=True))
    (problem,) = tasks.problems()
    assert "alldata.api_url" in problem or "anybody on the way" in problem
    tasks = make(AllData(callback=Callback(url="https://a.example/", user="u")))
    assert tasks.problems() == [
        "no callbacks are sent: alldata.callback.user needs alldata.callback.password_file"
    ]


def test_threads_start_follow_and_stop(store: Store) -> None:
    registry, slurm = CollectorRegistry(), FakeSlurm()
    tasks = Tasks(
        Settings(alldata=settings(look_seconds=1, callback=Callback())),
        lambda: store,
        slurm,  # type: ignore[arg-type]
        FakeSubmitter(),
        registry,
        Clock(NOW + 1),
    )
    from task_samples import add_job

    add_job(store)
    slurm.set(7, "RUNNING", started=NOW, nodes="n1")
    tasks.start()
    report: dict[str, Any] = {"job_id": "7", "node": "n1", "time": NOW, "phase": "task"}
    tasks.take_report(report | {"grant": {"cpus": "0-1"}})
    part = {"name": "step", "step": 1, "run": "7.0", "bytes": 5, "ranks": 1, "world": 1}
    flushed = report | {"phase": "flushed", "grant": part | {"destination": "/p"}}
    deadline = time.monotonic() + 60
    while len(store.callbacks()) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    tasks.take_report(flushed)
    tasks.stop()
    told = [one.status for one in store.callbacks(oldest_first=True)]
    assert told == ["scheduled", "running", "flushed"]
    assert {one.delivery for one in store.callbacks()} == {"off"}
    assert b"crater_task_looks 1.0" in generate_latest(registry)
    assert tasks.problems() == []
