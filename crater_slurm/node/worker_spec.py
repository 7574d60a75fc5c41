"""What a job's worker is told: the job's record and plan within the site's settings, as a Spec."""

from __future__ import annotations

import logging
import os
import pwd
from pathlib import Path

from crater_slurm.checkpoint.spec import Remote, Spec
from crater_slurm.errors import SlurmError, UsageError
from crater_slurm.job.wire import MAX_BYTES
from crater_slurm.node import destinations, peer_spec
from crater_slurm.node.destinations import Destination, DestinationError
from crater_slurm.node.jobs import JobRecord
from crater_slurm.node.services import Services
from crater_slurm.node.worker import WorkerError
from crater_slurm.slurm import hostlist
from crater_slurm.slurm.client import Client

_log = logging.getLogger("crater.node.workers")

#: Placeholders that only slurmctld can fill in, and its fields for them.
_FACTS = {"A": "ArrayJobId", "a": "ArrayTaskId", "x": "JobName"}


def ring_path(services: Services) -> Path:
    """The ring's socket: as set, else beside the hooks' socket."""
    node = services.settings.node
    return node.checkpoints.ring_socket or node.socket.with_name("ring.sock")


def offered(services: Services, record: JobRecord) -> bool:
    """Whether a job has a ring at all: the site's setting, and not its own ``checkpoint=off``.

    Without a cache it has one where its checkpoints lie in an object store, to load them by: only
    the worker gets there. Nothing is saved by it then.
    """
    settings, wanted = services.settings.node.checkpoints, (record.plan or {}).get("checkpoint")
    place = "checkpoint" in record.folders or (
        bool(record.cache_problem) and "://" in destinations.wish(record.parsed_plan, settings)
    )
    return settings.enabled and wanted != "off" and place


def destination(services: Services, record: JobRecord) -> Destination:
    """Where a job's checkpoints go; asks nobody, so what only slurmctld knows may be missing."""
    user = user_name(record)
    values = {
        "u": user,
        "j": record.job_id,
        "c": record.cluster,
        **record.facts,
    }
    plan, settings = record.parsed_plan, services.settings.node.checkpoints
    return destinations.resolve(plan, settings, user, values)


def lacks_facts(services: Services, record: JobRecord) -> bool:
    """Whether slurmctld has to be asked before the destination is known."""
    wanted = destinations.wish(record.parsed_plan, services.settings.node.checkpoints)
    return destinations.needs_slurm(wanted) and not record.facts


def facts(services: Services, record: JobRecord) -> dict[str, str]:
    """What only slurmctld knows of a job. Raises SlurmError."""
    slurm = services.settings.slurm
    client = Client(slurm.bin_dir, slurm.conf, slurm.timeout_seconds)
    fields = client.job(record.job_id)
    found = {letter: fields.get(name, "") for letter, name in _FACTS.items()}
    return {
        "A": found["A"] or record.job_id,
        "a": found["a"] or "0",
        "x": found["x"] or "job",
    }


def user_name(record: JobRecord) -> str:
    """The user's name by Slurm's word, else by the machine's; the number when nobody knows."""
    if record.user:
        return record.user
    try:
        return pwd.getpwuid(record.uid).pw_name
    except (KeyError, OSError):
        return str(record.uid)


def ring_bytes(services: Services, record: JobRecord) -> int:
    """The most that all lanes of a job may take on this node."""
    most = services.settings.node.checkpoints.ring_max_gb
    asked = (record.plan or {}).get("ring_gb")
    return int(min(most, asked or most) * 10**9)


def prepare(services: Services, record: JobRecord) -> str:
    """The spec as JSON; where the destination is and what is wrong with it is noted in the record.

    Raises WorkerError when slurmctld has to be asked and does not answer.
    """
    if lacks_facts(services, record):
        try:
            record.facts = facts(services, record)
        except SlurmError as error:
            raise WorkerError(f"ask Slurm about job {record.job_id}: {error}") from error
    place = destination(services, record)
    problem, unreachable = place.problem, False
    try:
        spec = build(services, record, place)
    except DestinationError as error:
        problem, unreachable = f"couldn't {error}", True
        spec = build(services, record, Destination())
    if problem and problem != record.checkpoints.get("problem"):
        _log.warning("workers: job %s: no destination: %s", record.job_id, problem)
    services.note_checkpoints(
        record, destination=place.url, problem=problem, unreachable=unreachable
    )
    return spec.to_json()


def build(services: Services, record: JobRecord, place: Destination) -> Spec:
    """The spec of a job's worker. Raises DestinationError when the credentials can't be used."""
    settings, plan = services.settings.node.checkpoints, record.parsed_plan
    return Spec(
        job_id=record.job_id,
        cluster=record.cluster,
        user=user_name(record),
        uid=record.uid,
        gid=record.gid,
        node=record.node or os.uname().nodename,
        run=record.run,
        folder=record.folders.get("checkpoint") or _absent(services, record),
        home=_home(record),
        nodes=_nodes(record),
        ring_bytes=ring_bytes(services, record),
        huge_pages=settings.huge_pages,
        engine=settings.engine,
        policy=settings.policy,
        rate_bytes_s=int(settings.rate_mb_s * 10**6),
        quota_bytes=services.life.quotas.allowance(record),
        keep_last=(plan.checkpoint_keep if plan else 0) or settings.keep_last,
        keep_every=(plan.checkpoint_keep_every if plan else 0) or settings.keep_every,
        remote=_remote(place),
        restore=record.restarts > 0,
        stage=tuple(plan.stage.split(",")) if plan and plan.stage else (),
        dataset_folder=record.folders.get("dataset", ""),
        **peer_spec.fields(services, record, _nodes(record)),
    )


def _absent(services: Services, record: JobRecord) -> str:
    """Where the job's folder would be, had the cache taken it."""
    point = services.settings.node.cache.mount_point
    return str(point / "checkpoint" / record.cluster / record.job_id)


def _remote(place: Destination) -> Remote:
    try:
        return place.remote()
    except DestinationError as error:
        raise DestinationError(f"go to {place.url}: couldn't {error}") from error


def _home(record: JobRecord) -> str:
    try:
        return pwd.getpwuid(record.uid).pw_dir
    except (KeyError, OSError):
        return ""


def _nodes(record: JobRecord) -> tuple[str, ...]:
    """The job's nodes; none where they can't be read, or are more than a message holds."""
    try:
        found = tuple(hostlist.expand(record.nodes)) if record.nodes else ()
    except (UsageError, ValueError) as error:
        _log.warning("workers: job %s: couldn't read its nodes: %s", record.job_id, error)
        return ()
    return found if sum(len(name) + 3 for name in found) < MAX_BYTES // 2 else ()
