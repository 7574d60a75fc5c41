"""The kernel's memory policy by system call: put a range on a NUMA node, and see where it lies.

libnuma is not used: it is missing on many nodes, and three calls are all that is needed. A policy
is set on a range of memory, never on a thread, so that it goes with the range.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Sequence

from crater_slurm.errors import CraterError

_MPOL_BIND = 2
#: mbind and move_pages by machine, from the kernel's syscall tables.
_CALLS = {
    "x86_64": (237, 279),
    "aarch64": (235, 239),
    "riscv64": (235, 239),
    "loongarch64": (235, 239),
    "ppc64le": (259, 301),
    "s390x": (268, 310),
}
_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)

_libc = ctypes.CDLL(None, use_errno=True)


def bind(address: int, size_bytes: int, numa_node: int) -> None:
    """Let pages of the range that are not yet there come from ``numa_node`` alone (MPOL_BIND).

    Raises CraterError when the kernel or this process's cpuset forbids it.
    """
    words = numa_node // _BITS + 1
    mask = (ctypes.c_ulong * words)()
    mask[numa_node // _BITS] = 1 << (numa_node % _BITS)
    # The kernel reads one bit less than it is told: mbind's maxnode is off by one since 2.6.
    bits = words * _BITS + 1
    result = _libc.syscall(
        ctypes.c_long(_number(0)),
        ctypes.c_void_p(address),
        ctypes.c_ulong(size_bytes),
        ctypes.c_int(_MPOL_BIND),
        ctypes.byref(mask),
        ctypes.c_ulong(bits),
        ctypes.c_uint(0),
    )
    if result != 0:
        raise _failed("mbind", f"can't bind memory to NUMA node {numa_node}")


def nodes_of(addresses: Sequence[int]) -> tuple[int, ...]:
    """The NUMA node of the page at each address; negative (-errno) for one that is not there."""
    count = len(addresses)
    pages = (ctypes.c_void_p * count)(*addresses)
    status = (ctypes.c_int * count)()
    # Without a list of target nodes, move_pages moves nothing and tells where the pages are.
    result = _libc.syscall(
        ctypes.c_long(_number(1)),
        ctypes.c_int(0),
        ctypes.c_ulong(count),
        pages,
        ctypes.c_void_p(None),
        status,
        ctypes.c_int(0),
    )
    if result != 0:
        raise _failed("move_pages", "can't see where memory lies")
    return tuple(status)


def _number(index: int) -> int:
    machine = platform.machine()
    if machine not in _CALLS:
        raise CraterError(
            f"memory can't be bound on {machine}: the numbers of its system calls are not known; "
            f"known are {', '.join(_CALLS)}"
        )
    return _CALLS[machine][index]


def _failed(call: str, what: str) -> CraterError:
    error = ctypes.get_errno()
    return CraterError(
        f"{what}: {call}: {os.strerror(error)}; a container's seccomp filter, a cpuset or a kernel "
        "without NUMA forbids it"
    )
