"""For a request that no node can meet: the node that comes nearest, and the smallest way out.

A way out is told in the words in which the user asked: the directive, or the option that won over
it. Each one is tried, as a whole job, before it is told.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from crater_slurm.model.job import GpuOption, GpuScope, Job
from crater_slurm.model.profile import NodeProfile
from crater_slurm.model.request import BY_KEY, Request
from crater_slurm.placement import mig, numa
from crater_slurm.placement.abilities import version
from crater_slurm.placement.inventory import NodeClass
from crater_slurm.placement.need import Need
from crater_slurm.placement.rules import AVX_FLAGS, GPU_CHECKS, Result, evaluate, physical_cores

#: Directives and what they are lowered to; ``mem`` is Slurm's option, for which there is none.
Words = dict[str, str]


@dataclass(frozen=True, slots=True)
class Changed:
    """A job changed by a way out: as its user would write the change, and what then is asked."""

    text: str
    request: Request
    job: Job


def nearest(candidates: Sequence[tuple[NodeClass, Result]]) -> tuple[NodeClass, Result] | None:
    """The class that fails the fewest conditions, then by the least; None without candidates."""

    def distance(item: tuple[NodeClass, Result]) -> tuple[int, float, str]:
        failed = [c for c in item[1].checks if not c.ok]
        return (len(failed), sum(1 - min(1.0, c.measure) for c in failed), item[0].example)

    return min(candidates, key=distance, default=None)


def smallest_change(
    profile: NodeProfile, need: Need, told: Callable[[Words], str | None]
) -> tuple[str, ...]:
    """What would make the need fit this machine, in the user's words.

    ``told`` puts a change into words, or answers None when the job would still not fit. Single
    changes come first, each on its own; when no single one is enough, the one combination that
    lowers everything to what the machine has.
    """
    lowered = _lowered(profile, need)
    singles = [{key: value} for key, value in lowered.items()]
    way_out = {"numa": "best_effort"}
    if need.strict:
        singles.append(way_out)
    if alternatives := [text for words in singles if (text := told(words))]:
        return tuple(alternatives)
    whole = _lowered(profile, dataclasses.replace(need, strict=False))
    combinations = [lowered, whole | way_out] if need.strict else [whole]
    for words in combinations:
        if len(words) > 1 and (text := told(words)):
            return (text,)
    return ()


def _lowered(profile: NodeProfile, need: Need) -> Words:
    """Each amount that fails lowered to what the machine has, as directives."""
    result = evaluate(profile, need)
    failing = {c.name for c in result.checks if not c.ok}
    words = _lowered_gpus(profile, need, failing, len(result.eligible))
    if need.cpus and failing & {"cpus", "numa"}:
        most = _most_cpus(profile, need)
        if 0 < most < need.cpus:
            words["cpus"] = str(most)
    if need.memory_mib and "memory" in failing and profile.memory_mib:
        words["mem"] = str(profile.memory_mib)
    if need.memory_bandwidth_gb_s and failing & {"memory-bandwidth", "numa"}:
        bandwidth = _most_bandwidth(profile, need, result.eligible)
        if 1 <= bandwidth < need.memory_bandwidth_gb_s:
            words["memory-bandwidth"] = f"{bandwidth:.12g}GB/s"
    iops = max((n.random_read_iops or 0 for n in profile.nvmes), default=0)
    if need.ssd_iops and "ssd-iops" in failing and iops:
        words["ssd-iops"] = str(iops)
    latencies = [n.read_latency_us for n in profile.nvmes if n.read_latency_us is not None]
    if need.ssd_latency_us and "ssd-latency" in failing and latencies:
        words["ssd-latency"] = f"{_rounded(min(latencies), 1, up=True):.12g}us"
    if need.cache_gb and "cache" in failing and profile.cache_gb:
        words["cache"] = f"{profile.cache_gb}GB"
    if need.avx and "avx" in failing:
        levels = list(AVX_FLAGS)[: list(AVX_FLAGS).index(need.avx)]
        below = [level for level in levels if AVX_FLAGS[level] in (profile.cpu.avx or ())]
        if below:
            words["avx"] = below[-1]
    return words | _lowered_versions(profile, failing)


def _lowered_versions(profile: NodeProfile, failing: set[str]) -> Words:
    """The versions that the machine has, as far as a directive can name them."""
    there = {"driver": profile.software.gpu_driver, "cuda": profile.software.cuda}
    return {
        name: ".".join(str(part) for part in parts[:4])
        for name, text in there.items()
        if name in failing and (parts := version(text)) and max(parts[:4]) <= 9999
    }


def _lowered_gpus(profile: NodeProfile, need: Need, failing: set[str], eligible: int) -> Words:
    words: Words = {}
    gpus = mig.of_kind(profile, need.mig)
    if not need.gpus or not gpus or not failing & GPU_CHECKS:
        return words
    if (fewer := eligible or len(gpus)) < need.gpus:
        words["gpus"] = str(fewer)
    count = min(need.gpus, len(gpus))
    if need.mig and "mig" in failing and not eligible:
        cut = Counter(name for g in gpus if (name := mig.profile_of(g)))
        words["mig"] = max(sorted(cut), key=lambda name: cut[name])
    memories = sorted((g.memory_mib or 0 for g in gpus), reverse=True)
    if need.gpu_memory_mib and "gpu-memory" in failing and memories[count - 1]:
        words["gpu-memory"] = f"{memories[count - 1]}MiB"
    if need.gpu_type and "gpu-type" in failing:
        models = Counter(g.gres_type or g.model for g in gpus)
        words["gpu-type"] = max(sorted(models), key=lambda name: models[name])
    if need.precision and "precision" in failing:
        able = Counter(p for g in gpus for p in g.precisions or ())
        others = [p for p in ("bf16", "fp16", "tf32", "fp32") if able[p] >= count]
        if others:
            words["precision"] = others[0]
    return words


def _most_cpus(profile: NodeProfile, need: Need) -> int:
    """The most CPUs, counted as the need counts them, that fit beside the rest; by bisection."""
    unit = max(1, profile.cpu.threads_per_core) if need.cpus_are_threads else 1
    low, high = 0, min(need.cpus or 0, profile.cpu.cores * unit) // unit
    while low < high:
        middle = (low + high + 1) // 2
        trial = dataclasses.replace(need, cpus=middle * unit, memory_bandwidth_gb_s=None)
        failed = {c.name for c in evaluate(profile, trial).checks if not c.ok}
        if failed & {"cpus", "numa"}:
            high = middle - 1
        else:
            low = middle
    return low * unit


def _most_bandwidth(profile: NodeProfile, need: Need, eligible: frozenset[int]) -> float:
    """Rounded down to what people write."""
    if need.strict:
        cores = physical_cores(profile, dataclasses.replace(need, cpus=_most_cpus(profile, need)))
        most = numa.most_bandwidth(profile, eligible, need, cores if need.cpus else None)
    else:
        most = profile.memory_bandwidth_gb_s
    return _rounded(most or 0, 2, up=False)


def _rounded(value: float, digits: int, *, up: bool) -> float:
    """Rounded, but never to the side on which it would not fit."""
    near = round(value, digits)
    if near < value if up else near > value:
        near += 10**-digits if up else -(10**-digits)
    return round(near, digits)


def reworded(words: Words, need: Need, request: Request, job: Job) -> Changed | None:
    """The job with a change applied where its user asked for the amount; None when it can't be."""
    texts: list[str] = []
    for key, value in words.items():
        if key == "gpus" and job.gpus_per_node is not None:
            changed = _other_gpus(job, need, int(value), words.get("gpu-type"))
        elif key == "gpu-type" and any(g.type for g in job.gpus):
            if "gpus" in words and job.gpus_per_node is not None:
                continue  # told together with the count
            changed = _other_gpus(job, need, need.gpus, value)
        elif key == "cpus" and need.cpus_in_options:
            changed = _other_cpus(job, need, int(value))
        elif key == "mem":
            changed = _other_memory(job, need, int(value))
        else:
            if key == "cpus":
                tasks = job.cpus_per_node or 1
                value = str(int(value) // tasks * tasks)
            requirement = BY_KEY[key]
            try:
                parsed = requirement.parse(value)
            except ValueError:
                return None
            request = dataclasses.replace(request, **{requirement.attribute: parsed})
            texts.append(f"{key}={shlex.quote(value)}")
            continue
        if changed is None:
            return None
        text, job = changed
        texts.append(text)
    return Changed(" ".join(texts), request, job)


def _other_gpus(job: Job, need: Need, count: int, gpu_type: str | None) -> tuple[str, Job] | None:
    """The user's GPU option with another count per node and perhaps another type."""
    if len(job.gpus) != 1:
        return None
    (option,) = job.gpus
    gpu_type = gpu_type if option.type and gpu_type else option.type
    per_node = {
        GpuScope.NODE: ("--gpus-per-node", 1),
        GpuScope.JOB: ("--gpus", 0),
        GpuScope.TASK: ("--gpus-per-task", max(1, need.gpus // max(1, option.count))),
        GpuScope.SOCKET: ("--gpus-per-socket", max(1, need.gpus // max(1, option.count))),
    }
    name, share = per_node[option.scope]
    amount = count // share if share else count * job.nodes
    if amount < 1:
        return None
    text = f"{name}={gpu_type}:{amount}" if gpu_type else f"{name}={amount}"
    changed = GpuOption(option.scope, amount, gpu_type)
    return text, dataclasses.replace(job, gpus=(changed,))


def _other_cpus(job: Job, need: Need, cpus: int) -> tuple[str, Job] | None:
    """The user's CPU options with fewer CPUs per node."""
    if job.cpus_per_task is not None:
        each = cpus // max(1, (need.cpus or 1) // max(1, job.cpus_per_task))
        text, job = f"--cpus-per-task={each}", dataclasses.replace(job, cpus_per_task=each)
    elif job.cpus_per_gpu is not None:
        each = cpus // max(1, need.gpus)
        text, job = f"--cpus-per-gpu={each}", dataclasses.replace(job, cpus_per_gpu=each)
    elif job.tasks_per_node is not None:
        each = cpus
        text, job = f"--ntasks-per-node={each}", dataclasses.replace(job, tasks_per_node=each)
    else:
        each = cpus * job.nodes
        text, job = f"--ntasks={each}", dataclasses.replace(job, tasks=each)
    return (text, job) if each >= 1 else None


def _other_memory(job: Job, need: Need, mib: int) -> tuple[str, Job] | None:
    if job.memory_per_node_mib is not None:
        return f"--mem={mib}M", dataclasses.replace(job, memory_per_node_mib=mib)
    each = mib // max(1, need.cpus or 1)
    if each < 1:
        return None
    return f"--mem-per-cpu={each}M", dataclasses.replace(job, memory_per_cpu_mib=each)
