"""Fetching the platform's queue: at most once, patiently, and what is odd is rejected once."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from task_samples import Clock, FakeSubmitter, account, llama, open_store, settings

from crater_slurm.alldata.intake import Intake
from crater_slurm.alldata.poll import HttpQueue, Poller
from crater_slurm.alldata.submission import RefusedError
from crater_slurm.config.alldata import AllData, Callback
from crater_slurm.errors import ConfigError, UnavailableError
from crater_slurm.store.repository import Store


class World:
    def __init__(self, store: Store) -> None:
        self.store, self.slurm, self.queue = store, FakeSubmitter(), []
        self.answer: bytes | None = None
        self.restart()

    def restart(self) -> None:
        own = settings(poll=True, api_url="https://alldata.example/api")
        intake = Intake(
            own,
            lambda: self.store,
            self.slurm,
            written=lambda: None,
            clock=Clock(),
            find_account=account,
        )
        self.poller = Poller(own, intake, self.fetch, chance=lambda: 1.0)

    queue: list[Any]

    def fetch(self) -> bytes:
        if self.answer is not None:
            return self.answer
        return json.dumps({"tasks": self.queue}).encode()

    def told(self) -> list[str]:
        return [f"{c.task_id}/{c.status}" for c in self.store.callbacks(oldest_first=True)]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with open_store(tmp_path) as store:
        yield World(store)


def test_a_task_that_stays_in_the_queue_is_one_job(world: World) -> None:
    world.queue = [json.loads(llama("t1")), json.loads(llama("t2"))]
    assert world.poller.poll() == 2
    assert world.poller.poll() == 0
    world.restart()
    assert world.poller.poll() == 0
    assert world.slurm.submitted == ["t1", "t2"]
    assert [task.source for task in world.store.tasks()] == ["poll", "poll"]


def test_what_can_not_be_a_job_is_told_as_rejected_once(world: World) -> None:
    bad = json.loads(llama("bad")) | {"task_type": "odd"}
    world.queue = [bad, {"task_id": "../x"}, 7, None, [], {"task_id": 1}, json.loads(llama("t1"))]
    for _ in range(3):
        world.poller.poll()
    world.restart()
    world.poller.poll()
    assert world.told() == ["bad/rejected"]
    (one,) = world.store.callbacks()
    assert "/task_type" in json.loads(one.payload)["reason"]
    assert world.slurm.submitted == ["t1"]


def test_what_slurm_refuses_is_told_once(world: World) -> None:
    world.slurm.error = RefusedError("Invalid account")
    world.queue = [json.loads(llama("t1"))]
    for _ in range(3):
        world.poller.poll()
    assert world.told() == ["t1/rejected"]


def test_a_changed_task_under_the_same_id_is_left_alone(world: World) -> None:
    world.queue = [json.loads(llama("t1"))]
    world.poller.poll()
    world.queue = [json.loads(llama("t1", task_type="inference"))]
    assert world.poller.poll() == 0
    assert world.slurm.submitted == ["t1"]


@pytest.mark.parametrize("answer", [b"", b"<html>", b"{}", b'{"tasks": 1}', b"[" * 100_000])
def test_what_is_no_queue_is_said(world: World, answer: bytes) -> None:
    world.answer = answer
    with pytest.raises(UnavailableError, match="queue"):
        world.poller.poll()


def test_waits_double_while_it_goes_wrong(world: World) -> None:
    waits, world.answer = [], b"<html>"
    for _ in range(9):
        waits.append(world.poller.wait_seconds())
        world.poller.round()
    assert waits == [5, 10, 20, 40, 80, 160, 300, 300, 300]
    world.answer = b'{"tasks": []}'
    world.poller.round()
    assert world.poller.wait_seconds() == 5


class _Platform(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        good = self.headers.get("Authorization") == "Bearer secret-of-ours"
        self.send_response(200 if good and self.path == "/api/tasks" else 401)
        self.end_headers()
        self.wfile.write(b'{"tasks": []}')

    def log_message(self, *_: object) -> None: ...


def test_the_queue_is_asked_with_our_token(tmp_path: Path) -> None:
    server = HTTPServer(("127.0.0.1", 0), _Platform)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    token = tmp_path / "token"
    token.write_text("secret-of-ours\n")
    token.chmod(0o600)
    own = AllData(
        poll=True,
        api_url=f"http://127.0.0.1:{server.server_port}/api",
        token_file=token,
        callback=Callback(allow_http=True),
    )
    queue = HttpQueue(own)
    assert queue() == b'{"tasks": []}'
    queue.close()
    other = HttpQueue(own.model_copy(update={"token_file": None}))
    with pytest.raises(UnavailableError, match="answers 401"):
        other()
    server.shutdown()
    server.server_close()
    with pytest.raises(UnavailableError, match="does not answer"):
        HttpQueue(own)()


def test_a_queue_without_an_address_or_in_clear_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"needs alldata\.api_url"):
        HttpQueue(AllData(poll=True))
    with pytest.raises(ConfigError, match="would be sent readable"):
        HttpQueue(AllData(poll=True, api_url="http://alldata.example/api"))
