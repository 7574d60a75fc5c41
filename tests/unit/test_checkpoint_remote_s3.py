"""S3 as a destination, against a real server, and with everything that goes wrong on the way."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import s3_server
from checkpoint_samples import MIB, content, make_step, spec
from s3_server import Server, once_each, proxied

from crater_slurm.checkpoint import checksum, remote
from crater_slurm.checkpoint.destination import parse
from crater_slurm.checkpoint.remote import s3_client
from crater_slurm.checkpoint.remote.credentials import Access
from crater_slurm.checkpoint.remote.retry import Patience
from crater_slurm.checkpoint.remote.s3 import S3Store, part_bytes
from crater_slurm.checkpoint.remote.store import (
    RemoteError,
    Source,
    SourceError,
    StoppedError,
    Transfer,
    Unlimited,
)
from crater_slurm.job import layout

ACCESS = Access(s3_server.KEY, s3_server.SECRET)
FOLDER = "step-000000120"


def no_waiting(event: threading.Event, seconds: float) -> None:
    del event, seconds


def store_at(endpoint: str, url: str, attempts: int = 5, **options: object) -> S3Store:
    place = s3_client.Place(endpoint, addressing="path", read_seconds=20)
    client = s3_client.Client(f"{url} at {endpoint}", ACCESS, place)
    chosen = {"part_bytes": 8 * MIB, **options}
    return S3Store(parse(url), client, chosen, Patience(attempts, sleep=no_waiting))


class Way:
    """A transfer that counts, and keeps its note as JSON would."""

    def __init__(self, resume: dict[str, object] | None = None) -> None:
        self.resume = resume if resume is not None else {}
        self.moved = 0
        self.stop = threading.Event()

    def transfer(self) -> Transfer:
        def progress(count: int) -> None:
            self.moved += count

        return Transfer(self.resume, lambda: None, progress, self.stop, Unlimited())


@pytest.fixture
def step(tmp_path: Path) -> tuple[str, layout.Manifest]:
    return make_step(tmp_path / "cache", 120, {0: 40 * MIB + 12345})


def put(store: S3Store, step: tuple[str, layout.Manifest], way: Way | None = None) -> Way:
    folder, manifest = step
    used = way or Way()
    (entry,) = manifest.files
    with Source(folder, entry) as source:
        store.put_file(source, f"{FOLDER}/{entry.name}", entry, used.transfer())
    return used


def arrived(s3: Server, bucket: str, step: tuple[str, layout.Manifest]) -> bool:
    (name, data), *_ = content(step[0]).items()
    return s3.body(bucket, f"p/{FOLDER}/{name}") == data


@pytest.mark.parametrize("size", [0, 1, 8 * MIB, 8 * MIB + 1, 24 * MIB])
def test_a_file_arrives_byte_for_byte_with_its_checksum(
    s3: Server, tmp_path: Path, size: int
) -> None:
    bucket = s3.bucket()
    step = make_step(tmp_path, 120, {0: size})
    store = store_at(s3.endpoint, f"s3://{bucket}/p")
    way = put(store, step)
    (entry,) = step[1].files
    assert arrived(s3, bucket, step)
    assert way.moved == size
    there = store.head(f"{FOLDER}/{entry.name}")
    assert there is not None
    assert (there.size, there.crc32) == (size, checksum.of_file(entry))
    assert way.resume == {}


@pytest.mark.parametrize(
    "faults",
    [
        [("status", 500)],
        [("status", 503), ("status", 503)],
        [("status", 429)],
        [("cut", 100_000)],
        [("cut", 0)],
        [("corrupt", 4_000_000)],
        [("lose_answer", 0)],
        [("cut", 5 * MIB), ("status", 500), ("corrupt", 7), ("lose_answer", 0)],
    ],
    ids=str,
)
def test_a_part_that_fails_is_sent_again_and_the_object_is_whole(
    s3: Server, step: tuple[str, layout.Manifest], faults: list[s3_server.Fault]
) -> None:
    bucket = s3.bucket()
    with proxied(s3, once_each(faults, lambda r: r.part == 2)) as proxy:
        way = put(store_at(proxy.endpoint, f"s3://{bucket}/p"), step)
    assert arrived(s3, bucket, step)
    assert way.moved == step[1].size
    sent = [request.part for request in proxy.seen if request.part]
    assert sorted(sent) == sorted([1, 2, 3, 4, 5, 6] + [2] * len(faults))


@pytest.mark.parametrize("what", ["begin", "complete", "answer of complete"])
def test_begin_and_complete_survive_faults(
    s3: Server, step: tuple[str, layout.Manifest], what: str
) -> None:
    bucket = s3.bucket()
    key = "uploads" if what == "begin" else "uploadId"
    fault = ("lose_answer", 0) if what == "answer of complete" else ("status", 503)
    faults = once_each([fault, fault], lambda r: r.method == "POST" and key in r.query)
    with proxied(s3, faults) as proxy:
        put(store_at(proxy.endpoint, f"s3://{bucket}/p"), step)
    assert arrived(s3, bucket, step)


def test_an_upload_that_broke_off_is_gone_on_with_and_no_finished_part_is_sent_again(
    s3: Server, step: tuple[str, layout.Manifest]
) -> None:
    bucket = s3.bucket()
    way = Way()
    with proxied(s3, lambda r: ("status", 500) if r.part >= 4 else None) as broken:
        store = store_at(broken.endpoint, f"s3://{bucket}/p", attempts=2, connections=1)
        with pytest.raises(RemoteError, match="couldn't put part 4.*HTTP 500"):
            put(store, step, way)
    assert broken.sent_parts() == [1, 2, 3]
    with proxied(s3) as well:
        put(store_at(well.endpoint, f"s3://{bucket}/p"), step, Way(dict(way.resume)))
    assert sorted(well.sent_parts()) == [4, 5, 6]
    assert sum(r.size for r in well.arrived if r.part) == step[1].size - 3 * 8 * MIB
    assert arrived(s3, bucket, step)


@pytest.mark.parametrize(
    "note",
    [
        {"upload": "no-such-upload", "part_bytes": 8 * MIB},
        {"upload": "../../x", "part_bytes": 8 * MIB},
        {"upload": 7, "part_bytes": 8 * MIB},
        {"upload": "x", "part_bytes": 3},
        {"upload": "x", "part_bytes": -8 * MIB},
        {"upload": "x" * 100_000, "part_bytes": 8 * MIB},
        {"part_bytes": True, "upload": None},
    ],
    ids=lambda note: str(note)[:50],
)
def test_a_note_that_somebody_changed_only_costs_a_new_beginning(
    s3: Server, step: tuple[str, layout.Manifest], note: dict[str, object]
) -> None:
    bucket = s3.bucket()
    put(store_at(s3.endpoint, f"s3://{bucket}/p"), step, Way(note))
    assert arrived(s3, bucket, step)


def test_parts_of_another_file_under_the_noted_upload_are_found_out_at_the_end(
    s3: Server, step: tuple[str, layout.Manifest]
) -> None:
    bucket = s3.bucket()
    (entry,) = step[1].files
    key = f"p/{FOLDER}/{entry.name}"
    begun = s3.client.create_multipart_upload(
        Bucket=bucket, Key=key, ChecksumAlgorithm="CRC32", ChecksumType="FULL_OBJECT"
    )
    s3.client.upload_part(
        Bucket=bucket, Key=key, UploadId=begun["UploadId"], PartNumber=1, Body=bytes(8 * MIB)
    )
    way = Way({"upload": begun["UploadId"], "part_bytes": 8 * MIB})
    store = store_at(s3.endpoint, f"s3://{bucket}/p")
    with pytest.raises(RemoteError):
        put(store, step, way)
    assert key not in s3.keys(bucket)
    put(store, step, way)
    assert arrived(s3, bucket, step)


def test_a_file_damaged_in_the_cache_is_not_sent(
    s3: Server, step: tuple[str, layout.Manifest]
) -> None:
    bucket = s3.bucket()
    path = Path(step[0]) / step[1].files[0].name
    with path.open("r+b") as file:
        file.seek(20 * MIB)
        file.write(b"x")
    with pytest.raises(SourceError, match=r"rank-00000.* is damaged after byte 16777216"):
        put(store_at(s3.endpoint, f"s3://{bucket}/p"), step)
    assert s3.keys(bucket) == {}


def test_a_store_that_hides_checksums_is_verified_by_looking_at_the_object(
    s3: Server, step: tuple[str, layout.Manifest]
) -> None:
    bucket = s3.bucket()
    with proxied(s3, lambda r: ("no_checksum", 0)) as proxy:
        put(store_at(proxy.endpoint, f"s3://{bucket}/p"), step)
        assert any(r.method == "HEAD" for r in proxy.seen)
    assert arrived(s3, bucket, step)


def test_without_checksums_parts_carry_md5_and_damage_is_refused(
    s3: Server, step: tuple[str, layout.Manifest]
) -> None:
    bucket = s3.bucket()
    faults = once_each([("corrupt", 5)], lambda r: r.part == 3)
    with proxied(s3, faults) as proxy:
        put(store_at(proxy.endpoint, f"s3://{bucket}/p", checksums="off"), step)
    assert arrived(s3, bucket, step)
    assert [r.part for r in proxy.seen].count(3) == 2


def test_reading_back_finds_damage_and_removes_the_object(
    s3: Server, step: tuple[str, layout.Manifest]
) -> None:
    bucket = s3.bucket()
    with proxied(s3, lambda r: ("corrupt_answer", 9) if r.method == "GET" else None) as proxy:
        store = store_at(proxy.endpoint, f"s3://{bucket}/p", verify="read_back")
        with pytest.raises(RemoteError, match="arrived damaged"):
            put(store, step)
    assert s3.keys(bucket) == {}
    put(store_at(s3.endpoint, f"s3://{bucket}/p", verify="read_back"), step)
    assert arrived(s3, bucket, step)


def test_stopping_breaks_off_between_pieces_and_leaves_the_upload_to_go_on_with(
    s3: Server, step: tuple[str, layout.Manifest]
) -> None:
    bucket = s3.bucket()
    way = Way()

    def fault(request: s3_server.Request) -> s3_server.Fault | None:
        if request.part == 2:
            way.stop.set()
        return None

    with proxied(s3, fault) as proxy:
        store = store_at(proxy.endpoint, f"s3://{bucket}/p", connections=1)
        with pytest.raises(StoppedError):
            put(store, step, way)
        assert "upload" in way.resume
        assert len(proxy.sent_parts()) <= 3
    put(store_at(s3.endpoint, f"s3://{bucket}/p"), step, Way(dict(way.resume)))
    assert arrived(s3, bucket, step)


def test_uploads_that_nobody_goes_on_with_are_given_up(
    s3: Server, step: tuple[str, layout.Manifest]
) -> None:
    bucket = s3.bucket()
    store = store_at(s3.endpoint, f"s3://{bucket}/p")
    own, other = f"{FOLDER}/rank-00000.safetensors", f"{FOLDER}/rank-00008.safetensors"
    ids = {
        key: s3.client.create_multipart_upload(Bucket=bucket, Key=f"p/{key}")["UploadId"]
        for key in (own, other)
    }
    active = s3.client.create_multipart_upload(Bucket=bucket, Key=f"p/{own}")["UploadId"]
    assert store.tidy({own}, {active}) == 1
    left = s3.client.list_multipart_uploads(Bucket=bucket)["Uploads"]
    assert {u["UploadId"] for u in left} == {active, ids[other]}
    store.discard(own, {"upload": active})
    store.discard(own, {"upload": active})
    left = s3.client.list_multipart_uploads(Bucket=bucket)["Uploads"]
    assert {u["UploadId"] for u in left} == {ids[other]}


def test_more_than_a_thousand_steps_and_files_are_all_listed(s3: Server) -> None:
    bucket = s3.bucket()
    for number in range(1005):
        s3.client.put_object(Bucket=bucket, Key=f"p/step-{number:09d}/x", Body=b"")
    for number in range(1003):
        s3.client.put_object(Bucket=bucket, Key=f"p/{FOLDER}/f{number}", Body=b"12")
    store = store_at(s3.endpoint, f"s3://{bucket}/p")
    assert store.list_steps() == [f"step-{number:09d}" for number in range(1005)]
    files = store.list_files(FOLDER)
    assert len(files) == 1004
    assert {f.size for f in files} == {0, 2}


def test_what_belongs_to_others_is_neither_listed_nor_deleted(s3: Server) -> None:
    bucket = s3.bucket()
    for key in ("p/step-000000001/rank-00000.safetensors", "p/step-000000001/notes.txt"):
        s3.client.put_object(Bucket=bucket, Key=key, Body=b"1")
    for key in ("p/other/x", "p2/step-000000003/x", "p/step-000000001/deep/er"):
        s3.client.put_object(Bucket=bucket, Key=key, Body=b"1")
    store = store_at(s3.endpoint, f"s3://{bucket}/p")
    assert store.list_steps() == ["step-000000001"]
    names = [f.name for f in store.list_files("step-000000001")]
    assert names == ["notes.txt", "rank-00000.safetensors"]
    store.delete("step-000000001", names)
    assert "p/step-000000001/notes.txt" in s3.keys(bucket)
    assert "p/step-000000001/rank-00000.safetensors" not in s3.keys(bucket)


def test_a_claim_is_the_first_comer_s(s3: Server) -> None:
    bucket = s3.bucket()
    store = store_at(s3.endpoint, f"s3://{bucket}/p")
    answers: list[str] = []
    threads = [
        threading.Thread(target=lambda n=n: answers.append(store.claim("step-000000001/run", n)))
        for n in ("7.0", "7.1", "8.0", "9.0")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 4
    assert len(set(answers)) == 1
    assert store.get_text("step-000000001/run") == answers[0]


def test_a_range_is_fetched_again_when_the_answer_ends_early(
    s3: Server, step: tuple[str, layout.Manifest]
) -> None:
    bucket = s3.bucket()
    put(store_at(s3.endpoint, f"s3://{bucket}/p"), step)
    (name, data), *_ = content(step[0]).items()
    faults: Callable[[s3_server.Request], s3_server.Fault | None]
    faults = once_each([("answer_cut", 1000), ("status", 503)], lambda r: r.method == "GET")
    buffer = bytearray(3 * MIB)
    with proxied(s3, faults) as proxy:
        store_at(proxy.endpoint, f"s3://{bucket}/p").get_range(
            f"{FOLDER}/{name}", 5 * MIB, memoryview(buffer)
        )
    assert buffer == data[5 * MIB : 8 * MIB]


WRONG = {
    "a wrong secret": (
        dataclasses.replace(ACCESS, secret="wrong/wrong/wrong/SECRET9"),
        "",
        "the secret key is wrong",
    ),
    "an unknown key": (
        dataclasses.replace(ACCESS, key="nobody"),
        "",
        "the store doesn't know the access key",
    ),
    "a missing bucket": (ACCESS, "no-such-bucket", "there is no such bucket"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_an_admin_must_mend_is_said_so_and_tried_once(
    s3: Server, step: tuple[str, layout.Manifest], case: str
) -> None:
    access, bucket, reason = WRONG[case]
    bucket = bucket or s3.bucket()
    with proxied(s3) as proxy:
        place = s3_client.Place(proxy.endpoint, addressing="path")
        client = s3_client.Client(f"s3://{bucket}", access, place)
        store = S3Store(parse(f"s3://{bucket}/p"), client, {"part_bytes": 8 * MIB}, Patience(5))
        with pytest.raises(RemoteError, match=reason) as caught:
            put(store, step)
    assert caught.value.lasting
    assert len(proxy.seen) == 1
    assert access.secret not in str(caught.value)


def test_a_server_that_is_away_is_no_lasting_fault(step: tuple[str, layout.Manifest]) -> None:
    port = s3_server.free_port()
    store = store_at(f"http://127.0.0.1:{port}", "s3://bucket/p", attempts=2)
    with pytest.raises(RemoteError, match="couldn't begin the upload of step-") as caught:
        put(store, step)
    assert not caught.value.lasting


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (0, 16 * MIB),
        (100 << 30, 16 * MIB),
        (10_000 * 16 * MIB, 16 * MIB),
        (10_000 * 16 * MIB + 1, 24 * MIB),
        (5 << 40, 528 * MIB),
    ],
)
def test_parts_are_whole_chunks_and_at_most_ten_thousand(size: int, expected: int) -> None:
    assert part_bytes(size) == expected
    assert -(-size // expected) <= 10_000
    assert expected % layout.CHUNK_BYTES == 0


def test_nothing_is_taken_from_the_surroundings(s3: Server, tmp_path: Path) -> None:
    bucket = s3.bucket()
    home = tmp_path / "home"
    (home / ".aws").mkdir(parents=True)
    (home / ".aws" / "config").write_text(
        "[default]\nregion = x\nendpoint_url = http://127.0.0.1:1\n"
    )
    (home / ".aws" / "credentials").write_text("damaged = not a section\n")
    job = spec(
        tmp_path,
        f"s3://{bucket}/ada",
        options={"endpoint": s3.endpoint, "addressing": "path"},
        credentials=s3_server.CREDENTIALS,
        home=str(home),
    )
    code = (
        "import sys\n"
        "from crater_slurm.checkpoint import remote\n"
        "from crater_slurm.checkpoint.spec import Spec\n"
        "job = Spec.from_json(sys.stdin.read())\n"
        "store = remote.open_store(job.remote, job.home)\n"
        "store.put_text('step-000000001/run', 'x')\n"
    )
    hostile = {
        "HOME": str(home),
        "AWS_PROFILE": "nobody",
        "AWS_ACCESS_KEY_ID": "wrong",
        "AWS_SECRET_ACCESS_KEY": "wrong",
        "AWS_SESSION_TOKEN": "wrong",
        "AWS_ENDPOINT_URL": "http://127.0.0.1:1",
        "AWS_ENDPOINT_URL_S3": "http://127.0.0.1:1",
        "AWS_CONFIG_FILE": str(home / ".aws" / "config"),
        "AWS_CA_BUNDLE": "/nowhere",
        "HTTP_PROXY": "http://127.0.0.1:1",
        "http_proxy": "http://127.0.0.1:1",
        "PYTHONPATH": os.environ.get("PYTHONPATH", str(Path(__file__).parents[2])),
    }
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=job.to_json(),
        env=hostile,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert s3.keys(bucket) == {"ada/step-000000001/run": 1}


def test_the_site_s_credentials_reach_only_below_the_user_s_root(tmp_path: Path) -> None:
    job = spec(
        tmp_path,
        "s3://site/jobs/eve/x",
        options={"root": "s3://site/jobs/ada"},
        credentials={"access_key_id": "a", "secret_access_key": "b"},
    )
    with pytest.raises(RemoteError, match="lies outside s3://site/jobs/ada"):
        remote.open_store(job.remote, "")


def test_an_unknown_option_names_its_neighbour(tmp_path: Path) -> None:
    job = spec(tmp_path, "s3://site/x", options={"endpont": "x"})
    with pytest.raises(RemoteError, match="'endpont' is unknown; endpoint is near"):
        remote.open_store(job.remote, "")


def test_a_missing_library_is_named_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("botocore", "botocore.session", "botocore.config"):
        monkeypatch.setitem(sys.modules, name, None)
    job = spec(
        tmp_path, "s3://site/x", credentials={"access_key_id": "a", "secret_access_key": "b"}
    )
    with pytest.raises(RemoteError, match=r"pip install 'crater-slurm\[s3\]'") as caught:
        remote.open_store(job.remote, "")
    assert caught.value.lasting
