"""The steps from what was told of a task to what Slurm says: none left out, none made up."""

from __future__ import annotations

from typing import Any

import pytest

from crater_slurm.alldata.states import State, between, steps
from crater_slurm.errors import SlurmError
from crater_slurm.slurm import job_layout, job_states
from crater_slurm.slurm.job_states import JobState

SUBMITTED, STARTED, ENDED = 100.0, 200.0, 300.0


def seen(word: str, **fields: Any) -> JobState:
    given: dict[str, Any] = {"submitted": SUBMITTED, "nodes": "n1"}
    if word not in ("PENDING",):
        given |= {"started": STARTED, "ended": ENDED}
    return JobState(**{"job_id": 7, "user": "alice", "word": word} | given | fields)


def told(state: State, found: JobState, restarts: int = 0) -> list[tuple[str, float | None]]:
    return [(step.state.value, step.time) for step in steps(state, restarts, found)]


def test_a_job_that_ended_between_two_looks_was_scheduled_and_ran_first() -> None:
    assert told(State.SUBMITTED, seen("COMPLETED")) == [
        ("scheduled", STARTED),
        ("running", STARTED),
        ("completed", ENDED),
    ]


@pytest.mark.parametrize(
    ("word", "state"),
    [
        ("COMPLETED", "completed"),
        ("FAILED", "failed"),
        ("OUT_OF_MEMORY", "failed"),
        ("NODE_FAIL", "failed"),
        ("TIMEOUT", "timeout"),
        ("DEADLINE", "timeout"),
        ("CANCELLED", "cancelled"),
        ("PREEMPTED", "preempted"),
    ],
)
def test_every_end_of_slurm_s_has_one_of_ours(word: str, state: str) -> None:
    assert told(State.RUNNING, seen(word)) == [(state, ENDED)]


def test_a_job_cancelled_in_the_queue_never_ran() -> None:
    found = seen("CANCELLED", nodes="", started=ENDED)
    assert told(State.SUBMITTED, found) == [("cancelled", ENDED)]


def test_a_job_whose_nodes_did_not_boot_was_scheduled_and_never_ran() -> None:
    assert [s for s, _ in told(State.SUBMITTED, seen("BOOT_FAIL"))] == ["scheduled", "failed"]


def test_while_nodes_are_prepared_it_is_scheduled_and_then_it_runs() -> None:
    assert told(State.SUBMITTED, seen("CONFIGURING")) == [("scheduled", STARTED)]
    assert told(State.SCHEDULED, seen("CONFIGURING")) == []
    assert told(State.SCHEDULED, seen("RUNNING")) == [("running", STARTED)]
    assert told(State.RUNNING, seen("SUSPENDED")) == []


def test_a_pending_job_is_no_news() -> None:
    assert told(State.SUBMITTED, seen("PENDING", nodes="")) == []
    assert told(State.RUNNING, seen("COMPLETING")) == []
    assert between(seen("COMPLETING"))


def test_a_requeue_is_told_before_the_next_run() -> None:
    assert told(State.RUNNING, seen("PENDING", nodes="", restarts=1, submitted=250.0)) == [
        ("requeued", 250.0)
    ]
    again = seen("RUNNING", restarts=1, submitted=250.0, started=260.0)
    assert told(State.RUNNING, again) == [
        ("requeued", 250.0),
        ("scheduled", 260.0),
        ("running", 260.0),
    ]
    assert told(State.REQUEUED, again, restarts=1) == [("scheduled", 260.0), ("running", 260.0)]


def test_a_whole_run_that_nobody_saw_is_told_without_times_that_nobody_knows() -> None:
    found = seen("COMPLETED", restarts=1, submitted=250.0, started=260.0)
    assert told(State.SUBMITTED, found) == [
        ("scheduled", None),
        ("running", None),
        ("requeued", 250.0),
        ("scheduled", 260.0),
        ("running", 260.0),
        ("completed", ENDED),
    ]


def test_a_run_that_was_preempted_says_so_before_it_is_requeued() -> None:
    found = seen("PENDING", nodes="", restarts=1, submitted=250.0, preempted=True)
    assert told(State.RUNNING, found) == [("preempted", None), ("requeued", 250.0)]


def test_news_of_an_older_run_and_of_ended_tasks_are_none() -> None:
    assert told(State.RUNNING, seen("COMPLETED"), restarts=1) == []
    assert told(State.COMPLETED, seen("FAILED")) == []


SQUEUE = (
    "3|alice|CANCELLED|1796006986|1796006986|1796006986||0|0|JobHeldUser|\n"
    "2|alice|FAILED|1796006986|1796006987|1796006987|a1|0|768|NonZeroExitCode|\n"
    "4|alice|PENDING|1796006990|1796007111|NONE||1|0|BeginTime|\n"
    "5|alice|FAILED|1796006986|1796006987|1796006990|a[1-2]|0|3:0|NonZeroExitCode|\n"
    "6|alice|CANCELLED|1796006986|1796006987|1796006990|a1|0|15|None|\n"
)


def test_what_squeue_prints_is_read_in_all_its_spellings() -> None:
    found = job_states.parse(SQUEUE)
    assert found[3].nodes == ""
    assert (found[2].exit_code, found[5].exit_code, found[6].exit_code) == ("3:0", "3:0", "0:15")
    assert (found[4].restarts, found[4].ended, found[4].reason) == (1, None, "BeginTime")
    assert found[5].nodes == "a[1-2]"
    assert found[6].reason == ""


@pytest.mark.parametrize("text", ["7|alice|RUNNING\n", "7|a|RUNNING|x|1|1||0|0|None|\n"])
def test_what_squeue_never_prints_is_refused(text: str) -> None:
    with pytest.raises(SlurmError, match="can't be read"):
        job_states.parse(text)


def test_slurmdbd_s_records_are_read() -> None:
    text = "9|alice|CANCELLED by 61001|1|2|3|None assigned|0:0\n10|alice|TIMEOUT|1|2|3|a1|0:15\n"
    found = job_states.parse_accounted(text)
    assert (found[9].word, found[9].nodes) == ("CANCELLED", "")
    assert (found[10].word, found[10].exit_code, found[10].ended) == ("TIMEOUT", "0:15", 3.0)


LAYOUT = (
    "JobId=7 JobName=JOB_GRES=x JobState=RUNNING NumNodes=3 JOB_GRES=gpu:a100:4   "
    "Nodes=a[1-2] CPU_IDs=0-3,8 Mem=64 GRES=gpu:a100:2(IDX:0,3),membw:40 "
    "Nodes=c1 CPU_IDs=1 Mem=64 GRES= MinCPUsNode=1 Comment=Nodes=z CPU_IDs=9 Mem=1 GRES=\n"
    "JobId=8 JOB_GRES=(null)   Nodes=z CPU_IDs=9 Mem=1 GRES= MinCPUsNode=1\n"
)


def test_cores_and_gpus_of_every_node_are_read_and_a_comment_is_no_node() -> None:
    found = job_layout.parse(LAYOUT, 7)
    assert [(n.name, n.cpus, n.gpus) for n in found] == [
        ("a1", (0, 1, 2, 3, 8), (0, 3)),
        ("a2", (0, 1, 2, 3, 8), (0, 3)),
        ("c1", (1,), ()),
    ]
    assert job_layout.parse(LAYOUT, 9) == ()
