"""Profiles, decisions and grants: their files and tables. Knows no placement, no Slurm."""
