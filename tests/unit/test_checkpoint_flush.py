"""The flush: what is brought where in which order, and what is told when it can't be."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import s3_server
from checkpoint_samples import MIB, Flushes, content, make_step, spec
from s3_server import Server, proxied

from crater_slurm.checkpoint import restore
from crater_slurm.checkpoint.flush import Flusher
from crater_slurm.checkpoint.remote.catalogue import Catalogue
from crater_slurm.checkpoint.remote.path import PathStore
from crater_slurm.checkpoint.remote.retry import Patience
from crater_slurm.checkpoint.remote.store import RemoteError, Source, Transfer
from crater_slurm.checkpoint.spec import Spec
from crater_slurm.job import layout


@pytest.fixture
def around() -> Flushes:
    return Flushes()


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def away(tmp_path: Path) -> Path:
    return tmp_path / "away"


class Failing(PathStore):
    """A folder that fails as it is told: ``errors`` for the next puts of files."""

    def __init__(self, root: str, errors: list[RemoteError]) -> None:
        super().__init__(root, {}, Patience(attempts=1))
        self.errors = errors

    def put_file(
        self, source: Source, key: str, entry: layout.FileEntry, transfer: Transfer
    ) -> None:
        if self.errors:
            raise self.errors.pop(0)
        super().put_file(source, key, entry, transfer)


def flusher(job: Spec, around: Flushes, store: PathStore | None = None) -> Flusher:
    return Flusher(job, around.changed, around.log, store=store, clock=around.clock)


def everything(one: Flusher, most: int = 50) -> None:
    for _ in range(most):
        if not one.turn():
            return
    raise AssertionError("it never ends")


def states(one: Flusher) -> dict[int, str]:
    return {step["step"]: step["state"] for step in one.state()}


def folders(away: Path) -> list[str]:
    return sorted(path.name for path in away.iterdir())


def test_a_step_arrives_with_its_manifest_and_is_flushed(
    cache: Path, away: Path, around: Flushes
) -> None:
    folder, manifest = make_step(cache, 120, {0: 9 * MIB, 1: 5})
    job = spec(cache, str(away))
    one = flusher(job, around)
    one.add(folder, manifest)
    assert (one.idle, states(one)) == (False, {120: "pending"})
    everything(one)
    assert (one.idle, states(one)) == (True, {120: "flushed"})
    assert around.changes == [(120, "running"), (120, "flushed")]
    assert content(away / "step-000000120") == content(folder)
    assert restore.available(job, "step") == [(120, "7.0", manifest.time)]
    assert one.safe("step", 120, "7.0")


def test_the_newest_step_goes_first_and_older_ones_that_would_be_removed_at_once_are_skipped(
    cache: Path, away: Path, around: Flushes
) -> None:
    one = flusher(spec(cache, str(away), keep_last=2), around)
    for number in (10, 20, 30, 40):
        one.add(*make_step(cache, number, {0: 100}))
    everything(one)
    assert [c for c in around.changes if c[1] == "flushed"] == [(40, "flushed"), (30, "flushed")]
    assert states(one) == {10: "skipped", 20: "skipped", 30: "flushed", 40: "flushed"}
    assert [one.safe("step", n, "7.0") for n in (10, 40)] == [True, True]
    assert [one.arrived("step", n, "7.0") for n in (10, 40)] == [False, True]
    assert folders(away) == ["step-000000030", "step-000000040"]
    assert any("step-000000010 is not flushed: newer steps" in line for line in around.lines)


def test_a_step_that_keep_every_keeps_is_flushed_though_it_is_old(
    cache: Path, away: Path, around: Flushes
) -> None:
    one = flusher(spec(cache, str(away), keep_last=1, keep_every=20), around)
    for number in (10, 20, 30):
        one.add(*make_step(cache, number, {0: 100}))
    everything(one)
    assert folders(away) == ["step-000000020", "step-000000030"]


def test_the_keep_rules_hold_at_the_destination_and_never_touch_what_is_not_this_job_s(
    cache: Path, away: Path, around: Flushes
) -> None:
    make_step(away, 1, {0: 10}, run="6.0", job_id="6")
    make_step(away, 2, {0: 10}, world=2)
    (away / "step-000000003").mkdir()
    (away / "step-000000003" / "thesis.txt").write_text("mine")
    (away / "notes").mkdir()
    one = flusher(spec(cache, str(away), keep_last=1), around)
    for number in (10, 20, 30):
        one.add(*make_step(cache, number, {0: 100}))
        everything(one)
    # Step 2 is a part of this node's that never got complete: withdrawn.
    assert folders(away) == ["notes", "step-000000001", "step-000000003", "step-000000030"]


def test_a_file_beside_the_step_that_is_not_crater_s_stays_when_the_step_is_removed(
    cache: Path, away: Path, around: Flushes
) -> None:
    one = flusher(spec(cache, str(away), keep_last=1), around)
    one.add(*make_step(cache, 10, {0: 100}))
    everything(one)
    (away / "step-000000010" / "notes.txt").write_text("mine")
    one.add(*make_step(cache, 20, {0: 100}))
    everything(one)
    assert [p.name for p in (away / "step-000000010").iterdir()] == ["notes.txt"]


def test_another_run_s_step_of_the_same_number_never_mixes_and_is_removed_once_ours_is_complete(
    cache: Path, away: Path, around: Flushes
) -> None:
    first = flusher(spec(cache / "a", str(away)), around)
    first.add(*make_step(cache / "a", 50, {0: 100, 1: 100}))
    everything(first)
    assert folders(away) == ["step-000000050"]
    again = spec(cache / "b", str(away), run="7.1")
    two = spec(cache / "c", str(away), run="7.1", node="n2")
    stamp = 1_790_000_500.0
    lower, higher = flusher(again, around), flusher(two, around)
    higher.add(*make_step(cache / "c", 50, {1: 7}, world=2, run="7.1", node="n2", time=stamp))
    everything(higher)
    assert folders(away) == ["step-000000050", "step-000000050.7.1"]
    lower.add(*make_step(cache / "b", 50, {0: 7}, world=2, run="7.1", time=stamp))
    everything(lower)
    assert folders(away) == ["step-000000050.7.1"]
    assert restore.available(again, "step") == [(50, "7.1", stamp)]


def test_nodes_that_are_of_different_speed_still_make_complete_steps(
    cache: Path, away: Path, around: Flushes
) -> None:
    jobs = {node: spec(cache / node, str(away), node=node, keep_last=1) for node in ("n1", "n2")}
    ranks = {"n1": 0, "n2": 1}
    ones = {node: flusher(job, around) for node, job in jobs.items()}

    def save(number: int) -> None:
        for node, rank in ranks.items():
            part = make_step(cache / node, number, {rank: 50}, world=2, node=node)
            ones[node].add(*part)

    for number in range(10, 200, 10):
        save(number)
        ones["n1"].turn()
        if number % 30 == 0:
            ones["n2"].turn()
    for one in ones.values():
        everything(one)
    everything(ones["n1"])
    found = restore.available(jobs["n1"], "step")
    assert found[0][0] == 190
    assert [step.complete for step in Catalogue(PathStore(str(away), {})).steps()] == [True] * len(
        found
    )


def test_a_destination_that_fails_is_told_and_tried_again_ever_more_seldom(
    cache: Path, away: Path, around: Flushes
) -> None:
    errors = [RemoteError("it is slow.") for _ in range(12)]
    one = flusher(spec(cache, str(away)), around, Failing(str(away), errors))
    one.add(*make_step(cache, 10, {0: 100}))
    waits = []
    for _ in range(12):
        assert one.turn()
        (step,) = one.state()
        assert step["state"] == "pending"
        assert step["error"].startswith("it is slow. So since 2026-09-21")
        assert "next try at" in step["error"]
        waits.append(step["next_try"] - around.now)
        assert not one.turn()
        around.now = step["next_try"]
    assert all(1 <= waits[n] <= 300 for n in range(12))
    assert waits[0] <= 2
    assert 150 <= waits[-1] <= 300
    everything(one)
    assert states(one) == {10: "flushed"}
    assert one.state()[0]["error"] == ""
    assert f"info: {away} works again." in around.lines


def test_what_an_admin_must_mend_is_tried_every_five_minutes_and_at_once_when_told(
    cache: Path, away: Path, around: Flushes
) -> None:
    errors = [RemoteError("no such bucket.", lasting=True)]
    one = flusher(spec(cache, str(away)), around, Failing(str(away), errors))
    one.add(*make_step(cache, 10, {0: 100}))
    assert one.turn()
    assert one.state()[0]["next_try"] == around.now + 300
    assert not one.turn()
    assert one.flush_now(10)
    assert not one.flush_now(11)
    everything(one)
    assert states(one) == {10: "flushed"}


def test_a_step_damaged_in_the_cache_is_told_and_keeps_no_other_from_going(
    cache: Path, away: Path, around: Flushes
) -> None:
    one = flusher(spec(cache, str(away)), around)
    bad, _ = part = make_step(cache, 20, {0: 10 * MIB})
    one.add(*part)
    one.add(*make_step(cache, 10, {0: 100}))
    path = Path(bad) / "rank-00000.safetensors"
    path.write_bytes(b"x" + path.read_bytes()[1:])
    everything(one)
    assert states(one) == {10: "flushed", 20: "failed"}
    assert "rank-00000.safetensors is damaged after byte 0" in one.state()[1]["error"]
    assert one.idle
    assert not one.safe("step", 20, "7.0")
    assert not (away / "step-000000020" / "manifest-00000.json").exists()


def test_a_link_in_the_cache_is_not_followed(cache: Path, away: Path, around: Flushes) -> None:
    folder, manifest = make_step(cache, 20, {0: 100})
    real = cache / "elsewhere"
    path = Path(folder) / "rank-00000.safetensors"
    path.rename(real)
    path.symlink_to(real)
    one = flusher(spec(cache, str(away)), around)
    one.add(folder, manifest)
    everything(one)
    assert states(one) == {20: "failed"}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"format": 1}',
        "[" * 100_000,
        '{"format": 1, "run": "7.0", "destination": "/elsewhere", "flushed": true}',
        '{"format": 1, "run": "6.0", "destination": "AWAY", "flushed": true}',
        '{"format": 1, "run": "7.0", "destination": "AWAY", "files": {"rank-00000.safetensors":'
        ' {"done": true}, "../../x": {"upload": 3}, "y": []}, "flushed": "yes"}',
        '{"format": 1, "run": "7.0", "destination": "AWAY", "files": [1]}',
    ],
    ids=lambda text: text[:40],
)
def test_a_note_that_a_user_has_changed_never_makes_a_step_count_as_flushed(
    cache: Path, away: Path, around: Flushes, text: str
) -> None:
    folder, manifest = make_step(cache, 20, {0: 100})
    (Path(folder) / "flush.json").write_text(text.replace("AWAY", str(away)))
    one = flusher(spec(cache, str(away)), around)
    one.add(folder, manifest)
    everything(one)
    assert states(one) == {20: "flushed"}
    assert content(away / "step-000000020") == content(folder)
    assert folders(away) == ["step-000000020"]


def test_a_new_worker_knows_what_is_flushed_and_goes_on_with_the_rest(
    cache: Path, away: Path, around: Flushes
) -> None:
    job = spec(cache, str(away))
    first = flusher(job, around)
    first.add(*make_step(cache, 10, {0: 100}))
    everything(first)
    make_step(cache, 20, {0: 100})
    make_step(cache / "x", 30, {0: 100})
    second = flusher(job, around)
    second.scan()
    assert states(second) == {10: "flushed", 20: "pending"}
    everything(second)
    assert states(second) == {10: "flushed", 20: "flushed"}


def test_a_full_cache_does_not_stop_what_empties_it(
    cache: Path, away: Path, around: Flushes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object, **more: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("crater_slurm.checkpoint.flush_state.write_atomically", full)
    one = flusher(spec(cache, str(away)), around)
    one.add(*make_step(cache, 10, {0: 100}))
    everything(one)
    assert states(one) == {10: "flushed"}
    assert any("couldn't write flush.json" in line for line in around.lines)


def test_without_a_destination_there_is_nothing_to_do(cache: Path, around: Flushes) -> None:
    one = flusher(spec(cache), around)
    one.add(*make_step(cache, 10, {0: 100}))
    assert one.idle
    assert one.state() == []
    assert not one.turn()


def test_the_thread_flushes_what_is_added_and_stops(
    cache: Path, away: Path, around: Flushes
) -> None:
    make_step(cache, 10, {0: 100})
    done = threading.Event()
    one = Flusher(
        spec(cache, str(away)),
        lambda step: done.set() if step.manifest.step == 20 and step.state == "flushed" else None,
        around.log,
    )
    one.start()
    one.add(*make_step(cache, 20, {0: 100}))
    assert done.wait(30)
    one.stop(30)
    assert content(away / "step-000000020") == content(cache / "step-000000020")


def test_a_limiter_is_asked_for_every_byte(cache: Path, away: Path, around: Flushes) -> None:
    taken: list[int] = []

    class Limiter:
        def take(self, count: int) -> None:
            taken.append(count)

    one = Flusher(spec(cache, str(away)), around.changed, around.log, limiter=Limiter())
    one.add(*make_step(cache, 10, {0: 9 * MIB, 1: 3}))
    everything(one)
    assert sorted(taken) == [3, MIB, 8 * MIB]


def s3_spec(cache: Path, bucket: str, endpoint: str, **more: object) -> Spec:
    return spec(
        cache,
        f"s3://{bucket}/ada/7",
        options={"endpoint": endpoint, "addressing": "path", "part_bytes": 8 * MIB},
        credentials=s3_server.CREDENTIALS,
        **more,
    )


def test_to_s3_and_back_with_the_keep_rules(s3: Server, cache: Path, around: Flushes) -> None:
    bucket = s3.bucket()
    job = s3_spec(cache, bucket, s3.endpoint, keep_last=1)
    one = flusher(job, around)
    for number in (10, 20):
        one.add(*make_step(cache, number, {0: 20 * MIB, 1: 100}))
        everything(one)
    names = ("manifest-00000.json", "rank-00000.safetensors", "rank-00001.safetensors", "run")
    assert sorted(s3.keys(bucket)) == [f"ada/7/step-000000020/{name}" for name in names]
    back = dataclasses.replace(job, folder=str(cache / "back"))
    (cache / "back").mkdir()
    folder = restore.fetch(back, "step", 20, "7.0")
    assert content(folder) == content(cache / "step-000000020")


def test_no_secret_is_in_anything_that_is_written_or_said(
    s3: Server, cache: Path, around: Flushes
) -> None:
    job = s3_spec(cache, s3.bucket(), s3.endpoint)
    with proxied(s3, lambda r: ("status", 500) if r.part == 2 else None) as proxy:
        broken = s3_spec(cache, "bucket-1", proxy.endpoint)
        one = flusher(broken, around)
        one.add(*make_step(cache, 10, {0: 20 * MIB}))
        one._store = None
        one.turn()
    wrong = dataclasses.replace(
        job,
        remote=dataclasses.replace(
            job.remote,
            credentials={
                "access_key_id": s3_server.KEY,
                "secret_access_key": s3_server.SECRET + "x",
            },
        ),
    )
    two = flusher(wrong, around)
    two.add(*make_step(cache, 30, {0: 100}))
    two.turn()
    said = "\n".join(around.lines) + repr(one.state()) + repr(two.state()) + repr(job) + repr(one)
    assert "the secret key is wrong" in said
    assert s3_server.SECRET not in said
    for path in (p for p in cache.rglob("*") if p.is_file()):
        assert s3_server.SECRET.encode() not in path.read_bytes(), path
    note = json.loads((cache / "step-000000010" / "flush.json").read_text())
    assert set(note["files"]["rank-00000.safetensors"]) == {"upload", "part_bytes"}


KILLED = """
import sys, time
from crater_slurm.checkpoint.flush import Flusher
from crater_slurm.checkpoint.spec import Spec
job = Spec.from_json(sys.stdin.read())
one = Flusher(job, lambda step: None, lambda level, text: print(level, text, flush=True))
one.start()
print("started", flush=True)
while not one.idle:
    time.sleep(0.01)
