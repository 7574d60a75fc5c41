"""What is to be done for a job whose max-wait is about to be broken. Pure: the time comes in.

A promise runs from the moment the job could have started (Slurm's eligible time), so that hold,
dependency and --begin cost nothing. Steps go up in the admin's order, each at most once, and only
where waiting is a matter of turns: a job that waits at its user's own limit is helped by none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from crater_slurm.model.queue import QueuedJob
from crater_slurm.model.request import Request

PRIORITY, QOS = "priority", "qos"
#: Slurm's reasons of a job that waits for its turn. For all others no step would help.
TURNS = frozenset({"", "None", "Priority", "Resources"})
#: Slurm takes no nice below (NICE_OFFSET - 3).
_LOWEST_NICE = -2_147_483_645
#: GPU use is judged over at least this long: a job loads its data before it computes.
LEAST_OBSERVED_SECONDS = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The admin's limits, see the settings of ``sla``."""

    act_at: float = 0.8
    steps: tuple[str, ...] = (PRIORITY,)
    priority_boost: int = 1000
    priority_limit: int | None = None
    qos: str | None = None
    least_wait_seconds: float = 600
    jobs_per_user: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """A job that waits under a promise.

    ``taken`` are the steps already taken, by the single job's label: an array has many.
    """

    job: QueuedJob
    promise_seconds: float
    taken: Mapping[str, frozenset[str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step: for which job (or array task), of which kind, and the new value."""

    label: str
    kind: str
    value: str
    why: str


@dataclass(frozen=True, slots=True)
class Standing:
    """How a promise stands: until when it can be kept, and whether Slurm's estimate keeps it.

    ``kept`` is None when Slurm has no estimate or the clock does not run yet.
    """

    waited_seconds: float
    breaks_at: float | None
    kept: bool | None


def standing(job: QueuedJob, promise_seconds: float, now: float) -> Standing:
    """How a pending or started job stands to its promise."""
    if job.eligible is None:
        return Standing(0.0, None, None)
    breaks_at = job.eligible + promise_seconds
    if not job.pending:
        waited = (job.start if job.start is not None else now) - job.eligible
        return Standing(max(0.0, waited), breaks_at, waited <= promise_seconds)
    # Slurm leaves an estimate that has passed until it looks at the job again: it says nothing.
    known = job.start is not None and job.start > now
    kept = job.start <= breaks_at if known and job.start is not None else None
    if now > breaks_at:
        kept = False
    return Standing(max(0.0, now - job.eligible), breaks_at, kept)


def next_step(
    watched: Watched, label: str, taken: frozenset[str], now: float, policy: Policy
) -> Step | None:
    """The step that is due for one job now, if any.

    With n steps the first is due at ``act_at`` of the promise, and the others follow in equal
    parts of what remains: all of them before it is broken.
    """
    job = watched.job
    if not _runs(job, now):
        return None
    promise = max(watched.promise_seconds, policy.least_wait_seconds)
    state = standing(job, promise, now)
    if state.kept:
        return None
    share = state.waited_seconds / promise
    for number, kind in enumerate(policy.steps):
        due_at = policy.act_at + (1 - policy.act_at) * number / len(policy.steps)
        if share < due_at:
            return None
        value = None if kind in taken else _value(kind, job, policy)
        if value is not None:
            why = (
                f"waited {state.waited_seconds:.0f} s of max-wait={watched.promise_seconds:.0f}s "
                f"({share:.0%})"
            )
            return Step(label=label, kind=kind, value=value, why=why)
    return None


def _runs(job: QueuedJob, now: float) -> bool:
    """Whether the promise's clock runs, and the job waits for its turn and nothing else."""
    begun = job.eligible is not None and job.eligible <= now
    return job.pending and begun and job.priority > 0 and job.reason in TURNS


def _value(kind: str, job: QueuedJob, policy: Policy) -> str | None:
    """The new nice or QOS; None when the step would change nothing."""
    if kind == QOS:
        return policy.qos if policy.qos and policy.qos != job.qos else None
    raised = policy.priority_boost
    if policy.priority_limit is not None:
        raised = min(raised, policy.priority_limit - job.priority)
    nice = max(job.nice - raised, _LOWEST_NICE)
    return str(nice) if raised > 0 and nice < job.nice else None


def due(watched: Iterable[Watched], now: float, policy: Policy) -> list[Step]:
    """All steps due now, the most urgent first, within the limit of jobs per user.

    A job that already had a step holds one of its user's places until it starts.
    """
    entries = sorted(watched, key=lambda w: (_breaks_at(w, policy), w.job.id))
    used: Counter[int] = Counter()
    for entry in entries:
        used[entry.job.user_id] += sum(1 for steps in entry.taken.values() if steps)
    steps: list[Step] = []
    for entry in entries:
        user = entry.job.user_id
        first = entry.job.labels(policy.jobs_per_user + len(entry.taken))
        for label in dict.fromkeys([*entry.taken, *first]):
            taken = entry.taken.get(label, frozenset())
            if not taken and used[user] >= policy.jobs_per_user:
                continue
            step = next_step(entry, label, taken, now, policy)
            if step is None:
                continue
            steps.append(step)
            used[user] += not taken
    return steps


def _breaks_at(watched: Watched, policy: Policy) -> float:
    promise = max(watched.promise_seconds, policy.least_wait_seconds)
    return (watched.job.eligible or float("inf")) + promise


def below(request: Request, observed_percent: float | None, seconds: float) -> str:
    """Why a running job uses its GPUs less than min-gpu-utilization; ``""`` when it does not.

    ``observed_percent`` is the mean over its GPUs in the last ``seconds``. Nothing is said before
    ten minutes, nor without an observation: a request can't be broken by what nobody measured.
    """
    wanted = request.min_gpu_utilization_percent
    if wanted is None or observed_percent is None or seconds < LEAST_OBSERVED_SECONDS:
        return ""
    if observed_percent >= wanted:
        return ""
    return (
        f"its GPUs are {observed_percent:.0f} % busy in the mean of {seconds / 60:.0f} min, below "
        f"min-gpu-utilization={wanted}"
    )
