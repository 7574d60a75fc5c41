"""What a worker has beyond its cache: the flush, the rules of keeping, restores, staged data.

``Onward`` is the worker's Services for a job with a destination or with data to stage. It decides
nothing itself; each part has its module.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from crater_slurm.checkpoint import away, keep, remote, restore
from crater_slurm.checkpoint.flush import Flusher
from crater_slurm.checkpoint.flush_state import FLUSHED, SKIPPED
from crater_slurm.checkpoint.folder import LocalStep
from crater_slurm.checkpoint.rate import TokenBucket
from crater_slurm.checkpoint.remote.store import StoppedError
from crater_slurm.checkpoint.services import AwayFile
from crater_slurm.checkpoint.spec import Spec
from crater_slurm.checkpoint.stage import Stager
from crater_slurm.checkpoint.stage_copy import StageError
from crater_slurm.checkpoint.threads import Log
from crater_slurm.job import layout
from crater_slurm.job.layout import Manifest

#: Of steps on their way so many are told, the newest.
_MOST_SHOWN = 60


class Onward:
    """One job's. Made before the rights are given up, started after."""

    def __init__(
        self, spec: Spec, changed: Callable[[], None], log: Log, rate: TokenBucket | None = None
    ) -> None:
        self._spec = spec
        self._changed = changed
        self._log = log
        self._rate = rate or TokenBucket(spec.rate_bytes_s)
        self._flusher = Flusher(spec, lambda _: changed(), log, limiter=self._rate)
        self._stager = Stager(
            spec,
            lambda _: changed(),
            log,
            limiter=self._rate,
            limit_bytes=spec.quota_bytes,
        )
        self._stop = threading.Event()
        for url in (spec.remote.url, *spec.stage):
            remote.preload(url)  # the job's user may not be able to read the libraries
        self._busy: set[tuple[str, int]] = set()
        self._fetching = threading.Lock()
        self._counters: defaultdict[str, float] = defaultdict(float)

    def start(self) -> None:
        self._flusher.start()
        self._stager.start()

    def stop(self) -> None:
        self._stop.set()
        self._flusher.stop(0)
        self._stager.stop(0)

    def ended(self) -> None:
        self._stager.stop(0)

    def peer(self, plain: socket.socket, node: str, may_put: bool) -> None:
        plain.close()  # copies are WithCopies's

    def saved(self, folder: str, manifest: Manifest) -> None:
        self._flusher.add(folder, manifest)

    @property
    def idle(self) -> bool:
        return self._flusher.idle and self._stager.idle

    def flushed(self, name: str, step: int, run: str) -> bool:
        return not self._spec.remote.url or self._flusher.safe(name, step, run)

    def arrived(self, name: str, step: int, run: str) -> bool:
        return self._flusher.arrived(name, step, run)

    def error(self, name: str, step: int, run: str) -> str:
        return self._flusher.error(name, step, run)

    def counters(self) -> dict[str, float]:
        staged = self._stager.counters
        return {
            **self._flusher.counters(),
            **self._counters,
            "staged_hits": staged["cache_hits"],
            "staged_misses": staged["cache_misses"],
        }

    def removable(self, steps: Sequence[LocalStep], over_bytes: int) -> list[LocalStep]:
        """By the rules of keeping; what is not at the destination stays while there is one."""
        spec = self._spec
        most = _most_ranks(steps, spec)
        by_item = {self._item(step, most): step for step in steps}
        items = list(by_item)
        last = spec.keep_last
        if last and not spec.remote.url and len(spec.nodes) > 1:
            last += 1  # another node may not have the newest yet: the one before is complete
        gone = keep.removable(items, last, spec.keep_every)
        whole = [item for item in items if item.complete]
        gone += [
            item
            for item in items
            if not item.complete and item.safe and not item.busy
            and keep.superseded(item, whole, last, spec.keep_every)
        ]  # fmt: skip
        if over_bytes and spec.remote.url:
            gone += [item for item in keep.evictable(items) if item not in gone]
        found = [by_item[item] for item in gone]
        for step in found:
            self._flusher.forget(step.name, step.step, step.run)
        return found

    def _item(self, step: LocalStep, most: dict[tuple[str, int], int]) -> keep.Item:
        known = self.flushed(step.name, step.step, step.run)
        safe = known or not step.own(self._spec.node)
        busy = (step.name, step.step) in self._busy
        own = _own_parts(step, self._spec.node)
        # What trainers write themselves comes rank by rank, and may have been broken off.
        alone = bool(own) and all(len(part.files) == 1 for part in own)
        complete = step.whole or not alone or len(own) >= most[step.name, own[0].world_size]
        key = step.name, step.step, step.run, step.time
        return keep.Item(*key, complete=complete, safe=safe, busy=busy)

    def available(self, name: str) -> list[tuple[int, str, float]]:
        return [(a.step, a.run, a.time) for a in restore.available(self._spec, name)]

    def fetch(self, name: str, step: int, run: str, ranks: list[int] | None) -> tuple[str, str]:
        self._busy.add((name, step))
        came: list[int] = []
        began = time.monotonic()
        try:
            with self._fetching:  # all ranks of a node ask at once
                folder = restore.fetch(
                    *(self._spec, name, step, run, ranks),
                    stop=self._stop,
                    limiter=self._rate,
                    progress=came.append,
                )
        except StoppedError:
            raise InterruptedError(4, "the worker ends") from None
        except OSError as error:
            return self._where_it_lies(name, step, run, error), "remote"
        finally:
            self._busy.discard((name, step))
        if not came:
            return folder, "cache"
        self._counters["restored"] += 1
        self._counters["restored_bytes"] += sum(came)
        self._counters["restore_seconds"] += time.monotonic() - began
        for part in layout.read_parts(folder):
            if part.node == self._spec.node:
                self._flusher.add(folder, part)
        self._log("info", f"{name} {step} of run {run} fetched from {self._spec.remote.url}.")
        return folder, "remote"

    def _where_it_lies(self, name: str, step: int, run: str, error: OSError) -> str:
        """The folder of a step that a full or faulty cache can't take: on a shared file system the
        job can read it itself. Raises the cache's error where it can't."""
        folder = restore.place(self._spec, name, step, run)
        if folder is None:
            raise error
        self._log(
            "warning",
            f"{name} {step} is read at {folder}, since the cache can't take it ({error.strerror}).",
        )
        return folder

    def open_away(self, name: str, step: int, run: str, rank: int) -> AwayFile:
        found = away.open_file(self._spec, name, step, run, rank, self._rate)
        self._counters["restored"] += 1
        self._counters["restored_bytes"] += found.manifest.size
        self._log(
            "warning",
            f"{name} {step} of rank {rank} is read at {found.where} past the cache.",
        )
        return found

    def stage(self, path: str) -> str:
        found = self._stager.lookup(path)
        self._changed()  # a counter
        if not found.local:
            raise StageError(found.error)
        return found.local

    def command(self, message: dict[str, Any]) -> dict[str, Any]:
        """``flush`` (of a step, or all that failed), ``flushing`` (what is not at the destination,
        as much as a message holds), ``onward`` (all states, for this process)."""
        operation = message.get("op")
        if operation in ("flush", "flushing") and not self._spec.remote.url:
            return {"error": "This job has no destination: its checkpoints stay on the node."}
        if operation == "flush":
            step, name = message.get("step"), message.get("name", "step")
            wanted = step if type(step) is int else None
            if not self._flusher.flush_now(wanted, str(name)):
                return {"error": f"There is no part of {name} {wanted} here to be flushed."}
            return self._flushing()
        if operation == "flushing":
            return self._flushing()
        if operation == "onward":
            return {"steps": self._flusher.state(), "staged": self._stager.state()}
        return {"error": f"The worker knows no operation {operation!s:.40}."}

    def _flushing(self) -> dict[str, Any]:
        steps = [s for s in self._flusher.state() if s["state"] not in (FLUSHED, SKIPPED)]
        shown = [{**step, "error": step["error"][:300]} for step in steps[-_MOST_SHOWN:]]
        return {"destination": self._spec.remote.url, "steps": shown, "count": len(steps)}


def _own_parts(step: LocalStep, node: str) -> list[Manifest]:
    return [part for part in step.parts if part.node == node]


def _most_ranks(steps: Sequence[LocalStep], spec: Spec) -> dict[tuple[str, int], int]:
    """How many ranks of this node save steps of a name and world size, by the fullest. On one of
    several nodes a step with the whole world has been brought here, and tells nothing."""
    most: defaultdict[tuple[str, int], int] = defaultdict(int)
    for step in steps:
        own = _own_parts(step, spec.node)
        if own and not (step.whole and len(spec.nodes) > 1):
            key = step.name, own[0].world_size
            most[key] = max(most[key], len({rank for part in own for rank in part.ranks}))
    return most
