"""``crater-probe bench``: measure memory bandwidth and a drive, and put it into the profile."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from crater_slurm.cli import bench_view
from crater_slurm.cli.context import loaded
from crater_slurm.errors import CraterError, UsageError

if TYPE_CHECKING:
    from crater_slurm.cli.probe_profile import ProfileFile
    from crater_slurm.probe.bench.memory import MemoryOptions
    from crater_slurm.probe.bench.nvme import NvmeOptions
    from crater_slurm.probe.bench.result import Announce, Measurement, Step
    from crater_slurm.probe.bench.target import Target

_COMMON = (
    click.option("--dry-run", is_flag=True, help="Say what would be done, and do nothing."),
    click.option("--json", "as_json", is_flag=True, help="Print JSON."),
    click.option("--quick", is_flag=True, help="Shorter steps and a smaller file."),
    click.option(
        "--write/--no-write", default=True, help="Put the results into this node's profile."
    ),
    click.option(
        "--allow-noise",
        is_flag=True,
        help="Measure on a busy machine; noisy results are marked and no profile takes them.",
    ),
)
_MEMORY = (
    click.option("--nodes", metavar="LIST", help="NUMA nodes whose CPUs are used, such as 0-1."),
)
_NVME = (
    click.option(
        "--dir",
        "folder",
        type=click.Path(path_type=Path),
        help="A folder of the drive's file system; default: the cache.",
    ),
    click.option(
        "--profile",
        type=click.Choice(["crater", "seed"]),
        default="crater",
        help="seed is one random write of 120 s, to compare with older figures.",
    ),
    click.option("--seconds", type=click.IntRange(1, 3600), help="Seconds of each fio step."),
    click.option(
        "--file-mib", type=click.IntRange(16, 2**24), help="Size of the file; default 8192."
    ),
    click.option(
        "--allow-any-filesystem",
        is_flag=True,
        help="Also in memory, on a network or in a container; no profile takes the results.",
    ),
)


@click.group()
def bench() -> None:
    """Measure what only a measurement can tell, without harm to anybody.

    The results go into this node's profile. A busy machine or drive is refused.
    """


def _options(*groups: Sequence[Callable[..., Any]]) -> Callable[..., Any]:
    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        every = [option for group in groups for option in group]
        return functools.reduce(lambda inner, option: option(inner), reversed(every), command)

    return decorate


@bench.command()
@_options(_COMMON, _MEMORY)
def memory(**options: Any) -> None:
    """Measure the memory bandwidth of each NUMA node."""
    _run(memory="own", drive=False, **options)


@bench.command()
@_options(_COMMON, _MEMORY)
def numa(**options: Any) -> None:
    """Measure the bandwidth from each NUMA node's CPUs to each node's memory."""
    _run(memory="pairs", drive=False, **options)


@bench.command()
@_options(_COMMON, _NVME)
def nvme(**options: Any) -> None:
    """Measure the drive below the cache, with fio on a file of its own."""
    _run(memory=None, drive=True, **options)


@bench.command("all")
@_options(_COMMON, _MEMORY, _NVME)
def all_(**options: Any) -> None:
    """Measure all pairs of NUMA nodes and the cache's drive."""
    _run(memory="pairs", drive=True, **options)


