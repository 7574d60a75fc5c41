"""Thin clients that Slurm's hooks run, and the frame they speak. Standard library only."""
