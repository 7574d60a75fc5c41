"""crater-slurm: a layer that lets Slurm place AI jobs by GPU, core, memory bandwidth and NVMe."""

__version__ = "0.1.0"
