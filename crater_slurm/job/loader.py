"""Arguments of torch's DataLoader from the CPUs that this rank has. Uses no torch."""

from __future__ import annotations

import os

from crater_slurm.job import environment

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

PREFETCH_FACTOR = 3


def loader_kwargs(env: environment.Environment | None = None, **own: Any) -> dict[str, Any]:
    """``DataLoader(dataset, batch_size=..., **loader_kwargs())``.

    As many workers as this rank has CPUs to prepare data on: the plan's preprocessing CPUs where
    they are its own, else a fair part of them among the ranks that share them. None with a single
    core, and then nothing that torch takes only with workers. ``own`` goes over what is given.
    """
    env = env or environment.read()
    mine = os.sched_getaffinity(0)
    workers = own.get("num_workers", worker_count(env, mine))
    found: dict[str, Any] = {"num_workers": workers, "pin_memory": _has_gpus(env)}
    if workers > 0:
        found["prefetch_factor"] = PREFETCH_FACTOR
        found["persistent_workers"] = True
        if "num_workers" not in own:
            cpus = sorted(mine & set(env.preprocessing_cpus))
            if cpus:
                found["worker_init_fn"] = OnCpus(cpus)
    if workers == 0:
        own = {k: v for k, v in own.items() if k not in ("prefetch_factor", "persistent_workers")}
    return {**found, **own}


def worker_count(env: environment.Environment, mine: set[int]) -> int:
    """Workers of one rank, 0 with a single core."""
    if len(mine) < 2:
        return 0
    prepare = set(env.preprocessing_cpus) & mine
    if not prepare:
        # Without a plan: half of what is there, as far as one core is left to compute on.
        return max(0, min(_share(len(mine), env, mine) // 2, _share(len(mine), env, mine) - 1))
    return _share(len(prepare), env, mine)


def _share(count: int, env: environment.Environment, mine: set[int]) -> int:
    """This rank's part of CPUs. The ranks of a node share them where each may run on all of what
    the task was given (torchrun), and don't where srun gave each its own."""
    sharing = env.local_world_size if _is_shared(env, mine) else 1
    return count // sharing


def _is_shared(env: environment.Environment, mine: set[int]) -> bool:
    by_torchrun = "LOCAL_WORLD_SIZE" in os.environ
    return env.local_world_size > 1 and by_torchrun and mine >= set(env.cpus or mine)


def _has_gpus(env: environment.Environment) -> bool:
    """Whether there is a GPU that pinned memory would help, without loading torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1", "NoDevFiles"):
        return False
    return bool(env.gpu_ids) or bool(visible) or os.path.exists("/dev/nvidiactl")


class OnCpus:
    """``worker_init_fn`` that keeps a worker to the CPUs for preparing data; a class, so that it
    can be sent to workers that are spawned."""

    def __init__(self, cpus: list[int], then: Callable[[int], None] | None = None) -> None:
        self.cpus = cpus
        self.then = then

    def __call__(self, worker: int) -> None:
        own = set(self.cpus) & os.sched_getaffinity(0)
        if own:
            os.sched_setaffinity(0, own)
        if self.then is not None:
            self.then(worker)
