"""Stages an object, or all objects below a prefix, from S3 into the cache.

With a profile of the user's own, any bucket that it may read. With the site's credentials only the
user's own part of the site's store, like checkpoints.
"""

from __future__ import annotations

import dataclasses
import os
from concurrent.futures import ThreadPoolExecutor

from crater_slurm.checkpoint import destination, remote, stage_copy
from crater_slurm.checkpoint.remote.s3 import S3Store
from crater_slurm.checkpoint.remote.store import Listed, pieces
from crater_slurm.checkpoint.spec import Spec
from crater_slurm.checkpoint.stage_copy import StageError, Way
from crater_slurm.errors import UsageError

_AT_ONCE = 8
_PIECE_BYTES = 8 << 20


def stage(spec: Spec, url: str, local: str, way: Way) -> None:
    """Make ``local`` a copy of an object or a prefix. Raises StageError, RemoteError, OSError."""
    store, prefix = _store(spec, url)
    try:
        objects = [o for o in store.objects("") if o.name == "" or o.name.startswith("/")]
        whole = [o for o in objects if o.name == ""]
        if whole and len(objects) == 1:
            _fetch(store, whole[:1], stage_copy.partial(local), local, way, single=True)
            return
        inside = [o for o in objects if o.name.strip("/") and not o.name.endswith("/")]
        if not inside:
            raise StageError(f"nothing is there below {prefix}")
        _fetch(store, inside, stage_copy.partial(local), local, way, single=False)
    finally:
        store.close()


def _store(spec: Spec, url: str) -> tuple[S3Store, str]:
    try:
        place = destination.parse(url)
        site = spec.remote.options.get(remote.ROOT) or spec.remote.url
        own = destination.parse(str(site)) if site else None
    except UsageError as error:
        raise StageError(str(error)) from None
    if place.kind != "s3" or not place.pieces:
        raise StageError("a URL to stage names an object or a prefix: s3://bucket/data")
    if not spec.remote.profile and (own is None or not destination.within(own, place)):
        raise StageError(
            "the site's credentials reach only "
            + (f"{own.url}; " if own else "a destination's own part; ")
            + "name a profile of your own for other buckets"
        )
    options = {k: v for k, v in spec.remote.options.items() if k != "verify"}
    asked = dataclasses.replace(spec.remote, url=place.url, options=options)
    store = remote.open_store(asked, spec.home)
    assert isinstance(store, S3Store)
    return store.without_slash(), place.url


def _fetch(
    store: S3Store, objects: list[Listed], new: str, old: str, way: Way, *, single: bool
) -> None:
    goals = [(o, "" if single else _safe(o.name)) for o in objects]
    missing = [(o, path) for o, path in goals if not _same(old, path, o)]
    if not missing:
        way.progress(sum(o.size for o in objects))
        return
    way.fits(sum(o.size for o, _ in missing))
    if not single:
        os.makedirs(new, 0o700, exist_ok=True)

    def one(goal: tuple[Listed, str]) -> None:
        way.check()
        _one(store, goal[0], f"{new}{goal[1]}", f"{old}{goal[1]}", way)

    with ThreadPoolExecutor(_AT_ONCE, "crater-stage") as pool:
        for _ in pool.map(one, goals):
            pass
    stage_copy.publish(old)


def _same(local: str, path: str, found: Listed) -> bool:
    return stage_copy.same(f"{local}{path}", found.size, int(found.time) * 10**9)


def _one(store: S3Store, found: Listed, to: str, old: str, way: Way) -> None:
    stamp = int(found.time) * 10**9
    if stage_copy.same(to, found.size, stamp):
        way.progress(found.size)
        return
    os.makedirs(to.rpartition("/")[0], 0o700, exist_ok=True)
    if stage_copy.same(old, found.size, stamp) and not os.path.lexists(to):
        os.link(old, to)
        way.progress(found.size)
        return
    how = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(to, how, 0o600)
    try:
        os.ftruncate(fd, found.size)
        for start, count in pieces(found.size, _PIECE_BYTES):
            way.check()
            way.limiter.take(count)
            buffer = memoryview(bytearray(count))
            store.get_range(found.name, start, buffer)
            os.pwrite(fd, buffer, start)
            way.progress(count)
        os.utime(fd, ns=(stamp, stamp))
    finally:
        os.close(fd)


def _safe(name: str) -> str:
    """A key below the prefix as a path below a folder. Raises StageError for one that leads out."""
    parts = name.strip("/").split("/")
    if any(part in ("", ".", "..") or "\0" in part or len(part) > 255 for part in parts):
        raise StageError(f"the object {name!r:.80} has no name that a file could have")
    return "/" + "/".join(parts)
