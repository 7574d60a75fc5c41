"""crater-scheduler's HTTP API: what nodes report, decisions for people, health, metrics.

Callers are known by MUNGE: ``Authorization: MUNGE <credential>`` over the SHA-256 (hex) of the
body, which gives the uid and can't be replayed. Nodes report as root.
"""

from __future__ import annotations

import dataclasses
import hashlib
import pwd
import time
from collections.abc import Iterable
from typing import Annotated, Any

from fastapi import Depends, FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from pydantic import BaseModel, ConfigDict, Field

from crater_slurm import __version__
from crater_slurm.errors import CraterError, SlurmError, StoreError, UsageError
from crater_slurm.scheduler import task_api
from crater_slurm.scheduler.callers import Callers
from crater_slurm.scheduler.reports import is_of_node
from crater_slurm.scheduler.service import Service
from crater_slurm.slurm import munge
from crater_slurm.store.decisions import decision_to_dict
from crater_slurm.store.health import health_to_dict
from crater_slurm.store.observations import observation_to_dict
from crater_slurm.store.records import Grant

_LONGEST_BODY = 1 << 20


class GrantReport(BaseModel):
    """What a job got on a node, as crater-io-daemon sends it."""

    model_config = ConfigDict(extra="forbid")

    job_id: str = Field(pattern=r"^\d{1,10}$")
    plan_id: str = Field(default="", max_length=64)
    node: str = Field(min_length=1, max_length=255)
    time: float
    phase: str = Field(max_length=32)
    grant: dict[str, Any]


_NODE_NAME = r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}$"


class ObservationReport(BaseModel):
    """What a job was seen to need on a node so far, or in all when it has ended.

    ``figures`` are checked where they are taken, by one table of bounds.
    """

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)

    job_id: str = Field(pattern=r"^\d{1,10}$")
    plan_id: str = Field(default="", max_length=64)
    node: str = Field(pattern=_NODE_NAME)
    time: float = Field(ge=0, le=2**33)
    seconds: float = Field(ge=0, le=2**30)
    ended: bool
    succeeded: bool | None = None
    oom_kills: int = Field(default=0, ge=0, le=2**31)
    samples: int = Field(ge=0, le=2**31)
    gpus: int = Field(default=0, ge=0, le=1024)
    figures: dict[str, float | None] = Field(max_length=100)


class NodeReport(BaseModel):
    """What a node says of itself, as crater-probe sends it: its profile, its health, or both."""

    model_config = ConfigDict(extra="forbid")

    node: str = Field(pattern=_NODE_NAME)
    profile: dict[str, Any] | None = None
    health: dict[str, Any] | None = None


async def sender(request: Request) -> munge.Credential:
    """Who sent this request, and from where; 401 when MUNGE does not vouch for it."""
    scheme, _, credential = request.headers.get("authorization", "").partition(" ")
    if scheme != "MUNGE":
        raise HTTPException(401, "send 'Authorization: MUNGE <credential>'")
    body = await request.body()
    if len(body) > _LONGEST_BODY:
        raise HTTPException(413, f"more than {_LONGEST_BODY} bytes")
    import anyio.to_thread

    try:
        proof = await anyio.to_thread.run_sync(munge.decode, credential.strip())
    except SlurmError as error:
        raise HTTPException(401, str(error)) from error
    if proof.payload != hashlib.sha256(body).hexdigest():
        raise HTTPException(401, "the credential is for another body")
    return proof


Sender = Annotated[munge.Credential, Depends(sender)]


def caller(proof: Sender) -> int:
    """The uid of whoever sent this request."""
    return proof.uid


Caller = Annotated[int, Depends(caller)]


def _unreadable(_: Request, error: Exception) -> Response:
    """422 without what was sent: a NaN in it could not be sent back, and would become a 500."""
    assert isinstance(error, RequestValidationError)
    words = [{"loc": list(e["loc"]), "msg": e["msg"], "type": e["type"]} for e in error.errors()]
    return JSONResponse({"detail": words}, 422)


