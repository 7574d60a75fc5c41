"""The daemon's metrics: from records and workers' words, which may be lies."""

from __future__ import annotations

import os
import re
import socket
import threading
import urllib.request
from pathlib import Path

import pytest
from node_fakes import USER, settings, wait_for

from crater_slurm.node import metrics, metrics_page
from crater_slurm.node.jobs import ENDED, JobRecord
from crater_slurm.node.metrics import families
from crater_slurm.node.metrics_page import Page
from crater_slurm.node.services import Services
from crater_slurm.node.totals import Pending, Totals

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="the daemon runs as root")
ROOT = Path(__file__).resolve().parents[2]


def job(job_id: str = "7", counters: dict | None = None, **checkpoints) -> JobRecord:
    return JobRecord(
        job_id=job_id, uid=USER, gid=USER, cluster="c1",
        checkpoints={"counters": counters or {}, **checkpoints},
    )  # fmt: skip


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


# Totals


def test_what_workers_did_is_added_up_and_outlives_them() -> None:
    totals = Totals(Clock())
    totals.see([job("1", {"saved": 2, "drained_bytes": 100}), job("2", {"saved": 1})])
    totals.see([job("1", {"saved": 5, "drained_bytes": 400}), job("2", {"saved": 1})])
    totals.see([])
    assert (totals.get()["saved"], totals.get()["drained_bytes"]) == (6, 400)


def test_a_worker_that_was_replaced_begins_again_at_zero() -> None:
    totals = Totals(Clock())
    for saved in (5, 2, 3):
        totals.see([job("1", {"saved": saved})])
    assert totals.get()["saved"] == 5 + 2 + 1


def test_two_looks_at_the_same_word_count_once() -> None:
    totals = Totals(Clock())
    for _ in range(3):
        totals.see([job("1", {"saved": 5})])
    assert totals.get()["saved"] == 5


@pytest.mark.parametrize(
    "lie",
    [{"saved": "9"}, {"saved": -1}, {"saved": True}, {"saved": float("inf")}, {"saved": 1e30},
     {"other": 5}, "nonsense", None, {"drained_bytes": 1e19}, {"saved": [1]}],
)  # fmt: skip
def test_lies_are_not_believed_and_break_nothing(lie) -> None:
    totals = Totals(Clock())
    record = job("1")
    record.checkpoints["counters"] = lie
    totals.see([record])
    assert set(totals.get().values()) == {0.0}


def test_steps_that_no_hardware_could_take_are_left_out() -> None:
    clock = Clock()
    totals = Totals(clock)
    totals.see([job("1", {"drained_bytes": 0})])
    clock.now += 10
    totals.see([job("1", {"drained_bytes": 1e15})])
    assert totals.get()["drained_bytes"] == 0
    clock.now += 10
    totals.see([job("1", {"drained_bytes": 1e15 + 5e12})])
    assert totals.get()["drained_bytes"] == 5e12


def test_what_waits_for_its_destination_ages_until_it_is_there() -> None:
    clock = Clock()
    totals = Totals(clock)

    def step(number: int, flushed: bool, size: int = 100) -> dict:
        return {"name": "step", "step": number, "run": "7.0", "bytes": size, "local": True,
                "flushed": flushed, "error": ""}  # fmt: skip

    totals.see([job(destination="s3://b/p", steps=[step(1, False)])])
    clock.now += 60
    totals.see([job(destination="s3://b/p", steps=[step(1, False), step(2, False, 5)])])
    assert totals.pending == Pending(105, 2, 60.0)
    totals.see([job(destination="s3://b/p", steps=[step(1, True), step(2, False, 5)])])
    assert totals.pending == Pending(5, 1, 0.0)
    totals.see([job(steps=[step(1, False)])])
    assert totals.pending == Pending(), "without a destination nothing is to be flushed"


# The page


@pytest.fixture
def services(tmp_path: Path) -> Services:
    return Services(settings(tmp_path))


def text(services: Services, workers: int = 0) -> str:
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry()
    registry.register(Page(services, lambda: workers))
    return generate_latest(registry).decode()


