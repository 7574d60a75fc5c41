"""Stores of the obstore library, through its S3 client against a real server and its memory."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import s3_server
from checkpoint_samples import MIB, content, make_step, spec
from s3_server import Server, once_each, proxied

from crater_slurm.checkpoint import remote
from crater_slurm.checkpoint.remote.retry import Patience
from crater_slurm.checkpoint.remote.store import (
    RemoteError,
    Source,
    SourceError,
    StoppedError,
    Transfer,
    Unlimited,
)
from crater_slurm.job import layout

pytest.importorskip("obstore", reason="needs obstore: pip install 'crater-slurm[remotes]'")
NAME = "rank-00000.safetensors"
KEY = f"step-000000120/{NAME}"
Step = tuple[str, layout.Manifest]


def store_of(library_store: Any, where: str = "gs://b/p", **options: object) -> Any:
    from crater_slurm.checkpoint.remote.obstore import ObjectStore

    patience = Patience(3, sleep=lambda event, seconds: None)
    chosen = {"part_bytes": 8 * MIB, **options}
    return ObjectStore(library_store, where, chosen, (s3_server.SECRET,), patience)


def at(endpoint: str, bucket: str) -> Any:
    from obstore.store import S3Store

    return store_of(
        S3Store(
            bucket,
            prefix="p",
            endpoint=endpoint,
            access_key_id=s3_server.KEY,
            secret_access_key=s3_server.SECRET,
            region="us-east-1",
            virtual_hosted_style_request=False,
            client_options={"allow_http": True},
            retry_config={"max_retries": 0},
        )
    )


@pytest.fixture
def step(tmp_path: Path) -> Step:
    return make_step(tmp_path / "cache", 120, {0: 20 * MIB + 7})


def put(store: Any, step: Step, stop: threading.Event | None = None) -> int:
    moved = 0

    def progress(count: int) -> None:
        nonlocal moved
        moved += count

    (entry,) = step[1].files
    with Source(step[0], entry) as source:
        way = Transfer({}, lambda: None, progress, stop or threading.Event(), Unlimited())
        store.put_file(source, KEY, entry, way)
    return moved


def test_a_file_arrives_and_comes_back(s3: Server, step: Step) -> None:
    bucket = s3.bucket()
    store = at(s3.endpoint, bucket)
    assert put(store, step) == step[1].size
    data = content(step[0])[NAME]
    assert s3.body(bucket, f"p/{KEY}") == data
    assert store.head(KEY).size == len(data)
    buffer = memoryview(bytearray(100))
    store.get_range(KEY, len(data) - 100, buffer)
    assert bytes(buffer) == data[-100:]


def test_a_part_that_fails_makes_the_file_begin_again(s3: Server, step: Step) -> None:
    bucket = s3.bucket()
    with proxied(s3, once_each([("status", 500)], lambda r: r.part == 2)) as proxy:
        put(at(proxy.endpoint, bucket), step)
    assert s3.body(bucket, f"p/{KEY}") == content(step[0])[NAME]


def test_a_wrong_key_is_for_somebody_to_mend_and_said_without_it(s3: Server, step: Step) -> None:
    from obstore.store import S3Store

    store = store_of(
        S3Store(
            s3.bucket(),
            endpoint=s3.endpoint,
            access_key_id=s3_server.KEY,
            secret_access_key="wrong",
            region="us-east-1",
            virtual_hosted_style_request=False,
            client_options={"allow_http": True},
        )
    )
    with pytest.raises(RemoteError) as caught:
        put(store, step)
    assert caught.value.lasting
    assert s3_server.SECRET not in str(caught.value)


def test_what_reading_finds_is_raised_as_itself(step: Step) -> None:
    from obstore.store import MemoryStore

    store = store_of(MemoryStore())
    path = Path(step[0]) / NAME
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(SourceError, match="is damaged after byte 16777216"):
        put(store, step)
    assert store.head(KEY) is None


def test_stopping_leaves_nothing(step: Step) -> None:
    from obstore.store import MemoryStore

    store = store_of(MemoryStore())
    stop = threading.Event()
    stop.set()
    with pytest.raises(StoppedError):
        put(store, step, stop)
    assert store.list_steps() == []


def test_texts_claims_lists_and_deletions() -> None:
    from obstore.store import MemoryStore

    store = store_of(MemoryStore())
    assert store.get_text("step-000000001/run") is None
    assert store.claim("step-000000001/run", "7.0") == "7.0"
    assert store.claim("step-000000001/run", "7.1") == "7.0"
    store.put_text("step-000000001/manifest-00000.json", "{}")
    store.put_text("step-000000001/mine.txt", "x")
    store.put_text("other/x", "x")
    assert store.list_steps() == ["step-000000001"]
    names = [f.name for f in store.list_files("step-000000001")]
    assert names == ["manifest-00000.json", "mine.txt", "run"]
    store.delete("step-000000001", names)
    assert [f.name for f in store.list_files("step-000000001")] == ["mine.txt"]


@pytest.mark.parametrize(
    ("url", "given", "reason"),
    [
        ("gs://site/x", {}, "the credentials have nothing; known are service_account_key"),
        ("az://site/x", {"account": "a"}, "the credentials have account; known are account_name"),
    ],
)
def test_credentials_that_do_not_fit_name_those_that_do(
    tmp_path: Path, url: str, given: dict[str, str], reason: str
) -> None:
    job = spec(tmp_path, url, credentials=given)
    with pytest.raises(RemoteError, match=reason):
        remote.open_store(job.remote, str(tmp_path))


def test_azure_and_google_stores_are_made_of_the_site_s_credentials(tmp_path: Path) -> None:
    keys = {"account_name": "acc", "account_key": "c2VjcmV0"}
    azure = spec(tmp_path, "az://box/x", credentials=keys).remote
    assert remote.open_store(azure, "").where == "az://box/x"
    bad = spec(tmp_path, "gs://site/x", credentials={"service_account_key": "{geheim"}).remote
    with pytest.raises(RemoteError, match="the store can't be used") as caught:
        remote.open_store(bad, "")
    assert "{geheim" not in str(caught.value)
