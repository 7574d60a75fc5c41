"""What an administrator does to the store as a whole: make or upgrade it, and look it over."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from sqlalchemy import Engine, func, select

from crater_slurm.store import engine as engines
from crater_slurm.store import migrations
from crater_slurm.store.tables import Base

#: Two controllers may upgrade at once; the second waits for the first one's tables.
_UPGRADE_LOCK_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Revisions:
    """Where the database is and where this version of crater wants it; None is an empty one."""

    store: str
    current: str | None
    newest: str


@dataclass(frozen=True, slots=True)
class Report:
    """The state of a store: its rows by table, and in plain words what is wrong with it."""

    store: str
    revision: str
    rows: Mapping[str, int]
    problems: tuple[str, ...]


def upgrade(url: str) -> Revisions:
    """Makes or upgrades the store; the answer's ``current`` is where it was before."""
    parsed = engines.parse_url(url)
    if engines.is_missing(parsed):
        engines.make_sqlite_file(parsed)
    with _engine(url, _UPGRADE_LOCK_SECONDS) as engine:
        before, newest = migrations.upgrade(engine)
        return Revisions(engines.label(parsed), before, newest)


def revisions(url: str) -> Revisions:
    """Where the store is, without changing it; a file that isn't there has no revision."""
    parsed = engines.parse_url(url)
    if engines.is_missing(parsed):
        return Revisions(engines.label(parsed), None, migrations.HEAD)
    with _engine(url) as engine:
        return Revisions(engines.label(parsed), migrations.current(engine), migrations.HEAD)


def check(url: str) -> Report:
    """Looks over a store that opens. Raises StoreError like ``Store.open`` when it does not."""
    from crater_slurm.store.repository import Store

    Store.open(url).close()
    with _engine(url) as engine:
        problems = [
            f"the tables differ from this version's: {it}" for it in migrations.drift(engine)
        ]
        with engines.reading(engine) as connection:
            rows = {
                name: connection.scalar(select(func.count()).select_from(table)) or 0
                for name, table in sorted(Base.metadata.tables.items())
            }
            if engine.dialect.name == "sqlite":
                for pragma in ("integrity_check", "foreign_key_check"):
                    found = connection.exec_driver_sql(f"PRAGMA {pragma}").all()
                    problems += [f"{pragma}: {row}" for row in found if tuple(row) != ("ok",)]
        return Report(engines.label(engine.url), migrations.HEAD, rows, tuple(problems))


@contextmanager
def _engine(
    url: str, lock_timeout_seconds: float = engines.LOCK_TIMEOUT_SECONDS
) -> Iterator[Engine]:
    engine = engines.connect(engines.parse_url(url), lock_timeout_seconds)
    try:
        yield engine
    finally:
        engine.dispose()
