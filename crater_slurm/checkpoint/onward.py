"""What a worker has beyond its cache: the flush, the rules of keeping, restores, staged data.

``Onward`` is the worker's Services for a job with a destination or with data to stage. It decides
nothing itself; each part has its module.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from crater_slurm.checkpoint import keep, remote, restore
from crater_slurm.checkpoint.flush import Flusher
from crater_slurm.checkpoint.folder import LocalStep
from crater_slurm.checkpoint.rate import TokenBucket
from crater_slurm.checkpoint.remote.store import StoppedError
from crater_slurm.checkpoint.spec import Spec
from crater_slurm.checkpoint.stage import Stager
from crater_slurm.checkpoint.stage_copy import StageError
from crater_slurm.checkpoint.threads import Log
from crater_slurm.job.layout import Manifest


class SharedRate:
    """A token bucket for many threads: ``take`` waits until the bytes may go."""

    def __init__(
        self,
        rate_bytes_s: int,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._bucket = TokenBucket(rate_bytes_s, clock)
        self._lock = threading.Lock()
        self._sleep = sleep

    def set_rate(self, rate_bytes_s: int) -> None:
        """Another rate from now on; 0 is none."""
        with self._lock:
            self._bucket.set_rate(rate_bytes_s)

    def take(self, count: int) -> None:
        """Count bytes, after waiting for those before."""
        while True:
            with self._lock:
                delay = self._bucket.delay_s()
                if delay <= 0:
                    self._bucket.take(count)
                    return
            self._sleep(min(delay, 0.5))


class Onward:
    """One job's. Made before the rights are given up, started after."""

    def __init__(self, spec: Spec, changed: Callable[[], None], log: Log) -> None:
        self._spec = spec
        self._log = log
        self._rate = SharedRate(spec.rate_bytes_s)
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
        return self._flusher.idle

    def flushed(self, name: str, step: int, run: str) -> bool:
        return not self._spec.remote.url or self._flusher.safe(name, step, run)

    def error(self, name: str, step: int, run: str) -> str:
        return self._flusher.error(name, step, run)

    def counters(self) -> dict[str, float]:
        staged = self._stager.counters
        return {
            "staged_hits": staged["cache_hits"],
            "staged_misses": staged["cache_misses"],
            "flushed_bytes": self._flusher.flushed_bytes,
        }

    def removable(self, steps: Sequence[LocalStep], over_bytes: int) -> list[LocalStep]:
        """By the rules of keeping; what is not at the destination stays while there is one."""
        by_item = {self._item(step): step for step in steps}
        items = list(by_item)
        gone = keep.removable(items, self._spec.keep_last, self._spec.keep_every)
        if over_bytes and self._spec.remote.url:
            gone += [item for item in keep.evictable(items) if item not in gone]
        found = [by_item[item] for item in gone]
        for step in found:
            self._flusher.forget(step.name, step.step, step.run)
        return found

    def _item(self, step: LocalStep) -> keep.Item:
        safe = self.flushed(step.name, step.step, step.run)
        busy = (step.name, step.step) in self._busy
        return keep.Item(step.name, step.step, step.run, step.time, safe=safe, busy=busy)

    def available(self, name: str) -> list[tuple[int, str, float]]:
        return [(a.step, a.run, a.time) for a in restore.available(self._spec, name)]

    def fetch(self, name: str, step: int, run: str, ranks: list[int] | None) -> tuple[str, str]:
        self._busy.add((name, step))
        try:
            folder = restore.fetch(
                *(self._spec, name, step, run, ranks), stop=self._stop, limiter=self._rate
            )
        except StoppedError:
            raise InterruptedError(4, "the worker ends") from None
        except OSError as error:
            return self._where_it_lies(name, step, run, error), "remote"
        finally:
            self._busy.discard((name, step))
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

    def stage(self, path: str) -> str:
        found = self._stager.lookup(path)
        if not found.local:
            raise StageError(found.error)
        return found.local

    def command(self, message: dict[str, Any]) -> dict[str, Any]:
        """``flush`` (of a step, or all that failed), ``onward`` (states of flush and staging)."""
        operation = message.get("op")
        if operation == "flush":
            step, name = message.get("step"), message.get("name", "step")
            wanted = step if type(step) is int else None
            known = self._flusher.flush_now(wanted, str(name))
            if not known:
                return {"error": f"There is no part of step {wanted} here that could be flushed."}
            return {"steps": self._flusher.state()}
        if operation == "onward":
            return {"steps": self._flusher.state(), "staged": self._stager.state()}
        return {"error": f"The worker knows no operation {operation!s:.40}."}
