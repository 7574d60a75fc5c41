"""Folders for checkpoints: which there are, and which of them takes a file.

The node's cache, a folder that the user names, the job's destination where that is a folder, and
./checkpoints where nothing was named. The destination is shared with workers, so a step's folder
there is claimed as they claim it.
"""

from __future__ import annotations

import os

from crater_slurm.job import direct, layout
from crater_slurm.job.saving import CheckpointError, tell

TYPE_CHECKING = False
if TYPE_CHECKING:
    from crater_slurm.job.copying import Image
    from crater_slurm.job.environment import Environment

FOLDER = "CRATER_CHECKPOINT_DIR"


def readable(env: Environment, own: str | None) -> list[str]:
    """Where checkpoints may lie: the node's cache, the user's folder, else ./checkpoints."""
    given = [path for path in (env.folder, own) if path]
    return given if own else [*given, _default()]


def writable(env: Environment, own: str | None, *, past_cache: bool = False) -> list[str]:
    """Where a file is written, the best first. ``past_cache``: the cache has refused it, and the
    training has gone on meanwhile. Then ./checkpoints, which nobody chose, is no place for it."""
    named = [own] if own and own != env.folder else []
    away = [env.destination] if env.destination else []
    if past_cache:
        return [*named, *away]
    cache = [env.folder] if env.folder else []
    return [*cache, *named, *away, *([] if own else [_default()])]


def write(
    env: Environment,
    own: str | None,
    image: Image,
    part: direct.Part,
    *,
    aside: bool,
    past_cache: bool,
) -> None:
    """Write a file into the first folder that takes it. Raises CheckpointError.

    ``aside``: a worker may be at work in the cache.
    """
    failures = []
    folders = writable(env, own, past_cache=past_cache)
    if not folders:
        raise CheckpointError(f"With {FOLDER} set to another folder it would go there.")
    for folder in folders:
        try:
            direct.write(folder, part, image, aside=aside, shared=folder == env.destination)
        except (OSError, layout.LayoutError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            failures.append(f"{folder}: {reason or error}")
            continue
        if folder not in (env.folder, own, env.destination):
            tell(f"checkpoints go to {folder}; set {FOLDER} for another folder")
        if past_cache:
            tell(f"{part.name} {part.step} goes to {folder}: the node's cache didn't take it")
        if failures:
            tell(f"{part.name} {part.step} went to {folder}, since {'; '.join(failures)}")
        return
    raise CheckpointError(
        f"{part.name} {part.step} of rank {part.rank} ({image.size} bytes) can't be written "
        f"anywhere ({'; '.join(failures)}). Free some space, or set {FOLDER} to a folder that "
        "can be written."
    )


def _default() -> str:
    return os.path.join(os.getcwd(), "checkpoints")
