"""The platform's part of the HTTP API: send tasks, see them, cancel them; nodes, estimates.

Every endpoint wants a token (or MUNGE) and checks its scope. A task is seen by the client that sent
it, by the user whose job it is, and by admins; for everybody else it is not there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import anyio
import anyio.to_thread
from fastapi import Depends, FastAPI, HTTPException, Path, Query, Response

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

#: Submissions under way at a time: a slow slurmctld must not hold up what else is asked.
_SUBMISSIONS = 24
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


def add(app: FastAPI, service: Service, callers: Callers) -> None:
    """Adds the endpoints to the application."""
    known = callers.dependency()
    limiter: list[anyio.CapacityLimiter] = []
    Known = Annotated[Call, Depends(known)]  # noqa: N806, a type

    async def in_turn(act: Callable[[], _T]) -> _T:
        if not limiter:  # made in the loop that serves
            limiter.append(anyio.CapacityLimiter(_SUBMISSIONS))
        return await anyio.to_thread.run_sync(functools.partial(told, act), limiter=limiter[0])

    def one(call: Call, task_id: str, client: str | None = None) -> StoredTask:
        caller = call.caller
        if not caller.person:
            client, user = caller.client, None
        else:
            user = None if caller.admin else caller.user
        found = service.store().tasks(task_id=task_id, client=client, user=user, limit=1)
        if not found:
            raise HTTPException(404, f"there is no task {task_id}")
        return found[0]

    @app.post(
        "/api/v1/schedule",
        status_code=202,
        responses=_ERRORS | _CONFLICT,
        openapi_extra=views.TASK_BODY,
    )
    async def schedule(call: Known, response: Response) -> dict[str, Any]:
        """Take a task in and submit its job. The same task again gets the same answer."""
        call.may("submit")

        def act() -> dict[str, Any]:
            caller = call.caller
            source = "munge" if caller.person else "api"
            taken = service.tasks.intake.take(
                caller.client, call.body, user=caller.user, source=source
            )
            return views.accepted(service, taken.task)

        answer = await in_turn(act)
        response.headers["Location"] = f"/api/v1/tasks/{answer['task_id']}"
        return answer

    @app.get("/api/v1/tasks", responses=_ERRORS)
    def tasks(
        call: Known,
        status: State | None = None,
        before: Annotated[int | None, Query(ge=1, le=2**62)] = None,
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    ) -> dict[str, Any]:
        """The newest tasks first; ``next`` is the ``before`` of the page behind this one."""
        call.may("read")
        caller = call.caller
        client = None if caller.person else caller.client
        user = caller.user if caller.person and not caller.admin else None
        found = told(
            lambda: service.store().tasks(
                client=client,
                user=user,
                state=status.value if status else None,
                before=before,
                limit=limit,
            )
        )
        page = found[-1].number if len(found) == limit else None
        return {"tasks": [views.summary(task) for task in found], "next": page}

    @app.get("/api/v1/tasks/{task_id}", responses=_ERRORS | _ABSENT)
    def task(call: Known, task_id: TaskId) -> dict[str, Any]:
        """A task with all that was told of it, and how far telling has come."""
        call.may("read")
        return told(lambda: views.whole(service, one(call, task_id)))

    @app.post(
        "/api/v1/tasks/{task_id}/cancel",
        status_code=202,
        responses=_ERRORS | _ABSENT | _CONFLICT,
    )
    async def cancel(call: Known, task_id: TaskId) -> dict[str, Any]:
        """Have a task's job ended. One that has ended already stays as it is."""
        call.may("cancel")
        return await in_turn(lambda: views.summary(service.tasks.intake.cancel(one(call, task_id))))

    @app.get("/api/v1/tasks/{task_id}/explain", responses=_ERRORS | _ABSENT)
    def explain(call: Known, task_id: TaskId) -> dict[str, Any]:
        """Why the task's job went where it went: decision, what it got, callbacks."""
        call.may("read")
        return told(lambda: views.explained(service, one(call, task_id)))

    @app.get("/api/v1/nodes", responses=_ERRORS)
    def nodes(call: Known) -> dict[str, Any]:
        """Nodes as Slurm has them, with their measured hardware and health."""
        call.may("nodes")
        return views.nodes(service)

    @app.post("/api/v1/estimate", responses=_ERRORS, openapi_extra=views.TASK_BODY)
    def estimate(call: Known) -> dict[str, Any]:
        """What a task is predicted to need; nothing is submitted."""
        call.may("read")
        return told(lambda: views.estimated(service, parse(call.body)))

    views.describe_task(app)


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
