"""Stage 1: every need against one machine, one small function a rule, all conditions together.

A rule answers with what the machine has, and passes or not. An unknown value never passes.
"""

from __future__ import annotations

from dataclasses import dataclass

from crater_slurm.model.profile import Gpu, NodeProfile
from crater_slurm.model.units import format_mib, format_number
from crater_slurm.placement import abilities, mig, numa
from crater_slurm.placement.check import Check, Rule
from crater_slurm.placement.need import Need

#: Conditions on GPUs that the same GPUs must meet.
GPU_CHECKS = frozenset({"gpus", "mig", "gpu-type", "gpu-memory", "precision", "tensor-cores"})


@dataclass(frozen=True, slots=True)
class Result:
    """All checks on one machine, the GPUs that qualify and the NUMA choice for strict needs."""

    checks: tuple[Check, ...]
    eligible: frozenset[int]
    fit: numa.Fit | None
    ok: bool


def evaluate(profile: NodeProfile, need: Need) -> Result:
    """Check every need that is stated against one machine, with its NUMA choice."""
    eligible = frozenset(g.index for g in profile.gpus if _qualifies(g, need))
    checks = _run(MACHINE_RULES, profile, need)
    gpu_checks_pass = all(c.ok for c in checks if c.name in GPU_CHECKS)
    if need.gpus and gpu_checks_pass and len(eligible) < need.gpus:
        checks.append(_together(profile, need, len(eligible)))
    fit = None
    if need.strict:
        fit = numa.fit(profile, eligible, need, physical_cores(profile, need))
        measure = 1.0 if fit.ok else 0.5
        checks.append(Check("numa", _numa_need(need), fit.have, fit.ok, fit.reason, measure))
    checks += _run(STORAGE_RULES, profile, need)
    return Result(tuple(checks), eligible, fit, all(c.ok for c in checks))


def _run(rules: tuple[Rule, ...], profile: NodeProfile, need: Need) -> list[Check]:
    return [check for rule in rules if (check := rule(profile, need)) is not None]


