"""From pages to disk: both engines, file systems that refuse, disks that fail, and the rate."""

from __future__ import annotations

import errno
import os
import queue
import resource
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoint_worker import MIB, Trainer, a_spec, content, running
from hypothesis import given
from hypothesis import strategies as st

from crater_slurm.checkpoint import disk, memory, sums
from crater_slurm.checkpoint.disk import Block, Drain, ThreadEngine, UringEngine
from crater_slurm.checkpoint.memory import Memory
from crater_slurm.checkpoint.outfile import OutFile
from crater_slurm.checkpoint.rate import TokenBucket
from crater_slurm.checkpoint.uring import Uring
from crater_slurm.job import layout

root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount")


def has_uring() -> bool:
    try:
        Uring(4).close()
    except OSError:
        return False
    return True


ENGINES = [
    pytest.param(
        "io_uring",
        marks=pytest.mark.skipif(not has_uring(), reason="this kernel allows no io_uring"),
    ),
    "threads",
]


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[[str, str], Path]]:
    """Mounts a small file system: its kind and options."""
    places: list[Path] = []

    def mount(kind: str, options: str) -> Path:
        place = tmp_path / f"mnt{len(places)}"
        place.mkdir()
        done = subprocess.run(["mount", "-t", kind, "-o", options, "none", str(place)])
        if done.returncode:
            pytest.skip(f"no {kind} can be mounted")
        places.append(place)
        return place

    yield mount
    for place in places:
        subprocess.run(["umount", "-l", str(place)], check=True)


