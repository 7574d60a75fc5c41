"""Connections to the store's database, and the plain sentence for what goes wrong with one.

SQLite runs with explicit transactions: a writer takes the write lock at BEGIN, so that it waits
its turn (5 s) and never fails half-way, and a reader sees one state over all its queries.
PostgreSQL and MariaDB read at REPEATABLE READ for the same reason.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, InvalidRequestError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.pool import StaticPool

from crater_slurm.errors import ConfigError, StoreError

#: How long a writer waits for another one before it gives up.
LOCK_TIMEOUT_SECONDS = 5.0
_CONNECT_TIMEOUT_SECONDS = 5
#: Of SQLite's engines: whose thread writes, and how long another waits for it.
_TURNS: weakref.WeakKeyDictionary[Engine, tuple[threading.Lock, float]] = (
    weakref.WeakKeyDictionary()
)
_DRIVERS = {
    "sqlite": "sqlite",
    "sqlite+pysqlite": "sqlite",
    "postgres": "postgresql+psycopg",
    "postgresql": "postgresql+psycopg",
    "postgresql+psycopg": "postgresql+psycopg",
    "mysql": "mysql+pymysql",
    "mysql+pymysql": "mysql+pymysql",
    "mariadb": "mysql+pymysql",
    "mariadb+pymysql": "mysql+pymysql",
}
_EXTRAS = {"psycopg": "postgres", "pymysql": "mysql"}
#: What drivers say, in lower case, and the sentence for it. The first that is found counts.
_SENTENCES = (
    (
        ("database is locked", "lock wait timeout", "lock timeout", "deadlock"),
        "is locked by another writer; nothing was stored, try again",
    ),
    (
        ("database or disk is full", "no space left", "disk full", "is full"),
        "has no space left; nothing was stored, make room",
    ),
    (
        ("readonly database", "read-only", "permission denied for"),
        "may not be written by this user; nothing was stored, check owner and mode",
    ),
    (
        ("no such table", "no such column", "does not exist", "doesn't exist", "unknown column"),
        "lacks tables or doesn't exist; run 'crater db upgrade' once it does",
    ),
    (("unknown database",), "doesn't exist on the server; create it, then 'crater db upgrade'"),
    (("not a database", "malformed"), "is damaged or no database; restore it from a backup"),
    (
        ("access denied", "password authentication failed", "no password supplied"),
        "refuses the user or password of store.url",
    ),
    (
        ("connect", "server has gone away", "lost connection", "closed the connection"),
        "can't be reached; check that the server runs and store.url names it",
    ),
    (("unable to open",), "can't be opened; check the folder's owner and mode"),
)


def parse_url(text: str) -> URL:
    """The URL with the driver that crater uses; ConfigError for one that is none, or another's."""
    try:
        url = make_url(text)
    except ArgumentError as error:
        raise ConfigError(
            "store.url is no database URL; write it like sqlite:////var/lib/crater/crater.db"
        ) from error
    driver = _DRIVERS.get(url.drivername)
    if driver is None:
        raise ConfigError(
            f"store.url names {url.drivername!r}; crater knows sqlite, postgresql+psycopg and "
            "mysql+pymysql (MariaDB)"
        )
    return url.set(drivername=driver)


def sqlite_file(url: URL) -> Path | None:
    """The file of an SQLite URL; None for a server and for a database in memory."""
    if url.get_backend_name() != "sqlite" or url.database in (None, "", ":memory:"):
        return None
    name = str(url.database).removeprefix("file:")
    return None if name.startswith(":memory:") else Path(name)


def is_missing(url: URL) -> bool:
    """Whether the URL is of an SQLite file that isn't there; StoreError if that can't be seen."""
    file = sqlite_file(url)
    try:
        return file is not None and not file.exists()
    except OSError as error:
        raise StoreError(
            f"the store {file} can't be opened; check the folder's owner and mode "
            f"({error.strerror})"
        ) from error


def make_sqlite_file(url: URL) -> None:
    """An empty database file that only its owner may write and its group may read.

    Raises StoreError when the folder can't be made or written.
    """
    file = sqlite_file(url)
    if file is None:
        return
    try:
        file.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
        os.close(os.open(file, os.O_CREAT | os.O_WRONLY, 0o640))
    except OSError as error:
        raise StoreError(f"can't create the store {file}: {error.strerror}") from error


