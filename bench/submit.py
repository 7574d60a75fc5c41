"""sbatch against a slurmctld with 10,000 nodes: filter off, enforcing, and its daemon hung.

Times are of the whole sbatch process, started inside the lab. The three take turns in rounds, so
that whatever else the machine does meets all of them.
"""

from __future__ import annotations

import json
import shutil
import signal
import statistics
import tempfile
import time
from pathlib import Path

from bench.table import quantile, show
from crater_slurm import paths
from crater_slurm.lab import Lab

ROUNDS = 6
PER_ROUND = 25
_NODES = 10_000
_SCRIPT = "#!/bin/sh\n#CRATER gpus=2 cpus=8 numa=strict\nsleep 1000\n"
#: What the filter asks for this script, written by hand: the work that slurmctld has either way.
_BY_HAND = (
    "-n1", "-c8", "-N1", "--gres=gpu:2", "--gpus-per-socket=2", "--sockets-per-node=1",
    "--gres-flags=enforce-binding", f"--exclude=c[{_NODES // 2 + 1}-{_NODES}]",
)  # fmt: skip
_LOOP = """
import json, subprocess, sys, time
times = []
for _ in range(int(sys.argv[1])):
    begin = time.perf_counter()
    argv = ["sbatch", "--parsable", "-o", "/dev/null", *sys.argv[2:], "job.sh"]
    done = subprocess.run(argv, capture_output=True)
    times.append(time.perf_counter() - begin)
    if done.returncode:
        sys.exit(done.stderr.decode())
print(json.dumps(times))
"""


_OFF, _HAND = "filter off", "filter off, the same request by hand"
_ENFORCING, _HUNG = "enforcing", "daemon hung"
_CASES = (_OFF, _HAND, _ENFORCING, _HUNG)


def run() -> None:
    with tempfile.TemporaryDirectory() as folder:
        inventory = Path(folder) / "large.yaml"
        half = _NODES // 2
        inventory.write_text(
            "nodes:\n"
            f"- {{name: 'c[1-{half}]', profile: a100-pcie-40gb}}\n"
            f"- {{name: 'c[{half + 1}-{_NODES}]', profile: a100-sxm-nps4}}\n"
        )
        with Lab(name="bench", inventory=str(inventory), controller_only=True) as lab:
            _measure(lab)


def _measure(lab: Lab) -> None:
    # The deadline and breaker of production, which a lab relaxes.
    shutil.copy(paths.share("etc") / "filter.lua", lab.folders.crater_etc)
    lab.run(["sh", "-c", f"cat > job.sh <<'X'\n{_SCRIPT}X\n"], check=True)
    _wait_for_plan(lab)
    times: dict[str, list[float]] = {name: [] for name in _CASES}
    first: list[float] = []
    for _ in range(ROUNDS):
        lab.run(["touch", "/etc/crater/off"], user="root", check=True)
        times[_OFF] += _submit(lab, PER_ROUND)
        times[_HAND] += _submit(lab, PER_ROUND, *_BY_HAND)
        lab.run(["rm", "/etc/crater/off"], user="root", check=True)
        times[_ENFORCING] += _submit(lab, PER_ROUND)
        lab.signal("scheduler", signal.SIGSTOP)
        hung = _submit(lab, PER_ROUND)
        lab.signal("scheduler", signal.SIGCONT)
        first.append(hung[0])
        times[_HUNG] += hung[1:]
        _forget_breaker(lab)
    off = statistics.median(times[_OFF])
    rows = [
        [
            name,
            f"{len(values)}",
            *(f"{quantile(values, q) * 1e3:.1f}" for q in (0.5, 0.95, 0.99)),
            f"{max(values) * 1e3:.1f}",
            f"{statistics.median(values) / off:.2f} x",
        ]
        for name, values in times.items()
    ]
    rows.append(
        [
            "first one after it hung",
            f"{len(first)}",
            f"{statistics.median(first) * 1e3:.1f}",
            "",
            "",
            f"{max(first) * 1e3:.1f}",
            f"{statistics.median(first) / off:.2f} x",
        ]
    )
    show(
        f"sbatch, whole process, {_NODES:,} nodes, ms (`python -m bench submit`)",
        ["", "n", "median", "p95", "p99", "max", "median against off"],
        rows,
    )


def _submit(lab: Lab, count: int, *options: str) -> list[float]:
    done = lab.run(["python3", "-c", _LOOP, str(count), *options], timeout=300, check=True)
    times: list[float] = json.loads(done.stdout)
    return times


def _forget_breaker(lab: Lab) -> None:
    """A reload of the script starts with a closed breaker; its time stamp has whole seconds."""
    time.sleep(1.1)
    lab.run(["touch", "/crater-lab/etc/job_submit.lua"], user="root", check=True)
    _wait_for_plan(lab)


def _wait_for_plan(lab: Lab) -> None:
    for _ in range(120):
        done = lab.run(["sbatch", "--test-only", "job.sh"])
        if "crater: planned" in done.stderr:
            return
        time.sleep(0.5)
    raise SystemExit(f"the filter does not answer in the lab: {done.stderr}")
