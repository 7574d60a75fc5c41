"""Two schedulers on one database, one of them killed: no task lost, none run twice, all told.

Slurm is a folder here: a job is a file that exactly one submission can make, and its age says
whether it waits, runs or has ended. All else is real: database, processes, HTTP, kill -9.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import uvicorn

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))  # task_samples, also when spawned
from task_samples import FakeSlurm, FakeSubmitter, account, llama

from crater_slurm.alldata.deliver import Deliverer
from crater_slurm.alldata.fake import Fake, Fault, build
from crater_slurm.alldata.follow import Follower
from crater_slurm.alldata.intake import Intake
from crater_slurm.alldata.recover import Recoverer
from crater_slurm.alldata.run_as import Account
from crater_slurm.alldata.sender import Sender
from crater_slurm.alldata.submission import Submitted
from crater_slurm.alldata.task import Task
from crater_slurm.config.alldata import AllData, Callback
from crater_slurm.errors import StoreError
from crater_slurm.store.repository import Store

if TYPE_CHECKING:
    from conftest import Server

_spawn = multiprocessing.get_context("spawn")
_TASKS = 40
_PENDING_SECONDS, _RUNNING_SECONDS = 0.4, 1.2
_PATIENCE = 180.0


@dataclass
class Folder:
    """Slurm: one file for each job, ``ID-TOKEN``."""

    path: Path

    def jobs(self) -> dict[int, tuple[str, float]]:
        """Token and time of submission by id."""
        found = {}
        for file in self.path.glob("*-*"):
            number, _, token = file.name.partition("-")
            found[int(number)] = (token, file.stat().st_mtime)
        return found

    def add(self, token: str) -> int:
        while True:
            number = 100 + len(list(self.path.iterdir()))
            try:
                os.close(os.open(self.path / str(number), os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                continue
            (self.path / f"{number}-{token}").touch()
            return number


@dataclass
class Slurm(FakeSlurm):
    """squeue over the folder."""

    folder: Folder = field(default_factory=lambda: Folder(Path()))

    def run(self, command: str, *words: str) -> str:
        self.jobs.clear()
        now = time.time()
        for number, (_, begin) in self.folder.jobs().items():
            about = {"submitted": begin, "started": begin + _PENDING_SECONDS, "nodes": "n1"}
            if now < begin + _PENDING_SECONDS:
                self.set(number, "PENDING", submitted=begin)
            elif now < begin + _RUNNING_SECONDS:
                self.set(number, "RUNNING", **about)
            else:
                self.set(number, "COMPLETED", ended=begin + _RUNNING_SECONDS, **about)
        return super().run(command, *words)


class Submitter(FakeSubmitter):
    """sbatch into the folder, as slow as sbatch is."""

    def __init__(self, folder: Folder) -> None:
        super().__init__()
        self.folder = folder

    def submit(self, task: Task, user: Account, token: str) -> Submitted:
        number = self.folder.add(token)
        time.sleep(random.random() * 0.05)
        return Submitted(number)

    def find(self, user: str, token: str) -> list[int]:
        return sorted(n for n, (carried, _) in self.folder.jobs().items() if carried == token)


def scheduler(url: str, folder: Path, callback_url: str, name: str) -> None:
    """One crater-scheduler, as far as tasks go; it takes all tasks in, as the other one does."""
    slurm = Folder(folder)
    settings = AllData(
        submit_as={"alldata": "alice"},
        look_seconds=1,
        callback=Callback(
            url=callback_url,
            allow_http=True,
            timeout_seconds=2,
            lease_seconds=5,
            first_wait_seconds=0.1,
            longest_wait_seconds=1,
        ),
    )
    store = Store.open(url, lock_timeout_seconds=60)
    sender = Sender(settings.callback)
    deliverer = Deliverer(settings.callback, lambda: store, sender.send, owner=name)
    submitter = Submitter(slurm)
    intake = Intake(
        settings, lambda: store, submitter, written=deliverer.wake, find_account=account
    )
    recoverer = Recoverer(intake, lambda: store, submitter, settle_seconds=2)
    follower = Follower(
        settings,
        lambda: store,
        Slurm(folder=slurm),  # type: ignore[arg-type]
        recover=recoverer.recover,
        written=deliverer.wake,
    )
    deliverer.start()
    follower.start()
    for i in range(_TASKS):
        while True:
            try:
                intake.take("alldata", llama(f"t{i}"), user=None, source="api")
                break
            except StoreError:
                time.sleep(0.1)
    time.sleep(_PATIENCE)


@pytest.fixture
def fake() -> Fake:
    return Fake(faults=[Fault(kind="error", times=7), Fault(kind="lost_answer", seconds=3)])


@pytest.fixture
def callback_url(fake: Fake) -> Iterator[str]:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(build(fake), log_level="error"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}/callback"
    server.should_exit = True
    thread.join(60)


def told_whole(fake: Fake) -> int:
    whole = ["scheduled", "running", "completed"]
    return sum(fake.receiver.statuses(f"t{i}") == whole for i in range(_TASKS))


class _TwoSchedulers:
    def test_one_is_killed_and_nothing_is_lost_or_run_twice(
        self, url: str, tmp_path: Path, fake: Fake, callback_url: str
    ) -> None:
        folder = tmp_path / "slurm"
        folder.mkdir()
        Store.open(url, create=True).close()

        def begin(name: str) -> Any:
            process = _spawn.Process(target=scheduler, args=(url, folder, callback_url, name))
            process.start()
            return process

        first, second = begin("first"), begin("second")
        deadline = time.monotonic() + _PATIENCE
        try:
            while len(Folder(folder).jobs()) < _TASKS // 2 and time.monotonic() < deadline:
                time.sleep(0.01)
            os.kill(first.pid, signal.SIGKILL)
            first.join()
            first = begin("third")
            while told_whole(fake) < _TASKS and time.monotonic() < deadline:
                time.sleep(0.05)
        finally:
            for process in (first, second):
                process.kill()
                process.join(60)
        tokens = [token for token, _ in Folder(folder).jobs().values()]
        assert len(tokens) == len(set(tokens)) == _TASKS, "each task is one job"
        assert told_whole(fake) == _TASKS
        assert fake.receiver.problems() == []
        with Store.open(url) as store:
            assert all(task.settled for task in store.tasks(limit=1000))


class TestOnPostgresql(_TwoSchedulers):
    @pytest.fixture
    def url(self, postgresql: Server) -> str:
        return postgresql.new_database()


class TestOnMariadb(_TwoSchedulers):
    @pytest.fixture
    def url(self, mariadb: Server) -> str:
        return mariadb.new_database()


class TestOnSqlite(_TwoSchedulers):
    """Two on one file is nothing a site should have, and yet nothing may go wrong."""

    @pytest.fixture
    def url(self, tmp_path: Path) -> str:
        return f"sqlite:///{tmp_path}/crater.db"
