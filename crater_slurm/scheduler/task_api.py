"""The platform's part of the HTTP API: send tasks, see them, cancel them; nodes, estimates.

Every endpoint wants a token (or MUNGE) and checks its scope. A task is seen by the client that sent
it, by the user whose job it is, and by admins; for everybody else it is not there.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import anyio
import anyio.to_thread
from fastapi import APIRouter, Depends, FastAPI, HTTPException, Path, Query, Request, Response

from crater_slurm.alldata.crowd import SUBMISSIONS
from crater_slurm.alldata.document import TaskError
from crater_slurm.alldata.intake import ConflictError
from crater_slurm.alldata.run_as import UserError
from crater_slurm.alldata.states import State
from crater_slurm.alldata.submission import RefusedError
from crater_slurm.alldata.task import parse
from crater_slurm.errors import ConfigError, CraterError
from crater_slurm.scheduler import task_views as views
from crater_slurm.scheduler.callers import Call, Callers
from crater_slurm.scheduler.service import Service
from crater_slurm.store.task_records import StoredTask

#: So long a task waits for its turn, and is then only taken in: its job follows. Where there is a
#: crowd it is taken in at once.
_PATIENCE_SECONDS = 2.0
#: Tasks that are only taken in, at a time: more would wait for the store and for one another.
_KEEPING = 4
_TASK_ID = r"^[A-Za-z0-9][A-Za-z0-9._:-]{0,127}$"
_T = TypeVar("_T")

TaskId = Annotated[str, Path(pattern=_TASK_ID, description="The platform's id of the task.")]
_ERRORS: dict[int | str, dict[str, Any]] = {
    401: {"description": "No token, or one that is unknown or revoked"},
    403: {"description": "The token lacks the scope, or its client has no cluster user"},
    413: {"description": "The body is too large"},
    422: {"description": "What was sent is not valid: a list of JSON pointers, or a sentence"},
    429: {"description": "Too many requests; Retry-After says when"},
    503: {"description": "The store or Slurm is away; Retry-After says when to try again"},
}
_ABSENT: dict[int | str, dict[str, Any]] = {404: {"description": "There is no such task"}}
_CONFLICT: dict[int | str, dict[str, Any]] = {
    409: {"description": "The id was used for another task, or it is being submitted"}
}


async def known(request: Request) -> Call:
    """The caller of a request, with its body. 401, 413, 429 or 503 when it is not to be heard."""
    callers: Callers = request.app.state.callers
    return await callers.call(request)


async def served(request: Request) -> Service:
    """The service behind the application."""
    service: Service = request.app.state.service
    return service


Known = Annotated[Call, Depends(known)]
Served = Annotated[Service, Depends(served)]
router = APIRouter()


def add(app: FastAPI, service: Service, callers: Callers) -> None:
    """Adds the endpoints to the application."""
    app.state.callers, app.state.service = callers, service
    app.state.submissions = None
    app.include_router(router)
    views.describe_task(app)


async def in_turn(
    request: Request, act: Callable[[], _T], else_: Callable[[], _T] | None = None
) -> _T:
    """``act`` in a thread, when it is its turn among those that ask Slurm. ``else_`` is done
    instead where it would wait for long."""
    state = request.app.state
    if state.submissions is None:  # made in the loop that serves
        state.submissions = anyio.CapacityLimiter(SUBMISSIONS)
        state.threads = anyio.CapacityLimiter(SUBMISSIONS)
        state.keeping = anyio.CapacityLimiter(_KEEPING)
    limiter, mine = state.submissions, object()
    patience = 0.0 if state.service.tasks.crowd.large else _PATIENCE_SECONDS
    with anyio.move_on_after(patience if else_ else math.inf):
        await limiter.acquire_on_behalf_of(mine)
        try:
            with anyio.CancelScope(shield=True):
                run = functools.partial(told, act)
                return await anyio.to_thread.run_sync(run, limiter=state.threads)
        finally:
            limiter.release_on_behalf_of(mine)
    assert else_ is not None
    return await anyio.to_thread.run_sync(functools.partial(told, else_), limiter=state.keeping)


def one(call: Call, service: Service, task_id: str) -> StoredTask:
    """The task of that id that the caller may see; 404 when there is none."""
    caller = call.caller
    client = None if caller.person else caller.client
    user = caller.user if caller.person and not caller.admin else None
    found = service.store().tasks(task_id=task_id, client=client, user=user, limit=1)
    if not found:
        raise HTTPException(404, f"there is no task {task_id}")
    return found[0]


@router.post(
    "/api/v1/schedule",
    status_code=202,
    responses=_ERRORS | _CONFLICT,
    openapi_extra=views.TASK_BODY,
)
async def schedule(
    call: Known, service: Served, request: Request, response: Response
) -> dict[str, Any]:
    """Take a task in and submit its job. The same task again gets the same answer."""
    call.may("submit")
    caller = call.caller
    source = "munge" if caller.person else "api"

    def act(submit: bool) -> dict[str, Any]:
        intake = service.tasks.intake
        way = intake.take if submit else intake.keep
        taken = way(caller.client, call.body, user=caller.user, source=source)
        return views.accepted(service, taken.task)

    with service.tasks.crowd.joined():
        answer = await in_turn(request, lambda: act(True), else_=lambda: act(False))
    response.headers["Location"] = f"/api/v1/tasks/{answer['task_id']}"
    return answer


@router.get("/api/v1/tasks", responses=_ERRORS)
def tasks(
    call: Known,
    service: Served,
    status: State | None = None,
    before: Annotated[int | None, Query(ge=1, le=2**62)] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> dict[str, Any]:
    """The newest tasks first; ``next`` is the ``before`` of the page behind this one."""
    call.may("read")
    caller = call.caller
    client = None if caller.person else caller.client
    user = caller.user if caller.person and not caller.admin else None
    state = status.value if status else None
    found = told(
        lambda: service.store().tasks(
            client=client, user=user, state=state, before=before, limit=limit
        )
    )
    page = found[-1].number if len(found) == limit else None
    return {"tasks": [views.summary(task) for task in found], "next": page}


@router.get("/api/v1/tasks/{task_id}", responses=_ERRORS | _ABSENT)
def task(call: Known, service: Served, task_id: TaskId) -> dict[str, Any]:
    """A task with all that was told of it, and how far telling has come."""
    call.may("read")
    return told(lambda: views.whole(service, one(call, service, task_id)))


@router.post(
    "/api/v1/tasks/{task_id}/cancel", status_code=202, responses=_ERRORS | _ABSENT | _CONFLICT
)
async def cancel(call: Known, service: Served, request: Request, task_id: TaskId) -> dict[str, Any]:
    """Have a task's job ended. One that has ended already stays as it is."""
    call.may("cancel")
    intake = service.tasks.intake
    return await in_turn(request, lambda: views.summary(intake.cancel(one(call, service, task_id))))


