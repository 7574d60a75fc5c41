"""Decides whether the plan in a job's comment counts: genuine, this user's, and used once.

A job's comment is the user's to edit. What doesn't verify is treated as no plan at all, with the
reason in the log and in the job's record; it never stops a job.
"""

from __future__ import annotations

import hashlib
import logging
import stat
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from crater_slurm.model import token
from crater_slurm.model.plan import Plan

_log = logging.getLogger("crater.node.admission")


@dataclass(frozen=True, slots=True)
class Admission:
    """``plan`` counts when it is there. ``problem`` says why a token that was there does not."""

    plan: Plan | None = None
    token: str = ""
    problem: str = ""


class KeyRing:
    """The cluster's plan keys, read again when the file changes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._stamp: tuple[int, int, int] | None = None
        self._keys: tuple[bytes, ...] = ()

    def keys(self) -> tuple[bytes, ...]:
        """Keys, newest first; none when the file can't be read, which is logged."""
        with self._lock:
            try:
                status = self._path.stat()
                stamp = (status.st_mtime_ns, status.st_size, status.st_ino)
                if stamp != self._stamp:
                    self._keys = _read_keys(self._path, status.st_mode)
                    self._stamp = stamp
            except (OSError, ValueError) as error:
                _log.warning("admission: couldn't read the plan key %s: %s", self._path, error)
                self._keys, self._stamp = (), None
            return self._keys


def _read_keys(path: Path, mode: int) -> tuple[bytes, ...]:
    if stat.S_IMODE(mode) & 0o077:
        _log.warning("admission: %s is readable by others, who can then sign plans", path)
    lines = (line.strip() for line in path.read_text().splitlines())
    keys = tuple(bytes.fromhex(line) for line in lines if line and not line.startswith("#"))
    if any(len(key) < 16 for key in keys):
        raise ValueError("a key is shorter than 16 bytes")
    return keys


def fingerprint(text: str) -> str:
    """Short name of a token for the records; the token itself stays out of them."""
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:24]


def admit(
    texts: Iterable[str],
    *,
    job_id: str,
    uid: int,
    cluster: str,
    keys: Callable[[], tuple[bytes, ...]],
    holder_of: Callable[[str], str | None],
) -> Admission:
    """Judge the token in the first of ``texts`` (comment, extra) that holds one.

    ``holder_of`` tells which job came with a token before: a second job with the same one has
    copied it, unless the filter signed it for an array, whose tasks are jobs of their own.
    """
    for text in texts:
        if token.PREFIX not in text:
            continue
        print_ = fingerprint(token.find(text) or text)
        known = keys()
        if not known:
            return Admission(None, print_, "this node has no plan key to check the plan with")
        try:
            signed = token.verify(text, known, uid, cluster)
        except token.TokenError as error:
            return Admission(None, print_, str(error))
        if signed is None:
            continue
        holder = holder_of(print_)
        if holder not in (None, job_id) and not signed.array:
            return Admission(None, print_, f"the plan token is a copy of job {holder}'s")
        return Admission(signed.plan, print_)
    return Admission()
