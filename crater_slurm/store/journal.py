"""Decisions, grants and events in the database: written once, read to explain, pruned when old."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterable
from typing import Any

from sqlalchemy import Engine, delete, insert, select, update

from crater_slurm.errors import StoreError
from crater_slurm.model.plan import Decision
from crater_slurm.store import engine as engines
from crater_slurm.store.decisions import decision_from_dict, decision_to_dict
from crater_slurm.store.profiles import chunks
from crater_slurm.store.records import Event, Grant, Pruned
from crater_slurm.store.tables import (
    DecisionRow,
    EventRow,
    GrantRow,
    JobActionRow,
    ObservationRow,
)

_DAY_US = 86_400 * 10**6


class Journal:
    """The part of the store that is about jobs. Every method is one transaction."""

    _engine: Engine

    def save_decision(self, decision: Decision) -> None:
        """Keeps a decision; one with the same id is replaced and keeps its job."""
        self.save_decisions([decision])

    def save_decisions(self, decisions: Iterable[Decision]) -> None:
        """Keeps several decisions in one transaction."""
        rows = {decision.id: _decision_row(decision) for decision in decisions}
        with engines.writing(self._engine) as connection:
            for chunk in chunks(list(rows)):
                known = set(
                    connection.scalars(select(DecisionRow.id).where(DecisionRow.id.in_(chunk)))
                )
                for key in known:
                    row = rows[key]
                    connection.execute(
                        update(DecisionRow).where(DecisionRow.id == key).values(**row)
                    )
                fresh = [rows[key] for key in chunk if key not in known]
                if fresh:
                    connection.execute(insert(DecisionRow), fresh)

    def decision(self, decision_id: str) -> Decision | None:
        """The decision of that id."""
        query = select(DecisionRow.document).where(DecisionRow.id == decision_id)
        with engines.reading(self._engine) as connection:
            document = connection.scalar(query)
        return None if document is None else _decision(document)

    def decisions_of(self, ids: Iterable[str]) -> dict[str, Decision]:
        """The decisions of these ids, by id; those that the store doesn't have are left out.

        One that can't be read here (a newer scheduler wrote it) is left out too.
        """
        found: dict[str, str] = {}
        with engines.reading(self._engine) as connection:
            for chunk in chunks(list(ids)):
                query = select(DecisionRow.id, DecisionRow.document).where(
                    DecisionRow.id.in_(chunk)
                )
                for key, document in connection.execute(query):
                    found[key] = document
        decisions: dict[str, Decision] = {}
        for key, document in found.items():
            with contextlib.suppress(StoreError):
                decisions[key] = _decision(document)
        return decisions

    def decisions(
        self, *, user_id: int | None = None, job_id: int | None = None, limit: int = 100
    ) -> list[Decision]:
        """The newest decisions first, of one user or job if given."""
        query = select(DecisionRow.document)
        if user_id is not None:
            query = query.where(DecisionRow.user_id == user_id)
        if job_id is not None:
            query = query.where(DecisionRow.job_id == job_id)
        query = query.order_by(DecisionRow.time_us.desc(), DecisionRow.id).limit(limit)
        with engines.reading(self._engine) as connection:
            documents = connection.scalars(query).all()
        return [_decision(document) for document in documents]

    def link_job(self, decision_id: str, job_id: int) -> bool:
        """Notes which job a decision became; False when the decision is not known."""
        query = update(DecisionRow).where(DecisionRow.id == decision_id).values(job_id=job_id)
        with engines.writing(self._engine) as connection:
            return connection.execute(query).rowcount > 0

    def job_of(self, decision_id: str) -> int | None:
        """The job that a decision became, when that is known."""
        query = select(DecisionRow.job_id).where(DecisionRow.id == decision_id)
        with engines.reading(self._engine) as connection:
            return connection.scalar(query)

    def save_grant(self, grant: Grant) -> None:
        """Keeps what a job got on a node; a later report of the same job and plan replaces it."""
        key = (
            GrantRow.job_id == grant.job_id,
            GrantRow.node == grant.node,
            GrantRow.plan_id == grant.plan_id,
        )
        row = {
            "job_id": grant.job_id,
            "node": grant.node,
            "plan_id": grant.plan_id,
            "time_us": _us(grant.time),
            "document": json.dumps(dict(grant.got)),
        }
        with engines.writing(self._engine) as connection:
            connection.execute(delete(GrantRow).where(*key))
            connection.execute(insert(GrantRow), [row])

    def grants(self, *, job_id: int | None = None, plan_id: str | None = None) -> list[Grant]:
        """Grants of a job or plan, by node."""
        query = select(
            GrantRow.job_id, GrantRow.plan_id, GrantRow.node, GrantRow.time_us, GrantRow.document
        )
        if job_id is not None:
            query = query.where(GrantRow.job_id == job_id)
        if plan_id is not None:
            query = query.where(GrantRow.plan_id == plan_id)
        with engines.reading(self._engine) as connection:
            rows = connection.execute(query).all()
        found = [
            Grant(job_id=job, plan_id=plan, node=node, time=us / 1e6, got=json.loads(document))
            for job, plan, node, us, document in rows
        ]
        return sorted(found, key=lambda grant: (grant.node, grant.time))

    def add_events(self, events: Iterable[Event]) -> None:
        """Notes what happened to nodes, in one transaction."""
        rows = [_event_row(event) for event in events]
        if rows:
            with engines.writing(self._engine) as connection:
                connection.execute(insert(EventRow), rows)

    def events(self, node: str | None = None, limit: int = 100) -> list[Event]:
        """The newest events first, of one node if given."""
        columns = ("node", "time_us", "kind", "message", "path", "old", "new")
        query = select(*(getattr(EventRow, name) for name in columns))
        if node is not None:
            query = query.where(EventRow.node == node)
        query = query.order_by(EventRow.time_us.desc(), EventRow.id.desc()).limit(limit)
        with engines.reading(self._engine) as connection:
            rows = connection.execute(query).mappings().all()
        return [
            Event(time=row["time_us"] / 1e6, **{k: row[k] for k in columns if k != "time_us"})
            for row in rows
        ]

    def prune(self, days: int, now: float) -> Pruned:
        """Removes what is older than ``days``; ``now`` is seconds since 1970."""
        before = _us(now) - days * _DAY_US
        counts = []
        with engines.writing(self._engine) as connection:
            for table in (DecisionRow, GrantRow, EventRow, ObservationRow, JobActionRow):
                query = delete(table).where(table.time_us < before)
                counts.append(connection.execute(query).rowcount)
        decisions, grants, events, observations, job_actions = counts
        return Pruned(
            decisions=decisions,
            grants=grants,
            events=events,
            observations=observations,
            job_actions=job_actions,
        )


def _us(seconds: float) -> int:
    return round(seconds * 1e6)


def _event_row(event: Event) -> dict[str, Any]:
    row = dataclasses.asdict(event)
    return row | {"time_us": _us(row.pop("time"))}


def _decision_row(decision: Decision) -> dict[str, Any]:
    return {
        "id": decision.id,
        "time_us": _us(decision.time),
        "user_id": decision.user_id,
        "verdict": decision.verdict.value,
        "mode": decision.mode.value,
        "document": json.dumps(decision_to_dict(decision)),
    }


def _decision(document: str) -> Decision:
    return decision_from_dict(json.loads(document))