print("idle", flush=True)
"""


def killed_at_random(
    job: Spec, rounds: int, seed: int, check: Callable[[], None] = lambda: None
) -> None:
    """Kill a flushing process again and again at random moments, then let one finish."""
    chance = random.Random(seed)
    for number in range(rounds + 1):
        process = subprocess.Popen(
            [sys.executable, "-c", KILLED],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        )
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(job.to_json())
        process.stdin.close()
        if number == rounds:
            said = process.stdout.read()
            assert process.wait(120) == 0
            assert said.endswith("idle\n")
        else:
            process.stdout.readline()
            time.sleep(chance.uniform(0, 0.5))
            process.send_signal(signal.SIGKILL)
            process.wait()
            check()
        process.stdout.close()


def no_half_step(away: Path, steps: dict[str, dict[str, bytes]]) -> None:
    for found in away.glob("step-*/manifest-*.json"):
        assert content(found.parent) == steps[found.parent.name]


def test_killed_at_any_moment_a_flush_to_a_folder_goes_on_and_nothing_half_has_a_final_name(
    cache: Path, away: Path
) -> None:
    steps = {}
    for number in (10, 20):
        folder, _ = make_step(cache, number, {0: 40 * MIB, 1: 17 * MIB + 3})
        steps[Path(folder).name] = content(folder)
    killed_at_random(spec(cache, str(away)), 6, 3, lambda: no_half_step(away, steps))
    assert {p.name: content(p) for p in away.glob("step-*")} == steps
    assert not list(away.rglob("*.partial"))


def test_killed_at_any_moment_a_flush_to_s3_goes_on_and_leaves_no_upload(
    s3: Server, cache: Path
) -> None:
    bucket = s3.bucket()
    folder, _ = make_step(cache, 10, {0: 72 * MIB})
    killed_at_random(s3_spec(cache, bucket, s3.endpoint), 4, 1)
    key = "ada/7/step-000000010/rank-00000.safetensors"
    assert s3.body(bucket, key) == content(folder)["rank-00000.safetensors"]
    assert "ada/7/step-000000010/manifest-00000.json" in s3.keys(bucket)
    assert not s3.client.list_multipart_uploads(Bucket=bucket).get("Uploads")
