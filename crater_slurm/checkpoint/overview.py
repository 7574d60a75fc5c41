"""A job's steps as ``crater checkpoints`` shows them: in the cache, on other nodes, at the
destination, and how far each is on its way.

Put together when somebody asks, in a pool's thread: the destination is asked, which may take long
or fail; then what is known here is told all the same, with the reason.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from crater_slurm.checkpoint import inspect, remote
from crater_slurm.checkpoint.folder import LocalStep
from crater_slurm.checkpoint.remote.path import PathStore
from crater_slurm.checkpoint.remote.store import RemoteError, Store
from crater_slurm.checkpoint.services import Services
from crater_slurm.checkpoint.spec import Spec
from crater_slurm.job import wire
from crater_slurm.job.wire import WireError

Answer = dict[str, Any]
Key = tuple[str, int, str]
_MOST_SHOWN = 200
_BESIDE_BYTES = 8000
_LONGEST = 300


class Overview:
    """``scan``: the steps in the cache."""

    def __init__(self, spec: Spec, services: Services, scan: Callable[[], list[LocalStep]]) -> None:
        self._spec, self._services, self._scan = spec, services, scan

    def answer(self, message: Answer) -> Answer:
        """To ``list``, ``show`` and ``verify``. Raises WireError, RemoteError, OSError."""
        name, step = wire.text(message, "name", "step"), message.get("step")
        if step is not None:
            step = wire.whole(message, "step", 10**15 - 1)
        if message["op"] == "list":
            return self._list()
        if message["op"] == "show":
            return self._show(name, step)
        return self._verify(name, step, destination=message.get("destination") is True)

    def _list(self) -> Answer:
        found: dict[Key, Answer] = {}
        for local in self._scan():
            one = _entry(found, (local.name, local.step, local.run))
            one |= {"where": ["cache"], "time": local.time, "bytes": local.bytes}
            one |= {"ranks": len(local.ranks), "world": local.parts[0].world_size}
            one |= {"parts": len(local.parts), "complete": local.whole}
        problem = self._add_destination(found)
        self._add_peers(found)
        for state in self._services.command({"op": "onward"}).get("steps", ()):
            key = (state["name"], state["step"], state["run"])
            if key in found:
                known = ("state", "done", "since", "next_try")
                found[key] |= {k: state[k] for k in known}
                found[key]["error"] = str(state["error"])[:_LONGEST]
        newest = sorted(found.values(), key=lambda e: (e["step"], e["time"]), reverse=True)
        shown = newest[:_MOST_SHOWN]
        while len(json.dumps(shown)) > wire.MAX_BYTES - _BESIDE_BYTES:
            del shown[len(shown) // 2 :]
        return {
            "destination": self._spec.remote.url,
            "folder": self._spec.folder,
            "steps": shown,
            "left_out": len(newest) - len(shown),
            "problem": problem,
        }

    def _add_destination(self, found: dict[Key, Answer]) -> str:
        if not self._spec.remote.url:
            return ""
        try:
            for row in self._away(inspect.steps):
                one = _entry(found, (row["name"], row["step"], row["run"]))
                one["where"].append("destination")
                one["there"] = {k: row[k] for k in ("ranks", "parts", "complete")}
                one["time"] = one["time"] or row["time"]
                for known in ("bytes", "world", "ranks", "parts"):
                    one[known] = max(one[known], row[known])
                one["complete"] = one["complete"] or row["complete"]
        except RemoteError as error:
            return str(error)[:_LONGEST]
        return ""

    def _add_peers(self, found: dict[Key, Answer]) -> None:
        for name in {key[0] for key in found} | {"step"}:
            told = self._services.command({"op": "copies", "name": name}).get("copies", ())
            for step, run, time in told:
                one = _entry(found, (name, step, run))
                one["where"].append("peer")
                one["time"] = one["time"] or time
                one["complete"] = True

    def _show(self, name: str, step: int | None) -> Answer:
        cache = PathStore(self._spec.folder, {})
        copies = {"cache": [inspect.show(s) for s in inspect.find(cache, name, step, None)]}
        problem = ""
        if self._spec.remote.url:
            try:
                there = self._away(lambda store: inspect.find(store, name, step, None))
                copies["destination"] = [inspect.show(s) for s in there]
            except RemoteError as error:
                problem = str(error)[:_LONGEST]
        files = [one["files"] for found in copies.values() for one in found]
        while len(json.dumps(copies)) > wire.MAX_BYTES - _BESIDE_BYTES and any(files):
            for some in files:
                del some[len(some) // 2 :]
        return {"copies": copies, "problem": problem}

    def _verify(self, name: str, step: int | None, *, destination: bool) -> Answer:
        damaged, checked = _verified(PathStore(self._spec.folder, {}), "cache", name, step)
        if destination:
            if not self._spec.remote.url:
                raise WireError("verify the destination: the job has none")
            more, steps = self._away(lambda store: _verified(store, store.where, name, step))
            damaged, checked = damaged + more, checked + steps
        return {"checked": checked[-_MOST_SHOWN:], "damaged": damaged[:50]}

    def _away(self, work: Callable[[Store], Any]) -> Any:
        store = remote.open_store(self._spec.remote, self._spec.home)
        try:
            return work(store)
        finally:
            store.close()


def _entry(found: dict[Key, Answer], key: Key) -> Answer:
    fresh = {
        **dict(zip(("name", "step", "run"), key, strict=True)),
        "where": [],
        "time": 0.0,
        "bytes": 0,
        "ranks": 0,
        "world": 0,
        "parts": 0,
        "complete": False,
        "state": "",
        "error": "",
    }
    return found.setdefault(key, fresh)


def _verified(
    store: Store, where: str, name: str, step: int | None
) -> tuple[list[str], list[Answer]]:
    damaged, checked = [], []
    for row in inspect.steps(store):
        if row["name"] != name or step not in (None, row["step"]):
            continue
        for stored in inspect.find(store, name, row["step"], row["run"]):
            wrong = inspect.verify(store, stored)
            damaged += [f"{where}: {problem}"[:500] for problem in wrong]
            known = {k: row[k] for k in ("name", "step", "run", "bytes")}
            checked.append({**known, "where": where, "good": not wrong})
    return damaged, checked
