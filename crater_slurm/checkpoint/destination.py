"""Where a job's checkpoints go: a path or a URL with placeholders, taken apart and checked.

Pure functions for crater-io-daemon. A destination may come from a user, and so may the names put
into it: nothing a user writes leads out of the folder or prefix that the rest of the text names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from crater_slurm.errors import UsageError

SCHEMES = ("s3", "gs", "az")
#: What a destination may name: user, job, array job, array task, job's name, cluster.
PLACEHOLDERS = "ujAaxc"
_MOST = 512
_UNSAFE = re.compile(r"[^A-Za-z0-9._=+@-]")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}\Z")
_PIECE = re.compile(r"[A-Za-z0-9._=+@-]{1,255}\Z")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_PIECE_BYTES = 64
#: A user's name that is safe as one component of a path or an object's key.
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._@+-]{0,63}\$?\Z")


@dataclass(frozen=True, slots=True)
class Place:
    """A place for steps. ``kind``: path, s3, gs or az; ``bucket`` is empty for a path.

    ``pieces`` are the folders below the root or the bucket.
    """

    kind: str
    bucket: str
    pieces: tuple[str, ...]

    @property
    def url(self) -> str:
        """The destination as it is written."""
        if self.kind == "path":
            return "/" + "/".join(self.pieces)
        return f"{self.kind}://" + "/".join((self.bucket, *self.pieces))

    @property
    def prefix(self) -> str:
        """What keys in the bucket begin with: empty, or with a slash at its end."""
        return "".join(f"{piece}/" for piece in self.pieces)


def safe(name: str) -> str:
    """A name as one piece of a path: no slash, nothing hidden, at most 64 characters."""
    text = _UNSAFE.sub("_", name)[:_PIECE_BYTES]
    return "_" + text[1:] if text.startswith(".") else text or "_"


def fill(template: str, values: Mapping[str, str]) -> str:
    """Put values in for %u %j %A %a %x %c; ``%%`` is a percent sign. Raises UsageError, also where
    a value is not known."""

    def one(match: re.Match[str]) -> str:
        letter = match.group(1)
        if letter == "%":
            return "%"
        if not letter or letter not in PLACEHOLDERS:
            known = " ".join(f"%{key}" for key in PLACEHOLDERS)
            raise UsageError(
                f"The checkpoint destination {template!r:.200} has %{letter}; known are {known} %%."
            )
        if not values.get(letter):
            raise UsageError(
                f"The checkpoint destination {template!r:.200} has %{letter}, which is not known "
                "here."
            )
        return safe(values[letter])

    return re.sub(r"%(.|\Z)", one, template, flags=re.DOTALL)


def parse(text: str) -> Place:
    """Take a path or a URL apart, placeholders filled in before. Raises UsageError."""
    if len(text) > _MOST or _CONTROL.search(text):
        raise UsageError(
            f"The checkpoint destination {text!r:.80} is too long or has control characters; "
            f"at most {_MOST} plain characters."
        )
    if text.startswith("/"):
        return Place("path", "", _pieces(text, text[1:], plain=False))
    scheme, mark, rest = text.partition("://")
    if not mark or scheme not in SCHEMES:
        raise UsageError(
            f"The checkpoint destination {text!r:.80} is neither an absolute path nor a URL; "
            "write /path, s3://bucket/prefix, gs://bucket/prefix or az://container/prefix."
        )
    bucket, _, prefix = rest.partition("/")
    if not _BUCKET.match(bucket):
        raise UsageError(f"The checkpoint destination {text!r:.80} names no valid bucket.")
    return Place(scheme, bucket, _pieces(text, prefix, plain=True))


def _pieces(text: str, rest: str, *, plain: bool) -> tuple[str, ...]:
    pieces = tuple(rest.rstrip("/").split("/")) if rest.rstrip("/") else ()
    for piece in pieces:
        if piece in ("", ".", "..") or (plain and not _PIECE.match(piece)):
            raise UsageError(
                f"The checkpoint destination {text!r:.80} has the part {piece!r:.40}; parts are "
                "names, without . or .. or empty ones"
                + (", of letters, digits and ._=+@-." if plain else ".")
            )
    if not plain and not pieces:
        raise UsageError("The checkpoint destination is /; name a folder of your own.")
    return pieces


def home(site_url: str, user: str) -> Place:
    """The part of a site's store that is a user's: ``<site url>/<user>``. Raises UsageError."""
    if not _USER.match(user) or user in (".", ".."):
        raise UsageError(f"The user name {user!r:.80} can't be a folder of {site_url}.")
    site = parse(site_url)
    return Place(site.kind, site.bucket, (*site.pieces, user))


def within(outer: Place, inner: Place) -> bool:
    """Whether ``inner`` is ``outer`` or lies below it."""
    return (outer.kind, outer.bucket) == (inner.kind, inner.bucket) and inner.pieces[
        : len(outer.pieces)
    ] == outer.pieces
