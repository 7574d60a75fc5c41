"""Brings a lost node's newest part to the destination in its place.

A node that kept a copy asks the owner, once the run is over or the owner is no longer in the job,
whether the part is at the destination. An owner that answers does its work itself. One that can't
be reached for a while is taken for lost, and its newest part is given to this node's flusher; when
it was only slow, both bring the same bytes to the same place. Refuses to decide anything by the
contents of the copies: they are checked where they are sent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from crater_slurm.checkpoint.peers.store import Part, PeerStore, key_of
from crater_slurm.job.layout import Manifest

GRACE_SECONDS = 600.0


class Heir:
    """``ask(node, manifest)``: whether the owner has flushed it, None when it can't be reached or
    has lost it too.
    ``flush(node, folder, manifest)`` begins to bring it to the destination."""

    def __init__(
        self,
        store: PeerStore,
        ask: Callable[[str, Manifest], bool | None],
        flush: Callable[[str, str, Manifest], None],
        clock: Callable[[], float] = time.monotonic,
        grace_seconds: float = GRACE_SECONDS,
    ) -> None:
        self._store, self._ask, self._flush = store, ask, flush
        self._clock, self._grace = clock, grace_seconds
        self._silent: dict[str, float] = {}
        self._given: set[str] = set()

    def tick(self, owners: Iterable[str]) -> bool:
        """Look after the parts of these owners; whether any is still to come to the destination.

        May take as long as a connection attempt for each owner; call it about once a minute.
        """
        waiting = False
        for node in owners:
            for part in self._newest(node):
                waiting |= not self._safe(node, part)
        return waiting

    def flushed(self, folder: str, manifest: Manifest) -> bool:
        """This node's flusher has brought a part; whether it was a lost node's."""
        for node in self._store.nodes():
            if folder.startswith(self._store.place(node) + "/"):
                self._store.mark_flushed(node, key_of(manifest))
                return True
        return False

    def _newest(self, node: str) -> list[Part]:
        found: dict[str, Part] = {}
        for part in self._store.parts(node):
            found.setdefault(part.manifest.name, part)
        return list(found.values())

    def _safe(self, node: str, part: Part) -> bool:
        key = key_of(part.manifest)
        if self._store.is_flushed(node, key):
            return True
        if f"{node} {key}" in self._given:
            return False
        answer = self._ask(node, part.manifest)
        if answer is not None:
            self._silent.pop(node, None)
            if answer:
                self._store.mark_flushed(node, key)
            return answer
        since = self._silent.setdefault(node, self._clock())
        if self._clock() - since >= self._grace:
            self._given.add(f"{node} {key}")
            self._flush(node, part.path, part.manifest)
        return False
