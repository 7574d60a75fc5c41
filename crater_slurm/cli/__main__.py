"""``python -m crater_slurm.cli``, for trees that are not installed."""

from crater_slurm.cli.main import crater

crater()
