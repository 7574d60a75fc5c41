"""Tasks that a platform sent, what it is told of them, and its tokens."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import mysql

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

_MYSQL: dict[str, Any] = {
    "mysql_engine": "InnoDB",
    "mysql_charset": "utf8mb4",
    "mysql_collate": "utf8mb4_bin",
}
_DOCUMENT = sa.Text().with_variant(mysql.LONGTEXT(), "mysql")
_SERIAL = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def _text(name: str, length: int, *, null: bool = False) -> sa.Column[str]:
    return sa.Column(name, sa.String(length=length), nullable=null)


def _whole(name: str, *, null: bool = False) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger(), nullable=null)


def upgrade() -> None:
    _tasks()
    _callbacks()
    _tokens()


def _tasks() -> None:
    times = ("attempt_us", "submitted_us", "started_us", "ended_us", "look_us")
    op.create_table(
        "task",
        sa.Column("number", _SERIAL, autoincrement=True, nullable=False),
        _text("client", 64),
        _text("task_id", 128),
        _text("body_hash", 64),
        sa.Column("body", _DOCUMENT, nullable=False),
        _text("user_name", 64),
        _text("token", 64),
        _text("source", 16),
        _text("state", 16),
        sa.Column("settled", sa.Boolean(), nullable=False),
        _whole("sequence"),
        _whole("job_id", null=True),
        _text("plan_id", 64, null=True),
        _whole("restarts"),
        _whole("created_us"),
        _whole("changed_us"),
        *(_whole(name, null=True) for name in times),
        _text("exit_code", 16, null=True),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("resources", _DOCUMENT, nullable=False),
        sa.PrimaryKeyConstraint("number", name="pk_task"),
        **_MYSQL,
    )
    op.create_index("ix_task_client_task_id", "task", ["client", "task_id"], unique=True)
    op.create_index("ix_task_token", "task", ["token"], unique=True)
    op.create_index("ix_task_job_id", "task", ["job_id"])
    op.create_index("ix_task_settled_look_us", "task", ["settled", "look_us"])
    op.create_index("ix_task_changed_us", "task", ["changed_us"])


def _callbacks() -> None:
    op.create_table(
        "callback",
        sa.Column("number", _SERIAL, autoincrement=True, nullable=False),
        _text("event_id", 36),
        _whole("task"),
        _whole("sequence"),
        _text("status", 16),
        _whole("time_us"),
        sa.Column("payload", _DOCUMENT, nullable=False),
        _text("delivery", 16),
        _whole("attempts"),
        _whole("next_try_us"),
        _text("claimed_by", 64, null=True),
        _whole("claimed_until_us"),
        _whole("http_status", null=True),
        sa.Column("error", sa.Text(), nullable=False),
        _whole("done_us", null=True),
        sa.ForeignKeyConstraint(
            ["task"], ["task.number"], name="fk_callback_task", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("number", name="pk_callback"),
        **_MYSQL,
    )
    op.create_index("ix_callback_event_id", "callback", ["event_id"], unique=True)
    op.create_index("ix_callback_task_sequence", "callback", ["task", "sequence"], unique=True)
    op.create_index("ix_callback_delivery_next_try_us", "callback", ["delivery", "next_try_us"])


def _tokens() -> None:
    op.create_table(
        "api_token",
        _text("name", 64),
        _text("token_key", 32),
        _text("client", 64),
        _text("scopes", 255),
        _text("user_name", 64, null=True),
        _text("salt", 64),
        _text("digest", 64),
        _whole("created_us"),
        _whole("used_us", null=True),
        _whole("revoked_us", null=True),
        sa.PrimaryKeyConstraint("name", name="pk_api_token"),
        **_MYSQL,
    )
    op.create_index("ix_api_token_token_key", "api_token", ["token_key"], unique=True)
