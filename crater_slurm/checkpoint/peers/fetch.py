"""Brings a complete checkpoint into this node's cache from the other nodes of the job.

Asked are the nodes of this run and, through them, of the job's earlier runs: after a node was lost
and Slurm gave the job another, its partner still holds what the lost one had. Every byte is
checked before a folder gets its final name; a source that fails is left for the next.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from crater_slurm.checkpoint.peers import survey
from crater_slurm.checkpoint.peers.checks import put_in_place, sync_folder
from crater_slurm.checkpoint.peers.frames import Header, TransportError, whole
from crater_slurm.checkpoint.peers.receive import DamagedError, Incoming
from crater_slurm.checkpoint.peers.serve import MOST_LIST, MOST_MANIFEST, Log, head
from crater_slurm.checkpoint.peers.store import Part, PeerStore, local_parts
from crater_slurm.checkpoint.peers.survey import Choice, Have
from crater_slurm.checkpoint.peers.ticket import is_node
from crater_slurm.checkpoint.peers.transport import Connection, refusal
from crater_slurm.checkpoint.sums import crc32
from crater_slurm.job import layout
from crater_slurm.job.layout import CHUNK_BYTES, LayoutError, Manifest

_ASKING_THREADS = 32
_MOST_NODES = 4096
_ANSWER_SECONDS = 60.0
_SURVEY_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Brought:
    """A complete checkpoint in this node's cache."""

    name: str
    step: int
    run: str
    folder: str
    fetched_bytes: int


