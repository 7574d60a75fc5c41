"""Measures what no file and no tool tells of a node: memory bandwidth per NUMA node, and a drive.

A measurement harms nobody: it takes only memory that is free, writes only to a file of its own,
and refuses with the reason, instead of printing a number, when the machine is busy or the
repeats disagree. What it refused never reaches a profile.
"""
