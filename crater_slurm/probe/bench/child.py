"""Runs fio as a child that dies with this process and never sees a path of the folder."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess

from crater_slurm.errors import CraterError
from crater_slurm.probe.bench import jobs
from crater_slurm.probe.tools.fio import FioReport, parse_report, parse_version

#: The first version whose JSON is in nanoseconds and whose per-second logs are reliable.
_OLDEST = (3, 1)
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def find() -> str:
    """The path of fio. Raises CraterError when there is none, or one that is too old."""
    program = shutil.which("fio")
    if program is None:
        raise CraterError("fio is not installed; install the package 'fio' (3.1 or later)")
    version = parse_version(_output([program, "--version"]))
    if version < _OLDEST:
        raise CraterError(f"fio {version[0]}.{version[1]} is too old; 3.1 or later is needed")
    return program


def engines(program: str) -> tuple[str, ...]:
    """The engines that this fio has and the kernel allows, best first."""
    return jobs.engines(_output([program, "--enghelp"]))


def run(program: str, job_text: str, inside: int, lock: int, timeout_seconds: float) -> FioReport:
    """fio's report of a job file, run in the open folder ``inside``.

    The child holds the lock, so that no other benchmark starts while it lives. Raises CraterError
    with fio's words when it fails, and when it takes longer than ``timeout_seconds``.
    """
    child = _start(program, inside, lock)
    try:
        output, errors = child.communicate(job_text, timeout=timeout_seconds)
    except subprocess.TimeoutExpired as error:
        raise CraterError(f"fio has not ended after {timeout_seconds:.0f} s; given up") from error
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    if child.returncode < 0:
        raise CraterError(f"fio was killed by {signal.Signals(-child.returncode).name}")
    report = parse_report(errors + "\n" + output if child.returncode else output)
    if child.returncode:
        said = "; ".join(report.messages[:3])
        raise CraterError(f"fio ended with {child.returncode}: {said or 'without a word'}")
    return report


def _start(program: str, inside: int, lock: int) -> subprocess.Popen[str]:
    def prepare() -> None:
        """Between fork and exec: into the folder as it is open here, whatever its name is now.

        Without the signal, a benchmark that is killed would leave fio writing.
        """
        os.fchdir(inside)
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    try:
        return subprocess.Popen(
            [program, "--output-format=json", "-"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            pass_fds=(lock,),
            start_new_session=True,
            preexec_fn=prepare,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise CraterError(f"can't start {program}: {error}") from error


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=15, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise CraterError(f"{' '.join(command)} failed: {error}") from error
    return done.stdout
