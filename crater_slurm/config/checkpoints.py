"""Settings of checkpoints on the node."""

from __future__ import annotations

from crater_slurm.config.direct_writes import DirectWrites


class Checkpoints(DirectWrites):
    """Checkpoints on the node."""
