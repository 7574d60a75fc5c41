"""Reports reach crater-scheduler in order, once it is there, and never hurry or hold anybody."""

from __future__ import annotations

import hashlib
import http.server
import json
import threading
from pathlib import Path

import pytest
from node_fakes import wait_for

from crater_slurm.slurm import spool as spool_module
from crater_slurm.slurm.spool import Spool


class Scheduler:
    """A scheduler whose answers are scripted; the last one repeats."""

    def __init__(self, *statuses: int) -> None:
        self.statuses = list(statuses)
        self.got: list[dict] = []
        self.credentials: list[str] = []

    def __call__(self, url: str, body: bytes, credential: str) -> int:
        status = self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]
        if status == 0:
            raise ConnectionRefusedError(111, "Connection refused")
        self.credentials.append(credential)
        if 200 <= status < 300:
            self.got.append(json.loads(body))
        return status


@pytest.fixture(autouse=True)
def quick(monkeypatch) -> None:
    monkeypatch.setattr(spool_module, "_FIRST_WAIT_SECONDS", 0.02)


def make(folder: Path, scheduler: Scheduler) -> Spool:
    spool = Spool(
        folder / "spool", "http://s", credential=lambda text: f"cred({text})", deliver=scheduler
    )
    spool.start()
    return spool


def waiting(folder: Path) -> int:
    return len(list((folder / "spool").glob("*.json")))


def test_a_report_that_was_kept_outlives_its_process(tmp_path: Path) -> None:
    died = Spool(tmp_path / "spool", "http://s")  # which never came to send anything
    (tmp_path / "spool").mkdir()
    assert died.keep({"job_id": "7"})
    assert waiting(tmp_path) == 1
    scheduler = Scheduler(204)
    spool = make(tmp_path, scheduler)
    assert spool.keep({"job_id": "8"})
    assert wait_for(lambda: len(scheduler.got) == 2 and waiting(tmp_path) == 0)
    spool.stop()
    assert [one["job_id"] for one in scheduler.got] == ["7", "8"]


def test_a_report_that_can_not_be_kept_is_not_said_to_be(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "is not there", "http://s")
    assert not spool.keep({"job_id": "7"})


def test_a_report_arrives_as_it_was_sent(tmp_path: Path) -> None:
    scheduler = Scheduler(204)
    spool = make(tmp_path, scheduler)
    spool.send({"job_id": "7", "grant": {"given": "hard"}})
    assert wait_for(lambda: scheduler.got)
    spool.stop()
    assert scheduler.got == [{"job_id": "7", "grant": {"given": "hard"}}]
    assert waiting(tmp_path) == 0


def test_the_credential_covers_the_body(tmp_path: Path) -> None:
    bodies: list[bytes] = []
    credentials: list[str] = []

    def deliver(url: str, body: bytes, credential: str) -> int:
        bodies.append(body)
        credentials.append(credential)
        return 200

    spool = Spool(tmp_path / "spool", "http://s", credential=lambda t: t, deliver=deliver)
    spool.start()
    spool.send({"job_id": "7", "phase": "task", "grant": {}})
    assert wait_for(lambda: bodies)
    spool.stop()
    assert credentials == [hashlib.sha256(bodies[0]).hexdigest()]


def test_reports_wait_in_order_while_the_scheduler_is_away(tmp_path: Path) -> None:
    scheduler = Scheduler(0)
    spool = make(tmp_path, scheduler)
    for phase in ("prolog", "task", "epilog"):
        spool.send({"job_id": "7", "phase": phase, "grant": {}})
    assert wait_for(lambda: waiting(tmp_path) == 3)
    scheduler.statuses = [503, 200]
    assert wait_for(lambda: len(scheduler.got) == 3)
    assert [sent["phase"] for sent in scheduler.got] == ["prolog", "task", "epilog"]
    spool.stop()


