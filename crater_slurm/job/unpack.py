"""A rank's file as the state again: checked, read by several threads, put back together.

Every chunk is compared with its checksum before anything of it is used. The skeleton is a pickle,
which can run code, so a file is read only where it is the user's own, or root's.
"""

from __future__ import annotations

import ctypes
import json
import os
import pickle
import stat
import struct
import threading
import zlib

from crater_slurm.job import layout
from crater_slurm.job.copying import Image, Segment, cpu_count, memory_at, start_threads
from crater_slurm.job.pack import FORMAT, SKELETON
from crater_slurm.job.tree import StateError, loads

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_MOST_HEADER = 100 << 20


class DamagedError(Exception):
    """A file is not what its manifest says; a clause that begins with the file's name."""


def crc32() -> Callable[[Any], int]:
    """The fastest CRC-32 that is there; all give the same."""
    try:
        from importlib import import_module

        fast: Callable[[Any], int] = import_module("isal.isal_zlib").crc32
    except ImportError:
        return zlib.crc32
    return fast


class File:
    """A rank's file, open: its header, its metadata, and where each tensor lies."""

    def __init__(self, path: str, *, trust: bool = False) -> None:
        self.path = path
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._look(trust)
        except BaseException:
            self.close()
            raise

    def _look(self, trust: bool) -> None:
        facts = os.fstat(self.fd)
        if not stat.S_ISREG(facts.st_mode):
            raise DamagedError(f"{self.path} is no file")
        if facts.st_uid not in (os.getuid(), 0) and not trust:
            raise StateError(
                f"{self.path} belongs to user {facts.st_uid}. Loading a checkpoint can run what "
                "its writer put into it: if you trust them, copy it, or load(..., trust=True)."
            )
        self.size = facts.st_size
        head = os.pread(self.fd, 8, 0)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        if not 2 <= length <= min(_MOST_HEADER, self.size - 8):
            raise DamagedError(f"{self.path} is no safetensors file")
        self.base = 8 + length
        try:
            self.header = json.loads(os.pread(self.fd, length, 8))
            self.metadata = self.header.pop("__metadata__", {})
            spans = {name: tuple(row["data_offsets"]) for name, row in self.header.items()}
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise DamagedError(f"{self.path} has a header that can't be read") from error
        room = self.size - self.base
        for name, span in spans.items():
            good = len(span) == 2 and all(type(n) is int for n in span)
            if not good or not 0 <= span[0] <= span[1] <= room:
                raise DamagedError(f"{self.path} has no place for {name!r:.80}")
        if SKELETON not in spans or self.metadata.get("crater") != FORMAT:
            raise StateError(f"{self.path} is no checkpoint of crater's; read it with safetensors.")
        self.skeleton = spans.pop(SKELETON)
        #: First and last byte of each entry in the file, in order.
        self.spans = sorted((self.base + a, self.base + b) for a, b in spans.values())

    def close(self) -> None:
        os.close(self.fd)


def read_state(
    path: str,
    entry: layout.FileEntry | None,
    *,
    map_location: Any = None,
    mmap: bool = False,
    trust: bool = False,
) -> Any:
    """The state in a rank's file. ``entry``: compare it with its size and checksums first; None
    takes it as it is. Raises DamagedError, StateError, OSError."""
    file = File(path, trust=trust)
    try:
        if entry is not None and file.size != entry.size:
            raise DamagedError(f"{path} has {file.size} bytes, its manifest says {entry.size}")
        if mmap and entry is not None:
            wrong = layout.check_file(path, entry, crc32())
            if wrong:
                raise DamagedError(wrong)
        table, rest = _skeleton(file, None if mmap else entry)
        bases = _mapped(file, table) if mmap else _empty(file, table)
        if not mmap:
            _fill(file, bases, entry)
        return loads(rest, _Builder(bases, map_location).leaves(table))
    finally:
        file.close()


def _skeleton(file: File, entry: layout.FileEntry | None) -> tuple[list[Any], memoryview]:
    """The table of leaves and the pickle of the rest, compared with their checksums before."""
    start, end = file.base + file.skeleton[0], file.base + file.skeleton[1]
    if entry is not None:
        first, last = start // layout.CHUNK_BYTES, -(-end // layout.CHUNK_BYTES)
        _Reading(file, Image([]), entry.sums, list(range(first, last))).run()
    data = os.pread(file.fd, end - start, start)
    if len(data) != end - start:
        raise DamagedError(f"{file.path} ends early")
    import io

    stream = io.BytesIO(data)
    try:
        table = pickle.load(stream)  # noqa: S301  (the user's own file: see File)
    except Exception as error:
        raise DamagedError(f"{file.path} has a table of tensors that can't be read") from error
    return table, memoryview(data)[stream.tell() :]


class _Base:
    """Memory of one entry: a tensor, array or bytearray of bytes, and where it lies in the file."""

    __slots__ = ("memory", "nbytes", "pointer", "start")

    def __init__(self, start: int, nbytes: int, memory: Any, pointer: int) -> None:
        self.start, self.nbytes, self.memory, self.pointer = start, nbytes, memory, pointer


def _kinds(file: File, table: list[Any]) -> list[str]:
    kinds = [""] * len(file.spans)
    for row in table:
        if not 0 <= row[0] < len(kinds):
            raise DamagedError(f"{file.path} has a table that doesn't fit its tensors")
        kinds[row[0]] = row[1]
    return kinds


