"""Following tasks: every state told once and in order, real cores, and few questions to Slurm."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from task_samples import NOW, Clock, FakeSlurm, add_job, open_store, settings

from crater_slurm.alldata.advance import Advancer
from crater_slurm.alldata.follow import Follower
from crater_slurm.errors import SlurmError, StoreError
from crater_slurm.store.repository import Store
from crater_slurm.store.task_records import StoredTask

LAYOUT = "Nodes=n1 CPU_IDs=0-3 Mem=64 GRES=gpu:a100:2(IDX:2-3)"
RUNNING = {"started": NOW, "nodes": "n1"}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(tmp_path) as store:
        yield store


class World:
    """A follower over a store, a Slurm and a clock."""

    def __init__(self, store: Store, **fields: Any) -> None:
        self.store, self.clock, self.slurm = store, Clock(), FakeSlurm()
        self.recovered: list[StoredTask] = []
        self.took = 0.0
        ticks = iter(range(10**9))
        self.follower = Follower(
            settings(**fields),
            lambda: store,
            self.slurm,  # type: ignore[arg-type]
            recover=self.recovered.append,
            written=lambda: None,
            clock=self.clock,
            monotonic=lambda: next(ticks) * self.took,
        )

    def look(self, seconds: float = 0.0) -> None:
        self.clock.now += seconds
        self.follower.look()

    def report(self, phase: str, node: str = "n1", job: int = 7, **grant: Any) -> None:
        about = {"restarts": 0, "gpus": [2, 3]} | grant
        time = self.clock.now
        self.follower.note(
            {"job_id": str(job), "node": node, "time": time, "phase": phase, "grant": about}
        )

    def flushed(self, node: str = "n1", job: int = 7, **grant: Any) -> None:
        """A node says that its part is at the destination."""
        time = self.clock.now
        about = {"job_id": str(job), "node": node, "time": time, "phase": "flushed"}
        self.follower.note_flushed(about | {"grant": PART | grant})

    def told(self, task: str = "t1") -> list[str]:
        return [one["status"] for one in self.payloads(task)]

    def payloads(self, task: str = "t1") -> list[dict[str, Any]]:
        found = self.store.callbacks(oldest_first=True, limit=1000)
        return [json.loads(one.payload) for one in found if one.task_id == task]

    def asked(self, command: str) -> int:
        return sum(words[0] == command for words in self.slurm.asked)


@pytest.fixture
def world(store: Store) -> World:
    return World(store)


def test_a_job_s_way_is_told_with_what_it_really_got(store: Store, world: World) -> None:
    add_job(store)
    world.slurm.set(7, "RUNNING", **RUNNING)
    world.slurm.layouts[7] = LAYOUT
    world.report("prolog", folders={"checkpoint": "/crater-cache/checkpoint/c/7"})
    world.report("task", cpus="8-11", numa_nodes=[1])
    world.look()
    assert world.told() == ["scheduled", "running"]
    scheduled = world.payloads()[0]
    assert scheduled["allocated_resources"] == {
        "node": "n1",
        "gpu_ids": ["2", "3"],
        "cpu_cores": [8, 9, 10, 11],
        "cpu_cores_source": "cpuset",
        "numa_node": 1,
        "numa_nodes": [1],
        "checkpoint_path": "/crater-cache/checkpoint/c/7",
    }
    assert (scheduled["job_id"], scheduled["sequence"], scheduled["time"]) == (
        7,
        1,
        "2027-01-15T08:00:00Z",
    )
    world.slurm.set(7, "FAILED", ended=NOW + 60, code=768, reason="NonZeroExitCode", **RUNNING)
    world.clock.now += 60
    world.report("epilog", exit_code="3:0")
    world.look()
    assert world.told() == ["scheduled", "running", "failed"]
    failed = world.payloads()[-1]
    assert (failed["exit_code"], failed["signal"], failed["reason"]) == (3, 0, "NonZeroExitCode")
    assert failed["allocated_resources"] == scheduled["allocated_resources"]
    task = store.task("alldata", "t1")
    assert task
    assert (task.settled, task.look, task.exit_code) == (True, None, "3:0")
    world.look(3600)
    assert world.told() == ["scheduled", "running", "failed"]


def test_the_cpuset_that_a_node_is_about_to_tell_is_waited_for(store: Store, world: World) -> None:
    add_job(store)
    world.slurm.set(7, "RUNNING", **RUNNING)
    world.slurm.layouts[7] = LAYOUT
    world.report("prolog")
    world.look(2)
    assert world.told() == []
    world.report("task", cpus="8-11", numa_nodes=[0, 1])
    world.look()
    got = world.payloads()[0]["allocated_resources"]
    assert (got["cpu_cores"], got["numa_node"], got["numa_nodes"]) == ([8, 9, 10, 11], None, [0, 1])


def test_but_not_for_ever_and_slurm_s_numbers_are_called_so(store: Store, world: World) -> None:
    add_job(store)
    world.slurm.set(7, "RUNNING", **RUNNING)
    world.slurm.layouts[7] = LAYOUT
    world.report("prolog")
    world.look(11)
    assert world.told() == ["scheduled", "running"]
    got = world.payloads()[0]["allocated_resources"]
    assert (got["cpu_cores"], got["cpu_cores_source"]) == ([0, 1, 2, 3], "slurm")
    assert got["numa_node"] is None


def test_a_cpuset_of_another_size_than_the_allocation_is_not_told(
    store: Store, world: World
) -> None:
    """Where cores are not constrained, a task may run on all of the machine's."""
    add_job(store)
    world.slurm.set(7, "RUNNING", **RUNNING)
    world.slurm.layouts[7] = LAYOUT
    world.report("task", cpus="0-127", numa_nodes=[0, 1])
    world.look()
    got = world.payloads()[0]["allocated_resources"]
    assert (got["cpu_cores"], got["cpu_cores_source"]) == ([0, 1, 2, 3], "slurm")


