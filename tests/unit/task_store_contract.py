"""What every database must do for tasks, callbacks and tokens; see store_contract."""

from __future__ import annotations

import dataclasses
import multiprocessing
import threading
from typing import Any

import pytest
from store_contract import count, execute

from crater_slurm.errors import UsageError
from crater_slurm.store.repository import Store
from crater_slurm.store.task_records import ApiToken, NewCallback, NewTask, StoredTask

_spawn = multiprocessing.get_context("spawn")
#: All that JSON may carry and a database may choke on, as it is written: in ASCII.
HOSTILE = '{"name": "\\u0000 \\ud800 \\"; DROP TABLE task; -- \\u2028"}'


def new_task(task_id: str = "t1", **fields: Any) -> NewTask:
    given: dict[str, Any] = {
        "client": "alldata",
        "task_id": task_id,
        "body_hash": "h1",
        "body": '{"task_id": "t1"}',
        "user": "alice",
        "token": f"token-{task_id}",
        "source": "api",
        "state": "submitting",
        "time": 1.0,
        "look": 5.0,
    }
    return NewTask(**given | fields)


def told(*states: str, begin: int = 1, task: str = "t1") -> list[NewCallback]:
    """Callbacks of these states, one after the other."""
    return [
        NewCallback(
            event_id=f"{task}-{begin + i}",
            sequence=begin + i,
            status=state,
            time=10.0 + begin + i,
            payload=f'{{"status": "{state}"}}',
        )
        for i, state in enumerate(states)
    ]


def tell(store: Store, task: StoredTask, *states: str) -> StoredTask:
    """The task after callbacks of these states."""
    callbacks = told(*states, begin=task.sequence + 1, task=task.task_id)
    assert store.change_task(task, {"state": states[-1], "changed": 2.0}, callbacks)
    after = store.task_of_number(task.number)
    assert after
    return after


def claim_all(url: str, owner: str, results: Any) -> None:
    """What a second scheduler does: claims and delivers until nothing is left."""
    got = []
    with Store.open(url, lock_timeout_seconds=60) as store:
        for _ in range(1000):
            claimed = store.claim_callbacks(owner, 100.0, 60.0, 3)
            if not claimed and not store.callbacks(delivery="waiting", limit=1):
                break
            for one in claimed:
                got.append(one.event_id)
                assert store.finish_callback(one.number, owner, delivery="delivered", now=100.0)
    results.put(got)


