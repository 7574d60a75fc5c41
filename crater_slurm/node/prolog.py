"""The Prolog context: root's word that a job starts here. Checks its plan, makes its cache.

Safe twice, and after a requeue: what an earlier run of the same job id left is set aside first,
except the checkpoints of a restart (SLURM_JOB_RESTART_COUNT above 0).
"""

from __future__ import annotations

import dataclasses
import logging
import time

from crater_slurm.node import cache, checkpoints_state
from crater_slurm.node.admission import admit
from crater_slurm.node.gpus import parse_indexes
from crater_slurm.node.jobs import ENDED, PREPARED, JobRecord
from crater_slurm.node.request import Answer, Request
from crater_slurm.node.services import Services

_log = logging.getLogger("crater.node.prolog")

#: Exit codes of a Prolog that reports a fault of the node, if node.drain_on names the fault.
#: The client and the scripts know the same two; see docs/hooks.md.
FAULT_EXITS = {cache.MISSING: 10, cache.READ_ONLY: 11}


def prolog(services: Services, request: Request) -> Answer:
    """Prepare the node for a job. Raises RequestError on variables that Slurm would not send."""
    job_id = request.plain("SLURM_JOB_ID")
    with services.store.exclusive(job_id):
        before = services.store.get(job_id)
        record = _new_record(services, request, job_id)
        _judge_plan(services, request, record)
        if before and _is_same_run(before, record):
            record.soft, record.grant, record.told = before.soft, before.grant, before.told
            record.started = before.started
            record.checkpoints, record.facts = before.checkpoints, before.facts
        else:
            record.checkpoints = checkpoints_state.begin(record, before)
        return _prepare(services, record, before)


def _new_record(services: Services, request: Request, job_id: str) -> JobRecord:
    return JobRecord(
        job_id=job_id,
        uid=request.number("SLURM_JOB_UID"),
        gid=request.number("SLURM_JOB_GID"),
        cluster=request.plain("SLURM_CLUSTER_NAME", "cluster"),
        node=request.plain("SLURMD_NODENAME", "localhost"),
        sluid=request.plain("SLURM_JOB_SLUID") if request.env.get("SLURM_JOB_SLUID") else "",
        restarts=request.number("SLURM_JOB_RESTART_COUNT", 0),
        boot=services.boot,
        phase=PREPARED,
        started=time.time(),
        gpus=list(parse_indexes(request.env.get("SLURM_JOB_GPUS"))),
        user=request.env.get("SLURM_JOB_USER", ""),
        nodes=request.env.get("SLURM_JOB_NODELIST") or request.env.get("SLURM_NODELIST", ""),
    )


def _judge_plan(services: Services, request: Request, record: JobRecord) -> None:
    verdict = admit(
        (request.env.get("SLURM_JOB_COMMENT", ""), request.env.get("SLURM_JOB_EXTRA", "")),
        job_id=record.job_id,
        uid=record.uid,
        cluster=record.cluster,
        keys=services.keys.keys,
        holder_of=services.store.holder_of,
    )
    record.token, record.plan_problem = verdict.token, verdict.problem
    if verdict.plan:
        record.plan = dataclasses.asdict(verdict.plan)
        if verdict.plan.gpus and len(record.gpus) != verdict.plan.gpus:
            _log.info(
                "prolog: job %s: the plan has %d GPUs, Slurm gave %d here; Slurm's count holds",
                record.job_id, verdict.plan.gpus, len(record.gpus),
            )  # fmt: skip


def _is_same_run(before: JobRecord, now: JobRecord) -> bool:
    """The Prolog of a run that is prepared already, such as after a restart of slurmd."""
    return before.phase == PREPARED and (before.boot, before.restarts, before.uid) == (
        now.boot,
        now.restarts,
        now.uid,
    )


def _prepare(services: Services, record: JobRecord, before: JobRecord | None) -> Answer:
    answer = Answer()
    wanted = record.plan is not None or services.settings.node.environment_for_all
    if wanted:
        keep: tuple[str, ...] = ("checkpoint",) if record.restarts else ()
        if before and _is_same_run(before, record):
            keep = cache.KINDS
        folders = services.cache.prepare(
            record.cluster, record.job_id, record.uid, record.gid, keep
        )
        record.folders, record.cache_problem = folders.paths, folders.problem
        if folders.fault in services.settings.node.drain_on:
            answer.exit = FAULT_EXITS[folders.fault]
    elif before:
        before.phase, before.ended = ENDED, before.ended or time.time()
        services.release_folders(before)
    if record.plan_problem:
        answer.logs.append(f"job {record.job_id}: plan ignored: {record.plan_problem}")
        _log.warning("prolog: job %s: plan ignored: %s", record.job_id, record.plan_problem)
    if record.cache_problem:
        answer.logs.append(f"job {record.job_id}: no cache: {record.cache_problem}")
        _log.warning("prolog: job %s: no cache: %s", record.job_id, record.cache_problem)
    if wanted or record.plan_problem:
        services.store.save(record)
        services.marks.set(record.job_id)
        answer.afterwards.append(lambda: services.report(record, "prolog"))
    elif before:
        if before.folders:
            services.store.save(before)  # checkpoints that are not safe yet
        else:
            services.store.forget(record.job_id)
        services.marks.clear(record.job_id)
    if wanted and services.settings.node.cpu_source == "slurm":
        # Asked now, so that TaskProlog finds the answer; never while slurmd waits for us.
        answer.afterwards.append(lambda: _ask_slurm(services, record))
    return answer


def _ask_slurm(services: Services, record: JobRecord) -> None:
    services.slurm_cpus.forget(record.job_id)
    services.slurm_cpus.cpus(record.job_id, record.node)
