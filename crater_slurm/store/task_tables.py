"""The tables of tasks that a platform sent: the tasks, what it is told of them, who may send.

A row of ``callback`` is written in the transaction that changes its task, so neither can be there
without the other. Documents are ASCII JSON, which every database stores as it is.
"""

from __future__ import annotations

from sqlalchemy import BigInteger, ForeignKey, Index, String, Text
from sqlalchemy.orm import Mapped, mapped_column

from crater_slurm.store.base import DOCUMENT, MYSQL, SERIAL, Base


class TaskRow(Base):
    """A task of a client; ``sequence`` counts its callbacks, and every change of state raises it.

    ``token`` is in the job that Slurm has, so that the job can be found without its id;
    ``attempt_us`` is when Slurm was last asked to take the job, ``look_us`` when it is next asked
    what became of it. ``resources`` is the JSON of what the job got.
    """

    __tablename__ = "task"
    __table_args__ = (
        Index(None, "client", "task_id", unique=True),
        Index(None, "token", unique=True),
        Index(None, "job_id"),
        Index(None, "settled", "look_us"),
        Index(None, "changed_us"),
        MYSQL,
    )
    number: Mapped[int] = mapped_column(SERIAL, primary_key=True, autoincrement=True)
    client: Mapped[str] = mapped_column(String(64))
    task_id: Mapped[str] = mapped_column(String(128))
    body_hash: Mapped[str] = mapped_column(String(64))
    body: Mapped[str] = mapped_column(DOCUMENT)
    user_name: Mapped[str] = mapped_column(String(64))
    token: Mapped[str] = mapped_column(String(64))
    source: Mapped[str] = mapped_column(String(16))
    state: Mapped[str] = mapped_column(String(16))
    settled: Mapped[bool]
    sequence: Mapped[int]
    job_id: Mapped[int | None]
    plan_id: Mapped[str | None] = mapped_column(String(64))
    restarts: Mapped[int]
    created_us: Mapped[int]
    changed_us: Mapped[int]
    attempt_us: Mapped[int | None]
    submitted_us: Mapped[int | None]
    started_us: Mapped[int | None]
    ended_us: Mapped[int | None]
    look_us: Mapped[int | None]
    exit_code: Mapped[str | None] = mapped_column(String(16))
    reason: Mapped[str] = mapped_column(Text)
    resources: Mapped[str] = mapped_column(DOCUMENT)


class CallbackRow(Base):
    """One thing to tell of a task, and how far telling it has come (the outbox).

    ``delivery`` is waiting, delivered, dead or off. A scheduler that delivers it has claimed it
    until ``claimed_until_us``; then another may.
    """

    __tablename__ = "callback"
    __table_args__ = (
        Index(None, "event_id", unique=True),
        Index(None, "task", "sequence", unique=True),
        Index(None, "delivery", "next_try_us"),
        MYSQL,
    )
    number: Mapped[int] = mapped_column(SERIAL, primary_key=True, autoincrement=True)
    event_id: Mapped[str] = mapped_column(String(36))
    task: Mapped[int] = mapped_column(BigInteger, ForeignKey("task.number", ondelete="CASCADE"))
    sequence: Mapped[int]
    status: Mapped[str] = mapped_column(String(16))
    time_us: Mapped[int]
    payload: Mapped[str] = mapped_column(DOCUMENT)
    delivery: Mapped[str] = mapped_column(String(16))
    attempts: Mapped[int]
    next_try_us: Mapped[int]
    claimed_by: Mapped[str | None] = mapped_column(String(64))
    claimed_until_us: Mapped[int]
    http_status: Mapped[int | None]
    error: Mapped[str] = mapped_column(Text)
    done_us: Mapped[int | None]


class ApiTokenRow(Base):
    """A client's token: of its secret only a salted hash. ``key`` is its public half."""

    __tablename__ = "api_token"
    __table_args__ = (Index(None, "key", unique=True), MYSQL)
    name: Mapped[str] = mapped_column(String(64), primary_key=True)
    key: Mapped[str] = mapped_column("token_key", String(32), key="key")
    client: Mapped[str] = mapped_column(String(64))
    scopes: Mapped[str]
    user_name: Mapped[str | None] = mapped_column(String(64))
    salt: Mapped[str] = mapped_column(String(64))
    digest: Mapped[str] = mapped_column(String(64))
    created_us: Mapped[int]
    used_us: Mapped[int | None]
    revoked_us: Mapped[int | None]
