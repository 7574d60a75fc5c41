"""A job as Slurm's accounting has it, whatever printed it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A job as accounting has it; times are seconds since 1970, None where it has none.

    ``tres`` is of the whole job: cpu, mem (MiB), gres/gpu, gres/gpu:MODEL, gres/shard.
    """

    job: str
    eligible: float | None
    elapsed: float | None
    nodes: int
    tres: Mapping[str, float]
    limit: float | None
    state: str
