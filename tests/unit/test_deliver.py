"""Delivering callbacks: in order, at least once, patiently; over real HTTP to the fake platform."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from task_samples import NOW, Clock, add_job, open_store
from task_store_contract import tell

from crater_slurm.alldata.deliver import Deliverer, wait_seconds
from crater_slurm.alldata.fake import Fake, Fault, build
from crater_slurm.alldata.receiver import NotOursError, Receiver
from crater_slurm.alldata.sender import Answer, Sender, signature
from crater_slurm.config.alldata import Callback
from crater_slurm.errors import ConfigError
from crater_slurm.store.repository import Store
from crater_slurm.store.task_records import StoredCallback

URL = "https://alldata.example/callback"
OK, ERROR, SILENCE = Answer(200), Answer(500, "answered 500"), Answer(None, "Connection refused")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(tmp_path) as store:
        yield store


class World:
    """A deliverer whose platform answers what it is told to."""

    def __init__(self, store: Store, **fields: Any) -> None:
        self.store, self.clock = store, Clock()
        self.answers: Callable[[StoredCallback], Answer] = lambda one: OK
        self.sent: list[str] = []
        self.deliverer = Deliverer(
            Callback(url=URL, **fields),
            lambda: store,
            self._send,
            owner="me",
            clock=self.clock,
            chance=lambda: 1.0,
        )

    def _send(self, one: StoredCallback) -> Answer:
        self.sent.append(f"{one.task_id}/{one.status}")
        return self.answers(one)

    def run(self, seconds: float = 0.0, step: float = 1.0) -> None:
        """Deliver what is due, now and for so long."""
        end = self.clock.now + seconds
        while True:
            while self.deliverer.run_due():
                pass
            if self.clock.now >= end:
                return
            self.clock.now += step


@pytest.fixture
def world(store: Store) -> World:
    return World(store)


def test_callbacks_of_a_task_go_in_their_order(store: Store, world: World) -> None:
    tell(store, add_job(store), "scheduled", "running", "completed")
    world.run()
    assert world.sent == ["t1/scheduled", "t1/running", "t1/completed"]
    assert store.callback_counts() == {"delivered": 3}


def test_a_failure_holds_up_its_own_task_and_no_other(store: Store, world: World) -> None:
    tell(store, add_job(store, "t1", 7), "scheduled", "running")
    tell(store, add_job(store, "t2", 8), "scheduled", "running")
    world.answers = lambda one: ERROR if one.task_id == "t1" else OK
    world.run(2)
    assert "t1/running" not in world.sent
    assert world.sent.count("t2/running") == 1
    world.answers = lambda one: OK
    world.run(10)
    assert store.callback_counts() == {"delivered": 4}
    assert world.sent.index("t1/running") > world.sent.index("t1/scheduled")


def test_waits_double_up_to_a_limit_and_differ_by_chance() -> None:
    settings = Callback(first_wait_seconds=1, longest_wait_seconds=60)
    full = [wait_seconds(settings, n, lambda: 1.0) for n in range(1, 9)]
    assert full == [1, 2, 4, 8, 16, 32, 60, 60]
    assert wait_seconds(settings, 3, lambda: 0.0) == 2
    assert wait_seconds(settings, 10_000, lambda: 1.0) == 60


def test_an_hour_of_silence_loses_nothing_and_makes_nothing_dead(store: Store) -> None:
    world = World(store)
    for i in range(30):
        tell(store, add_job(store, f"t{i}", 100 + i), "scheduled", "running")
    world.answers = lambda one: SILENCE
    world.run(3600, step=10)
    assert store.callback_counts() == {"waiting": 60}
    assert len(world.sent) < 30, "one at a time finds out whether somebody answers again"
    world.answers = lambda one: OK
    world.sent.clear()
    world.run(600, step=10)
    assert store.callback_counts() == {"delivered": 60}
    assert len(world.sent) == len(set(world.sent)) == 60
    for i in range(30):
        first, second = (world.sent.index(f"t{i}/{s}") for s in ("scheduled", "running"))
        assert first < second


def test_what_was_silent_is_sent_as_soon_as_somebody_answers(store: Store, world: World) -> None:
    for i in range(10):
        tell(store, add_job(store, f"t{i}", 100 + i), "scheduled")
    world.answers = lambda one: SILENCE
    world.run(3600, step=10)
    world.answers = lambda one: OK
    world.clock.now += 601  # the longest wait of the one that finds out
    world.run()
    assert store.callback_counts() == {"delivered": 10}


def test_after_so_many_attempts_it_is_dead_and_the_next_goes(store: Store) -> None:
    world = World(store, attempts=3)
    tell(store, add_job(store), "scheduled", "running")
    world.answers = lambda one: ERROR if one.status == "scheduled" else OK
    world.run(20)
    assert world.sent == ["t1/scheduled"] * 3 + ["t1/running"]
    (dead,) = store.callbacks(delivery="dead")
    assert (dead.attempts, dead.http_status, dead.error) == (3, 500, "answered 500")
    world.answers = lambda one: OK
    assert store.retry_callbacks(world.clock.now) == 1
    world.run()
    assert store.callback_counts() == {"delivered": 2}


def test_an_answer_that_will_not_change_is_final_at_once(store: Store, world: World) -> None:
    tell(store, add_job(store), "scheduled", "running")
    world.answers = lambda one: Answer(422, "answered 422")
    world.run(60)
    assert world.sent == ["t1/scheduled", "t1/running"]
    assert store.callback_counts() == {"dead": 2}


def test_a_busy_platform_says_when(store: Store, world: World) -> None:
    tell(store, add_job(store), "scheduled")
    world.answers = lambda one: Answer(429, "answered 429", 30.0)
    world.run(29)
    assert len(world.sent) == 1
    world.answers = lambda one: OK
    world.run(2)
    assert store.callback_counts() == {"delivered": 1}


def test_a_scheduler_that_died_with_one_in_hand_is_followed_by_another(
    store: Store, world: World
) -> None:
    tell(store, add_job(store), "scheduled")
    assert len(store.claim_callbacks("the dead one", NOW, 120, 5)) == 1
    world.run(100)
    assert world.sent == []
    world.run(30)
    assert world.sent == ["t1/scheduled"]


def test_threads_deliver_too_and_stop_in_good_order(store: Store) -> None:
    world = World(store, workers=4)
    world.clock.now = time.time()
    world.deliverer._clock = time.time
    for i in range(20):
        tell(store, add_job(store, f"t{i}", 100 + i), "scheduled", "running")
    world.deliverer.start()
    deadline = time.monotonic() + 60
    while store.callback_counts() != {"delivered": 40} and time.monotonic() < deadline:
        world.deliverer.wake()
        time.sleep(0.01)
    world.deliverer.stop()
    assert store.callback_counts() == {"delivered": 40}
    for i in range(20):
        assert world.sent.index(f"t{i}/scheduled") < world.sent.index(f"t{i}/running")


# Over HTTP


@pytest.fixture
def fake() -> Fake:
    return Fake(Receiver("crater", "sécret:x", "0123456789abcdef"))


@pytest.fixture
def url(fake: Fake) -> Iterator[str]:
    """The fake platform on a port of this machine."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(build(fake), log_level="error"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    deadline = time.monotonic() + 60
    while not server.started and time.monotonic() < deadline:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{listener.getsockname()[1]}/callback"
    server.should_exit = True
    thread.join(60)


