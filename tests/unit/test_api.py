"""The HTTP API: who may ask and report, proven by MUNGE; health and metrics for everybody."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster_samples import KEY, message, node, view
from fastapi.testclient import TestClient
from prometheus_client import CollectorRegistry, Counter

from crater_slurm import __version__
from crater_slurm.config import Settings
from crater_slurm.errors import SlurmError, StoreError, UsageError
from crater_slurm.model.health import NodeHealth
from crater_slurm.model.observation import Observation
from crater_slurm.model.plan import Decision, Mode, Verdict
from crater_slurm.model.request import Request
from crater_slurm.placement.sharing import Policy
from crater_slurm.scheduler import api
from crater_slurm.scheduler.health import Board
from crater_slurm.scheduler.service import Service, _sharing_policy
from crater_slurm.scheduler.utilization import Utilization
from crater_slurm.slurm import munge
from crater_slurm.store.records import Grant, JobAction
from crater_slurm.store.repository import Store

ROOT, ADA, BOB = 0, 1000, 1001
NOBODY = hashlib.sha256(b"").hexdigest()
DECISION = Decision(
    id="p1",
    verdict=Verdict.PLANNED,
    mode=Mode.ENFORCE,
    time=1_700_000_000.0,
    user_id=ADA,
    request={"gpus": 2},
)
GRANT = Grant(job_id=7, plan_id="p1", node="n1", time=2.0, got={"gpus": ["GPU-1"]})
SEEN = Observation(
    job_id=7, plan_id="p1", node="n1", time=3.0, seconds=60.0, gpu_memory_peak_mib=17_600
)
OBSERVED: dict[str, Any] = {
    "job_id": "7",
    "plan_id": "p1",
    "node": "n1",
    "time": 3.0,
    "seconds": 60.0,
    "ended": True,
    "succeeded": True,
    "oom_kills": 0,
    "samples": 2,
    "gpus": 1,
    "figures": {"gpu_memory_peak_mib": 17_600},
}
REPORT: dict[str, Any] = {
    "job_id": "7",
    "plan_id": "p1",
    "node": "n1",
    "time": 2.0,
    "phase": "prolog",
    "grant": {"cpus": "0-7"},
}


ACTION = JobAction(
    job="7",
    plan_id="p1",
    user_id=1000,
    time=3.0,
    kind="sla",
    action="priority",
    outcome="done",
    value="nice -1000",
    message="waited 8 s",
)


class FakeRecorder:
    def __init__(self) -> None:
        self.added: list[Grant] = []
        self.away = False

    def add(self, item: Grant) -> None:
        self.added.append(item)

    def decision(self, key: str) -> Decision | None:
        if self.away:
            raise StoreError("the database is locked")
        return {"p1": DECISION, "check-1": DECISION}.get(key)


class FakeReports:
    def __init__(self) -> None:
        self.taken: list[tuple[str, str, Any]] = []
        self.error: Exception | None = None

    def take_profile(self, node: str, data: Any) -> None:
        if self.error:
            raise self.error
        self.taken.append(("profile", node, data))

    def take_health(self, node: str, data: Any) -> None:
        self.taken.append(("health", node, data))


JUDGED: dict[str, Any] = {
    "node": "n1",
    "score": 0.5,
    "tier": 1,
    "degraded": False,
    "faults": [],
    "flags": [],
    "terms": [],
    "own_weight": 1,
}


class FakeHealth:
    board = Board({"n2": None, "n1": None})  # type: ignore[dict-item]

    def newest(self, node: str) -> NodeHealth | None:
        return NodeHealth(node="n1", time=time.time(), load=1.5) if node == "n1" else None

    def describe(self, node: str) -> dict[str, Any] | None:
        return JUDGED if node == "n1" else None

    def slurm_weights(self) -> dict[str, int]:
        return {"n1": 101, "n2": 1}


class FakeObserved:
    def __init__(self) -> None:
        self.taken: list[dict[str, Any]] = []
        self.error: Exception | None = None

    def take(self, report: dict[str, Any]) -> None:
        if self.error:
            raise self.error
        self.taken.append(report)


class FakeTasks:
    def __init__(self) -> None:
        self.reports: list[dict[str, Any]] = []
        self.take_report = self.reports.append


class FakeService:
    clock = staticmethod(time.time)

    def __init__(self) -> None:
        self.tasks = FakeTasks()
        self.recorder = FakeRecorder()
        self.reports = FakeReports()
        self.observed = FakeObserved()
        self.take_observation = self.observed.take
        self.health = FakeHealth()
        self.worth_a_look: list[str] = []
        self.settings = Settings()
        self.slurm = self
        self.wrong: list[str] = []
        self.utilization = Utilization(CollectorRegistry())
        asked = Request(min_gpu_utilization_percent=65)
        self.utilization.observe("7", "p1", asked, 12.0, 900)

    def node(self, name: str) -> dict[str, str]:
        """What Slurm says of a node."""
        return {"NodeHostName": "n1"} if name == "alias" else {"NodeHostName": name}

    def problems(self) -> list[str]:
        return self.wrong

    def warnings(self) -> list[str]:
        return self.worth_a_look

    def store(self) -> FakeService:
        return self

    def grants(self, plan_id: str) -> list[Grant]:
        return [GRANT] if plan_id == "p1" else []

    def observations(self, plan_id: str) -> list[Observation]:
        return [SEEN] if plan_id == "p1" else []

    def actions(self, plan_ids: list[str]) -> dict[str, list[JobAction]]:
        return {"p1": [ACTION]} if "p1" in plan_ids else {}


@pytest.fixture
def service() -> FakeService:
    return FakeService()


@pytest.fixture
def client(service: FakeService) -> TestClient:
    registry = CollectorRegistry()
    Counter("crater_decisions", "Decisions", registry=registry).inc()
    return TestClient(api.build(service, ["root", "nobody-here"], registry))  # type: ignore[arg-type]


@pytest.fixture
def sign(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Headers of a caller, as if munged vouched: ``UID BODY-HASH`` is the credential."""

    def decode(credential: str) -> munge.Credential:
        if not credential[:1].isdigit():
            raise SlurmError("unmunge: Invalid credential")
        uid, _, payload = credential.partition("-")
        return munge.Credential(int(uid), int(uid), payload, "n1.example", "192.0.2.1")

    monkeypatch.setattr(munge, "decode", decode)

    def headers(uid: int, body: bytes = b"") -> dict[str, str]:
        return {"Authorization": f"MUNGE {uid}-{hashlib.sha256(body).hexdigest()}"}

    return headers


