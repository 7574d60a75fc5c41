"""A node's physical graph: devices, distance classes, and drawings of them.

Pure functions of a node profile. ``devices`` finds GPUs, NICs, NVMe drives and NUMA nodes,
``graph`` says how far apart they are, ``links`` groups NVLinks, ``scene`` decides what a drawing
shows, and ``text``, ``dot``, ``svg`` and ``data`` are its forms. What a profile does not say is
shown as unknown, never filled in.
"""
