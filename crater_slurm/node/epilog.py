"""The Epilog context: root's word that a job has ended here. Answers first, cleans up afterwards.

Safe twice, without its Prolog, and while that Prolog still runs (a job cancelled in it). It knows
a job by its id alone: nothing is ever removed by user or by name.
"""

from __future__ import annotations

import re
import time

from crater_slurm.node import cache
from crater_slurm.node.jobs import ENDED, JobRecord
from crater_slurm.node.request import Answer, Request
from crater_slurm.node.services import Services


def epilog(services: Services, request: Request) -> Answer:
    """Close a job. Raises RequestError on variables that Slurm would not send."""
    job_id = request.plain("SLURM_JOB_ID")
    cluster = request.plain("SLURM_CLUSTER_NAME", "cluster")
    answer = Answer()
    with services.store.exclusive(job_id):
        record = services.store.get(job_id)
        if record is None:
            # Nothing known: a Prolog that never came through, or an empty state folder.
            services.cache.release(cluster, job_id, _kinds(services))
        else:
            if record.phase != ENDED:
                record.exit_code = _exit_code(request)
            end(services, record, answer)
        services.marks.clear(job_id)
    services.slurm_cpus.forget(job_id)
    return answer


def _exit_code(request: Request) -> str:
    """Slurm's ``code:signal`` of the job; empty when the hook did not send it."""
    code = request.env.get("SLURM_JOB_EXIT_CODE2", "")
    return code if re.fullmatch(r"[0-9]{1,3}:[0-9]{1,3}", code) else ""


def end(services: Services, record: JobRecord, answer: Answer) -> None:
    """Close a known job: last look at its memory, its folders aside, its record kept."""
    first = record.phase != ENDED
    if first:
        services.sample_memory(record)
        record.phase, record.ended = ENDED, time.time()
        if record.grant:
            memory = record.memory_mib or record.grant.get("memory_mib", {})
            record.grant = {**record.grant, "memory_mib": memory}
    services.release_folders(record)
    services.store.save(record)
    if first:
        answer.afterwards.append(lambda: services.report(record, "epilog"))


def _kinds(services: Services) -> tuple[str, ...]:
    if services.settings.node.cache.keep == "remove":
        return cache.KINDS
    return tuple(kind for kind in cache.KINDS if kind != "checkpoint")
