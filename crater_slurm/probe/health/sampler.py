"""All of a node's health in one sample."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

from crater_slurm.model.health import DriveHealth, NodeHealth
from crater_slurm.model.profile import NodeProfile
from crater_slurm.probe.health.cpus import CpuSampler
from crater_slurm.probe.health.drives import DriveSampler
from crater_slurm.probe.health.gpus import GpuSampler
from crater_slurm.probe.health.latency import LatencyProbe
from crater_slurm.probe.tools import nvme_cli

#: nvme-cli starts a process per drive, and wear takes weeks to grow.
_SMART_SECONDS = 900.0


class Sampler:
    """Samples a machine again and again. ``problems`` are sentences on what can't be known."""

    def __init__(self, root: Path = Path("/"), *, latency: LatencyProbe | None = None) -> None:
        self._cpus = CpuSampler(root)
        self._drives = DriveSampler(root)
        self._gpus = GpuSampler()
        self._latency = latency
        self._live = root == Path("/")
        self._smart: dict[str, nvme_cli.Drive] = {}
        self._next_smart = 0.0
        self.problems: tuple[str, ...] = ()

    def sample(self, profile: NodeProfile, cache_drive: str | None = None) -> NodeHealth:
        """The machine now. ``cache_drive`` is the drive that the latency probe reads from."""
        now = time.monotonic()
        notes: list[str] = []
        drives = self._with_smart(self._drives.sample(profile, now), now, notes)
        if self._latency and cache_drive:
            latency_us = self._latency.sample()
            drives = tuple(
                dataclasses.replace(d, latency_us=latency_us) if d.name == cache_drive else d
                for d in drives
            )
            notes.append(self._latency.problem)
        found = NodeHealth(
            node=profile.name,
            time=time.time(),
            load=self._cpus.load(),
            numa_nodes=self._cpus.sample(profile, now),
            gpus=self._gpus.sample(profile) if self._live else (),
            drives=drives,
        )
        self.problems = tuple(filter(None, (*notes, self._gpus.problem)))
        return found

    def close(self) -> None:
        self._gpus.close()

    def _with_smart(
        self, drives: tuple[DriveHealth, ...], now: float, notes: list[str]
    ) -> tuple[DriveHealth, ...]:
        if not drives or not self._live:
            return drives
        if now >= self._next_smart:
            self._next_smart = now + _SMART_SECONDS
            self._smart = nvme_cli.read(notes)
        found = []
        for drive in drives:
            smart = self._smart.get(drive.name)
            if smart is not None:
                drive = dataclasses.replace(
                    drive,
                    wear_percent=smart.wear_percent,
                    temperature_c=smart.temperature_c,
                    critical_warning=smart.critical_warning,
                )
            found.append(drive)
        return tuple(found)
