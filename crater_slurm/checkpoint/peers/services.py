"""Adds copies on other nodes to what a worker has beyond its cache (destination, datasets).

``WithCopies`` is a Services around another one. Restoring asks the job's nodes first, which are
near, then the destination. A lost node's parts go to the destination by a flusher of their own.
"""

from __future__ import annotations

import dataclasses
import os
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from crater_slurm.checkpoint.folder import LocalStep
from crater_slurm.checkpoint.peers.copies import Copies
from crater_slurm.checkpoint.peers.serve import Log
from crater_slurm.checkpoint.services import AwayFile, Services
from crater_slurm.checkpoint.spec import Spec
from crater_slurm.job.layout import Manifest

#: How often lost nodes' parts are looked after.
_ROUND_SECONDS = 60.0
#: How often it is looked whether this node's own part is at the destination.
_TELLING_SECONDS = 5.0
#: How long after the job's end a partner that can't be reached is still tried.
_LINGER_SECONDS = 120.0


class LostFlusher(Protocol):
    """What brings one lost node's parts to the destination; made for the folder they lie in."""

    def add(self, folder: str, manifest: Manifest) -> None:
        """Bring a part there; at once or later, again and again until it is."""

    def flushed(self, name: str, step: int, run: str) -> bool:
        """Whether it is there."""

    def stop(self) -> None:
        """Break off."""


MakeLostFlusher = Callable[[Spec], LostFlusher]


