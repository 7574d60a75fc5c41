"""Where a job's checkpoints go: a path or a URL with placeholders, taken apart and checked.

Pure functions for crater-io-daemon. A destination may come from a user, and so may the names put
into it: nothing a user writes leads out of the folder or prefix that the rest of the text names.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from crater_slurm.errors import UsageError

SCHEMES = ("s3", "gs", "az")
PLACEHOLDERS = {
    "u": "user",
    "j": "job_id",
    "A": "array_job_id",
    "a": "array_task_id",
    "x": "job_name",
    "c": "cluster",
}
_MOST = 512
_UNSAFE = re.compile(r"[^A-Za-z0-9._=+@-]")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}\Z")
_PIECE = re.compile(r"[A-Za-z0-9._=+@-]{1,255}\Z")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_PIECE_BYTES = 64


@dataclass(frozen=True, slots=True)
class Names:
    """What the placeholders stand for; an empty one becomes ``_``."""

    user: str = ""
    job_id: str = ""
    array_job_id: str = ""
    array_task_id: str = ""
    job_name: str = ""
    cluster: str = ""


@dataclass(frozen=True, slots=True)
class Destination:
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


def fill(template: str, names: Names) -> str:
    """Put names in for %u %j %A %a %x %c; ``%%`` is a percent sign. Raises UsageError."""

    def one(match: re.Match[str]) -> str:
        letter = match.group(1)
        if letter == "%":
            return "%"
        if letter not in PLACEHOLDERS:
            known = " ".join(f"%{key}" for key in PLACEHOLDERS)
            raise UsageError(
                f"The checkpoint destination {template!r:.200} has %{letter}; known are {known} %%."
            )
        return safe(getattr(names, PLACEHOLDERS[letter]))

    return re.sub(r"%(.|\Z)", one, template, flags=re.DOTALL)


def parse(text: str) -> Destination:
    """Take a path or a URL apart, placeholders filled in before. Raises UsageError."""
    if len(text) > _MOST or _CONTROL.search(text):
        raise UsageError(
            f"The checkpoint destination {text!r:.80} is too long or has control characters; "
            f"at most {_MOST} plain characters."
        )
    if text.startswith("/"):
        return Destination("path", "", _pieces(text, text[1:], plain=False))
    scheme, mark, rest = text.partition("://")
    if not mark or scheme not in SCHEMES:
        raise UsageError(
            f"The checkpoint destination {text!r:.80} is neither an absolute path nor a URL; "
            "write /path, s3://bucket/prefix, gs://bucket/prefix or az://container/prefix."
        )
    bucket, _, prefix = rest.partition("/")
    if not _BUCKET.match(bucket):
        raise UsageError(f"The checkpoint destination {text!r:.80} names no valid bucket.")
    return Destination(scheme, bucket, _pieces(text, prefix, plain=True))


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


def home(site_url: str, user: str) -> Destination:
    """The part of a site's store that is a user's: ``<site url>/<user>``. Raises UsageError."""
    if safe(user) != user:
        raise UsageError(f"The user name {user!r:.80} can't be part of an object's name.")
    site = parse(site_url)
    return Destination(site.kind, site.bucket, (*site.pieces, user))


def within(outer: Destination, inner: Destination) -> bool:
    """Whether ``inner`` is ``outer`` or lies below it."""
    return (outer.kind, outer.bucket) == (inner.kind, inner.bucket) and inner.pieces[
        : len(outer.pieces)
    ] == outer.pieces


def check_site(text: str, site_url: str, user: str) -> Destination:
    """A destination reached with the site's credentials: only the user's own part of the store.

    Raises UsageError for anything else, so that nobody reads or writes another's objects with it.
    """
    own, asked = home(site_url, user), parse(text)
    if not within(own, asked):
        raise UsageError(
            f"The checkpoint destination {asked.url} lies outside {own.url}, which is what the "
            "site's credentials are for. Put it below that, or name a profile of your own."
        )
    return asked
