"""``init``: what this process was given, compared with what it really has.

It never widens a binding and never touches CUDA_VISIBLE_DEVICES: Slurm sets both, and a wrong
guess puts two jobs on one core. It narrows a process that has more CPUs than its plan to those of
them that the plan names, since nothing else can be lost by that. The rest is a warning.
"""

from __future__ import annotations

import os
import signal as signals
import sys
import warnings

from crater_slurm.job import environment, session, stop
from crater_slurm.job.environment import Environment, numbers

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

_told: set[str] = set()


def init(
    *,
    signal: str | int | None = "SIGUSR2",
    folder: str | None = None,
    narrow: bool = True,
) -> Environment:
    """Read the environment, check the binding, and listen for the job's signal. Call it first, in
    each rank, before CUDA and before other threads start.

    ``signal``: sets the flag that ``checkpoint.due`` and ``should_stop`` look at; not SIGUSR1,
    which NCCL takes; None for none. ``folder``: checkpoints go there where crater gives none.
    ``narrow=False`` changes no affinity. Works without crater and without Slurm.
    """
    env = environment.read()
    env = session.configure(env, folder).env
    for problem in (*_cpus(env, narrow), *_gpus(env), *_memory(env)):
        _warn(problem)
    if signal is not None and not stop.install(_signal(signal)):
        _warn(
            f"{signal} is not listened for: init() runs outside the main thread, where Python "
            "installs no handler. Call it from the main thread."
        )
    return env


def _warn(problem: str) -> None:
    """Each sentence once; only the node's first rank speaks for all where all would say it."""
    if problem not in _told:
        _told.add(problem)
        warnings.warn(problem, RuntimeWarning, stacklevel=3)


def _signal(wanted: str | int) -> int:
    if isinstance(wanted, int):
        return int(signals.Signals(wanted))
    name = wanted.upper() if wanted.upper().startswith("SIG") else f"SIG{wanted.upper()}"
    try:
        return int(signals.Signals[name])
    except KeyError:
        raise ValueError(f"There is no signal {wanted!r}; give a name such as SIGUSR2.") from None


def _cpus(env: Environment, narrow: bool) -> Iterator[str]:
    """This process's CPUs against CRATER_CPU_LIST."""
    planned, have = set(env.cpus), os.sched_getaffinity(0)
    if not planned or have == planned:
        return
    both = have & planned
    if not both:
        yield (
            f"This process may run on CPUs {_spelled(have)}, but its plan names "
            f"{_spelled(planned)}: not one is the same. Nothing is changed; start it with srun, or "
            "ask your site."
        )
    elif have - planned and narrow:
        try:
            os.sched_setaffinity(0, both)
        except OSError as error:
            yield f"This process can't be kept to its CPUs {_spelled(both)}: {error.strerror}."
    if both and planned - have and env.local_world_size == 1:
        yield (
            f"This process may run on {len(both)} of the {len(planned)} CPUs of its plan "
            f"({_spelled(both)} of {_spelled(planned)}). Look at --cpus-per-task and --cpu-bind."
        )


def _gpus(env: Environment) -> Iterator[str]:
    """What CUDA would show against CRATER_GPU_IDS, without starting CUDA."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if env.gpu_ids and visible is not None:
        shown = 0
        for part in visible.split(","):
            if part.strip() in ("", "-1"):
                break
            shown += 1
        if shown != len(env.gpu_ids):
            yield (
                f"CUDA_VISIBLE_DEVICES={visible[:80]} shows {shown} GPUs, and the plan gives this "
                f"task {len(env.gpu_ids)}. Leave the variable as Slurm sets it."
            )
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "cuda") and torch.cuda.is_initialized():
        yield (
            "CUDA was started before crater_slurm.job.init(): its threads and pinned memory may "
            "lie on the wrong NUMA node. Call init() first."
        )


def _memory(env: Environment) -> Iterator[str]:
    """NUMA nodes of this process's CPUs and memory against CRATER_NUMA_NODE."""
    planned = set(env.numa_nodes)
    nodes = node_cpus("/sys/devices/system/node")
    if not planned or len(nodes) < 2:
        return
    have = os.sched_getaffinity(0)
    used = {node for node, cpus in nodes.items() if cpus & have}
    if used - planned:
        yield (
            f"This process's CPUs lie on NUMA nodes {_spelled(used)}, and its plan names "
            f"{_spelled(planned)}: part of its memory will be remote."
        )
    allowed = allowed_memory("/proc/self/status")
    if allowed and not allowed & planned:
        yield (
            f"This process may have memory on NUMA nodes {_spelled(allowed)} only, and its plan "
            f"names {_spelled(planned)}."
        )


def node_cpus(folder: str) -> dict[int, set[int]]:
    """CPUs of each NUMA node; empty where the kernel does not say."""
    found = {}
    try:
        for name in os.listdir(folder):
            if name.startswith("node") and name[4:].isdigit():
                with open(os.path.join(folder, name, "cpulist"), encoding="ascii") as file:
                    found[int(name[4:])] = set(numbers(file.read()))
    except OSError:
        return {}
    return found


def allowed_memory(path: str) -> set[int]:
    """NUMA nodes that the kernel lets this process have memory on."""
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            for line in file:
                if line.startswith("Mems_allowed_list:"):
                    return set(numbers(line.partition(":")[2]))
    except OSError:
        pass
    return set()


def _spelled(values: set[int]) -> str:
    """Numbers as a short list, such as ``0-3,8``."""
    parts: list[list[int]] = []
    for value in sorted(values):
        if parts and parts[-1][1] == value - 1:
            parts[-1][1] = value
        else:
            parts.append([value, value])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
