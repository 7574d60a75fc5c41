"""Observations in the database: one row for each job, node and plan, the newest report of it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from typing import Any

from sqlalchemy import Engine, delete, insert, select

from crater_slurm.model.observation import Observation
from crater_slurm.store import engine as engines
from crater_slurm.store.tables import ObservationRow

#: Fields of an Observation that are columns of the same name and type.
_SAME = tuple(
    entry.name
    for entry in dataclasses.fields(Observation)
    if entry.name not in ("time", "key", "workload")
)


class Observations:
    """The part of the store that is about what jobs needed. Every method is one transaction."""

    _engine: Engine

    def add_observation(self, observation: Observation) -> None:
        """Keeps an observation in place of an older one of the same job, node and plan."""
        self.add_observations([observation])

    def add_observations(self, observations: Iterable[Observation]) -> None:
        """Keeps several in one transaction; of one job, node and plan the newest stays."""
        newest: dict[tuple[int, str, str], Observation] = {}
        for one in sorted(observations, key=lambda found: found.time):
            newest[one.job_id, one.node, one.plan_id] = one
        if not newest:
            return
        with engines.writing(self._engine) as connection:
            for (job_id, node, plan_id), one in newest.items():
                key = (
                    ObservationRow.job_id == job_id,
                    ObservationRow.node == node,
                    ObservationRow.plan_id == plan_id,
                )
                row = _row(one)
                known = connection.scalar(select(ObservationRow.time_us).where(*key))
                if known is not None and known > row["time_us"]:
                    continue
                connection.execute(delete(ObservationRow).where(*key))
                connection.execute(insert(ObservationRow), [row])

    def observations(
        self,
        key: str | None = None,
        limit: int = 100,
        *,
        plan_id: str | None = None,
        with_key: bool = False,
    ) -> list[Observation]:
        """The newest first: of one workload key, of one plan, or only those that have a key."""
        query = select(*ObservationRow.__table__.columns)
        if key is not None:
            query = query.where(ObservationRow.workload_key == key)
        if plan_id is not None:
            query = query.where(ObservationRow.plan_id == plan_id)
        if with_key:
            query = query.where(ObservationRow.workload_key.is_not(None))
        order = (ObservationRow.time_us.desc(), ObservationRow.job_id, ObservationRow.node)
        with engines.reading(self._engine) as connection:
            rows = connection.execute(query.order_by(*order).limit(limit)).mappings().all()
        return [_observation(row) for row in rows]


def _row(one: Observation) -> dict[str, Any]:
    row = {name: getattr(one, name) for name in _SAME}
    return row | {
        "time_us": round(one.time * 1e6),
        "workload_key": one.key,
        "workload": json.dumps(dict(one.workload)),
    }


def _observation(row: Mapping[Any, Any]) -> Observation:
    return Observation(
        time=row["time_us"] / 1e6,
        key=row["workload_key"],
        workload=json.loads(row["workload"]),
        **{name: row[name] for name in _SAME},
    )


def observation_to_dict(one: Observation) -> dict[str, Any]:
    """The observation as JSON data; what is unknown is left out."""
    return {name: value for name, value in dataclasses.asdict(one).items() if value is not None}