def test_every_node_of_a_job_is_told(store: Store, world: World) -> None:
    add_job(store)
    world.slurm.set(7, "RUNNING", started=NOW, nodes="n[1-3]")
    world.slurm.layouts[7] = (
        "Nodes=n[1-2] CPU_IDs=0-1 Mem=64 GRES=gpu:a100:1(IDX:0) "
        "Nodes=n3 CPU_IDs=4 Mem=64 GRES=gpu:a100:1(IDX:1)"
    )
    world.report("task", cpus="0-1", gpus=[0], numa_nodes=[0])
    world.look()
    running = world.payloads()[1]
    assert [(n["node"], n["gpu_ids"], n["cpu_cores"]) for n in running["nodes"]] == [
        ("n1", ["0"], [0, 1]),
        ("n2", ["0"], [0, 1]),
        ("n3", ["1"], [4]),
    ]
    assert running["allocated_resources"] == running["nodes"][0]


def test_a_job_that_came_and_went_between_two_looks_leaves_no_state_out(
    store: Store, world: World
) -> None:
    add_job(store)
    world.slurm.set(7, "COMPLETED", started=NOW + 5, ended=NOW + 20, nodes="n1")
    world.look(60)
    assert world.told() == ["scheduled", "running", "completed"]
    assert [one["time"] for one in world.payloads()] == [
        "2027-01-15T08:00:05Z",
        "2027-01-15T08:00:05Z",
        "2027-01-15T08:00:20Z",
    ]


def test_a_requeued_job_s_second_run_has_its_own_resources(store: Store, world: World) -> None:
    add_job(store)
    world.slurm.set(7, "RUNNING", **RUNNING)
    world.slurm.layouts[7] = LAYOUT
    world.report("task", cpus="8-11", numa_nodes=[1])
    world.look()
    world.slurm.set(7, "PENDING", restarts=1, submitted=NOW + 60, reason="BeginTime")
    world.look(60)
    assert world.told() == ["scheduled", "running", "requeued"]
    assert world.payloads()[-1]["allocated_resources"] is None
    world.slurm.set(7, "RUNNING", restarts=1, submitted=NOW + 60, started=NOW + 180, nodes="n2")
    world.slurm.layouts[7] = "Nodes=n2 CPU_IDs=4-7 Mem=64 GRES=gpu:a100:2(IDX:0-1)"
    world.clock.now = NOW + 180
    world.report("task", node="n2", cpus="20-23", gpus=[0, 1], numa_nodes=[2], restarts=1)
    world.look()
    again = world.payloads()[-1]
    assert (again["status"], again["restarts"]) == ("running", 1)
    got = again["allocated_resources"]
    assert (got["node"], got["cpu_cores"], got["gpu_ids"]) == ("n2", [20, 21, 22, 23], ["0", "1"])


def test_a_run_that_was_preempted_is_told_where_slurmdbd_knows(store: Store, world: World) -> None:
    add_job(store, state="running")
    world.slurm.accounting = True
    world.slurm.ends = ["PREEMPTED", "PENDING"]
    world.slurm.set(7, "PENDING", restarts=1, submitted=NOW + 60)
    world.look(60)
    assert world.told() == ["preempted", "requeued"]


