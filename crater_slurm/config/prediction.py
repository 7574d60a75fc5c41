"""Settings of the prediction: what is made of a workload that a job describes."""

from __future__ import annotations

from pydantic import Field

from crater_slurm.config.section import Section


class Prediction(Section):
    """What a job's model, method and framework say about its needs."""

    enabled: bool = Field(
        default=True,
        description="Predict the GPU memory of jobs that name a model, from the formula and what "
        "such jobs took before; off leaves every other part of a decision as it is.",
    )
    require: bool = Field(
        default=True,
        description="Leave out GPUs smaller than the lower bound of the prediction, and refuse a "
        "job that then fits none, where method and a known framework are named and nothing is "
        "sharded, or peaks were seen. Off, the prediction is told and preferred by only.",
    )
