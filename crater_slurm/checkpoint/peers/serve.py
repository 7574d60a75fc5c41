"""What a worker does for another node of its job: takes its part, tells and gives what is here.

The daemon has checked who it is. What the other end says is checked nevertheless: it is another
process of the same user, and may be damaged or hostile. It can bring only its own node's parts and
read only this job's.

    put       session; manifest as data     -> want, have piece numbers as data, or refused
    data      file, piece; bytes            (no answer)
    end                                     -> got: all sent on this connection was written
    commit                                  -> stored
    ask       name                          -> parts: heads of the manifests here
    part      owner, name, step, run        -> part: the manifest as data
    pull      the same, file, pieces        -> data ... end
    state     name, step, run               -> state: flushed, here
    flushed   key                           -> ok
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable

from crater_slurm.checkpoint.peers.arrivals import Arrivals, NoRoomError
from crater_slurm.checkpoint.peers.checks import pieces
from crater_slurm.checkpoint.peers.frames import Header, TransportError, text, whole
from crater_slurm.checkpoint.peers.receive import DamagedError, Incoming
from crater_slurm.checkpoint.peers.store import Part, PeerStore, key_of, local_parts
from crater_slurm.checkpoint.peers.transport import Connection
from crater_slurm.job.layout import CHUNK_BYTES, LayoutError, Manifest

#: A manifest so long describes some 10 TB.
MOST_MANIFEST = 16 << 20
MOST_LIST = 16 << 20
#: A connection that says nothing for so long is ended.
_IDLE_SECONDS = 120.0

Log = Callable[[str, str], None]


class Service:
    """Serves one connection after another, or several in threads of the caller's."""

    def __init__(
        self,
        store: PeerStore,
        *,
        is_flushed: Callable[[str, int, str], bool],
        others: Callable[[], dict[str, str]],
        log: Log,
    ) -> None:
        self._store = store
        self._arrivals = Arrivals(store)
        self._is_flushed = is_flushed
        self._others = others
        self._log = log

    def serve(self, connection: Connection, node: str, may_put: bool) -> None:
        """Answer a node until it leaves. Never raises for what the other end does."""
        try:
            while True:
                header, data = connection.receive(MOST_MANIFEST, _IDLE_SECONDS)
                self._answer(connection, node, may_put, header, bytes(data))
        except TransportError as error:
            self._log("debug", f"peers: connection of {node} ended: couldn't {error}")
        except (OSError, LayoutError) as error:
            self._log("warning", f"peers: couldn't serve {node}: {error}")
            _try_to_say(connection, str(error))
        finally:
            connection.close()

    def _answer(
        self, connection: Connection, node: str, may_put: bool, header: Header, data: bytes
    ) -> None:
        operation = header["op"]
        if operation == "put":
            if not may_put:
                refuse(connection, "this node is not the partner that the ticket names")
            else:
                self._take(connection, node, text(header, "session", 64), data)
        elif operation == "ask":
            self._tell(connection, text(header, "name", 32))
        elif operation == "part":
            self._part(connection, header)
        elif operation == "pull":
            self._give(connection, header)
        elif operation == "state":
            words = text(header, "name", 32), whole(header, "step", 10**15), text(header, "run", 64)
            here = any(
                (p.manifest.name, p.manifest.step, p.manifest.run) == words
                for p in local_parts(self._store.folder)
            )
            connection.send({"op": "state", "flushed": self._is_flushed(*words), "here": here})
        elif operation == "flushed":
            self._store.mark_flushed(node, text(header, "key", 256).replace("\n", " "))
            connection.send({"op": "ok"})
        else:
            refuse(connection, f"no such operation: {operation[:40]!r}")

    def _take(self, connection: Connection, node: str, session: str, data: bytes) -> None:
        manifest = Manifest.from_json(data)
        try:
            with self._arrivals.join(node, session, manifest, connection) as incoming:
                wanted = json.dumps(incoming.missing(), separators=(",", ":")).encode()
                connection.send({"op": "want"}, [memoryview(wanted)])
                if self._pieces(connection, incoming):
                    self._store.prune(node, manifest.name)
                    self._log("info", f"peers: keeps {key_of(manifest)} of {node}")
                    connection.send({"op": "stored"})
        except NoRoomError as error:
            refuse(connection, str(error))
        except DamagedError as error:
            self._log("warning", f"peers: a part of {node} is cut off: {error}")
            _try_to_say(connection, str(error))
            raise TransportError(f"take a part: {error}") from error

    def _pieces(self, connection: Connection, incoming: Incoming) -> bool:
        """Take pieces until the end of this connection's share; whether that ended the part."""
        files = incoming.manifest.files
        while True:
            header, data = connection.receive(CHUNK_BYTES, _IDLE_SECONDS)
            if header["op"] == "data":
                file = whole(header, "file", len(files) - 1)
                incoming.write(file, whole(header, "piece", len(files[file].sums) - 1), data)
            elif header["op"] == "end":
                connection.send({"op": "got"})
                return False
            elif header["op"] == "commit":
                incoming.commit()
                return True
            else:
                raise TransportError(f"take {header['op']!r:.40} inside a part")

    def _here(self) -> list[Part]:
        return [*local_parts(self._store.folder), *self._store.all()]

    def _tell(self, connection: Connection, name: str) -> None:
        heads = [head(part) for part in self._here() if part.manifest.name == name]
        listed = json.dumps(heads, separators=(",", ":")).encode()
        known = json.dumps(self._others())[:30000] if heads else "{}"
        connection.send({"op": "parts", "others": known}, [memoryview(listed)])

    def _find(self, header: Header) -> Part | None:
        wanted = (
            text(header, "owner", 64),
            text(header, "name", 32),
            whole(header, "step", 10**15),
            text(header, "run", 64),
        )
        rank = whole(header, "rank", 10**6)
        for part in self._here():
            of = part.manifest
            same = (part.owner, of.name, of.step, of.run) == wanted
            if same and rank in of.ranks:
                return part
        return None

    def _part(self, connection: Connection, header: Header) -> None:
        part = self._find(header)
        if part is None:
            refuse(connection, "it is not here any more")
        else:
            manifest = part.manifest.to_json().encode()
            connection.send({"op": "part"}, [memoryview(manifest)])

    def _give(self, connection: Connection, header: Header) -> None:
        part = self._find(header)
        if part is None:
            refuse(connection, "it is not here any more")
            return
        file = text(header, "file", 128)
        entry = next((e for e in part.manifest.files if e.name == file), None)
        if entry is None:
            refuse(connection, f"{file!r:.80} is not in that part")
            return
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        fd = os.open(os.path.join(part.path, entry.name), flags)
        try:
            for number, at, length in pieces(entry):
                connection.send_file({"op": "data", "piece": number}, fd, at, length)
        finally:
            os.close(fd)
        connection.send({"op": "end"})


def head(part: Part) -> Header:
    """A part in a list: its manifest without files and sums."""
    of = part.manifest
    return {
        **{key: getattr(of, key) for key in ("name", "step", "run", "world_size", "time")},
        "owner": part.owner,
        "ranks": of.ranks,
    }


def refuse(connection: Connection, reason: str) -> None:
    """Say no, with a clause."""
    connection.send({"op": "refused", "error": reason[:1000]})


def _try_to_say(connection: Connection, reason: str) -> None:
    try:
        refuse(connection, reason)
    except TransportError:
        return
