"""A node's RDMA device by rdma-core's pyverbs: queue pair, registered slots, completions.

Only the incoming slots can be written from outside, by the one queue pair they belong to. Whatever
is missing is an RdmaError, whose sentence the caller gives as the reason for using TCP.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import ipaddress
import mmap
import os
import secrets
import threading
from typing import TYPE_CHECKING, Any

from crater_slurm.checkpoint.peers.frames import Header, TransportError, text, whole

if TYPE_CHECKING:
    from crater_slurm.checkpoint.peers.transport import Carrier

_ACTIVE = 4
#: Retransmission after 4.096 us * 2^this, 7 times: about 4 s in all before a queue pair gives up.
_ACK_TIMEOUT = 17
_opening = threading.Lock()


class RdmaError(Exception):
    """RDMA can't be had here; a sentence."""


class Verbs:
    """The few names of pyverbs that are used; its enumerations moved between releases."""

    errors: tuple[type[Exception], ...] = (OSError,)

    def __init__(self) -> None:
        try:
            for name in ("device", "pd", "mr", "cq", "qp", "addr", "wr"):
                setattr(self, name, importlib.import_module(f"pyverbs.{name}"))
            try:
                self._enums = importlib.import_module("pyverbs.enums")
            except ImportError:
                self._enums = importlib.import_module("pyverbs.libibverbs_enums")
            self.errors = (
                importlib.import_module("pyverbs.pyverbs_error").PyverbsError,
                OSError,
            )
        except ImportError as error:
            raise RdmaError(
                f"RDMA needs rdma-core's pyverbs (Debian: python3-pyverbs): {error}."
            ) from error

    device: Any
    pd: Any
    mr: Any
    cq: Any
    qp: Any
    addr: Any
    wr: Any

    def enum(self, name: str, family: str) -> Any:
        """A constant, flat in older releases and inside its family in newer ones."""
        found = getattr(self._enums, name, None)
        return getattr(getattr(self._enums, family), name) if found is None else found


def preload() -> None:
    """Load pyverbs, if it is there, while this process may still read it."""
    with contextlib.suppress(RdmaError):
        Verbs()


class Completions:
    """A completion queue that is waited for by poll(2) on its channel's descriptor."""

    fd: int

    def __init__(self, verbs: Verbs, context: Any, entries: int) -> None:
        # pyverbs keeps the channel's descriptor to itself: it is the one that appears.
        with _opening:
            before = _event_descriptors()
            self._channel = verbs.cq.CompChannel(context)
            new = _event_descriptors() - before
        if len(new) != 1:
            raise RdmaError("The descriptor of an RDMA completion channel can't be told apart.")
        self.fd = new.pop()
        self.queue = verbs.cq.CQ(context, entries, None, self._channel, 0)
        self.queue.req_notify()

    def take(self) -> int:
        """How many have completed since; raises TransportError when one failed."""
        count = 0
        while True:
            found, works = self.queue.poll(16)
            for work in works or ():
                if work.status:
                    raise TransportError(f"go on: an RDMA operation failed with {work.status}")
            count += int(found)
            if found < 16:
                return count

    def rearm(self) -> None:
        """After ``fd`` had an event: take it, and ask for the next."""
        self._channel.get_cq_event(self.queue)
        self.queue.ack_events(1)
        self.queue.req_notify()

    def close(self) -> None:
        self.queue.close()
        self._channel.close()


def _event_descriptors() -> set[int]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if "infinibandevent" in os.readlink(f"/proc/self/fd/{name}"):
                found.add(int(name))
    return found


class Slots:
    """Registered memory, cut into slots."""

    def __init__(self, verbs: Verbs, domain: Any, carrier: Carrier, *, remote: bool) -> None:
        access = verbs.enum("IBV_ACCESS_LOCAL_WRITE", "ibv_access_flags")
        if remote:
            access |= verbs.enum("IBV_ACCESS_REMOTE_WRITE", "ibv_access_flags")
        self.bytes = carrier.slot_bytes
        self._map = mmap.mmap(-1, carrier.slots * carrier.slot_bytes)
        self._view = memoryview(self._map)
        anchor = ctypes.c_char.from_buffer(self._map)
        self.address = ctypes.addressof(anchor)
        del anchor
        self.region = verbs.mr.MR(domain, len(self._map), access, self.address)

    def view(self, slot: int) -> memoryview:
        return self._view[slot * self.bytes : (slot + 1) * self.bytes]

    def close(self) -> None:
        self.region.close()
        self._view.release()
        with contextlib.suppress(BufferError):  # a caller still holds a piece: freed with it
            self._map.close()