def test_a_late_report_of_the_first_run_does_not_touch_the_second(
    store: Store, world: World
) -> None:
    add_job(store)
    world.report("task", cpus="20-23", restarts=1)
    world.report("epilog", exit_code="0:15", restarts=0)
    task = store.task("alldata", "t1")
    assert task
    assert task.resources["reports"]["n1"]["restarts"] == 1
    assert "exit_code" not in task.resources["reports"]["n1"]


def test_slurm_that_is_away_delays_and_loses_nothing(store: Store, world: World) -> None:
    add_job(store)
    world.slurm.set(7, "RUNNING", **RUNNING)
    world.slurm.away = True
    with pytest.raises(SlurmError):
        world.look()
    asked = len(world.slurm.asked)
    world.look(1)
    assert len(world.slurm.asked) == asked, "it is not pestered while it is away"
    world.slurm.away = False
    world.look(60)
    assert world.told() == ["scheduled", "running"]


def test_a_job_that_slurm_forgot_is_looked_up_in_its_records(store: Store, world: World) -> None:
    add_job(store)
    world.slurm.accounting = True
    about = {
        "user": "alice",
        "submitted": NOW - 10,
        "started": NOW,
        "ended": NOW + 9,
        "code": "0:9",
    }
    world.slurm.records[7] = about | {"word": "TIMEOUT", "nodes": "n1"}
    world.look(4000)
    assert world.told() == ["scheduled", "running", "timeout"]


def test_without_records_the_epilog_s_exit_code_tells(store: Store, world: World) -> None:
    add_job(store)
    world.report("task", cpus="0-3")
    world.report("epilog", exit_code="0:0")
    world.look(4000)
    assert world.told() == [], "once may be an accident"
    world.look(60)
    assert world.told() == ["scheduled", "running", "completed"]
    last = world.payloads()[-1]
    assert "Epilog" in last["reason"]
    assert last["time"] is None, "nobody knows when"


def test_and_without_either_it_is_unknown_and_said_so(store: Store, world: World) -> None:
    add_job(store)
    world.look(4000)
    world.look(60)
    assert world.told() == ["unknown"]
    assert "nobody recorded how it ended" in world.payloads()[0]["reason"]
    task = store.task("alldata", "t1")
    assert task
    assert task.settled


def test_another_job_under_the_same_id_is_not_the_task_s(store: Store, world: World) -> None:
    add_job(store)
    world.slurm.set(7, "COMPLETED", user="bob", started=NOW, ended=NOW, nodes="n1")
    world.look()
    world.slurm.set(7, "COMPLETED", submitted=NOW - 90_000, started=NOW, ended=NOW, nodes="n1")
    world.look(60)
    assert world.told() == ["unknown"]


def test_an_end_is_asked_for_again_while_slurm_cleans_up(store: Store, world: World) -> None:
    add_job(store)
    world.slurm.set(7, "COMPLETING", started=NOW, nodes="n1")
    world.look()
    assert world.told() == []
    world.slurm.set(7, "CANCELLED", started=NOW, ended=NOW + 1, nodes="n1")
    world.look(1)
    assert world.told() == ["scheduled", "running", "cancelled"]


PART = {
    "name": "step", "step": 120, "run": "7.0", "bytes": 5, "ranks": 4, "world": 8,
    "destination": "s3://bucket/alice/7",
}  # fmt: skip


def test_a_checkpoint_is_told_when_all_its_nodes_brought_their_parts(
    store: Store, world: World
) -> None:
    add_job(store, state="completed", settled=True)
    world.flushed()
    assert world.payloads() == []
    world.clock.now += 60
    world.flushed("n2", bytes=6)
    (one,) = world.payloads()
    assert (one["status"], one["sequence"]) == ("flushed", 1)
    assert one["time"] == "2027-01-15T08:01:00Z"
    assert one["checkpoint"] == {
        "name": "step",
        "step": 120,
        "run": "7.0",
        "bytes": 11,
        "destination": "s3://bucket/alice/7",
        "nodes": ["n1", "n2"],
    }
    task = store.task("alldata", "t1")
    assert task
    assert task.state == "completed"


def test_a_checkpoint_that_is_reported_again_is_told_once(store: Store, world: World) -> None:
    add_job(store, state="running")
    for node in ("n1", "n1", "n2", "n2", "n1"):
        world.flushed(node)
    assert world.told() == ["flushed"]
    for step in range(100, 160):
        world.flushed(step=step, ranks=8)
    assert len(world.told()) == 60
    for step in range(1000, 1100):
        world.flushed(step=step, ranks=8)
    task = store.task("alldata", "t1")
    assert task
    assert len(task.resources["flushed"]) == 64


