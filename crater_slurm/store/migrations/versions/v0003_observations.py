"""What jobs were seen to need: peaks by workload."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

_MYSQL: dict[str, Any] = {
    "mysql_engine": "InnoDB",
    "mysql_charset": "utf8mb4",
    "mysql_collate": "utf8mb4_bin",
}
_WHOLE = (
    *("host_memory_peak_mib", "host_memory_total_peak_mib"),
    *("gpu_memory_peak_mib", "gpu_memory_size_mib"),
)
_BROKEN = (
    *("cpu_cores_mean", "gpu_utilization_mean_percent", "gpu_utilization_max_percent"),
    *("gpu_utilization_recent_percent", "ssd_read_mb_s_peak", "ssd_write_mb_s_peak"),
    *("ssd_read_mb_s_mean", "ssd_write_mb_s_mean", "ssd_iops_peak"),
)


def upgrade() -> None:
    op.create_table(
        "observation",
        sa.Column("job_id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("node", sa.String(length=128), nullable=False),
        sa.Column("plan_id", sa.String(length=64), nullable=False),
        sa.Column("time_us", sa.BigInteger(), nullable=False),
        sa.Column("workload_key", sa.String(length=255), nullable=True),
        sa.Column("workload", sa.Text(), nullable=False),
        sa.Column("seconds", sa.Double(), nullable=False),
        sa.Column("ended", sa.Boolean(), nullable=False),
        sa.Column("succeeded", sa.Boolean(), nullable=True),
        sa.Column("oom_kills", sa.BigInteger(), nullable=False),
        sa.Column("samples", sa.BigInteger(), nullable=False),
        sa.Column("gpus", sa.BigInteger(), nullable=False),
        *(sa.Column(name, sa.BigInteger(), nullable=True) for name in _WHOLE),
        *(sa.Column(name, sa.Double(), nullable=True) for name in _BROKEN),
        sa.PrimaryKeyConstraint("job_id", "node", "plan_id", name="pk_observation"),
        **_MYSQL,
    )
    for columns in (("workload_key", "time_us"), ("plan_id",), ("time_us",)):
        op.create_index(f"ix_observation_{'_'.join(columns)}", "observation", list(columns))
