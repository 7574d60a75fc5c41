"""Reports reach crater-scheduler in order, once it is there, and never hurry or hold anybody."""

from __future__ import annotations

import hashlib
import http.server
import json
import threading
from pathlib import Path

import pytest
from node_fakes import wait_for

from crater_slurm.node import report
from crater_slurm.node.report import Reporter


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
    monkeypatch.setattr(report, "_FIRST_WAIT_SECONDS", 0.02)


def make(folder: Path, scheduler: Scheduler) -> Reporter:
    reporter = Reporter(
        folder / "spool", "http://s", credential=lambda text: f"cred({text})", deliver=scheduler
    )
    reporter.start()
    return reporter


def waiting(folder: Path) -> int:
    return len(list((folder / "spool").glob("*.json")))


def test_a_report_has_the_agreed_form(tmp_path: Path) -> None:
    scheduler = Scheduler(204)
    reporter = make(tmp_path, scheduler)
    reporter.send("7", "p1", "n1", "task", {"given": "hard"})
    assert wait_for(lambda: scheduler.got)
    reporter.stop()
    (sent,) = scheduler.got
    assert isinstance(sent.pop("time"), float)
    assert sent == {
        "job_id": "7", "plan_id": "p1", "node": "n1", "phase": "task", "grant": {"given": "hard"},
    }  # fmt: skip
    assert waiting(tmp_path) == 0


def test_the_credential_covers_the_body(tmp_path: Path) -> None:
    bodies: list[bytes] = []
    credentials: list[str] = []

    def deliver(url: str, body: bytes, credential: str) -> int:
        bodies.append(body)
        credentials.append(credential)
        return 200

    reporter = Reporter(tmp_path / "spool", "http://s", credential=lambda t: t, deliver=deliver)
    reporter.start()
    reporter.send("7", "p1", "n1", "task", {})
    assert wait_for(lambda: bodies)
    reporter.stop()
    assert credentials == [hashlib.sha256(bodies[0]).hexdigest()]


def test_reports_wait_in_order_while_the_scheduler_is_away(tmp_path: Path) -> None:
    scheduler = Scheduler(0)
    reporter = make(tmp_path, scheduler)
    for phase in ("prolog", "task", "epilog"):
        reporter.send("7", "p1", "n1", phase, {})
    assert wait_for(lambda: waiting(tmp_path) == 3)
    scheduler.statuses = [503, 200]
    assert wait_for(lambda: len(scheduler.got) == 3)
    assert [sent["phase"] for sent in scheduler.got] == ["prolog", "task", "epilog"]
    reporter.stop()


def test_reports_outlive_the_daemon(tmp_path: Path) -> None:
    first = make(tmp_path, Scheduler(0))
    first.send("7", "p1", "n1", "epilog", {})
    first.stop()
    assert waiting(tmp_path) == 1
    scheduler = Scheduler(200)
    second = make(tmp_path, scheduler)
    assert wait_for(lambda: len(scheduler.got) == 1)
    second.stop()


@pytest.mark.parametrize("status", [400, 409, 413, 422])
def test_a_report_that_would_fail_again_does_not_hold_the_others_up(tmp_path, status) -> None:
    scheduler = Scheduler(status, 200)
    reporter = make(tmp_path, scheduler)
    reporter.send("7", "p1", "n1", "prolog", {})
    reporter.send("7", "p1", "n1", "epilog", {})
    assert wait_for(lambda: waiting(tmp_path) == 0 and scheduler.got)
    assert [sent["phase"] for sent in scheduler.got] == ["epilog"]
    reporter.stop()


@pytest.mark.parametrize("status", [401, 404, 429, 500, 302])
def test_other_answers_are_tried_again(tmp_path: Path, status: int) -> None:
    scheduler = Scheduler(status, 200)
    reporter = make(tmp_path, scheduler)
    reporter.send("7", "p1", "n1", "prolog", {})
    assert wait_for(lambda: len(scheduler.got) == 1)
    reporter.stop()


def test_an_outage_is_one_line_in_the_log(tmp_path: Path, caplog) -> None:
    scheduler = Scheduler(0, 0, 0, 0, 200)
    reporter = make(tmp_path, scheduler)
    reporter.send("7", "p1", "n1", "prolog", {})
    assert wait_for(lambda: scheduler.got)
    reporter.stop()
    assert caplog.text.count("couldn't reach") == 1


def test_a_missing_munge_makes_reports_wait(tmp_path: Path) -> None:
    def no_munge(text: str) -> str:
        raise FileNotFoundError(2, "No such file or directory", "munge")

    reporter = Reporter(tmp_path / "spool", "http://s", credential=no_munge, deliver=Scheduler(200))
    reporter.start()
    reporter.send("7", "p1", "n1", "prolog", {})
    assert wait_for(lambda: waiting(tmp_path) == 1)
    reporter.stop()


def test_the_spool_has_an_end(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(report, "_MOST_WAITING", 2)
    spool = tmp_path / "spool"
    spool.mkdir()
    for number in range(5):
        (spool / f"{number:020d}-000000.json").write_text(json.dumps({"n": number}))
    scheduler = Scheduler(200)
    reporter = make(tmp_path, scheduler)
    assert wait_for(lambda: waiting(tmp_path) == 0)
    assert [sent["n"] for sent in scheduler.got] == [3, 4]
    reporter.stop()


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
    status = report.post(f"http://127.0.0.1:{server.server_port}/base/", b"{}", "MUNGE:abc:")
    server.server_close()
    assert status == 204
    assert seen == {
        "path": "/base/node/v1/grants", "authorization": "MUNGE MUNGE:abc:", "body": "{}",
    }  # fmt: skip


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://h", "", "http://"])
def test_only_http_addresses_are_posted_to(url: str) -> None:
    with pytest.raises(OSError, match="no http or https address"):
        report.post(url, b"", "")
