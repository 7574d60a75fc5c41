"""``crater eta``: when Slurm expects a job to start, and what becomes of its max-wait."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from crater_slurm.cli.context import loaded
from crater_slurm.cli.output import print_json
from crater_slurm.errors import CraterError, SlurmError, UsageError
from crater_slurm.files import is_file

if TYPE_CHECKING:
    from crater_slurm.model.queue import QueuedJob

#: An array may have thousands of entries.
_MOST_SHOWN = 10


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("what", metavar="JOBID|SCRIPT")
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def eta(what: str, options: tuple[str, ...], as_json: bool) -> None:
    """Say when Slurm expects a job to start, and whether its max-wait would be kept.

    For a batch SCRIPT, OPTIONS are sbatch's own and nothing is submitted. The estimate is Slurm's:
    it is as good as the time limits of the jobs ahead.
    """
    now = time.time()
    if is_file(what):
        entries = [_of_script(Path(what), options, now)]
    elif re.fullmatch(r"\d{1,10}([_+]\d+)?", what) and not options:
        entries = _of_job(what, now)
    else:
        raise UsageError(f"{what!r} is neither a job id nor a script that is there")
    if as_json:
        print_json({"jobs": entries})
        return
    for entry in entries[:_MOST_SHOWN]:
        for line in lines(entry, now):
            click.echo(line)
    if len(entries) > _MOST_SHOWN:
        click.echo(f"... and {len(entries) - _MOST_SHOWN} more; --json has them all")


def _of_job(label: str, now: float) -> list[dict[str, Any]]:
    from crater_slurm.cli.explain import slurm_client
    from crater_slurm.model import token
    from crater_slurm.slurm import jobs

    found = jobs.queue(slurm_client(), jobs=[label])
    if not found:
        raise SlurmError(f"Slurm no longer has job {label} in its queue; see sacct -j {label}")
    promises: dict[str, tuple[float | None, str]] = {}
    entries = []
    for job in found:
        plan = str((token.read_unverified(job.comment) or {}).get("i", ""))
        if plan and plan not in promises:
            promises[plan] = _promise(plan)
        promise, note = promises.get(plan, (None, ""))
        entries.append(describe(job, promise, now) | ({"note": note} if note else {}))
    return entries


def _of_script(script: Path, options: tuple[str, ...], now: float) -> dict[str, Any]:
    from crater_slurm.cli import test_only
    from crater_slurm.cli.explain import slurm_client
    from crater_slurm.model.queue import QueuedJob
    from crater_slurm.slurm import estimates

    done = test_only.run(slurm_client(), script, options, {"SLURM_TIME_FORMAT": "%s"})
    if done.failed:
        raise SlurmError("\n".join(line for line in done.said if line) or "sbatch failed")
    start = estimates.from_test_only(done.said)
    promise, note = _promise(done.nonce)
    # Slurm names the moment after the next one when a job could start at once.
    fresh = QueuedJob(
        id=0, user_id=0, state="PENDING", eligible=now, start=max(start, now + 1) if start else None
    )
    entry = describe(fresh, promise, now) | {"job": None, "script": str(script)}
    return entry | ({"note": note} if note else {})


def _promise(key: str) -> tuple[float | None, str]:
    """max-wait of a plan in seconds; a note when the scheduler can't be asked."""
    from crater_slurm.scheduler import client

    try:
        decision = client.decision(loaded().settings.scheduler.url, key)["decision"]
    except client.NotFoundError:
        return None, ""
    except CraterError as error:
        return None, f"its max-wait is not known: {error}"
    value = decision.get("request", {}).get("max_wait_seconds")
    return (float(value), "") if value else (None, "")


def describe(job: QueuedJob, promise: float | None, now: float) -> dict[str, Any]:
    """All that is known of one job's start, as JSON data; times are seconds since 1970."""
    from crater_slurm.placement import sla
    from crater_slurm.slurm import estimates

    start = estimates.usable(job.start, now) if job.pending else job.start
    standing = None
    if promise:
        import dataclasses

        standing = sla.standing(dataclasses.replace(job, start=start), promise, now)
    return {
        "job": job.label,
        "state": job.state,
        "reason": job.reason if job.pending else "",
        "eligible": job.eligible,
        "start": start,
        "wait_seconds": round(start - now) if start is not None and job.pending else None,
        "why_unknown": estimates.why_none(job, now) if job.pending and start is None else "",
        "max_wait_seconds": promise,
        "breaks_at": standing.breaks_at if standing else None,
        "kept": standing.kept if standing else None,
    }


def lines(entry: Mapping[str, Any], now: float) -> Iterator[str]:
    """The entry for a person."""
    name = f"Job {entry['job']}" if entry["job"] else str(entry["script"])
    if entry["state"] != "PENDING":
        started = f", since {_moment(entry['start'])}" if entry["start"] is not None else ""
        yield f"{name} is {entry['state']}{started}"
    elif entry["start"] is None:
        yield f"{name}: no expected start: {entry['why_unknown']}"
    else:
        wait = _duration(entry["wait_seconds"])
        yield f"{name}: expected start {_moment(entry['start'])}, in {wait}"
    if entry["state"] == "PENDING" and entry["job"]:
        since = f"since {_moment(entry['eligible'])}" if entry["eligible"] else "not yet in line"
        yield f"  waits {since}; Slurm's reason: {entry['reason'] or 'None'}"
    if entry["max_wait_seconds"]:
        yield f"  max-wait={_duration(entry['max_wait_seconds'])} {_promise_words(entry, now)}"
    if note := entry.get("note"):
        yield f"  {note}"


def _promise_words(entry: Mapping[str, Any], now: float) -> str:
    breaks_at, kept, start = entry["breaks_at"], entry["kept"], entry["start"]
    if breaks_at is None:
        return "does not run yet: the job is not in line"
    if entry["state"] != "PENDING":
        return "was kept" if kept else "was broken"
    if breaks_at < now:
        return f"is broken, since {_moment(breaks_at)}"
    if kept is None:
        return f"runs out at {_moment(breaks_at)}"
    if kept:
        return (
            f"would be kept, {_duration(breaks_at - start)} to spare: nothing will be done for it"
        )
    return f"would be broken: {_duration(start - breaks_at)} too late"


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).astimezone().isoformat(" ", "seconds")


def _duration(seconds: float) -> str:
    """``2 d 3 h``, ``27 min``, ``40 s``: two units at most."""
    rest = round(seconds)
    parts = []
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min"), (1, "s")):
        count, rest = divmod(rest, size)
        if count:
            parts.append((count, unit))
    return " ".join(f"{count} {unit}" for count, unit in parts[:2]) or "0 s"
