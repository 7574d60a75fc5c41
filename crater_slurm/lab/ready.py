"""Waits until the parts of a lab answer, and says why when one does not.

A daemon's exit status means nothing here: slurmctld and slurmd go into the background, or fail,
only after they were started with success. So what counts is an answer.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from crater_slurm.errors import LabError
from crater_slurm.lab.cluster import Cluster
from crater_slurm.lab.services import Service, tail

_PAUSE_SECONDS = 0.05
_USABLE = ("idle", "mixed", "allocated")
#: Asks crater-scheduler how it is; prints nothing when all is well.
_HEALTH = """
import sys, urllib.error, urllib.request
try:
    urllib.request.urlopen(sys.argv[1] + "/healthz", timeout=5)
except urllib.error.HTTPError as error:
    print(error.read().decode())
except OSError as error:
    print(error)
"""
_URL = "http://127.0.0.1:9192"


def controller(lab: Cluster, deadline: float) -> None:
    """Wait for slurmctld's answer."""
    while "UP" not in lab.run(["scontrol", "ping"], user="root").stdout:
        _still_starting(lab, "slurmctld", deadline, "does not answer")


def nodes(lab: Cluster, names: Sequence[str], deadline: float) -> None:
    """Wait until every node takes jobs."""
    while True:
        states = lab.node_states()
        waiting = [name for name in names if states.get(name) not in _USABLE]
        if not waiting:
            return
        first = waiting[0]
        state = states.get(first, "missing")
        if "inval" in state or "drain" in state:
            reason = lab.node(first).get("Reason", "no reason given")
            raise LabError(f"node {first} is {state} ({reason}):\n{why(lab, f'slurmd@{first}')}")
        _still_starting(lab, f"slurmd@{first}", deadline, f"leaves its node {state}")


def socket(lab: Cluster, service: Service, deadline: float) -> None:
    """Wait until one of crater's daemons listens."""
    folder = lab.folders.node(service.node) if service.node else lab.folders.controller
    file = folder / "run" / ("node.sock" if service.node else "filter.sock")
    while not file.exists():
        _still_starting(lab, service.name, deadline, f"does not listen on {file.name}")


def scheduler(lab: Cluster, deadline: float) -> None:
    """Wait until crater-scheduler has read the cluster and the profiles."""
    url = str(lab.spec.crater_conf.get("scheduler", {}).get("url", _URL))
    while True:
        asked = lab.run([sys.executable, "-c", _HEALTH, url], user="root", machine_side=True)
        if not asked.stdout.strip():
            return
        _still_starting(lab, "scheduler", deadline, f"is not ready: {asked.stdout.strip()}")


def _still_starting(lab: Cluster, service: str, deadline: float, symptom: str) -> None:
    """Pause, unless the service is gone or late."""
    if lab.supervisor.pid(service) is None:
        raise LabError(f"{service} ended at its start:\n{why(lab, service)}")
    if time.monotonic() > deadline:
        raise LabError(f"{service} {symptom}:\n{why(lab, service)}")
    time.sleep(_PAUSE_SECONDS)


def why(lab: Cluster, service: str) -> str:
    """The lines that tell most about a service that failed."""
    files: list[Path] = [lab.folders.log / f"{service}.log", lab.folders.log / f"{service}.out"]
    return next((text for file in files if (text := tail(file, 5))), "its log is empty")