class Fetcher:
    """``reach(node, address)`` opens a connection for questions, ``reach_data`` one for parts;
    ``addresses``: the job's other nodes."""

    def __init__(
        self,
        node: str,
        store: PeerStore,
        addresses: Callable[[], Mapping[str, str]],
        reach: Callable[[str, str], Connection],
        reach_data: Callable[[str, str], Connection],
        log: Log,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._node, self._store, self._log = node, store, log
        self._addresses, self._reach, self._reach_data = addresses, reach, reach_data
        self._learnt: dict[str, str] = {}
        self._lock = threading.Lock()
        self._surveyed: dict[str, tuple[float, list[Have]]] = {}

    def survey(self, name: str) -> list[Have]:
        """What this node and all that can be reached have of a kind of checkpoints."""
        found = [self._have(part) for part in self._here() if part.manifest.name == name]
        asked: set[str] = {self._node}
        self._learnt = dict(self._addresses())
        with ThreadPoolExecutor(_ASKING_THREADS) as pool:
            while new := [n for n in self._learnt if n not in asked][:_MOST_NODES]:
                asked.update(new)
                for haves, others in pool.map(lambda node: self._ask(node, name), new):
                    found += haves
                    for node, address in others.items():
                        if len(self._learnt) < _MOST_NODES:
                            self._learnt.setdefault(node, address)
        return found

    def available(self, name: str) -> list[tuple[int, str, float]]:
        """(step, run, time) of what the nodes hold together, the newest first. What was found is
        good for a moment: all ranks of a node ask at once."""
        with self._lock:
            at, found = self._surveyed.get(name, (float("-inf"), []))
            if self._clock() - at > _SURVEY_SECONDS:
                found = self.survey(name)
                self._surveyed[name] = self._clock(), found
        return [(c.step, c.run, c.time) for c in survey.complete(found, self._node, name)]

    def bring(
        self,
        name: str,
        step: int | None = None,
        ranks: Iterable[int] | None = None,
        run: str | None = None,
    ) -> Brought | None:
        """Have the newest complete checkpoint (or that of a step) here, with all its ranks or
        these; None when the nodes do not hold one together. Raises TransportError when they do
        and it could not be brought, OSError by the disk. One at a time: who asks for the same a
        moment later finds it here."""
        with self._lock:
            choice = survey.choose(self.survey(name), self._node, name, step, run)
            return self._bring(choice, ranks) if choice else None

    def _bring(self, choice: Choice, ranks: Iterable[int] | None) -> Brought:
        parts, fetched = [], 0
        for sources in survey.needed(choice, ranks):
            part, length = self._part(choice, sources)
            parts.append(part)
            fetched += length
        folder = _assemble(self._store.folder, choice, parts)
        self._store.drop_fetched()  # its files live on in the step's own folder
        return Brought(choice.name, choice.step, choice.run, folder, fetched)

    def _here(self) -> list[Part]:
        return [*local_parts(self._store.folder), *self._store.all()]

    def _have(self, part: Part) -> Have:
        (have,) = survey.read_heads(self._node, json.dumps([head(part)]).encode())
        return have

    def _ask(self, node: str, name: str) -> tuple[list[Have], dict[str, str]]:
        try:
            with contextlib.closing(self._reach(node, self._learnt[node])) as connection:
                connection.send({"op": "ask", "name": name})
                header, data = connection.receive(MOST_LIST, _ANSWER_SECONDS)
                if header["op"] != "parts":
                    raise TransportError(f"ask: {refusal(header)}")
                return survey.read_heads(node, bytes(data)), _addresses(header.get("others"))
        except TransportError as error:
            self._log("info", f"peers: couldn't {error} ({node})")
            return [], {}

    def _part(self, choice: Choice, sources: tuple[Have, ...]) -> tuple[Part, int]:
        """A part on this node's disk, and the bytes that came over the network for it."""
        problems = []
        for have in sources:
            try:
                if have.node == self._node:
                    return self._own(have), 0
                return self._fetch(have)
            except (TransportError, DamagedError, LayoutError) as error:
                problems.append(f"{have.node}: couldn't {error}")
                self._log("warning", f"peers: step {choice.step} from {problems[-1]}")
        raise TransportError(f"have step {choice.step}: {'; '.join(problems)}")

    def _own(self, have: Have) -> Part:
        """A part that is here, once its bytes have been found good."""
        for part in self._here():
            if part.owner == have.owner and self._have(part) == have:
                for entry in part.manifest.files:
                    path = os.path.join(part.path, entry.name)
                    if problem := layout.check_file(path, entry, crc32):
                        raise DamagedError(f"use the copy here: {problem}")
                return part
        raise DamagedError("find it here any more")

    def _fetch(self, have: Have) -> tuple[Part, int]:
        wanted: Header = {
            **{key: getattr(have, key) for key in ("owner", "name", "step", "run")},
            "rank": min(have.ranks),
        }
        address = self._learnt[have.node]
        with contextlib.closing(self._reach_data(have.node, address)) as connection:
            connection.send({"op": "part", **wanted})
            header, data = connection.receive(MOST_MANIFEST, _ANSWER_SECONDS)
            if header["op"] != "part":
                raise TransportError(f"fetch it: {refusal(header)}")
            manifest = Manifest.from_json(bytes(data))
            same = (manifest.name, manifest.step, manifest.run, frozenset(manifest.ranks))
            if same != (have.name, have.step, have.run, have.ranks):
                raise TransportError("fetch it: it is another part than was offered")
            if problem := self._store.room_for(have.origin, manifest):
                raise TransportError(f"fetch it: {problem}")
            return self._receive(connection, have, wanted, manifest)

    def _receive(
        self, connection: Connection, have: Have, wanted: Header, manifest: Manifest
    ) -> tuple[Part, int]:
        incoming = Incoming(self._store.fetched(have.origin), manifest)
        try:
            for file, entry in enumerate(manifest.files):
                connection.send({"op": "pull", **wanted, "file": entry.name})
                while True:
                    header, data = connection.receive(CHUNK_BYTES, _ANSWER_SECONDS)
                    if header["op"] == "end":
                        break
                    if header["op"] != "data":
                        raise TransportError(f"fetch it: {refusal(header)}")
                    incoming.write(file, whole(header, "piece", len(entry.sums) - 1), data)
            path = incoming.commit()
        finally:
            incoming.close()
        return Part(have.origin, path, manifest), manifest.size


def _addresses(text: object) -> dict[str, str]:
    """Addresses of further nodes, as another node told them."""
    try:
        told = json.loads(text) if isinstance(text, str) else {}
    except (ValueError, RecursionError):
        return {}
    if not isinstance(told, dict):
        return {}
    return {
        node: address
        for node, address in told.items()
        if is_node(node) and isinstance(address, str) and len(address) < 300
    }


def _assemble(folder: str, choice: Choice, parts: list[Part]) -> str:
    """The step's folder with all these parts in it, by hard links: made whole, then put in place.

    A part that is there already stays, whatever else the folder lacked.
    """
    step = layout.step_name(choice.step, choice.name)
    final = os.path.join(folder, step)
    there = [p for p in local_parts(folder) if p.path == final and p.manifest.run == choice.run]
    if all(part.path == final for part in parts):
        return final
    partial = os.path.join(folder, layout.partial_name(f"{step}.fetched"))
    shutil.rmtree(partial, ignore_errors=True)
    os.makedirs(partial, mode=0o700)
    for part in {layout.part_name(p.manifest.ranks): p for p in (*there, *parts)}.values():
        names = [entry.name for entry in part.manifest.files]
        for name in (*names, layout.part_name(part.manifest.ranks)):
            os.link(os.path.join(part.path, name), os.path.join(partial, name))
    sync_folder(partial)
    put_in_place(partial, final)
    return final
