"""Replays traces of jobs on a cluster in memory, with the placement that the filter uses."""
