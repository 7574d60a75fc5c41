"""The queue as squeue prints it, in every version and with hostile comments; and job updates."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from queue_samples import MARK, array, printed, queued, record

from crater_slurm.errors import SlurmError, UsageError
from crater_slurm.slurm import jobs
from crater_slurm.slurm.client import Client


def read(*records: tuple[str, ...]) -> list[Any]:
    return jobs.parse_queue(printed(*records), MARK)


def test_a_job_that_waits_with_all_its_fields() -> None:
    (job,) = read(record("8", start="1795996406", nice="-5", qos="high", requested="a[1-2]"))
    assert (job.id, job.user_id, job.pending, job.reason) == (8, 61001, True, "Resources")
    assert (job.priority, job.nice, job.qos, job.partition) == (4294901757, -5, "high", "gpu")
    assert (job.submitted, job.eligible, job.start) == (1795994605.0, 1795994605.0, 1795996406.0)
    assert (job.requested, job.comment, job.excluded) == ("a[1-2]", "", None)
    assert (job.array_id, job.label) == (None, "8")


def test_a_held_job_has_no_eligible_time() -> None:
    (job,) = read(record(eligible="N/A", start="N/A", reason="JobHeldUser", priority="0"))
    assert (job.eligible, job.start, job.priority) == (None, None, 0)


def test_tasks_of_one_record_are_one_entry_and_a_task_that_was_changed_alone_is_its_own() -> None:
    tasks = [record("2", array=f"2_{n}", array_job="2") for n in (2, 3, 5, 9)]
    alone = record("6", array="2_4", array_job="2", nice="7")
    found = {job.id: job for job in read(*tasks, alone)}
    assert found[2].label == "2_[2-3,5,9]"
    assert found[2].labels(3) == ["2_2", "2_3", "2_5"]
    assert (found[6].label, found[6].array_id, found[6].nice) == ("2_4", 2, 7)
    assert [found[2].owns(f"2_{n}") for n in (2, 4, 9)] == [True, False, True]
    assert found[6].owns("2_4")
    assert not found[2].owns("2")


def test_a_component_of_a_heterogeneous_job_is_a_job_of_its_own() -> None:
    (job,) = read(record("8", array="7+1", array_job="8"))
    assert (job.label, job.array_id) == ("8", None)


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=300))
def test_no_comment_can_pass_for_another_job(comment: str) -> None:
    forged = comment + "\n" + "~".join(record("1")) + "\n" + printed(record("1"), mark="~0") + "|"
    first, second = read(record("7", comment=forged), record("8"))
    assert (first.id, second.id) == (7, 8)
    assert first.comment == forged.strip()


@pytest.mark.parametrize("text", ["7~x", printed(record("7"))[:-40], printed(record("seven"))])
def test_what_is_not_the_format_is_an_error_and_not_an_empty_queue(text: str) -> None:
    with pytest.raises(SlurmError, match="squeue prints"):
        jobs.parse_queue(text, MARK)


class Recorded(Client):
    """A client that answers from a list and keeps what it was asked."""

    asked: list[tuple[str, ...]]

    def run(self, command: str, *arguments: str) -> str:
        self.asked.append((command, *arguments))
        mark = re.search(r"~[0-9a-f]{12}", arguments[-1])
        if mark is None:
            return ""
        if "--format" in arguments:
            return printed(("7", "a1,a[3-4]"), ("9", ""), mark=mark.group(0))
        return printed(record("7"), record("8"), mark=mark.group(0))


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    monkeypatch.setattr(Recorded, "asked", [], raising=False)
    return Recorded()


def test_the_separator_is_another_one_each_time(client: Recorded) -> None:
    jobs.queue(client)
    jobs.queue(client)
    marks = [re.search(r"~[0-9a-f]{12}", call[-1]) for call in client.asked]
    assert marks[0] and marks[1] and marks[0].group(0) != marks[1].group(0)
    assert client.asked[0][:5] == ("squeue", "--noheader", "--array", "--states", "PENDING,RUNNING")


def test_excluded_nodes_cost_a_second_question_and_a_job_that_went_is_left_out(
    client: Recorded,
) -> None:
    (job,) = jobs.queue(client, excluded=True, running=False)
    assert (job.id, job.excluded) == (7, "a1,a[3-4]")
    assert len(client.asked) == 2


@pytest.mark.parametrize(
    ("label", "changes", "words"),
    [
        ("7", {"nice": -1000}, ["JobId=7", "Nice=-1000"]),
        ("7_[1-3,5]", {"excluded": "a[1-2],b"}, ["JobId=7_[1-3,5]", "ExcNodeList=a[1-2],b"]),
        ("7_3", {"qos": "urgent"}, ["JobId=7_3", "QOS=urgent"]),
        ("7", {"excluded": ""}, ["JobId=7", "ExcNodeList="]),
        ("7+1", {"priority": "5"}, ["JobId=7+1", "Priority=5"]),
    ],
)
def test_an_update_is_a_list_of_words(
    client: Recorded, label: str, changes: dict[str, Any], words: list[str]
) -> None:
    jobs.update(client, label, **changes)
    assert client.asked == [("scontrol", "update", *words)]


@pytest.mark.parametrize("label", ["", "7;8", "-1", "7_[", "name=x", "7 QOS=x", "7\n8"])
def test_a_label_that_is_none_is_refused(client: Recorded, label: str) -> None:
    with pytest.raises(SlurmError, match="is no job id"):
        jobs.update(client, label, nice=1)
    with pytest.raises(SlurmError, match="is no job id"):
        jobs.queue(client, jobs=[label])
    assert client.asked == []


@pytest.mark.parametrize(
    "changes", [{"nice": "1 QOS=x"}, {"qos": ""}, {"excluded": "a b"}, {"priority": -1}]
)
def test_a_value_that_could_be_another_word_is_refused(
    client: Recorded, changes: dict[str, Any]
) -> None:
    with pytest.raises(UsageError, match="can't be set"):
        jobs.update(client, "7", **changes)
    assert client.asked == []


def test_labels_of_samples() -> None:
    assert queued(7).labels(5) == ["7"]
    assert array(2, "1-3").labels(2) == ["2_1", "2_2"]
    assert array(2, "4").label == "2_4"
