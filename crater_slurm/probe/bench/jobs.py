"""The fio jobs of the two profiles, as data and as fio's job file.

``crater`` measures each quantity with the job that shows it: latency at depth 1, IOPS at 4 x 64,
bandwidth with 1 MiB blocks. At depth 4 x 64 a latency is the queue's, not the drive's, and 4 KiB
blocks tell no bandwidth. ``seed`` is one long 4 KiB random write, to compare with older figures.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from crater_slurm.probe.bench.scratch import DATA

#: From the best to the one that is always there.
ENGINES = ("io_uring", "libaio", "psync")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One fio run; ``fields`` are the fields of Nvme that it fills."""

    name: str
    text: str
    rw: str
    block: str
    iodepth: int
    numjobs: int = 1
    seconds: int = 20
    ramp_seconds: int = 3

    @property
    def method(self) -> str:
        return f"fio {self.rw} {self.block}, depth {self.iodepth} x {self.numjobs}, direct"


def jobs(profile: str, seconds: int, ramp_seconds: int) -> tuple[Job, ...]:
    """The jobs of ``crater``, each of ``seconds``, or of ``seed``."""
    if profile == "seed":
        return (
            Job(
                name="seed",
                text="random write as of the seed profile",
                rw="randwrite",
                block="4k",
                iodepth=64,
                numjobs=4,
                seconds=seconds,
                ramp_seconds=0,
            ),
        )
    table = (
        ("latency", "random read latency", "randread", "4k", 1, 1),
        ("read", "random read", "randread", "4k", 64, 4),
        ("mixed", "random 70/30 mix", "randrw", "4k", 64, 4),
        ("write", "random write", "randwrite", "4k", 64, 4),
        ("seqwrite", "sequential write", "write", "1M", 32, 1),
        ("seqread", "sequential read", "read", "1M", 32, 1),
    )
    return tuple(
        Job(
            name=name,
            text=text,
            rw=rw,
            block=block,
            iodepth=iodepth,
            numjobs=numjobs,
            seconds=seconds,
            ramp_seconds=ramp_seconds,
        )
        for name, text, rw, block, iodepth, numjobs in table
    )


def job_file(job: Job, engine: str, file_mib: int) -> str:
    """fio's job file; the file must be there already, in the folder that fio runs in."""
    options: dict[str, object] = {
        **_common(engine, file_mib),
        "rw": job.rw,
        "bs": job.block,
        "iodepth": job.iodepth,
        "numjobs": job.numjobs,
        "time_based": 1,
        "runtime": job.seconds,
        "ramp_time": job.ramp_seconds,
        "group_reporting": 1,
        "randrepeat": 0,
        "norandommap": 1,
        "write_iops_log": "iops",
        "log_avg_msec": 1000,
    }
    if job.rw == "randrw":
        options["rwmixread"] = 70
    return _text(job.name, options)


def fill_file(engine: str, file_mib: int) -> str:
    """The job that writes the whole file once: blocks never written read as zeros, without I/O."""
    options: dict[str, object] = {
        **_common(engine, file_mib),
        "rw": "write",
        "bs": "1M",
        "iodepth": 32,
        "refill_buffers": 1,
        "end_fsync": 1,
    }
    return _text("fill", options)


def engines(available: str, root: Path = Path("/")) -> tuple[str, ...]:
    """The engines worth trying, best first; ``available`` is what ``fio --enghelp`` prints."""
    words = set(available.split())
    found = [engine for engine in ENGINES if engine in words or engine == "psync"]
    if not io_uring_allowed(root):
        found = [engine for engine in found if engine != "io_uring"]
    return tuple(found)


def io_uring_allowed(root: Path = Path("/")) -> bool:
    """Whether the kernel lets this process use io_uring; no such setting means that it does."""
    folder = root / "proc/sys/kernel"
    try:
        level = int((folder / "io_uring_disabled").read_text())
    except (OSError, ValueError):
        return True
    if level == 0 or (level == 1 and os.geteuid() == 0):
        return True
    if level != 1:
        return False
    try:
        group = int((folder / "io_uring_group").read_text())
    except (OSError, ValueError):
        return False
    return group in {os.getegid(), *os.getgroups()}


def _common(engine: str, file_mib: int) -> dict[str, object]:
    return {
        "filename": DATA,
        "allow_file_create": 0,
        "ioengine": engine,
        "direct": 1,
        "size": f"{file_mib}m",
        "thread": 1,
    }


def _text(name: str, options: Mapping[str, object]) -> str:
    return f"[{name}]\n" + "".join(f"{key}={value}\n" for key, value in options.items())
