"""A drive's IOPS, latency and bandwidth, on a file that fio fills and that is gone afterwards."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from crater_slurm.errors import CraterError
from crater_slurm.model.profile import NodeProfile
from crater_slurm.probe.bench import child, jobs, scratch, target
from crater_slurm.probe.bench.jobs import Job
from crater_slurm.probe.bench.result import Announce, Measurement, Step, now, percentile
from crater_slurm.probe.bench.target import Target
from crater_slurm.probe.tools.fio import FioJob, iops_by_second

#: Of the IOPS of one-second samples: above the first a drive is steady, below the second not.
STABLE_RATIO = 0.85
UNSTABLE_RATIO = 0.70
#: Fewer one-second samples show nothing, and a profile wants more: p1 of a few is the worst one.
_MIN_SAMPLES = 3
_PROFILE_SAMPLES = 10
#: What filling the file is taken to reach, for the times that are announced and the limits.
_FILL_MIB_S = 1000
_SLOWEST_MIB_S = 40

Figure = Callable[[FioJob], float | None]
#: Of each job: the unit, how to read the figure, and the field of Nvme that it fills.
_FIGURES: dict[str, tuple[str, Figure, str | None]] = {
    "latency": ("µs", lambda job: job.read.clat_mean_us, "read_latency_us"),
    "read": ("IOPS", lambda job: job.read.iops, "random_read_iops"),
    "mixed": ("IOPS", lambda job: job.read.iops + job.write.iops, None),
    "write": ("IOPS", lambda job: job.write.iops, "random_write_iops"),
    "seqwrite": ("MB/s", lambda job: job.write.bandwidth_mb_s, "sequential_write_mb_s"),
    "seqread": ("MB/s", lambda job: job.read.bandwidth_mb_s, None),
    "seed": ("IOPS", lambda job: job.write.iops, None),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class NvmeOptions:
    """What is run, for how long, on a file of which size."""

    profile: str = "crater"
    seconds: int = 20
    ramp_seconds: int = 3
    file_mib: int = 8192
    allow_noise: bool = False

    @property
    def jobs(self) -> tuple[Job, ...]:
        return jobs.jobs(self.profile, self.seconds, self.ramp_seconds)

    @property
    def fill_seconds(self) -> float:
        return self.file_mib / _FILL_MIB_S


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bench:
    """What every step of a run needs: fio, the open folder, the lock, and where results go."""

    program: str
    engine: str
    inside: int
    lock: int
    options: NvmeOptions
    unfit: str | None
    prefix: str | None
    drive: str

    def unfit_at(self, depth: int) -> str | None:
        """Why a figure at this depth is kept out of the profile, or None."""
        if self.engine == "psync" and depth > 1:
            return self.unfit or f"psync waits for each I/O, so that depth {depth} was depth 1"
        return self.unfit


def steps(options: NvmeOptions, engine: str) -> list[Step]:
    """What ``bench`` would do, with the job files."""
    fill = Step(
        what="fill the file once with random data",
        seconds=options.fill_seconds,
        space_mib=options.file_mib,
        details=jobs.fill_file(engine, options.file_mib),
    )
    return [fill] + [
        Step(
            what=f"{job.text}, {job.block}",
            seconds=job.seconds + job.ramp_seconds,
            space_mib=options.file_mib,
            details=jobs.job_file(job, engine, options.file_mib),
        )
        for job in options.jobs
    ]


def obstacle(where: Target, options: NvmeOptions) -> str | None:
    """Why the file can't be made without harm, or None."""
    free, whole = target.space_mib(where.folder)
    why = target.too_small(free, whole, options.file_mib)
    return f"{where.folder}: {why}" if why else None


def place_in_profile(profile: NodeProfile, where: Target) -> tuple[str | None, str | None]:
    """(path of the drive in the profile, None), or (None, why no profile may have the figures)."""
    if where.unfit:
        return None, where.unfit
    if len(where.drives) > 1:
        return (
            None,
            f"{', '.join(where.drives)} carry the folder together; a profile has single ones",
        )
    for i, drive in enumerate(profile.nvmes):
        if drive.name == where.drives[0]:
            return f"nvmes[{i}]", None
    return None, f"{where.drives[0]} is no NVMe drive of the profile"


def bench(
    profile: NodeProfile, where: Target, options: NvmeOptions, lock: int, announce: Announce
) -> list[Measurement]:
    """All figures of the drive below ``where``.

    Raises CraterError when fio is missing or no engine works; a job that fails is handed back as
    refused, and ends the run.
    """
    program = child.find()
    drive = ", ".join(where.drives) or where.filesystem
    why = obstacle(where, options)
    busy = None if why else target.busy(where.drives)
    if why or (busy and not options.allow_noise):
        return [Measurement(what=f"drive {drive}", time=now(), refused=why or busy)]
    prefix, unfit = place_in_profile(profile, where)
    with scratch.scratch(where.folder, options.file_mib * 2**20) as inside:
        announce("fill the file once with random data", options.fill_seconds)
        engine = _fill(program, inside, lock, options)
        run = _Bench(
            program=program,
            engine=engine,
            inside=inside,
            lock=lock,
            options=options,
            unfit=f"noise: {busy}" if busy else unfit,
            prefix=prefix,
            drive=drive,
        )
        return _run_jobs(run, announce)


