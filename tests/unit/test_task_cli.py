"""crater tokens, callbacks and alldata, as an admin types them."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from task_samples import NOW, add_job, open_store
from task_store_contract import tell

from crater_slurm.alldata import tokens
from crater_slurm.cli.main import crater
from crater_slurm.store.repository import Store

Run = Callable[..., Result]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path)


@pytest.fixture
def run(store: Store, tmp_path: Path) -> Run:
    file = tmp_path / "crater.yaml"
    file.write_text(f"store: {{url: 'sqlite:///{tmp_path}/crater.db'}}\n")

    def invoke(*words: str, **env: str) -> Result:
        return CliRunner().invoke(crater, ["--config", str(file), *words], env=env)

    return invoke


def test_a_token_is_shown_once_and_works_until_it_is_revoked(run: Run, store: Store) -> None:
    assert "no tokens" in run("tokens", "list").output
    words = ("--client", "alldata", "--user", "alice", "--scope", "submit", "--scope", "read")
    done = run("tokens", "create", "alldata-1", *words)
    assert done.exit_code == 0
    text = done.stdout.strip()
    found = tokens.known(text, store, NOW)
    assert found
    assert (found.client, found.user, found.scopes) == ("alldata", "alice", {"submit", "read"})
    listed = run("tokens", "list")
    assert "alldata-1" in listed.output
    assert text.rpartition("_")[2] not in listed.output
    again = run("tokens", "create", "alldata-1")
    assert again.exit_code == 2
    assert "there is a token named 'alldata-1'" in again.output
    assert run("tokens", "revoke", "alldata-1").exit_code == 0
    assert tokens.known(text, store, NOW) is None
    assert run("tokens", "revoke", "alldata-1").exit_code == 2
    (shown,) = json.loads(run("tokens", "list", "--json").stdout)
    assert shown["revoked"] is not None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("Big",), "lower-case letters"),
        (("a", "--scope", "root"), "there is no scope 'root'; valid are submit"),
        (("a", "--user", "alice; rm"), "is no name of a cluster user"),
        (("a", "--client", "../x"), "can't be a token's client"),
    ],
)
def test_what_can_not_be_a_token_is_said(run: Run, words: tuple[str, ...], said: str) -> None:
    done = run("tokens", "create", *words)
    assert done.exit_code == 2
    assert said in done.output


def test_dead_callbacks_are_listed_and_sent_again(run: Run, store: Store) -> None:
    assert run("callbacks", "list").output == "in all: no callbacks\n"
    tell(store, add_job(store), "scheduled", "running")
    (one,) = store.claim_callbacks("me", NOW, 60, 5)
    words = {"delivery": "dead", "http_status": 422, "error": "answered 422"}
    store.finish_callback(one.number, "me", now=NOW, **words)  # type: ignore[arg-type]
    listed = run("callbacks", "list", "--state", "dead")
    assert "answered 422" in listed.output
    assert "in all: 1 waiting, 1 dead" in listed.output
    (shown,) = json.loads(run("callbacks", "list", "--state", "dead", "--json").stdout)
    assert (shown["event_id"], shown["payload"]) == (one.event_id, {"status": "scheduled"})
    assert len(json.loads(run("callbacks", "list", "--task", "t1", "--json").stdout)) == 2
    assert run("callbacks", "list", "--task", "none").output.startswith("in all")
    assert run("callbacks", "retry").exit_code == 2
    assert run("callbacks", "retry", "nobody").exit_code == 2
    assert run("callbacks", "retry", one.event_id).output == "1 will be sent again\n"
    assert run("callbacks", "retry", "--all-dead").output == "0 will be sent again\n"


def test_the_fake_hears_a_test_callback(run: Run, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    secret = tmp_path / "password"
    secret.write_text("secret\n")
    secret.chmod(0o600)
    address = f"127.0.0.1:{port}"
    words = ("--listen", address, "--user", "crater", "--password-file", str(secret))
    command = [sys.executable, "-m", "crater_slurm.cli", "alldata", "fake", *words]
    env = {
        "CRATER_ALLDATA__CALLBACK__URL": f"http://{address}/callback",
        "CRATER_ALLDATA__CALLBACK__USER": "crater",
        "CRATER_ALLDATA__CALLBACK__PASSWORD_FILE": str(secret),
        "CRATER_ALLDATA__CALLBACK__ALLOW_HTTP": "true",
    }
    process = subprocess.Popen(command)
    try:
        deadline = time.monotonic() + 60
        while (done := run("callbacks", "test", **env)).exit_code and time.monotonic() < deadline:
            time.sleep(0.2)
        assert done.exit_code == 0, done.output
        assert "answered 200" in done.output
        with urllib.request.urlopen(f"http://{address}/control/received") as answer:
            got = json.load(answer)
        assert [one["body"]["task_id"] for one in got["received"]] == ["crater-test"]
    finally:
        process.terminate()
        process.wait(60)
    done = run("callbacks", "test", **env)
    assert done.exit_code == 5
    assert "refused" in done.output


def test_without_a_url_nobody_can_be_told(run: Run) -> None:
    done = run("callbacks", "test")
    assert done.exit_code == 2
    assert "alldata.callback.url is empty" in done.output
