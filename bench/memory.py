"""Memory bandwidth as ``crater-probe bench memory`` measures it, beside STREAM in C.

``python -m bench.memory`` takes turns between the two, so that both see the same noise of the
machine. Ours is the in-place add: it is compared with the same kernel in C, and STREAM's own
kernels stand beside it. Needs gcc with OpenMP for the C side.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from bench.table import show
from crater_slurm.probe.bench.machine import allowed_cpus, one_thread_per_core
from crater_slurm.probe.bench.result import Repeats
from crater_slurm.probe.bench.team import ADD, COPY, Team

TOTAL_MIB = 512
ROUNDS = 8
SECONDS = 0.5


def ours(cpus: tuple[int, ...], numa_node: int) -> dict[str, float]:
    """GB/s of one repeat of each kernel."""
    with Team(cpus, numa_node, TOTAL_MIB * 2**20) as team:
        return {
            f"crater-probe {kernel.text}": team.bandwidth_gb_s(kernel, 1, SECONDS).median
            for kernel in (ADD, COPY)
        }


def stream(program: Path, cpus: tuple[int, ...]) -> dict[str, float]:
    """Median GB/s of each kernel of a run in C; its three arrays are as large as our two."""
    places = ",".join(f"{{{cpu}}}" for cpu in cpus)
    environment = {**os.environ, "OMP_PLACES": places, "OMP_PROC_BIND": "true"}
    command = [str(program), str(TOTAL_MIB * 2**20 // 24), "20"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    lines = (line.split() for line in done.stdout.splitlines())
    return {f"C, {name}": float(median) for name, _, median in lines}


def run() -> None:
    """Print the table."""
    numa_node = 0
    cpus = one_thread_per_core(allowed_cpus())
    found: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "stream"
        if shutil.which("gcc"):
            source = Path(__file__).with_name("stream.c")
            flags = ["-O3", "-march=native", "-fopenmp"]
            subprocess.run(["gcc", *flags, "-o", program, source], check=True)
        for _ in range(ROUNDS):
            for name, value in ours(cpus, numa_node).items():
                found[name].append(value)
            for name, value in stream(program, cpus).items() if program.exists() else ():
                found[name].append(value)
    rows = [
        (name, f"{Repeats(tuple(values)).median:.1f}", f"{min(values):.1f}", f"{max(values):.1f}")
        for name, values in found.items()
    ]
    title = f"Memory bandwidth of NUMA node {numa_node}, {len(cpus)} threads, {TOTAL_MIB} MiB"
    show(f"{title}, {ROUNDS} turns", ("kernel", "median GB/s", "lowest", "highest"), rows)


if __name__ == "__main__":
    sys.exit(run())
