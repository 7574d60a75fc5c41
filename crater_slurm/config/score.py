"""Settings of the score: which of the nodes that can run a job it should rather get."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from crater_slurm.config.section import Section


class ScoreWeights(Section):
    """What each amount counts in a node's score; they sum to 1, and of what a job does not ask for
    the others take the part."""

    gpu_memory: float = Field(default=0.45, ge=0, le=1, description="Memory of each GPU.")
    cpu_cores: float = Field(default=0.20, ge=0, le=1, description="CPU cores.")
    memory_bandwidth: float = Field(default=0.20, ge=0, le=1, description="Memory bandwidth.")
    ssd_iops: float = Field(default=0.15, ge=0, le=1, description="Random-read IOPS of the NVMe.")

    @model_validator(mode="after")
    def _sum_is_one(self) -> Self:
        total = sum(self.model_dump().values())
        if abs(total - 1) > 1e-6:
            raise ValueError(f"the weights sum to {total:.6g}, and must sum to 1")
        return self


class Score(Section):
    """Which of the nodes that can run a job it should rather get."""

    weights: ScoreWeights = ScoreWeights()
    prefer: bool = Field(
        default=True,
        description="Give a planned job --prefer with the node features that name the nodes that "
        "suit it best. Slurm takes other nodes when none of those is free. A job that those nodes "
        "alone could not run prefers none, since Slurm would refuse it.",
    )
    fragmentation: float = Field(
        default=0.9,
        ge=0,
        le=1,
        description="Part of the score that is what the job would strand: how much less of the "
        "cluster's own mix of jobs packs on the nodes then. 0 leaves it out.",
    )
    tolerance: float = Field(
        default=0.01,
        ge=0,
        le=1,
        description="Nodes whose score is this close to the best are as good.",
    )
