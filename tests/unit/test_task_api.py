"""The platform's part of the API: who may what, what is answered, and nothing that is a 500."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import ssl
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster_samples import node, view
from fastapi.testclient import TestClient
from prometheus_client import CollectorRegistry
from task_samples import (
    LLAMA,
    NOW,
    Clock,
    FakeSlurm,
    FakeSubmitter,
    account,
    add_job,
    llama,
    open_store,
    settings,
)

from crater_slurm.alldata import tokens
from crater_slurm.alldata.submission import AwayError, RefusedError
from crater_slurm.config import Settings
from crater_slurm.config.settings import Scheduler
from crater_slurm.errors import ConfigError, SlurmError, StoreError
from crater_slurm.model.plan import Decision, Mode, Verdict
from crater_slurm.scheduler import api, main, task_api
from crater_slurm.scheduler.predicting import Predictor
from crater_slurm.scheduler.tasks import Tasks
from crater_slurm.slurm import munge
from crater_slurm.store.repository import Store

DECISION = Decision(
    id="plan1", verdict=Verdict.PLANNED, mode=Mode.ENFORCE, time=NOW, user_id=1000, messages=("m",)
)


class _Health:
    def describe(self, node: str) -> dict[str, Any] | None:
        return {"score": 0.9, "degraded": False, "faults": [], "terms": []}


class _State:
    def __init__(self) -> None:
        self.view = view(node("n1"), node("n2"))
        self.profiles: dict[str, Any] = {}


class _Recorder:
    def decision(self, key: str) -> Decision | None:
        return DECISION if key == "plan1" else None

    def add(self, item: object) -> None: ...


class Service:
    """As much of the service as the API asks, over a real store."""

    def __init__(self, store: Store, **scheduler: Any) -> None:
        self.clock = Clock()
        self.settings = Settings(alldata=settings(), scheduler=Scheduler(**scheduler))
        self.submitter = FakeSubmitter()
        self.client = FakeSlurm()
        self._store = store
        self.away = False
        self.tasks = Tasks(
            self.settings,
            self.store,
            self.client,  # type: ignore[arg-type]
            self.submitter,
            CollectorRegistry(),
            self.clock,
        )
        self.tasks.intake._account = account  # type: ignore[method-assign]
        self.health, self.state, self.recorder = _Health(), _State(), _Recorder()
        self.predict = Predictor(lambda workload: ())
        self.slurm = self

    def store(self) -> Store:
        if self.away:
            raise StoreError("the store is locked by another writer")
        return self._store

    def problems(self) -> list[str]:
        return []

    def warnings(self) -> list[str]:
        return []


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    with open_store(tmp_path) as store:
        yield Service(store)


@pytest.fixture
def client(service: Service) -> Iterator[TestClient]:
    app = api.build(service, ["root"], CollectorRegistry())  # type: ignore[arg-type]
    with TestClient(app, raise_server_exceptions=False) as client:
        yield client


Login = Callable[..., dict[str, str]]


@pytest.fixture
def login(service: Service) -> Login:
    """Headers of a new token."""
    made = iter(range(1000))

    def headers(*scopes: str, client: str = "alldata", user: str | None = None) -> dict[str, str]:
        token, text = tokens.create(
            f"t{next(made)}", client, scopes or tokens.SCOPES, user, service.clock()
        )
        service.store().add_token(token)
        return {"Authorization": f"Bearer {text}"}

    return headers


def send(client: TestClient, headers: dict[str, str], body: str | bytes) -> Any:
    return client.post("/api/v1/schedule", content=body, headers=headers)


# Sending


def test_a_task_is_accepted_with_job_and_decision(
    client: TestClient, service: Service, login: Login
) -> None:
    headers = login()
    answer = send(client, headers, llama())
    assert answer.status_code == 202
    body = answer.json()
    assert (body["task_id"], body["status"], body["job_id"]) == ("t1", "submitted", 100)
    assert body["decision"] == {
        "id": "plan1",
        "verdict": "planned",
        "mode": "enforce",
        "nodes_considered": 0,
        "nodes_passed": 0,
        "messages": ["m"],
    }
    assert answer.headers["location"] == "/api/v1/tasks/t1"
    again = send(client, headers, llama())
    assert (again.status_code, again.json()) == (202, body)
    other = send(client, headers, llama(task_type="inference"))
    assert other.status_code == 409
    assert "another content" in other.json()["detail"]
    assert service.submitter.submitted == ["t1"]


def test_what_is_wrong_with_a_task_is_a_list_of_pointers(
    client: TestClient, service: Service, login: Login
) -> None:
    body = json.loads(llama())
    body["resource_requirements"]["gpu"]["count"] = "two"
    body["unheard"] = 1
    answer = send(client, login(), json.dumps(body))
    assert answer.status_code == 422
    found = {one["pointer"]: one for one in answer.json()["detail"]}
    assert set(found) == {"/resource_requirements/gpu/count", "/unheard"}
    assert found["/resource_requirements/gpu/count"]["value"] == '"two"'
    assert service.submitter.submitted == []


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff\xfe\x00",
        b"[]",
        b"null",
        b"{" * 20000,
        b'{"task_id": "a", "task_id": "b"}',
        b'{"task_id": NaN}',
        json.dumps(LLAMA | {"task_id": "$(rm -rf /)"}).encode(),
        json.dumps(LLAMA | {"task_id": "a\nb"}).encode(),
        json.dumps(LLAMA | {"task_id": "`id`"}).encode(),
        json.dumps(LLAMA | {"task_id": "\ud800"}).encode(),
        json.dumps(LLAMA | {"task_id": "a\u0000b"}).encode(),
        json.dumps(LLAMA | {"task_type": "x" * 100_000}).encode(),
    ],
)
def test_what_is_no_task_is_422_and_never_a_500(
    client: TestClient, service: Service, login: Login, body: bytes
) -> None:
    answer = send(client, login(), body)
    assert answer.status_code == 422
    assert all({"pointer", "message"} <= one.keys() for one in answer.json()["detail"])
    assert service.submitter.submitted == []


def test_what_slurm_refuses_is_422_in_its_words(
    client: TestClient, service: Service, login: Login
) -> None:
    service.submitter.error = RefusedError("Invalid partition name specified")
    headers = login()
    for _ in range(2):
        answer = send(client, headers, llama())
        assert answer.status_code == 422
        assert answer.json()["detail"][0]["message"] == "Invalid partition name specified"


def test_while_slurm_is_away_a_task_is_accepted_without_a_job(
    client: TestClient, service: Service, login: Login
) -> None:
    service.submitter.error = AwayError("Unable to contact slurm controller (connect failure)")
    body = send(client, login(), llama()).json()
    assert (body["status"], body["job_id"]) == ("submitting", None)
    assert "is kept" in body["message"]


@pytest.mark.parametrize(("patience", "most"), [(0.05, 10), (3600, 1)])
def test_a_task_behind_many_others_is_taken_in_and_submitted_in_its_turn(
    client: TestClient,
    service: Service,
    login: Login,
    monkeypatch: pytest.MonkeyPatch,
    patience: float,
    most: int,
) -> None:
    """It waits for a moment, and not at all in a crowd."""
    monkeypatch.setattr(task_api, "SUBMISSIONS", 1)
    monkeypatch.setattr(task_api, "_PATIENCE_SECONDS", patience)
    service.tasks.crowd.most = most
    begun, go, submit = threading.Event(), threading.Event(), service.submitter.submit

    def slow(*how: Any) -> Any:
        begun.set()
        assert go.wait(60)
        return submit(*how)

    monkeypatch.setattr(service.submitter, "submit", slow)
    headers = login()
    answers: list[Any] = []
    first = threading.Thread(target=lambda: answers.append(send(client, headers, llama("first"))))
    first.start()
    assert begun.wait(60)
    behind = send(client, headers, llama("behind"))
    assert (behind.status_code, behind.json()["status"]) == (202, "submitting")
    assert send(client, headers, llama("behind")).json()["job_id"] is None
    assert send(client, headers, llama("behind", task_type="generic")).status_code == 409
    go.set()
    first.join()
    assert answers[0].json()["status"] == "submitted"
    stored = service.store().task("alldata", "behind")
    assert stored
    service.tasks.recoverer.recover_now(stored)
    assert send(client, headers, llama("behind")).json()["status"] == "submitted"
    assert service.submitter.submitted == ["first", "behind"]


def test_a_store_that_is_away_is_503(client: TestClient, service: Service, login: Login) -> None:
    headers = login()
    service.away = True
    answer = send(client, headers, llama())
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "5"


# Who may what


@pytest.mark.parametrize(
    ("method", "path", "scope"),
    [
        ("POST", "/api/v1/schedule", "submit"),
        ("GET", "/api/v1/tasks", "read"),
        ("GET", "/api/v1/tasks/t1", "read"),
        ("POST", "/api/v1/tasks/t1/cancel", "cancel"),
        ("GET", "/api/v1/tasks/t1/explain", "read"),
        ("GET", "/api/v1/nodes", "nodes"),
        ("POST", "/api/v1/estimate", "read"),
    ],
)
def test_every_endpoint_wants_a_token_with_its_scope(
    client: TestClient, service: Service, login: Login, method: str, path: str, scope: str
) -> None:
    assert client.request(method, path).status_code == 401
    lacking = login(*(set(tokens.SCOPES) - {scope}))
    answer = client.request(method, path, headers=lacking)
    assert answer.status_code == 403
    assert repr(scope) in answer.json()["detail"]


@pytest.mark.parametrize(
    "credential",
    [
        "",
        "x",
        "crt_0123456789abcdef_" + "A" * 43,
        "crt_0123456789abcdef_" + "A" * 42 + "é",
        "'; DROP TABLE api_token; --",
        "crt__",
    ],
)
def test_what_is_no_token_is_401(client: TestClient, credential: str) -> None:
    headers = {"Authorization": f"Bearer {credential}".encode()}
    answer = client.get("/api/v1/tasks", headers=headers)  # type: ignore[arg-type]
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"


def test_a_revoked_token_is_none_after_a_second(
    client: TestClient, service: Service, login: Login
) -> None:
    headers = login()
    assert client.get("/api/v1/tasks", headers=headers).status_code == 200
    assert service.store().revoke_token("t0", NOW)
    service.clock.now += 1.0
    assert client.get("/api/v1/tasks", headers=headers).status_code == 401


def test_half_a_token_s_secret_does_not_do(client: TestClient, login: Login) -> None:
    text = login()["Authorization"]
    other = text[:-1] + ("A" if text[-1] != "A" else "B")
    assert client.get("/api/v1/tasks", headers={"Authorization": other}).status_code == 401


def test_a_client_sees_its_own_tasks_only(
    client: TestClient, service: Service, login: Login
) -> None:
    send(client, login(), llama())
    stranger = login(client="other", user="bob")
    assert client.get("/api/v1/tasks/t1", headers=stranger).status_code == 404
    assert client.post("/api/v1/tasks/t1/cancel", headers=stranger).status_code == 404
    assert client.get("/api/v1/tasks", headers=stranger).json()["tasks"] == []
    assert service.submitter.cancelled == []


def test_a_client_without_a_user_is_told_so(client: TestClient, login: Login) -> None:
    answer = send(client, login(client="other"), llama())
    assert answer.status_code == 403
    assert "alldata.submit_as" in answer.json()["detail"]


@pytest.fixture
def sign(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, str]]:
    """Headers of a person, as if munged vouched."""

    def decode(credential: str) -> munge.Credential:
        if not credential[:1].isdigit():
            raise SlurmError("unmunge: Invalid credential")
        uid, _, payload = credential.partition("-")
        return munge.Credential(int(uid), int(uid), payload, "n1", "192.0.2.1")

    monkeypatch.setattr(munge, "decode", decode)

    def headers(uid: int, body: bytes = b"") -> dict[str, str]:
        return {"Authorization": f"MUNGE {uid}-{hashlib.sha256(body).hexdigest()}"}

    return headers


def test_root_sees_every_client_s_tasks_by_munge(
    client: TestClient, login: Login, sign: Callable[..., dict[str, str]]
) -> None:
    send(client, login(), llama())
    assert client.get("/api/v1/tasks/t1", headers=sign(0)).json()["client"] == "alldata"
    assert client.get("/api/v1/tasks/t1", headers=sign(1)).status_code == 404
    assert client.get("/api/v1/tasks", headers=sign(1)).json()["tasks"] == []
    assert client.get("/api/v1/tasks", headers=sign(0, b"x")).status_code == 401
    assert client.get("/api/v1/tasks", headers={"Authorization": "MUNGE x"}).status_code == 401


# How much, how often


def test_a_body_that_is_too_large_is_refused_before_it_is_read(
    client: TestClient, service: Service, login: Login
) -> None:
    headers = login()
    assert send(client, headers, b"x" * (256 * 1024 + 1)).status_code == 413

    def endless() -> Iterator[bytes]:
        for _ in range(300):
            yield b"x" * 1024

    answer = client.post("/api/v1/schedule", content=endless(), headers=headers)
    assert answer.status_code == 413
    odd = headers | {"Content-Length": "9" * 40}
    assert client.post("/api/v1/schedule", content=b"", headers=odd).status_code in (400, 413)


def test_a_token_has_its_rate_and_no_other_s(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        service = Service(store, requests_per_second=2, requests_burst=3)
        headers = []
        for name in ("a", "b"):
            token, text = tokens.create(name, name, tokens.SCOPES, None, NOW)
            store.add_token(token)
            headers.append({"Authorization": f"Bearer {text}"})
        app = api.build(service, [], CollectorRegistry())  # type: ignore[arg-type]
        client = TestClient(app)
        codes = [client.get("/api/v1/tasks", headers=headers[0]).status_code for _ in range(5)]
        assert codes == [200, 200, 200, 429, 429]
        answer = client.get("/api/v1/tasks", headers=headers[0])
        assert answer.headers["retry-after"] == "1"
        assert client.get("/api/v1/tasks", headers=headers[1]).status_code == 200
        service.clock.now += 0.5
        assert client.get("/api/v1/tasks", headers=headers[0]).status_code == 200


def test_guessing_tokens_is_slowed_down(client: TestClient) -> None:
    guess = {"Authorization": "Bearer crt_0123456789abcdef_" + "A" * 43}
    codes = [client.get("/api/v1/tasks", headers=guess).status_code for _ in range(30)]
    assert codes[:20] == [401] * 20
    assert codes[-1] == 429


# Seeing and cancelling


def test_a_task_is_shown_with_what_was_told(
    client: TestClient, service: Service, login: Login
) -> None:
    add_job(service.store(), plan_id="plan1")
    service.client.set(7, "RUNNING", started=NOW, nodes="n1")
    service.client.layouts[7] = "Nodes=n1 CPU_IDs=0-1 Mem=64 GRES=gpu:a100:1(IDX:3)"
    service.tasks.follower.look()
    headers = login()
    body = client.get("/api/v1/tasks/t1", headers=headers).json()
    assert (body["status"], body["started"]) == ("running", "2027-01-15T08:00:00Z")
    assert body["allocated_resources"]["gpu_ids"] == ["3"]
    assert body["task"]["model_config"] == LLAMA["model_config"]
    told = [(one["sequence"], one["status"], one["delivery"]) for one in body["callbacks"]]
    assert told == [(1, "scheduled", "waiting"), (2, "running", "waiting")]
    body = client.get("/api/v1/tasks/t1/explain", headers=headers).json()
    assert body["decision"]["id"] == "plan1"
    assert [one["status"] for one in body["callbacks"]] == ["scheduled", "running"]


def test_tasks_come_in_pages(client: TestClient, service: Service, login: Login) -> None:
    for i in range(5):
        add_job(service.store(), f"t{i}", 10 + i)
    headers = login()
    page = client.get("/api/v1/tasks?limit=3", headers=headers).json()
    assert [one["task_id"] for one in page["tasks"]] == ["t4", "t3", "t2"]
    rest = client.get(f"/api/v1/tasks?limit=3&before={page['next']}", headers=headers).json()
    assert [one["task_id"] for one in rest["tasks"]] == ["t1", "t0"]
    assert rest["next"] is None
    none = client.get("/api/v1/tasks?status=running", headers=headers).json()
    assert none["tasks"] == []


@pytest.mark.parametrize(
    "query", ["limit=0", "limit=x", "before=-1", "before=9999999999999999999", "status=odd"]
)
def test_odd_questions_are_422(client: TestClient, login: Login, query: str) -> None:
    assert client.get(f"/api/v1/tasks?{query}", headers=login()).status_code == 422


@pytest.mark.parametrize("name", ["a%00b", "%ff", "..%2f..", "a%0ab", "%F0%9F%92%A3", "x" * 200])
def test_odd_ids_are_422_or_unknown(client: TestClient, login: Login, name: str) -> None:
    answer = client.get(f"/api/v1/tasks/{name}", headers=login())
    assert answer.status_code in (404, 422)


def test_cancelling_asks_slurm(client: TestClient, service: Service, login: Login) -> None:
    headers = login()
    send(client, headers, llama())
    answer = client.post("/api/v1/tasks/t1/cancel", headers=headers)
    assert answer.status_code == 202
    assert service.submitter.cancelled == [100]


def test_nodes_are_shown_with_hardware_and_health(client: TestClient, login: Login) -> None:
    body = client.get("/api/v1/nodes", headers=login()).json()
    assert body["nodes"], "the sample cluster has nodes"
    first = body["nodes"][0]
    assert {"name", "state", "usable", "gres", "hardware", "health"} <= first.keys()
    assert first["health"] == {"score": 0.9, "degraded": False, "faults": []}


def test_an_estimate_submits_nothing(client: TestClient, service: Service, login: Login) -> None:
    answer = client.post("/api/v1/estimate", content=llama(), headers=login())
    assert answer.status_code == 200
    prediction = answer.json()["prediction"]
    assert prediction["expected_mib"] > 16_000
    assert service.submitter.submitted == []
    without = json.loads(llama()) | {"model_config": None}
    answer = client.post("/api/v1/estimate", content=json.dumps(without), headers=login())
    assert answer.json()["prediction"] is None
    assert answer.json()["notes"]


# The document


def test_openapi_describes_the_task(client: TestClient) -> None:
    document = client.get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    text = json.dumps(document)
    for name in {ref.split('"')[0] for ref in text.split("#/components/schemas/")[1:]}:
        assert name in schemas, name
    assert "task_id" in schemas["Task"]["properties"]
    body = document["paths"]["/api/v1/schedule"]["post"]["requestBody"]
    assert body["content"]["application/json"]["schema"]["$ref"] == "#/components/schemas/Task"


def test_schemathesis_finds_no_500(service: Service, login: Login) -> None:
    schemathesis = pytest.importorskip("schemathesis")
    from hypothesis import HealthCheck, Phase, given
    from hypothesis import settings as example_settings

    service.settings = Settings(
        alldata=settings(), scheduler=Scheduler(requests_per_second=1e6, requests_burst=10**6)
    )
    app = api.build(service, ["root"], CollectorRegistry())  # type: ignore[arg-type]
    schema = schemathesis.openapi.from_asgi("/openapi.json", app)
    headers = login()
    seen: set[str] = set()
    for operation in schema.get_all_operations():
        operation = operation.ok()
        if "/api/v1/" not in operation.path or "decisions" in operation.path:
            continue
        seen.add(operation.path)

        @given(case=operation.as_strategy())
        @example_settings(
            max_examples=int(os.environ.get("CRATER_TEST_EXAMPLES", "10")),
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        def check(case: Any) -> None:
            answer = case.call(headers=headers)
            assert answer.status_code < 500, (case.path, answer.status_code, answer.text)

        check()
    assert "/api/v1/schedule" in seen


# TLS


def test_certificate_and_key_belong_together_and_the_key_is_ours_alone(tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    assert main._tls(Scheduler()) == (None, None)
    with pytest.raises(ConfigError, match="belong together"):
        main._tls(Scheduler(tls_cert_file=cert))
    with pytest.raises(ConfigError, match="tls_cert_file: .* No such file"):
        main._tls(Scheduler(tls_cert_file=cert, tls_key_file=key))
    cert.touch()
    key.touch(0o644)
    with pytest.raises(ConfigError, match="may be read by others; chmod 0600"):
        main._tls(Scheduler(tls_cert_file=cert, tls_key_file=key))
    key.chmod(0o600)
    assert main._tls(Scheduler(tls_cert_file=cert, tls_key_file=key)) == (str(cert), str(key))


def test_the_api_is_served_over_tls(tmp_path: Path, service: Service) -> None:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not installed")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    words = [
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "2",
        "-subj",
        "/CN=localhost",
    ]
    words += ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run([openssl, *words, "-out", cert, "-keyout", key], check=True, capture_output=True)
    key.chmod(0o600)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    made = Scheduler(listen=f"127.0.0.1:{port}", tls_cert_file=cert, tls_key_file=key)
    app = api.build(service, [], CollectorRegistry())  # type: ignore[arg-type]
    # Ended with the tests: uvicorn would take their signals.
    threading.Thread(target=main._serve, args=(app, made), daemon=True).start()
    trusted = ssl.create_default_context(cafile=str(cert))
    deadline = time.monotonic() + 60
    while True:
        try:
            with urllib.request.urlopen(f"https://127.0.0.1:{port}/healthz", context=trusted) as a:
                assert json.load(a) == {"status": "ok"}
            break
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    with pytest.raises(OSError):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=5)
