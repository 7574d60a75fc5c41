"""The store's schema, one revision after the other, and how a database gets to the newest.

Revisions are numbered, so that a database made by a newer crater-slurm can be told from one that
needs an upgrade. Nothing here needs an alembic.ini.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, Engine, inspect, text

from crater_slurm.errors import StoreError
from crater_slurm.store.engine import label, reading, writing

if TYPE_CHECKING:
    from alembic.config import Config

#: All revisions, oldest first. Kept here so that opening a store doesn't import Alembic.
REVISIONS = ("0001", "0002", "0003", "0004", "0005")
HEAD = REVISIONS[-1]
_TABLE = "crater_schema"
_WAL_ATTEMPTS = 200
#: Any number will do that nobody else locks by.
_LOCK = 0x63726174


def current(engine: Engine) -> str | None:
    """Revision of the database; None when it has no tables of crater."""
    with reading(engine) as connection:
        return _current(connection)


def require_head(engine: Engine) -> None:
    """StoreError, saying what to do, unless the database is at the newest revision."""
    found = current(engine)
    if found == HEAD:
        return
    store = f"the store {label(engine.url)}"
    if found is None:
        raise StoreError(f"{store} has no tables yet; run 'crater db upgrade'")
    if found in REVISIONS:
        raise StoreError(f"{store} is at revision {found}, not {HEAD}; run 'crater db upgrade'")
    raise StoreError(
        f"{store} is at revision {found}, which is newer than this crater-slurm knows ({HEAD}); "
        "upgrade crater-slurm on this machine ('crater db upgrade' can't go back)"
    )


def upgrade(engine: Engine) -> tuple[str | None, str]:
    """Brings the database to the newest revision; returns the revisions before and after.

    On SQLite and PostgreSQL all of it happens or nothing; MariaDB can't undo table changes.
    """
    from alembic import command

    if engine.dialect.name == "sqlite":
        _use_wal(engine)
    with writing(engine) as connection, _one_at_a_time(connection):
        before = _current(connection)
        if before is not None and before not in REVISIONS:
            raise StoreError(
                f"the store {label(engine.url)} is at revision {before}, which is newer than this "
                f"crater-slurm knows ({HEAD}); upgrade crater-slurm on this machine"
            )
        if before != HEAD:
            command.upgrade(config(connection), "head")
        return before, HEAD


def _use_wal(engine: Engine) -> None:
    """Switch to write-ahead logging. Persistent, and impossible inside a transaction.

    SQLite keeps its read lock while it waits for the others to go, and a second upgrade that is
    committing waits for that lock: so it is tried for a moment only, and tried again.
    """
    for attempt in range(_WAL_ATTEMPTS):
        with reading(engine) as connection:
            cursor = connection.connection.cursor()
            before = cursor.execute("PRAGMA busy_timeout").fetchone()[0]
            cursor.execute("PRAGMA busy_timeout = 50")
            try:
                cursor.execute("PRAGMA journal_mode = WAL")
            except sqlite3.OperationalError as error:
                if attempt == _WAL_ATTEMPTS - 1:
                    store = f"the store {label(engine.url)}"
                    raise StoreError(
                        f"{store} is in use ({error}); upgrade it while no service writes to it"
                    ) from error
            else:
                return
            finally:
                cursor.execute(f"PRAGMA busy_timeout = {before}")
        time.sleep(0.05)


def drift(engine: Engine) -> list[str]:
    """What differs between the tables and what this version expects; empty when all is well."""
    from alembic.autogenerate import compare_metadata
    from alembic.migration import MigrationContext

    from crater_slurm.store.tables import Base

    with reading(engine) as connection:
        options = {"version_table": _TABLE, "include_object": _ours}
        context = MigrationContext.configure(connection, opts=options)
        return [repr(entry) for entry in compare_metadata(context, Base.metadata)]


def _ours(item: Any, name: str | None, kind: str, _reflected: bool, _other: object) -> bool:
    """Tables of others in the same database are none of our business."""
    from crater_slurm.store.tables import Base

    return kind != "table" or name in Base.metadata.tables


def _current(connection: Connection) -> str | None:
    if not inspect(connection).has_table(_TABLE):
        return None
    found = connection.execute(text(f"SELECT version_num FROM {_TABLE}")).scalar()  # noqa: S608
    return None if found is None else str(found)


def config(connection: Connection) -> Config:
    """Alembic's configuration for a database that is open for writing."""
    from alembic.config import Config

    made = Config()
    made.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    made.attributes["connection"] = connection
    made.attributes["version_table"] = _TABLE
    return made


@contextmanager
def _one_at_a_time(connection: Connection) -> Iterator[None]:
    """Two controllers that upgrade at once take turns; SQLite's BEGIN already sees to it."""
    if connection.dialect.name == "postgresql":  # until the transaction ends
        connection.execute(text("SELECT pg_advisory_xact_lock(:lock)").bindparams(lock=_LOCK))
    if connection.dialect.name != "mysql":
        yield
        return
    name = f"crater-{_LOCK}"
    connection.execute(text("SELECT GET_LOCK(:name, 60)").bindparams(name=name))
    try:
        yield
    finally:
        connection.execute(text("SELECT RELEASE_LOCK(:name)").bindparams(name=name))
