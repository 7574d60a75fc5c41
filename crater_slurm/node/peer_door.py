"""The door for other nodes' workers, joined to this daemon's records and workers."""

from __future__ import annotations

import logging
import socket

from crater_slurm.checkpoint.peers.frames import TransportError
from crater_slurm.node import worker_spec
from crater_slurm.node.jobs import JobRecord
from crater_slurm.node.peers import PeerServer
from crater_slurm.node.services import Services
from crater_slurm.node.worker import WorkerError
from crater_slurm.node.workers import Workers

_log = logging.getLogger("crater.node.peers")


def server_of(services: Services, workers: Workers) -> PeerServer | None:
    """The door for other nodes, by the settings; None where copies are off or it can't listen."""
    listen = services.settings.node.checkpoints.peer_listen

    def job(job_id: str) -> JobRecord | None:
        record = services.store.get(job_id)
        return record if record and worker_spec.offered(services, record) else None

    def hand_over(record: JobRecord, plain: socket.socket, node: str, may_put: bool) -> None:
        message = {"op": "peer", "node": node, "put": may_put}
        try:
            workers.hand_over(record, message, [plain.fileno()])
        except WorkerError as error:
            raise TransportError(str(error)) from error

    if not listen or not services.settings.node.checkpoints.enabled:
        return None
    try:
        return PeerServer(listen, keys=services.keys.keys, job=job, hand_over=hand_over)
    except OSError as error:
        _log.error("peers: couldn't listen at %s: %s; no copies are taken here", listen, error)
        return None
