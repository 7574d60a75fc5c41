"""Epilogs that found no daemon: their jobs are closed when it is back, and no others."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from node_fakes import ask, make_proc, make_sys, settings, signed

from crater_slurm.node import upkeep
from crater_slurm.node.jobs import ENDED, PREPARED
from crater_slurm.node.server import dispatch
from crater_slurm.node.services import Roots, Services

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="changes owners, so it needs root")
EPILOG = Path(__file__).parents[2] / "prolog/epilog.sh"


def daemon(folder: Path) -> Services:
    """A daemon on that folder, freshly started."""
    if not (folder / "sys").exists():
        make_proc(folder / "proc", 1, 0, "0-1")
        make_sys(folder / "sys", {0: ("0-1", 64)})
    services = Services(settings(folder), Roots(folder / "proc", folder / "sys"))
    upkeep.recover(services)
    return services


def start(services: Services, job: str, **env: str) -> None:
    # A token belongs to one job.
    comment = signed(id=f"plan{job}")
    dispatch(services, ask("prolog", SLURM_JOB_ID=job, SLURM_JOB_COMMENT=comment, **env))


def missed_epilog(folder: Path, job: str) -> int:
    """The Epilog script while nobody answers."""
    command = [str(EPILOG), f"socket={folder}/run/node.sock", f"off={folder}/off", "timeout=1"]
    return subprocess.run(command, env={"SLURM_JOB_ID": job}, check=False).returncode


def phase(services: Services, job: str) -> str:
    record = services.store.get(job)
    assert record is not None
    return record.phase


def folder_of(folder: Path, job: str) -> Path:
    return folder / "cache/temp/c1" / job


@pytest.mark.parametrize("restart", [True, False], ids=["restarted", "woken"])
def test_a_missed_end_is_made_up_for(tmp_path: Path, restart: bool) -> None:
    services = daemon(tmp_path)
    start(services, "7")
    start(services, "8")
    assert missed_epilog(tmp_path, "7") == 0
    if restart:
        services = daemon(tmp_path)
    else:
        upkeep.tidy(services)
    assert (phase(services, "7"), phase(services, "8")) == (ENDED, PREPARED)
    assert not folder_of(tmp_path, "7").exists()
    assert folder_of(tmp_path, "8").exists()
    assert sorted(p.name for p in (tmp_path / "run/jobs").iterdir()) == ["8"]
    assert services.marks.ended() == []


def test_a_requeued_job_is_not_ended_by_its_earlier_run(tmp_path: Path) -> None:
    services = daemon(tmp_path)
    start(services, "7")
    assert missed_epilog(tmp_path, "7") == 0
    start(services, "7", SLURM_JOB_RESTART_COUNT="1")
    upkeep.tidy(services)
    assert phase(daemon(tmp_path), "7") == PREPARED
    assert folder_of(tmp_path, "7").exists()


def test_an_answered_epilog_leaves_no_note(tmp_path: Path) -> None:
    services = daemon(tmp_path)
    start(services, "7")
    dispatch(services, ask("epilog", SLURM_JOB_ID="7"))
    assert missed_epilog(tmp_path, "7") == 0  # Slurm may run it again; there is no mark
    assert services.marks.ended() == []


def test_notes_about_nothing_are_thrown_away(tmp_path: Path) -> None:
    services = daemon(tmp_path)
    for name in ("99", "nonsense", "all"):
        (tmp_path / "run/ended" / name).touch()
    upkeep.tidy(services)
    assert services.marks.ended() == []


@pytest.mark.parametrize("trouble", ["no folder", "a file", "a folder in the way"])
def test_the_script_never_fails(tmp_path: Path, trouble: str) -> None:
    (tmp_path / "run/jobs").mkdir(parents=True)
    (tmp_path / "run/jobs/7").touch()
    if trouble == "a file":
        (tmp_path / "run/ended").touch()
    elif trouble == "a folder in the way":
        (tmp_path / "run/ended/7").mkdir(parents=True)
    assert missed_epilog(tmp_path, "7") == 0
