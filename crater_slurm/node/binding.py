"""Keeps strict jobs' memory on the NUMA nodes of their cores, as far as nobody can be hurt by it.

Two triggers end in the same place. The watcher calls ``reconcile`` when Slurm's tree changes;
TaskProlog calls ``confirm``, which is the barrier: when it returns, the task's step is narrow, or
it is known why not. Every pass first widens what the ledger no longer carries, then narrows. A
job once left wide stays wide, since its memory may lie anywhere by then.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from crater_slurm.node import cgroups
from crater_slurm.node.ledger import Claim, decide
from crater_slurm.node.topology import Topology

_log = logging.getLogger("crater.node.binding")

Mask = frozenset[int]


@dataclass(frozen=True, slots=True)
class Given:
    """What a job's memory got: ``hard`` (kernel limit), ``soft`` (first touch) or ``none``."""

    kind: Literal["hard", "soft", "none"]
    reason: str
    mems: Mask = frozenset()


class Directory(Protocol):
    """What the binder must know of jobs, by the name of their cgroup."""

    def strict(self, cgroup: str) -> bool:
        """Whether the job's plan asks for strict binding."""
        ...

    def soft(self, cgroup: str) -> str:
        """Why the job was left wide before; empty when it was not."""
        ...

    def set_soft(self, cgroup: str, reason: str) -> None:
        """Remember that the job is left wide from now on."""
        ...


