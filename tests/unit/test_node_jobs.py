"""Records that survive restarts and damage, and plans that count only when they are genuine."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from node_fakes import KEY, USER, signed

from crater_slurm.node.admission import Admission, KeyRing, admit
from crater_slurm.node.jobs import ENDED, JobRecord, JobStore
from crater_slurm.node.marks import Marks

PLAN = {"id": "p1", "numa": "strict"}


def record(job_id: str = "7", **values) -> JobRecord:
    return JobRecord(job_id=job_id, uid=USER, gid=USER, cluster="c1", **values)


def test_a_record_comes_back_after_a_restart(tmp_path: Path) -> None:
    before = record(plan=PLAN, gpus=[2, 3], folders={"temp": "/c/temp/c1/7"}, token="t1", told=True)
    JobStore(tmp_path).save(before)
    assert JobStore(tmp_path).get("7") == before
    assert oct((tmp_path / "7.json").stat().st_mode)[-3:] == "600"


@pytest.mark.parametrize(
    "damage",
    ["", "{", "null", "[]", '{"job_id": "7"}', "\0" * 100,
     '{"job_id": 7, "uid": 1, "gid": 1, "cluster": "c"}',
     '{"job_id": "8", "uid": 1, "gid": 1, "cluster": "c"}',
     '{"job_id": "7", "uid": 1, "gid": 1, "cluster": "c", "plan": {"nonsense": 1}}',
     '{"job_id": "7", "uid": 1, "gid": 1, "cluster": "c", "folders": []}'],
)  # fmt: skip
def test_a_damaged_record_is_set_aside_and_the_others_are_read(
    tmp_path: Path, damage: str, caplog
) -> None:
    JobStore(tmp_path).save(record("6"))
    (tmp_path / "7.json").write_text(damage)
    store = JobStore(tmp_path)
    assert [r.job_id for r in store.all()] == ["6"]
    assert (tmp_path / "7.damaged").exists()
    assert "couldn't read" in caplog.text
    store.save(record("7"))
    assert JobStore(tmp_path).get("7") == record("7")


def test_half_written_files_of_a_crash_are_removed(tmp_path: Path) -> None:
    (tmp_path / ".7.json.123.0.tmp").write_text("{")
    assert JobStore(tmp_path).all() == []
    assert list(tmp_path.iterdir()) == []


def test_a_record_of_a_newer_crater_is_still_read(tmp_path: Path) -> None:
    JobStore(tmp_path).save(record())
    data = json.loads((tmp_path / "7.json").read_text())
    (tmp_path / "7.json").write_text(json.dumps({**data, "invented_later": 1}))
    assert JobStore(tmp_path).get("7") == record()


def test_a_full_disk_costs_the_record_not_the_job(tmp_path: Path, monkeypatch, caplog) -> None:
    def full(*_args, **_how) -> None:
        raise OSError(28, "No space left on device")

    store = JobStore(tmp_path)
    monkeypatch.setattr("crater_slurm.node.jobs.write_atomically", full)
    store.save(record())
    assert store.get("7") == record()
    assert "No space left" in caplog.text


def test_running_jobs_are_found_by_either_cgroup_name(tmp_path: Path) -> None:
    store = JobStore(tmp_path)
    job = record(sluid="sA3DM8KXK9VV00")
    store.save(job)
    assert store.by_cgroup("job_7") is job
    assert store.by_cgroup("sA3DM8KXK9VV00") is job
    assert store.by_cgroup("job_77") is None
    job.phase = ENDED
    store.save(job)
    assert store.by_cgroup("job_7") is None


def test_forgetting_a_job_frees_its_names_and_token(tmp_path: Path) -> None:
    store = JobStore(tmp_path)
    store.save(record(token="t1"))
    assert store.holder_of("t1") == "7"
    store.forget("7")
    assert (store.get("7"), store.by_cgroup("job_7"), store.holder_of("t1")) == (None, None, None)
    assert list(tmp_path.iterdir()) == []


def test_one_hook_at_a_time_works_on_a_job_and_no_lock_is_left_behind(tmp_path: Path) -> None:
    store = JobStore(tmp_path)
    order: list[str] = []
    inside = threading.Event()

    def first() -> None:
        with store.exclusive("7"):
            inside.set()
            time.sleep(0.2)
            order.append("first")

    thread = threading.Thread(target=first)
    thread.start()
    inside.wait(5)
    with store.exclusive("8"):
        order.append("another job")
    with store.exclusive("7"):
        order.append("second")
    thread.join()
    assert order == ["another job", "first", "second"]
    assert store._busy == {}


# Plans


def judge(comment: str, job_id: str = "7", uid: int = USER, cluster="c1", keys=(KEY,), holder=None):
    return admit(
        (comment, ""), job_id=job_id, uid=uid, cluster=cluster,
        keys=lambda: keys, holder_of=lambda _: holder,
    )  # fmt: skip


def test_a_genuine_plan_counts() -> None:
    found = judge(signed(gpus=2, numa="strict"))
    assert found.plan is not None
    assert (found.plan.gpus, found.plan.numa, found.problem) == (2, "strict", "")


def test_a_comment_without_a_token_is_no_problem() -> None:
    assert judge("just a comment") == Admission()


def test_the_extra_field_serves_as_well() -> None:
    found = admit(
        ("", signed()), job_id="7", uid=USER, cluster="c1", keys=lambda: (KEY,),
        holder_of=lambda _: None,
    )  # fmt: skip
    assert found.plan is not None


def test_an_older_key_still_verifies() -> None:
    assert judge(signed(), keys=(b"new" * 10, KEY)).plan is not None


@pytest.mark.parametrize(
    ("comment", "arguments", "problem"),
    [
        (signed(key=b"x" * 32), {}, "the plan token is not signed with this cluster's plan key"),
        (signed(user=1), {}, f"the plan token belongs to uid 1, not to {USER}"),
        (signed(cluster="c2"), {}, "the plan token is for cluster c2, not for c1"),
        (signed()[:-4], {}, "the plan token is not signed with this cluster's plan key"),
        ("crater-plan:", {}, "the comment holds a damaged plan token"),
        ("crater-plan:2.abc.def", {}, "the comment holds a damaged plan token"),
        ("crater-plan:1.abc.d\nef", {}, "the signature of the plan token is not base64"),
        (signed(), {"holder": "6"}, "the plan token is a copy of job 6's"),
        (signed(), {"keys": ()}, "this node has no plan key to check the plan with"),
    ],
)
def test_what_does_not_count_and_why(comment: str, arguments, problem: str) -> None:
    found = judge(comment, **arguments)
    assert (found.plan, found.problem) == (None, problem)


def test_the_tasks_of_an_array_share_a_token() -> None:
    assert judge(signed(array=True), holder="6").plan is not None


def test_a_requeued_job_brings_its_own_token_again() -> None:
    assert judge(signed(), holder="7").plan is not None


@given(st.text(max_size=300))
def test_no_comment_is_ever_taken_for_a_plan_or_raises(comment: str) -> None:
    assert judge(comment).plan is None
    assert judge("crater-plan:1." + comment).plan is None


def test_keys_are_read_again_when_the_file_changes(tmp_path: Path, caplog) -> None:
    path = tmp_path / "plan.key"
    ring = KeyRing(path)
    assert ring.keys() == ()
    assert "couldn't read the plan key" in caplog.text
    path.write_text(f"# newest first\n{'ab' * 16}\n\n{KEY.hex()}\n")
    path.chmod(0o600)
    assert ring.keys() == (b"\xab" * 16, KEY)
    path.write_text("zz\n")
    assert ring.keys() == (), "a broken file must not leave an old key in force"


def test_a_short_key_is_refused_and_an_open_file_is_warned_of(tmp_path: Path, caplog) -> None:
    path = tmp_path / "plan.key"
    path.write_text("abcd\n")
    path.chmod(0o644)
    assert KeyRing(path).keys() == ()
    assert "readable by others" in caplog.text
    assert "shorter than 16 bytes" in caplog.text


def test_marks_show_exactly_the_jobs_that_are_prepared(tmp_path: Path) -> None:
    marks = Marks(tmp_path / "jobs")
    marks.reset(["5"], everything=True)
    assert sorted(p.name for p in (tmp_path / "jobs").iterdir()) == ["5", "all"]
    marks.reset(["7"], everything=False)
    marks.set("8")
    marks.clear("7")
    marks.clear("7")
    assert [p.name for p in (tmp_path / "jobs").iterdir()] == ["8"]