@pytest.fixture
def secrets(tmp_path: Path) -> dict[str, Any]:
    password, key = tmp_path / "password", tmp_path / "key"
    password.write_text("sécret:x\n")
    key.write_text("0123456789abcdef\n")
    for file in (password, key):
        file.chmod(0o600)
    return {"user": "crater", "password_file": password, "hmac_key_file": key, "allow_http": True}


def sending(url: str, secrets: dict[str, Any], **fields: Any) -> Sender:
    return Sender(Callback(url=url, **{**secrets, **fields}))


def one(store: Store, status: str = "scheduled") -> StoredCallback:
    tell(store, add_job(store), status)
    return store.callbacks()[0]


def test_what_is_sent_is_authentic_and_signed(
    fake: Fake, url: str, secrets: dict[str, Any], store: Store
) -> None:
    sender = sending(url, secrets)
    assert sender.send(one(store)) == Answer(200)
    assert fake.receiver.refused == 0
    (got,) = fake.receiver.received
    assert got.body == {"status": "scheduled"}
    sender.close()


def test_a_wrong_password_or_key_is_found_out(
    fake: Fake, url: str, secrets: dict[str, Any], tmp_path: Path, store: Store
) -> None:
    callback = one(store)
    for name in ("password_file", "hmac_key_file"):
        other = tmp_path / "other"
        other.write_text("another secret than that\n")
        other.chmod(0o600)
        answer = sending(url, secrets, **{name: other}).send(callback)
        assert (answer.status, answer.accepted, answer.final) == (401, False, False)
    assert fake.receiver.received == []
    assert fake.receiver.refused == 2