def _empty(file: File, table: list[Any]) -> list[_Base]:
    bases = []
    for (start, end), kind in zip(file.spans, _kinds(file, table)):  # noqa: B905
        size = end - start
        memory: Any
        pointer = 0
        if kind == "torch":
            import torch

            memory = torch.empty(size, dtype=torch.uint8)
            pointer = memory.data_ptr()
        elif kind == "numpy":
            import numpy

            memory = numpy.empty(size, dtype=numpy.uint8)
            pointer = memory.__array_interface__["data"][0]
        else:
            memory = bytearray(size)
            if size:
                pointer = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        bases.append(_Base(start, size, memory, pointer))
    return bases


def _mapped(file: File, table: list[Any]) -> list[_Base]:
    """Entries as views of the mapped file; what is written to them stays in this process."""
    import mmap

    whole = mmap.mmap(file.fd, 0, access=mmap.ACCESS_COPY)
    bases = []
    for (start, end), kind in zip(file.spans, _kinds(file, table)):  # noqa: B905
        memory: Any
        if kind == "torch":
            import torch

            size = end - start
            memory = torch.empty(0, dtype=torch.uint8)
            if size:
                memory = torch.frombuffer(whole, dtype=torch.uint8, count=size, offset=start)
        elif kind == "numpy":
            import numpy

            memory = numpy.frombuffer(whole, numpy.uint8, end - start, start)
        else:
            memory = bytearray(whole[start:end])
        bases.append(_Base(start, end - start, memory, 0))
    return bases


def _fill(file: File, bases: list[_Base], entry: layout.FileEntry | None) -> None:
    image = Image([Segment(b.start, b.nbytes, b.pointer, b.memory) for b in bases])
    chunks = list(range(-(-file.size // layout.CHUNK_BYTES)))
    _Reading(file, image, entry.sums if entry else None, chunks).run()


class _Reading:
    """Reads chunks of a file in several threads, compares their sums and hands them out."""

    def __init__(self, file: File, image: Image, sums: list[str] | None, chunks: list[int]) -> None:
        self.file, self.image, self.sums = file, image, sums
        self.chunks = chunks[::-1]
        self.error: Exception | None = None
        self.crc32 = crc32()
        self.lock = threading.Lock()

    def run(self) -> None:
        helpers = start_threads(min(2 * cpu_count() - 1, len(self.chunks) - 1), self._work)
        self._work()
        for helper in helpers:
            helper.join()
        if self.error is not None:
            raise self.error

    def _work(self) -> None:
        scratch = bytearray(min(layout.CHUNK_BYTES, max(1, self.file.size)))
        address = ctypes.addressof(ctypes.c_char.from_buffer(scratch))
        while self.error is None:
            try:
                number = self.chunks.pop()
            except IndexError:
                return
            try:
                self._chunk(number, address)
            except (OSError, DamagedError) as error:
                self.error = error

    def _chunk(self, number: int, address: int) -> None:
        start = number * layout.CHUNK_BYTES
        want = min(layout.CHUNK_BYTES, self.file.size - start)
        view, got = memory_at(address, want), 0
        while got < want:
            read = os.preadv(self.file.fd, [view[got:]], start + got)
            if not read:
                raise DamagedError(f"{self.file.path} ends early")
            got += read
        if self.sums is not None and f"{self.crc32(view):08x}" != self.sums[number]:
            raise DamagedError(
                f"{self.file.path} is damaged between byte {start} and {start + want}"
            )
        self.image.fill(start, want, address)


class _Builder:
    """Leaves from the memory of entries."""

    def __init__(self, bases: list[_Base], map_location: Any) -> None:
        self._bases = bases
        self._device = map_location
        self._moved: dict[int, Any] = {}

    def leaves(self, table: list[Any]) -> list[Any]:
        """What each row of the table describes."""
        makers = {"torch": self._tensor, "numpy": self._array}
        return [makers.get(row[1], self._bytes)(*row) for row in table]

    def _bytes(self, entry: int, kind: str, *_: Any) -> Any:
        memory = self._bases[entry].memory
        return memory if kind == "bytearray" else bytes(memory)

    def _array(
        self, entry: int, kind: str, dtype: str, shape: Any, stride: Any, at: int, flags: int
    ) -> Any:
        import numpy

        array = self._bases[entry].memory.view(numpy.dtype(dtype)).reshape(shape)
        return numpy.asfortranarray(array) if flags & 16 else array

    def _tensor(
        self, entry: int, kind: str, dtype: str, shape: Any, stride: Any, at: int, flags: int
    ) -> Any:
        import torch

        base = self._moved.get(entry)
        if base is None:
            base = self._bases[entry].memory
            if self._device is not None:
                base = base.to(self._device)
            self._moved[entry] = base
        kind_of = getattr(torch, dtype)
        if flags & 8:
            tensor = base.view(kind_of).view(shape)
            if stride is not None:
                tensor = torch.empty_strided(
                    shape, stride, dtype=kind_of, device=base.device
                ).copy_(tensor)
        else:
            place = (at // kind_of.itemsize, shape, *([stride] if stride is not None else []))
            tensor = torch.empty(0, dtype=kind_of, device=base.device)
            tensor.set_(base.untyped_storage(), *place)
        return _dressed(tensor, flags)


def _dressed(tensor: Any, flags: int) -> Any:
    import torch

    wants_grad = bool(flags & 1)
    if flags & 2:
        return torch.nn.Parameter(tensor, requires_grad=wants_grad)
    if flags & 4 and hasattr(torch.nn, "Buffer"):
        return torch.nn.Buffer(tensor)
    return tensor.requires_grad_() if wants_grad else tensor