def stability(samples: Sequence[float]) -> float | None:
    """p1/p99 of one-second IOPS; None of too few samples, or when nothing was done."""
    if len(samples) < _MIN_SAMPLES or not (high := percentile(samples, 99)):
        return None
    return percentile(samples, 1) / high


def stability_figure(
    samples_of: Mapping[str, Sequence[float]], prefix: str | None, unfit: str | None, drive: str
) -> Measurement:
    """The lowest ratio of the random jobs: what a job can rely on."""
    what = f"IOPS stability of {drive}"
    ratios = {name: ratio for name, one in samples_of.items() if (ratio := stability(one))}
    if not ratios:
        return Measurement(
            what=what, time=now(), refused=f"fewer than {_MIN_SAMPLES} one-second samples"
        )
    lowest = min(ratios, key=lambda name: ratios[name])
    value, count = ratios[lowest], len(samples_of[lowest])
    if count < _PROFILE_SAMPLES:
        unfit = unfit or f"{count} samples, a profile wants {_PROFILE_SAMPLES}"
    warning = f"{value:.2f} is below {UNSTABLE_RATIO}: this drive's IOPS vary too much to rely on"
    return Measurement(
        what=what,
        value=round(value, 3),
        unit="p1/p99",
        method=f"{count} one-second samples of {lowest}, the lowest of {', '.join(ratios)}; "
        f"above {STABLE_RATIO} is steady",
        time=now(),
        path=f"{prefix}.iops_stability_ratio" if prefix else None,
        unfit=unfit,
        warnings=(warning,) if value < UNSTABLE_RATIO else (),
    )


def _fill(program: str, inside: int, lock: int, options: NvmeOptions) -> str:
    """Fill the file, with the best engine that works; which one that was."""
    engine = _working_engine(program, inside, lock)
    text = jobs.fill_file(engine, options.file_mib)
    child.run(program, text, inside, lock, 60 + options.file_mib / _SLOWEST_MIB_S)
    return engine


def _working_engine(program: str, inside: int, lock: int) -> str:
    """The first engine that can write a MiB: seccomp may forbid what the kernel allows."""
    said = []
    for engine in child.engines(program):
        try:
            child.run(program, jobs.fill_file(engine, 1), inside, lock, 60)
        except CraterError as error:
            said.append(f"{engine}: {error}")
        else:
            return engine
    raise CraterError(f"fio can't write the file with any engine: {'; '.join(said)}")


def _run_jobs(run: _Bench, announce: Announce) -> list[Measurement]:
    found: list[Measurement] = []
    samples_of: dict[str, Sequence[float]] = {}
    for job in run.options.jobs:
        announce(f"{job.text}, {job.block}", job.seconds + job.ramp_seconds)
        start = time.monotonic()
        text = jobs.job_file(job, run.engine, run.options.file_mib)
        timeout = job.seconds + job.ramp_seconds + 60
        try:
            report = child.run(run.program, text, run.inside, run.lock, timeout)
            samples = iops_by_second(_take_logs(run.inside))
            figure = _figure(run, job, report.jobs[0], samples, time.monotonic() - start)
        except CraterError as error:
            what = f"{job.text} of {run.drive}"
            return [*found, Measurement(what=what, time=now(), refused=str(error))]
        found.append(figure)
        if job.iodepth * job.numjobs > 1 and job.block == "4k":
            samples_of[job.text] = samples
    return [*found, stability_figure(samples_of, run.prefix, run.unfit_at(64), run.drive)]


def _figure(
    run: _Bench, job: Job, report: FioJob, samples: Sequence[float], seconds: float
) -> Measurement:
    unit, read, field = _FIGURES[job.name]
    value = read(report)
    if not value:
        raise CraterError(f"fio did no operation in {job.seconds} s of {job.text}")
    span = f"; IOPS of seconds {min(samples):.0f} to {max(samples):.0f}" if len(samples) > 1 else ""
    return Measurement(
        what=f"{job.text} of {run.drive}",
        value=round(value) if unit == "IOPS" else round(value, 1),
        unit=unit,
        method=f"{job.method}, {run.engine}, {job.seconds} s, "
        f"{run.options.file_mib} MiB file{span}",
        seconds=seconds,
        time=now(),
        path=f"{run.prefix}.{field}" if run.prefix and field else None,
        unfit=run.unfit_at(job.iodepth),
    )


def _take_logs(inside: int) -> list[str]:
    """The IOPS logs of the job that has just run, one text per job; they are removed."""
    texts = []
    for name in sorted(os.listdir(inside)):
        if name.endswith(".log"):
            handle = os.open(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=inside)
            with open(handle, encoding="utf-8", errors="replace") as log:  # noqa: PTH123
                texts.append(log.read())
            os.unlink(name, dir_fd=inside)
    return texts
