"""Topology of the nodes, memory modules, versions of software, and values in events."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_MYSQL: dict[str, Any] = {
    "mysql_engine": "InnoDB",
    "mysql_charset": "utf8mb4",
    "mysql_collate": "utf8mb4_bin",
}


def _words() -> sa.String:
    return sa.String(length=255)


def _columns() -> dict[str, dict[str, Any]]:
    return {
        "node": {
            "cpu_l3_caches": sa.Text(),
            "kernel": _words(),
            "gpu_driver": _words(),
            "cuda": _words(),
        },
        "numa_node": {
            "kind": sa.String(length=16),
            "remote_bandwidth_gb_s": sa.Text(),
            "firmware_bandwidth_gb_s": sa.Double(),
            "firmware_latency_ns": sa.BigInteger(),
        },
        "nvme": {
            "firmware": _words(),
            "pci_bus_id": _words(),
            "uses": sa.Text(),
            "wear_percent": sa.BigInteger(),
        },
        "provenance": {"is_override": sa.Boolean()},
        "event": {"path": _words(), "old": sa.Text(), "new": sa.Text()},
    }


def upgrade() -> None:
    for table, columns in _columns().items():
        for name, kind in columns.items():
            op.add_column(table, sa.Column(name, kind, nullable=True))
    _part(
        "pci_device",
        sa.Column("address", _words(), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("names", sa.Text(), nullable=False),
        sa.Column("model", _words(), nullable=True),
        sa.Column("numa_node", sa.BigInteger(), nullable=True),
        sa.Column("local_cpus", sa.Text(), nullable=False),
        sa.Column("root", _words(), nullable=True),
        sa.Column("bridges", sa.Text(), nullable=False),
        sa.Column("link_speed_gt_s", sa.Double(), nullable=True),
        sa.Column("link_width", sa.BigInteger(), nullable=True),
        sa.Column("max_link_speed_gt_s", sa.Double(), nullable=True),
        sa.Column("max_link_width", sa.BigInteger(), nullable=True),
    )
    _part(
        "dimm",
        sa.Column("slot", _words(), nullable=False),
        sa.Column("size_mib", sa.BigInteger(), nullable=False),
        sa.Column("kind", _words(), nullable=True),
        sa.Column("speed_mt_s", sa.BigInteger(), nullable=True),
        sa.Column("channel", _words(), nullable=True),
    )


def _part(table: str, *columns: sa.Column[Any]) -> None:
    """A table whose rows hang on a node."""
    op.create_table(
        table,
        sa.Column("node", sa.String(length=128), nullable=False),
        sa.Column("position", sa.BigInteger(), autoincrement=False, nullable=False),
        *columns,
        sa.ForeignKeyConstraint(
            ["node"], ["node.name"], name=f"fk_{table}_node", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("node", "position", name=f"pk_{table}"),
        **_MYSQL,
    )