def test_that_a_job_runs_is_told_before_its_checkpoint(store: Store, world: World) -> None:
    add_job(store)
    world.slurm.set(7, "RUNNING", **RUNNING)
    world.flushed(ranks=8)
    assert world.told() == ["scheduled", "running", "flushed"]
    world.slurm.away = True
    add_job(store, "t2", 8)
    world.flushed(job=8, ranks=8)
    assert world.told("t2") == ["flushed"], "late or never is worse"


@pytest.mark.parametrize(
    "bad",
    [
        {"name": "../x"},
        {"name": None},
        {"run": "7 0"},
        {"ranks": 0},
        {"ranks": 9},
        {"ranks": True},
        {"world": 10**7, "ranks": 1},
        {"step": -1},
        {"step": "1"},
        {"bytes": -1},
        {"bytes": 1.5},
        {"destination": ""},
        {"destination": "s3://a\nb"},
        {"destination": ["x"]},
    ],
)
def test_a_flush_that_makes_no_sense_is_left_out(
    store: Store, world: World, bad: dict[str, Any]
) -> None:
    add_job(store, state="running")
    world.flushed(**({"ranks": 8} | bad))
    assert world.payloads() == []
    world.flushed(ranks=8)
    assert world.told() == ["flushed"]


def test_a_flush_of_another_job_or_time_is_nobody_s(store: Store, world: World) -> None:
    add_job(store, state="running")
    world.flushed(job=8, ranks=8)
    world.clock.now -= 9000
    world.flushed(ranks=8)
    assert world.payloads() == []


def test_a_flush_of_a_job_that_is_still_looked_for_is_told_again(
    store: Store, world: World
) -> None:
    """crater-scheduler died between sbatch and the answer, and the job was faster."""
    lost = add_job(store, job_id=None, state="submitting", submitted=None, attempt=NOW - 10)
    with pytest.raises(StoreError, match="job 7 may be of a task"):
        world.flushed(ranks=8)
    found = {"job_id": 7, "state": "submitted", "changed": NOW}
    assert store.change_task(lost, found)
    world.flushed(ranks=8)
    assert world.told()[-1] == "flushed"


def test_a_flush_is_not_held_up_by_a_job_that_is_being_submitted(
    store: Store, world: World
) -> None:
    add_job(store, job_id=None, state="submitting", submitted=None, attempt=world.clock.now - 0.5)
    world.flushed(ranks=8)
    assert world.payloads() == []


def test_a_report_of_any_other_job_changes_nothing(store: Store, world: World) -> None:
    add_job(store)
    world.report("task", job=8, cpus="0-3")
    world.follower.note(
        {"job_id": "7", "node": "n1", "time": NOW - 9000, "phase": "task", "grant": {}}
    )
    task = store.task("alldata", "t1")
    assert task
    assert task.resources == {}


@pytest.mark.parametrize(
    "grant",
    [
        {"cpus": "x" * 100, "gpus": "0", "numa_nodes": {"a": 1}, "exit_code": "1:1; rm"},
        {"cpus": 7, "gpus": [True, "1", 2], "folders": {"checkpoint": 1}, "restarts": "x"},
        {"cpus": "0-60000", "gpus": [0] * 9000, "folders": [], "exit_code": None},
    ],
)
def test_a_report_of_odd_kinds_is_taken_as_far_as_it_makes_sense(
    store: Store, world: World, grant: dict[str, Any]
) -> None:
    add_job(store)
    world.slurm.set(7, "RUNNING", **RUNNING)
    world.slurm.layouts[7] = LAYOUT
    world.report("task", **grant)
    world.look(20)
    got = world.payloads()[0]["allocated_resources"]
    assert got["cpu_cores"] == [0, 1, 2, 3]
    assert got["gpu_ids"] in (["2", "3"], ["2"])


# What it costs


def test_no_question_is_asked_while_nothing_is_unsettled(store: Store, world: World) -> None:
    add_job(store, state="completed", settled=True)
    for _ in range(100):
        world.look(60)
    assert world.slurm.asked == []


def test_many_tasks_of_a_user_are_one_question(store: Store, world: World) -> None:
    for i in range(200):
        add_job(store, f"t{i}", 1000 + i)
        world.slurm.set(1000 + i, "PENDING")
    world.look()
    assert world.asked("squeue") == 1
    world.look(10)
    assert world.asked("squeue") == 1, "not due yet"
    world.look(60)
    assert world.asked("squeue") == 2


