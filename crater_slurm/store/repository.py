"""The store: the one way to node profiles, decisions and grants in the database.

Every method is one transaction; it happens whole or raises StoreError with a plain sentence. A
reader polls ``version()``, one row, and asks ``snapshot(since=...)`` for what changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from sqlalchemy import Connection, Engine, select, update

from crater_slurm.errors import StoreError
from crater_slurm.model.profile import NodeProfile
from crater_slurm.store import engine as engines
from crater_slurm.store import migrations, profiles
from crater_slurm.store.actions import JobActions
from crater_slurm.store.codec import profile_from_dict, profile_to_dict
from crater_slurm.store.journal import Journal
from crater_slurm.store.observations import Observations
from crater_slurm.store.outbox import Outbox
from crater_slurm.store.tables import MetaRow, NodeRow
from crater_slurm.store.tasks import Tasks
from crater_slurm.store.tokens import ApiTokens

_VERSION = "profile_version"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Profiles of one moment: all of them, or those changed since a version; all names."""

    version: int
    profiles: tuple[NodeProfile, ...]
    names: tuple[str, ...]


class Store(Journal, Observations, JobActions, Tasks, Outbox, ApiTokens):
    """An open store. Safe to share between threads; close it, or use it as a context."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @classmethod
    def open(
        cls,
        url: str,
        *,
        create: bool = False,
        lock_timeout_seconds: float = engines.LOCK_TIMEOUT_SECONDS,
    ) -> Store:
        """Opens the store; with ``create`` it is made or upgraded first, as a service may do.

        Raises StoreError when it can't be reached, or when its tables are missing, old or newer
        than this version; ConfigError for a URL that is none.
        """
        parsed = engines.parse_url(url)
        if engines.is_missing(parsed):
            if not create:
                raise StoreError(
                    f"the store {engines.label(parsed)} does not exist; run 'crater db upgrade'"
                )
            engines.make_sqlite_file(parsed)
        engine = engines.connect(parsed, lock_timeout_seconds)
        try:
            if create and migrations.current(engine) != migrations.HEAD:
                migrations.upgrade(engine)
            migrations.require_head(engine)
        except BaseException:
            engine.dispose()
            raise
        return cls(engine)

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Gives the connections back."""
        self._engine.dispose()

    def version(self) -> int:
        """Grows with every change of a profile, and only then."""
        with engines.reading(self._engine) as connection:
            return _version(connection)

    def snapshot(self, since: int | None = None) -> Snapshot:
        """All profiles, or only those that changed after version ``since``, of one moment.

        PCI devices and memory modules are left out.
        """

        def where(query: Any, node: Any) -> Any:
            if since is None:
                return query
            return query.where(node.in_(select(NodeRow.name).where(NodeRow.version > since)))

        with engines.reading(self._engine) as connection:
            version = _version(connection)
            names = connection.scalars(select(NodeRow.name)).all()
            found = profiles.read(connection, where, topology=False)
            return Snapshot(version, tuple(found), tuple(sorted(names)))

    def profiles(self, names: Iterable[str] | None = None) -> list[NodeProfile]:
        """All profiles by name, or those of the named nodes that are there."""
        if names is None:
            with engines.reading(self._engine) as connection:
                return profiles.read(connection)
        wanted = sorted(set(names))
        found: list[NodeProfile] = []
        with engines.reading(self._engine) as connection:
            for chunk in profiles.chunks(wanted):
                found += profiles.read(connection, _only(chunk))
        return sorted(found, key=lambda profile: profile.name)

    def profile(self, name: str) -> NodeProfile | None:
        """The profile of one node; None when it has none."""
        return next(iter(self.profiles([name])), None)

    def names(self) -> list[str]:
        """The nodes that have a profile."""
        with engines.reading(self._engine) as connection:
            return sorted(connection.scalars(select(NodeRow.name)))

    def save_profile(self, profile: NodeProfile) -> bool:
        """Stores a profile in place of the node's old one; False when it is the same."""
        return bool(self.save_profiles([profile]))

    def save_profiles(self, new: Iterable[NodeProfile]) -> list[str]:
        """Stores profiles, all or none, and returns the nodes whose profile changed.

        Raises UsageError for a profile that contradicts itself: nothing is stored that could not
        be read back.
        """
        wanted = {profile.name: profile for profile in new}
        data = {name: profile_to_dict(profile) for name, profile in wanted.items()}
        sums = {name: profiles.digest(entries) for name, entries in data.items()}
        # Most reports change nothing; they must not queue for the write lock.
        with engines.reading(self._engine) as connection:
            changed = _changed(connection, sums)
        for name in changed:
            profile_from_dict(data[name])
        if not changed:
            return []
        with engines.writing(self._engine) as connection:
            version = _bump(connection)
            changed = _changed(connection, sums)
            rows = {name: wanted[name] for name in changed}
            profiles.write(connection, rows, sums, version)
        return changed

    def delete_profile(self, name: str) -> bool:
        """Forgets a node; False when there was none of that name."""
        with engines.writing(self._engine) as connection:
            if not profiles.digests(connection, [name]):
                return False
            _bump(connection)
            profiles.remove(connection, [name])
        return True


def _only(names: Sequence[str]) -> profiles.Where:
    return lambda query, node: query.where(node.in_(names))


def _version(connection: Connection) -> int:
    found = connection.scalar(select(MetaRow.value).where(MetaRow.name == _VERSION))
    if found is None:
        raise StoreError("the store has lost its profile version; restore it from a backup")
    return found


def _bump(connection: Connection) -> int:
    """The next version. First in its transaction: the row is the lock that writers queue for."""
    query = update(MetaRow).where(MetaRow.name == _VERSION).values(value=MetaRow.value + 1)
    connection.execute(query)
    return _version(connection)


def _changed(connection: Connection, sums: dict[str, str]) -> list[str]:
    present = profiles.digests(connection, list(sums))
    return [name for name, value in sums.items() if present.get(name) != value]
