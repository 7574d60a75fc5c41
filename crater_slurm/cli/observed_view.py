"""Observations as people read them: pure, from records to words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from crater_slurm.model.units import format_mib

#: Settings that are in the key already, and those that say nothing when they are 1.
_IN_KEY = {"model", "parameters", "method", "framework"}
_USUALLY_ONE = {"tensor_parallel", "pipeline_parallel", "gpus"}


def sentence(seen: Mapping[str, Any]) -> str:
    """``peak GPU memory 17.2 GiB of 40 GiB, host memory 21 GiB, GPU utilization mean 63 %``."""
    return ", ".join(_parts(seen)) or "nothing could be measured"


def _parts(seen: Mapping[str, Any]) -> Iterator[str]:
    if (peak := seen.get("gpu_memory_peak_mib")) is not None:
        size = seen.get("gpu_memory_size_mib")
        yield f"peak GPU memory {size_text(peak)}" + (f" of {size_text(size)}" if size else "")
    if (peak := seen.get("host_memory_peak_mib")) is not None:
        total = seen.get("host_memory_total_peak_mib")
        cached = f" ({size_text(total)} with page cache)" if total and total > peak else ""
        yield f"host memory {size_text(peak)}{cached}"
    if (mean := seen.get("gpu_utilization_mean_percent")) is not None:
        most = seen.get("gpu_utilization_max_percent")
        yield f"GPU utilization mean {mean:.0f} %" + (f", at most {most:.0f} %" if most else "")
    if (cores := seen.get("cpu_cores_mean")) is not None:
        yield f"{cores:.3g} cores in the mean"
    rates = [
        f"{word} at most {rate:.3g} MB/s"
        for word, name in (("read", "ssd_read_mb_s_peak"), ("written", "ssd_write_mb_s_peak"))
        if (rate := seen.get(name))
    ]
    yield from rates
    if seen.get("oom_kills"):
        yield "killed for its memory: it needs more"


def span(seen: Mapping[str, Any]) -> str:
    """How long it was watched, and how it went on."""
    if not seen.get("ended"):
        end = "still running"
    else:
        end = {True: "ended well", False: "failed"}.get(seen.get("succeeded"), "ended")  # type: ignore[arg-type]
    return f"{duration(seen['seconds'])}, {end}"


def size_text(mib: float) -> str:
    """MiB as GiB with at most three figures."""
    return f"{mib / 1024:.3g} GiB" if mib >= 1024 else format_mib(int(mib))


def duration(seconds: float) -> str:
    """``2 h 5 min``, ``40 s``."""
    minutes, hours = int(seconds // 60), int(seconds // 3600)
    if hours:
        return f"{hours} h {minutes % 60} min"
    return f"{minutes} min" if minutes else f"{int(seconds)} s"


def settings(workload: Mapping[str, Any]) -> str:
    """The stated settings that a key does not name: ``precision=bf16 micro_batch=4``."""
    shown = [
        f"{name}={value}"
        for name, value in workload.items()
        if name not in _IN_KEY and not (name in _USUALLY_ONE and value == 1)
    ]
    return " ".join(shown) or "-"


def row(seen: Mapping[str, Any]) -> tuple[str, ...]:
    """A line of the table of observations."""
    gpu, host = seen.get("gpu_memory_peak_mib"), seen.get("host_memory_peak_mib")
    mean = seen.get("gpu_utilization_mean_percent")
    least = ">= " if seen.get("oom_kills") else ""
    return (
        str(seen["job_id"]),
        seen["node"],
        seen.get("key") or "-",
        settings(seen.get("workload", {})),
        "-" if gpu is None else size_text(gpu),
        "-" if host is None else f"{least}{size_text(host)}",
        "-" if mean is None else f"{mean:.0f} %",
        span(seen),
        "yes" if seen.get("counts") and seen.get("key") else "no",
    )