def a_lane(data: bytes) -> Memory:
    """A lane that holds these bytes, whole pages."""
    length = -(-len(data) // 4096) * 4096 or 4096
    lane, fd = memory.create(length)
    os.pwrite(fd, data, 0)
    os.close(fd)
    return lane


class Written:
    """A drain, and what it says of its blocks."""

    def __init__(self, engine: str = "threads", **more: Any) -> None:
        self.done: queue.SimpleQueue[Block] = queue.SimpleQueue()
        self.logged: list[str] = []
        bucket = more.pop("bucket", None) or TokenBucket(0)
        self.drain = Drain(
            self.done.put, bucket, lambda _, text: self.logged.append(text), engine, **more
        )

    def write(self, file: OutFile, lane: Memory) -> list[Block]:
        """Write a file of the lane's bytes; its blocks when all are done."""
        blocks = []
        for at in range(0, file.size, disk.BLOCK_BYTES):
            block = Block(lane, None, at, at, min(disk.BLOCK_BYTES, file.size - at))
            block.file = file
            blocks.append(block)
        self.drain.add(blocks)
        return [self.done.get(timeout=60) for _ in blocks]


def an_out_file(folder: Path, size: int) -> OutFile:
    file = OutFile("rank-00000.safetensors", size)
    file.open(os.open(folder, os.O_RDONLY))
    return file


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("size", [1, 4096, 4 * MIB + 1, 40 * MIB + 4095])
def test_both_engines_write_the_same_bytes(tmp_path: Path, engine: str, size: int) -> None:
    data = os.urandom(size)
    written, file = Written(engine), an_out_file(tmp_path, size)
    assert file.direct or not direct_io_works(tmp_path)
    assert all(block.error == 0 for block in written.write(file, a_lane(data)))
    file.sync()
    file.put_in_place()
    file.close()
    assert written.drain.engine_name == engine
    assert (tmp_path / "rank-00000.safetensors").read_bytes() == data
    assert os.listdir(tmp_path) == ["rank-00000.safetensors"]


def direct_io_works(folder: Path) -> bool:
    try:
        os.close(os.open(folder / "probe", os.O_CREAT | os.O_WRONLY | os.O_DIRECT))
    except OSError:
        return False
    finally:
        (folder / "probe").unlink(missing_ok=True)
    return True


@root
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", ["ramfs", "tmpfs"])
def test_file_systems_without_direct_io_get_the_same_file(
    mounted: Callable[[str, str], Path], tmp_path: Path, engine: str, kind: str
) -> None:
    place = mounted(kind, "mode=700")
    data = os.urandom(9 * MIB + 5)
    with running(tmp_path, a_spec(place, engine=engine)) as daemon:
        trainer = Trainer(daemon, lane_bytes=16 * MIB)
        trainer.saved(trainer.save(1, data))
        trainer.saved(trainer.save(2, data[:5000]))
    assert content(place, 1) == data
    (part,) = layout.read_parts(str(place / "step-000000001"))
    assert part.files[0].sums == layout.chunk_sums(memoryview(data))


@root
def test_ramfs_refuses_direct_io_and_the_file_is_made_anyway(
    mounted: Callable[[str, str], Path],
) -> None:
    place = mounted("ramfs", "mode=700")
    assert not direct_io_works(place)
    file = an_out_file(place, 5000)
    assert not file.direct
    assert not file.allocated
    file.close()
    assert os.listdir(place) == []


@root
@pytest.mark.parametrize("engine", ENGINES)
def test_a_full_disk_fails_the_save_and_nothing_else(
    mounted: Callable[[str, str], Path], tmp_path: Path, engine: str
) -> None:
    place = mounted("tmpfs", "size=8m,mode=700")
    with running(tmp_path, a_spec(place, engine=engine)) as daemon:
        trainer = Trainer(daemon, lane_bytes=16 * MIB)
        old = os.urandom(3 * MIB)
        trainer.saved(trainer.save(1, old))
        number = trainer.save(2, bytes(7 * MIB))
        error = trainer.hear("failed", save=number)["error"]
        assert error == (
            f"step 2 of rank 0 is not saved: there is no room left on {place} "
            "(No space left on device)."
        )
        assert content(place, 1) == old
        small = os.urandom(MIB)
        trainer.saved(trainer.save(3, small))
        assert content(place, 3) == small


@root
def test_a_disk_that_fills_up_meanwhile(
    mounted: Callable[[str, str], Path], tmp_path: Path
) -> None:
    """On ramfs nothing can be set aside; a tmpfs quota of pages shows only as they are written."""
    place = mounted("tmpfs", "size=8m,mode=700")
    written = Written()
    file = OutFile("file", 6 * MIB)
    file._allocate = lambda: None  # type: ignore[method-assign]
    file.open(os.open(place, os.O_RDONLY))
    (place / "other").write_bytes(bytes(4 * MIB))
    blocks = written.write(file, a_lane(bytes(6 * MIB)))
    assert errno.ENOSPC in {block.error for block in blocks}
    file.close()
    assert os.listdir(place) == ["other"]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_file_size_limit_is_a_clear_error_with_either_engine(tmp_path: Path, engine: str) -> None:
    (tmp_path / "ckpt").mkdir()
    with running(tmp_path, a_spec(tmp_path / "ckpt", engine=engine)) as daemon:
        trainer = Trainer(daemon, lane_bytes=8 * MIB)  # a memfd's size is bounded by it as well
        assert daemon.process is not None
        resource.prlimit(daemon.process.pid, resource.RLIMIT_FSIZE, (3 * MIB, 3 * MIB))
        number = trainer.save(1, bytes(5 * MIB))
        assert "a file of that size is not allowed" in trainer.hear("failed", save=number)["error"]
        trainer.saved(trainer.save(2, bytes(MIB)))


@root
def test_a_read_only_and_a_vanished_folder(
    mounted: Callable[[str, str], Path], tmp_path: Path
) -> None:
    place = mounted("tmpfs", "size=64m,mode=700")
    with running(tmp_path, a_spec(place / "ckpt")) as daemon:
        trainer = Trainer(daemon, lane_bytes=4 * MIB)
        number = trainer.save(1, b"x")
        assert f"{place}/ckpt is gone" in trainer.hear("failed", save=number)["error"]
        (place / "ckpt").mkdir()
        trainer.saved(trainer.save(1, b"now it is there"))
        subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
        number = trainer.save(2, b"x")
        assert f"{place}/ckpt can only be read" in trainer.hear("failed", save=number)["error"]
        subprocess.run(["mount", "-o", "remount,rw", str(place)], check=True)
        trainer.saved(trainer.save(2, b"again"))
    assert content(place / "ckpt", 1) == b"now it is there"


class Faulty(ThreadEngine):
    """An engine whose results are changed on their way: what a disk or a kernel may answer."""

    def __init__(self, depth: int, results: list[int]) -> None:
        super().__init__(depth)
        self.results = results

    def wait(self, seconds: float | None) -> list[tuple[Block, int]]:
        found = super().wait(seconds)
        return [(b, self.results.pop(0)) if self.results else (b, r) for b, r in found]


@pytest.mark.parametrize(
    ("results", "error"),
    [
        ([-errno.EIO], errno.EIO),
        ([0], errno.EIO),
        ([-errno.EAGAIN, -errno.EINTR], 0),
        ([8192, 4096], 0),
        ([-errno.EINVAL], 0),
        ([10], 0),
        ([8192, -errno.ENOSPC], errno.ENOSPC),
    ],
)
def test_what_a_disk_may_answer(tmp_path: Path, results: list[int], error: int) -> None:
    """Errors are told, what is only short or refused is gone on with."""
    data = os.urandom(50_001)
    written = Written(make=lambda _, depth: Faulty(1, list(results)))
    file = an_out_file(tmp_path, len(data))
    (block,) = written.write(file, a_lane(data))
    assert block.error == error
    if not error:
        file.sync()
        file.put_in_place()
        assert (tmp_path / file.name).read_bytes() == data
    assert file.direct == (results not in ([-errno.EINVAL], [10]))
    file.close()
    assert written.logged == []


def test_an_io_error_fails_the_save_and_the_step_before_stays(tmp_path: Path) -> None:
    folder = tmp_path / "ckpt"
    folder.mkdir()
    program = f"""
import sys; sys.path.insert(0, {str(Path(__file__).resolve().parents[2])!r})
import errno, os
from crater_slurm.checkpoint import disk, outfile
real = os.pwritev
def pwritev(fd, buffers, offset):
    if ".step-000000002" in os.readlink(f"/proc/self/fd/{{fd}}"):
        raise OSError(errno.EIO, "Input/output error")
    return real(fd, buffers, offset)
os.pwritev = pwritev
from crater_slurm.checkpoint.worker import main
main()
"""
    program = f"exec({program!r})"
    with running(tmp_path, a_spec(folder, engine="threads"), program) as daemon:
        trainer = Trainer(daemon)
        trainer.saved(trainer.save(1, b"before"))
        number = trainer.save(2, b"lost")
        error = trainer.hear("failed", save=number)["error"]
        assert error.endswith(f"the disk of {folder} reports an error (Input/output error).")
        trainer.saved(trainer.save(3, b"after"))
    assert [content(folder, step) for step in (1, 3)] == [b"before", b"after"]


def test_files_are_written_in_turn(tmp_path: Path) -> None:
    """A large file that came first doesn't keep a small one waiting for its end."""
    order: list[str] = []

    class Noting(ThreadEngine):
        def write(self, fd: int, offset: int, block: Block, length: int) -> None:
            assert block.file is not None
            order.append(block.file.name)
            super().write(fd, offset, block, length)

    written = Written(make=lambda _, __: Noting(1), depth=1)
    large, small = OutFile("large", 40 * MIB), OutFile("small", 8 * MIB)
    lane = a_lane(bytes(40 * MIB))
    blocks = []
    for file in (large, small):
        file.open(os.open(tmp_path, os.O_RDONLY))
        for at in range(0, file.size, disk.BLOCK_BYTES):
            block = Block(lane, None, at, at, disk.BLOCK_BYTES)
            block.file = file
            blocks.append(block)
    written.drain.add(blocks)
    for _ in blocks:
        assert written.done.get(timeout=60).error == 0
    assert order.index("small") <= 2
    assert order[:4].count("small") >= 1
    assert order[-6:] == ["large"] * 6
    for file in (large, small):
        file.close()


def test_cancelled_blocks_are_not_written(tmp_path: Path) -> None:
    written, file = Written(), an_out_file(tmp_path, 4096)
    block = Block(a_lane(b"x" * 4096), None, 0, 0, 4096)
    block.file, block.cancelled = file, True
    written.drain.add([block])
    assert written.done.get(timeout=10) is block
    assert block.done == 0
    file.close()


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_rate_is_kept_over_time() -> None:
    clock = Clock()
    bucket = TokenBucket(100 * MIB, clock)
    sent = 0
    while clock.now < 110.0:
        delay = bucket.ask(4 * MIB)
        if delay:
            clock.now += delay
            continue
        sent += 4 * MIB
    assert 1000 * MIB <= sent <= 1030 * MIB  # ten seconds of it, and a quarter's burst


def test_a_pause_saves_up_no_more_than_a_burst() -> None:
    clock = Clock()
    bucket = TokenBucket(100 * MIB, clock)
    clock.now += 3600
    sent = 0
    while not bucket.ask(MIB):
        sent += MIB
    assert sent == 26 * MIB  # 25 MiB of tokens, and the one that makes the debt


def test_without_a_rate_nothing_waits_and_a_new_one_holds_at_once() -> None:
    clock = Clock()
    bucket = TokenBucket(0, clock)
    assert bucket.ask(1 << 40) == 0
    bucket.set_rate(MIB)
    assert bucket.ask(2 * MIB) == 0
    assert bucket.ask(1) == pytest.approx(2.0)
    bucket.set_rate(0)
    assert bucket.ask(1) == 0


def test_who_waits_for_the_rate_goes_on_when_it_is_lifted() -> None:
    clock, slept = Clock(), []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        clock.now += seconds
        if len(slept) == 3:
            bucket.set_rate(0)

    bucket = TokenBucket(MIB, clock, sleep)
    bucket.take(100 * MIB)
    bucket.take(1)
    assert slept == [0.25, 0.25, 0.25]


def test_what_is_large_on_its_way_is_no_debt_of_a_save() -> None:
    """While much is paid for, a small write waits for a moment of the rate, not for all of it."""
    clock, waits = Clock(), []

    def sleep(seconds: float) -> None:
        waits.append(bucket.ask(0))
        clock.now += seconds

    bucket = TokenBucket(MIB, clock, sleep)
    bucket.take(60 * MIB)
    assert max(waits) <= 0.25
    assert clock.now - 100 == pytest.approx(60, abs=0.5)


def test_the_drain_keeps_the_rate(tmp_path: Path) -> None:
    """With a clock that stands still no second block follows the burst."""
    clock = Clock()
    bucket = TokenBucket(16 * MIB, clock)
    written = Written(bucket=bucket)
    file = an_out_file(tmp_path, 12 * MIB)
    lane = a_lane(bytes(12 * MIB))
    blocks = [Block(lane, None, at, at, 4 * MIB) for at in range(0, 12 * MIB, 4 * MIB)]
    for block in blocks:
        block.file = file
    written.drain.add(blocks)
    written.done.get(timeout=10)
    written.done.get(timeout=10)  # the burst is 4 MiB; the second block makes the debt
    with pytest.raises(queue.Empty):
        written.done.get(timeout=0.4)
    clock.now += 1.0
    written.drain.wake()
    assert written.done.get(timeout=10).error == 0
    file.close()


@given(st.lists(st.binary(max_size=300), max_size=8))
def test_sums_of_pieces_combine_to_the_sum_of_the_whole(pieces: list[bytes]) -> None:
    total = 0
    for number, piece in enumerate(pieces):
        value = zlib.crc32(piece)
        total = sums.combined(total, value, len(piece)) if number else value
    assert total == (zlib.crc32(b"".join(pieces)) if pieces else 0)


def test_sums_of_blocks_make_the_chunks_of_a_manifest(tmp_path: Path) -> None:
    data = os.urandom(17 * MIB + 4097)
    pieces = [data[at : at + 4 * MIB] for at in range(0, len(data), 4 * MIB)]
    found = sums.chunk_sums((len(piece), sums.crc32(piece)) for piece in pieces)
    assert found == layout.chunk_sums(memoryview(data))
    (tmp_path / "file").write_bytes(data)
    fd = os.open(tmp_path / "file", os.O_RDONLY)
    assert sums.file_sums(fd, len(data)) == found
    with pytest.raises(OSError, match="ends at byte"):
        sums.file_sums(fd, len(data) + 1)
    os.close(fd)
    assert sums.chunk_sums([]) == []


@pytest.mark.skipif(not has_uring(), reason="this kernel allows no io_uring")
def test_a_ring_reports_each_write_s_own_result(tmp_path: Path) -> None:
    ring = Uring(4)
    lane = a_lane(b"a" * 4096 + b"b" * 4096)
    good = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    bad = os.open("/dev/full", os.O_WRONLY)
    results: dict[object, int] = {}
    ring.write(good, 0, lane.address, 4096, "a")
    ring.write(good, 4096, lane.address + 4096, 4096, "b")
    ring.write(bad, 0, lane.address, 4096, "full")
    ring.write(-1, 0, lane.address, 4096, "closed")
    while len(results) < 4:
        results |= dict(ring.wait(5.0))
    assert results == {"a": 4096, "b": 4096, "full": -errno.ENOSPC, "closed": -errno.EBADF}
    assert os.pread(good, 8192, 0) == b"a" * 4096 + b"b" * 4096
    assert ring.wait(0.01) == []
    ring.wake()
    assert ring.wait(None) == []
    for _ in range(3000):  # the queues go round many times
        ring.write(good, 0, lane.address, 4096, "again")
        assert ring.wait(None) == [("again", 4096)]
    ring.close()
    os.close(good)
    os.close(bad)


def test_without_io_uring_threads_take_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(depth: int) -> UringEngine:
        raise PermissionError(errno.EPERM, "io_uring_disabled")

    monkeypatch.setattr(disk, "UringEngine", refuse)
    assert disk.make_engine("auto", 16).name == "threads"
    assert disk.make_engine("io_uring", 16).name == "threads"


def test_a_signal_does_not_disturb_the_drain(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; signal.signal(signal.SIGALRM, lambda *_: None); "
        "signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001); "
        f"sys.path[:0] = [{str(Path(__file__).parent)!r}, {str(Path(__file__).resolve().parents[2])!r}]; "
        "import pathlib, test_checkpoint_disk as t; place = pathlib.Path(sys.argv[1]); "
        "data = os.urandom(30 << 20); file = t.an_out_file(place, len(data)); "
        "w = t.Written('auto'); assert all(b.error == 0 for b in w.write(file, t.a_lane(data))); "
        "file.sync(); file.put_in_place(); "
        "assert (place / file.name).read_bytes() == data; os._exit(7)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=120)
    assert done.returncode == 7
