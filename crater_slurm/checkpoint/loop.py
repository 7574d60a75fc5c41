"""The worker at work: connections, lanes and what comes back from the pools, in one thread.

It sleeps until something comes. Nothing here blocks: what may is in the pools, so a disk that
hangs keeps neither the daemon's questions nor another rank's messages waiting.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any

from crater_slurm.checkpoint.away import Streams
from crater_slurm.checkpoint.connection import Connection
from crater_slurm.checkpoint.control import Control, trusted
from crater_slurm.checkpoint.desk import Desk
from crater_slurm.checkpoint.disk import Block
from crater_slurm.checkpoint.folder import Leftover, LocalStep
from crater_slurm.checkpoint.keeping import Keeping
from crater_slurm.checkpoint.lanes import Budget, Lane
from crater_slurm.checkpoint.rate import TokenBucket
from crater_slurm.checkpoint.report import Report
from crater_slurm.checkpoint.services import Services
from crater_slurm.checkpoint.spec import Spec
from crater_slurm.checkpoint.steps import Steps
from crater_slurm.checkpoint.threads import Log, Mailbox, Pool
from crater_slurm.checkpoint.tools import make_tools
from crater_slurm.job import wire
from crater_slurm.job.layout import Manifest

MakeServices = Callable[[Spec, Callable[[], None], Log, TokenBucket], Services]

_STATE_S = 1.0
_SWEEP_S = 5.0
#: How long a worker that was told to go still finishes what is under way.
_GOODBYE_S = 2.0
_MOST_BYTES = 1 << 50


class Worker:
    """One job's. ``listener``: where the daemon connects; ``first``: its first connection."""

    def __init__(
        self, spec: Spec, listener: socket.socket, first: socket.socket, make: MakeServices
    ) -> None:
        self.spec = spec
        self._mailbox = Mailbox(self.log)
        self.tools = make_tools(spec, self._mailbox, self._on_written, self.log)
        self._questions = Pool("crater-desk", 2, self._mailbox)
        self._services = make(spec, self._on_change, self.log, self.tools.drain.bucket)
        self._steps = Steps(self.tools, self._live_ranks)
        self._steps.began = self._began
        self._steps.on_change = self._changed
        self._steps.on_saved = [self._on_saved]
        self._keeping = Keeping(self.tools, self._steps, self._services, self._mailbox)
        self._budget = Budget(spec.ring_bytes, spec.huge_pages)
        streams = Streams(self._services, self._mailbox)
        self._desk = Desk(
            *(self.tools, self._steps, self._services, self._questions, self._to_daemon, streams)
        )
        self._report = Report(self.tools, self._steps, self._services, self._budget, self._desk)
        self._lanes: list[Lane] = []
        self._early: list[tuple[dict[str, object], list[int]]] | None = []
        self._ended = self._dirty = self._cleaning = self._cleaned = False
        self._stop_at: float | None = None
        self._state_at = self._sweep_at = 0.0
        self._selector = selectors.DefaultSelector()
        self._watched: dict[Connection, int] = {}
        self._listener = listener
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._mailbox, selectors.EVENT_READ)
        self._control = Control(first, self._on_daemon)
        self._watch(self._control)

    # From anywhere

    def log(self, level: str, text: str) -> None:
        """A line for the daemon's journal; from any thread."""
        self._mailbox.post(self._log, level, text)

    def _log(self, level: str, text: str) -> None:
        if not self._to_daemon({"op": "log", "level": level, "text": text[-2000:]}):
            print(f"{level}: {text}", file=sys.stderr, flush=True)

    def _on_written(self, block: Block) -> None:
        if block.save is not None:
            self._mailbox.post(block.save.written, block)

    def _on_change(self) -> None:
        self._mailbox.post(self._changed)

    # The loop

    def run(self) -> None:
        """Work until there is nothing more to do."""
        signal.signal(signal.SIGTERM, lambda *_: self._mailbox.post(self._stop))
        self._services.start()
        folder, run_ = self.tools.folder, self.spec.run
        self.tools.clerk.ask(lambda: (folder.recover(run_), folder.scan()), self._on_first_look)
        while not self._over():
            for key, _ in self._selector.select(self._timeout()):
                self._serve(key.fileobj)
            self._tidy()
        self._goodbye()

    def _serve(self, source: Any) -> None:
        if source is self._mailbox:
            self._mailbox.run()
        elif source is self._listener:
            self._accept()
        elif not source.closed:
            source.flush()
            source.read()

    def _timeout(self) -> float | None:
        now = self.tools.clock()
        at = []
        if self._dirty and not self._control.closed:
            at.append(self._state_at + _STATE_S)
        if self._steps.sweep_needed:
            at.append(max(self._sweep_at, now))
        if self._stop_at is not None:
            at.append(self._stop_at)
        if (held_until := self._steps.held_until) is not None:
            at.append(held_until)
        return max(0.0, min(at) - now) if at else None

    def _tidy(self) -> None:
        """After each round: what is free, who is gone, what has changed, what time has decided."""
        self._steps.release_due()
        for lane in self._lanes:
            if lane.changed:
                lane.settle()
        for connection in [c for c in self._watched if c.closed]:
            self._selector.unregister(connection.fileno())
            del self._watched[connection]
            connection.dispose()
        self._lanes = [lane for lane in self._lanes if not self._is_over(lane)]
        now = self.tools.clock()
        if now >= self._sweep_at and (self._steps.sweep_needed or self._ended):
            self._sweep_at = now + _SWEEP_S
            self._steps.sweep(ended=self._ended)
            if self._steps.waiting:
                self._steps.rescan()
        if self._ended:
            self._steps.sweep(ended=True)
            self._clean()
        if self._dirty and now >= self._state_at + _STATE_S:
            self._send_state()
        for connection in self._watched:
            self._watch(connection)

    def _is_over(self, lane: Lane) -> bool:
        if lane.closed and not lane.pieces:
            lane.let_go()
        return lane.closed and lane.idle

    def _watch(self, connection: Connection) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.sending else 0)
        before = self._watched.get(connection)
        if before is None:
            self._selector.register(connection, events)
        elif before != events:
            self._selector.modify(connection, events)
        self._watched[connection] = events

    # The beginning and the end

    def _on_first_look(
        self, found: tuple[list[Leftover], list[LocalStep]] | None, error: Exception | None
    ) -> None:
        if error is not None or found is None:
            self.log("error", f"couldn't look into {self.spec.folder}: {error}")
        else:
            self._steps.recovered(found[0])
            self._steps.found(found[1])
        early, self._early = self._early or [], None
        for message, fds in early:
            self._new_lane(message, fds)
        self._keeping.apply()

    def _clean(self) -> None:
        """After the job's end, when all is settled: partial folders are nobody's any more."""
        if self._cleaning or self._early is not None or not self._quiet():
            return
        self._cleaning = True
        folder, run = self.tools.folder, self.spec.run

        def then(found: list[LocalStep] | None, error: Exception | None) -> None:
            self._cleaned = True
            if found is not None:
                self._steps.found(found)

        self.tools.clerk.ask(lambda: folder.clean(run), then)

    def _at_rest(self) -> bool:
        """Whether no thread is at work; steps may still wait for ranks."""
        tools = self.tools
        busy = tools.clerk.busy + tools.files.busy + tools.hashers.busy + self._questions.busy
        return not busy and not any(lane.writing for lane in self._lanes)

    def _quiet(self) -> bool:
        """Whether nothing is being saved."""
        waiting = self._steps.waiting or not all(lane.idle for lane in self._lanes)
        return self._at_rest() and not waiting

    @property
    def idle(self) -> bool:
        return self._quiet() and self._services.idle

    def _over(self) -> bool:
        if self._stop_at is not None:
            return self._at_rest() or self.tools.clock() >= self._stop_at
        return self._ended and self._cleaned and self.idle

    def _stop(self) -> None:
        """By SIGTERM: no new work; what lies in the lanes is announced anew to the next worker."""
        if self._stop_at is None:
            self._stop_at = self.tools.clock() + _GOODBYE_S
            self._services.stop()
            for lane in self._lanes:
                lane.close()

    def _goodbye(self) -> None:
        self._services.stop()
        self._send_state(done=self._stop_at is None)
        with contextlib.suppress(OSError):
            self._control.channel.socket.setblocking(True)
            self._control.channel.socket.settimeout(_GOODBYE_S)
            self._control.flush()

    # The daemon

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            if not trusted(connection):
                connection.close()
                return
            self._control.close()  # the newest counts
            self._control = Control(connection, self._on_daemon)
            self._watch(self._control)
            self._changed()

    def _to_daemon(self, message: dict[str, Any]) -> bool:
        self._control.send(message)
        return not self._control.closed

    def _on_daemon(self, message: dict[str, object], fds: list[int]) -> None:
        operation = message["op"]
        if operation == "lane":
            if self._early is None:
                self._new_lane(message, fds)
            else:
                self._early.append((message, list(fds)))
                fds.clear()
        elif operation == "ended":
            self._ended = True
            self._sweep_at = 0.0
            self._services.ended()
            self._changed()
        elif operation == "peer":
            if fds:
                plain = socket.socket(fileno=fds.pop(0))
                self._services.peer(plain, str(message.get("node")), message.get("put") is True)
        elif operation == "limits":
            self._limit(message)
        elif operation == "requeued":
            self._desk.requeued(message)
        elif operation == "spec":
            spec = Spec.from_json(str(message.get("spec")))
            self._limit({"ring_bytes": spec.ring_bytes, "rate_bytes_s": spec.rate_bytes_s})
        else:
            self._desk.command(self._answer, message)

    def _answer(self, message: dict[str, Any]) -> None:
        self._to_daemon(message)

    def _limit(self, message: dict[str, object]) -> None:
        if "ring_bytes" in message:
            self._budget.total = wire.whole(message, "ring_bytes", _MOST_BYTES)
        if "quota_bytes" in message:
            self.tools.room.quota_bytes = wire.whole(message, "quota_bytes", _MOST_BYTES)
        if "rate_bytes_s" in message:
            self.tools.drain.bucket.set_rate(wire.whole(message, "rate_bytes_s", _MOST_BYTES))
            self.tools.drain.wake()

    def _new_lane(self, message: dict[str, object], fds: list[int]) -> None:
        opening = message.get("open")
        if not fds or not isinstance(opening, dict) or self._stop_at is not None:
            for fd in fds:
                os.close(fd)
            fds.clear()
            return
        lane = Lane(
            socket.socket(fileno=fds.pop(0)), self.tools, self._steps, self._budget, self._desk
        )
        self._lanes.append(lane)
        self._watch(lane)
        try:
            limit = wire.whole(message, "limit", _MOST_BYTES)
            lane.open(opening, limit, fds[0] if fds else None)
        except wire.WireError as error:
            lane.mistake(f"The worker could not {error}.")
            lane.close()
        finally:
            while fds:
                os.close(fds.pop())
        self._changed()

    def _live_ranks(self) -> set[int]:
        """Ranks that are connected to save; who only asks has no memory."""
        return {lane.rank for lane in self._lanes if not lane.closed and lane.memory}

    def _began(self) -> dict[int, float]:
        """When the connected ranks' processes were started."""
        return {lane.rank: lane.began for lane in self._lanes if not lane.closed and lane.memory}

    # What the daemon and the trainers are told

    def _on_saved(self, folder: str, manifest: Manifest) -> None:
        self._services.saved(folder, manifest)
        self._keeping.apply()

    def _changed(self) -> None:
        self._dirty = True

    def _send_state(self, *, done: bool = False) -> None:
        self._dirty = False
        self._state_at = self.tools.clock()
        self._to_daemon(self._report.state(self._lanes, idle=self.idle, done=done))
