"""Parts of other nodes in this node's cache: where they lie, which are whole, which may go.

    <folder>/.peer-<node>/step-000000120.<run>/     whole, like any part
    <folder>/.peer-<node>/.step-000000120.<run>.partial/
    <folder>/.fetched.peer-<node>/...               brought here from there, for a moment

Everything here belongs to the job's user, who may have changed it: what is read is checked, and
what is sent on is checked again by its receiver.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from dataclasses import dataclass

from crater_slurm.checkpoint.peers.ticket import is_node
from crater_slurm.job import layout
from crater_slurm.job.layout import Manifest

_PREFIX = ".peer-"
_FLUSHED = ".flushed"
_FETCHED = ".fetched"


@dataclass(frozen=True, slots=True)
class Part:
    """A whole part on this node: whose it is ("" for this node's own), and the folder it is in."""

    owner: str
    path: str
    manifest: Manifest

    @property
    def order(self) -> tuple[float, int]:
        """Sorts the newest last: by the time, for a run may go back to an earlier step."""
        return self.manifest.time, self.manifest.step


def local_parts(folder: str, owner: str = "") -> list[Part]:
    """Whole parts whose step folders lie in ``folder``, newest first."""
    found = []
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            named = layout.parse_step_name(name)
            if named is None:
                continue
            path = os.path.join(folder, name)
            with contextlib.suppress(OSError):
                for manifest in layout.read_parts(path):
                    if (manifest.name, manifest.step) == named[:2] and _is_there(path, manifest):
                        found.append(Part(owner, path, manifest))
    return sorted(found, key=lambda part: part.order, reverse=True)


def _is_there(path: str, manifest: Manifest) -> bool:
    """Whether the files have their sizes: one that was being removed has not."""
    return all(os.stat(os.path.join(path, f.name)).st_size == f.size for f in manifest.files)


def folder_bytes(folder: str) -> int:
    """Bytes of all files below a folder; a file with several names counts once."""
    found: dict[tuple[int, int], int] = {}
    for root, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                status = os.lstat(os.path.join(root, name))
                found[status.st_dev, status.st_ino] = status.st_size
    return sum(found.values())


class PeerStore:
    """The other nodes' parts in one job's folder."""

    def __init__(self, folder: str, quota_bytes: int = 0, keep: int = 2) -> None:
        self.folder = folder
        self._quota = quota_bytes
        self._keep = max(1, keep)

    def place(self, node: str) -> str:
        """Folder of a node's parts."""
        if not is_node(node):
            raise ValueError(f"{node!r:.80} is no node's name")
        return os.path.join(self.folder, _PREFIX + node)

    def fetched(self, node: str) -> str:
        """Folder of what is being fetched of a node's: apart from what that node may bring at the
        same moment."""
        return os.path.join(self.folder, _FETCHED + os.path.basename(self.place(node)))

    def drop_fetched(self) -> None:
        """Remove what was fetched, or half fetched."""
        with contextlib.suppress(OSError):
            for name in os.listdir(self.folder):
                if name.startswith(_FETCHED):
                    shutil.rmtree(os.path.join(self.folder, name), ignore_errors=True)

    def nodes(self) -> list[str]:
        """Nodes that have something here."""
        with contextlib.suppress(OSError):
            names = [n[len(_PREFIX) :] for n in os.listdir(self.folder) if n.startswith(_PREFIX)]
            return sorted(filter(is_node, names))
        return []

    def parts(self, node: str) -> list[Part]:
        """A node's whole parts here, newest first."""
        return local_parts(self.place(node), node)

    def all(self) -> list[Part]:
        """Whole parts of all other nodes."""
        return [part for node in self.nodes() for part in self.parts(node)]

    def room_for(self, node: str, manifest: Manifest) -> str:
        """Why a part can't come in, or nothing. Makes room among that node's older ones first,
        but its newest whole one stays."""
        if not self._quota:
            return ""
        for keep in (self._keep, 1):
            self.prune(node, manifest.name, keep)
            used = folder_bytes(self.folder) - self._partial_bytes(node)
            if used + manifest.size <= self._quota:
                return ""
        return (
            f"the job's folder holds {used} bytes of at most {self._quota}; "
            f"a part of {manifest.size} has no room"
        )

    def make_room(self, over_bytes: int) -> int:
        """Remove copies until so much has gone, the oldest first, all of them if need be: this
        node's own saves come before another's copies. The bytes that went."""
        freed = 0
        for part in sorted(self.all(), key=lambda part: part.order):
            if freed >= over_bytes:
                break
            _remove_step(part.path)
            freed += part.manifest.size
        return freed

    def _partial_bytes(self, node: str) -> int:
        place = self.place(node)
        return sum(folder_bytes(os.path.join(place, name)) for name in _partials(place))

    def prune(self, node: str, name: str, keep: int | None = None) -> None:
        """Remove all but a node's newest parts; the newest is never removed."""
        parts = [part for part in self.parts(node) if part.manifest.name == name]
        for part in parts[max(1, self._keep if keep is None else keep) :]:
            _remove_step(part.path)

    def drop_partials(self, node: str, keep: str = "") -> None:
        """Remove what nobody will finish: all of a node's partials but one."""
        place = self.place(node)
        for name in _partials(place):
            if name != keep:
                shutil.rmtree(os.path.join(place, name), ignore_errors=True)

    def mark_flushed(self, node: str, key: str) -> None:
        """Keep in mind that a node's part is at the destination."""
        with contextlib.suppress(OSError):
            path = os.path.join(self.place(node), _FLUSHED)
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
            with os.fdopen(fd, "w") as file:
                file.write(key + "\n")

    def is_flushed(self, node: str, key: str) -> bool:
        """Whether it was marked so."""
        try:
            with open(os.path.join(self.place(node), _FLUSHED), errors="replace") as file:
                return key in file.read(1 << 20).splitlines()
        except OSError:
            return False


def key_of(manifest: Manifest) -> str:
    """One part of one node among all of them: name, step, run and when it was saved."""
    return f"{layout.step_name(manifest.step, manifest.name, manifest.run)} {manifest.time!r}"


def _partials(place: str) -> list[str]:
    with contextlib.suppress(OSError):
        return [name for name in os.listdir(place) if layout.is_partial(name)]
    return []


def _remove_step(path: str) -> None:
    """Take a step away so that a half removed one is never taken for a whole one."""
    hidden = os.path.join(os.path.dirname(path), layout.partial_name(os.path.basename(path)))
    shutil.rmtree(hidden, ignore_errors=True)
    with contextlib.suppress(OSError):
        os.rename(path, hidden)
    shutil.rmtree(hidden, ignore_errors=True)
