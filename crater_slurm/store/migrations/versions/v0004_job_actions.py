"""What crater-scheduler did to jobs after their submission."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import mysql

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

_MYSQL: dict[str, Any] = {
    "mysql_engine": "InnoDB",
    "mysql_charset": "utf8mb4",
    "mysql_collate": "utf8mb4_bin",
}
_DOCUMENT = sa.Text().with_variant(mysql.LONGTEXT(), "mysql")
_SERIAL = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "job_action",
        sa.Column("id", _SERIAL, autoincrement=True, nullable=False),
        sa.Column("job", _DOCUMENT, nullable=False),
        sa.Column("plan_id", sa.String(length=64), nullable=False),
        sa.Column("user_id", sa.BigInteger(), nullable=False),
        sa.Column("time_us", sa.BigInteger(), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("action", sa.String(length=32), nullable=False),
        sa.Column("outcome", sa.String(length=16), nullable=False),
        sa.Column("value", _DOCUMENT, nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_job_action"),
        **_MYSQL,
    )
    op.create_index("ix_job_action_plan_id", "job_action", ["plan_id"])
    op.create_index("ix_job_action_time_us", "job_action", ["time_us"])
