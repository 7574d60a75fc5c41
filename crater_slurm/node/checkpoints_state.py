"""What is known of a job's checkpoints, and when its folder may go: pure, on the job's record.

The figures come from the job's worker, which runs as the job's user: they are bounded and checked
here, and can only ever decide over that user's own checkpoints. Nothing here touches a disk.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from crater_slurm.job import layout
from crater_slurm.node.jobs import ENDED, JobRecord

#: Of a job's steps so many are kept in its record, those that are not safe yet before the others.
MOST_STEPS = 64
_MOST_COUNTERS = 64
_LONGEST_TEXT = 300
#: So many steps that were told to be at the destination are remembered, so as not to be told again.
_MOST_TOLD = 256
_MOST_RANKS = 10**6
_LARGEST = 1 << 62


def used(record: JobRecord) -> bool:
    """Whether a worker was started for this run of the job, so that it may hold what is unsafe."""
    return bool(record.checkpoints.get("used"))


def finished(record: JobRecord) -> bool:
    """Whether no worker has anything left to do: it never had, or it said so after the end."""
    return not used(record) or bool(record.checkpoints.get("done"))


def unflushed(record: JobRecord) -> int:
    """Steps of which this node's part is not at the destination yet; 0 without a destination."""
    if not record.checkpoints.get("destination"):
        return 0
    return int(record.checkpoints.get("unflushed", 0))


def safe_to_remove(record: JobRecord) -> bool:
    """Whether removing the job's checkpoint folder loses nothing that somebody still counts on.

    The job has ended, its worker has finished, and with a destination every step is there. What
    the site then does with the folder is ``node.cache.keep``'s and the space's matter.
    """
    return record.phase == ENDED and finished(record) and not unflushed(record)


def stays_after_end(record: JobRecord, keep: str) -> bool:
    """Whether the checkpoint folder outlives the job for now.

    What is not safe stays in any case. What is safe stays as a copy near at hand where it has a
    destination or the job has asked to be requeued, until it is evicted or has become old.
    """
    known = record.checkpoints
    if not safe_to_remove(record):
        return True
    if known.get("saved") and (known.get("destination") or known.get("requeue")):
        return True
    return keep == "keep_checkpoints"


def begin(record: JobRecord, before: JobRecord | None) -> dict[str, Any]:
    """State of a new run; a restart on this node goes on with what its last run left unsafe."""
    if before is None or before.uid != record.uid or not record.restarts:
        return {}
    kept = ("destination", "steps", "unflushed", "saved", "used", "requeues", "told")
    return {name: before.checkpoints[name] for name in kept if name in before.checkpoints}


def take(record: JobRecord, message: Mapping[str, object]) -> bool:
    """Put a worker's ``state`` into the record; whether it says something new."""
    steps = [step for step in map(_step, _list(message.get("steps"))) if step]
    if record.checkpoints.get("unreachable"):
        # The worker has no destination and calls everything flushed; the job has one.
        steps = [{**step, "flushed": False, "arrived": 0} for step in steps]
    counters = _counters(message.get("counters"))
    # A message may not hold all steps; then a counter says how many there are.
    unsafe = sum(not step["flushed"] for step in steps)
    known = {
        "steps": _shown(steps),
        "unflushed": max(unsafe, int(counters.get("unflushed", 0))),
        "saved": bool(steps) or bool(record.checkpoints.get("saved")),
        "counters": counters,
        "idle": message.get("idle") is True,
        # Before the job's end nothing is done: a trainer may come at any time.
        "done": message.get("done") is True and record.phase == ENDED,
    }
    if all(record.checkpoints.get(name) == value for name, value in known.items()):
        return False
    record.checkpoints = {**record.checkpoints, **known}
    return True


def untold(record: JobRecord) -> list[dict[str, Any]]:
    """Steps of which this node's part has arrived at the destination and nobody was told yet,
    the oldest first."""
    if not record.checkpoints.get("destination"):
        return []
    told = set(record.checkpoints.get("told", ()))
    steps = record.checkpoints.get("steps", ())
    found = [step for step in steps if step.get("arrived") and _key(step) not in told]
    return sorted(found, key=lambda step: (step["step"], step["name"]))


