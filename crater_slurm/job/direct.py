"""A rank writes its own file: without a daemon, without a worker, or when the lane has no room.

The files lie as docs/checkpoint-format.md says, so whoever looks for checkpoints finds them. One
rank alone writes a folder aside and renames it; of several ranks each writes its file and its own
manifest, each under another name first. Nothing is removed before what replaces it is on disk.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from dataclasses import dataclass

from crater_slurm.job import layout
from crater_slurm.job.copying import Image, cpu_count, pointer_of, start_threads
from crater_slurm.job.tensorfile import crc32

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True)
class Part:
    """What a rank saves: one file of one step. ``ranks`` is how many save, ``rank`` which of them
    this is, ``run`` and the rest what the manifest says of the job; ``began`` is when the process
    was started."""

    name: str
    step: int
    rank: int
    ranks: int
    run: str = ""
    job_id: str = ""
    cluster: str = ""
    node: str = ""
    began: float = 0.0

    def manifest(self, files: list[layout.FileEntry]) -> layout.Manifest:
        """The manifest of these files."""
        return layout.Manifest(
            self.step, self.ranks, files, self.name, self.run, self.job_id, self.cluster,
            self.node or socket.gethostname()[:64], time.time(),
        )  # fmt: skip


def write(
    folder: str, part: Part, image: Image, *, aside: bool = False, shared: bool = False
) -> str:
    """Write a rank's file and its manifest; the step's folder. Raises OSError, LayoutError.

    When it returns, both are on disk; when it does not, nothing has a final name. ``aside``: a
    worker may be at work in the partial folder, so don't use it. ``shared``: workers of several
    runs bring their steps there, too.
    """
    if shared:  # not below a mount that is missing
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o750)
    else:
        os.makedirs(folder, mode=0o700, exist_ok=True)
    final = layout.step_name(part.step, part.name)
    target = os.path.join(folder, final)
    if _another_run(target, part.run) or (shared and not _claim(target, part)):
        target = os.path.join(folder, layout.step_name(part.step, part.name, part.run))
    if part.ranks == 1 and not (aside or shared) and not os.path.exists(target):
        partial = os.path.join(folder, layout.partial_name(os.path.basename(target)))
        os.makedirs(partial, mode=0o700, exist_ok=True)
        try:
            _into(partial, part, image)
            os.rename(partial, target)
        except OSError:
            _remove_tree(partial)
            raise
    else:
        os.makedirs(target, mode=0o700, exist_ok=True)
        _into(target, part, image)
    sync_folder(folder)
    return target


def write_file(path: str, image: Image) -> list[str]:
    """Write an image to a new file and make sure that it is on disk; its checksums."""
    sums = [""] * -(-image.size // layout.CHUNK_BYTES)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        _Writing(fd, image, sums).run()
        os.fsync(fd)
    finally:
        os.close(fd)
    return sums


def sync_folder(path: str) -> None:
    """Make sure that names in a folder are on disk; file systems that can't are left alone."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):
            os.fsync(fd)
    finally:
        os.close(fd)


def _another_run(target: str, run: str) -> bool:
    try:
        return any(manifest.run != run for manifest in layout.read_parts(target))
    except OSError:
        return False


def _claim(target: str, part: Part) -> bool:
    """Whether a step's folder at the destination is this run's; it is the first's that comes, by
    the file ``run``, which workers look for as well."""
    os.makedirs(target, mode=0o750, exist_ok=True)
    path = os.path.join(target, layout.CLAIM)
    temporary = os.path.join(target, f".{layout.CLAIM}.{socket.gethostname()[:64]}.{os.getpid()}")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(part.run)
        file.flush()
        os.fsync(file.fileno())
    try:
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        os.unlink(temporary)
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read(200) == part.run