def build(service: Service, admins: Iterable[str], registry: CollectorRegistry) -> FastAPI:
    """The application over a running service."""
    app = FastAPI(title="crater-scheduler", version=__version__)
    app.add_exception_handler(RequestValidationError, _unreadable)
    admin_uids = set(_uids(admins))

    def may_see(uid: int, owner: int) -> None:
        if uid != owner and uid not in admin_uids:
            raise HTTPException(403, "this decision belongs to another user")

    def must_be(node: str, proof: munge.Credential) -> None:
        if proof.uid not in admin_uids:
            raise HTTPException(403, "only root or the crater user of a node reports")
        verify = service.settings.scheduler.verify_node_host
        if verify and not is_of_node(proof, node, service.slurm.node):
            raise HTTPException(
                403,
                f"{proof.host} ({proof.address}) is not the node {node}; if it is, compare "
                "'scontrol show node' with its host name, or set scheduler.verify_node_host",
            )

    @app.get("/healthz")
    def health() -> JSONResponse:
        problems, warnings = service.problems(), service.warnings()
        said: dict[str, Any] = {"warnings": warnings} if warnings else {}
        if problems:
            return JSONResponse({"status": "degraded", "problems": problems} | said, 503)
        return JSONResponse({"status": "ok"} | said)

    @app.get("/metrics")
    def metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    @app.post("/node/v1/grants", status_code=204)
    def grants(report: GrantReport, uid: Caller) -> None:
        if uid not in admin_uids:
            raise HTTPException(403, "only root or the crater user of a node reports")
        try:
            service.tasks.take_report(report.model_dump())
        except StoreError as error:
            raise HTTPException(503, str(error)) from error
        if report.phase == "flushed":
            return  # the task's matter alone: what the job got on its node is as it was
        service.recorder.add(
            Grant(
                job_id=int(report.job_id),
                plan_id=report.plan_id,
                node=report.node,
                time=report.time,
                got=report.grant | {"phase": report.phase},
            )
        )

    @app.post("/node/v1/reports", status_code=204)
    def reports(report: NodeReport, proof: Sender) -> None:
        must_be(report.node, proof)
        try:
            if report.profile is not None:
                service.reports.take_profile(report.node, report.profile)
            if report.health is not None:
                service.reports.take_health(report.node, report.health)
        except UsageError as error:
            raise HTTPException(422, str(error)) from error
        except CraterError as error:
            raise HTTPException(503, str(error)) from error

    @app.post("/node/v1/observations", status_code=204)
    def observations(report: ObservationReport, proof: Sender) -> None:
        must_be(report.node, proof)
        try:
            service.take_observation(report.model_dump())
        except UsageError as error:
            raise HTTPException(422, str(error)) from error
        except CraterError as error:
            raise HTTPException(503, str(error)) from error

    @app.get("/api/v1/nodes/{name}/health")
    def health_of(name: str, uid: Caller) -> dict[str, Any]:
        found = service.health.newest(name)
        if found is None:
            raise HTTPException(404, f"{name} has not reported since the scheduler started")
        told = health_to_dict(found) | {"age_seconds": round(time.time() - found.time, 1)}
        judged = service.health.describe(name)
        return told | ({"judged": judged} if judged else {})

    @app.get("/api/v1/health")
    def health_of_all(uid: Caller) -> dict[str, Any]:
        weights = service.health.slurm_weights()
        described = [service.health.describe(name) for name in sorted(service.health.board.judged)]
        return {
            "nodes": [d | {"weight": weights.get(d["node"])} for d in described if d],
            "warnings": service.warnings(),
        }

    @app.get("/api/v1/decisions/{key}")
    def decision(key: str, uid: Caller) -> dict[str, Any]:
        try:
            found = service.recorder.decision(key)
        except CraterError as error:
            raise HTTPException(503, str(error)) from error
        if found is None:
            raise HTTPException(404, f"there is no decision {key}")
        may_see(uid, found.user_id)
        try:
            got = service.store().grants(plan_id=found.id)
            seen = service.store().observations(plan_id=found.id)
            acts = service.store().actions([found.id]).get(found.id, [])
        except CraterError as error:
            raise HTTPException(503, str(error)) from error
        return {
            "decision": decision_to_dict(found),
            "grants": [
                {"job_id": g.job_id, "node": g.node, "time": g.time, "got": dict(g.got)}
                for g in got
            ],
            "observations": [observation_to_dict(one) for one in seen],
            "actions": [dataclasses.asdict(act) for act in acts],
            "notes": service.utilization.notes(found.id),
            "age_seconds": round(time.time() - found.time, 1),
        }

    callers = Callers(
        service.settings.scheduler, service.store, frozenset(admin_uids), service.clock
    )
    task_api.add(app, service, callers)
    return app


def _uids(names: Iterable[str]) -> Iterable[int]:
    for name in names:
        try:
            yield pwd.getpwnam(name).pw_uid
        except KeyError:
            continue
