"""Tasks in the database. A change of state and its callbacks are one transaction.

Two schedulers may see the same news of a task at once: a change names the state and sequence that
it was worked out from, and only the first counts. Nobody is told anything twice or out of order.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import (
    BigInteger,
    Engine,
    Row,
    Select,
    Update,
    bindparam,
    delete,
    insert,
    or_,
    select,
    update,
)
from sqlalchemy.exc import IntegrityError

from crater_slurm.errors import StoreError
from crater_slurm.store import engine as engines
from crater_slurm.store.task_records import NewCallback, NewTask, StoredTask
from crater_slurm.store.task_tables import CallbackRow, TaskRow

_SAME = (
    *("number", "client", "task_id", "body_hash", "token", "source", "state", "settled"),
    *("sequence", "job_id", "plan_id", "restarts", "exit_code", "reason"),
)
_TIMES = ("created", "changed", "attempt", "submitted", "started", "ended", "look")
_COLUMNS = (
    *(getattr(TaskRow, name) for name in _SAME),
    *(getattr(TaskRow, f"{name}_us") for name in _TIMES),
    *(TaskRow.user_name, TaskRow.resources),
)
#: Databases limit how many values a query may have.
_NUMBERS_AT_ONCE = 500
_DAY_US = 86_400 * 10**6


def _query(**columns: Any) -> Select[Any]:
    """Made once: to put a query together takes longer than to run it."""
    where = [column == bindparam(name) for name, column in columns.items()]
    return select(*_COLUMNS).where(*where).order_by(TaskRow.number.desc()).limit(1)


_BY_ID = _query(client=TaskRow.client, task_id=TaskRow.task_id)
_BY_NUMBER = _query(number=TaskRow.number)
_BY_TOKEN = _query(token=TaskRow.token)
_BY_JOB = _query(job_id=TaskRow.job_id)
_WITH_BODY = _BY_NUMBER.add_columns(TaskRow.body)
#: A change counts only for who knew the newest state; ``is_`` keeps names apart from the columns'.
_KNOWN = (
    TaskRow.number == bindparam("is_number"),
    TaskRow.state == bindparam("is_state"),
    TaskRow.sequence == bindparam("is_sequence"),
    TaskRow.restarts == bindparam("is_restarts"),
    # Two changes without a callback must not undo one another either.
    TaskRow.changed_us == bindparam("is_changed"),
    # Nor may two begin an attempt in one microsecond.
    TaskRow.attempt_us.is_not_distinct_from(bindparam("is_attempt", type_=BigInteger)),
)


@functools.lru_cache(maxsize=64)
def _change(names: tuple[str, ...]) -> Update:
    """What sets these columns to values of the same names."""
    return update(TaskRow).where(*_KNOWN).values({name: bindparam(name) for name in names})


class Tasks:
    """The part of the store that is about a platform's tasks. Every method is one transaction."""

    _engine: Engine

    def add_task(self, new: NewTask) -> tuple[StoredTask, bool]:
        """Keeps a task; the one that is there, and False, when its client sent that id before."""
        row: dict[str, Any] = {
            "client": new.client,
            "task_id": new.task_id,
            "body_hash": new.body_hash,
            "body": new.body,
            "user_name": new.user,
            "token": new.token,
            "source": new.source,
            "state": new.state,
            "created_us": _us(new.time),
            "changed_us": _us(new.time),
            "look_us": _us(new.look),
            "attempt_us": _us(new.attempt),
        }
        row |= {"settled": False, "sequence": 0, "restarts": 0, "reason": "", "resources": "{}"}
        try:
            with engines.writing(self._engine) as connection:
                key = connection.execute(insert(TaskRow), row).inserted_primary_key
        except StoreError as error:
            if not isinstance(error.__cause__, IntegrityError):
                raise
            if (known := self.task(new.client, new.task_id)) is None:
                raise
            return known, False
        assert key is not None
        return _kept(new, int(key[0])), True

    def task(self, client: str, task_id: str) -> StoredTask | None:
        """The task of that id of a client."""
        return self._one_task(_BY_ID, client=client, task_id=task_id)

    def task_of_number(self, number: int) -> StoredTask | None:
        """The task of the store's own number."""
        return self._one_task(_BY_NUMBER, number=number)

    def task_of_token(self, token: str) -> StoredTask | None:
        """The task whose job carries this token."""
        return self._one_task(_BY_TOKEN, token=token)

    def task_of_job(self, job_id: int) -> StoredTask | None:
        """The newest task that became this job; Slurm's ids begin again some day."""
        return self._one_task(_BY_JOB, job_id=job_id)

    def _one_task(self, query: Select[Any], **values: Any) -> StoredTask | None:
        with engines.reading(self._engine) as connection:
            row = connection.execute(query, values).first()
        return None if row is None else _task(row)

    def task_body(self, number: int) -> str:
        """The JSON text of a task as it came."""
        found = self.task_with_body(number)
        return found[1] if found and found[1] else "{}"

    def task_with_body(self, number: int) -> tuple[StoredTask, str] | None:
        """The task of the store's own number, and its JSON text."""
        with engines.reading(self._engine) as connection:
            row = connection.execute(_WITH_BODY, {"number": number}).first()
        return None if row is None else (_task(row), row.body)

    def tasks(
        self,
        *,
        client: str | None = None,
        user: str | None = None,
        task_id: str | None = None,
        state: str | None = None,
        before: int | None = None,
        limit: int = 100,
    ) -> list[StoredTask]:
        """The newest tasks first, of a client, user, id or state if given, and below a number."""
        query = select(*_COLUMNS).order_by(TaskRow.number.desc()).limit(limit)
        for column, value in (
            (TaskRow.client, client),
            (TaskRow.user_name, user),
            (TaskRow.task_id, task_id),
            (TaskRow.state, state),
        ):
            if value is not None:
                query = query.where(column == value)
        if before is not None:
            query = query.where(TaskRow.number < before)
        with engines.reading(self._engine) as connection:
            return [_task(row) for row in connection.execute(query)]

    def due_tasks(self, now: float, limit: int) -> list[StoredTask]:
        """Tasks that are to be looked after by now, those that wait longest first."""
        query = (
            select(*_COLUMNS)
            .where(TaskRow.settled.is_(False), TaskRow.look_us <= _us(now))
            .order_by(TaskRow.look_us, TaskRow.number)
            .limit(limit)
        )
        with engines.reading(self._engine) as connection:
            return [_task(row) for row in connection.execute(query)]

    def submits_since_before(self, time: float) -> bool:
        """Whether a task has no job yet whose submission began before that time."""
        query = select(TaskRow.number).where(
            TaskRow.settled.is_(False), TaskRow.job_id.is_(None), TaskRow.attempt_us < _us(time)
        )
        with engines.reading(self._engine) as connection:
            return connection.execute(query.limit(1)).first() is not None

    def followed_tasks(
        self, user: str, until: float, *, after: int = 0, limit: int = 1000
    ) -> list[StoredTask]:
        """A user's tasks that have a job and are to be looked after by ``until``, by number."""
        query = (
            select(*_COLUMNS)
            .where(
                TaskRow.settled.is_(False),
                TaskRow.user_name == user,
                TaskRow.job_id.is_not(None),
                TaskRow.look_us <= _us(until),
                TaskRow.number > after,
            )
            .order_by(TaskRow.number)
            .limit(limit)
        )
        with engines.reading(self._engine) as connection:
            return [_task(row) for row in connection.execute(query)]

    def look_again(self, number: int, at: float, *, sooner: bool = False) -> None:
        """Sets when a task is looked after next; ``sooner`` only moves it forward."""
        query = update(TaskRow).where(TaskRow.number == number, TaskRow.settled.is_(False))
        if sooner:
            query = query.where(or_(TaskRow.look_us.is_(None), TaskRow.look_us > _us(at)))
        with engines.writing(self._engine) as connection:
            connection.execute(query.values(look_us=_us(at)))

    def look_again_all(self, numbers: Sequence[int], at: float) -> None:
        """Sets when many tasks are looked after next, in one transaction."""
        if not numbers:
            return
        with engines.writing(self._engine) as connection:
            for begin in range(0, len(numbers), _NUMBERS_AT_ONCE):
                some = numbers[begin : begin + _NUMBERS_AT_ONCE]
                query = update(TaskRow).where(TaskRow.number.in_(some), TaskRow.settled.is_(False))
                connection.execute(query.values(look_us=_us(at)))

    def change_task(
        self, task: StoredTask, changes: Mapping[str, Any], callbacks: Sequence[NewCallback] = ()
    ) -> bool:
        """Changes a task and writes what is to be told of it, or False: it is another by now.

        ``changes`` are fields of StoredTask, ``changed`` among them; times are seconds.
        """
        values = {name: _value(name, value) for name, value in changes.items()}
        values = {_COLUMN_OF.get(name, name): value for name, value in values.items()}
        values["sequence"] = callbacks[-1].sequence if callbacks else task.sequence
        known = {
            "is_number": task.number,
            "is_state": task.state,
            "is_sequence": task.sequence,
            "is_restarts": task.restarts,
            "is_changed": _us(task.changed),
            "is_attempt": _us(task.attempt),
        }
        with engines.writing(self._engine) as connection:
            if not connection.execute(_change(tuple(sorted(values))), values | known).rowcount:
                return False
            if callbacks:
                connection.execute(
                    insert(CallbackRow), [_callback_row(task.number, one) for one in callbacks]
                )
        return True

    def forget_task(self, task: StoredTask) -> bool:
        """Removes a task that never became a job and of which nothing was told."""
        query = delete(TaskRow).where(
            TaskRow.number == task.number, TaskRow.sequence == 0, TaskRow.job_id.is_(None)
        )
        with engines.writing(self._engine) as connection:
            return connection.execute(query).rowcount > 0

    def prune_tasks(self, days: int, now: float) -> int:
        """Removes settled tasks that have not changed for so long, with their callbacks."""
        waiting = select(CallbackRow.task).where(CallbackRow.delivery == "waiting")
        query = delete(TaskRow).where(
            TaskRow.settled.is_(True),
            TaskRow.changed_us < (_us(now) or 0) - days * _DAY_US,
            TaskRow.number.not_in(waiting),
        )
        with engines.writing(self._engine) as connection:
            return connection.execute(query).rowcount


