"""Settings of ``crater submit``: what users' tasks become, and how they are sent."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from crater_slurm.config.section import Section


class Submit(Section):
    """``crater submit`` and ``crater-submit``."""

    templates: Path = Field(
        default=Path("/etc/crater/templates"),
        description="Folder of the site's own batch script templates, NAME.sh.j2; one of a "
        "shipped name is used instead of it.",
    )
    programs: dict[str, tuple[str, ...]] = Field(
        default={},
        description="Program and arguments of tasks that name none, by task type: "
        '`{"llm_finetune": ["/opt/train/finetune"]}`.',
    )
    without_program: Literal["report", "refuse"] = Field(
        default="report",
        description="What becomes of a task for which no program is known: a job that prints "
        "what it was given and ends, or an error.",
    )
    slurm_options: Literal["auto", "all", "none"] = Field(
        default="auto",
        description="all: tasks ask Slurm itself for GPUs and cores (--gres=gpu, -c with one "
        "thread of each core) beside their #CRATER lines. none: crater's filter asks for "
        "everything, with the GPU type that it chose. auto: none where filter.mode is enforce.",
    )
    timeout_seconds: float = Field(
        default=60,
        gt=0,
        description="An sbatch that takes longer is ended; then its job is looked for.",
    )
    search_seconds: float = Field(
        default=20,
        ge=0,
        description="How long a job is looked for when it is not known whether it was submitted.",
    )
    settle_seconds: float = Field(
        default=120,
        ge=0,
        description="After an attempt of unknown outcome the same task is not sent again before "
        "this time has passed: slurmctld may still be busy with it.",
    )
    poll_seconds: float = Field(
        default=15, ge=1, description="With --wait: how often Slurm is asked for a steady job."
    )
    cancel_on_signal: bool = Field(
        default=False,
        description="With --wait: SIGTERM or SIGINT cancels the job, as --cancel-on-signal does.",
    )