def test_health_is_ok_or_degraded_with_every_problem(
    client: TestClient, service: FakeService
) -> None:
    answer = client.get("/healthz")
    assert (answer.status_code, answer.json()) == (200, {"status": "ok"})
    service.wrong = ["the picture of the cluster is old", "the database is locked"]
    answer = client.get("/healthz")
    assert answer.status_code == 503
    assert answer.json() == {"status": "degraded", "problems": service.wrong}


def test_metrics_are_prometheus_text(client: TestClient) -> None:
    answer = client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    assert "crater_decisions_total 1.0" in answer.text


def test_the_openapi_page_knows_the_version(client: TestClient) -> None:
    document = client.get("/openapi.json").json()
    assert document["info"]["version"] == __version__
    assert {"/healthz", "/metrics", "/node/v1/grants", "/api/v1/decisions/{key}"} <= set(
        document["paths"]
    )


@pytest.mark.parametrize("key", ["p1", "check-1"])
def test_a_user_sees_the_own_decision_with_what_the_job_got(
    client: TestClient, sign: Any, key: str
) -> None:
    answer = client.get(f"/api/v1/decisions/{key}", headers=sign(ADA))
    assert answer.status_code == 200
    body = answer.json()
    assert body["decision"]["id"] == "p1"
    assert body["decision"]["request"] == {"gpus": 2}
    assert body["grants"] == [{"job_id": 7, "node": "n1", "time": 2.0, "got": {"gpus": ["GPU-1"]}}]
    (seen,) = body["observations"]
    assert (seen["node"], seen["gpu_memory_peak_mib"]) == ("n1", 17_600)
    assert "host_memory_peak_mib" not in seen, "what is unknown is left out"
    assert body["actions"] == [dataclasses.asdict(ACTION)]
    (note,) = body["notes"]
    assert note.startswith("job 7: its GPUs are 12 % busy")
    assert body["age_seconds"] > 0


def test_an_admin_sees_every_decision_and_other_users_none(client: TestClient, sign: Any) -> None:
    assert client.get("/api/v1/decisions/p1", headers=sign(ROOT)).status_code == 200
    answer = client.get("/api/v1/decisions/p1", headers=sign(BOB))
    assert answer.status_code == 403
    assert "gpus" not in answer.text