class TaskStoreContract:
    # Tasks

    def test_a_task_is_kept_once_for_each_client(self, store: Store) -> None:
        first, fresh = store.add_task(new_task())
        assert fresh
        assert (first.state, first.sequence, first.look, first.settled) == (
            "submitting",
            0,
            5.0,
            False,
        )
        again, fresh = store.add_task(new_task(body_hash="h2", token="another"))
        assert (again, fresh) == (first, False)
        other, fresh = store.add_task(new_task(client="other", token="another"))
        assert fresh
        assert other.number != first.number
        assert store.task("alldata", "t1") == store.task_of_token("token-t1") == first
        assert store.task("alldata", "T1") is None, "ids are what they are"
        assert [t.client for t in store.tasks()] == ["other", "alldata"]
        assert store.tasks(client="alldata") == [first]
        assert store.tasks(before=other.number) == [first]
        assert store.tasks(state="running") == store.tasks(user="bob") == []

    def test_two_that_take_the_same_task_in_at_once_agree_on_one(self, store: Store) -> None:
        found: list[tuple[str, bool]] = []
        barrier = threading.Barrier(4)

        def take(number: int) -> None:
            barrier.wait()
            task, fresh = store.add_task(new_task(token=f"token-{number}"))
            found.append((task.token, fresh))

        threads = [threading.Thread(target=take, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert len({token for token, _ in found}) == 1
        assert sorted(fresh for _, fresh in found) == [False, False, False, True]

    def test_a_body_comes_back_byte_for_byte(self, store: Store) -> None:
        task, _ = store.add_task(new_task(body=HOSTILE))
        assert store.task_body(task.number) == HOSTILE
        assert store.task_with_body(task.number) == (store.task_of_number(task.number), HOSTILE)
        assert store.task_with_body(task.number + 1) is None

    def test_a_change_counts_only_for_who_knew_the_newest_state(self, store: Store) -> None:
        task, _ = store.add_task(new_task())
        after = tell(store, task, "scheduled", "running")
        assert (after.state, after.sequence, after.changed) == ("running", 2, 2.0)
        assert not store.change_task(task, {"state": "failed"}, told("failed"))
        assert [one.status for one in store.callbacks(oldest_first=True)] == [
            "scheduled",
            "running",
        ]
        got = {"node": "n1", "gpu_ids": ["0"]}
        assert store.change_task(after, {"resources": got, "job_id": 7, "started": 3.5})
        found = store.task_of_job(7)
        assert found
        assert (found.resources, found.started, found.sequence) == (got, 3.5, 2)

    def test_a_callback_that_can_not_be_written_takes_the_change_with_it(
        self, store: Store
    ) -> None:
        task, _ = store.add_task(new_task())
        tell(store, task, "scheduled")
        other, _ = store.add_task(new_task("t2"))
        doubled = [dataclasses.replace(told("failed")[0], event_id="t1-1")]
        with pytest.raises(Exception, match=r"(?i)unique|duplicate"):
            store.change_task(other, {"state": "failed"}, doubled)
        assert store.task_of_number(other.number) == other

    def test_an_attempt_to_submit_is_one_scheduler_s(self, store: Store) -> None:
        task, _ = store.add_task(new_task())
        assert store.change_task(task, {"attempt": 2.0, "changed": 2.0})
        assert not store.change_task(task, {"attempt": 2.5, "changed": 2.5})
        again = store.task_of_number(task.number)
        assert again
        assert (again.attempt, again.changed) == (2.0, 2.0)
        assert store.change_task(again, {"attempt": 9.0, "changed": 2.0})
        assert not store.change_task(again, {"job_id": 7}), "what was read before is old"
        again = store.task_of_number(task.number)
        assert again
        assert store.change_task(again, {"job_id": 7})

    def test_an_attempt_in_the_microsecond_of_another_is_none(self, store: Store) -> None:
        task, _ = store.add_task(new_task())
        same = {"attempt": task.changed, "changed": task.changed}
        assert store.change_task(task, same)
        assert not store.change_task(task, same)

    def test_tasks_are_due_in_their_turn(self, store: Store) -> None:
        for name, look in (("a", 9.0), ("b", 3.0), ("c", None), ("d", 20.0)):
            store.add_task(new_task(name, look=look))
        assert [t.task_id for t in store.due_tasks(10.0, 5)] == ["b", "a"]
        assert [t.task_id for t in store.due_tasks(10.0, 1)] == ["b"]
        numbers = {t.task_id: t for t in store.tasks()}
        store.look_again(numbers["d"].number, 1.0, sooner=True)
        store.look_again(numbers["b"].number, 8.0, sooner=True)
        store.look_again(numbers["a"].number, 30.0)
        store.look_again(numbers["c"].number, 7.0, sooner=True)
        assert [t.task_id for t in store.due_tasks(10.0, 5)] == ["d", "b", "c"]
        assert store.change_task(numbers["b"], {"settled": True, "changed": 2.0})
        assert [t.task_id for t in store.due_tasks(10.0, 5)] == ["d", "c"]

    def test_a_user_s_followed_tasks_come_by_number_and_are_put_off_together(
        self, store: Store
    ) -> None:
        made = []
        for number in range(1203):
            task, _ = store.add_task(new_task(f"t{number}", look=float(number % 3)))
            assert store.change_task(task, {"job_id": 10 + number, "changed": 2.0})
            made.append(task.number)
        store.add_task(new_task("without-a-job", look=0.0))
        store.add_task(new_task("others", look=0.0, user="bob"))
        first = store.followed_tasks("alice", 1.0, limit=500)
        assert [t.number for t in first] == [n for i, n in enumerate(made) if i % 3 < 2][:500]
        rest = store.followed_tasks("alice", 1.0, after=first[-1].number)
        assert len(first) + len(rest) == 802
        done = store.task_of_number(made[1])
        assert done
        assert store.change_task(done, {"settled": True, "look": None, "changed": 3.0})
        store.look_again_all(made, 50.0)
        store.look_again_all([], 99.0)
        assert store.followed_tasks("alice", 49.0, limit=2000) == []
        assert len(store.followed_tasks("alice", 50.0, limit=2000)) == 1202

    def test_old_tasks_go_unless_something_waits(self, store: Store) -> None:
        day = 86_400.0
        for name in ("old", "told", "running", "fresh"):
            task, _ = store.add_task(new_task(name))
            if name == "told":
                task = tell(store, task, "failed")
            settled = {
                "settled": name != "running",
                "changed": 90 * day if name == "fresh" else 2.0,
            }
            assert store.change_task(task, settled)
        assert store.prune_tasks(30, 100 * day) == 1
        assert [t.task_id for t in store.tasks()] == ["fresh", "running", "told"]
        (one,) = store.claim_callbacks("me", 100.0, 60.0, 5)
        store.finish_callback(one.number, "me", delivery="delivered", now=100.0)
        assert store.prune_tasks(30, 100 * day) == 1
        assert store.callbacks() == []

    def test_a_task_without_a_job_can_be_forgotten(self, store: Store) -> None:
        task, _ = store.add_task(new_task())
        other, _ = store.add_task(new_task("t2"))
        assert store.change_task(other, {"job_id": 7})
        assert store.forget_task(task) is True
        assert store.forget_task(other) is False

    # The outbox

    def test_callbacks_of_a_task_are_claimed_one_after_the_other(self, store: Store) -> None:
        tell(store, store.add_task(new_task())[0], "scheduled", "running")
        tell(store, store.add_task(new_task("t2"))[0], "rejected")
        first = store.claim_callbacks("me", 100.0, 60.0, 10)
        assert sorted(one.event_id for one in first) == ["t1-1", "t2-1"]
        assert {one.task_id for one in first} == {"t1", "t2"}
        assert store.claim_callbacks("me", 101.0, 60.0, 10) == [], "the next of t1 waits"
        one = next(one for one in first if one.event_id == "t1-1")
        assert store.finish_callback(
            one.number, "me", delivery="delivered", now=102.0, http_status=204
        )
        (second,) = store.claim_callbacks("me", 103.0, 60.0, 10)
        assert second.event_id == "t1-2"
        done = store.callbacks(delivery="delivered")[0]
        assert (done.attempts, done.http_status, done.done) == (1, 204, 102.0)

    def test_what_failed_waits_for_its_next_try_and_holds_up_its_own_task_only(
        self, store: Store
    ) -> None:
        tell(store, store.add_task(new_task())[0], "scheduled", "running")
        (one,) = store.claim_callbacks("me", 100.0, 60.0, 10)
        failed = {"delivery": "waiting", "http_status": 500, "error": "answered 500"}
        assert store.finish_callback(one.number, "me", now=101.0, next_try=110.0, **failed)  # type: ignore[arg-type]
        assert store.claim_callbacks("me", 109.0, 60.0, 10) == []
        (again,) = store.claim_callbacks("me", 110.0, 60.0, 10)
        assert (again.event_id, again.attempts, again.error) == ("t1-1", 1, "answered 500")
        assert again.payload == one.payload
        store.finish_callback(again.number, "me", delivery="dead", now=111.0)
        (second,) = store.claim_callbacks("me", 112.0, 60.0, 10)
        assert second.event_id == "t1-2", "a dead one blocks nobody"

    def test_a_claim_ends_by_itself_and_its_late_owner_is_told(self, store: Store) -> None:
        tell(store, store.add_task(new_task())[0], "rejected")
        (one,) = store.claim_callbacks("dead scheduler", 100.0, 60.0, 10)
        assert store.claim_callbacks("other", 159.0, 60.0, 10) == []
        (same,) = store.claim_callbacks("other", 160.0, 60.0, 10)
        assert same.number == one.number
        assert not store.finish_callback(
            one.number, "dead scheduler", delivery="delivered", now=161.0
        )
        assert store.release_callbacks("other") == 1
        assert len(store.claim_callbacks("third", 161.0, 60.0, 10)) == 1

    def test_two_schedulers_deliver_everything_once_and_in_order(
        self, store: Store, url: str
    ) -> None:
        for i in range(12):
            task, _ = store.add_task(new_task(f"t{i}"))
            tell(store, task, "scheduled", "running", "completed")
        results = _spawn.Queue()
        workers = [
            _spawn.Process(target=claim_all, args=(url, owner, results)) for owner in ("a", "b")
        ]
        for worker in workers:
            worker.start()
        got = [results.get(timeout=120) for _ in workers]
        for worker in workers:
            worker.join(60)
        everything = [event for events in got for event in events]
        assert len(everything) == len(set(everything)) == 36
        assert store.callback_counts() == {"delivered": 36}

    def test_dead_callbacks_are_tried_again_when_told_to(self, store: Store) -> None:
        for i in range(3):
            tell(store, store.add_task(new_task(f"t{i}"))[0], "rejected")
        for one in store.claim_callbacks("me", 100.0, 60.0, 10):
            store.finish_callback(
                one.number, "me", delivery="dead", now=101.0, error="answered 400"
            )
        assert store.callback_counts() == {"dead": 3}
        assert store.retry_callbacks(200.0, ["t1-1", "nobody"]) == 1
        assert store.retry_callbacks(200.0) == 2
        assert len(store.claim_callbacks("me", 200.0, 60.0, 10)) == 3

    def test_what_nobody_answered_can_be_hastened_and_what_was_refused_can_not(
        self, store: Store
    ) -> None:
        for i in range(2):
            tell(store, store.add_task(new_task(f"t{i}"))[0], "rejected")
        first, second = sorted(
            store.claim_callbacks("me", 100.0, 60.0, 10), key=lambda c: c.task_id
        )
        waiting = {"delivery": "waiting", "now": 101.0, "next_try": 700.0}
        store.finish_callback(first.number, "me", error="Connection refused", **waiting)  # type: ignore[arg-type]
        store.finish_callback(second.number, "me", error="500", http_status=500, **waiting)  # type: ignore[arg-type]
        assert store.hasten_callbacks(200.0) == 1
        assert [one.task_id for one in store.claim_callbacks("me", 200.0, 60.0, 10)] == ["t0"]

    def test_a_callback_goes_with_its_task(self, store: Store, url: str) -> None:
        tell(store, store.add_task(new_task())[0], "rejected")
        execute(url, "DELETE FROM task")
        assert count(url, "callback") == 0

    # Tokens

    def test_a_token_comes_back_and_its_name_is_taken_for_good(self, store: Store) -> None:
        token = ApiToken(
            name="alldata-1",
            key="abc",
            client="alldata",
            scopes=frozenset({"submit", "read"}),
            user="alice",
            salt="s",
            digest="d",
            created=1.0,
        )
        store.add_token(token)
        assert store.token_by_key("abc") == token
        assert store.token_by_key("ABC") is None
        with pytest.raises(UsageError, match="there is a token named 'alldata-1'"):
            store.add_token(dataclasses.replace(token, key="def"))
        store.token_used(token, 100.0)
        store.token_used(token, 130.0)
        used = store.token_by_key("abc")
        assert used
        assert used.used == 100.0, "kept to the minute"
        assert store.revoke_token("alldata-1", 200.0) is True
        assert store.revoke_token("alldata-1", 300.0) is False
        (only,) = store.api_tokens()
        assert (only.revoked, only.scopes) == (200.0, {"submit", "read"})
