"""Settings of the node's NVMe cache: where it is, who may hold how much, what is removed when."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator

from crater_slurm.config.section import OffIsAWord, Section

#: Projects are numbered by 32 bits, and the highest number means "none".
_LAST_PROJECT = 2**32 - 2


class Cache(Section):
    """The node's NVMe cache: a mount that the admin made, or a device that already holds one."""

    mount_point: Path = Field(
        default=Path("/crater-cache"), description="Where the cache file system is mounted."
    )
    device: str | None = Field(
        default=None,
        pattern=r"^(/dev/disk/by-id/[^/\s]+|(UUID|LABEL)=[^/\s]+)$",
        description="Mounted there when nothing is: a stable name (/dev/disk/by-id/..., UUID=..., "
        "LABEL=...) of a device that holds a file system. Nothing is ever formatted.",
    )
    require_mount: bool = Field(
        default=True,
        description="Use the folder only if it is a mount point, never the system disk.",
    )
    size_gb: int | None = Field(
        default=None, ge=1, description="Use at most this much; all when unset."
    )
    min_free_percent: float = Field(
        default=2,
        ge=0,
        le=50,
        description="Below this a job gets no new cache folders, and is told so.",
    )
    evict_below_percent: float = Field(
        default=10,
        ge=0,
        le=90,
        description="Below this much free space what is safe of ended jobs is removed, oldest "
        "first. 0: only when a new job's cache isn't free.",
    )
    keep: Literal["remove", "keep_checkpoints"] = Field(
        default="remove", description="What the end of a job leaves of its folders."
    )
    keep_checkpoints_hours: float = Field(
        default=72,
        gt=0,
        description="With keep_checkpoints: older ones are removed, or they would fill the drive.",
    )
    leftover_hours: float = Field(
        default=24,
        gt=0,
        description="Folders that no record knows are removed at this age, once Slurm has said "
        "that their job is over; never checkpoints.",
    )
    quota: Annotated[Literal["auto", "accounting", "off"], OffIsAWord] = Field(
        default="auto",
        description="How a job is held to its space: auto by the file system's project quota "
        "(mount option prjquota) where there is one, else by accounting, which tells the user and "
        "takes no more checkpoints.",
    )
    project_ids: str = Field(
        default="1000000000-1999999999",
        pattern=r"^[0-9]{1,10}-[0-9]{1,10}$",
        description="Project ids that crater may give to jobs in the cache's file system: the "
        "first plus the job id, or the next that nobody uses.",
    )
    job_quota_gb: int | None = Field(
        default=None,
        ge=1,
        description="What a job may hold in the cache when its plan has no cache=; no limit when "
        "unset. With a cache= that is the limit.",
    )
    user_quota_gb: int | None = Field(
        default=None,
        ge=1,
        description="What all jobs of one user may hold together, running and ended; no limit "
        "when unset.",
    )
    account_seconds: float = Field(
        default=60, ge=1, description="How often it is counted what jobs hold in the cache."
    )

    @field_validator("project_ids")
    @classmethod
    def _is_a_range(cls, text: str) -> str:
        first, last = (int(word) for word in text.split("-"))
        if not 0 < first <= last <= _LAST_PROJECT:
            raise ValueError(f"takes FIRST-LAST with 0 < FIRST <= LAST <= {_LAST_PROJECT}")
        return text

    @property
    def projects(self) -> range:
        """The project ids that may be given to jobs."""
        first, last = (int(word) for word in self.project_ids.split("-"))
        return range(first, last + 1)