def note_told(record: JobRecord, step: Mapping[str, Any]) -> None:
    """From now on such a step counts as told."""
    told = [*record.checkpoints.get("told", ()), _key(step)][-_MOST_TOLD:]
    record.checkpoints = {**record.checkpoints, "told": told}


def arrival(record: JobRecord, step: Mapping[str, Any]) -> dict[str, Any]:
    """What the scheduler is told of such a step."""
    return {
        "name": step["name"],
        "step": step["step"],
        "run": step["run"],
        "bytes": step["bytes"],
        "ranks": step["arrived"],
        "world": step["world"],
        "destination": record.checkpoints["destination"],
        "restarts": record.restarts,
    }


def _key(step: Mapping[str, Any]) -> str:
    return f"{step['name']}/{step['step']}/{step['run']}"


def summary(record: JobRecord) -> dict[str, Any]:
    """What the scheduler and ``crater explain`` are told of a job's checkpoints on this node."""
    known = record.checkpoints
    found: dict[str, Any] = {}
    steps = known.get("steps", [])
    if known.get("destination"):
        found["destination"] = known["destination"]
    if steps:
        found["newest"] = max(step["step"] for step in steps)
        found["steps"] = len(steps)
        found["gb"] = round(sum(step["bytes"] for step in steps if step["local"]) / 1e9, 3)
    if known.get("destination") and steps:
        found["to_flush"] = unflushed(record)
    errors = [step["error"] for step in steps if step["error"]]
    if problem := known.get("problem") or (errors[-1] if errors else ""):
        found["problem"] = problem
    return found


def _list(value: object) -> list[object]:
    return value[:100_000] if isinstance(value, list) else []


def _step(value: object) -> dict[str, Any] | None:
    """One step as the worker tells it; None for what could not be one."""
    if not isinstance(value, dict):
        return None
    try:
        name = layout.step_name(value.get("step"), value.get("name", "step"))  # type: ignore[arg-type]
    except (layout.LayoutError, TypeError):
        return None
    parsed = layout.parse_step_name(name)
    size = value.get("bytes")
    if parsed is None or type(value.get("step")) is not int:
        return None
    return {
        "name": parsed[0],
        "step": parsed[1],
        "run": text(value.get("run"), 64),
        "bytes": size if type(size) is int and 0 <= size < _LARGEST else 0,
        "local": value.get("local") is True,
        "flushed": value.get("flushed") is True,
        "error": text(value.get("error")),
        **_arrival(value),
    }


def _arrival(value: Mapping[str, object]) -> dict[str, int]:
    """How many ranks of the step this node brought to the destination, and of how many in all."""
    ranks, world = value.get("arrived"), value.get("world")
    if type(ranks) is int and type(world) is int and 0 < ranks <= world <= _MOST_RANKS:
        return {"arrived": ranks, "world": world}
    return {"arrived": 0, "world": 0}


def _shown(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    first = sorted(steps, key=lambda step: (step["flushed"], -step["step"]))[:MOST_STEPS]
    return sorted(first, key=lambda step: (step["name"], step["step"]))


def _counters(value: object) -> dict[str, float]:
    if not isinstance(value, dict):
        return {}
    good: Iterable[tuple[str, float]] = (
        (name, number)
        for name, number in value.items()
        if isinstance(name, str)
        and len(name) <= 48
        and name.isascii()
        and name.replace("_", "a").isalnum()
        and type(number) in (int, float)
        and -_LARGEST < number < _LARGEST
    )
    return dict(list(good)[:_MOST_COUNTERS])


def text(value: object, longest: int = _LONGEST_TEXT) -> str:
    """A worker's text on one line, bounded and printable; empty when it is none."""
    if not isinstance(value, str):
        return ""
    return "".join(c if c.isprintable() else " " for c in value[:longest])
