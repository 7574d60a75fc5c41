"""What two profiles differ in, value by value, with unit and provenance."""

from __future__ import annotations

from dataclasses import dataclass

from crater_slurm.model.cpuset import format_cpulist
from crater_slurm.model.profile import NodeProfile, Provenance
from crater_slurm.model.units import unit_of


@dataclass(frozen=True, slots=True)
class Difference:
    """One path with the value on each side; None where it is unknown or absent."""

    path: str
    old: object
    new: object
    old_from: Provenance | None
    new_from: Provenance | None


def differences(old: NodeProfile, new: NodeProfile) -> list[Difference]:
    """Paths whose value differs, in the order of the profile; times and names don't count."""
    before, after = dict(old.values()), dict(new.values())
    found = []
    for path in dict.fromkeys([*before, *after]):
        left, right = before.get(path), after.get(path)
        if left != right and (known(left) or known(right)):
            found.append(
                Difference(
                    path,
                    left,
                    right,
                    old.where_from(path) if known(left) else None,
                    new.where_from(path) if known(right) else None,
                )
            )
    return found


def known(value: object) -> bool:
    """Whether there is a value at all: an empty list of links is the same as none."""
    return value is not None and value != ()


def show_value(path: str, value: object) -> str:
    """A value with its unit as people read it; ``-`` for none."""
    if not known(value):
        return "-"
    if path.endswith(".cpus") and isinstance(value, tuple):
        return format_cpulist(value)
    if isinstance(value, frozenset | tuple):
        ordered = sorted(value) if isinstance(value, frozenset) else value
        return " ".join(str(item) for item in ordered) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    text = plain_number(value) if isinstance(value, float) else str(value)
    unit = unit_of(path.rpartition(".")[2])
    return f"{text} {unit}" if unit and unit != "1" else text


def plain_number(value: float) -> str:
    """A float with up to four decimals, no exponent and no needless zeros: ``142``, ``0.9342``."""
    return f"{value:.4f}".rstrip("0").rstrip(".")