class WithCopies:
    """``inner`` is all else. ``make_flusher`` gets a Spec whose ``node`` is the lost one and whose
    ``folder`` holds its parts; None where there is no destination."""

    def __init__(
        self,
        spec: Spec,
        inner: Services,
        changed: Callable[[], None],
        log: Log,
        make_flusher: MakeLostFlusher | None = None,
        clock: Callable[[], float] = time.monotonic,
        round_seconds: float = _ROUND_SECONDS,
    ) -> None:
        self._spec, self._inner, self._changed, self._log = spec, inner, changed, log
        self._make_flusher, self._clock, self._round = make_flusher, clock, round_seconds
        self._counters: defaultdict[str, float] = defaultdict(float)
        self._lost: dict[str, LostFlusher] = {}
        self._given: list[tuple[str, str, Manifest]] = []
        #: This node's newest part of each name, until it is at the destination and that is told.
        self._own: dict[str, tuple[str, Manifest]] = {}
        self._copies: Copies | None = None
        self._ended = self._stopped = False
        self._look_at = self._ended_at = 0.0
        self._wake = threading.Condition()
        self._waiting = True

    def start(self) -> None:
        self._inner.start()
        self._copies = Copies(
            self._spec,
            log=self._log,
            is_flushed=self._is_flushed,
            flush=self._flush,
            on_sent=self._on_sent,
            clock=self._clock,
        )
        threading.Thread(target=self._look_after, name="peer-heir", daemon=True).start()

    def stop(self) -> None:
        with self._wake:
            self._stopped = True
            self._wake.notify_all()
        if self._copies:
            self._copies.close()
        for flusher in list(self._lost.values()):
            flusher.stop()
        self._inner.stop()

    def saved(self, folder: str, manifest: Manifest) -> None:
        self._inner.saved(folder, manifest)
        if self._copies:
            self._copies.on_saved(folder, manifest)
            if self._spec.remote.url:
                self._own[manifest.name] = folder, manifest

    def ended(self) -> None:
        self._inner.ended()
        with self._wake:
            self._ended, self._ended_at = True, self._clock()
            self._wake.notify_all()

    def peer(self, plain: socket.socket, node: str, may_put: bool) -> None:
        """A connection that the daemon took from another node's worker."""
        if self._copies:
            self._copies.take(plain, node, may_put)
        else:
            plain.close()

    @property
    def idle(self) -> bool:
        """After the end only once lost nodes' parts were looked after at least once. A copy that
        does not come about is waited for a while, not for ever."""
        late = self._ended and self._clock() - self._ended_at > _LINGER_SECONDS
        copies = self._copies is None or self._copies.idle or late
        return self._inner.idle and copies and not (self._ended and (self._waiting or self._own))

    def flushed(self, name: str, step: int, run: str) -> bool:
        return self._inner.flushed(name, step, run)

    def arrived(self, name: str, step: int, run: str) -> bool:
        return self._inner.arrived(name, step, run)

    def error(self, name: str, step: int, run: str) -> str:
        return self._inner.error(name, step, run)

    def counters(self) -> dict[str, float]:
        inner = self._inner.counters()
        both = inner.keys() | self._counters.keys()
        return {name: inner.get(name, 0) + self._counters.get(name, 0) for name in both}

    def removable(self, steps: Sequence[LocalStep], over_bytes: int) -> list[LocalStep]:
        """What the rules let go; where that is too little for a save, copies go as well."""
        found = self._inner.removable(steps, over_bytes)
        missing = over_bytes - sum(step.bytes for step in found)
        if over_bytes and missing > 0 and self._copies:
            self._copies.make_room(missing)
        return found

    def available(self, name: str) -> list[tuple[int, str, float]]:
        near = self._copies.available(name) if self._copies and not self._copies.alone else []
        try:
            far = self._inner.available(name)
        except Exception as error:
            if not near:
                raise
            self._log("warning", f"peers: only other nodes are asked for checkpoints: {error}")
            far = []
        return [*near, *(found for found in far if found[:2] not in {n[:2] for n in near})]

    def fetch(self, name: str, step: int, run: str, ranks: list[int] | None) -> tuple[str, str]:
        if self._copies and not self._copies.alone:
            began = self._clock()
            try:
                brought = self._copies.fetch(name, step, ranks, run)
            except Exception as error:  # the destination may have it all the same
                self._log("warning", f"peers: couldn't bring {name} {step} from nodes: {error}")
            else:
                if brought is not None:
                    if brought.fetched_bytes:
                        self._counters["peer_fetched_bytes"] += brought.fetched_bytes
                        self._counters["restored"] += 1
                        self._counters["restored_bytes"] += brought.fetched_bytes
                        self._counters["restore_seconds"] += self._clock() - began
                    return brought.folder, "peer" if brought.fetched_bytes else "cache"
        return self._inner.fetch(name, step, run, ranks)

    def open_away(self, name: str, step: int, run: str, rank: int) -> AwayFile:
        return self._inner.open_away(name, step, run, rank)

    def stage(self, path: str) -> str:
        return self._inner.stage(path)

    def command(self, message: dict[str, Any]) -> dict[str, Any]:
        """Also ``copies``: (step, run, time) of what the job's nodes hold together."""
        if message.get("op") == "copies" and self._copies and not self._copies.alone:
            return {"copies": self._copies.available(str(message.get("name")))}
        return self._inner.command(message)

    def _is_flushed(self, name: str, step: int, run: str) -> bool:
        return bool(self._spec.remote.url) and self._inner.flushed(name, step, run)

    def _on_sent(self, _: Manifest, count: int, seconds: float) -> None:
        self._counters["peer_copies"] += 1
        self._counters["peer_sent_bytes"] += count
        self._counters["peer_send_seconds"] += seconds
        self._changed()

    def _flush(self, node: str, folder: str, manifest: Manifest) -> None:
        if self._make_flusher is None:
            return
        if node not in self._lost:
            spec = dataclasses.replace(self._spec, node=node, folder=os.path.dirname(folder))
            self._lost[node] = self._make_flusher(spec)
        self._log("warning", f"peers: {node} is lost; step {manifest.step} of it is flushed here")
        self._lost[node].add(folder, manifest)
        self._given.append((node, folder, manifest))

    def _look_after(self) -> None:
        """In a thread of its own: it may wait for nodes that don't answer."""
        while not self._stopped:
            ended = self._ended
            try:
                waiting = self._one_round()
            except Exception as error:  # a defect of ours must not keep the worker for ever
                self._log("error", f"peers: couldn't look after lost nodes: {error!r}")
                waiting = False
            with self._wake:
                if ended:
                    self._waiting = waiting
                self._changed()
                wait = min(self._round, _TELLING_SECONDS) if self._own else self._round
                self._wake.wait_for(lambda: self._stopped or self._ended != ended, wait)  # noqa: B023

    def _one_round(self) -> bool:
        """Whether something of a lost node is still to come to the destination."""
        copies = self._copies
        if copies is None or self._make_flusher is None:
            self._own.clear()
            return False
        for folder, own in list(self._own.values()):
            known = own.name, own.step, own.run
            if self._inner.flushed(*known) or (self._ended and self._inner.idle):
                if self._own.get(own.name) == (folder, own):
                    del self._own[own.name]
                if self._inner.flushed(*known):
                    copies.on_flushed(folder, own)
        for node, folder, manifest in list(self._given):
            if self._lost[node].flushed(manifest.name, manifest.step, manifest.run):
                copies.on_flushed(folder, manifest)
                self._given.remove((node, folder, manifest))
        now = self._clock()
        if now >= self._look_at or self._ended:
            self._look_at = now + self._round
            return copies.look_after(self._ended)
        return False
