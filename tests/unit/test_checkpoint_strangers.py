"""Another user on the node, and links laid in the way: real processes, a real daemon and worker."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from job_ring import Gate
from job_session import alone
from node_fakes import as_user, wait_for

from bench.crash import JOB, USER, Job, a_job
from crater_slurm.checkpoint.spec import Remote
from crater_slurm.job import checkpoint, layout, session

__all__ = ["alone"]

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="starts processes of other users")
STRANGER = 65533

_TRY = """
import ctypes, json, os, socket, sys
worker, trainer, run, cache, job = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:6]

def ptrace(pid):
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.ptrace(16, pid, None, None) < 0:  # PTRACE_ATTACH
        raise OSError(ctypes.get_errno(), "ptrace")

def door():
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as own:
        own.connect(f"{run}/workers/{job}.sock")

def ring():
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as own:
        own.connect(f"{run}/ring.sock")
        own.settimeout(20)
        own.send(json.dumps({"op": "open", "version": 1, "job": job, "run": f"{job}.0", "rank": 0,
            "local_rank": 0, "world": 1, "local_world": 1, "bytes": 4096, "slots": 1}).encode())
        said = json.loads(own.recv(65536))
        if said["op"] == "error":
            raise PermissionError(1, said["error"])

def put():
    os.mkdir(f"{cache}/step-000999999")

ways = {
    "read the cache": lambda: os.listdir(cache), "write to the cache": put,
    "the worker's socket": door, "the ring": ring,
    "the worker's files": lambda: os.listdir(f"/proc/{worker}/fd"),
    "the worker's memory": lambda: open(f"/proc/{worker}/mem", "rb").close(),
    "trace the worker": lambda: ptrace(worker),
    "signal the worker": lambda: os.kill(worker, 0),
    "the trainer's files": lambda: os.listdir(f"/proc/{trainer}/fd"),
    "trace the trainer": lambda: ptrace(trainer),
    "signal the trainer": lambda: os.kill(trainer, 0),
}
done = []
for name, way in ways.items():
    try:
        way()
        done.append(name)
    except PermissionError:
        pass
print(json.dumps(done))
"""


@pytest.fixture
def job(open_path: Path) -> Iterator[Job]:
    with a_job(open_path / "node", 1, flush=False) as made:
        made.start()
        made.train(0)
        assert wait_for(lambda: made.worker() is not None, 30)
        yield made


def attempts(job: Job, uid: int) -> set[str]:
    """What a process of that user could do."""
    known = job.worker()
    assert known is not None
    done = as_user(
        _TRY, str(known[0]), str(job.trainers[0].pid), str(job.folder / "run"), str(job.cache), JOB,
        uid=uid,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout))


def test_who_may_do_what_with_a_job_s_checkpoints(job: Job) -> None:
    assert attempts(job, STRANGER) == set()
    workers = job.folder / "run/workers"
    assert stat.S_IMODE(workers.stat().st_mode) == 0o700
    assert workers.stat().st_uid == 0
    # The user's own processes of no job: what is the user's own anyway, but not the worker, which
    # may hold the site's credentials, nor the ring.
    own = attempts(job, USER)
    assert own >= {"read the cache", "signal the worker", "the trainer's files"}
    assert not own & {
        "the worker's socket", "the ring", "the worker's files", "the worker's memory",
        "trace the worker",
    }  # fmt: skip


@pytest.fixture
def gate(alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """A worker with root's rights, so that nothing but its own care keeps it from a victim."""
    made = Gate(tmp_path, tmp_path / "cache", remote=Remote(url=str(tmp_path / "away")))
    monkeypatch.setenv("CRATER_RING", made.path)
    monkeypatch.setenv("CRATER_CHECKPOINT_PATH", str(tmp_path / "cache"))
    monkeypatch.setattr(session, "_current", None)
    yield made
    made.stop()


@pytest.mark.parametrize("hard", [False, True])
def test_links_laid_in_the_way_lead_nowhere(gate: Gate, tmp_path: Path, hard: bool) -> None:
    victim, cache = tmp_path / "victim", tmp_path / "cache"
    victim.mkdir()
    secret = victim / "secret"
    secret.write_bytes(b"another user's own")

    def lay(place: Path) -> None:
        if hard:
            os.link(secret, place)
        else:
            place.symlink_to(secret)

    (cache / layout.step_name(1)).symlink_to(victim)
    (cache / layout.partial_name(layout.step_name(2))).symlink_to(victim)
    inside = cache / layout.partial_name(layout.step_name(3))
    inside.mkdir()
    for name in (layout.file_name(0), ".rank-00000.of-1.json", "manifest-00000.json", "flush.json"):
        lay(inside / name)
    for step in (1, 2, 3, 4):
        state = {"step": step, "data": bytes([step]) * 100_000}
        assert checkpoint.save(state, step).wait(60)
        found = checkpoint.load(step)
        assert found is not None
        assert found.state == state
    manifest = tmp_path / "away" / layout.step_name(4) / "manifest-00000.json"
    assert wait_for(manifest.exists, 30)
    note = cache / layout.step_name(4) / "flush.json"
    assert wait_for(lambda: note.exists() and json.loads(note.read_text())["flushed"], 30)
    note.unlink()
    lay(note)
    gate.daemon.kill()
    gate.restart()  # reads the note anew, and writes it
    assert checkpoint.save({"step": 5}, 5).wait(60)
    assert wait_for((tmp_path / "away" / layout.step_name(5) / manifest.name).exists, 30)
    assert secret.read_bytes() == b"another user's own"
    assert os.listdir(victim) == ["secret"]
