"""Tasks through the API at a fixed rate, beside plain sbatch of the same scripts, on a slurmctld.

``python -m bench submissions [--rate 200 --seconds 60 --nodes 10000]``. No slurmd: jobs wait, so
all work is that of submitting. Both go through crater's filter.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from bench.table import quantile, show
from crater_slurm.alldata.batch import render
from crater_slurm.alldata.marker import Marker
from crater_slurm.alldata.task import fingerprint, parse
from crater_slurm.config.submit import Submit
from crater_slurm.lab import Lab

_LOAD = Path(__file__).with_name("submissions_load.py")
_HTTP_PORT = 9192
_AT_ONCE = 40
_CONF = {
    "submit": {"timeout_seconds": 600},
    "filter": {"mode": "enforce"},
    "alldata": {"submit_as": {"bench": "alice"}},
    "scheduler": {"refresh_seconds": 30, "requests_per_second": 10_000, "requests_burst": 10_000},
}
#: Slurm's own defaults, which a lab shortens, and what its guide to high throughput says: without
#: ``defer`` each submission is also an attempt to start the job on 10,000 nodes.
_SLURM = {
    "SchedulerParameters": "defer,sched_interval=60,bf_interval=30",
    "SlurmctldDebug": "error",
}


def run(arguments: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench submissions")
    parser.add_argument("--rate", type=float, default=200)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--nodes", type=int, default=10_000)
    parser.add_argument("--gpus", type=int, default=0, help="of each task")
    parser.add_argument("--only", choices=("api", "sbatch"), help="one of the two ways")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        inventory = Path(folder) / "large.yaml"
        half = options.nodes // 2
        inventory.write_text(
            "nodes:\n"
            f"- {{name: 'c[1-{half}]', profile: a100-pcie-40gb}}\n"
            f"- {{name: 'c[{half + 1}-{options.nodes}]', profile: a100-sxm-nps4}}\n"
        )
        lab = Lab(
            name="submissions",
            inventory=str(inventory),
            controller_only=True,
            crater_conf=_CONF,
            slurm_conf=_SLURM,
        )
        with lab:
            _measure(lab, options.rate, int(options.rate * options.seconds), options)


def _measure(lab: Lab, rate: float, count: int, options: argparse.Namespace) -> None:
    bodies = [_task(f"api-{number}", options.gpus) for number in range(count)]
    token = lab.run(
        [sys.executable, "-m", "crater_slurm.cli", "tokens", "create", "bench",
         "--client", "bench"],
        user="root", machine_side=True, check=True,
    ).stdout.strip()  # fmt: skip
    assert token.startswith("crt_"), token
    _send(lab, "api", {"items": [_task(f"warm-{n}") for n in range(20)], "rate": 5, "token": token})
    scripts = [_script(f"cli-{number}", options.gpus) for number in range(count)]
    cases = {
        "through the API": ("api", {"items": bodies, "token": token}),
        "plain sbatch": (
            "sbatch",
            {"items": scripts},
        ),
    }
    outcomes = {}
    for title, (way, spec) in cases.items():
        if options.only not in (None, way):
            continue
        _empty(lab)
        outcomes[title] = _Outcome(lab, title, way, spec | {"rate": rate}, count)
    _report(outcomes, rate, options)


def _task(task_id: str, gpus: int = 0) -> str:
    model = {"name": "Llama-3-8B", "precision": "bf16", "quantization": "none"}
    return json.dumps(
        {
            "task_id": task_id,
            "task_type": "llm_finetune" if gpus else "generic",
            "model_config": model if gpus else None,
            "data_config": None,
            "resource_requirements": {
                "gpu": {"count": gpus, "memory_mb": 16384 if gpus else None, "type": None},
                "cpu": {"cores": 8, "avx_support": None},
                "memory": None,
                "ssd": None,
            },
            "sla": None,
            "run_config": {"command": ["sleep", "1000"]},
        }
    )


def _script(task_id: str, gpus: int) -> dict[str, str]:
    """The same job without the API: its script and its comment."""
    task = parse(_task(task_id, gpus))
    comment = f"{Marker(task_id, fingerprint(task))} crater-run:{0:024x}"
    return {"script": render(task, Submit(), enforced=True).script, "comment": comment}


def _send(lab: Lab, way: str, spec: dict[str, Any]) -> dict[str, Any]:
    home = lab.home()
    shutil.copy(_LOAD, home / "load.py")
    (home / "spec.json").write_text(json.dumps(spec | {"port": _HTTP_PORT, "at_once": _AT_ONCE}))
    for name in ("load.py", "spec.json"):
        (home / name).chmod(0o644)
    done = lab.run(["python3", "load.py", way, "spec.json"], timeout=3600, check=True)
    return dict(json.loads(done.stdout))


class _Outcome:
    """One way of sending, at the rate: what was answered, and what it cost whom."""

    def __init__(self, lab: Lab, title: str, way: str, spec: dict[str, Any], count: int) -> None:
        print(f"{title}: load average {os.getloadavg()[0]:.1f}", flush=True)
        lab.run(["sdiag", "--reset"], user="root", check=True)
        before = cpu_seconds(lab)
        begin = time.monotonic()
        found = _send(lab, way, spec)
        self.said = Counter(said for _, _, said in found["results"])
        self.latencies = [latency for _, latency, _ in found["results"]]
        self.sent, self.done = found["sent"], found["done"]
        self.jobs, self.all_there = _settled(lab, count, begin)
        after = cpu_seconds(lab)
        self.cpu = {name: after[name] - before.get(name, 0.0) for name in after}
        self.rpcs = rpcs(lab.run(["sdiag"], user="root", check=True).stdout)


def cpu_seconds(lab: Lab) -> dict[str, float]:
    """CPU time so far of the lab's daemons, and of what crater-scheduler has started."""
    found = {}
    for name in ("slurmctld", "scheduler", "munged"):
        pid = lab.supervisor.pid(name)
        if pid is not None:
            times = psutil.Process(pid).cpu_times()
            found[name] = times.user + times.system
            if name == "scheduler":
                found["sbatch of it"] = times.children_user + times.children_system
    return found


