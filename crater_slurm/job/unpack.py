"""A rank's file as the state again: checked, read by several threads, put back together.

Every chunk is compared with its checksum before anything of it is used. The skeleton is a pickle,
which can run code, so a file is read only where it is the user's own, or root's.
"""

from __future__ import annotations

import ctypes
import pickle
import threading

from crater_slurm.job import layout
from crater_slurm.job.copying import Image, Segment, cpu_count, memory_at, start_threads
from crater_slurm.job.tensorfile import DamagedError, File, OnDisk, crc32
from crater_slurm.job.tree import loads

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from crater_slurm.job.tensorfile import Source


def read_state(
    where: str | Source,
    entry: layout.FileEntry | None,
    *,
    map_location: Any = None,
    mmap: bool = False,
    trust: bool = False,
) -> Any:
    """The state in a rank's file, which has a path or is another source. ``entry``: compare it
    with its size and checksums first; None takes it as it is. Only what lies on disk is mapped.
    Raises DamagedError, StateError, OSError."""
    source = OnDisk(where, trust=trust) if isinstance(where, str) else where
    mapped = source if mmap and isinstance(source, OnDisk) else None
    file = File(source)
    try:
        if entry is not None and file.size != entry.size:
            raise DamagedError(f"{file.path} has {file.size} bytes, its manifest says {entry.size}")
        if mapped and entry is not None:
            wrong = layout.check_file(file.path, entry, crc32())
            if wrong:
                raise DamagedError(wrong)
        table, rest = _skeleton(file, None if mapped else entry)
        bases = _mapped(mapped, file, table) if mapped else _empty(file, table)
        if not mapped:
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
    data = file.take(start, end - start)
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


def _mapped(source: OnDisk, file: File, table: list[Any]) -> list[_Base]:
    """Entries as views of the mapped file; what is written to them stays in this process."""
    import mmap

    whole = mmap.mmap(source.fd, 0, access=mmap.ACCESS_COPY)
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
        view = memory_at(address, want)
        if self.file.source.read(view, start) != want:
            raise DamagedError(f"{self.file.path} ends early")
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
