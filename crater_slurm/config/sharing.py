"""Settings of GPU sharing: whether several jobs may be on one GPU, and in what portions."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from crater_slurm.config.section import OffIsAWord, Section


class Sharing(Section):
    """Several jobs on one GPU, as Slurm's gres ``shard``. Nothing isolates them."""

    allow: Annotated[Literal["off", "shard"], OffIsAWord] = Field(
        default="off",
        description="shard gives a job that says gpu-sharing=yes slices of a GPU, and refuses "
        "--gres=shard:N that no GPU has. Off by default: neighbours are not kept apart.",
    )
    rounding: Literal["ceil", "floor", "nominal"] = Field(
        default="ceil",
        description="Size of a slice, a 32nd of the memory and at least 512 MiB: rounded up, "
        "rounded down, or of the memory in whole GiB. Must be what gres.conf was rendered with.",
    )
    reserve: int = Field(
        default=1,
        ge=0,
        le=31,
        description="Slices of each GPU that no job gets, for the contexts of driver and jobs.",
    )
    mps: bool = Field(
        default=False,
        description="Nodes with shards run the CUDA MPS daemon: tasks get its limits of memory "
        "and threads for their slices in their environment.",
    )
