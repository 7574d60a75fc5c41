"""Puts a job back into the queue because its own trainer asked: as the job's user, never as root.

Slurm then decides by its own rules whether this user may requeue this job.
"""

from __future__ import annotations

import logging
import os

from crater_slurm.errors import SlurmError
from crater_slurm.node import worker_spec
from crater_slurm.node.jobs import PREPARED, JobRecord
from crater_slurm.node.services import Services
from crater_slurm.slurm.client import Client, Identity

_log = logging.getLogger("crater.node.requeue")


def refusal(services: Services, record: JobRecord) -> str:
    """Why a job is not requeued by its own wish; empty when it is."""
    limit = services.settings.node.checkpoints.requeue_limit
    if record.phase != PREPARED:
        return f"job {record.job_id} has ended here"
    if record.restarts >= limit:
        return (
            f"job {record.job_id} was restarted {record.restarts} times already and the site "
            f"allows {limit} (node.checkpoints.requeue_limit)"
        )
    return ""


def requeue(services: Services, record: JobRecord, reason: str) -> str:
    """Run ``scontrol requeue`` for a job; why it is not requeued, or empty."""
    slurm = services.settings.slurm
    client = Client(slurm.bin_dir, slurm.conf, slurm.timeout_seconds, run_as=_identity(record))
    try:
        client.run("scontrol", "requeue", record.job_id)
    except SlurmError as error:
        return str(error)
    _log.info("requeue: job %s is requeued by its own wish: %s", record.job_id, reason)
    return ""


def _identity(record: JobRecord) -> Identity | None:
    """The job's user with his groups; None when this process is that user already."""
    if record.uid == os.geteuid():
        return None
    try:
        groups = os.getgrouplist(worker_spec.user_name(record), record.gid)
    except (OSError, KeyError):
        groups = [record.gid]
    return Identity(record.uid, record.gid, tuple(groups))
