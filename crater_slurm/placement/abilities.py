"""Rules of stage 1 about what a GPU is able to and which software drives it.

Versions are compared as numbers, part by part: 535.104 is older than 535.104.05, and 9.2 older
than 12.0. A version that nobody knows never matches.
"""

from __future__ import annotations

import re
from collections import Counter

from crater_slurm.model.profile import NodeProfile
from crater_slurm.placement import mig
from crater_slurm.placement.check import Check
from crater_slurm.placement.need import Need

_VERSION = re.compile(r"\d{1,9}(?:\.\d{1,9})*")
#: Places of a version that order machines; each counts far less than the one before it.
_STEP = 1e4


def version(text: str | None) -> tuple[int, ...] | None:
    """Numbers at the beginning of a version, without zeros at the end; None when there are none."""
    found = _VERSION.match(text or "")
    if found is None:
        return None
    parts = [int(part) for part in found.group().split(".")]
    while len(parts) > 1 and not parts[-1]:
        parts.pop()
    return tuple(parts)


def tensor_cores(profile: NodeProfile, need: Need) -> Check | None:
    """Enough GPUs that are known to have tensor cores."""
    if not need.tensor_cores:
        return None
    gpus = mig.of_kind(profile, need.mig)
    able = sum(gpu.tensor_cores is True for gpu in gpus)
    unknown = any(gpu.tensor_cores is None for gpu in gpus)
    have = f"{able} of {len(gpus)} GPUs" if gpus else "no GPU"
    reason = f"only {able} of its {len(gpus)} GPUs have tensor cores"
    if not gpus:
        reason = nothing(profile, need)
    elif not able:
        reason = (
            "whether its GPUs have tensor cores is unknown"
            if unknown
            else "its GPUs have no tensor cores"
        )
    wanted = max(1, need.gpus)
    # Too few GPUs in all is another condition.
    ok = bool(gpus) and able >= min(wanted, len(gpus))
    return Check("tensor-cores", "yes", have, ok, reason, able / wanted)


def mig_instances(profile: NodeProfile, need: Need) -> Check | None:
    """Enough instances of the profile that is asked for."""
    if need.mig is None:
        return None
    found = Counter(name for gpu in profile.gpus if (name := mig.profile_of(gpu)))
    have = ", ".join(f"{count} of {name}" for name, count in sorted(found.items()))
    able, wanted = found[need.mig], max(1, need.gpus)
    reason = f"its MIG instances are {have}" if found else nothing(profile, need)
    return Check("mig", need.mig, have or "none", able >= wanted, reason, able / wanted)


def nothing(profile: NodeProfile, need: Need) -> str:
    """Why a machine has no GPU of the kind that is asked for."""
    if need.mig is not None:
        return "has no MIG instance" if profile.gpus else "has no GPU"
    return "has no whole GPU, only MIG instances" if profile.gpus else "has no GPU"


def driver(profile: NodeProfile, need: Need) -> Check | None:
    """A GPU driver that is new enough."""
    return _software("driver", "its GPU driver is", need.driver, profile.software.gpu_driver)


def cuda(profile: NodeProfile, need: Need) -> Check | None:
    """A driver that knows the CUDA version."""
    return _software("cuda", "its driver's CUDA version is", need.cuda, profile.software.cuda)


def _software(name: str, what: str, wanted: str | None, there: str | None) -> Check | None:
    oldest = version(wanted)
    if oldest is None:
        return None
    have = version(there)
    text = there if there and have else "unknown"
    ok = have is not None and have >= oldest
    measure = _number(have) / max(_number(oldest), 1e-9) if have else 0.0
    return Check(name, f"{wanted} or newer", text, ok, f"{what} {text}", measure)


def _number(parts: tuple[int, ...]) -> float:
    return sum(part / _STEP**place for place, part in enumerate(parts))