class Endpoint:
    """This end's device, queue pair and slots, not yet joined to another's. Raises RdmaError."""

    def __init__(self, carrier: Carrier) -> None:
        self.carrier = carrier
        self.verbs = verbs = Verbs()
        self.incoming: Slots
        self.outgoing: Slots
        self.sent: Completions
        self.arrived: Completions
        self._parts: list[Any] = []
        try:
            self._open(verbs)
        except verbs.errors as error:
            self.close()
            raise RdmaError(f"RDMA device {carrier.device} can't be used: {error}.") from error
        except BaseException:
            self.close()
            raise

    def _open(self, verbs: Verbs) -> None:
        carrier = self.carrier
        context = self._keep(verbs.device.Context(name=carrier.device))
        port = context.query_port(carrier.port)
        if port.state != _ACTIVE:
            raise RdmaError(
                f"RDMA device {carrier.device} can't be used: port {carrier.port} is not active."
            )
        self.lid, self.mtu = port.lid, port.active_mtu
        self.gid = str(context.query_gid(carrier.port, carrier.gid_index))
        if not set(self.gid) - set("0:"):  # a free place of the table: no error to rdma-core
            raise RdmaError(
                f"RDMA device {carrier.device} can't be used: port {carrier.port} has no GID"
                f" {carrier.gid_index}."
            )
        domain = self._keep(verbs.pd.PD(context))
        self.incoming = self._keep(Slots(verbs, domain, carrier, remote=True))
        self.outgoing = self._keep(Slots(verbs, domain, carrier, remote=False))
        self.sent = self._keep(Completions(verbs, context, 2 * carrier.slots))
        self.arrived = self._keep(Completions(verbs, context, 2 * carrier.slots))
        room = verbs.qp.QPCap(max_send_wr=2 * carrier.slots, max_recv_wr=2 * carrier.slots)
        # Without a QPAttr: with one, pyverbs takes the pair to INIT without access rights.
        self.pair = self._keep(
            verbs.qp.QP(
                domain,
                verbs.qp.QPInitAttr(
                    qp_type=verbs.enum("IBV_QPT_RC", "ibv_qp_type"),
                    scq=self.sent.queue,
                    rcq=self.arrived.queue,
                    cap=room,
                ),
            )
        )
        self.first = secrets.randbelow(1 << 24)

    def _keep(self, part: Any) -> Any:
        self._parts.append(part)
        return part

    def card(self) -> Header:
        """What the other end must know."""
        return {
            "qpn": self.pair.qp_num,
            "psn": self.first,
            "gid": self.gid,
            "lid": self.lid,
            "mtu": int(self.mtu),
            "address": self.incoming.address,
            "rkey": self.incoming.region.rkey,
            "slots": self.carrier.slots,
            "slot_bytes": self.carrier.slot_bytes,
        }

    def join(self, card: Header) -> None:
        """Bring the queue pair up towards the owner of ``card``, ready to receive."""
        verbs, carrier = self.verbs, self.carrier
        try:
            number = int(ipaddress.IPv6Address(text(card, "gid", 64)))
        except ValueError as error:
            raise TransportError(f"use the RDMA address: {error}") from error
        # pyverbs reads eight groups of hexadecimal digits alone; Python writes some otherwise.
        gid = ":".join(f"{number >> shift & 0xFFFF:04x}" for shift in range(112, -1, -16))
        attributes = verbs.qp.QPAttr(port_num=carrier.port)
        attributes.dest_qp_num = whole(card, "qpn", (1 << 24) - 1)
        attributes.path_mtu = min(int(self.mtu), whole(card, "mtu", 5, 1))
        attributes.rq_psn, attributes.sq_psn = whole(card, "psn", (1 << 24) - 1), self.first
        attributes.max_rd_atomic = attributes.max_dest_rd_atomic = 1
        attributes.min_rnr_timer, attributes.rnr_retry = 12, 7
        attributes.timeout, attributes.retry_cnt = _ACK_TIMEOUT, 7
        attributes.qp_access_flags = verbs.enum("IBV_ACCESS_REMOTE_WRITE", "ibv_access_flags")
        route = verbs.addr.GlobalRoute(dgid=verbs.addr.GID(gid), sgid_index=carrier.gid_index)
        attributes.ah_attr = verbs.addr.AHAttr(
            gr=route, is_global=1, port_num=carrier.port, dlid=whole(card, "lid", 65535)
        )
        self.pair.to_rts(attributes)
        for _ in range(carrier.slots):
            self.expect()

    def expect(self) -> None:
        """Let one more write of the other end complete here."""
        # A write with immediate uses up a receive and touches none of its memory; one byte of it
        # must be named all the same.
        place = self.verbs.wr.SGE(self.incoming.address, 1, self.incoming.region.lkey)
        self.pair.post_recv(self.verbs.wr.RecvWR(num_sge=1, sg=[place]))

    def write(self, slot: int, length: int, address: int, rkey: int) -> None:
        """Start writing a slot of ours to an address of the other end."""
        verbs = self.verbs
        place = self.outgoing.address + slot * self.outgoing.bytes
        work = verbs.wr.SendWR(
            opcode=verbs.enum("IBV_WR_RDMA_WRITE_WITH_IMM", "ibv_wr_opcode"),
            num_sge=1,
            sg=[verbs.wr.SGE(place, length, self.outgoing.region.lkey)],
        )
        work.set_wr_rdma(rkey, address)
        self.pair.post_send(work)

    def close(self) -> None:
        while self._parts:
            part = self._parts.pop()
            with contextlib.suppress(*self.verbs.errors):
                part.close()
