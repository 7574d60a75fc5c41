"""All that speaks Slurm: host lists, gres, job fields, commands and configuration files."""