def test_injected_faults_and_a_lost_answer_make_repeats_that_are_seen(
    fake: Fake, url: str, secrets: dict[str, Any], store: Store
) -> None:
    fake.faults += [
        Fault(kind="error", times=2),
        Fault(kind="refuse"),
        Fault(kind="busy"),
        Fault(kind="lost_answer", seconds=1.5),
    ]
    clock = Clock(time.time())
    sender = sending(url, secrets, timeout_seconds=0.5)
    task = add_job(store)
    from crater_slurm.alldata import payload
    from crater_slurm.alldata.states import State

    made = [
        payload.callback(task, state, sequence=i, happened=NOW, now=clock.now, delivery="waiting")
        for i, state in enumerate((State.SCHEDULED, State.RUNNING, State.COMPLETED), 1)
    ]
    assert store.change_task(task, {"state": "completed", "changed": NOW}, made)
    deliverer = Deliverer(
        Callback(url=url, timeout_seconds=0.5), lambda: store, sender.send, owner="me", clock=clock
    )
    for _ in range(40):
        while deliverer.run_due():
            pass
        clock.now += 5
    assert store.callback_counts() == {"delivered": 3}
    assert fake.receiver.statuses("t1") == ["scheduled", "running", "completed"]
    assert fake.receiver.problems() == []
    assert sum(got.repeat for got in fake.receiver.received) == 1, "of the lost answer"
    assert store.callbacks(oldest_first=True)[0].attempts == 6
    sender.close()


def test_nobody_there_is_silence(secrets: dict[str, Any], store: Store) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{taken.getsockname()[1]}/callback"
        answer = sending(nobody, secrets).send(one(store))
    assert answer.status is None
    assert "refused" in answer.error


def test_a_redirect_is_not_followed_and_a_flood_is_not_read(
    secrets: dict[str, Any], store: Store
) -> None:
    """A socket that answers by hand."""
    answers = [
        b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99999999\r\n\r\n" + b"x" * 200_000,
        b"rubbish\r\n\r\n",
    ]
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        for text in answers:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):  # a flood is hung up on
                connection.recv(65536)
                connection.sendall(text)
                while connection.recv(4096):
                    pass

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/callback"
    callback = one(store)

    def send() -> Answer:
        sender = sending(url, secrets, timeout_seconds=5)
        try:
            return sender.send(callback)
        finally:
            sender.close()

    redirected = send()
    assert (redirected.status, redirected.accepted) == (302, False)
    assert "not followed" in redirected.error
    assert send().accepted
    assert send().status is None
    listener.close()


def test_plain_http_and_open_files_are_refused(tmp_path: Path, secrets: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="anybody on the way can read"):
        Sender(Callback(url="http://alldata.example/callback"))
    secrets["password_file"].chmod(0o644)
    with pytest.raises(ConfigError, match="may be read by others .* chmod 0600"):
        Sender(Callback(url=URL, **secrets))
    secrets["password_file"].chmod(0o600)
    secrets["hmac_key_file"].write_text("short\n")
    with pytest.raises(ConfigError, match="5 characters; at least 16"):
        Sender(Callback(url=URL, **secrets))
    with pytest.raises(ConfigError, match="needs alldata.callback.password_file"):
        Sender(Callback(url=URL, user="crater"))
    with pytest.raises(ConfigError, match="can't be read"):
        Sender(Callback(url=URL, user="crater", password_file=tmp_path / "none"))


def test_a_signature_is_of_its_time_and_body() -> None:
    receiver = Receiver(key="0123456789abcdef")
    good = signature("0123456789abcdef", int(NOW), b"{}")
    receiver.check({"x-crater-signature": good}, b"{}", NOW + 10)
    for headers, body, now in (
        ({"x-crater-signature": good}, b"{} ", NOW),
        ({"x-crater-signature": good}, b"{}", NOW + 3600),
        ({"x-crater-signature": good[:-1]}, b"{}", NOW),
        ({}, b"{}", NOW),
    ):
        with pytest.raises(NotOursError):
            receiver.check(headers, body, now)


def test_the_receiver_sees_what_is_lost_out_of_order_or_changed() -> None:
    receiver = Receiver()

    def take(event: str, sequence: int, status: str = "running") -> list[str]:
        body = {"event_id": event, "task_id": "t1", "sequence": sequence, "status": status}
        return receiver.take(json.dumps(body).encode(), NOW).problems

    assert take("a", 1, "scheduled") == []
    assert take("a", 1, "scheduled") == []
    assert take("a", 1, "failed") == ["a repeat with another content"]
    assert take("c", 3) == ["sequence 3 instead of 2: lost or out of order"]
    assert take("d", 4, "odd") == ["the status 'odd' is unknown"]
    assert receiver.statuses("t1") == ["scheduled", "running", "odd"]


def test_the_fake_s_page_shows_hostile_words_as_words(fake: Fake) -> None:
    from fastapi.testclient import TestClient

    evil = {"event_id": "e", "task_id": "<script>alert(1)</script>", "status": "<b>", "sequence": 1}
    fake.receiver.take(json.dumps(evil).encode(), NOW)
    answer = TestClient(build(fake)).get("/")
    assert "<script>" not in answer.text
    assert "&lt;script&gt;" in answer.text
    assert "default-src 'none'" in answer.headers["content-security-policy"]
