"""What crater-scheduler did to jobs, in the database: the audit trail, and its own memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from sqlalchemy import Engine, Row, insert, select, update

from crater_slurm.store import engine as engines
from crater_slurm.store.profiles import chunks
from crater_slurm.store.records import JobAction
from crater_slurm.store.tables import JobActionRow

_COLUMNS = (
    *("job", "plan_id", "user_id", "time_us", "kind"),
    *("action", "outcome", "value", "message"),
)


class JobActions:
    """The part of the store that is about acts on jobs. Every method is one transaction."""

    _engine: Engine

    def add_action(self, action: JobAction) -> int:
        """Notes an act; the number by which ``finish_action`` finds it."""
        row = {name: getattr(action, name) for name in _COLUMNS if name != "time_us"}
        row["time_us"] = round(action.time * 1e6)
        with engines.writing(self._engine) as connection:
            key = connection.execute(insert(JobActionRow).values(**row)).inserted_primary_key
        assert key is not None
        return int(key[0])

    def finish_action(self, number: int, outcome: str, message: str) -> None:
        """Says how an act that was begun ended."""
        query = update(JobActionRow).where(JobActionRow.id == number)
        with engines.writing(self._engine) as connection:
            connection.execute(query.values(outcome=outcome, message=message))

    def actions(self, plan_ids: Iterable[str]) -> dict[str, list[JobAction]]:
        """Acts on the jobs of these plans, by plan, the oldest first."""
        found: dict[str, list[JobAction]] = defaultdict(list)
        columns = [getattr(JobActionRow, name) for name in _COLUMNS]
        with engines.reading(self._engine) as connection:
            for chunk in chunks(sorted(set(plan_ids))):
                query = select(*columns).where(JobActionRow.plan_id.in_(chunk))
                for row in connection.execute(query.order_by(JobActionRow.id)):
                    found[row.plan_id].append(_action(row))
        return dict(found)


def _action(row: Row[Any]) -> JobAction:
    fields = {name: getattr(row, name) for name in _COLUMNS if name != "time_us"}
    return JobAction(time=row.time_us / 1e6, **fields)
