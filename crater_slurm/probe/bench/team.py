"""A team of threads, one per core, that streams through memory of one NUMA node together.

numpy releases the interpreter's lock inside a kernel, so the threads run in parallel and Python
costs some microseconds between passes of milliseconds. Only the team's own threads are bound to
CPUs and only the team's own memory has a policy: both are gone when the team is.

The first kernel, ``a += b``, loads two numbers and stores one: 24 bytes an element, and as the
stored line was loaded, 24 are moved. STREAM's add and triad also count 24, but store into a third
array: a compiler that uses ordinary stores first loads that line too, moves 32, and prints 3/4 of
what the memory does. The second kernel is STREAM's copy, 16 bytes; libc's copy of long arrays
stores past the cache, so that 16 are moved.
"""

from __future__ import annotations

import math
import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from crater_slurm.errors import CraterError
from crater_slurm.probe.bench import mempolicy
from crater_slurm.probe.bench.result import Repeats

Array: TypeAlias = npt.NDArray[np.float64]

_HUGE_PAGE_BYTES = 2 * 2**20
#: Pages of each array whose place is asked for.
_SAMPLES = 512
#: What each pass adds: small enough that the sums stay exact, and no denormal number.
_STEP = 0.5


@dataclass(frozen=True, slots=True)
class Kernel:
    """What is done to two arrays, and the bytes of each element that it moves."""

    text: str
    bytes_per_element: int
    run: Callable[[Array, Array], None]


def _add(a: Array, b: Array) -> None:
    np.add(a, b, out=a)


def _copy(a: Array, b: Array) -> None:
    np.copyto(b, a)


ADD = Kernel("a += b", 24, _add)
COPY = Kernel("b = a", 16, _copy)


class Team:
    """Threads on ``cpus`` with two arrays each, all together ``total_bytes`` on ``numa_node``.

    A context manager. Raises CraterError when a thread or its memory can't be put in place.
    """

    def __init__(self, cpus: Sequence[int], numa_node: int, total_bytes: int) -> None:
        each = total_bytes // (2 * len(cpus))
        self.array_bytes = max(1, each // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
        self.numa_node = numa_node
        self.misplaced = self.sampled = 0
        self._failure: BaseException | None = None
        self._lock = threading.Lock()
        self._barrier = threading.Barrier(len(cpus) + 1)
        self._job: tuple[Kernel, int] | None = None
        self._times: list[tuple[int, int]] = []
        self._threads = [threading.Thread(target=self._work, args=(cpu,)) for cpu in cpus]

    def __enter__(self) -> Team:
        for thread in self._threads:
            thread.start()
        try:
            self._wait()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop()

    def bandwidth_gb_s(self, kernel: Kernel, repeats: int, seconds: float) -> Repeats:
        """GB/s of each repeat: from the start of the first thread to the end of the last."""
        self._pass(kernel, 1)  # the first pass warms up the clocks and is not counted
        passes = max(1, math.ceil(seconds / self._pass(kernel, 1)))
        moved = kernel.bytes_per_element * self.array_bytes // 8 * len(self._threads) * passes
        return Repeats(tuple(moved / self._pass(kernel, passes) / 1e9 for _ in range(repeats)))

    def _pass(self, kernel: Kernel, passes: int) -> float:
        self._job = (kernel, passes)
        self._times = []
        self._wait()
        self._wait()
        return (max(end for _, end in self._times) - min(start for start, _ in self._times)) / 1e9

    def _wait(self) -> None:
        try:
            self._barrier.wait()
        except threading.BrokenBarrierError:
            if self._failure is not None:
                raise self._failure from None
            raise

    def _stop(self) -> None:
        self._barrier.abort()
        for thread in self._threads:
            thread.join()

    def _work(self, cpu: int) -> None:
        try:
            os.sched_setaffinity(0, {cpu})  # on Linux, of this thread alone
            a, b = (_placed_array(self.array_bytes, self.numa_node) for _ in range(2))
            a.fill(0)
            b.fill(_STEP)
            self._see_where(a, b)
            self._barrier.wait()
            while True:
                self._barrier.wait()
                assert self._job is not None
                self._times.append(_timed(*self._job, a, b))
                self._barrier.wait()
        except threading.BrokenBarrierError:
            pass
        except OSError as error:
            self._fail(CraterError(f"can't run on CPU {cpu}: {error.strerror}"))
        except BaseException as error:
            self._fail(error)

    def _see_where(self, *arrays: Array) -> None:
        for array in arrays:
            step = max(mmap.PAGESIZE, self.array_bytes // _SAMPLES)
            start = array.ctypes.data
            places = mempolicy.nodes_of(range(start, start + self.array_bytes, step))
            with self._lock:
                self.sampled += len(places)
                self.misplaced += sum(place != self.numa_node for place in places)

    def _fail(self, error: BaseException) -> None:
        self._failure = error
        self._barrier.abort()


def _timed(kernel: Kernel, passes: int, a: Array, b: Array) -> tuple[int, int]:
    start = time.perf_counter_ns()
    for _ in range(passes):
        kernel.run(a, b)
    return start, time.perf_counter_ns()


def _placed_array(size_bytes: int, numa_node: int) -> Array:
    """An array of private memory that will come from the node, in huge pages where there are."""
    # Python's default is shared memory, which has no transparent huge pages.
    region = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without transparent huge pages
        region.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(region, dtype=np.float64)
    mempolicy.bind(array.ctypes.data, size_bytes, numa_node)
    return array
