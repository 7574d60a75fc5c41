"""crater-probe scan beside hwloc's lstopo: this machine, and the largest captured one.

Whole processes, as a person runs them; and the scan alone inside a running process, as
``crater-probe serve`` does it again and again. lstopo reads less: no drives' uses, no tools.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bench.table import show
from crater_slurm.probe.profile import scan

REPEATS = 15
_DATA = Path(os.environ.get("CRATER_TEST_DATA") or Path(__file__).parents[2] / "shared/data")
_LSTOPO = "lstopo-no-graphics"


def run() -> None:
    rows = [_measure("this machine", Path("/"))]
    with tempfile.TemporaryDirectory() as folder:
        for tarball in sorted(_DATA.glob("hwloc/*.tar.bz2"), key=lambda p: -p.stat().st_size)[:1]:
            subprocess.run(["tar", "-xjf", str(tarball), "-C", folder], check=True)
            (root,) = Path(folder).iterdir()
            rows.append(_measure(tarball.name.removesuffix(".tar.bz2"), root))
        show(
            "Reading a machine, ms, median (`python -m bench scan`)",
            ["", "crater-probe scan, process", "lstopo, process", "scan in a running process"],
            rows,
        )


def _measure(name: str, root: Path) -> list[str]:
    own = [sys.executable, "-m", "crater_slurm.cli.probe", "scan", "--json"]
    own += [] if root == Path("/") else ["--root", str(root)]
    theirs = [_LSTOPO, "-v", "--whole-io"]
    environment = dict(os.environ)
    if root != Path("/"):
        environment |= {"HWLOC_FSROOT": str(root), "HWLOC_COMPONENTS": "linux,linuxio,stop"}

    def process(argv: list[str]) -> Callable[[], object]:
        return lambda: subprocess.run(argv, capture_output=True, check=True, env=environment)

    scan("bench", root)
    figures = [_median_ms(process(own))]
    figures.append(_median_ms(process(theirs)) if shutil.which(_LSTOPO) else "not installed")
    figures.append(_median_ms(lambda: scan("bench", root)))
    return [name, *figures]


def _median_ms(work: Callable[[], object]) -> str:
    times = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return f"{statistics.median(times) * 1e3:.1f}"
