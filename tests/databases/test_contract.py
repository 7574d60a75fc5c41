"""The contract of the store on real PostgreSQL and MariaDB servers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

import pytest
from sqlalchemy import text
from store_contract import Locked, StoreContract
from store_samples import rich_profile
from task_store_contract import TaskStoreContract

from crater_slurm.errors import StoreError
from crater_slurm.store import engine as engines
from crater_slurm.store.repository import Store

if TYPE_CHECKING:
    from conftest import Server


@contextmanager
def lock_row(url: str) -> Iterator[None]:
    """Holds the row that every writer of profiles queues for."""
    engine = engines.connect(engines.parse_url(url))
    with engine.begin() as connection:
        connection.execute(text("SELECT value FROM meta FOR UPDATE"))
        yield
    engine.dispose()


class _OnServer(TaskStoreContract, StoreContract):
    @pytest.fixture
    def locked(self) -> Locked:
        def hold(url: str) -> AbstractContextManager[None]:
            return lock_row(url)

        return hold

    def test_a_database_that_is_not_there_is_told(self, url: str) -> None:
        with pytest.raises(StoreError, match=r"doesn't exist.*crater db upgrade"):
            Store.open(url.rpartition("/")[0] + "/nothing")

    def test_a_server_that_restarts_is_found_again(self, store: Store, url: str) -> None:
        store.save_profile(rich_profile())
        kill = (
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() "
            "AND datname = current_database()"
        )
        engine = engines.connect(engines.parse_url(url))
        with engine.connect() as connection:
            if "postgresql" in url:
                connection.execute(text(kill))
            else:
                query = (
                    "SELECT id FROM information_schema.processlist "
                    "WHERE id <> connection_id() AND db = database()"
                )
                for victim in connection.execute(text(query)).scalars().all():
                    connection.exec_driver_sql(f"KILL {victim}")
        engine.dispose()
        assert store.profile("gn01") == rich_profile()


class TestOnPostgresql(_OnServer):
    @pytest.fixture
    def url(self, postgresql: Server) -> str:
        return postgresql.new_database()


class TestOnMariadb(_OnServer):
    @pytest.fixture
    def url(self, mariadb: Server) -> str:
        return mariadb.new_database()

    def test_tables_compare_by_case_whatever_the_server_says(self, store: Store, url: str) -> None:
        engine = engines.connect(engines.parse_url(url))
        with engine.connect() as connection:
            query = text(
                "SELECT DISTINCT table_collation FROM information_schema.tables "
                "WHERE table_schema = database() AND table_name <> 'crater_schema'"
            )
            assert connection.execute(query).scalars().all() == ["utf8mb4_bin"]
        engine.dispose()
