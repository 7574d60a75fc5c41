"""The store on SQLite: the contract that all databases keep, and what is SQLite's own."""

from __future__ import annotations

import os
import sqlite3
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
from sqlalchemy import event
from store_contract import Locked, StoreContract
from store_samples import plain_profile, rich_decision, rich_profile
from task_store_contract import TaskStoreContract

from crater_slurm.errors import ConfigError, StoreError
from crater_slurm.store import migrations
from crater_slurm.store.engine import connect, parse_url
from crater_slurm.store.repository import Store


@contextmanager
def lock_sqlite(url: str) -> Iterator[None]:
    connection = sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None)
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
    finally:
        connection.execute("ROLLBACK")
        connection.close()


class TestOnSqlite(TaskStoreContract, StoreContract):
    @pytest.fixture
    def url(self, tmp_path: Path) -> str:
        return f"sqlite:///{tmp_path}/crater.db"

    @pytest.fixture
    def locked(self) -> Locked:
        def hold(url: str) -> AbstractContextManager[None]:
            return lock_sqlite(url)

        return hold


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "var" / "crater.db"


def test_a_missing_file_asks_for_the_upgrade_and_is_not_made(file: Path) -> None:
    with pytest.raises(StoreError, match=r"crater.db does not exist; run 'crater db upgrade'"):
        Store.open(f"sqlite:///{file}")
    assert not file.exists()


def test_a_new_file_is_for_its_owner_and_group_and_uses_wal(file: Path) -> None:
    Store.open(f"sqlite:///{file}", create=True).close()
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o750
    assert sqlite3.connect(file).execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"can't create the store .* Not a directory"):
        Store.open(f"sqlite:///{tmp_path}/file/x/crater.db", create=True)