def test_a_decision_that_is_not_there_is_404(client: TestClient, sign: Any) -> None:
    answer = client.get("/api/v1/decisions/none", headers=sign(ADA))
    assert (answer.status_code, answer.json()["detail"]) == (404, "there is no decision none")


def test_a_store_that_is_away_is_503_with_its_words(
    client: TestClient, service: FakeService, sign: Any
) -> None:
    service.recorder.away = True
    answer = client.get("/api/v1/decisions/p1", headers=sign(ADA))
    assert (answer.status_code, answer.json()["detail"]) == (503, "the database is locked")


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer secret"},
        {"Authorization": "MUNGE"},
        {"Authorization": "MUNGE forged"},
        {"Authorization": "munge 0-" + NOBODY},
    ],
)
def test_without_a_genuine_credential_nothing_is_said(
    client: TestClient, service: FakeService, sign: Any, headers: dict[str, str]
) -> None:
    asked = client.get("/api/v1/decisions/p1", headers=headers)
    assert asked.status_code == 401
    reported = client.post("/node/v1/grants", json=REPORT, headers=headers)
    assert reported.status_code == 401
    assert service.recorder.added == []


def test_a_flush_is_the_task_s_and_told_again_while_the_store_is_away(
    client: TestClient, service: FakeService, sign: Any
) -> None:
    flushed = REPORT | {"phase": "flushed"}
    assert post(client, sign, ROOT, flushed).status_code == 204
    assert [one["phase"] for one in service.tasks.reports] == ["flushed"]
    assert service.recorder.added == [], "what the job got is as it was"

    def away(report: dict[str, Any]) -> None:
        raise StoreError("the database is locked")

    service.tasks.take_report = away
    answer = post(client, sign, ROOT, flushed)
    assert (answer.status_code, answer.json()["detail"]) == (503, "the database is locked")


def test_a_credential_for_another_body_is_refused(
    client: TestClient, service: FakeService, sign: Any
) -> None:
    answer = client.post("/node/v1/grants", json=REPORT, headers=sign(ROOT, b"another body"))
    assert (answer.status_code, answer.json()["detail"]) == (
        401,
        "the credential is for another body",
    )
    assert service.recorder.added == []


def post(client: TestClient, sign: Any, uid: int, document: object) -> Any:
    body = document if isinstance(document, bytes) else json.dumps(document).encode()
    headers = sign(uid, body) | {"Content-Type": "application/json"}
    return client.post("/node/v1/grants", content=body, headers=headers)


def test_a_node_s_report_is_recorded(client: TestClient, service: FakeService, sign: Any) -> None:
    assert post(client, sign, ROOT, REPORT).status_code == 204
    (heard,) = service.tasks.reports
    assert (heard["job_id"], heard["phase"], heard["grant"]) == ("7", "prolog", {"cpus": "0-7"})
    assert service.recorder.added == [
        Grant(
            job_id=7,
            plan_id="p1",
            node="n1",
            time=2.0,
            got={"cpus": "0-7", "phase": "prolog"},
        )
    ]


def test_a_user_can_t_report_as_a_node(client: TestClient, service: FakeService, sign: Any) -> None:
    assert post(client, sign, ADA, REPORT).status_code == 403
    assert service.recorder.added == []


@pytest.mark.parametrize(
    "change",
    [
        {"job_id": "seven"},
        {"job_id": "7" * 11},
        {"job_id": 7},
        {"node": ""},
        {"node": "n" * 256},
        {"plan_id": "p" * 65},
        {"time": "noon"},
        {"phase": "p" * 33},
        {"grant": []},
        {"more": 1},
    ],
    ids=lambda c: "-".join(map(str, c)),
)
def test_a_report_that_is_not_as_agreed_is_422(
    client: TestClient, service: FakeService, sign: Any, change: dict[str, Any]
) -> None:
    assert post(client, sign, ROOT, REPORT | change).status_code == 422
    assert service.recorder.added == []


def test_what_is_no_json_is_422_and_too_much_is_413(
    client: TestClient, service: FakeService, sign: Any
) -> None:
    assert post(client, sign, ROOT, b"{").status_code == 422
    huge = REPORT | {"grant": {"x": "y" * (1 << 20)}}
    assert post(client, sign, ROOT, huge).status_code == 413
    assert service.recorder.added == []


# --- The service behind it --------------------------------------------------------------------


