"""Tasks whose jobs slurmctld has forgotten, on a real Slurm with slurmdbd: how they ended is known."""

from __future__ import annotations

from typing import Any

import pytest
from helpers import api_token, ask_api, cancel, patient_lab, running, small_task, wait_until

from crater_slurm.errors import LabError
from crater_slurm.lab import Lab

#: Seconds until slurmctld forgets an ended job; it looks once a minute.
MEMORY = "2"
FORGOTTEN = 240.0


@pytest.fixture(scope="module")
def lab(lab_factory: Any) -> Lab:
    conf = {"alldata": {"submit_as": {"alldata": "alice"}, "look_seconds": 2}}
    try:
        return patient_lab(
            lab_factory,
            inventory="cpu",
            accounting=True,
            slurm_conf={"MinJobAge": MEMORY},
            crater_conf=conf,
        )
    except LabError as error:
        if "a lab with accounting needs" in str(error):
            pytest.skip(str(error))
        raise


def forgotten(lab: Lab, job: int) -> bool:
    return "Invalid job id" in lab.run(["squeue", "--jobs", str(job)], user="root").stderr


def test_ends_that_slurmctld_forgot_while_nobody_looked_are_told_right(lab: Lab) -> None:
    key = api_token(lab, "alldata")
    commands = {
        "fails": ["sh", "-c", "sleep 1; until [ -e go ]; do sleep 0.1; done; exit 3"],
        "completes": ["sh", "-c", "until [ -e go ]; do sleep 0.1; done"],
        "is-cancelled": ["sleep", "600"],
    }
    jobs = {
        name: ask_api(lab, key, "/schedule", small_task(name, *command))["job_id"]
        for name, command in commands.items()
    }
    for job in jobs.values():
        running(lab, job)
    lab.kill("scheduler")
    (lab.home() / "go").touch()
    cancel(lab, jobs["is-cancelled"])
    for job in jobs.values():
        wait_until(lambda job=job: forgotten(lab, job), f"job {job} is forgotten", FORGOTTEN)
    lab.start("scheduler")
    healthy = ["curl", "-fsS", "-m", "10", "http://127.0.0.1:9192/healthz"]
    wait_until(lambda: not lab.run(healthy, machine_side=True).returncode, "it is back")
    expected = {"fails": ("failed", "3:0"), "completes": ("completed", "0:0"),
                # Slurm records the signal with the step, not with the job.
                "is-cancelled": ("cancelled", "0:0")}  # fmt: skip
    for name, (status, code) in expected.items():
        shown = wait_until(lambda name=name: _settled(lab, key, name), f"{name} is settled")
        assert (shown["status"], shown["exit_code"]) == (status, code), shown
        told = [one["status"] for one in shown["callbacks"]]
        assert told == ["scheduled", "running", status]


def _settled(lab: Lab, key: str, name: str) -> dict[str, Any] | None:
    shown = ask_api(lab, key, f"/tasks/{name}")
    return shown if shown["status"] not in ("submitted", "scheduled", "running") else None