def test_a_file_opened_for_reading_refuses_writes(file: Path) -> None:
    with Store.open(f"sqlite:///{file}", create=True) as store:
        store.save_profile(rich_profile())
    with Store.open(f"sqlite:///file:{file}?mode=ro&uri=true") as store:
        assert store.profile("gn01") == rich_profile()
        with pytest.raises(StoreError, match="may not be written by this user; nothing was stored"):
            store.save_profile(plain_profile())


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to become another user")
@pytest.mark.parametrize(
    ("mode", "message"),
    [
        (0o755, "may not be written by this user"),
        (0o700, "can't be opened; check the folder's owner and mode"),
    ],
)
def test_a_user_without_rights_is_told(mode: int, message: str) -> None:
    script = (
        "import os, sys\n"
        "from crater_slurm.store.repository import Store\n"
        "from crater_slurm.errors import StoreError\n"
        "from store_samples import plain_profile\n"
        "Store.open('sqlite://', create=True)  # loads what the other user may not read\n"
        "os.setuid(65534)\n"
        "try:\n"
        "    Store.open(sys.argv[1]).save_profile(plain_profile())\n"
        "except StoreError as error:\n"
        "    print(error)\n"
    )
    # Not below pytest's own folder, which other users can't enter.
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "crater.db"
        with Store.open(f"sqlite:///{file}", create=True):
            file.chmod(0o644)
            for name in ("crater.db-wal", "crater.db-shm"):
                (file.parent / name).chmod(0o644)
            file.parent.chmod(mode)
            done = subprocess.run(
                [sys.executable, "-c", script, f"sqlite:///{file}"],
                env={"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])},
                capture_output=True,
                text=True,
            )
    assert done.stderr == ""
    assert message in done.stdout


def test_a_full_disk_is_told_and_nothing_is_half_written(file: Path) -> None:
    url = f"sqlite:///{file}"
    with Store.open(url, create=True) as store:
        store.save_profile(rich_profile("before"))
        store.close()

        @event.listens_for(store._engine, "connect")
        def limit(connection: sqlite3.Connection, _: object) -> None:
            pages = connection.execute("PRAGMA page_count").fetchone()[0]
            connection.execute(f"PRAGMA max_page_count = {pages + 5}")

        with pytest.raises(StoreError, match="has no space left; nothing was stored, make room"):
            store.save_profiles(rich_profile(f"n{i:03d}") for i in range(200))
        assert store.names() == ["before"]
        assert store.version() == 1
    with Store.open(url) as store:
        assert store.profiles() == [rich_profile("before")]


@pytest.mark.parametrize(
    "content", [b"not a database at all" * 100, b"SQLite format 3\0" + b"x" * 5000]
)
def test_a_damaged_file_is_told(file: Path, content: bytes) -> None:
    file.parent.mkdir()
    file.write_bytes(content)
    with pytest.raises(StoreError, match="is damaged or no database; restore it"):
        Store.open(f"sqlite:///{file}")


def test_threads_share_a_store(file: Path) -> None:
    with Store.open(f"sqlite:///{file}", create=True, lock_timeout_seconds=120) as store:
        errors: list[BaseException] = []

        def work(name: str) -> None:
            try:
                for i in range(10):
                    store.save_decision(rich_decision(f"{name}{i}"))
                    store.snapshot()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(f"t{i}-",)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        assert len(store.decisions()) == 40


def test_a_store_in_memory_works_within_one_process() -> None:
    with Store.open("sqlite://", create=True) as store:
        store.save_profile(rich_profile())
        assert store.profile("gn01") == rich_profile()


# URLs


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("crater.db", "is no database URL; write it like sqlite:////var/lib"),
        ("oracle://host/db", "names 'oracle'; crater knows sqlite, postgresql"),
        ("postgresql+psycopg2://host/db", r"names 'postgresql\+psycopg2'"),
    ],
)
def test_a_url_that_crater_does_not_know_is_a_setting_error(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Store.open(url)


@pytest.mark.parametrize(
    ("url", "driver"),
    [
        ("postgresql://h/d", "postgresql+psycopg"),
        ("postgres://h/d", "postgresql+psycopg"),
        ("mysql://h/d", "mysql+pymysql"),
        ("mariadb://h/d", "mysql+pymysql"),
        ("sqlite:///x", "sqlite"),
    ],
)
def test_the_driver_follows_the_database(url: str, driver: str) -> None:
    assert parse_url(url).drivername == driver


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://ada:hunter2@127.0.0.1:1/crater",
        "mysql://ada:hunter2@127.0.0.1:1/crater",
    ],
)
def test_a_server_that_is_not_there_is_told_without_the_password(url: str) -> None:
    pytest.importorskip("psycopg" if url.startswith("post") else "pymysql")
    with pytest.raises(StoreError, match="can't be reached; check that the server runs") as caught:
        Store.open(url)
    assert "hunter2" not in str(caught.value)
    assert "ada:***@127.0.0.1:1/crater" in str(caught.value)


@pytest.mark.parametrize(
    ("url", "module", "extra"),
    [("postgresql://h/d", "psycopg", "postgres"), ("mysql://h/d", "pymysql", "mysql")],
)
def test_a_missing_driver_is_told(
    url: str, module: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(StoreError, match=rf"install crater-slurm\[{extra}\]"):
        connect(parse_url(url))


# Migrations


def test_the_list_of_revisions_is_the_one_in_the_folder() -> None:
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    config = Config()
    config.set_main_option("script_location", str(Path(migrations.__file__).parent))
    script = ScriptDirectory.from_config(config)
    revisions = [revision.revision for revision in script.walk_revisions()]
    assert tuple(reversed(revisions)) == migrations.REVISIONS
    assert script.get_current_head() == migrations.HEAD


def test_a_migration_that_fails_leaves_the_file_as_it_was(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from alembic.operations import Operations

    monkeypatch.setattr(Operations, "execute", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        Store.open(f"sqlite:///{file}", create=True)
    assert sqlite3.connect(file).execute("SELECT count(*) FROM sqlite_master").fetchone() == (0,)


def test_opening_a_store_does_not_load_alembic(file: Path) -> None:
    Store.open(f"sqlite:///{file}", create=True).close()
    script = (
        "import sys\n"
        "from crater_slurm.store.repository import Store\n"
        "Store.open(sys.argv[1]).version()\n"
        "print([name for name in sys.modules if name.startswith('alembic')])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, f"sqlite:///{file}"],
        env={"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")
