"""Answers to questions: the trainers' about what can be loaded, the daemon's about what is there.

What lies in the cache is answered from it; the rest is asked of the services. Nothing here waits:
what may block is done by a pool, and whoever asked is answered when it is known.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from crater_slurm.checkpoint import faults
from crater_slurm.checkpoint.away import Streams
from crater_slurm.checkpoint.folder import LocalStep
from crater_slurm.checkpoint.lanes import Lane
from crater_slurm.checkpoint.overview import Overview
from crater_slurm.checkpoint.services import Services
from crater_slurm.checkpoint.steps import Steps
from crater_slurm.checkpoint.threads import Pool
from crater_slurm.checkpoint.tools import Tools
from crater_slurm.job import wire
from crater_slurm.job.wire import WireError

Answer = dict[str, Any]
_MOST_RANKS = 10**6
_MOST_SHOWN = 200


class Desk:
    """``to_daemon`` sends the daemon a message and says whether there is one."""

    def __init__(
        self,
        tools: Tools,
        steps: Steps,
        services: Services,
        pool: Pool,
        to_daemon: Callable[[Answer], bool],
        streams: Streams,
    ) -> None:
        self._tools, self._steps, self._services, self._pool = tools, steps, services, pool
        self._to_daemon = to_daemon
        self._streams = streams
        self._overview = Overview(tools.spec, services, tools.folder.scan)
        self._asked: dict[str, Lane] = {}
        self._serial = 0

    # Trainers

    def ask(self, lane: Lane, message: dict[str, object], fds: list[int]) -> None:
        """Answer a trainer. Raises WireError when the question is wrong."""
        operation = str(message["op"])
        if operation == "restore":
            self._restore(lane.send, message)
        elif operation == "available":
            name, ranks = wire.text(message, "name", "step"), _ranks(message)
            self._pool.ask(lambda: self._available(name, ranks), _then(lane.send, "available"))
        elif operation == "stream":
            self._streams.open(lane, message, fds)
        elif operation == "piece":
            self._streams.piece(lane, message)
        elif operation == "stage":
            path = wire.text(message, "path")
            self._pool.ask(
                lambda: self._stage(path), _then(lane.send, "staged", path=path, local=None)
            )
        elif operation == "requeue":
            self._requeue(lane, wire.text(message, "reason", ""))
        elif operation == "status":
            lane.send({"op": "status", **self.status()})
        else:
            raise WireError(
                f"take a message {operation!r:.40}: this version knows none of that name"
            )

    def _restore(self, send: Callable[[Answer], None], message: dict[str, object]) -> None:
        name, ranks = wire.text(message, "name", "step"), _ranks(message)
        step, run = message.get("step"), message.get("run")
        if step is not None:
            step = wire.whole(message, "step", 10**15 - 1)
        if run is not None:
            run = wire.text(message, "run")

        def work() -> Answer:
            return self._restored(name, step, run, ranks)

        tell = _then(send, "restored", name=name, step=step, run=run, folder=None, source=None)

        def then(found: Answer | None, error: Exception | None) -> None:
            if found is not None and found["source"] in ("peer", "remote"):
                self._steps.rescan()
            tell(found, error)

        self._pool.ask(work, then)

    def _requeue(self, lane: Lane, reason: str) -> None:
        self._serial += 1
        number = f"r{self._serial}"
        self._asked[number] = lane
        if not self._to_daemon({"op": "requeue", "id": number, "reason": reason[:500]}):
            self.requeued({"id": number, "ok": False, "error": "crater-io-daemon is not there."})

    def requeued(self, message: Answer) -> None:
        """The daemon's answer to a trainer's wish."""
        lane = self._asked.pop(str(message.get("id")), None)
        if lane is not None:
            error = str(message.get("error") or "")[:500]
            lane.send({"op": "requeued", "ok": message.get("ok") is True, "error": error or None})

    # What can be loaded; in a pool's thread

    def _local(self, name: str, ranks: list[int] | None) -> list[LocalStep]:
        """Steps in the cache that have the ranks asked for, or all of the world, newest first;
        none where it can't be read, since what is elsewhere can be loaded all the same."""
        try:
            here = self._tools.folder.scan()
        except OSError as failed:
            what = "what is in the cache is not known"
            self._tools.log("warning", faults.sentence(what, failed, self._tools.folder.path))
            here = []
        found = [
            step
            for step in here
            if step.name == name and (step.whole if ranks is None else step.ranks >= set(ranks))
        ]
        return sorted(found, key=lambda step: (step.step, step.time), reverse=True)

    def _available(self, name: str, ranks: list[int] | None) -> Answer:
        known = {(step.step, step.run): step.time for step in self._local(name, ranks)}
        error = None
        try:
            for step, run, time in self._services.available(name):
                known.setdefault((step, run), time)
        except Exception as failed:  # what lies here can be loaded all the same
            error = faults.sentence("what is at the destination is not known", failed, name)
        newest = sorted(known.items(), key=lambda item: (item[0][0], item[1]), reverse=True)
        steps = [[step, run, time] for (step, run), time in newest[:_MOST_SHOWN]]
        return {"name": name, "steps": steps, "error": error}

    def _restored(
        self, name: str, step: int | None, run: str | None, ranks: list[int] | None
    ) -> Answer:
        local = [
            found
            for found in self._local(name, ranks)
            if step in (None, found.step) and run in (None, found.run)
        ]
        damage = ""
        while local and (wrong := local[0].damage(ranks)):
            damage = damage or f"{name} {local[0].step} is damaged in the cache: {wrong}"
            self._tools.log("warning", f"{name} {local.pop(0).step} in the cache: {wrong}.")
        if step is not None and run is not None and local:
            return self._from_cache(local[0])
        wanted = self._elsewhere(name, step, run)
        if local and (wanted is None or _key(wanted) <= _key(_triple(local[0]))):
            return self._from_cache(local[0])
        if wanted is None:
            return dict.fromkeys(("step", "run", "folder", "source")) | {"error": damage or None}
        try:
            folder, source = self._services.fetch(name, wanted[0], wanted[1], ranks)
        except Exception as failed:
            if not local or step is not None:
                raise
            what = f"{name} {wanted[0]} could not be brought here"
            self._tools.log("warning", faults.sentence(what, failed, "the destination"))
            return self._from_cache(local[0])
        hit = "cache_hits" if source == "cache" else "cache_misses"
        self._tools.counters[hit] += 1
        return {"step": wanted[0], "run": wanted[1], "folder": folder, "source": source}

    def _elsewhere(
        self, name: str, step: int | None, run: str | None
    ) -> tuple[int, str, float] | None:
        """The newest that can be brought, of the step and run asked for; None when none can."""
        try:
            offered = self._services.available(name)
        except Exception as failed:
            what = "what is at the destination is not known"
            self._tools.log("warning", faults.sentence(what, failed, "the destination"))
            return None
        fits = [o for o in offered if step in (None, o[0]) and run in (None, o[1])]
        return max(fits, key=_key, default=None)

    def _from_cache(self, step: LocalStep) -> Answer:
        self._tools.counters["cache_hits"] += 1
        return {"step": step.step, "run": step.run, "folder": step.folder, "source": "cache"}

    def _stage(self, path: str) -> Answer:
        return {"local": self._services.stage(path)}

    # The daemon

    def command(self, send: Callable[[Answer], None], message: Answer) -> None:
        """A question of ``crater checkpoints``, answered with its ``id``."""
        operation, number = message["op"], message.get("id")
        if operation == "status":
            send({"op": "answer", "id": number, **self.status()})
        elif operation in ("list", "show", "verify"):
            view = self._overview
            self._pool.ask(lambda: view.answer(message), _then(send, "answer", id=number))
        elif operation == "restore":
            self._restore(lambda found: send({**found, "op": "answer", "id": number}), message)
        else:
            work = self._services.command
            self._pool.ask(lambda: work(message), _then(send, "answer", id=number))

    def status(self) -> Answer:
        """What is there, for people."""
        spec, steps = self._tools.spec, self.steps()
        return {
            "run": spec.run,
            "folder": spec.folder,
            "destination": spec.remote.url,
            "steps": steps,
            "saving": [
                {"name": s.name, "step": s.step, "ranks": len(s.ranks), "local": s.local}
                for s in self._steps.waiting.values()
            ],
            "failed": list(self._steps.errors.values())[-5:],
        }

    def steps(self) -> list[Answer]:
        """The steps as the daemon keeps them, the newest last."""
        newest = sorted(self._steps.complete.values(), key=lambda s: (s.time, s.step))
        return [
            {
                "name": s.name,
                "step": s.step,
                "run": s.run,
                "bytes": s.bytes,
                "local": True,
                "flushed": self._safe(s),
                **self._arrival(s),
                "error": self._services.error(s.name, s.step, s.run)[:300],
            }
            for s in newest[-_MOST_SHOWN:]
        ]

    def _arrival(self, step: LocalStep) -> Answer:
        """Of a step that lies at the destination: how many of the world's ranks this node brought
        there. They are told to whoever waits for the step to be complete."""
        ranks = step.ranks_of(self._tools.spec.node)
        if not ranks or not self._services.arrived(step.name, step.step, step.run):
            return {}
        return {"arrived": len(ranks), "world": step.parts[0].world_size}

    def unflushed(self) -> int:
        """Steps that are not at the destination, though this node should bring them there."""
        return sum(not self._safe(step) for step in list(self._steps.complete.values()))

    def _safe(self, step: LocalStep) -> bool:
        """Whether it is at the destination, or there is none, or it is other nodes' to flush."""
        return not step.own(self._tools.spec.node) or self._services.flushed(
            step.name, step.step, step.run
        )


def _key(found: tuple[int, str, float]) -> tuple[int, float]:
    return found[0], found[2]


def _triple(step: LocalStep) -> tuple[int, str, float]:
    return step.step, step.run, step.time


def _ranks(message: dict[str, object]) -> list[int] | None:
    """The ranks that a question is about; None for all. Raises WireError."""
    ranks = message.get("ranks")
    if ranks is None:
        return None
    if not isinstance(ranks, list) or not ranks or len(ranks) > 10000:
        raise WireError("use ranks: a list of ranks belongs there, or nothing for all")
    return sorted(
        wire.whole({"rank": rank}, "rank", _MOST_RANKS) for rank in set(map(_hashed, ranks))
    )


def _hashed(rank: object) -> object:
    return rank if isinstance(rank, int) else repr(rank)[:40]


def _then(
    send: Callable[[Answer], None], operation: str, **known: Any
) -> Callable[[Answer | None, Exception | None], None]:
    """Send what a pool found, or in a sentence why it found nothing."""

    def then(found: Answer | None, error: Exception | None) -> None:
        answer: Answer = {"op": operation, **known, "error": None, **(found or {})}
        if error is not None:
            answer["error"] = faults.sentence("It was not found", error, "the cache")[:1000]
        send(answer)

    return then