@pytest.fixture
def real(tmp_path: Path) -> Service:
    return Service(
        Settings.model_validate(
            {
                "store": {"url": f"sqlite:///{tmp_path}/crater.db"},
                "plan": {"key_file": str(tmp_path / "plan.key")},
                "filter": {"socket": str(tmp_path / "filter.sock"), "mode": "enforce"},
                "slurm": {"bin_dir": str(tmp_path)},
            }
        )
    )


@pytest.mark.parametrize(
    ("sharing", "policy"),
    [
        ({}, None),
        ({"mps": True}, None),
        ({"allow": "shard"}, Policy()),
        (
            {"allow": "shard", "rounding": "nominal", "reserve": 2, "mps": True},
            Policy(rounding="nominal", reserve=2, mps=True),
        ),
    ],
)
def test_gpus_are_shared_as_the_settings_say(
    sharing: dict[str, object], policy: Policy | None
) -> None:
    assert _sharing_policy(Settings.model_validate({"sharing": sharing})) == policy


def test_a_service_that_has_not_read_the_cluster_says_so_once(real: Service) -> None:
    assert real.problems() == ["the cluster has not been read yet"]


def test_a_picture_that_was_not_refreshed_for_long_is_a_problem(real: Service) -> None:
    seen = view(node())
    real.state._guard.problem = ""
    young = dataclasses.replace(seen.cluster, time=time.time() - 300)
    real.state.view = dataclasses.replace(seen, cluster=young)
    assert real.problems() == []
    old = dataclasses.replace(seen.cluster, time=time.time() - 361)  # 10 x 30 s and a minute
    real.state.view = dataclasses.replace(seen, cluster=old)
    assert real.problems() == ["the picture of the cluster is old"]


def test_answers_are_counted_recorded_and_found_again(real: Service) -> None:
    real.state.view = view(node())
    sent = message("gpus=2") | {"check": "check-7"}
    answer = real.answer(list(sent.items()))
    assert answer[0] == ("verdict", "accept")
    assert ("set.gres", "gpu:2") in answer
    found = real.recorder.decision("check-7")
    assert found is not None
    assert found.request == {"gpus": 2}
    counted = TestClient(api.build(real, [], real.registry)).get("/metrics").text
    assert 'crater_decisions_total{mode="enforce",verdict="planned"} 1.0' in counted
    assert "crater_decision_seconds_count 1.0" in counted
    assert "crater_profiled_nodes 1.0" in counted