class Binder:
    """Narrows and widens ``cpuset.mems`` under the ledger. Thread-safe."""

    def __init__(
        self,
        tree: cgroups.Tree,
        topology: Topology,
        directory: Directory,
        *,
        mode: Literal["hard", "soft", "off"] = "hard",
        reserve_mib: int = 2048,
        unreclaimable_mib: Callable[[int], int] | None = None,
    ) -> None:
        self._tree = tree
        self._topology = topology
        self._directory = directory
        self._mode = mode
        self._reserve_mib = reserve_mib
        self._unreclaimable_mib = unreclaimable_mib or topology.unreclaimable_mib
        self._lock = threading.Lock()
        #: Masks of tasks whose affinity is narrower than their step, as TaskProlog reported them.
        self._task_masks: dict[Path, Mask] = {}
        self._hard: frozenset[Path] = frozenset()

    def unusable(self) -> str:
        """Why nothing is ever narrowed here; empty when it may be."""
        if self._mode != "hard":
            return f"node.memory_binding is {self._mode}"
        if len(self._topology.memory_nodes) < 2:
            return "the machine has one NUMA node"
        return self._tree.unusable()

    def reconcile(self) -> None:
        """Make the tree agree with the ledger. Cheap when there is nothing to do."""
        if not self.unusable():
            with self._lock:
                self._reconcile()

    def confirm(self, cgroup: str, cpus: Iterable[int]) -> Given:
        """Bind the task at a /proc/PID/cgroup path that may run on ``cpus``; what it got."""
        reason = self.unusable()
        if reason:
            return Given("none" if self._mode == "off" else "soft", reason)
        place = self._tree.place(cgroup)
        if place is None:
            return Given("soft", "the task is in no Slurm cgroup that could be bound")
        if not self._directory.strict(place.job.name):
            return Given("none", "the plan does not ask for it")
        if soft := self._directory.soft(place.job.name):
            return Given("soft", soft, self._effective(place.task))
        step_mask = self._topology.mask_of(cgroups.numbers(place.step / "cpuset.cpus.effective"))
        task_mask = self._topology.mask_of(cpus)
        want = task_mask if task_mask < step_mask else step_mask
        if place.job not in self._hard or self._effective(place.task) != want:
            with self._lock:
                if task_mask < step_mask:
                    self._task_masks[place.task] = task_mask
                self._reconcile()
        if soft := self._directory.soft(place.job.name):
            return Given("soft", soft, self._effective(place.task))
        given = self._effective(place.task)
        if place.job in self._hard and given == want:
            return Given("hard", "the memory limits of all jobs fit", given)
        return Given("soft", "the kernel did not take the NUMA nodes asked for", given)

    def release(self) -> None:
        """Widen everything that was narrowed: without the daemon nobody keeps the ledger.

        The jobs are not marked, so that a restarted daemon narrows them again if they still fit.
        """
        if self.unusable():
            return
        with self._lock:
            for job in self._tree.scan():
                if self._directory.strict(job.name):
                    self._widen(job)
            self._hard = frozenset()

    def _effective(self, folder: Path) -> Mask:
        return cgroups.numbers(folder / "cpuset.mems.effective")

    def _reconcile(self) -> None:
        scanned = self._tree.scan()
        present = {task.path for job in scanned for step in job.steps for task in step.tasks}
        self._task_masks = {p: m for p, m in self._task_masks.items() if p in present}
        masks = {job.path: self._masks(job) for job in scanned}
        # A strict job whose cores Slurm has not written yet has no process that could be hurt,
        # and counting it as one that can go anywhere would push others aside for nothing.
        jobs = [job for job in scanned if job.settled and (masks[job.path] or not self._new(job))]
        claims = [Claim(str(job.path), job.limit_mib, masks[job.path]) for job in jobs]
        for job in scanned:
            if self._directory.strict(job.name) and self._directory.soft(job.name):
                self._widen(job)  # again, in case a crash came between the decision and the write
        if not any(claim.masks for claim in claims):
            self._hard = frozenset()
            return
        rulings = decide(claims, self._capacity(jobs))
        hard = set()
        for job in jobs:
            ruling = rulings.get(str(job.path))
            if ruling and ruling.hard:
                hard.add(job.path)
            elif ruling:
                self._widen(job)  # before the record: the newcomer may start any moment
                self._directory.set_soft(job.name, ruling.reason)
                _log.info("binding: %s stays soft: %s", job.name, ruling.reason)
        for job in jobs:
            if job.path in hard and not self._narrow(job):
                hard.discard(job.path)
        self._hard = frozenset(hard)

    def _new(self, job: cgroups.Job) -> bool:
        """A strict job of which nothing runs yet."""
        wanted = self._directory.strict(job.name) and not self._directory.soft(job.name)
        return wanted and not any(step.tasks for step in job.steps)

    def _masks(self, job: cgroups.Job) -> frozenset[Mask]:
        """Sets of NUMA nodes that the job would be narrowed to; empty if it must stay wide."""
        if not self._directory.strict(job.name) or self._directory.soft(job.name):
            return frozenset()
        masks = {self._topology.mask_of(step.cpus) for step in job.steps if step.cpus}
        for step in job.steps:
            masks |= {self._task_masks.get(t.path) or t.mems for t in step.tasks} - {frozenset()}
        return frozenset(masks)

    def _capacity(self, jobs: Iterable[cgroups.Job]) -> Mapping[int, int]:
        """MiB that each memory node has for jobs; nodes without CPUs are counted as full."""
        held: dict[int, int] = {}
        for job in jobs:
            for node, mib in cgroups.memory_by_node(job.path).items():
                held[node] = held.get(node, 0) + mib
        capacity = {}
        for number in self._topology.memory_nodes:
            domain = self._topology.domains[number]
            others = max(0, self._unreclaimable_mib(number) - held.get(number, 0))
            room = domain.memory_mib - self._reserve_mib - others if domain.cpus else 0
            capacity[number] = max(0, room)
        return capacity

    def _narrow(self, job: cgroups.Job) -> bool:
        """Narrow all steps of a job; False, and the job soft, when the kernel refuses."""
        for step in job.steps:
            if not step.cpus or not (step.mems or step.tasks):
                continue  # Slurm has not written this step yet; its write raises the next event
            wants = {step.path: (step.mems, self._topology.mask_of(step.cpus))}
            for task in step.tasks:
                if task.path in self._task_masks:
                    wants[task.path] = (task.mems, self._task_masks[task.path])
            for path, (now, want) in wants.items():
                reason = self._write(path, now, want)
                if reason:
                    self._widen(job)
                    self._directory.set_soft(job.name, reason)
                    return False
        return True

    def _widen(self, job: cgroups.Job) -> None:
        full = job.mems or self._topology.memory_nodes
        for step in job.steps:
            if step.mems and not step.mems >= full:
                self._write(step.path, step.mems, full)
            for task in step.tasks:
                if task.mems:
                    self._write(task.path, task.mems, frozenset())

    def _write(self, path: Path, now: Mask, want: Mask) -> str:
        """Write a set if it differs, as our own write raises an event too; why it failed."""
        if now == want:
            return ""
        try:
            self._tree.write_mems(path, want)
        except FileNotFoundError:
            return ""  # the step ended meanwhile
        except OSError as error:
            _log.warning("binding: couldn't write %s/cpuset.mems: %s", path, error)
            return f"couldn't write cpuset.mems: {error.strerror}"
        _log.info("binding: %s memory nodes %s -> %s", path, sorted(now), sorted(want))
        return ""
