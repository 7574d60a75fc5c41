"""What a file must know of one leaf: type, shape, and which memory it is a view of.

torch and numpy are looked at only where a leaf is of theirs. Types that safetensors does not know
are stored under one that has the same bytes; the file's table has the true one.
"""

from __future__ import annotations

import sys
from collections import namedtuple

from crater_slurm.job.copying import Segment, pointer_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

#: safetensors' name of a type, and the bits of an element.
TORCH = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip
#: Two numbers of such a type follow each other.
_PAIRS = {"complex64": "F32", "complex128": "F64", "complex32": "F16"}


class Fact(
    namedtuple(
        "Fact",
        "kind dtype shape stride low high nbytes itemsize memory flags",
    )
):
    """``kind``: torch, numpy, bytes, bytearray. ``low`` and ``high``: the bytes that it lies in, in
    its storage; ``memory`` tells storages apart: the number of the first leaf that has it.
    ``stride`` is None where the values lie in order. ``flags``: 1 requires_grad, 2 Parameter,
    4 Buffer."""

    __slots__ = ()

    @property
    def is_whole(self) -> bool:
        """Whether its memory is its values in order."""
        return self.stride is None

    @property
    def entry_dtype(self) -> str:
        return TORCH.get(self.dtype) or _PAIRS.get(self.dtype) or "U8"

    @property
    def entry_shape(self) -> list[int]:
        if self.dtype in TORCH:
            return list(self.shape)
        if self.dtype in _PAIRS:
            return [*self.shape, 2]
        return [self.nbytes]

    @property
    def width(self) -> int:
        """What its place in the file must be a multiple of."""
        return int(self.itemsize) if self.dtype in TORCH or self.dtype in _PAIRS else 1

    def row(self, at: int, alone: bool) -> tuple[Any, ...]:
        """Its row of the file's table, after the entry: kind, type, shape, stride, first byte in
        the entry, flags; ``alone`` says that the entry has its values in order."""
        dense = not alone or _is_dense(self.shape, self.stride)
        stride = self.stride if dense else None
        return (self.kind, self.dtype, self.shape, stride, at, self.flags | (8 if alone else 0))


def _is_dense(shape: tuple[int, ...], stride: tuple[int, ...] | None) -> bool:
    """Whether strides leave no hole and visit nothing twice, so that they can be made again."""
    if stride is None:
        return True
    expected = 1
    for step, count in sorted((s, n) for s, n in zip(stride, shape) if n != 1):  # noqa: B905
        if step != expected:
            return False
        expected *= count
    return True


class Source:
    """What a leaf's values are read from: a tensor conjugated where it was only marked so, an array
    or a byte string. ``pointer``: where they lie in order in host memory; 0 where they don't."""

    __slots__ = ("pointer", "value")

    def __init__(self, value: Any, pointer: int) -> None:
        self.value = value
        self.pointer = pointer


def look(values: list[Any]) -> tuple[list[Fact], list[Source]]:
    """A fact and a source for each leaf."""
    firsts: dict[Any, int] = {}
    names: dict[Any, str] = {}
    torch: Any = sys.modules.get("torch")
    parameter = torch.nn.Parameter if torch is not None and hasattr(torch, "nn") else None
    buffer = getattr(torch.nn, "Buffer", None) if parameter is not None else None
    tensors = (torch.Tensor,) if parameter is not None else ()
    found, sources = [], []
    for number, value in enumerate(values):
        if isinstance(value, tensors):
            flags = (1 if value.requires_grad else 0) | (2 if type(value) is parameter else 0)
            flags |= 4 if buffer is not None and type(value) is buffer else 0
            if value.is_conj() or value.is_neg():
                value = value.detach().resolve_conj().resolve_neg()
            fact, source = _torch_fact(value, flags, number, firsts, names)
        elif isinstance(value, (bytes, bytearray)):
            kind, size = type(value).__name__, len(value)
            fact = Fact(kind, "uint8", (size,), None, 0, size, size, 1, number, 0)
            source = Source(value, pointer_of(value))
        else:
            fact, source = _numpy_fact(value, number)
        found.append(fact)
        sources.append(source)
    return found, sources


def _torch_fact(
    tensor: Any, flags: int, number: int, firsts: dict[Any, int], names: dict[Any, str]
) -> tuple[Fact, Source]:
    dtype, item, device = tensor.dtype, tensor.element_size(), tensor.device
    name = names.get(dtype)
    if name is None:
        name = names[dtype] = str(dtype).rpartition(".")[2]
    shape = tuple(tensor.shape)
    nbytes = tensor.numel() * item
    first = tensor.storage_offset() * item
    pointer = tensor.data_ptr()
    stride, high, memory = None, first + nbytes, number
    ordered = tensor.is_contiguous()
    if nbytes:
        memory = firsts.setdefault((device, pointer - first), number)
        if not ordered:
            stride = tensor.stride()
            steps = zip(shape, stride)  # noqa: B905  (Python 3.9 has no strict)
            high = first + item * (1 + sum((count - 1) * step for count, step in steps))
    fact = Fact("torch", name, shape, stride, first, high, nbytes, item, memory, flags)
    return fact, Source(tensor, pointer if ordered and device.type == "cpu" else 0)


def _numpy_fact(array: Any, number: int) -> tuple[Fact, Source]:
    """Arrays are stored in order, each by itself; views of one array come back apart."""
    import numpy

    size = array.nbytes
    fortran = array.flags.f_contiguous and not array.flags.c_contiguous
    plain = array.dtype.name in TORCH and array.dtype.byteorder != ">"
    name = array.dtype.name if plain else array.dtype.str
    ordered = numpy.ascontiguousarray(array)
    item, flags = array.dtype.itemsize, 16 if fortran else 0
    fact = Fact("numpy", name, array.shape, None, 0, size, size, item, number, flags)
    return fact, Source(ordered, ordered.__array_interface__["data"][0])


def shared(found: list[Fact]) -> list[list[int]]:
    """Leaves by memory: lists of numbers whose bytes overlap, most of them of one. In order."""
    by_memory: dict[int, list[int]] = {}
    for number, fact in enumerate(found):
        by_memory.setdefault(fact.memory, []).append(number)
    groups: list[list[int]] = []
    for numbers in by_memory.values():
        end = -1
        for number in sorted(numbers, key=lambda n: (found[n].low, n)):
            fact = found[number]
            if fact.low < end and fact.nbytes:
                groups[-1].append(number)
            else:
                groups.append([number])
            end = max(end, fact.high)
    for group in groups:
        group.sort()
    return sorted(groups)


def segment(source: Source, at: int, nbytes: int, span: tuple[int, int] | None) -> Segment:
    """Where the bytes of an entry are: ``span`` of the tensor's storage, else its values."""
    if span is None and source.pointer:
        return Segment(at, nbytes, source.pointer, source.value)
    tensor = source.value.detach()
    if span is not None:
        import torch

        flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        tensor = flat.set_(tensor.untyped_storage(), span[0], (span[1] - span[0],))
        if tensor.device.type == "cpu":
            return Segment(at, nbytes, tensor.data_ptr(), tensor)
    return Segment(at, nbytes, tensor=tensor)
