"""What a job's worker needs for copies on other nodes: their addresses, and a ticket.

Only the ticket goes to the worker, which is the user; the plan key stays with the daemon.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from crater_slurm.checkpoint.peers.ring import partner_of
from crater_slurm.checkpoint.peers.ticket import Ticket, TicketError, is_node, issue
from crater_slurm.node.jobs import JobRecord

if TYPE_CHECKING:  # a ticket alone needs none of it
    from crater_slurm.node.services import Services

_log = logging.getLogger("crater.node.peers")

#: A worker's ticket outlives any job's flush; a restarted daemon or worker gets a new one.
TICKET_SECONDS = 30 * 86400
#: Addresses of so many other nodes go into a spec, which is one message.
_MOST_PEERS = 256


def fields(services: Services, record: JobRecord, nodes: tuple[str, ...]) -> dict[str, Any]:
    """What a Spec says of copies on other nodes; nothing where they are off."""
    settings = services.settings.node.checkpoints
    if not settings.peer_listen or not record.node:
        return {}
    partner = partner_of(nodes, record.node)
    token = ticket_for(record, [partner] if partner else [], services.keys.keys(), time.time())
    port = settings.peer_listen.rpartition(":")[2]
    others = [node for node in _near(nodes, record.node) if is_node(node)]
    addresses = {node: f"{settings.peer_host.replace('%n', node)}:{port}" for node in others}
    return {"peers": addresses, "token": token, "transport": settings.peer_transport}


def _near(nodes: tuple[str, ...], node: str) -> list[str]:
    """The other nodes, those that follow in the ring first; of a huge job the nearest only, which
    have its copies."""
    at = nodes.index(node) if node in nodes else 0
    ring = [*nodes[at + 1 :], *nodes[:at]]
    if len(ring) > _MOST_PEERS:
        ring = [*ring[: _MOST_PEERS // 2], *ring[-_MOST_PEERS // 2 :]]
    return ring


def ticket_for(
    record: JobRecord, partners: Iterable[str], keys: tuple[bytes, ...], now: float
) -> str:
    """The ticket that this node's worker of a job shows to others; "" without a plan key."""
    if not keys or not record.node:
        return ""
    ticket = Ticket(
        record.job_id,
        record.cluster,
        record.uid,
        record.node,
        tuple(partner for partner in partners if partner != record.node),
        int(now) + TICKET_SECONDS,
    )
    try:
        return issue(ticket, keys[0])
    except TicketError as error:
        _log.warning("peers: job %s: %s", record.job_id, error)
        return ""
