"""Reads how the machine is right now: load, memory, drives, GPUs. Costs next to nothing."""
