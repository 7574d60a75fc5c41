"""crater-scheduler's HTTP API: reports of nodes, decisions for people, health, metrics.

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
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from pydantic import BaseModel, ConfigDict, Field

from crater_slurm import __version__
from crater_slurm.errors import CraterError, SlurmError, UsageError
from crater_slurm.scheduler.reports import is_of_node
from crater_slurm.scheduler.service import Service
from crater_slurm.slurm import munge
from crater_slurm.store.decisions import decision_to_dict
from crater_slurm.store.health import health_to_dict
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


class NodeReport(BaseModel):
    """What a node says of itself, as crater-probe sends it: its profile, its health, or both."""

    model_config = ConfigDict(extra="forbid")

    node: str = Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}$")
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


def build(service: Service, admins: Iterable[str], registry: CollectorRegistry) -> FastAPI:
    """The application over a running service."""
    app = FastAPI(title="crater-scheduler", version=__version__)
    admin_uids = set(_uids(admins))

    def may_see(uid: int, owner: int) -> None:
        if uid != owner and uid not in admin_uids:
            raise HTTPException(403, "this decision belongs to another user")

    @app.get("/healthz")
    def health() -> JSONResponse:
        problems = service.problems()
        if problems:
            return JSONResponse({"status": "degraded", "problems": problems}, 503)
        return JSONResponse({"status": "ok"})

    @app.get("/metrics")
    def metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    @app.post("/node/v1/grants", status_code=204)
    def grants(report: GrantReport, uid: Caller) -> None:
        if uid not in admin_uids:
            raise HTTPException(403, "only root or the crater user of a node reports")
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
        if proof.uid not in admin_uids:
            raise HTTPException(403, "only root or the crater user of a node reports")
        verify = service.settings.scheduler.verify_node_host
        if verify and not is_of_node(proof, report.node, service.slurm.node):
            raise HTTPException(
                403,
                f"{proof.host} ({proof.address}) is not the node {report.node}; if it is, compare "
                "'scontrol show node' with its host name, or set scheduler.verify_node_host",
            )
        try:
            if report.profile is not None:
                service.reports.take_profile(report.node, report.profile)
            if report.health is not None:
                service.reports.take_health(report.node, report.health)
        except UsageError as error:
            raise HTTPException(422, str(error)) from error
        except CraterError as error:
            raise HTTPException(503, str(error)) from error

    @app.get("/api/v1/nodes/{name}/health")
    def health_of(name: str, uid: Caller) -> dict[str, Any]:
        found = service.reports.health(name)
        if found is None:
            raise HTTPException(404, f"{name} has not reported since the scheduler started")
        return health_to_dict(found) | {"age_seconds": round(time.time() - found.time, 1)}

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
            acts = service.store().actions([found.id]).get(found.id, [])
        except CraterError as error:
            raise HTTPException(503, str(error)) from error
        return {
            "decision": decision_to_dict(found),
            "grants": [
                {"job_id": g.job_id, "node": g.node, "time": g.time, "got": dict(g.got)}
                for g in got
            ],
            "actions": [dataclasses.asdict(act) for act in acts],
            "notes": service.utilization.notes(found.id),
            "age_seconds": round(time.time() - found.time, 1),
        }

    return app


def _uids(names: Iterable[str]) -> Iterable[int]:
    for name in names:
        try:
            yield pwd.getpwnam(name).pw_uid
        except KeyError:
            continue
