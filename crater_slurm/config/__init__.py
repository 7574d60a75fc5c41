"""One typed settings tree with every default and the reason for it. Knows no Slurm, no network."""

from crater_slurm.config.load import Loaded, load
from crater_slurm.config.settings import Settings

__all__ = ["Loaded", "Settings", "load"]