def connect(url: URL, lock_timeout_seconds: float = LOCK_TIMEOUT_SECONDS) -> Engine:
    """An engine for the URL; opens nothing yet. StoreError when the driver isn't installed."""
    backend = url.get_backend_name()
    options: dict[str, Any] = {}
    if backend == "sqlite":
        options["connect_args"] = {"timeout": lock_timeout_seconds}
        if sqlite_file(url) is None:  # one connection, or every thread has its own database
            options["poolclass"] = StaticPool
            options["connect_args"]["check_same_thread"] = False
    else:
        options["pool_pre_ping"] = True
        options["connect_args"] = {"connect_timeout": _CONNECT_TIMEOUT_SECONDS}
    if backend == "postgresql":
        milliseconds = int(lock_timeout_seconds * 1000)
        options["connect_args"]["options"] = f"-c lock_timeout={milliseconds}"
    elif backend == "mysql":
        seconds = max(1, round(lock_timeout_seconds))
        options["connect_args"]["init_command"] = f"SET innodb_lock_wait_timeout={seconds}"
    try:
        engine = create_engine(url, **options)
    except ModuleNotFoundError as error:
        extra = _EXTRAS.get(str(error.name), str(error.name))
        raise StoreError(
            f"store.url needs the Python module {error.name}; install crater-slurm[{extra}]"
        ) from error
    if backend == "sqlite":
        _prepare_sqlite(engine)
        _TURNS[engine] = (threading.Lock(), lock_timeout_seconds)
    return engine


def _prepare_sqlite(engine: Engine) -> None:
    @event.listens_for(engine, "connect")
    def on_connect(connection: Any, _record: object) -> None:
        connection.isolation_level = None  # BEGIN is ours, see below
        connection.execute("PRAGMA foreign_keys = ON")
        # With WAL a power cut may take the last transactions, but never half of one.
        connection.execute("PRAGMA synchronous = NORMAL")

    @event.listens_for(engine, "begin")
    def on_begin(connection: Connection) -> None:
        writes = connection.get_execution_options().get("crater_write")
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


@contextmanager
def reading(engine: Engine) -> Iterator[Connection]:
    """A connection that sees one state of the database. Raises StoreError."""
    with sentences(engine.url), engine.connect() as connection:
        if engine.dialect.name != "sqlite":
            connection = connection.execution_options(isolation_level="REPEATABLE READ")
        yield connection


@contextmanager
def writing(engine: Engine) -> Iterator[Connection]:
    """A connection in a transaction that is kept whole or not at all. Raises StoreError."""
    with sentences(engine.url), _in_turn(engine), engine.connect() as connection:
        if engine.dialect.name == "sqlite":
            connection = connection.execution_options(crater_write=True)
        else:
            connection = connection.execution_options(isolation_level="READ COMMITTED")
        with connection.begin():
            yield connection


@contextmanager
def _in_turn(engine: Engine) -> Iterator[None]:
    """SQLite has one writer at a time, and who waits for it sleeps ever longer between looks while
    others get by: so the threads of this process wait in a queue. Raises StoreError."""
    if (turn := _TURNS.get(engine)) is None:
        yield
        return
    lock, seconds = turn
    if not lock.acquire(timeout=seconds):
        raise StoreError(_sentence("database is locked by a thread of this process", engine.url))
    try:
        yield
    finally:
        lock.release()


@contextmanager
def sentences(url: URL) -> Iterator[None]:
    """Turns what the database says into a StoreError in plain words."""
    try:
        yield
    except PoolTimeoutError as error:
        raise StoreError(f"the store {label(url)} has no free connection; try again") from error
    except (DBAPIError, InvalidRequestError) as error:
        said = str(getattr(error, "orig", None) or error)
        raise StoreError(_sentence(said, url)) from error
    except SQLAlchemyError as error:
        raise StoreError(f"the store {label(url)} failed: {error}") from error


def label(url: URL) -> str:
    """The store as messages name it: the file, or the URL without its password."""
    file = sqlite_file(url)
    return str(file) if file else url.render_as_string(hide_password=True)


def _sentence(said: str, url: URL) -> str:
    for signs, sentence in _SENTENCES:
        if any(sign in said.lower() for sign in signs):
            return f"the store {label(url)} {sentence} ({' '.join(said.split())})"
    return f"the store {label(url)} failed: {' '.join(said.split())}"
