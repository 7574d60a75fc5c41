"""How a checkpoint lies in a folder, and when it is one: names, manifests, checksums.

    <folder>/step-000000120/rank-00000.safetensors      one file per rank
    <folder>/step-000000120/manifest-00000.json         one per node, written last
    <folder>/.step-000000120.partial/                   being written; worth nothing yet

A part is one node's ranks of one step. It exists once its manifest has its final name; a step is
complete once the parts that are there hold every rank from 0 to ``world_size`` - 1. The same rule
holds in the node's cache, on a shared file system and in an object store. Whoever writes or reads
checkpoints uses this module, inside jobs and on nodes, so it needs the standard library alone.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import zlib
from dataclasses import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

FORMAT = 1
#: Checksums are taken over pieces of this many bytes, so that several threads can share a file.
CHUNK_BYTES = 8 << 20
#: File that says which run a step's folder at a destination belongs to.
CLAIM = "run"
#: Direct I/O wants memory, offsets and lengths at multiples of this.
ALIGN = 4096

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,31}\Z")
_STEP = re.compile(r"([A-Za-z][A-Za-z0-9_]{0,31})-([0-9]{9,15})(?:\.([A-Za-z0-9_.-]{1,64}))?\Z")
_PART = re.compile(r"manifest-([0-9]{5,9})\.json\Z")
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}\Z")
_HEX = re.compile(r"[0-9a-f]{8}\Z")
_RUN = re.compile(r"[A-Za-z0-9_.-]{1,64}\Z")
_START = re.compile(r"[0-9]{1,20}\Z")
_MOST_RANKS = 10**6


class LayoutError(Exception):
    """A name or a manifest is not what this format says; the message is a whole sentence."""


def step_name(step: int, name: str = "step", run: str = "") -> str:
    """Folder of a step, such as ``step-000000120``; ``run`` sets two saves of one step apart."""
    if not _NAME.match(name):
        raise LayoutError(
            f"A checkpoint can't be called {name!r:.80}: a letter, then letters, digits and _, "
            "at most 32."
        )
    if not isinstance(step, int) or not 0 <= step < 10**15:
        raise LayoutError(f"A step is a whole number from 0 to 10^15 - 1, not {step!r:.80}.")
    return f"{name}-{step:09d}" + (f".{run}" if run else "")


def parse_step_name(text: str) -> tuple[str, int, str] | None:
    """(name, step, run) of a step's folder; None for any other name."""
    match = _STEP.match(text)
    return (match.group(1), int(match.group(2)), match.group(3) or "") if match else None


def run_name(run: str, start: str) -> str:
    """What a manifest calls a start of the training within a run: ``4711.0.1790000000123``.

    ``start`` is a number that all ranks of one start agree on and no other start has, or empty
    where there is none. Raises LayoutError for another text, which may be anybody's.
    """
    if start and not _START.match(start):
        raise LayoutError(f"A start of a training is a number, not {start!r:.40}.")
    return f"{run[: 63 - len(start)]}.{start}" if start else run


def is_of_run(name: str, run: str) -> bool:
    """Whether a manifest's run is this one, in whichever start of the training."""
    return name == run or (name.startswith(f"{run}.") and bool(_START.match(name[len(run) + 1 :])))


def partial_name(final: str) -> str:
    """Folder that a step is written in before it gets its final name."""
    return f".{final}.partial"


def is_partial(text: str) -> bool:
    """Whether a name is that of a step being written, or left half written."""
    return text.startswith(".") and text.endswith(".partial") and bool(_STEP.match(text[1:-8]))


def file_name(rank: int) -> str:
    """File of a rank's tensors."""
    return f"rank-{rank:05d}.safetensors"


def part_name(ranks: list[int]) -> str:
    """Manifest of the part that holds these ranks: named after the lowest."""
    return f"manifest-{min(ranks):05d}.json"


def is_part(text: str) -> bool:
    """Whether a name is that of a part's manifest."""
    return bool(_PART.match(text))


def chunk_sums(view: memoryview, crc32: Callable[[memoryview], int] = zlib.crc32) -> list[str]:
    """CRC-32 of each piece of CHUNK_BYTES, as eight hex digits."""
    return [f"{crc32(view[at : at + CHUNK_BYTES]):08x}" for at in range(0, len(view), CHUNK_BYTES)]


@dataclass(frozen=True)
class FileEntry:
    """One file of a part: its size in bytes and the CRC-32 of each CHUNK_BYTES of it."""

    name: str
    rank: int
    size: int
    sums: list[str]


