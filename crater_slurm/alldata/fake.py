"""A fake AllData server, for trying and testing an integration: queue, callback receiver, faults.

It keeps everything in memory and shows what arrived. It is no platform, and belongs on a loopback
address: its own control has no password.
"""

from __future__ import annotations

import asyncio
import hmac
import html
import json
import time
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from fastapi import FastAPI, HTTPException, Query, Request
from fastapi.responses import HTMLResponse, JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from crater_slurm.alldata.receiver import NotOursError, Received, Receiver

_LONGEST_BODY = 4 << 20
_SHOWN = 200


class Fault(BaseModel):
    """What goes wrong with the next callbacks. ``lost_answer``: taken, and then no answer."""

    model_config = ConfigDict(extra="forbid")

    kind: Literal["error", "refuse", "busy", "lost_answer", "slow"]
    times: int = Field(default=1, ge=1, le=1_000_000)
    seconds: float = Field(default=1.0, ge=0, le=600)


@dataclass
class Fake:
    """The server's memory. ``token`` is what a poller must send; empty: anything."""

    receiver: Receiver = field(default_factory=Receiver)
    token: str = ""
    queue: list[Any] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    polls: int = 0

    def next_fault(self) -> Fault | None:
        """The fault of this callback, counted."""
        if not self.faults:
            return None
        fault = self.faults[0]
        fault.times -= 1
        if not fault.times:
            self.faults.pop(0)
        return fault


def build(fake: Fake) -> FastAPI:
    """The application."""
    app = FastAPI(title="fake AllData", version="1")
    _platform(app, fake)
    _control(app, fake)

    @app.get("/")
    def page() -> HTMLResponse:
        return HTMLResponse(_page(fake), headers={"Content-Security-Policy": _POLICY})

    return app


def _platform(app: FastAPI, fake: Fake) -> None:
    """What a real platform has."""

    @app.post("/callback")
    async def callback(request: Request) -> JSONResponse:
        body = await request.body()
        if len(body) > _LONGEST_BODY:
            raise HTTPException(413, "too large")
        try:
            fake.receiver.check(request.headers, body, time.time())
        except NotOursError as error:
            raise HTTPException(401, str(error)) from error
        fault = fake.next_fault()
        if fault and fault.kind in ("error", "refuse", "busy"):
            status = {"error": 500, "refuse": 403, "busy": 429}[fault.kind]
            return JSONResponse({"detail": "injected"}, status, {"Retry-After": "1"})
        if fault and fault.kind == "slow":
            await asyncio.sleep(fault.seconds)
        try:
            one = fake.receiver.take(body, time.time())
        except ValueError as error:
            raise HTTPException(400, str(error)) from error
        if fault and fault.kind == "lost_answer":
            await asyncio.sleep(fault.seconds)
        return JSONResponse({"repeat": one.repeat})

    @app.get("/api/tasks")
    def tasks(request: Request) -> dict[str, Any]:
        given = request.headers.get("authorization", "")
        if fake.token and not hmac.compare_digest(given.encode(), f"Bearer {fake.token}".encode()):
            raise HTTPException(401, "another token")
        fake.polls += 1
        fault = fake.faults[0] if fake.faults and fake.faults[0].kind == "error" else None
        if fault:
            fake.next_fault()
            raise HTTPException(500, "injected")
        return {"tasks": list(fake.queue)}


def _control(app: FastAPI, fake: Fake) -> None:
    """What tests and people do with the fake."""

    @app.post("/control/queue", status_code=201)
    def add(task: dict[str, Any]) -> dict[str, int]:
        fake.queue.append(task)
        return {"waiting": len(fake.queue)}

    @app.delete("/control/queue")
    def empty() -> dict[str, int]:
        fake.queue.clear()
        return {"waiting": 0}

    @app.post("/control/faults", status_code=201)
    def fault(fault: Fault) -> dict[str, int]:
        fake.faults.append(fault)
        return {"faults": len(fake.faults)}

    @app.delete("/control/faults")
    def well() -> dict[str, int]:
        fake.faults.clear()
        return {"faults": 0}

    @app.get("/control/received")
    def received(task_id: Annotated[str | None, Query(max_length=200)] = None) -> dict[str, Any]:
        shown = [
            one.as_json()
            for one in list(fake.receiver.received)
            if task_id is None or one.body.get("task_id") == task_id
        ]
        return {
            "received": shown,
            "problems": fake.receiver.problems(),
            "refused": fake.receiver.refused,
            "polls": fake.polls,
        }

    @app.delete("/control/received")
    def forget() -> dict[str, int]:
        fake.receiver.forget()
        return {"received": 0}


_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_STYLE = (
    "body{font:15px system-ui,sans-serif;margin:2rem;color-scheme:light dark}"
    "table{border-collapse:collapse}td,th{padding:.3rem .8rem;text-align:left;"
    "border-bottom:1px solid #8884;vertical-align:top}.bad{color:#c22}pre{margin:0}"
)


def _page(fake: Fake) -> str:
    rows = "".join(_row(one) for one in reversed(fake.receiver.received[-_SHOWN:]))
    problems = fake.receiver.problems()
    wrong = "".join(f"<li class=bad>{html.escape(text)}</li>" for text in problems[-_SHOWN:])
    return (
        f"<!doctype html><meta charset=utf-8><title>fake AllData</title><style>{_STYLE}</style>"
        f"<h1>fake AllData</h1><p>{len(fake.receiver.received)} callbacks, {len(problems)} "
        f"problems, {fake.receiver.refused} refused, {len(fake.queue)} tasks in the queue, "
        f"{fake.polls} polls, {len(fake.faults)} faults to come.</p><ul>{wrong}</ul>"
        "<table><tr><th>time<th>task<th>#<th>status<th>job<th>node<th>GPUs<th>cores<th></tr>"
        f"{rows}</table>"
    )


def _row(one: Received) -> str:
    body = one.body
    got = body.get("allocated_resources")
    got = got if isinstance(got, dict) else {}
    cores = got.get("cpu_cores")
    cells = (
        time.strftime("%H:%M:%S", time.localtime(one.time)),
        *(body.get(name) for name in ("task_id", "sequence", "status", "job_id")),
        got.get("node"),
        got.get("gpu_ids"),
        f"{len(cores)}: {cores}" if isinstance(cores, list) else "",
        "repeat" if one.repeat else "",
    )
    return "<tr>" + "".join(f"<td>{html.escape(_cell(cell))}" for cell in cells) + "</tr>"


def _cell(value: object) -> str:
    text = value if isinstance(value, str) else "" if value is None else json.dumps(value)
    return text[:200]
