"""What /proc/cpuinfo says of the processor: model, architecture, vector instructions."""

from __future__ import annotations

import os
import re
from functools import reduce
from pathlib import Path

from crater_slurm.probe import files

_MODEL_KEYS = ("model name", "Processor", "cpu model", "cpu", "Model Name")
#: AMD's families 15h and 16h: two cores share a module, and the kernel calls them threads.
_COMPUTE_UNITS = {"21", "22"}


def _field(info: str, *names: str) -> str | None:
    for name in names:
        found = re.search(rf"^{re.escape(name)}[ \t]*:[ \t]*(\S.*)$", info, re.MULTILINE)
        if found:
            return found.group(1).strip()[:200]
    return None


def _info(root: Path) -> str:
    return files.read(root / "proc/cpuinfo") or ""


def model(root: Path) -> str | None:
    """The model's name as the kernel prints it; ARM and s390 print ids instead."""
    info = _info(root)
    name = _field(info, *_MODEL_KEYS)
    if name:
        return " ".join(name.split())
    machine = re.search(r"^processor 0:.*machine = (\w+)", info, re.MULTILINE)
    if machine:
        return f"IBM Z machine {machine.group(1)}"
    implementer, part = _field(info, "CPU implementer"), _field(info, "CPU part")
    return f"ARM implementer {implementer} part {part}" if implementer and part else None


def arch(root: Path) -> str | None:
    """The architecture in the words of ``uname -m``; a captured machine's by its cpuinfo."""
    if root == Path("/"):
        return os.uname().machine
    info = _info(root)
    if flags := _field(info, "flags"):
        return "x86_64" if "lm" in flags.split() else "i686"
    if _field(info, "vendor_id") == "IBM/S390":
        return "s390x"
    if _field(info, "CPU implementer"):
        return "aarch64" if _field(info, "CPU architecture") == "8" else "arm"
    if (_field(info, "cpu") or "").startswith("POWER"):
        # The kernels of PowerNV and of KVM guests since POWER8 are little endian.
        return "ppc64" if "POWER7" in info else "ppc64le"
    return None


def avx(root: Path) -> frozenset[str] | None:
    """AVX levels that every CPU has, by its flags; None when the kernel lists no flags."""
    info = _info(root)
    # Hybrid processors differ from core to core, and a job may land on any of them.
    lines = re.findall(r"^(?:flags|Features)[ \t]*:[ \t]*([^\n]*)\n", info + "\n", re.MULTILINE)
    if len(info) >= files.MAX_BYTES - 1 and len(lines) > 1:
        lines.pop()  # cut in the middle
    sets = [frozenset(f for f in line.split() if re.match(r"avx\w*$", f)) for line in lines]
    return reduce(frozenset.intersection, sets) if sets else None


def has_compute_units(root: Path) -> bool:
    """Whether thread siblings with their own core id are cores of one AMD module."""
    info = _info(root)
    return (
        _field(info, "vendor_id") == "AuthenticAMD" and _field(info, "cpu family") in _COMPUTE_UNITS
    )
