"""What nodes report of themselves: profiles into the store, changes as events, health in memory.

A report is put over what is known (``store.merge``): an admin's values and measurements stay.
Health is kept as the newest per node: it is of the moment, and the next report is seconds away.
"""

from __future__ import annotations

import dataclasses
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from crater_slurm.errors import SlurmError
from crater_slurm.model import drives
from crater_slurm.model.health import DriveHealth, NodeHealth
from crater_slurm.model.profile import NodeProfile
from crater_slurm.slurm.munge import Credential
from crater_slurm.store.codec import profile_from_dict
from crater_slurm.store.drift import drift
from crater_slurm.store.health import health_from_dict
from crater_slurm.store.merge import merge
from crater_slurm.store.records import Event
from crater_slurm.store.repository import Store

_log = logging.getLogger("crater.scheduler.reports")
#: A drive counts as slow, or as well again, after so many reports in a row that say so: one slow
#: moment is no fault of the drive.
_IN_A_ROW = 3


@dataclass(slots=True)
class _Watch:
    """Whether a drive counts as slow: changes when so many reports in a row say otherwise."""

    slow: bool = False
    against: int = 0

    def see(self, slow: bool) -> bool:
        """Note a report; whether it changed what the drive counts as."""
        self.against = self.against + 1 if slow is not self.slow else 0
        if self.against < _IN_A_ROW:
            return False
        self.slow, self.against = slow, 0
        return True


class Reports:
    """Takes reports; safe to share between the API's threads."""

    def __init__(self, store: Callable[[], Store]) -> None:
        self._open_store = store
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._health: dict[str, NodeHealth] = {}
        self._profiles: dict[str, NodeProfile] = {}
        self._watches: dict[tuple[str, str], _Watch] = {}

    def health(self, node: str) -> NodeHealth | None:
        """The newest health of a node; None when it has not reported since this daemon started."""
        with self._lock:
            return self._health.get(node)

    def take_profile(self, node: str, data: Mapping[str, Any]) -> list[Event]:
        """Store a node's profile; the events that it made. Raises UsageError, StoreError."""
        reported = profile_from_dict(data, node)
        store = self._open_store()
        # Two reports of one node must not both be compared with the same old profile.
        with self._writing:
            old = store.profile(node)
            new = merge(old, reported)
            found = drift(old, new, time.time())
            store.save_profile(new)
            store.add_events(found)
        with self._lock:
            self._profiles[node] = new
        for event in found:
            _log.info("%s: %s", node, event.message)
        return found

    def take_health(self, node: str, data: Mapping[str, Any]) -> list[Event]:
        """Remember a node's health; the events that it made. Raises UsageError, StoreError."""
        health = health_from_dict(data, node)
        # By its own clock, but never from the future: a node whose clock runs ahead would still
        # look alive long after its last report.
        health = dataclasses.replace(health, time=min(health.time, time.time()))
        profile = self._profile(node)
        with self._lock:
            self._health[node] = health
            found = [
                event
                for drive in health.drives
                for event in self._watch_drive(node, profile, drive)
            ]
        if found:
            self._open_store().add_events(found)
        return found

    def _profile(self, node: str) -> NodeProfile | None:
        with self._lock:
            known = self._profiles.get(node)
        if known is None:
            known = self._open_store().profile(node)
            if known is not None:
                with self._lock:
                    self._profiles.setdefault(node, known)
        return known

    def _watch_drive(
        self, node: str, profile: NodeProfile | None, drive: DriveHealth
    ) -> list[Event]:
        """Events when a drive became slow, and when it is as it was again."""
        known = profile.nvmes if profile else ()
        calibrated = next((d.read_latency_us for d in known if d.name == drive.name), None)
        if calibrated is None or drive.latency_us is None:
            return []
        watch = self._watches.setdefault((node, drive.name), _Watch())
        changed = watch.see(drives.is_slow(drive.latency_us, calibrated))
        if not changed:
            return []
        was, now = f"{calibrated:g} µs", f"{drive.latency_us:g} µs"
        if watch.slow:
            kind = "nvme_slow"
            message = (
                f"{drive.name} answers {drive.latency_us / calibrated - 1:.0%} slower than when "
                "it was calibrated."
            )
        else:
            kind, message = "nvme_recovered", f"{drive.name} is as fast as it was again."
        path = f"nvmes.{drive.name}.read_latency_us"
        return [
            Event(
                node=node, time=time.time(), kind=kind, message=message, path=path, old=was, new=now
            )
        ]


def is_of_node(proof: Credential, node: str, ask: Callable[[str], Mapping[str, str]]) -> bool:
    """Whether a credential was made on the machine of a node.

    By name, or else by what Slurm says of the node (``ask`` gives its record). A name that can't be
    resolved, or a Slurm that does not answer, is a no.
    """
    if proof.host.split(".")[0] == node:
        return True
    try:
        record = ask(node)
    except SlurmError:
        return False
    names = {record.get("NodeHostName", ""), record.get("NodeAddr", "")} - {""}
    if proof.host in names or proof.host.split(".")[0] in names or proof.address in names:
        return True
    try:
        return any(proof.address == address for name in names for address in _addresses(name))
    except OSError:
        return False


def _addresses(name: str) -> set[str]:
    return {str(entry[4][0]) for entry in socket.getaddrinfo(name, None)}
