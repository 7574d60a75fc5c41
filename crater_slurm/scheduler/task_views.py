"""What the API shows of tasks, nodes and estimates, as JSON data, and the task for OpenAPI."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from crater_slurm.alldata.payload import iso
from crater_slurm.alldata.request import request_of
from crater_slurm.alldata.states import State
from crater_slurm.alldata.task import Task, json_schema
from crater_slurm.model.job import Job
from crater_slurm.model.plan import Decision
from crater_slurm.model.profile import NodeProfile
from crater_slurm.scheduler.service import Service
from crater_slurm.store.decisions import decision_to_dict
from crater_slurm.store.task_records import StoredCallback, StoredTask

_CALLBACKS = 200
_SCHEMA = "Task"
TASK_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{_SCHEMA}"}}},
    }
}


def describe_task(app: FastAPI) -> None:
    """Puts the task's schema among the components, where the endpoints refer to it."""

    @functools.cache
    def document() -> dict[str, Any]:
        made = get_openapi(title=app.title, version=app.version, routes=app.routes)
        schemas = made.setdefault("components", {}).setdefault("schemas", {})
        text = json.dumps(json_schema()).replace("#/$defs/", f"#/components/schemas/{_SCHEMA}.")
        task = json.loads(text)
        task.pop("$schema", None)
        for name, schema in task.pop("$defs", {}).items():
            schemas[f"{_SCHEMA}.{name}"] = schema
        schemas[_SCHEMA] = task
        return made

    app.openapi = document  # type: ignore[method-assign]


def problem(code: str, message: str) -> dict[str, str | None]:
    """A mistake that is no field's, in the form of those that are."""
    return {"pointer": "", "code": code, "value": None, "message": message}


def summary(task: StoredTask) -> dict[str, Any]:
    """A task in short."""
    return {
        "task_id": task.task_id,
        "client": task.client,
        "user": task.user,
        "status": task.state,
        "job_id": task.job_id,
        "plan_id": task.plan_id,
        "created": iso(task.created),
        "submitted": iso(task.submitted),
        "started": iso(task.started),
        "ended": iso(task.ended),
        "restarts": task.restarts,
        "exit_code": task.exit_code,
        "reason": task.reason or None,
    }


def accepted(service: Service, task: StoredTask) -> dict[str, Any]:
    """The answer to a submission, with crater's decision where there is one."""
    found = service.recorder.decision(task.plan_id) if task.plan_id else None
    told = {"task_id": task.task_id, "status": task.state, "job_id": task.job_id}
    if task.state == State.SUBMITTING:
        words = (
            "Slurm is away or slow; the task is kept, and its job submitted as soon as it can be"
        )
        return told | {"plan_id": None, "decision": None, "message": words}
    return told | {"plan_id": task.plan_id, "decision": _decided(found), "message": None}


def _decided(found: Decision | None) -> dict[str, Any] | None:
    if found is None:
        return None
    whole = decision_to_dict(found)
    names = ("id", "verdict", "mode", "plan", "nodes_considered", "nodes_passed", "messages")
    return {name: whole[name] for name in names if name in whole}


def whole(service: Service, task: StoredTask) -> dict[str, Any]:
    """A task with its resources and callbacks."""
    store = service.store()
    found = store.callbacks(task=task.number, limit=_CALLBACKS)
    nodes = task.resources.get("nodes", [])
    return summary(task) | {
        "task": json.loads(store.task_body(task.number)),
        "allocated_resources": nodes[0] if nodes else None,
        "nodes": nodes,
        "callbacks": [_callback(one) for one in reversed(found)],
    }


def _callback(one: StoredCallback) -> dict[str, Any]:
    return {
        "event_id": one.event_id,
        "sequence": one.sequence,
        "status": one.status,
        "time": json.loads(one.payload).get("time"),
        "delivery": one.delivery,
        "attempts": one.attempts,
        "http_status": one.http_status,
        "error": one.error or None,
        "next_try": iso(one.next_try) if one.delivery == "waiting" else None,
        "delivered": iso(one.done) if one.delivery == "delivered" else None,
    }


def explained(service: Service, task: StoredTask) -> dict[str, Any]:
    """Decision, grants and callbacks of a task."""
    store = service.store()
    decision = service.recorder.decision(task.plan_id) if task.plan_id else None
    grants = store.grants(plan_id=task.plan_id) if task.plan_id else []
    return {
        "task": summary(task),
        "decision": decision_to_dict(decision) if decision else None,
        "grants": [
            {"job_id": g.job_id, "node": g.node, "time": iso(g.time), "got": dict(g.got)}
            for g in grants
        ],
        "callbacks": [
            _callback(one)
            for one in store.callbacks(task=task.number, limit=_CALLBACKS, oldest_first=True)
        ],
    }


def nodes(service: Service) -> dict[str, Any]:
    """Every node of Slurm, with what is known of its hardware."""
    view = service.state.view
    if view is None:
        return {"nodes": [], "age_seconds": None}
    profiles = service.state.profiles
    shown = [
        {
            "name": node.name,
            "state": node.state,
            "usable": node.usable,
            "reason": node.reason or None,
            "partitions": sorted(node.partitions),
            "features": sorted(node.features),
            "gres": dict(node.gres),
            "weight": node.weight,
            "hardware": _hardware(profiles.get(node.name)),
            "health": _health(service.health.describe(node.name)),
        }
        for node in view.cluster.nodes
    ]
    return {"nodes": shown, "age_seconds": round(time.time() - view.cluster.time, 1)}


def _hardware(profile: NodeProfile | None) -> dict[str, Any] | None:
    if profile is None:
        return None
    numa = [
        {"id": n.id, "memory_mib": n.memory_mib, "bandwidth_gb_s": n.memory_bandwidth_gb_s}
        for n in profile.numa_nodes
    ]
    gpus = [
        {"index": g.index, "model": g.model, "memory_mib": g.memory_mib, "numa_node": g.numa_node}
        for g in profile.gpus
    ]
    drives = [
        {"name": d.name, "size_gb": d.size_gb, "read_latency_us": d.read_latency_us}
        for d in profile.nvmes
    ]
    return {"numa_nodes": numa, "gpus": gpus, "nvmes": drives}


def _health(judged: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if judged is None:
        return None
    return {name: judged[name] for name in ("score", "degraded", "faults") if name in judged}


def estimated(service: Service, task: Task) -> dict[str, Any]:
    """What is predicted of a task's job."""
    found = service.predict(request_of(task), Job(user_id=0, user_name=""))
    return {
        "task_id": task.task_id,
        "prediction": found.record or None,
        "notes": list(found.notes)
        or (["nothing is predicted of a task without a known model"] if not found.record else []),
    }