@router.get("/api/v1/tasks/{task_id}/explain", responses=_ERRORS | _ABSENT)
def explain(call: Known, service: Served, task_id: TaskId) -> dict[str, Any]:
    """Why the task's job went where it went: decision, what it got, callbacks."""
    call.may("read")
    return told(lambda: views.explained(service, one(call, service, task_id)))


@router.get("/api/v1/nodes", responses=_ERRORS)
def nodes(call: Known, service: Served) -> dict[str, Any]:
    """Nodes as Slurm has them, with their measured hardware and health."""
    call.may("nodes")
    return views.nodes(service)


@router.post("/api/v1/estimate", responses=_ERRORS, openapi_extra=views.TASK_BODY)
def estimate(call: Known, service: Served) -> dict[str, Any]:
    """What a task is predicted to need; nothing is submitted."""
    call.may("read")
    return told(lambda: views.estimated(service, parse(call.body)))


def told(act: Callable[[], _T]) -> _T:
    """What ``act`` gives, or the HTTP answer for what it raises."""
    try:
        return act()
    except TaskError as error:
        raise HTTPException(422, [problem.as_json() for problem in error.problems]) from error
    except RefusedError as error:
        raise HTTPException(422, [views.problem("refused", str(error))]) from error
    except ConflictError as error:
        raise HTTPException(409, str(error), {"Retry-After": "2"}) from error
    except UserError as error:
        raise HTTPException(403, str(error)) from error
    except ConfigError as error:
        raise HTTPException(503, str(error), {"Retry-After": "60"}) from error
    except CraterError as error:
        raise HTTPException(503, str(error), {"Retry-After": "5"}) from error
