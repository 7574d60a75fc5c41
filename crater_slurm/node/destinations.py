"""Where a job's checkpoints go and with whose credentials: the plan's wish within the site's rules.

The site's credentials open only ``<url>/<user>/...`` of the store that they belong to, so that no
user reads or writes another's objects through us. A destination that can't be used is a problem in
words, never a reason to stop a job: its checkpoints then stay on the node.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from crater_slurm.checkpoint import destination
from crater_slurm.checkpoint.destination import Place
from crater_slurm.checkpoint.spec import Remote
from crater_slurm.config.checkpoints import Checkpoints
from crater_slurm.config.checkpoints import Remote as Store
from crater_slurm.errors import UsageError
from crater_slurm.model.plan import Plan

_LINE = re.compile(r"([A-Za-z][A-Za-z0-9_]{0,63})\s*[=:]\s*(.*)\Z")
_MOST_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Destination:
    """``url`` is empty when checkpoints stay on the node, ``problem`` why they do unasked."""

    url: str = ""
    credentials: str = ""
    store: Store | None = None
    problem: str = ""

    def remote(self) -> Remote:
        """What the worker is told, with the secrets; raises DestinationError without them."""
        if not self.url:
            return Remote()
        options: dict[str, object] = {}
        if self.store is not None:
            named = ("endpoint", "region", "addressing", "ca_bundle")
            found = self.store.model_dump(mode="json", include=set(named))
            options = {name: value for name, value in found.items() if value not in ("", None)}
        if self.credentials.startswith("own"):
            profile = self.credentials.partition(":")[2] or "default"
            return Remote(url=self.url, options=options, profile=profile)
        file = self.store.credentials_file if self.store is not None else None
        secrets = read_credentials(file) if file is not None else {}
        return Remote(url=self.url, options=options, credentials=secrets)


class DestinationError(Exception):
    """The credentials can't be used; the message is a clause for "couldn't"."""


def wish(plan: Plan | None, settings: Checkpoints) -> str:
    """The job's destination with its placeholders; empty when checkpoints stay on the node."""
    asked = plan.checkpoint if plan else None
    if asked in (None, "off"):
        return ""
    return settings.destination if asked == "on" else asked


def needs_slurm(text: str) -> bool:
    """Whether a destination names what only slurmctld knows: array job, array task, job's name."""
    return bool(re.search(r"%[Aax]", text.replace("%%", "")))


def resolve(
    plan: Plan | None, settings: Checkpoints, user: str, values: Mapping[str, str]
) -> Destination:
    """The destination of a job of ``user``; ``values`` are the placeholders' (u, j, A, a, x, c)."""
    wanted = wish(plan, settings)
    if not wanted:
        return Destination()
    try:
        place = destination.parse(destination.fill(wanted, values))
        if place.kind == "path":
            return Destination(url=place.url)
        store = _store_of(place, settings.remotes)
        credentials = (plan.checkpoint_credentials if plan else None) or "site"
        if credentials != "site":
            return Destination(url=place.url, credentials=credentials, store=store)
        return _with_site_credentials(place, store, user, settings.remotes)
    except UsageError as error:
        return Destination(problem=str(error))


def own(url: str, settings: Checkpoints, profile: str, endpoint: str = "") -> Remote:
    """A place as a person reaches it with keys of their own; what is known of the site's store
    that it is in helps. Raises UsageError for what is no place."""
    place = destination.parse(url)
    if place.kind == "path":
        return Remote(url=place.url)
    store = _store_of(place, settings.remotes)
    found = Destination(url=place.url, credentials=f"own:{profile}", store=store).remote()
    options = {**found.options, "endpoint": endpoint} if endpoint else found.options
    return replace(found, options=options)


def _store_of(place: Place, stores: Sequence[Store]) -> Store | None:
    """The site's store that a place is in; of several the one that says most."""
    inside = [s for s in stores if destination.within(destination.parse(s.url), place)]
    return max(inside, key=lambda s: len(s.url), default=None)


def _with_site_credentials(
    place: Place, store: Store | None, user: str, stores: Sequence[Store]
) -> Destination:
    if store is None:
        known = ", ".join(f"{s.url}/{user}" for s in stores) or "it has none"
        return Destination(
            problem=f"{place.url} is in none of the site's stores ({known}); say "
            "checkpoint-credentials=own to use your own keys"
        )
    if not destination.within(destination.home(store.url, user), place):
        return Destination(
            problem=f"the site's store takes {user}'s checkpoints below {store.url}/{user} only, "
            f"not at {place.url}"
        )
    if store.credentials_file is None:
        return Destination(
            problem=f"the site has no credentials for its store {store.name}; say "
            "checkpoint-credentials=own to use your own keys"
        )
    return Destination(url=place.url, credentials="site", store=store)


def read_credentials(path: Path) -> dict[str, str]:
    """Names and values of a site's credentials file: ``name = value`` lines, or a JSON object.

    Raises DestinationError unless the file is root's (or the daemon's own) and nobody else's.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise DestinationError(f"read the credentials {path}: {error.strerror}") from error
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid not in (0, os.geteuid()):
            raise DestinationError(
                f"use the credentials {path}: the file must be root's; chown root:root it"
            )
        if stat.S_IMODE(status.st_mode) & 0o077:
            raise DestinationError(
                f"use the credentials {path}: others may read it; chmod 0600 it and make new keys"
            )
        text = os.read(fd, _MOST_BYTES).decode("utf-8", "replace")
    finally:
        os.close(fd)
    found = _parse(text)
    if not found:
        raise DestinationError(f"use the credentials {path}: no line reads name = value")
    return found


def _parse(text: str) -> dict[str, str]:
    if text.lstrip().startswith("{"):
        try:
            data = json.loads(text)
        except ValueError:
            return {}
        return {str(k): v if isinstance(v, str) else json.dumps(v) for k, v in data.items()}
    lines = (line.strip() for line in text.splitlines())
    matches = (_LINE.match(line) for line in lines if not line.startswith(("#", ";", "[")))
    return {m[1].lower().removeprefix("aws_"): m[2].strip("\"' ") for m in matches if m}