def test_only_enforcing_watches_the_queue_and_the_off_switch_stops_it(
    real: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []

    def queue(_client: Any, **how: Any) -> list[Any]:
        asked.append(how)
        return []

    monkeypatch.setattr("crater_slurm.scheduler.service.jobs.queue", queue)
    real.keys.verifying_keys = lambda: [KEY]  # type: ignore[method-assign]
    Store.open(real.settings.store.url, create=True).close()
    real.state.view = view(node())
    real.watch.look()
    assert asked == [], "no node has told how it is, and those that are ill may have to be left out"
    monkeypatch.setattr(real.health, "settled", lambda: True)
    real.watch.look()
    assert asked == [{"excluded": True, "running": False}], "reconcile is on by default, sla is not"
    for tree in ({"filter": {"mode": "advise"}}, {"off_switch": str(tmp_path)}):
        changed = real.settings.model_dump() | {"off_switch": tmp_path / "off"}
        for section, value in tree.items():
            changed[section] = changed[section] | value if isinstance(value, dict) else value
        other = Service(Settings.model_validate(changed))
        other.state.view = view(node())
        monkeypatch.setattr(other.health, "settled", lambda: True)
        other.watch.look()
    assert len(asked) == 1


def test_what_is_done_to_jobs_is_counted(real: Service) -> None:
    text = TestClient(api.build(real, [], real.registry)).get("/metrics").text
    assert "crater_sla_late_jobs 0.0" in text
    assert "# TYPE crater_job_actions_total counter" in text
    assert "# TYPE crater_job_below_utilization gauge" in text


# --- With a munged of our own -----------------------------------------------------------------


@pytest.fixture
def munged(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    daemon = shutil.which("munged", path="/usr/sbin:/sbin:" + os.environ.get("PATH", ""))
    if not daemon or not shutil.which("munge"):
        pytest.skip("munge is not installed")
    folder = tmp_path_factory.mktemp("munge")
    key = folder / "key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    where = folder / "socket"
    options = [
        f"--key-file={key}",
        f"--socket={where}",
        f"--pid-file={folder / 'pid'}",
        f"--log-file={folder / 'log'}",
        f"--seed-file={folder / 'seed'}",
    ]
    process = subprocess.Popen(
        [daemon, "--foreground", "--force", *options],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        end = time.monotonic() + 10
        while not where.exists():
            if process.poll() is not None or time.monotonic() > end:
                pytest.skip("munged does not start here")
            time.sleep(0.02)
        run = munge._run
        monkeypatch.setattr(
            munge, "_run", lambda argv, text: run([argv[0], f"--socket={where}", *argv[1:]], text)
        )
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        process.wait(10)


def test_munge_proves_who_asks_and_a_replay_proves_nothing(
    client: TestClient, service: FakeService, munged: None
) -> None:
    me = os.geteuid()
    credential = munge.encode(NOBODY)
    proof = munge.decode(munge.encode("words"))
    assert (proof.uid, proof.gid, proof.payload) == (me, os.getegid(), "words")
    assert proof.host
    assert proof.address
    headers = {"Authorization": f"MUNGE {credential}"}
    first = client.get("/api/v1/decisions/p1", headers=headers)
    assert first.status_code == (200 if me == ROOT else 403)
    replayed = client.get("/api/v1/decisions/p1", headers=headers)
    assert replayed.status_code == 401
    assert "replayed" in replayed.json()["detail"].lower()


# Reports of nodes


def report(client: TestClient, sign: Any, uid: int = ROOT, **fields: Any) -> Any:
    """The answer to a report of n1, or of the ``node`` in ``fields``."""
    body = json.dumps({"node": "n1"} | fields).encode()
    headers = sign(uid, body) | {"Content-Type": "application/json"}
    return client.post("/node/v1/reports", content=body, headers=headers)


def test_a_node_reports_its_profile_and_health(
    client: TestClient, service: FakeService, sign: Any
) -> None:
    answer = report(client, sign, ROOT, profile={"cpu": 1}, health={"time": 2})
    assert answer.status_code == 204
    assert service.reports.taken == [("profile", "n1", {"cpu": 1}), ("health", "n1", {"time": 2})]


def test_slurm_may_know_the_node_by_another_name(
    client: TestClient, service: FakeService, sign: Any
) -> None:
    answer = report(client, sign, ROOT, node="alias", health={})
    assert answer.status_code == 204


@pytest.mark.parametrize(
    ("uid", "node", "words"),
    [(ADA, "n1", "only root or the crater user"), (ROOT, "n2", r"n1.example \(192.0.2.1\) is not")],
)
def test_who_is_not_the_node_is_not_heard(
    client: TestClient, service: FakeService, sign: Any, uid: int, node: str, words: str
) -> None:
    answer = report(client, sign, uid, node=node, profile={})
    assert answer.status_code == 403
    assert re.search(words, answer.json()["detail"])
    assert service.reports.taken == []


def test_a_site_whose_nodes_share_a_munged_may_say_so(
    client: TestClient, service: FakeService, sign: Any
) -> None:
    service.settings = Settings.model_validate({"scheduler": {"verify_node_host": False}})
    answer = report(client, sign, ROOT, node="n2", health={})
    assert answer.status_code == 204


@pytest.mark.parametrize(
    ("error", "status"),
    [(UsageError("n1: cpuu: unknown"), 422), (StoreError("the database is locked"), 503)],
)
def test_a_report_that_can_not_be_stored_says_why(
    client: TestClient, service: FakeService, sign: Any, error: Exception, status: int
) -> None:
    service.reports.error = error
    answer = report(client, sign, ROOT, profile={})
    assert (answer.status_code, answer.json()["detail"]) == (status, str(error))


def observe(client: TestClient, sign: Any, uid: int = ROOT, **change: Any) -> Any:
    body = json.dumps(OBSERVED | change).encode()
    headers = sign(uid, body) | {"Content-Type": "application/json"}
    return client.post("/node/v1/observations", content=body, headers=headers)


def test_what_a_job_needed_is_taken_from_its_node(
    client: TestClient, service: FakeService, sign: Any
) -> None:
    assert observe(client, sign).status_code == 204
    assert observe(client, sign, ended=False, succeeded=None, newer_field=1).status_code == 204
    assert service.observed.taken == [OBSERVED, OBSERVED | {"ended": False, "succeeded": None}]


@pytest.mark.parametrize(("uid", "change"), [(ADA, {}), (ROOT, {"node": "n2"})])
def test_nobody_else_says_what_a_job_needed(
    client: TestClient, service: FakeService, sign: Any, uid: int, change: dict[str, Any]
) -> None:
    assert observe(client, sign, uid, **change).status_code == 403
    assert service.observed.taken == []


@pytest.mark.parametrize(
    "change",
    [
        {"job_id": "seven"},
        {"node": "../n1"},
        {"plan_id": "p" * 65},
        {"time": float("nan")},
        {"seconds": -1},
        {"seconds": 1e30},
        {"samples": 10**30},
        {"gpus": -1},
        {"oom_kills": 1.5},
        {"ended": None},
        {"figures": []},
        {"figures": {"cpu_cores_mean": "many"}},
        {"figures": {"cpu_cores_mean": float("inf")}},
        {"figures": {f"f{i}": 1.0 for i in range(101)}},
    ],
    ids=lambda c: "-".join(map(str, c)),
)
def test_an_observation_that_is_not_as_agreed_is_422(
    client: TestClient, service: FakeService, sign: Any, change: dict[str, Any]
) -> None:
    assert observe(client, sign, **change).status_code == 422
    assert service.observed.taken == []


@pytest.mark.parametrize(
    ("error", "status"),
    [(UsageError("cpu_cores_mean is 1e+09"), 422), (StoreError("the database is locked"), 503)],
)
def test_an_observation_that_can_not_be_kept_says_why(
    client: TestClient, service: FakeService, sign: Any, error: Exception, status: int
) -> None:
    service.observed.error = error
    answer = observe(client, sign)
    assert (answer.status_code, answer.json()["detail"]) == (status, str(error))


@pytest.mark.parametrize("node", ["", "../n1", "n 1", "n1\n", "x" * 200])
def test_what_is_no_node_name_is_refused(client: TestClient, sign: Any, node: str) -> None:
    answer = report(client, sign, ROOT, node=node, health={})
    assert answer.status_code == 422


def test_everybody_known_may_see_a_nodes_health(client: TestClient, sign: Any) -> None:
    answer = client.get("/api/v1/nodes/n1/health", headers=sign(ADA))
    assert answer.json()["load"] == 1.5
    assert answer.json()["age_seconds"] < 5
    assert client.get("/api/v1/nodes/n2/health", headers=sign(ADA)).status_code == 404
    assert client.get("/api/v1/nodes/n1/health").status_code == 401


@pytest.mark.parametrize(
    "what", ["", "MUNGE:", "MUNGE:!:", "MUNGE:abc", "x MUNGE:aa:", "MUNGE:a:\n"]
)
def test_what_is_no_credential_never_reaches_munge(what: str) -> None:
    with pytest.raises(SlurmError, match="no MUNGE credential"):
        munge.decode(what)


def test_a_damaged_credential_is_refused_in_munge_s_own_words(munged: None) -> None:
    whole = munge.encode("words")
    with pytest.raises(SlurmError, match="^unmunge: "):
        munge.decode(whole[:40] + "A" + whole[41:] if whole[40] != "A" else whole[:40] + "B:")


def test_munge_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(SlurmError, match="munge is not installed"):
        munge.encode("x")


def test_a_nodes_health_comes_with_its_score(client: TestClient, sign: Any) -> None:
    told = client.get("/api/v1/nodes/n1/health", headers=sign(ADA)).json()
    assert told["judged"] == JUDGED


def test_all_nodes_health_is_one_question(
    client: TestClient, service: FakeService, sign: Any
) -> None:
    service.worth_a_look = ["Prometheus does not answer"]
    told = client.get("/api/v1/health", headers=sign(ADA)).json()
    assert told == {
        "nodes": [JUDGED | {"weight": 101}],
        "warnings": ["Prometheus does not answer"],
    }
    assert client.get("/api/v1/health").status_code == 401


def test_a_warning_leaves_the_daemon_healthy(client: TestClient, service: FakeService) -> None:
    service.worth_a_look = ["Prometheus does not answer"]
    answer = client.get("/healthz")
    assert answer.status_code == 200
    assert answer.json() == {"status": "ok", "warnings": ["Prometheus does not answer"]}
    service.wrong = ["the database is locked"]
    answer = client.get("/healthz")
    assert answer.status_code == 503
    assert answer.json()["warnings"] == ["Prometheus does not answer"]