def test_whether_reports_wait_can_be_asked(tmp_path: Path) -> None:
    scheduler = Scheduler(0)
    spool = make(tmp_path, scheduler)
    assert spool.waits() is False
    spool.send({"job_id": "7"})
    assert spool.waits() is True
    assert wait_for(lambda: waiting(tmp_path) == 1)
    assert spool.waits() is True
    scheduler.statuses = [200]
    assert wait_for(lambda: not spool.waits())
    spool.stop()


def test_reports_outlive_the_daemon(tmp_path: Path) -> None:
    first = make(tmp_path, Scheduler(0))
    first.send({"job_id": "7", "phase": "epilog", "grant": {}})
    first.stop()
    assert waiting(tmp_path) == 1
    scheduler = Scheduler(200)
    second = make(tmp_path, scheduler)
    assert wait_for(lambda: len(scheduler.got) == 1)
    second.stop()


@pytest.mark.parametrize("status", [400, 409, 413, 422])
def test_a_report_that_would_fail_again_does_not_hold_the_others_up(tmp_path, status) -> None:
    scheduler = Scheduler(status, 200)
    spool = make(tmp_path, scheduler)
    spool.send({"job_id": "7", "phase": "prolog", "grant": {}})
    spool.send({"job_id": "7", "phase": "epilog", "grant": {}})
    assert wait_for(lambda: waiting(tmp_path) == 0 and scheduler.got)
    assert [sent["phase"] for sent in scheduler.got] == ["epilog"]
    spool.stop()


@pytest.mark.parametrize("status", [401, 404, 429, 500, 302])
def test_other_answers_are_tried_again(tmp_path: Path, status: int) -> None:
    scheduler = Scheduler(status, 200)
    spool = make(tmp_path, scheduler)
    spool.send({"job_id": "7", "phase": "prolog", "grant": {}})
    assert wait_for(lambda: len(scheduler.got) == 1)
    spool.stop()


def test_an_outage_is_one_line_in_the_log(tmp_path: Path, caplog) -> None:
    scheduler = Scheduler(0, 0, 0, 0, 200)
    spool = make(tmp_path, scheduler)
    spool.send({"job_id": "7", "phase": "prolog", "grant": {}})
    assert wait_for(lambda: scheduler.got)
    spool.stop()
    assert caplog.text.count("couldn't reach") == 1


def test_a_missing_munge_makes_reports_wait(tmp_path: Path) -> None:
    def no_munge(text: str) -> str:
        raise FileNotFoundError(2, "No such file or directory", "munge")

    spool = Spool(tmp_path / "spool", "http://s", credential=no_munge, deliver=Scheduler(200))
    spool.start()
    spool.send({"job_id": "7", "phase": "prolog", "grant": {}})
    assert wait_for(lambda: waiting(tmp_path) == 1)
    spool.stop()


def test_the_spool_has_an_end(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(spool_module, "_MOST_WAITING", 2)
    folder = tmp_path / "spool"
    folder.mkdir()
    for number in range(5):
        (folder / f"{number:020d}-000000.json").write_text(json.dumps({"n": number}))
    scheduler = Scheduler(200)
    spool = make(tmp_path, scheduler)
    assert wait_for(lambda: waiting(tmp_path) == 0)
    assert [sent["n"] for sent in scheduler.got] == [3, 4]
    spool.stop()


def test_a_real_post_carries_the_header() -> None:
    seen: dict[str, str] = {}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            seen.update(path=self.path, authorization=self.headers["Authorization"])
            seen["body"] = self.rfile.read(int(self.headers["Content-Length"])).decode()
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_args) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.handle_request, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/base/node/v1/grants"
    status = spool_module.post(url, b"{}", "MUNGE:abc:")
    server.server_close()
    assert status == 204
    assert seen == {
        "path": "/base/node/v1/grants", "authorization": "MUNGE MUNGE:abc:", "body": "{}",
    }  # fmt: skip


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://h", "", "http://"])
def test_only_http_addresses_are_posted_to(url: str) -> None:
    with pytest.raises(OSError, match="no http or https address"):
        spool_module.post(url, b"", "")
