"""sbatch against a slurmctld with 10,000 nodes: filter off, enforcing, and its daemon hung.

Times are of the whole sbatch process, started inside the lab. The cases take turns in rounds, so
that whatever else the machine does meets all of them. A job that was to be planned and was not
ends the run: a filter that gives up is fast, and proves nothing.
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
_PLAIN = "#!/bin/sh\nsleep 1000\n"
#: What the filter asks for this script, written by hand: the work that slurmctld has either way.
#: Both kinds of node can run it, so nothing is excluded.
_BY_HAND = (
    "-n1", "-c8", "-N1", "--gres=gpu:2", "--gpus-per-socket=2", "--sockets-per-node=1",
    "--gres-flags=enforce-binding",
)  # fmt: skip
_LOOP = """
import json, subprocess, sys, time
times = []
for _ in range(int(sys.argv[1])):
    begin = time.perf_counter()
    argv = ["sbatch", "--parsable", "-o", "/dev/null", *sys.argv[2:]]
    done = subprocess.run(argv, capture_output=True)
    times.append(time.perf_counter() - begin)
    if done.returncode:
        sys.exit(done.stderr.decode())
print(json.dumps(times))
"""


_OFF, _HAND = "plain job, filter off", "GPU job by hand, filter off"
_PASSING, _ENFORCING = "plain job, enforcing", "GPU job by directive, enforcing"
_HUNG, _FIRST = "GPU job by directive, daemon hung", "the first one after it hung"
#: What each case is compared with: the same job for slurmctld, without the filter.
_BASE = {_OFF: _OFF, _PASSING: _OFF, _HAND: _HAND, _ENFORCING: _HAND, _HUNG: _OFF, _FIRST: _OFF}


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
    lab.run(["sh", "-c", f"cat > plain.sh <<'X'\n{_PLAIN}X\n"], check=True)
    times: dict[str, list[float]] = {name: [] for name in _BASE}
    for _ in range(ROUNDS):
        lab.run(["touch", "/etc/crater/off"], user="root", check=True)
        times[_OFF] += _submit(lab, "plain.sh")
        times[_HAND] += _submit(lab, *_BY_HAND, "plain.sh")
        lab.run(["rm", "/etc/crater/off"], user="root", check=True)
        times[_PASSING] += _submit(lab, "plain.sh")
        before = _planned(lab)
        times[_ENFORCING] += _submit(lab, "job.sh")
        if (planned := _planned(lab) - before) != PER_ROUND:
            raise SystemExit(f"only {planned} of {PER_ROUND} jobs were planned")
        lab.signal("scheduler", signal.SIGSTOP)
        hung = _submit(lab, "job.sh")
        lab.signal("scheduler", signal.SIGCONT)
        times[_FIRST].append(hung[0])
        times[_HUNG] += hung[1:]
        _forget_breaker(lab)
    rows = []
    for name, values in times.items():
        median, base = statistics.median(values), statistics.median(times[_BASE[name]])
        tail = (0.5, 0.95, 0.99, 1) if len(values) > ROUNDS else (0.5, 1)
        shown = [f"{quantile(values, q) * 1e3:.1f}" for q in tail]
        if len(values) <= ROUNDS:
            shown[1:1] = ["", ""]
        rows.append([name, f"{len(values)}", *shown, f"{median / base:.2f} x {_BASE[name]}"])
    show(
        f"sbatch, whole process, {_NODES:,} nodes, ms (`python -m bench submit`)",
        ["", "n", "median", "p95", "p99", "max", "median against"],
        rows,
    )


def _submit(lab: Lab, *arguments: str) -> list[float]:
    """Seconds that each sbatch took."""
    command = ["python3", "-c", _LOOP, str(PER_ROUND), *arguments]
    times: list[float] = json.loads(lab.run(command, timeout=300, check=True).stdout)
    return times


def _planned(lab: Lab) -> int:
    """How many jobs in the queue carry a plan."""
    comments = lab.run(["squeue", "--noheader", "--format=%k"], check=True).stdout
    return comments.count("crater-plan:")


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
