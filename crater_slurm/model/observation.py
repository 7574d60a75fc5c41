"""What a job was seen to need on one node: by such peaks predictions are calibrated.

An observation says what was measured and how far it can be trusted, and judges nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from crater_slurm.model.workload import Workload

#: A job that ran this long has shown its needs, however it ended: all models load within minutes.
LONG_ENOUGH_SECONDS = 600.0
#: One that was looked at less often may have grown between the last look and its end.
ENOUGH_SAMPLES = 3
_LONGEST_KEY = 255

#: The measured fields with the most that any machine could honestly say; the least is 0.
FIGURES: dict[str, float] = {
    "host_memory_peak_mib": 2**26,  # 64 TiB
    "host_memory_total_peak_mib": 2**26,
    "gpu_memory_peak_mib": 2**21,  # 2 TiB
    "gpu_memory_size_mib": 2**21,
    "cpu_cores_mean": 16_384,
    "gpu_utilization_mean_percent": 100,
    "gpu_utilization_max_percent": 100,
    "gpu_utilization_recent_percent": 100,
    "ssd_read_mb_s_peak": 10**6,
    "ssd_write_mb_s_peak": 10**6,
    "ssd_read_mb_s_mean": 10**6,
    "ssd_write_mb_s_mean": 10**6,
    "ssd_iops_peak": 10**9,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One job on one node, up to ``time`` (seconds since 1970), ``seconds`` after its start.

    A figure that could not be measured is None. ``host_memory_peak_mib`` is what the job could not
    do without (anonymous, shared, kernel, swapped), ``host_memory_total_peak_mib`` has its page
    cache too. ``gpu_memory_peak_mib`` is of its fullest GPU, ``gpu_memory_size_mib`` that GPU's
    size, ``gpu_utilization_recent_percent`` the mean since the last report. ``workload`` holds the
    settings that were stated, by the names of ``Workload``; ``key`` is None when no model was.
    """

    job_id: int
    plan_id: str
    node: str
    time: float
    seconds: float
    ended: bool = False
    #: Whether it ended with exit code 0; None while it runs, or when nobody could say.
    succeeded: bool | None = None
    oom_kills: int = 0
    samples: int = 0
    gpus: int = 0
    key: str | None = None
    workload: Mapping[str, object] = field(default_factory=dict)
    host_memory_peak_mib: int | None = None
    host_memory_total_peak_mib: int | None = None
    gpu_memory_peak_mib: int | None = None
    gpu_memory_size_mib: int | None = None
    cpu_cores_mean: float | None = None
    gpu_utilization_mean_percent: float | None = None
    gpu_utilization_max_percent: float | None = None
    gpu_utilization_recent_percent: float | None = None
    ssd_read_mb_s_peak: float | None = None
    ssd_write_mb_s_peak: float | None = None
    ssd_read_mb_s_mean: float | None = None
    ssd_write_mb_s_mean: float | None = None
    ssd_iops_peak: float | None = None

    @property
    def is_lower_bound(self) -> bool:
        """Whether the job would have needed more memory than it was given."""
        return self.oom_kills > 0

    @property
    def counts(self) -> bool:
        """Whether it may teach a prediction: a short run that crashed would teach too little."""
        if self.is_lower_bound:
            return self.samples > 0
        ended_well = self.ended and self.succeeded is True
        long_enough = self.seconds >= LONG_ENOUGH_SECONDS
        return self.samples >= ENOUGH_SAMPLES and (ended_well or long_enough)


def key_of(workload: Workload) -> str:
    """The workload's key as it is kept: a user's words, so short and of printable characters."""
    return "".join(c if c.isprintable() else "\ufffd" for c in workload.key[:_LONGEST_KEY])