_COLUMN_OF = {name: f"{name}_us" for name in _TIMES} | {"user": "user_name"}


def _us(seconds: float | None) -> int | None:
    return None if seconds is None else round(seconds * 1e6)


def _value(name: str, value: Any) -> Any:
    if name in _TIMES:
        return _us(value)
    return json.dumps(value) if name == "resources" else value


def _task(row: Row[Any]) -> StoredTask:
    fields: dict[str, Any] = {name: getattr(row, name) for name in _SAME}
    for name in _TIMES:
        us = getattr(row, f"{name}_us")
        fields[name] = None if us is None else us / 1e6
    return StoredTask(**fields, user=row.user_name, resources=json.loads(row.resources))


def _kept(new: NewTask, number: int) -> StoredTask:
    """The task as it was just written."""
    return StoredTask(
        number=number,
        client=new.client,
        task_id=new.task_id,
        body_hash=new.body_hash,
        user=new.user,
        token=new.token,
        source=new.source,
        state=new.state,
        settled=False,
        sequence=0,
        job_id=None,
        plan_id=None,
        restarts=0,
        created=_exact(new.time),
        changed=_exact(new.time),
        attempt=None if new.attempt is None else _exact(new.attempt),
        submitted=None,
        started=None,
        ended=None,
        look=None if new.look is None else _exact(new.look),
        exit_code=None,
        reason="",
    )


def _exact(seconds: float) -> float:
    """A time as the store gives it back."""
    return round(seconds * 1e6) / 1e6


def _callback_row(task: int, one: NewCallback) -> dict[str, Any]:
    return {
        "event_id": one.event_id,
        "task": task,
        "sequence": one.sequence,
        "status": one.status,
        "time_us": _us(one.time),
        "payload": one.payload,
        "delivery": one.delivery,
        "attempts": 0,
        "next_try_us": _us(one.time),
        "claimed_by": None,
        "claimed_until_us": 0,
        "http_status": None,
        "error": "",
        "done_us": None,
    }
