"""Wall time of Prolog, TaskProlog and Epilog, beside a hook that does nothing.

Runs the real scripts against a real crater-io-daemon on this machine, in a folder of its own.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.table import quantile, show
from crater_slurm import paths
from crater_slurm.model import token
from crater_slurm.model.plan import Plan

REPEATS = 100


def run() -> None:
    if os.geteuid():
        print("the hooks benchmark needs root, as the hooks do\n")
        return
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        key = secrets.token_bytes(32)
        daemon = _start(base, key)
        try:
            _measure(base, key)
        finally:
            daemon.terminate()
            daemon.wait(timeout=10)


def _start(base: Path, key: bytes) -> subprocess.Popen[bytes]:
    (base / "plan.key").write_text(key.hex() + "\n")
    (base / "plan.key").chmod(0o400)
    (base / "cache").mkdir()
    settings = {
        "off_switch": str(base / "off"),
        "plan": {"key_file": str(base / "plan.key")},
        "node": {
            "socket": str(base / "node.sock"),
            "state_dir": str(base / "state"),
            "profile": str(base / "profile.json"),
            "cache": {"mount_point": str(base / "cache"), "require_mount": False},
            "report": False,
        },
    }
    (base / "crater.yaml").write_text(json.dumps(settings))
    daemon = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "crater_slurm.node",
            "--foreground",
            "--config",
            str(base / "crater.yaml"),
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    for _ in range(200):
        if (base / "node.sock").exists():
            return daemon
        time.sleep(0.05)
    raise SystemExit("crater-io-daemon did not start")


def _measure(base: Path, key: bytes) -> None:
    empty = base / "empty.sh"
    empty.write_text("#!/bin/sh\nexit 0\n")
    empty.chmod(0o755)
    folder = paths.share("prolog")
    times: dict[str, list[float]] = {"an empty hook": []}
    for name in ("prolog", "task_prolog", "epilog"):
        times[name] = []
    for job in range(1, REPEATS + 1):
        environment = _environment(base, key, job)
        times["an empty hook"].append(_run(empty, environment))
        for name in ("prolog", "task_prolog", "epilog"):
            times[name].append(
                _run(folder / f"{name}.sh", environment, f"socket={base / 'node.sock'}")
            )
    rows = [
        [
            name,
            *(f"{quantile(values, q) * 1e3:.1f}" for q in (0.5, 0.95)),
            f"{max(values) * 1e3:.1f}",
        ]
        for name, values in times.items()
    ]
    show("Hooks, wall time, ms (`python -m bench hooks`)", ["", "median", "p95", "max"], rows)


def _environment(base: Path, key: bytes, job: int) -> dict[str, str]:
    plan = Plan(id=secrets.token_hex(6), gpus=2, cpus=2, numa="strict", domains=1, cache_gb=1)
    comment = token.sign(token.SignedPlan(plan, 0, "", int(time.time())), key)
    return {
        "SLURM_JOB_ID": str(job),
        "SLURM_JOB_UID": "0",
        "SLURM_JOB_GID": "0",
        "SLURM_JOB_USER": "root",
        "SLURM_JOB_COMMENT": comment,
        "SLURM_JOB_GPUS": "0,1",
        "SLURM_CLUSTER_NAME": "bench",
        "SLURMD_NODENAME": "n1",
        "SLURM_JOB_RESTART_COUNT": "0",
    }


def _run(script: Path, environment: dict[str, str], *arguments: str) -> float:
    begin = time.perf_counter()
    subprocess.run(
        [str(script), *arguments], env=environment, check=True, stdout=subprocess.DEVNULL
    )
    return time.perf_counter() - begin
