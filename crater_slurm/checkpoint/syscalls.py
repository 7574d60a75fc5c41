"""System calls that Python's standard library lacks, and the process's own hardening.

Each raises OSError like os does. It refuses to be clever: numbers and flags as in the kernel's
headers, one function per call.
"""

from __future__ import annotations

import ctypes
import os
import resource
from typing import Any

libc = ctypes.CDLL(None, use_errno=True)

_PR_SET_DUMPABLE = 4
_PR_SET_NO_NEW_PRIVS = 38
_RENAME_EXCHANGE = 2
_FS_TYPE_BYTES = 120  # struct statfs, whose first word is the type


def checked(result: int, what: str = "") -> int:
    """The result of a C call; raises OSError with errno when it is negative."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what or None)
    return result


def exchange(parent: int, first: str, second: str) -> None:
    """Swap two names in a folder in one step (renameat2, RENAME_EXCHANGE)."""
    call = libc.renameat2
    names = (parent, os.fsencode(first), parent, os.fsencode(second), _RENAME_EXCHANGE)
    checked(call(*names), second)


def fs_type(fd: int) -> int:
    """Magic number of the file system that an open file lies on (fstatfs)."""
    buffer = (ctypes.c_long * (_FS_TYPE_BYTES // 8 + 8))()
    checked(libc.fstatfs(fd, buffer))
    return buffer[0] & 0xFFFFFFFF


class _Buffer(ctypes.Structure):
    """Py_buffer: the stable part of CPython's own structure."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


def address_of(buffer: Any) -> int:
    """Where a buffer's bytes lie, also a read-only one's (which ctypes' from_buffer refuses).

    The buffer is let go at once: the caller keeps its owner alive and unmoved, as a mmap is.
    """
    view = _Buffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(buffer), ctypes.byref(view), 0)
    address = int(view.buf or 0)
    ctypes.pythonapi.PyBuffer_Release(ctypes.byref(view))
    return address


def keep_secrets() -> None:
    """Nobody, the own user included, may read this process's memory, by core file or debugger.

    To be called again after each change of user, which makes the kernel choose anew.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    checked(libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0))
    checked(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))


def may_lock(most_bytes: int) -> None:
    """Let this process lock so much memory, as RDMA needs; to be called while it is root."""
    if os.geteuid() == 0:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (most_bytes, most_bytes))


def become(user: str, uid: int, gid: int) -> None:
    """Give up root for a user, for good; does nothing without root. Raises OSError."""
    if os.geteuid() == 0 and uid != 0:
        try:
            groups = os.getgrouplist(user, gid)
        except (OSError, KeyError):
            groups = [gid]
        os.setgroups(groups)
        os.setgid(gid)
        os.setuid(uid)
        if os.getresuid() != (uid, uid, uid) or os.getresgid() != (gid, gid, gid):
            raise PermissionError(1, "root's rights could not be given up")
    os.umask(0o077)
