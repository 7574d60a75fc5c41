"""The ring's door: where trainers ask for a lane. Checks who they are, then gives them away.

Anyone on the node may connect. The first message names a job; the kernel's word of the peer (uid,
cgroup) must fit it. The connection then goes to that job's worker, which answers, and nothing of
the trainer's stays here.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import threading
import time

from crater_slurm.job.wire import VERSION, Channel, WireError, text, whole
from crater_slurm.node import ring_access, worker_spec
from crater_slurm.node.jobs import PREPARED, JobRecord
from crater_slurm.node.listener import TIMEOUT_SECONDS, Listener
from crater_slurm.node.request import Peer, RequestError
from crater_slurm.node.services import Services
from crater_slurm.node.worker import WorkerError
from crater_slurm.node.workers import Workers

_log = logging.getLogger("crater.node.rings")

_JOB = re.compile(r"[0-9]{1,20}\Z")
_MOST_RANKS = 10**6
_MOST_BYTES = 1 << 50
#: Of the room there is at this moment a lane never takes more, whatever earlier lanes got.
_MOST_OF_ROOM = 0.9
#: Lines in the log about refusals; the rest of a storm is not worth the disk.
_LOGS_PER_MINUTE = 30


class Rings(Listener):
    """Listens at ``node.checkpoints.ring_socket``."""

    def __init__(
        self, services: Services, workers: Workers, timeout: float = TIMEOUT_SECONDS
    ) -> None:
        super().__init__(worker_spec.ring_path(services), socket.SOCK_SEQPACKET, timeout)
        self._services = services
        self._workers = workers
        self._shares: dict[tuple[str, int], int] = {}
        self._shares_lock = threading.Lock()
        self._logs, self._logs_since = 0, 0.0

    def _talk(self, connection: socket.socket, peer: Peer) -> None:
        channel = Channel(connection)
        fds: list[int] = []
        with connection:
            try:
                connection.settimeout(self._timeout)
                message, fds = channel.receive()
                self._hand_over(connection, peer, message, fds)
            except (RequestError, WireError, WorkerError) as error:
                self._refuse(channel, peer, f"couldn't {error}")
            except OSError as error:
                self._say(logging.INFO, f"couldn't talk to uid {peer.uid}: {error}")
            except Exception:
                _log.exception("rings: couldn't finish with uid %d", peer.uid)
            finally:
                for fd in fds:
                    os.close(fd)

    def _hand_over(
        self, connection: socket.socket, peer: Peer, message: dict[str, object], fds: list[int]
    ) -> None:
        record = self._record(message)
        roots = self._services.roots
        place = ring_access.check(record, peer, self._services.tree.root, roots.proc)
        lane = {
            "op": "lane",
            "open": message,
            "limit": self._limit(record, message, ring_access.room_bytes(place, roots.proc)),
            "pid": peer.pid,
        }
        connection.settimeout(None)
        connection.setblocking(True)
        self._workers.hand_over(record, lane, [connection.fileno(), *fds[:1]])

    def _record(self, message: dict[str, object]) -> JobRecord:
        """The record of the job that a first message names, which must be this one's right run."""
        if message["op"] != "open":
            raise RequestError(f"obey {message['op']!r:.40} before an open")
        if message.get("version") != VERSION:
            raise RequestError(
                f"speak version {message.get('version')!r:.20} of the ring; here it is {VERSION}"
            )
        job_id = text(message, "job")
        if not _JOB.match(job_id):
            raise RequestError(f"open the ring of job {job_id!r:.40}: that is no job id")
        record = self._services.store.get(job_id)
        if record is None or record.phase != PREPARED or record.boot != self._services.boot:
            raise RequestError(f"open the ring of job {job_id}: it is not running here")
        if not worker_spec.offered(self._services, record):
            raise RequestError(f"open the ring of job {job_id}: it has none")
        run = text(message, "run", record.run)
        if run != record.run:
            raise RequestError(f"open the ring of run {run!r:.40}: this is {record.run}")
        return record

    def _limit(self, record: JobRecord, message: dict[str, object], room: int) -> int:
        """Bytes of the lane at most. All ranks get the first one's share, while there is room:
        lanes that were touched already make it smaller."""
        ranks = whole(message, "local_world", _MOST_RANKS, 1)
        whole(message, "bytes", _MOST_BYTES)
        settings = self._services.settings.node.checkpoints
        ring = worker_spec.ring_bytes(self._services, record)
        now = int(min(ring, room * settings.ring_percent / 100)) // ranks
        key = (record.run, ranks)
        with self._shares_lock:
            for known in list(self._shares):
                other = self._services.store.get(known[0].partition(".")[0])
                if other is None or other.run != known[0]:
                    del self._shares[known]
            share = max(self._shares.get(key, 0), now)
            self._shares[key] = share
        return max(0, min(share, int(room * _MOST_OF_ROOM)))

    def _refuse(self, channel: Channel, peer: Peer, reason: str) -> None:
        self._say(logging.WARNING, f"uid {peer.uid}, process {peer.pid}: {reason}")
        with contextlib.suppress(OSError, WireError):
            channel.socket.settimeout(self._timeout)
            channel.send({"op": "error", "error": reason[:500]})

    def _say(self, level: int, what: str) -> None:
        now = time.monotonic()
        with self._shares_lock:
            if now - self._logs_since > 60:
                self._logs, self._logs_since = 0, now
            self._logs += 1
            quiet = self._logs > _LOGS_PER_MINUTE
        if not quiet:
            _log.log(level, "rings: %s", what)
