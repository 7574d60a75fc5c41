"""Real PostgreSQL and MariaDB servers for the tests: private, on a port of 127.0.0.1, no fsync.

A server that is not installed is skipped with the reason; ``CRATER_TEST_DATABASES=required`` makes
that a failure.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, NoReturn

import pytest
from sqlalchemy import Engine, create_engine, text

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))  # store_contract, store_samples
pytest.register_assert_rewrite("store_contract", "task_store_contract")

_START_SECONDS = 60


@dataclass
class Server:
    """A running server; ``url`` lacks the database's name."""

    url: str
    admin: Engine
    made: list[str] = field(default_factory=list)

    def new_database(self) -> str:
        """URL of a fresh, empty database."""
        name = f"crater_{uuid.uuid4().hex[:12]}"
        with self.admin.connect() as connection:
            connection.execute(text(f"CREATE DATABASE {name}"))
        return f"{self.url}/{name}"


@pytest.fixture(scope="session")
def postgresql() -> Iterator[Server]:
    """PostgreSQL, run by nobody when the tests run as root, which it refuses to serve."""
    tools = _tools("initdb", "postgres", places="/usr/lib/postgresql/*/bin")
    _driver("psycopg")
    user = "nobody" if os.getuid() == 0 else None
    with _folder() as folder:
        if user:
            shutil.chown(folder, user)
        data, port = folder / "data", _free_port()
        options = ["-A", "trust", "-U", "crater", "-E", "UTF8", "--no-sync"]
        _run([tools["initdb"], "-D", data, *options], user)
        command = [tools["postgres"], "-D", data, "-p", port, "-k", folder, "-c", "fsync=off"]
        command += ["-c", "listen_addresses=127.0.0.1"]
        with _running(command, folder, user, signal.SIGQUIT) as log:
            url = f"postgresql+psycopg://crater@127.0.0.1:{port}"
            yield _ready(url, "postgres", log)


@pytest.fixture(scope="session")
def mariadb() -> Iterator[Server]:
    """MariaDB with its default settings, Latin-1 and all, as a site may have it."""
    # Without my_print_defaults, which is in the client's package, mariadb-install-db fails mutely.
    tools = _tools("mariadb-install-db", "mariadbd", "my_print_defaults", places="/usr/sbin")
    _driver("pymysql")
    user = "--user=root" if os.getuid() == 0 else f"--user={os.environ.get('USER', 'nobody')}"
    with _folder() as folder:
        data, port = folder / "data", _free_port()
        options = ["--no-defaults", f"--datadir={data}", user]
        install = [tools["mariadb-install-db"], *options, "--skip-test-db"]
        _run([*install, "--auth-root-authentication-method=normal"])
        command = [tools["mariadbd"], *options, f"--port={port}", f"--socket={folder}/socket"]
        command += ["--bind-address=127.0.0.1", f"--pid-file={folder}/pid"]
        command += ["--character-set-server=latin1", "--innodb-flush-log-at-trx-commit=0"]
        with _running(command, folder, None, signal.SIGKILL) as log:
            yield _ready(f"mysql+pymysql://root@127.0.0.1:{port}", "mysql", log)


def _tools(*names: str, places: str) -> dict[str, str]:
    folders = [os.environ.get("PATH", ""), *map(str, sorted(Path("/").glob(places[1:])))]
    found = {name: shutil.which(name, path=os.pathsep.join(folders)) for name in names}
    missing = [name for name, path in found.items() if path is None]
    if missing:
        _lacking(", ".join(missing))
    return {name: path for name, path in found.items() if path}


def _driver(name: str) -> None:
    if importlib.util.find_spec(name) is None:
        _lacking(f"the Python module {name}")


def _lacking(what: str) -> NoReturn:
    if os.environ.get("CRATER_TEST_DATABASES") == "required":
        pytest.fail(f"not installed: {what}")
    pytest.skip(f"not installed: {what}")


class _folder:  # noqa: N801, reads as a function
    """A short path that the server's user may enter, unlike pytest's own folders."""

    def __enter__(self) -> Path:
        self._path = Path(tempfile.mkdtemp(prefix="crater-db-", dir="/tmp"))
        self._path.chmod(0o755)
        return self._path

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._path, ignore_errors=True)


class _running:  # noqa: N801
    """A server process and its log, ended by the signal that makes it give up all at once."""

    def __init__(
        self, command: list[object], folder: Path, user: str | None, end: signal.Signals
    ) -> None:
        self._user, self._end = user, end
        self._command = [str(part) for part in command]
        self._file = folder / "log"
        self._log: IO[bytes] | None = None

    def __enter__(self) -> Callable[[], str]:
        self._log = self._file.open("wb")
        self._process = subprocess.Popen(
            self._command, stdout=self._log, stderr=self._log, user=self._user, cwd="/"
        )
        return self._read

    def _read(self) -> str:
        if self._process.poll() is not None:
            pytest.fail(f"{self._command[0]} ended:\n{self._file.read_text()}")
        return self._file.read_text()

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(self._end)
        self._process.wait(30)
        if self._log:
            self._log.close()


def _run(command: list[object], user: str | None = None) -> None:
    done = subprocess.run(
        [str(part) for part in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        user=user,
        cwd="/",
    )
    if done.returncode:
        pytest.fail(f"{command} failed:\n{done.stdout}")


def _ready(url: str, database: str, log: Callable[[], str]) -> Server:
    admin = create_engine(f"{url}/{database}", isolation_level="AUTOCOMMIT")
    deadline = time.monotonic() + _START_SECONDS
    while True:
        try:
            with admin.connect() as connection:
                connection.execute(text("SELECT 1"))
            return Server(url, admin)
        except Exception:
            said = log()
            if time.monotonic() > deadline:
                pytest.fail(f"the server does not answer after {_START_SECONDS} s:\n{said}")
            time.sleep(0.05)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
