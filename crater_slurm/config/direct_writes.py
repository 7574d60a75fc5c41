"""Settings of the look at large files that jobs write beside the cache."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from crater_slurm.config.section import OffIsAWord, Section


class DirectWrites(Section):
    """A job with checkpoints that writes large files elsewhere on the node is told so, once."""

    direct_writes: Annotated[Literal["warn", "off"], OffIsAWord] = Field(
        default="warn",
        description="warn tells a job with checkpoints that writes large files elsewhere on the "
        "node's disks, once: in its output and in crater explain.",
    )
    direct_write_mb: int = Field(
        default=1000, ge=1, description="From how many MB written such a file counts."
    )
    direct_write_checkpoint_mb: int = Field(
        default=100,
        ge=1,
        description="The same for a file named like a checkpoint (*.pt, *.ckpt, *.safetensors).",
    )