def _run(
    *, memory: str | None, drive: bool, dry_run: bool, as_json: bool, write: bool, **options: Any
) -> None:
    from crater_slurm.cli.probe_profile import ProfileFile
    from crater_slurm.probe.bench import lock

    file = ProfileFile.open(loaded().settings.node.profile, write=write and not dry_run)
    plan = _Plan.make(file, memory, drive, options)
    if dry_run:
        bench_view.show_steps(plan.steps(), as_json)
        if plan.problem:
            raise CraterError(plan.problem)
        return
    with lock.lock(lock.lock_file()) as handle, bench_view.progress(plan.seconds) as announce:
        results = plan.run(handle, announce)
    changed = file.put(results, matrix=memory == "pairs")
    bench_view.show(results, changed, file.path, as_json)
    refused = [item for item in results if item.refused]
    if refused:
        raise CraterError(
            f"{len(refused)} of {len(results)} refused, the first: {refused[0].refused}"
        )


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What a command measures."""

    file: ProfileFile
    places: list[tuple[int, int]]
    memory: MemoryOptions
    nvme: NvmeOptions
    target: Target | None
    problem: str | None

    @classmethod
    def make(
        cls, file: ProfileFile, memory: str | None, drive: bool, options: dict[str, Any]
    ) -> _Plan:
        """The plan of the options; a folder that can't be measured is a problem of its part."""
        from crater_slurm.probe.bench import numa

        ids = _numbers(options.get("nodes"))
        places = []
        if memory is not None:
            places = numa.places(file.machine, ids, all_pairs=memory == "pairs")
        target, problem = None, None
        if drive:
            try:
                target = _target(options["folder"], options["allow_any_filesystem"])
            except CraterError as error:
                if memory is None:
                    raise
                problem = str(error)
        return cls(file, places, _memory_options(options), _nvme_options(options), target, problem)

    @property
    def seconds(self) -> float:
        return sum(step.seconds for step in self.steps())

    def steps(self) -> list[Step]:
        from crater_slurm.probe.bench import numa, nvme
        from crater_slurm.probe.bench.jobs import engines

        found = numa.steps(self.file.machine, self.places, self.memory)
        if self.target is not None:
            found += nvme.steps(self.nvme, engines("io_uring libaio")[0])
        return found

    def run(self, lock: int, announce: Announce) -> list[Measurement]:
        """Everything, whatever becomes of the parts."""
        from crater_slurm.probe.bench import numa, nvme, scratch
        from crater_slurm.probe.bench.result import Measurement, now

        found = numa.bench(self.file.machine, self.places, self.memory, announce)
        problem = self.problem
        if self.target is not None:
            try:
                for line in scratch.clean_leftovers(self.target.folder):
                    click.echo(f"crater-probe: {line}", err=True)
                found += nvme.bench(self.file.profile, self.target, self.nvme, lock, announce)
            except CraterError as error:
                problem = str(error)
        if problem:
            found.append(Measurement(what="drive", time=now(), refused=problem))
        return found


def _memory_options(options: dict[str, Any]) -> MemoryOptions:
    from crater_slurm.probe.bench.memory import MemoryOptions

    repeats = 3 if options["quick"] else 5
    return MemoryOptions(repeats=repeats, allow_noise=options["allow_noise"])


def _nvme_options(options: dict[str, Any]) -> NvmeOptions:
    from crater_slurm.probe.bench.nvme import NvmeOptions

    quick, profile = options["quick"], options.get("profile", "crater")
    usual = 5 if quick else 120 if profile == "seed" else 20
    return NvmeOptions(
        profile=profile,
        seconds=options.get("seconds") or usual,
        ramp_seconds=1 if quick else 3,
        file_mib=options.get("file_mib") or (1024 if quick else 8192),
        allow_noise=options["allow_noise"],
    )


def _target(folder: Path | None, allow_any: bool) -> Target:
    from crater_slurm.probe.bench.target import target

    cache = loaded().settings.node.cache
    if folder is None and cache.require_mount and not cache.mount_point.is_mount():
        raise CraterError(
            f"nothing is mounted at {cache.mount_point} (node.cache.mount_point); mount the cache, "
            "or name a folder of its drive with --dir"
        )
    return target(folder or cache.mount_point, allow_any=allow_any)


def _numbers(text: str | None) -> list[int] | None:
    from crater_slurm.model.cpuset import parse_cpulist

    if text is None:
        return None
    try:
        return list(parse_cpulist(text))
    except ValueError as error:
        raise UsageError(f"--nodes {text}: {error}") from error
