"""The TaskProlog context: a user's word, from inside the task. Binds its step, gives the variables.

It is a barrier: when it answers, the step's memory is bound or it is known why not. What the
kernel says of the caller (uid, cgroup, CPUs) counts; of what the caller says, only its job id,
and that only for a job of its own uid, and its view of its GPUs.
"""

from __future__ import annotations

import logging

from crater_slurm.model.cpuset import parse_cpulist
from crater_slurm.node import cgroups, environment, proc, verify, worker_spec
from crater_slurm.node.binding import Given
from crater_slurm.node.jobs import PREPARED, JobRecord
from crater_slurm.node.request import Answer, Request, RequestError
from crater_slurm.node.services import Services

_log = logging.getLogger("crater.node.task_prolog")


def task_prolog(services: Services, request: Request) -> Answer:
    """Bind a task and say what it has; RequestError for a job that isn't the caller's."""
    job_id = request.plain("SLURM_JOB_ID")
    record = services.store.get(job_id)
    if record is None or record.phase != PREPARED:
        return Answer()  # no plan, or no Prolog of ours: the task starts as if crater weren't here
    if record.uid != request.peer.uid:
        raise RequestError(f"answer uid {request.peer.uid} about job {job_id} of uid {record.uid}")
    plan = record.parsed_plan
    if plan is None and not services.settings.node.environment_for_all:
        return _tell(services, record, Answer())
    task = proc.task_facts(request.peer, services.roots.proc)
    given = _bind(services, record, task)
    cpus = task.cpus
    if services.settings.node.cpu_source == "slurm":
        cpus = services.slurm_cpus.cpus(job_id, record.node) or cpus
    view = environment.TaskView(
        cpus=cpus,
        numa_nodes=tuple(sorted(services.nodes_of(cpus))),
        cores=services.cores_of(cpus),
        job_gpus=tuple(record.gpus),
        step_gpus=request.env.get("SLURM_STEP_GPUS"),
        visible=request.env.get("CUDA_VISIBLE_DEVICES"),
    )
    answer = Answer()
    percent = services.settings.node.preprocessing_percent
    variables = environment.build(view, plan, record.folders, services.gpus.all(), percent)
    if plan and services.settings.sharing.mps:
        variables |= environment.mps_limits(view, plan)
    answer.lines += environment.task_lines(variables | _checkpoints(services, record))
    path = environment.python_path(request.env.get("PYTHONPATH"), _job_path(services, append=True))
    if path is not None:
        answer.lines.append(f"export PYTHONPATH={path}")
    # Only now the step is there to look at, and the task must not wait for a record to be kept.
    answer.afterwards.append(lambda: _keep(services, record, task, given, view))
    return _tell(services, record, answer)


def _checkpoints(services: Services, record: JobRecord) -> dict[str, str | None]:
    """Where the job finds its ring and its module, and where its checkpoints go."""
    offered = worker_spec.offered(services, record)
    return environment.checkpoint_variables(
        ring=str(worker_spec.ring_path(services)) if offered else None,
        destination=worker_spec.destination(services, record).url if offered else "",
        run=record.run,
        job_path=_job_path(services),
    )


def _job_path(services: Services, *, append: bool = False) -> str:
    settings = services.settings.node.checkpoints
    wanted = settings.enabled and (settings.append_pythonpath or not append)
    return services.job_path if wanted and services.job_path.isprintable() else ""


def _bind(services: Services, record: JobRecord, task: proc.TaskFacts) -> Given:
    place = services.tree.place(task.cgroup)
    if place and place.job.name not in record.cgroup_names:
        return Given("none", f"the task runs in {place.job.name}, not in this job's cgroup")
    return services.binder.confirm(task.cgroup, task.cpus)


def _tell(services: Services, record: JobRecord, answer: Answer) -> Answer:
    """Tell the user once per job and node, not once per task, what is missing."""
    if record.told:
        return answer
    record.told = True
    if record.plan_problem:
        _print(answer, f"this job runs without its plan: {record.plan_problem}")
    if record.cache_problem:
        _print(answer, f"no local cache for this job: {record.cache_problem}")
    plan = record.parsed_plan
    if worker_spec.offered(services, record) and (
        problem := worker_spec.destination(services, record).problem
    ):
        _print(answer, f"checkpoints stay on this node: {problem}")
    if plan and plan.cache_gb and record.folders:
        free = services.cache.free_gb()
        if free < plan.cache_gb:
            _print(answer, f"the local cache has {free:.0f} GB free, the plan says {plan.cache_gb}")
    return answer


def _print(answer: Answer, text: str) -> None:
    answer.lines.append("print crater: " + " ".join(text.split()))


def _keep(
    services: Services,
    record: JobRecord,
    task: proc.TaskFacts,
    given: Given,
    view: environment.TaskView,
) -> None:
    """Record and report what the job got, when it differs from what is recorded already.

    The record is the job's: it grows by each step's cores, not by each of its tasks'.
    """
    place = services.tree.place(task.cgroup)
    if place and place.job.name not in record.cgroup_names:
        return  # the same user's other job asked; it says nothing about this one
    in_step = cgroups.numbers(place.step / "cpuset.cpus.effective") if place else frozenset()
    if services.settings.node.cpu_source == "slurm":
        in_step = frozenset()
    with services.store.exclusive(record.job_id):
        if services.store.get(record.job_id) is not record or record.phase != PREPARED:
            return  # the job ended or was prepared again while the answer went out
        before = frozenset(parse_cpulist(record.grant.get("cpus", "")))
        cpus = before | (in_step or frozenset(view.cpus))
        if record.grant and cpus == before and record.grant["given"] in ("soft", given.kind):
            return
        if record.grant.get("given") == "soft":
            given = Given("soft", record.grant["reason"], given.mems)
        record.grant = verify.grant(
            record.parsed_plan,
            given,
            tuple(sorted(cpus)),
            services.nodes_of(cpus),
            services.gpus.numa_nodes(record.gpus) if record.gpus else frozenset(),
            cgroups.memory_by_node(place.step) if place else {},
            services.cache_nodes() if record.folders else None,
        )
        services.store.save(record)
    services.report(record, "task")
