"""Benchmarks: figures side by side with the alternative, in one run. Nothing passes or fails."""