@dataclass(frozen=True)
class Manifest:
    """What a part holds. ``run`` tells apart who wrote a step: job id, restarts of the job and,
    where it is known, the start of the training within them (``run_name``)."""

    step: int
    world_size: int
    files: list[FileEntry]
    name: str = "step"
    run: str = ""
    job_id: str = ""
    cluster: str = ""
    node: str = ""
    time: float = 0.0

    @property
    def ranks(self) -> list[int]:
        """Ranks whose files are here, in order, each once."""
        return sorted({file.rank for file in self.files})

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    def to_json(self) -> str:
        """The manifest as its file has it."""
        head = {key: value for key, value in vars(self).items() if key != "files"}
        files = [
            {"name": f.name, "rank": f.rank, "size": f.size, "crc32": f.sums} for f in self.files
        ]
        whole = {"format": FORMAT, "chunk_bytes": CHUNK_BYTES, **head, "files": files}
        return json.dumps(whole, indent=1, sort_keys=True)

    @classmethod
    def from_json(cls, text: str | bytes) -> Manifest:
        """Manifest of a file's text, which anybody may have written; raises LayoutError."""
        try:
            data = json.loads(text)
            if data["format"] != FORMAT or data["chunk_bytes"] != CHUNK_BYTES:
                raise LayoutError(
                    f"The manifest has format {data['format']!r:.20}; this version reads {FORMAT}."
                )
            files = [FileEntry(f["name"], f["rank"], f["size"], f["crc32"]) for f in data["files"]]
            texts = {key: data[key] for key in ("name", "run", "job_id", "cluster", "node")}
            manifest = cls(data["step"], data["world_size"], files, time=data["time"], **texts)
            _check(manifest)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise LayoutError(f"The manifest is damaged: {error!r:.200}.") from error
        return manifest


def _whole(value: object, least: int, most: int) -> bool:
    return type(value) is int and least <= value <= most


def _check(manifest: Manifest) -> None:
    step_name(manifest.step, manifest.name)
    for key in ("job_id", "cluster", "node", "run"):
        value = getattr(manifest, key)
        if not isinstance(value, str) or not (value == "" or _RUN.match(value)):
            raise LayoutError(f"The manifest's {key} is {value!r:.80}, which is no plain name.")
    if type(manifest.time) not in (int, float):
        raise LayoutError("The manifest's time is no number.")
    if not _whole(manifest.world_size, 1, _MOST_RANKS) or not manifest.files:
        raise LayoutError("The manifest has no ranks or no files.")
    for file in manifest.files:
        good = isinstance(file.name, str) and _FILE.match(file.name) and not is_part(file.name)
        if not good or not _whole(file.rank, 0, manifest.world_size - 1):
            raise LayoutError(f"The manifest names a file {file.name!r:.80} of {file.rank!r:.20}.")
        if not _whole(file.size, 0, 1 << 60) or not isinstance(file.sums, list):
            raise LayoutError(f"The manifest gives {file.name} a size of {file.size!r:.20}.")
        chunks = -(-file.size // CHUNK_BYTES)
        if len(file.sums) != chunks or not all(
            isinstance(s, str) and _HEX.match(s) for s in file.sums
        ):
            raise LayoutError(f"The checksums of {file.name} do not fit its size.")
    if len({file.name for file in manifest.files}) != len(manifest.files):
        raise LayoutError("The manifest names a file twice.")


def covers(parts: list[Manifest]) -> bool:
    """Whether these parts of one step and run are a complete checkpoint."""
    if not parts or len({(p.name, p.step, p.run, p.world_size) for p in parts}) != 1:
        return False
    return {rank for part in parts for rank in part.ranks} == set(range(parts[0].world_size))


def _regular(path: str, flags: int) -> int:
    """Open a regular file, and nothing that would keep the reader waiting. Raises OSError."""
    fd = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise FileNotFoundError(errno.ENOENT, "no regular file", path)


def read_parts(folder: str) -> list[Manifest]:
    """Manifests in a step's folder; damaged ones are left out. Raises OSError."""
    parts = []
    for name in sorted(os.listdir(folder)):
        if is_part(name):
            try:
                with open(os.path.join(folder, name), encoding="utf-8", opener=_regular) as file:
                    parts.append(Manifest.from_json(file.read()))
            except (LayoutError, UnicodeDecodeError):
                continue
            except FileNotFoundError:
                continue
    return parts


def check_file(path: str, entry: FileEntry, crc32: Callable[[memoryview], int] = zlib.crc32) -> str:
    """What is wrong with a file, against its manifest entry; empty when nothing is."""
    try:
        with open(path, "rb", buffering=0, opener=_regular) as file:
            size = os.fstat(file.fileno()).st_size
            if size != entry.size:
                return f"{entry.name} has {size} bytes, its manifest says {entry.size}"
            buffer = bytearray(min(CHUNK_BYTES, max(1, size)))
            for number, expected in enumerate(entry.sums):
                want = min(CHUNK_BYTES, size - number * CHUNK_BYTES)
                view = memoryview(buffer)[:want]
                got = 0
                while got < want:
                    read = file.readinto(view[got:])
                    if not read:
                        return f"{entry.name} ends early"
                    got += read
                if f"{crc32(view):08x}" != expected:
                    start = number * CHUNK_BYTES
                    return f"{entry.name} is damaged between byte {start} and {start + want}"
    except OSError as error:
        return f"{entry.name} can't be read: {error.strerror}"
    return ""
