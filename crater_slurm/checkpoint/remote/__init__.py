"""Where checkpoints go beyond the node: one interface, and who answers for which kind of URL."""

from __future__ import annotations

import contextlib
from typing import Any

from crater_slurm.checkpoint import destination
from crater_slurm.checkpoint.remote import credentials
from crater_slurm.checkpoint.remote.store import RemoteError, Store
from crater_slurm.checkpoint.spec import Remote
from crater_slurm.errors import UsageError, nearest

#: Told by the daemon, and meant for this part itself: below it the site's credentials hold.
ROOT = "root"


def open_store(remote: Remote, home: str) -> Store:
    """The store of a destination; its library is loaded now. Raises RemoteError.

    ``home``: the user's, whose profiles are read when the job chose one.
    """
    try:
        place = destination.parse(remote.url)
    except UsageError as error:
        raise RemoteError(str(error), lasting=True) from None
    _check_root(remote, place)
    if place.kind == "path":
        from crater_slurm.checkpoint.remote import path

        _check(remote, path.OPTIONS)
        return path.PathStore(place.url, remote.options)
    if place.kind == "s3":
        return _s3(remote, place, home)
    from crater_slurm.checkpoint.remote import obstore

    _check(remote, obstore.OPTIONS)
    return obstore.connect(place, remote, home)


def preload(url: str) -> None:
    """Load what a URL's kind of store needs, while the process may still read the libraries."""
    if url.startswith("s3://"):
        from crater_slurm.checkpoint.remote import s3, s3_client  # noqa: F401

        s3_client.preload()
    elif url.startswith(("gs://", "az://")):
        with contextlib.suppress(ImportError):
            import obstore.store

            from crater_slurm.checkpoint.remote import obstore as ours  # noqa: F401

            del obstore
    elif url.startswith("/"):
        from crater_slurm.checkpoint.remote import path  # noqa: F401


def _s3(remote: Remote, place: destination.Place, home: str) -> Store:
    from crater_slurm.checkpoint.remote import s3, s3_client

    _check(remote, s3.OPTIONS)
    text: dict[str, Any] = remote.options
    reach = s3_client.Place(
        endpoint=str(text.get("endpoint") or ""),
        region=str(text.get("region") or ""),
        addressing=str(text.get("addressing") or "auto"),
        ca_bundle=str(text.get("ca_bundle") or ""),
        connections=2 * int(text.get("connections", 4)) + 4,
        read_seconds=float(text.get("read_seconds", 60)),
    )
    where = f"{place.url} at {reach.endpoint}" if reach.endpoint else place.url
    client = s3_client.Client(where, credentials.of(remote, home), reach)
    return s3.S3Store(place, client, remote.options)


def _check(remote: Remote, known: dict[str, str]) -> None:
    for key in remote.options:
        if key not in known and key != ROOT:
            close = nearest(key, list(known))
            raise RemoteError(
                f"{remote.url}: the option {key!r:.40} is unknown; "
                + (f"{close} is near. " if close else "")
                + f"Known are {', '.join(known)}.",
                lasting=True,
            )


def _check_root(remote: Remote, place: destination.Place) -> None:
    """The site's credentials reach the user's own part of the store and nothing else."""
    root = remote.options.get(ROOT)
    if root is not None and not destination.within(destination.parse(str(root)), place):
        raise RemoteError(f"{remote.url} lies outside {root}, the user's own part.", lasting=True)