def test_a_question_that_takes_long_is_asked_more_rarely(store: Store, world: World) -> None:
    for i in range(20):
        add_job(store, f"t{i}", 1000 + i)
        world.slurm.set(1000 + i, "PENDING")
    world.took = 10.0  # seconds that slurmctld needs
    world.look()
    world.look(100)
    assert world.asked("squeue") == 1, "20 times its length"
    world.look(101)
    assert world.asked("squeue") == 2


def test_an_answer_is_good_for_all_of_a_user_s_tasks(store: Store, world: World) -> None:
    """Also where they are more than are read at once, or would be due a little later."""
    for i in range(2300):
        add_job(store, f"t{i}", 1000 + i, look=NOW + i / 100)
        world.slurm.set(1000 + i, "PENDING")
    world.look(10)
    assert world.asked("squeue") == 1
    for _ in range(20):
        world.look(1)
    assert world.asked("squeue") == 1
    world.look(60)
    assert world.asked("squeue") == 2


def test_news_of_many_jobs_do_not_ask_after_all_of_them_all_the_time(
    store: Store, world: World
) -> None:
    for i in range(40):
        add_job(store, f"t{i}", 1000 + i)
        world.slurm.set(1000 + i, "PENDING")
    world.took = 1.0
    world.look()
    for second in range(19):
        for i in range(20):
            world.report("epilog", job=1000 + i)
        world.look(1)
        assert world.asked("squeue") == 1 + 10 * (second + 1), "one by one, ten at a time"
    for i in range(20):
        world.report("epilog", job=1000 + i)
    world.look(1)
    assert [words for words in world.slurm.asked if "--user" in words][1:], "all in one again"


def test_many_forgotten_jobs_are_one_question_to_slurmdbd(store: Store, world: World) -> None:
    world.slurm.accounting = True
    for i in range(30):
        add_job(store, f"t{i}", 1000 + i)
        about = {"user": "alice", "word": "COMPLETED", "submitted": NOW - 10, "started": NOW}
        world.slurm.records[1000 + i] = about | {"ended": NOW + 5, "nodes": "n1", "code": "0:0"}
    world.look()
    assert (world.asked("squeue"), world.asked("sacct")) == (1, 1)
    assert world.told("t7") == ["scheduled", "running", "completed"]


def test_tasks_that_wait_for_their_job_hide_no_others(store: Store, world: World) -> None:
    for i in range(1200):
        add_job(store, f"w{i}", job_id=None, state="submitting")  # type: ignore[arg-type]
    add_job(store, "t1", 7, look=NOW + 1)
    world.slurm.set(7, "RUNNING", **RUNNING)
    world.look(2)
    world.look(1)
    assert world.told() == ["scheduled", "running"]
    assert len(world.recovered) == 1200


def test_single_questions_are_counted(store: Store) -> None:
    world = World(store, looks_per_minute=3)
    for i in range(8):
        add_job(store, f"t{i}", 1000 + i)
        world.slurm.set(1000 + i, "PENDING")
    world.look()
    assert world.asked("squeue") == 3
    world.look(20)
    assert world.asked("squeue") == 4


def test_a_running_job_costs_two_questions_at_its_start_and_one_at_its_end(
    store: Store, world: World
) -> None:
    add_job(store)
    world.slurm.set(7, "RUNNING", **RUNNING)
    world.slurm.layouts[7] = LAYOUT
    world.report("task", cpus="8-11")
    world.look()
    assert (world.asked("squeue"), world.asked("scontrol")) == (1, 1)
    world.slurm.set(7, "COMPLETED", ended=NOW + 5, **RUNNING)
    world.report("epilog", exit_code="0:0")
    world.look()
    assert (world.asked("squeue"), world.asked("scontrol")) == (2, 1)


def test_a_task_without_a_job_is_for_whoever_submits(store: Store, world: World) -> None:
    add_job(store, job_id=None, state="submitting")  # type: ignore[arg-type]
    world.look()
    assert [task.task_id for task in world.recovered] == ["t1"]
    assert world.slurm.asked == []


def test_two_schedulers_that_see_the_same_tell_it_once(store: Store, world: World) -> None:
    task = add_job(store)
    world.slurm.set(7, "RUNNING", **RUNNING)
    world.slurm.layouts[7] = LAYOUT
    other = Advancer(
        settings(),
        lambda: store,
        world.slurm,  # type: ignore[arg-type]
        written=lambda: None,
        clock=world.clock,
    )
    world.look()
    from crater_slurm.slurm import job_states

    other.apply(task, job_states.one(world.slurm, 7))  # type: ignore[arg-type]
    assert world.told() == ["scheduled", "running"]