def _into(folder: str, part: Part, image: Image) -> None:
    """File and manifest into a folder, each by rename. A file that a manifest there names is not
    touched: the new one gets another name, and the old one goes when nothing names it any more.
    Other ranks' files in a manifest of the same name (a worker's) stay in it."""
    manifest_name = layout.part_name([part.rank])
    _leave_out_older(folder, part)
    known = {file.name for other in layout.read_parts(folder) for file in other.files}
    kept, old = _entries(os.path.join(folder, manifest_name), part)
    name, again = layout.file_name(part.rank), 1
    while name in known:
        again += 1
        name = f"rank-{part.rank:05d}.{again}.safetensors"
    with _aside(folder, name) as aside:
        sums = write_file(aside, image)
    entry = layout.FileEntry(name, part.rank, image.size, sums)
    with _aside(folder, manifest_name) as aside, open(aside, "w", encoding="utf-8") as file:
        file.write(part.manifest([*kept, entry]).to_json())
        file.flush()
        os.fsync(file.fileno())
    sync_folder(folder)
    for gone in old:
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(folder, gone))


def _leave_out_older(folder: str, part: Part) -> None:
    """Take away what this node's ranks saved of the step before the training was started anew, if
    it was: one rank's old file and another's new one make no checkpoint. This rank's own stays
    until the new one is there, unless others' are in the same manifest."""
    for old in layout.read_parts(folder):
        same = (old.run, old.node, old.world_size) == (part.run, part.node, part.ranks)
        if same and old.time < part.began and old.ranks != [part.rank]:
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(folder, layout.part_name(old.ranks)))


def _entries(path: str, part: Part) -> tuple[list[layout.FileEntry], list[str]]:
    """What a manifest names: other ranks' entries, and this rank's files, which will go. Nothing
    where there is none, it is damaged, or it is another run's."""
    try:
        with open(path, encoding="utf-8") as file:
            manifest = layout.Manifest.from_json(file.read())
    except (OSError, ValueError, layout.LayoutError):
        return [], []
    own = [file.name for file in manifest.files if file.rank == part.rank]
    if (manifest.run, manifest.world_size) != (part.run, part.ranks):
        return [], own
    return [file for file in manifest.files if file.rank != part.rank], own


@contextlib.contextmanager
def _aside(folder: str, name: str) -> Iterator[str]:
    """A path to write to; it gets its name when all went well and goes when it did not."""
    path = os.path.join(folder, f".{name}.partial")
    try:
        yield path
        os.rename(path, os.path.join(folder, name))
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(path)
        raise


def _remove_tree(path: str) -> None:
    import shutil

    shutil.rmtree(path, ignore_errors=True)


class _Writing:
    """Several threads that each take a chunk, sum it up and write it to its place."""

    def __init__(self, fd: int, image: Image, sums: list[str]) -> None:
        self.fd, self.image, self.sums = fd, image, sums
        self.left = list(range(len(sums)))[::-1]
        self.error: Exception | None = None
        self.crc32 = crc32()
        self.lock = threading.Lock()

    def run(self) -> None:
        helpers = start_threads(min(2 * cpu_count(), len(self.left)) - 1, self._work)
        self._work()
        for helper in helpers:
            helper.join()
        if self.error is not None:
            raise self.error

    def _work(self) -> None:
        scratch: bytearray | None = None
        while self.error is None:
            try:
                number = self.left.pop()
            except IndexError:
                return
            at = number * layout.CHUNK_BYTES
            want = min(layout.CHUNK_BYTES, self.image.size - at)
            try:
                view = self.image.view(at, want)
                if view is None:
                    scratch = scratch or bytearray(layout.CHUNK_BYTES)
                    self.image.copy(at, want, pointer_of(scratch))
                    view = memoryview(scratch)[:want]
                self.sums[number] = f"{self.crc32(view):08x}"
                while want:
                    done = os.pwrite(self.fd, view[-want:], at)
                    at, want = at + done, want - done
            except Exception as error:
                self.error = error