def physical_cores(profile: NodeProfile, need: Need) -> int | None:
    """Cores that the need takes here; Slurm's options count threads, directives cores."""
    if need.cpus is None:
        return None
    if need.cpus_are_threads:
        return -(-need.cpus // max(1, profile.cpu.threads_per_core))
    return need.cpus


def matches_type(gpu: Gpu, wanted: str) -> bool:
    """Whether a GPU is of the wanted type: its gres type, its model, or the model's beginning."""
    model = gpu.model.lower()
    return (
        wanted == (gpu.gres_type or "").lower() or wanted == model or model.startswith(wanted + "-")
    )


def _of_type(gpu: Gpu, need: Need) -> bool:
    """The directive names a model or its beginning; Slurm's options name a gres type exactly."""
    if need.gres_type is not None and gpu.gres_type is not None:
        return gpu.gres_type == need.gres_type
    return need.gpu_type is None or matches_type(gpu, need.gpu_type)


def _qualifies(gpu: Gpu, need: Need) -> bool:
    return (
        mig.profile_of(gpu) == need.mig
        and _of_type(gpu, need)
        and (not need.tensor_cores or gpu.tensor_cores is True)
        and (need.gpu_memory_mib is None or (gpu.memory_mib or 0) >= need.gpu_memory_mib)
        and (need.precision is None or need.precision in (gpu.precisions or ()))
    )


def _ratio(have: float, need: float) -> float:
    """How much of the need is there; above 1 it is met. Compared only within one condition."""
    return have / need if need else 1.0


def _on_gpus(
    able: int, profile: NodeProfile, need: Need, do: str, otherwise: str
) -> tuple[bool, str]:
    """Whether enough GPUs ``do``, of those that there are: too few in all is another condition.

    With the reason, which is ``otherwise`` where none does.
    """
    there = len(mig.of_kind(profile, need.mig))
    if not there:
        return False, abilities.nothing(profile, need)
    ok = able >= min(max(1, need.gpus), there)
    return ok, f"only {able} of its {there} GPUs {do}" if able and not ok else otherwise


def _gpus(profile: NodeProfile, need: Need) -> Check | None:
    if not need.gpus:
        return None
    have = len(mig.of_kind(profile, need.mig))
    kind = "GPU" if need.mig is None else "MIG instance"
    return Check(
        "gpus",
        str(need.gpus),
        str(have),
        have >= need.gpus,
        f"has {have} {kind}{'s' * (have != 1)}" if have else abilities.nothing(profile, need),
        _ratio(have, need.gpus),
    )


def _gpu_type(profile: NodeProfile, need: Need) -> Check | None:
    if need.gpu_type is None:
        return None
    gpus = mig.of_kind(profile, need.mig)
    matching = sum(_of_type(g, need) for g in gpus)
    models = ", ".join(sorted({g.model for g in gpus})) or "no GPU"
    ok, reason = _on_gpus(matching, profile, need, f"are {need.gpu_type}", f"has {models}")
    return Check("gpu-type", need.gpu_type, models, ok, reason, _ratio(matching, need.gpus or 1))


def _gpu_memory(profile: NodeProfile, need: Need) -> Check | None:
    if need.gpu_memory_mib is None:
        return None
    gpus = mig.of_kind(profile, need.mig)
    known = [g.memory_mib for g in gpus if g.memory_mib is not None]
    enough = sum(m >= need.gpu_memory_mib for m in known)
    have = format_mib(max(known)) if known else ("unknown" if gpus else "no GPU")
    asked = format_mib(need.gpu_memory_mib)
    ok, reason = _on_gpus(enough, profile, need, f"have {asked}", f"GPU memory is {have}")
    measure = _ratio(max(known, default=0), need.gpu_memory_mib)
    return Check("gpu-memory", asked, have, ok, reason, measure)


def _precision(profile: NodeProfile, need: Need) -> Check | None:
    if need.precision is None:
        return None
    gpus = mig.of_kind(profile, need.mig)
    able = sum(need.precision in (g.precisions or ()) for g in gpus)
    known = sorted({p for g in gpus for p in g.precisions or ()})
    have = ", ".join(known) or "unknown"
    ok, reason = _on_gpus(
        able, profile, need, f"compute in {need.precision}", f"its GPUs compute in {have}"
    )
    return Check("precision", need.precision, have, ok, reason)


def _cpus(profile: NodeProfile, need: Need) -> Check | None:
    cores = physical_cores(profile, need)
    if cores is None:
        return None
    have = profile.cpu.cores
    return Check(
        "cpus",
        f"{cores} cores",
        f"{have} cores",
        have >= cores,
        f"has {have} cores",
        _ratio(have, cores),
    )


#: Levels of the directive, the least first, and the processor's flag for each.
_AVX_LEVELS = ("avx", "avx2", "avx512", "avx512_vnni", "avx512_bf16")
AVX_FLAGS = {level: level for level in _AVX_LEVELS} | {"avx512": "avx512f"}


def _avx(profile: NodeProfile, need: Need) -> Check | None:
    if need.avx is None:
        return None
    flags = profile.cpu.avx
    have = "unknown" if flags is None else (", ".join(sorted(flags)) or "none")
    ok = flags is not None and AVX_FLAGS[need.avx] in flags
    return Check("avx", need.avx, have, ok, f"its CPU's vector instructions are {have}")


def _memory(profile: NodeProfile, need: Need) -> Check | None:
    if not need.memory_mib:
        return None
    have = profile.memory_mib
    text = format_mib(have) if have is not None else "unknown"
    return Check(
        "memory",
        format_mib(need.memory_mib),
        text,
        (have or 0) >= need.memory_mib,
        f"memory is {text}",
        _ratio(have or 0, need.memory_mib),
    )


def _memory_bandwidth(profile: NodeProfile, need: Need) -> Check | None:
    if need.memory_bandwidth_gb_s is None:
        return None
    have = profile.memory_bandwidth_gb_s
    text = f"{format_number(have)} GB/s" if have is not None else "unknown"
    return Check(
        "memory-bandwidth",
        f"{format_number(need.memory_bandwidth_gb_s)} GB/s",
        text,
        (have or 0) >= need.memory_bandwidth_gb_s,
        f"memory bandwidth is {text}",
        _ratio(have or 0, need.memory_bandwidth_gb_s),
    )


def _ssd_iops(profile: NodeProfile, need: Need) -> Check | None:
    if need.ssd_iops is None:
        return None
    have = max((n.random_read_iops or 0 for n in profile.nvmes), default=0)
    text = f"{format_number(have)} IOPS" if have else ("unknown" if profile.nvmes else "no NVMe")
    return Check(
        "ssd-iops",
        f"{format_number(need.ssd_iops)} IOPS",
        text,
        have >= need.ssd_iops,
        f"random-read IOPS are {text}" if profile.nvmes else "has no NVMe",
        _ratio(have, need.ssd_iops),
    )


def _ssd_latency(profile: NodeProfile, need: Need) -> Check | None:
    if need.ssd_latency_us is None:
        return None
    known = [n.read_latency_us for n in profile.nvmes if n.read_latency_us is not None]
    text = (
        f"{format_number(min(known))} µs" if known else ("unknown" if profile.nvmes else "no NVMe")
    )
    ok = bool(known) and min(known) <= need.ssd_latency_us
    return Check(
        "ssd-latency",
        f"{format_number(need.ssd_latency_us)} µs",
        text,
        ok,
        f"read latency is {text}" if profile.nvmes else "has no NVMe",
        _ratio(need.ssd_latency_us, min(known)) if known else 0.0,
    )


def _cache(profile: NodeProfile, need: Need) -> Check | None:
    if need.cache_gb is None:
        return None
    have = profile.cache_gb
    text = f"{have:,} GB" if have is not None else "no cache"
    return Check(
        "cache",
        f"{need.cache_gb:,} GB",
        text,
        (have or 0) >= need.cache_gb,
        f"its NVMe cache is {text}" if have else "has no NVMe cache",
        _ratio(have or 0, need.cache_gb),
    )


def _together(profile: NodeProfile, need: Need, eligible: int) -> Check:
    """Each GPU need is met by enough GPUs, but not by the same ones."""
    there = len(mig.of_kind(profile, need.mig))
    return Check(
        "gpus",
        f"{need.gpus} that meet all conditions",
        str(eligible),
        False,
        f"only {eligible} of its {there} GPUs meet all conditions at once",
        _ratio(eligible, need.gpus),
    )


def _numa_need(need: Need) -> str:
    parts = [f"{need.gpus} GPUs"] if need.gpus else []
    if need.cpus:
        parts.append(f"{need.cpus} {'CPUs' if need.cpus_are_threads else 'cores'}")
    if need.memory_mib:
        parts.append(format_mib(need.memory_mib))
    if need.memory_bandwidth_gb_s:
        parts.append(f"{format_number(need.memory_bandwidth_gb_s)} GB/s")
    return f"{', '.join(parts) or 'the job'} together (strict)"


MACHINE_RULES: tuple[Rule, ...] = (
    _gpus,
    abilities.mig_instances,
    _gpu_type,
    _gpu_memory,
    _precision,
    abilities.tensor_cores,
    abilities.driver,
    abilities.cuda,
    _cpus,
    _avx,
    _memory,
    _memory_bandwidth,
)
STORAGE_RULES: tuple[Rule, ...] = (_ssd_iops, _ssd_latency, _cache)
