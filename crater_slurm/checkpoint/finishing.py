"""From partial to final: the manifest, the folder's new name, and what had that name before.

Between open folders, never by path. Whatever is cut off here, at any point, leaves either the
partial folder with all that is needed to finish it or the final one whole.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import time

from crater_slurm.checkpoint import entries, syscalls
from crater_slurm.checkpoint.trees import open_folder, remove
from crater_slurm.job import layout
from crater_slurm.job.layout import Manifest

_IN_THE_WAY = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR, errno.EISDIR)


def complete(partial: int, manifest: Manifest) -> None:
    """Put the manifest beside the files of an open partial folder, on disk; nothing else stays."""
    part = layout.part_name(manifest.ranks)
    entries.put(partial, part, manifest.to_json(), durable=True)
    wanted = {file.name for file in manifest.files} | {part}
    for other in set(os.listdir(partial)) - wanted:
        remove(other, partial)
    os.fsync(partial)


def put_in_place(parent: int, partial: str, name: str) -> None:
    """Give a completed folder its final name, durably. What has the name already changes places
    with it in one step, and is removed after."""
    try:
        os.rename(partial, name, src_dir_fd=parent, dst_dir_fd=parent)
    except OSError as error:
        if error.errno not in _IN_THE_WAY:
            raise
        try:
            syscalls.exchange(parent, partial, name)
        except OSError:  # a file system that can't: for a moment neither has the name
            set_aside(parent, name)
            os.rename(partial, name, src_dir_fd=parent, dst_dir_fd=parent)
    os.fsync(parent)
    with contextlib.suppress(OSError):  # the one before; it is removed at the next start
        remove(partial, parent)


def give_free_name(parent: int, partial: str, name: str, run: str) -> str:
    """Rename a completed folder to ``name`` or, where that is taken, ``name.run``; which."""
    named = f"{name}.{run}"
    for target in (name, named):
        try:
            os.rename(partial, target, src_dir_fd=parent, dst_dir_fd=parent)
        except OSError as error:
            if error.errno not in _IN_THE_WAY:
                raise
        else:
            os.fsync(parent)
            return target
    put_in_place(parent, partial, named)  # of what can't be read, or it would have been found
    return named


def set_aside(parent: int, name: str) -> str:
    """Take a step's final name away; the partial name that it has now."""
    aside = layout.partial_name(f"{name}.removed-{os.getpid()}-{time.monotonic_ns()}")
    os.rename(name, aside, src_dir_fd=parent, dst_dir_fd=parent)
    return aside


def join(
    parent: int, partial: int, target: str, manifest: Manifest, there: set[int], taken: set[str]
) -> None:
    """Put the ranks that a final folder lacks into it, their manifest last.

    ``there`` are the ranks that it has, ``taken`` the names of their files.
    """
    files = [file for file in manifest.files if file.rank not in there]
    if not files:
        return
    if both := taken & {file.name for file in files}:
        raise FileExistsError(errno.EEXIST, f"{min(both)} is there already")
    final = open_folder(target, parent)
    try:
        for file in files:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(file.name, dir_fd=final)
            os.link(file.name, file.name, src_dir_fd=partial, dst_dir_fd=final)
        os.fsync(final)
        whole = dataclasses.replace(manifest, files=files)
        part = layout.part_name(whole.ranks)
        entries.put(final, part, whole.to_json(), durable=True)
        os.fsync(final)
    finally:
        os.close(final)
