"""The outbox in the database: what waits to be told, who is telling it now, how it went.

A callback is claimable once all earlier ones of its task are delivered or dead, so a task has one
deliverer at a time however many schedulers share the database. A claim ends by itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sqlalchemy import Engine, Row, Select, and_, exists, func, select, update
from sqlalchemy.orm import aliased

from crater_slurm.store import engine as engines
from crater_slurm.store.profiles import chunks
from crater_slurm.store.task_records import StoredCallback
from crater_slurm.store.task_tables import CallbackRow, TaskRow

_SAME = (
    *("number", "event_id", "task", "sequence", "status", "payload", "delivery", "attempts"),
    *("http_status", "error"),
)
_TIMES = ("time", "next_try", "done")
_COLUMNS = (
    *(getattr(CallbackRow, name) for name in _SAME),
    *(getattr(CallbackRow, f"{name}_us") for name in _TIMES),
    *(TaskRow.client, TaskRow.task_id),
)


class Outbox:
    """The part of the store that is about callbacks. Every method is one transaction."""

    _engine: Engine

    def claim_callbacks(
        self, owner: str, now: float, lease_seconds: float, limit: int
    ) -> list[StoredCallback]:
        """Takes up to ``limit`` callbacks that are due, for so long; at most one of each task."""
        earlier = aliased(CallbackRow)
        blocked = exists().where(
            earlier.task == CallbackRow.task,
            earlier.sequence < CallbackRow.sequence,
            earlier.delivery == "waiting",
        )
        free = and_(
            CallbackRow.delivery == "waiting",
            CallbackRow.next_try_us <= _us(now),
            CallbackRow.claimed_until_us <= _us(now),
        )
        query = _joined().where(free, ~blocked).order_by(CallbackRow.next_try_us).limit(limit)
        if self._engine.dialect.name == "postgresql":
            query = query.with_for_update(of=CallbackRow, skip_locked=True)
        claim = {"claimed_by": owner, "claimed_until_us": _us(now + lease_seconds)}
        claimed = []
        with engines.writing(self._engine) as connection:
            for row in connection.execute(query).all():
                # Where rows are not locked by reading, this is what decides between two.
                mine = update(CallbackRow).where(CallbackRow.number == row.number, free)
                if connection.execute(mine.values(**claim)).rowcount:
                    claimed.append(_callback(row))
        return claimed

    def finish_callback(
        self,
        number: int,
        owner: str,
        *,
        delivery: str,
        now: float,
        next_try: float | None = None,
        http_status: int | None = None,
        error: str = "",
    ) -> bool:
        """How an attempt ended; False when the claim had run out and somebody else has it."""
        values: dict[str, Any] = {
            "delivery": delivery,
            "attempts": CallbackRow.attempts + 1,
            "http_status": http_status,
            "error": error,
            "claimed_by": None,
            "claimed_until_us": 0,
        }
        if next_try is not None:
            values["next_try_us"] = _us(next_try)
        if delivery != "waiting":
            values["done_us"] = _us(now)
        query = update(CallbackRow).where(
            CallbackRow.number == number, CallbackRow.claimed_by == owner
        )
        with engines.writing(self._engine) as connection:
            return connection.execute(query.values(**values)).rowcount > 0

    def release_callbacks(self, owner: str) -> int:
        """Gives back what an owner has claimed, when it stops."""
        query = update(CallbackRow).where(
            CallbackRow.claimed_by == owner, CallbackRow.delivery == "waiting"
        )
        with engines.writing(self._engine) as connection:
            done = connection.execute(query.values(claimed_by=None, claimed_until_us=0))
            return done.rowcount

    def hasten_callbacks(self, now: float) -> int:
        """Lets everything that waits because nobody answered go out now: somebody does again."""
        query = update(CallbackRow).where(
            CallbackRow.delivery == "waiting",
            CallbackRow.next_try_us > _us(now),
            CallbackRow.http_status.is_(None),
        )
        with engines.writing(self._engine) as connection:
            return connection.execute(query.values(next_try_us=_us(now))).rowcount

    def callbacks(
        self,
        *,
        delivery: str | None = None,
        task: int | None = None,
        limit: int = 100,
        oldest_first: bool = False,
    ) -> list[StoredCallback]:
        """Callbacks, the newest first unless told otherwise."""
        query = _joined().limit(limit)
        if delivery is not None:
            query = query.where(CallbackRow.delivery == delivery)
        if task is not None:
            query = query.where(CallbackRow.task == task)
        order = CallbackRow.number
        query = query.order_by(order if oldest_first else order.desc())
        with engines.reading(self._engine) as connection:
            return [_callback(row) for row in connection.execute(query)]

    def callback_counts(self) -> dict[str, int]:
        """How many callbacks there are by what became of them."""
        query = select(CallbackRow.delivery, func.count()).group_by(CallbackRow.delivery)
        with engines.reading(self._engine) as connection:
            return {row[0]: row[1] for row in connection.execute(query)}

    def retry_callbacks(self, now: float, event_ids: Iterable[str] | None = None) -> int:
        """Lets dead callbacks, all or those named, and waiting ones that are named, go out now."""
        done = 0
        with engines.writing(self._engine) as connection:
            values = {"delivery": "waiting", "next_try_us": _us(now), "attempts": 0}
            base = update(CallbackRow).values(**values, done_us=None)
            if event_ids is None:
                return connection.execute(base.where(CallbackRow.delivery == "dead")).rowcount
            for chunk in chunks(sorted(set(event_ids))):
                done += connection.execute(
                    base.where(
                        CallbackRow.event_id.in_(chunk),
                        CallbackRow.delivery.in_(("dead", "waiting", "off")),
                    )
                ).rowcount
        return done


def _joined() -> Select[Any]:
    return select(*_COLUMNS).join(TaskRow, TaskRow.number == CallbackRow.task)


def _us(seconds: float) -> int:
    return round(seconds * 1e6)


def _callback(row: Row[Any]) -> StoredCallback:
    fields: dict[str, Any] = {name: getattr(row, name) for name in _SAME}
    for name in _TIMES:
        us = getattr(row, f"{name}_us")
        fields[name] = None if us is None else us / 1e6
    return StoredCallback(**fields, client=row.client, task_id=row.task_id)
