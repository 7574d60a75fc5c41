"""How good a drive is: the thresholds by which it is told apart and weighed."""

from __future__ import annotations

#: The slowest second of a good drive is at least this share of its fastest.
STEADY_RATIO = 0.85
#: Below this a drive counts less in a placement, by ``UNSTEADY_WEIGHT``.
UNSTEADY_RATIO = 0.7
UNSTEADY_WEIGHT = 0.3
#: A drive that answers a single read later than this counts as little as an unsteady one.
SLOW_LATENCY_US = 200.0
#: Latency above the calibrated one by this share: the drive lost 30 % of its speed.
SLOW_SHARE = 0.3


def steadiness(iops_stability_ratio: float | None) -> str:
    """``steady``, ``fair`` or ``unsteady``; ``unknown`` when nobody measured it."""
    if iops_stability_ratio is None:
        return "unknown"
    if iops_stability_ratio < UNSTEADY_RATIO:
        return "unsteady"
    return "steady" if iops_stability_ratio >= STEADY_RATIO else "fair"


def weight(iops_stability_ratio: float | None, latency_us: float | None = None) -> float:
    """What a drive's score is multiplied with; what is unknown is not held against it."""
    slow = latency_us is not None and latency_us > SLOW_LATENCY_US
    unsteady = steadiness(iops_stability_ratio) == "unsteady"
    return UNSTEADY_WEIGHT if slow or unsteady else 1.0


def is_slow(latency_us: float, calibrated_us: float) -> bool:
    """Whether a read at queue depth 1 takes as long as on a drive with 30 % of its speed lost."""
    return latency_us * (1 - SLOW_SHARE) > calibrated_us