def test_a_scrape_tells_stages_cache_and_jobs(services: Services) -> None:
    counters = {
        "saved": 4, "failed": 1, "drained_bytes": 1000, "drain_seconds": 2.5, "lanes": 3,
        "cache_hits": 3, "cache_misses": 1, "flushed": 2, "flushed_bytes": 500, "flush_seconds": 9,
    }  # fmt: skip
    services.store.save(job("7", counters))
    ended = job("8")
    ended.phase = ENDED
    services.store.save(ended)
    page = text(services, workers=1)
    for line in (
        "crater_io_daemon_cache_hit_ratio 0.75",
        'crater_io_daemon_checkpoint_bytes_total{stage="drain"} 1000.0',
        'crater_io_daemon_checkpoint_bytes_total{stage="flush"} 500.0',
        'crater_io_daemon_checkpoint_seconds_sum{stage="drain"} 2.5',
        'crater_io_daemon_checkpoint_seconds_count{stage="drain"} 4.0',
        'crater_io_daemon_checkpoints_total{result="failed"} 1.0',
        "crater_io_daemon_lanes 3.0",
        "crater_io_daemon_workers 1.0",
        'crater_io_daemon_jobs{phase="running"} 1.0',
        'crater_io_daemon_jobs{phase="ended"} 1.0',
        'crater_io_daemon_evicted_total{kind="checkpoint"} 0.0',
    ):
        assert line in page


def test_a_ratio_of_nothing_is_not_shown(services: Services) -> None:
    assert "hit_ratio" not in text(services)


def test_lanes_that_can_not_be_are_not_counted(services: Services) -> None:
    for job_id, lanes in (("1", 1e18), ("2", -5), ("3", 2)):
        services.store.save(job(job_id, {"lanes": lanes}))
    assert "crater_io_daemon_lanes 2.0" in text(services)


def test_series_by_job_are_bounded(services: Services) -> None:
    for number in range(100):
        record = job(str(number))
        record.folders = {"temp": "/x"}
        record.quota = {"used_bytes": number}
        services.store.save(record)
    found = re.findall(r'job_cache_bytes\{job_id="(\d+)"\}', text(services))
    assert len(found) == 32
    assert set(found) == {str(number) for number in range(68, 100)}, "those that hold most"


def test_the_page_is_served_and_ends(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    served = Services(settings(tmp_path, listen=f"127.0.0.1:{port}"))
    page = Page(served)
    page.start()
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            assert b"crater_io_daemon_info" in answer.read()
    finally:
        page.stop()
    with socket.socket() as gone, pytest.raises(ConnectionRefusedError):
        gone.connect(("127.0.0.1", port))


def test_callers_that_say_nothing_hold_up_neither_scrapes_nor_the_daemon(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(metrics_page._Handler, "timeout", 0.2)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    page = Page(Services(settings(tmp_path, listen=f"127.0.0.1:{port}")))
    page.start()
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(50)]

    def scraped() -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
                return b"crater_io_daemon_info" in answer.read()
        except OSError:
            return False

    try:
        threads = sum("process_request_thread" in t.name for t in threading.enumerate())
        assert threads <= metrics_page._MOST_AT_ONCE
        assert wait_for(scraped)
    finally:
        page.stop()
        for one in silent:
            one.close()


@pytest.mark.parametrize("listen", ["", "nonsense", "127.0.0.1:99999", "300.1.1.1:9194"])
def test_no_page_is_no_fault_of_the_daemons(tmp_path: Path, listen: str, caplog) -> None:
    page = Page(Services(settings(tmp_path, listen=listen)))
    page.start()
    page.stop()
    assert ("setting node.listen" in caplog.text) is bool(listen)


def test_every_metric_is_documented(services: Services) -> None:
    services.store.save(job("7", {"cache_hits": 1}))
    record = job("8")
    record.folders, record.quota = {"temp": "/x"}, {"used_bytes": 1}
    services.store.save(record)
    pages = (ROOT / "docs" / "cache.md").read_text()
    for family in families(services):
        suffix = "_total" if family.kind == "counter" else ""
        name = f"crater_io_daemon_{family.name}{suffix}"
        labels = "{" + ", ".join(family.labels) + "}" if family.labels else ""
        assert f"`{name}{labels}`" in pages, f"{name}{labels}"
    assert metrics._PREFIX == "crater_io_daemon_"
