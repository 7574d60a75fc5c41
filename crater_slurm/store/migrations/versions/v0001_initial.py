"""Node profiles, decisions, grants and events."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import mysql

revision = "0001"
down_revision = None
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
        "decision",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("time_us", sa.BigInteger(), nullable=False),
        sa.Column("user_id", sa.BigInteger(), nullable=False),
        sa.Column("job_id", sa.BigInteger(), nullable=True),
        sa.Column("verdict", sa.String(length=16), nullable=False),
        sa.Column("mode", sa.String(length=16), nullable=False),
        sa.Column("document", _DOCUMENT, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_decision"),
        **_MYSQL,
    )
    op.create_index("ix_decision_job_id", "decision", ["job_id"])
    op.create_index("ix_decision_time_us", "decision", ["time_us"])
    op.create_index("ix_decision_user_id_time_us", "decision", ["user_id", "time_us"])
    op.create_table(
        "event",
        sa.Column("id", _SERIAL, autoincrement=True, nullable=False),
        sa.Column("node", sa.String(length=128), nullable=False),
        sa.Column("time_us", sa.BigInteger(), nullable=False),
        sa.Column("kind", sa.String(length=32), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_event"),
        **_MYSQL,
    )
    op.create_index("ix_event_node_time_us", "event", ["node", "time_us"])
    op.create_index("ix_event_time_us", "event", ["time_us"])
    op.create_table(
        "job_grant",
        sa.Column("job_id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("node", sa.String(length=128), nullable=False),
        sa.Column("plan_id", sa.String(length=64), nullable=False),
        sa.Column("time_us", sa.BigInteger(), nullable=False),
        sa.Column("document", _DOCUMENT, nullable=False),
        sa.PrimaryKeyConstraint("job_id", "node", "plan_id", name="pk_job_grant"),
        **_MYSQL,
    )
    op.create_index("ix_job_grant_plan_id", "job_grant", ["plan_id"])
    op.create_index("ix_job_grant_time_us", "job_grant", ["time_us"])
    op.create_table(
        "meta",
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("value", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_meta"),
        **_MYSQL,
    )
    op.create_table(
        "node",
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("source_method", sa.String(length=16), nullable=False),
        sa.Column("source_time_us", sa.BigInteger(), nullable=True),
        sa.Column("memory_mib", sa.BigInteger(), nullable=True),
        sa.Column("cache_gb", sa.BigInteger(), nullable=True),
        sa.Column("cpu_model", sa.String(length=255), nullable=True),
        sa.Column("cpu_arch", sa.String(length=255), nullable=True),
        sa.Column("cpu_sockets", sa.BigInteger(), nullable=False),
        sa.Column("cpu_cores_per_socket", sa.BigInteger(), nullable=False),
        sa.Column("cpu_threads_per_core", sa.BigInteger(), nullable=False),
        sa.Column("cpu_avx", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("name", name="pk_node"),
        **_MYSQL,
    )
    op.create_index("ix_node_version", "node", ["version"])
    op.create_table(
        "gpu",
        sa.Column("node", sa.String(length=128), nullable=False),
        sa.Column("position", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("gpu_index", sa.BigInteger(), nullable=False),
        sa.Column("model", sa.String(length=255), nullable=False),
        sa.Column("gres_type", sa.String(length=255), nullable=True),
        sa.Column("uuid", sa.String(length=255), nullable=True),
        sa.Column("pci_bus_id", sa.String(length=255), nullable=True),
        sa.Column("numa_node", sa.BigInteger(), nullable=True),
        sa.Column("sm_count", sa.BigInteger(), nullable=True),
        sa.Column("tensor_cores", sa.Boolean(), nullable=True),
        sa.Column("memory_mib", sa.BigInteger(), nullable=True),
        sa.Column("memory_bandwidth_gb_s", sa.Double(), nullable=True),
        sa.Column("precisions", sa.String(length=255), nullable=True),
        sa.Column("compute_capability", sa.String(length=255), nullable=True),
        sa.Column("mig_capable", sa.Boolean(), nullable=True),
        sa.Column("mig_instances", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["node"], ["node.name"], name="fk_gpu_node", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("node", "position", name="pk_gpu"),
        **_MYSQL,
    )
    op.create_table(
        "numa_node",
        sa.Column("node", sa.String(length=128), nullable=False),
        sa.Column("position", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("id", sa.BigInteger(), nullable=False),
        sa.Column("cpus", sa.Text(), nullable=False),
        sa.Column("socket", sa.BigInteger(), nullable=True),
        sa.Column("memory_mib", sa.BigInteger(), nullable=True),
        sa.Column("memory_bandwidth_gb_s", sa.Double(), nullable=True),
        sa.Column("distances", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["node"], ["node.name"], name="fk_numa_node_node", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("node", "position", name="pk_numa_node"),
        **_MYSQL,
    )
    op.create_table(
        "nvlink",
        sa.Column("node", sa.String(length=128), nullable=False),
        sa.Column("gpu", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("position", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("peers", sa.Text(), nullable=False),
        sa.Column("bandwidth_gb_s", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(["node"], ["node.name"], name="fk_nvlink_node", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("node", "gpu", "position", name="pk_nvlink"),
        **_MYSQL,
    )
    op.create_table(
        "nvme",
        sa.Column("node", sa.String(length=128), nullable=False),
        sa.Column("position", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("name", sa.String(length=255), nullable=False),
        sa.Column("stable_id", sa.String(length=255), nullable=True),
        sa.Column("model", sa.String(length=255), nullable=True),
        sa.Column("size_gb", sa.BigInteger(), nullable=True),
        sa.Column("numa_node", sa.BigInteger(), nullable=True),
        sa.Column("random_read_iops", sa.BigInteger(), nullable=True),
        sa.Column("random_write_iops", sa.BigInteger(), nullable=True),
        sa.Column("read_latency_us", sa.Double(), nullable=True),
        sa.Column("iops_stability_ratio", sa.Double(), nullable=True),
        sa.Column("sequential_write_mb_s", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(["node"], ["node.name"], name="fk_nvme_node", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("node", "position", name="pk_nvme"),
        **_MYSQL,
    )
    op.create_table(
        "provenance",
        sa.Column("node", sa.String(length=128), nullable=False),
        sa.Column("position", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("method", sa.String(length=16), nullable=False),
        sa.Column("time_us", sa.BigInteger(), nullable=True),
        sa.Column("paths", _DOCUMENT, nullable=False),
        sa.ForeignKeyConstraint(
            ["node"], ["node.name"], name="fk_provenance_node", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("node", "position", name="pk_provenance"),
        **_MYSQL,
    )
    op.execute("INSERT INTO meta (name, value) VALUES ('profile_version', 0)")
