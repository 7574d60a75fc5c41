"""Small readers of /sys and /proc files, for a live machine and for a captured one.

What is missing, damaged, huge or no plain file reads as unknown, and nothing of a file beyond
1 MiB is read: a tree from elsewhere must never cost the memory or end in a traceback.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from crater_slurm.errors import CraterError
from crater_slurm.model.cpuset import parse_cpulist

#: No file of /sys or /proc that is read here is longer on any machine known.
MAX_BYTES = 2**20
#: A cpulist of 8192 CPUs with every second one left out has 40 kB.
_MAX_LIST_CHARS = 2**16
_MAX_NUMBERS = 2**16
_RANGES = re.compile(r"([0-9]{1,9})-([0-9]{1,9})")


def read(path: Path) -> str | None:
    """A small file's text without surrounding space; None when it is not there or not readable."""
    try:
        # A pipe in a captured tree would keep a plain open waiting for ever.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError):
        return None
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            return None
        with os.fdopen(handle, "rb", closefd=False) as file:
            return file.read(MAX_BYTES).decode(errors="replace").strip("\0 \t\r\n")
    except OSError:
        return None
    finally:
        os.close(handle)


def read_int(path: Path) -> int | None:
    """A whole number in a file; None when it is not there or is none (``-1`` included)."""
    return number(read(path))


def number(text: str | None) -> int | None:
    """The whole number that ``text`` is; None when it is none, is negative or is absurd."""
    return int(text) if text and re.fullmatch(r"[0-9]{1,18}", text) else None


def entries(folder: Path) -> tuple[str, ...]:
    """Names in a folder, sorted; none when it is not there or not readable."""
    try:
        return tuple(sorted(entry.name for entry in folder.iterdir()))
    except (OSError, ValueError):
        return ()


def numbered(folder: Path, prefix: str) -> tuple[int, ...]:
    """The numbers N of the entries ``prefixN``, ascending (cpu0, cpu1 ... without cpuidle)."""
    found = (name.removeprefix(prefix) for name in entries(folder) if name.startswith(prefix))
    return tuple(sorted(int(n) for n in found if re.fullmatch(r"0|[1-9][0-9]{0,4}", n)))


def cpulist(path: Path) -> tuple[int, ...]:
    """CPU or node numbers in a file; none when it is not there. CraterError when it is no list."""
    text = read(path) or ""
    ranges = _RANGES.findall(text[:_MAX_LIST_CHARS])
    # Ranges over and over again would take minutes to count, though each is in bounds.
    if (
        len(text) >= _MAX_LIST_CHARS
        or sum(int(last) - int(first) for first, last in ranges) > _MAX_NUMBERS
    ):
        raise CraterError(f"{path} can't be read: no machine has so many CPUs or NUMA nodes")
    try:
        return parse_cpulist(text)
    except ValueError as error:
        raise CraterError(f"{path} can't be read: {error}") from error


def cpumask(path: Path) -> tuple[int, ...] | None:
    """Numbers of a kernel bit mask (``0000,000000ff``); None when it is not there or is none."""
    text = read(path)
    if not text or len(text) > _MAX_LIST_CHARS // 4:
        return None
    bits = 0
    for word in text.split(","):
        if not re.fullmatch(r"[0-9a-fA-F]+", word):
            return None
        bits = bits << 32 | int(word, 16)
    return tuple(i for i, bit in enumerate(reversed(f"{bits:b}")) if bit == "1")


def cpus(folder: Path, mask: str, numbers: str) -> tuple[int, ...] | None:
    """CPUs in the mask file of a folder, or else in its list file; None when neither is there."""
    found = cpumask(folder / mask)
    if found is None and (folder / numbers).is_file():
        found = cpulist(folder / numbers)
    return found


def below(root: Path, path: str) -> Path:
    """An absolute path of the machine below its root; ``..`` in it can't leave the root."""
    return root / os.path.normpath("/" + path.replace("\0", "")).lstrip("/")
