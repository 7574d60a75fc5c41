"""Health from a Prometheus server: a real HTTP server that speaks its API, well and badly."""

from __future__ import annotations

import contextlib
import http.server
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from crater_slurm.config.health import PrometheusSource
from crater_slurm.errors import ConfigError, UnavailableError
from crater_slurm.model.health import GpuHealth, NodeHealth
from crater_slurm.scheduler import prometheus_api
from crater_slurm.scheduler.prometheus import Prometheus, node_of
from crater_slurm.scheduler.prometheus_api import query, read_token

NOW = 1_700_000_000.0


class Server(http.server.ThreadingHTTPServer):
    """Answers /api/v1/query from ``series``: expression to (labels, value as Prometheus writes)."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.series: dict[str, list[tuple[dict[str, str], str]]] = {}
        self.asked: list[str] = []
        self.headers: list[Any] = []
        self.instead: Callable[[http.server.BaseHTTPRequestHandler], None] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        self.server.asked.append(parse_qs(parts.query).get("query", [""])[0])
        self.server.headers.append(self.headers)
        if self.server.instead:
            # A client that gives up closes its end.
            with contextlib.suppress(OSError):
                self.server.instead(self)
            return
        found = self.server.series.get(self.server.asked[-1], [])
        vector = [{"metric": labels, "value": [NOW, value]} for labels, value in found]
        data = {"resultType": "vector", "result": vector}
        known = parts.path == "/api/v1/query"
        send(self, 200 if known else 404, json.dumps({"status": "success", "data": data}))

    def log_message(self, *_: object) -> None:
        pass


def send(handler: http.server.BaseHTTPRequestHandler, status: int, text: str) -> None:
    handler.send_response(status)
    handler.end_headers()
    handler.wfile.write(text.encode())


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as found:
        thread = threading.Thread(target=found.serve_forever, args=(0.01,))
        thread.start()
        yield found
        found.shutdown()
        thread.join()


def source(server: Server, **fields: Any) -> Prometheus:
    settings = PrometheusSource(url=server.url, **fields)
    return Prometheus(settings, lambda: {"gn01", "gn02"}, clock=lambda: NOW)


def last(metric: str, seconds: int = 120) -> str:
    return f"last_over_time({metric}[{seconds}s])"


GPU = {"node": "gn01", "gpu": "3", "uuid": "GPU-3", "model": "a100"}
SAMPLED = last("crater_probe_sample_timestamp_seconds")


def test_craters_own_metrics_become_health(server: Server) -> None:
    server.series = {
        last("crater_gpu_temperature_celsius"): [(GPU, "71"), (GPU | {"gpu": "0"}, "40")],
        last('crater_gpu_ecc_errors_total{kind="uncorrected"}'): [(GPU, "2")],
        last('crater_gpu_ecc_errors_total{kind="corrected"}'): [(GPU, "17")],
        "crater_gpu_throttled == 1": [(GPU | {"reason": "thermal"}, "1")],
        last("crater_ssd_latency_us"): [({"node": "gn01", "device": "nvme0n1"}, "90.5")],
        last("crater_ssd_wear_percent"): [({"node": "gn01", "device": "nvme0n1"}, "12")],
        last("crater_ssd_critical_warning"): [({"node": "gn01", "device": "nvme1n1"}, "4")],
        last("crater_cpu_numa_memory_bandwidth_used_gb_s"): [({"node": "gn01", "numa": "1"}, "99")],
        last("crater_node_load"): [({"node": "gn01"}, "3.5"), ({"node": "elsewhere"}, "1")],
        SAMPLED: [({"node": "gn01"}, str(NOW - 20))],
    }
    found = source(server)
    found.poll()
    assert found.problem == ""
    health = found.health("gn01")
    assert health is not None
    assert (health.time, health.load) == (NOW - 20, 3.5)
    assert health.gpus == (
        GpuHealth(index=0, temperature_c=40),
        GpuHealth(
            index=3,
            temperature_c=71,
            ecc_uncorrected=2,
            ecc_corrected=17,
            throttled=("thermal",),
        ),
    )
    assert [(d.name, d.latency_us, d.wear_percent, d.critical_warning) for d in health.drives] == [
        ("nvme0n1", 90.5, 12, None),
        ("nvme1n1", None, None, 4),
    ]
    assert [(n.id, n.memory_bandwidth_gb_s) for n in health.numa_nodes] == [(1, 99)]
    assert found.health("gn02") is None
    assert found.health("elsewhere") is None


DCGM_TIME = {
    "timestamp(DCGM_FI_DEV_GPU_TEMP)": [
        ({"Hostname": name, "gpu": "1"}, str(NOW - 15)) for name in ("gn01", "gn02")
    ]
}
DCGM = {"Hostname": "gn02.example.org", "gpu": "1", "instance": "10.0.0.2:9400", "UUID": "GPU-1"}


def test_dcgm_s_metrics_become_health(server: Server) -> None:
    server.series = {
        last("DCGM_FI_DEV_GPU_TEMP"): [(DCGM, "88")],
        last("DCGM_FI_DEV_ECC_DBE_VOL_TOTAL"): [(DCGM, "1")],
        last("DCGM_FI_DEV_XID_ERRORS"): [(DCGM, "79")],
        last("DCGM_FI_DEV_CLOCK_THROTTLE_REASONS"): [(DCGM, str(0x40 | 0x04 | 0x01))],
        "timestamp(DCGM_FI_DEV_GPU_TEMP)": [(DCGM, str(NOW - 15)), (DCGM, str(NOW - 14))],
    }
    found = source(server)
    found.poll()
    reasons = ("power_cap", "hardware_thermal")
    gpu = GpuHealth(index=1, temperature_c=88, ecc_uncorrected=1, xid=79, throttled=reasons)
    assert found.health("gn02") == NodeHealth(node="gn02", time=NOW - 15, gpus=(gpu,))


def test_a_target_that_is_gone_tells_nothing_new(server: Server) -> None:
    values = {last("DCGM_FI_DEV_GPU_TEMP", 60): [(DCGM, "88")]}
    server.series = values | DCGM_TIME
    found = source(server, window_seconds=60)
    found.poll()
    before = found.health("gn02")
    assert before is not None
    # Prometheus forgets its time at the first scrape that fails, and the values a little later.
    for left in (values, {}):
        server.series = left
        found.poll()
        assert found.health("gn02") is before
    # One that was never alive is not known by its last words.
    server.series = values
    late = source(server, window_seconds=60)
    late.poll()
    assert (late.health("gn02"), late.problem) == (None, "")


def test_a_node_that_slurm_no_longer_has_is_forgotten(server: Server) -> None:
    server.series = {last("DCGM_FI_DEV_GPU_TEMP"): [(DCGM, "88")]} | DCGM_TIME
    names = {"gn02"}
    found = Prometheus(PrometheusSource(url=server.url), lambda: names, clock=lambda: NOW)
    found.poll()
    assert found.health("gn02") is not None
    names.clear()
    found.poll()
    assert found.health("gn02") is None


def test_a_time_ahead_of_ours_is_now(server: Server) -> None:
    server.series = {
        last("crater_node_load"): [({"node": "gn01"}, "1")],
        SAMPLED: [({"node": "gn01"}, str(NOW + 9999))],
    }
    found = source(server)
    found.poll()
    health = found.health("gn01")
    assert health is not None
    assert health.time == NOW


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf", "-1", "9.2e18"])
def test_numbers_that_are_none_are_left_out(server: Server, value: str) -> None:
    server.series = {
        last("DCGM_FI_DEV_ECC_DBE_VOL_TOTAL"): [(DCGM, value)],
        last("DCGM_FI_DEV_GPU_TEMP"): [(DCGM, "50")],
        **DCGM_TIME,
    }
    found = source(server)
    found.poll()
    health = found.health("gn02")
    assert health is not None
    assert health.gpus == (GpuHealth(index=1, temperature_c=50),)


def test_labels_of_another_kind_are_left_out(server: Server) -> None:
    odd = [{"gpu": "x"}, {"gpu": "-1"}, {"gpu": "99999999"}, {"gpu": "²"}, {}]
    server.series = {
        last("DCGM_FI_DEV_GPU_TEMP"): [({"Hostname": "gn01"} | more, "50") for more in odd],
        last("crater_ssd_wear_percent"): [
            ({"node": "gn01", "device": name}, "99") for name in ("a\x1b[2J", "x" * 256, "")
        ],
        **DCGM_TIME,
    }
    found = source(server)
    found.poll()
    assert found.problem == ""
    health = found.health("gn01")
    assert health is not None
    assert (health.gpus, health.drives) == ((), ())


@pytest.mark.parametrize(
    ("labels", "node"),
    [
        ({"node": "gn01"}, "gn01"),
        ({"node": "k8s-7", "exported_node": "gn02"}, "gn02"),
        ({"instance": "gn01:9193"}, "gn01"),
        ({"instance": "gn01.cluster.example:9193"}, "gn01"),
        ({"node": "stranger", "Hostname": "gn02"}, "gn02"),
        ({"instance": "10.0.0.1:9193"}, None),
        ({"job": "gn01"}, None),
        ({}, None),
    ],
)
def test_the_node_is_told_by_the_first_label_that_slurm_knows(
    labels: dict[str, str], node: str | None
) -> None:
    assert node_of(labels, PrometheusSource().node_labels, {"gn01", "gn02"}) == node


def down(handler: Any) -> None:
    send(handler, 503, "no healthy upstream")


def refuses(handler: Any) -> None:
    send(handler, 400, '{"status":"error","errorType":"bad_data","error":"parse error"}')


def hangs(handler: Any) -> None:
    handler.rfile.read(1)  # until the client gives up


def drips(handler: Any) -> None:
    handler.send_response(200)
    handler.end_headers()
    for _ in range(200):
        handler.wfile.write(b" ")
        handler.wfile.flush()
        time.sleep(0.02)


def endless(handler: Any) -> None:
    handler.send_response(200)
    handler.end_headers()
    for _ in range(100):
        handler.wfile.write(b" " * 1000)


def redirects(handler: Any) -> None:
    handler.send_response(302)
    handler.send_header("Location", "http://192.0.2.1/")
    handler.end_headers()


def matrix(handler: Any) -> None:
    send(handler, 200, '{"status":"success","data":{"resultType":"matrix","result":[]}}')


def page(handler: Any) -> None:
    send(handler, 200, "<html>Welcome to nginx</html>")


def odd(handler: Any) -> None:
    send(handler, 200, '{"status":"success","data":{"resultType":"vector","result":[{"value":1}]}}')


def nothing(handler: Any) -> None:
    handler.close_connection = True


BAD = [down, refuses, hangs, drips, endless, redirects, matrix, page, odd, nothing]


@pytest.mark.parametrize("instead", BAD, ids=lambda f: f.__name__)
def test_a_broken_server_is_a_problem_and_what_was_known_grows_old(
    server: Server, instead: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prometheus_api, "_LONGEST_ANSWER", 50_000)
    server.series = {
        last("crater_node_load"): [({"node": "gn01"}, "1")],
        SAMPLED: [({"node": "gn01"}, str(NOW))],
    }
    found = source(server, timeout_seconds=0.3)
    found.poll()
    before = found.health("gn01")
    server.instead = instead
    found.poll()
    assert server.url in found.problem
    assert found.health("gn01") == before
    server.instead = None
    found.poll()
    assert found.problem == ""


@pytest.mark.parametrize(("instead", "says"), [(drips, "too slowly"), (endless, "more than 50000")])
def test_an_answer_has_an_end_in_time_and_size(
    server: Server, instead: Any, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prometheus_api, "_LONGEST_ANSWER", 50_000)
    server.instead = instead
    with pytest.raises(UnavailableError, match=says):
        query(server.url, "up", timeout_seconds=0.3)


def test_the_first_question_without_an_answer_is_the_last_of_a_round(server: Server) -> None:
    server.instead = down
    source(server).poll()
    assert len(server.asked) == 1


def test_a_server_that_is_not_there_is_a_problem() -> None:
    found = Prometheus(PrometheusSource(url="http://127.0.0.1:1"), lambda: (), clock=lambda: NOW)
    found.poll()
    assert "Prometheus does not answer at http://127.0.0.1:1" in found.problem
    with pytest.raises(UnavailableError):
        query("http://127.0.0.1:99999", "up", timeout_seconds=1)


def test_a_path_before_the_api_is_kept_and_the_query_is_quoted(server: Server) -> None:
    with pytest.raises(UnavailableError, match="404"):
        query(server.url + "/prom/", 'up{a="b&c"}', timeout_seconds=5)
    assert server.asked == ['up{a="b&c"}']


def test_the_token_is_sent_and_read_anew(server: Server, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("first\n")
    file.chmod(0o600)
    found = source(server, token_file=file)
    found.poll()
    file.write_text("second")
    found.poll()
    sent = [headers["Authorization"] for headers in server.headers]
    assert (sent[0], sent[-1]) == ("Bearer first", "Bearer second")


def test_without_a_token_file_none_is_sent(server: Server) -> None:
    source(server).poll()
    assert server.headers[0]["Authorization"] is None


@pytest.mark.parametrize(
    ("mode", "text", "says"),
    [
        (0o640, "secret", "others may read it; chmod 600"),
        (0o604, "secret", "others may read it; chmod 600"),
        (0o600, "", "holds no token"),
        (0o600, "a\r\nX-Other: b", "holds no token of one line"),
        (0o600, "ü", "can't read"),
    ],
)
def test_a_token_that_is_no_secret_is_not_used(
    server: Server, tmp_path: Path, mode: int, text: str, says: str
) -> None:
    file = tmp_path / "token"
    file.write_text(text)
    file.chmod(mode)
    with pytest.raises(ConfigError, match=says):
        read_token(file)
    found = source(server, token_file=file)
    found.poll()
    assert says in found.problem
    assert server.asked == []


def test_a_token_file_must_be_a_file(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(ConfigError, match="token_file"):
            read_token(path)


def test_the_thread_polls_and_ends(server: Server) -> None:
    server.series = {SAMPLED: [({"node": "gn01"}, str(NOW))]}
    found = source(server)
    found.start()
    while found.health("gn01") is None:
        time.sleep(0.01)
    found.stop()
    assert not any(t.name == "prometheus" for t in threading.enumerate())
