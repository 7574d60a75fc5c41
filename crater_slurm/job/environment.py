"""What a process is told by crater, Slurm and torchrun, as one object. Reads, changes nothing."""

from __future__ import annotations

import os
import re
import socket
import time
from dataclasses import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

_UNFIT = re.compile(r"[^A-Za-z0-9_.-]")
#: Slurm's numbers for the batch script, an interactive shell and the like, none of them a step's.
_SPECIAL_STEPS = 0xFFFFFFF0


@dataclass(frozen=True)
class Environment:
    """One rank. Lists are empty and texts None where nothing was said.

    ``gpu_ids`` as CUDA numbers them in this process; ``run`` is ``<job id>.<restart count>``,
    ``start`` the number of the srun step that all ranks of this training are tasks of;
    ``deadline`` the job's end in seconds since 1970; ``folder`` the job's checkpoints in the
    node's cache; ``destination`` where they go on to, if that is a folder.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    gpu_ids: tuple[int, ...] = ()
    numa_nodes: tuple[int, ...] = ()
    cpus: tuple[int, ...] = ()
    preprocessing_cpus: tuple[int, ...] = ()
    compute_cpus: tuple[int, ...] = ()
    folder: str | None = None
    destination: str | None = None
    dataset: str | None = None
    tmpdir: str | None = None
    precision: str | None = None
    ring: str | None = None
    plan_id: str | None = None
    job_id: str = ""
    cluster: str = ""
    node: str = ""
    run: str = ""
    start: str = ""
    deadline: float | None = None

    @property
    def in_slurm(self) -> bool:
        """Whether this is a job of Slurm's."""
        return bool(self.job_id)


def numbers(text: str | None) -> tuple[int, ...]:
    """A list such as ``0-3,8`` in order; empty for what is none."""
    found: set[int] = set()
    for part in (text or "").split(","):
        first, _, last = part.strip().partition("-")
        if not first.isdigit() or (last and not last.isdigit()):
            continue
        low, high = int(first), int(last or first)
        if high - low < 1 << 16:
            found.update(range(low, high + 1))
    return tuple(sorted(found))


def read(environ: Mapping[str, str] | None = None) -> Environment:
    """The environment of this process, or a mapping that stands for one."""
    env = os.environ if environ is None else environ
    rank, world, local, local_world = _ranks(env)
    job = _plain(env.get("SLURM_JOB_ID", ""))
    away = env.get("CRATER_CHECKPOINT_DESTINATION", "")
    return Environment(
        rank=rank,
        local_rank=local,
        world_size=world,
        local_world_size=local_world,
        gpu_ids=numbers(env.get("CRATER_GPU_IDS")),
        numa_nodes=numbers(env.get("CRATER_NUMA_NODE")),
        cpus=numbers(env.get("CRATER_CPU_LIST")),
        preprocessing_cpus=numbers(env.get("CRATER_PREPROC_CPUS")),
        compute_cpus=numbers(env.get("CRATER_COMPUTE_CPUS")),
        folder=env.get("CRATER_CHECKPOINT_PATH") or None,
        destination=away if away.startswith("/") else None,
        dataset=env.get("CRATER_DATASET_PATH") or None,
        tmpdir=env.get("CRATER_TMPDIR") or env.get("TMPDIR") or None,
        precision=env.get("CRATER_PRECISION") or None,
        ring=env.get("CRATER_RING") or None,
        plan_id=env.get("CRATER_PLAN_ID") or None,
        job_id=job,
        cluster=_plain(env.get("SLURM_CLUSTER_NAME", "")),
        node=_plain(env.get("SLURMD_NODENAME", "") or socket.gethostname()),
        run=_run(env, job, world),
        start=_start(env, world) if job else "",
        deadline=_deadline(env),
    )


def _plain(text: str) -> str:
    """A name as manifests take it."""
    return _UNFIT.sub("_", text)[:64]


def _whole(env: Mapping[str, str], *names: str) -> int | None:
    """The first of these variables that is a whole number."""
    for name in names:
        value = env.get(name, "").strip()
        if value.isdigit():
            return int(value)
    return None


def _ranks(env: Mapping[str, str]) -> tuple[int, int, int, int]:
    """rank, world size, local rank, local world size: torchrun's where they are, else those of the
    srun step. The batch script itself has no step and is one process, whatever --ntasks says."""
    in_step = _whole(env, "SLURM_STEP_NUM_TASKS") is not None
    slurm = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID") if in_step else ()
    world = _whole(env, "WORLD_SIZE", *slurm[1:2]) or 1
    rank = _whole(env, "RANK", *slurm[:1]) or 0
    local = _whole(env, "LOCAL_RANK", *slurm[2:])
    local_world = _whole(env, "LOCAL_WORLD_SIZE")
    if local_world is None and in_step and "WORLD_SIZE" not in env:
        local_world = _tasks_here(env)
    if local_world is None:
        local_world = world if world == 1 else _per_node(env, world)
    if rank >= world:
        rank, world = 0, 1
    local_world = max(1, min(local_world, world))
    return (
        rank,
        world,
        min(local if local is not None else rank % local_world, 1 << 16),
        local_world,
    )


def _tasks_here(env: Mapping[str, str]) -> int | None:
    """This node's entry of a list such as ``4(x2),3``."""
    place = _whole(env, "SLURM_NODEID")
    spelled = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE", "")
    counts: list[int] = []
    for part in spelled.split(","):
        match = re.fullmatch(r"(\d{1,6})(?:\(x(\d{1,6})\))?", part.strip())
        if match is None:
            return None
        counts.extend([int(match.group(1))] * int(match.group(2) or 1))
    return counts[place] if place is not None and place < len(counts) else None


def _per_node(env: Mapping[str, str], world: int) -> int:
    nodes = _whole(env, "SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES", "SLURM_NNODES") or 1
    return -(-world // max(1, nodes))


def _run(env: Mapping[str, str], job: str, world: int) -> str:
    """Tells this run from every other one that may save into the same folder."""
    if job:
        return f"{job}.{_whole(env, 'SLURM_RESTART_COUNT') or 0}"[:64]
    shared = env.get("TORCHELASTIC_RUN_ID", "") + "-" + env.get("MASTER_PORT", "")
    if world > 1:
        return f"local.{_plain(shared)}"[:64]
    return f"local.{os.getpid()}-{int(time.time())}"


def _start(env: Mapping[str, str], world: int) -> str:
    """The step's number where one step holds all ranks. With a step for each node, or outside of
    any, nothing is known: the ranks of one training would not agree."""
    step, tasks = _whole(env, "SLURM_STEP_ID"), _whole(env, "SLURM_STEP_NUM_TASKS")
    if step is None or tasks is None or step >= _SPECIAL_STEPS:
        return ""
    held = {tasks, tasks * (_whole(env, "LOCAL_WORLD_SIZE") or 1)}
    return str(step) if world == 1 or world in held else ""


def process_start() -> float:
    """When this process was made, as time.time(); now where that can't be known. What was saved
    before is another process's, though it may be of the same run."""
    now = time.time()
    try:
        with open("/proc/self/stat", "rb") as file:
            ticks = int(file.read().rpartition(b")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return now
    return now - max(0.0, age)


def _deadline(env: Mapping[str, str]) -> float | None:
    value = env.get("SLURM_JOB_END_TIME", "")
    return float(value) if value.isdigit() else None