def rpcs(text: str) -> dict[str, tuple[int, float]]:
    """Of what sdiag prints: how often each message came, and how long it took on average, us."""
    part = text.partition("by message type")[2].partition("by user")[0]
    found = re.findall(r"^\s+(\w+)\s+\(\s*\d+\) count:(\d+)\s+ave_time:(\d+)", part, re.MULTILINE)
    return {name: (int(count), float(mean)) for name, count, mean in found}


def _settled(lab: Lab, count: int, begin: float) -> tuple[int, float]:
    """Jobs that slurmctld has in the end, and when the last had come."""
    jobs, at = 0, time.monotonic()
    while jobs < count and time.monotonic() - at < 30:
        now = _jobs(lab)
        if now != jobs:
            jobs, at = now, time.monotonic()
        time.sleep(2)
    return jobs, at - begin


def _jobs(lab: Lab) -> int:
    done = lab.run(["squeue", "--noheader", "--user=alice", "--format=%i"], timeout=300, check=True)
    return len(done.stdout.split())


def _empty(lab: Lab) -> None:
    while _jobs(lab):
        lab.run(["scancel", "--user=alice"], user="root", timeout=600)
        time.sleep(1)
    time.sleep(5)


def _weight(rpc: tuple[str, tuple[int, float]]) -> float:
    return -rpc[1][0] * rpc[1][1]


def _report(outcomes: dict[str, _Outcome], rate: float, options: argparse.Namespace) -> None:
    rows, loads = [], []
    for title, one in outcomes.items():
        good = one.said["202"] + one.said["202 without a job"] + one.said["0"]
        wrong = {k: n for k, n in one.said.items() if k not in ("202", "202 without a job", "0")}
        rows.append(
            [
                title,
                f"{good:,}",
                f"{one.said['202'] + one.said['0']:,}",
                f"{sum(wrong.values())} {wrong or ''}".strip(),
                f"{len(one.latencies) / one.done:.0f}",
                *(f"{quantile(one.latencies, q) * 1e3:,.0f}" for q in (0.5, 0.99, 1)),
                f"{one.jobs:,}",
                f"{one.jobs / one.all_there:.0f}",
            ]
        )
        for name, (seen, mean) in sorted(one.rpcs.items(), key=_weight)[:4]:
            loads.append([title, name, f"{seen:,}", f"{mean:,.0f}"])
        each = {name: 1e3 * seconds / max(1, one.jobs) for name, seconds in one.cpu.items()}
        cost = ", ".join(f"{name} {ms:.1f}" for name, ms in each.items())
        print(f"{title}: CPU ms for each job: {cost}")
    print()
    show(
        f"{rate:g} submissions a second for {options.seconds:g} s, {options.nodes:,} nodes, "
        f"{options.gpus} GPUs each "
        "(`python -m bench submissions`)",
        ["", "accepted", "with a job at once", "errors", "answers a second", "p50, ms", "p99, ms",
         "longest, ms", "jobs in slurmctld", "jobs a second"],
        rows,
    )  # fmt: skip
    show(
        "slurmctld's own figures for the same (sdiag)",
        ["", "RPC", "count", "mean, µs"],
        loads,
    )
