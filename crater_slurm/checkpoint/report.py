"""What daemon and trainers are told without asking: the job's state, steps that are safe."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from crater_slurm.checkpoint.desk import Desk
from crater_slurm.checkpoint.lanes import Budget, Lane
from crater_slurm.checkpoint.services import Services
from crater_slurm.checkpoint.steps import Steps
from crater_slurm.checkpoint.tools import Tools
from crater_slurm.job import layout, wire

#: Of a message, what the rest of a state may take beside the steps.
_BESIDE_BYTES = 8000


class Report:
    """Puts the state together, within what a message holds."""

    def __init__(
        self, tools: Tools, steps: Steps, services: Services, budget: Budget, desk: Desk
    ) -> None:
        self._tools, self._steps, self._services = tools, steps, services
        self._budget, self._desk = budget, desk
        self._flushed: set[tuple[str, int, str]] = set()

    def state(self, lanes: Iterable[Lane], *, idle: bool, done: bool) -> dict[str, Any]:
        """The ``state`` message; trainers are told what has become safe since the last."""
        lanes = list(lanes)
        steps = self._desk.steps()
        self._tell_flushed(steps, lanes)
        steps.sort(key=lambda step: (step["flushed"], -step["step"]))
        while len(json.dumps(steps)) > wire.MAX_BYTES - _BESIDE_BYTES:
            del steps[len(steps) // 2 :]
        counters = {
            **self._tools.counters,
            "drain_seconds": round(self._tools.drain_seconds, 6),
            **self._services.counters(),
            "unflushed": self._desk.unflushed(),
            "lanes": sum(not lane.closed for lane in lanes),
            "lane_bytes": self._budget.used,
            "saving": len(self._steps.waiting),
        }
        return {"op": "state", "steps": steps, "counters": counters, "idle": idle, "done": done}

    def _tell_flushed(self, steps: list[dict[str, Any]], lanes: list[Lane]) -> None:
        spec = self._tools.spec
        for step in steps if spec.remote.url else []:
            key = (step["name"], step["step"], step["run"])
            own = layout.is_of_run(step["run"], spec.run)
            if step["flushed"] and own and key not in self._flushed:
                self._flushed.add(key)
                for lane in lanes:
                    lane.send({"op": "flushed", "name": key[0], "step": key[1]})
