"""Checkpoints through the ring on a real slurmd: saved, kept over crashes, apart between users."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from helpers import accepted, cancel, completed, output, patient_lab, running, submit, wait_until

from crater_slurm.job import layout
from crater_slurm.lab import Lab
from crater_slurm.lab.places import INSIDE

NODE = "c1"
#: So that a destination is slow enough to be looked at while it is being filled.
RATE_MB_S = 2
#: Saves a step for each file go.N, until there is a file stop; says what it saved and how.
TRAINER = """
import hashlib, os, sys, time
from crater_slurm.job import checkpoint

loaded = checkpoint.load()
if loaded is not None:
    print("loaded", loaded.step, hashlib.sha256(loaded.state["data"]).hexdigest(), flush=True)
job, step = os.environ["SLURM_JOB_ID"], 0
while not os.path.exists(f"stop.{job}"):
    time.sleep(0.05)
    if os.path.exists(f"go.{job}.{step + 1}"):
        step += 1
        state = {"step": step, "data": os.urandom(int(os.environ.get("SIZE", 3_000_000)) + step)}
        saving = checkpoint.save(state, step)
        done = checkpoint.wait(60)
        print("saved", step, hashlib.sha256(state["data"]).hexdigest(), saving.how, done, flush=True)
        if os.path.exists(f"requeue.{job}"):
            print("requeue", checkpoint.requeue("for the test"), flush=True)
"""


@pytest.fixture(scope="module")
def lab(lab_factory: Any) -> Lab:
    rate = {"node": {"checkpoints": {"rate_mb_s": RATE_MB_S}}}
    made = patient_lab(lab_factory, inventory="cpu", crater_conf=rate)
    for user in ("alice", "bob"):
        file = made.home(user) / "train.py"
        file.write_text(TRAINER)
        file.chmod(0o644)
    return made


@pytest.fixture(autouse=True)
def afterwards(lab: Lab) -> Any:
    yield
    cancel(lab)
    if lab.supervisor.pid(f"node@{NODE}") is None:
        lab.start(("node", NODE))


def start(lab: Lab, crater: str = "cpus=1", user: str = "alice", *options: str) -> int:
    """A job whose trainer waits for orders, on the node's own Python without any pip install."""
    body = "env | grep -E 'CRATER|PYTHONPATH'; exec /usr/bin/python3 train.py"
    words = ("-w", NODE, "--open-mode=append", *options)
    job = accepted(submit(lab, *words, crater=crater, body=body, user=user))
    running(lab, job)
    return job


def order(lab: Lab, job: int, what: str, user: str = "alice") -> None:
    (lab.home(user) / what.replace("JOB", str(job))).touch()


def save(lab: Lab, job: int, step: int, user: str = "alice") -> list[str]:
    """Let the trainer save a step: its checksum, how, and whether it came to rest."""
    order(lab, job, f"go.JOB.{step}", user)
    found = wait_until(
        lambda: re.search(rf"^saved {step} (\w+) (\w+) (\w+)$", output(lab, job, user), re.M),
        f"step {step} is saved: {output(lab, job, user)}",
    )
    return [str(word) for word in found.groups()]


def record(lab: Lab, job: int) -> dict[str, Any]:
    """What the node's daemon keeps of a job."""
    file = lab.folders.node(NODE) / f"lib/node/jobs/{job}.json"
    found = json.loads(file.read_text())
    assert isinstance(found, dict)
    return found


def cache_listing(lab: Lab, job: int) -> list[str]:
    folder = f"/crater-cache/checkpoint/{lab.spec.name}/{job}"
    done = lab.run(["ls", "-A", folder], user="root", node=NODE)
    return done.stdout.split()


def worker_pid(lab: Lab, job: int) -> int:
    return int(record(lab, job)["checkpoints"]["worker"]["pid"])


def test_a_trainer_saves_through_the_ring_and_a_killed_daemon_costs_nothing(lab: Lab) -> None:
    job = start(lab)
    _, how, done = save(lab, job, 1)
    assert (how, done) == ("ring", "True"), output(lab, job)
    assert cache_listing(lab, job) == ["step-000000001"]
    before = worker_pid(lab, job)

    lab.kill(("node", NODE))
    _, how, done = save(lab, job, 2)
    assert (how, done) == ("ring", "True"), "the worker needs no daemon"

    lab.start(("node", NODE))
    wait_until(lambda: len(record(lab, job)["checkpoints"].get("steps", [])) == 2, "it is back")
    assert worker_pid(lab, job) == before, "the same worker"
    save(lab, job, 3)
    assert cache_listing(lab, job) == [f"step-{n:09d}" for n in (1, 2, 3)]
    order(lab, job, "stop.JOB")
    completed(lab, job)
    wait_until(lambda: not cache_listing(lab, job), "the end of the job leaves nothing here")


def test_a_requeued_job_goes_on_from_its_last_checkpoint(lab: Lab) -> None:
    job = start(lab, "cpus=1", "alice", "--requeue")
    save(lab, job, 1)
    order(lab, job, "requeue.JOB")
    digest, _, _ = save(lab, job, 2)
    # Slurm kills it before it hears the answer.
    wait_until(lambda: lab.job(job)["Restarts"] == "1", f"it is requeued: {output(lab, job)}")
    (lab.home() / f"requeue.{job}").unlink()
    assert f"job {job} is requeued by its own wish: for the test" in lab.log(("node", NODE))
    # Slurm would let it wait for two minutes; within the same second its slurmd refuses it.
    wait_until(lambda: lab.job(job)["JobState"] == "PENDING", "the job is back in the queue")
    lab.run(["scontrol", "update", f"job={job}", "StartTime=now+3"], user="root", check=True)
    wait_until(lambda: f"loaded 2 {digest}" in output(lab, job), f"it loads step 2: {lab.job(job)}")
    assert f"CRATER_RUN={job}.1" in output(lab, job)
    order(lab, job, "stop.JOB")
    completed(lab, job)


def test_nobody_opens_another_user_s_ring(lab: Lab) -> None:
    job = start(lab)
    save(lab, job, 1)
    code = (
        "import json, socket, sys; s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET);"
        "s.settimeout(20); s.connect('/run/crater/ring.sock');"
        "s.send(json.dumps(dict(op='open', version=1, job=sys.argv[1], rank=0, local_world=1,"
        " bytes=4096)).encode()); print(s.recv(9999).decode())"
    )
    bob = {"user": "bob", "node": NODE}
    done = lab.run(["/usr/bin/python3", "-c", code, str(job)], **bob)
    assert "for uid 61002" in done.stdout, done.stderr
    for path in (
        f"/crater-cache/checkpoint/{lab.spec.name}/{job}",
        "/run/crater/workers",
        f"/run/crater/workers/{job}.sock",
    ):
        done = lab.run(["ls", path], **bob)
        assert "Permission denied" in done.stderr, path
    pid = worker_pid(lab, job)
    done = lab.run(
        ["sh", "-c", f"kill -STOP {pid}; ls /proc/{pid}/fd; cat /proc/{pid}/maps"], **bob
    )
    assert done.stdout == ""
    # Not even its own user looks into a worker: it may hold the site's keys.
    done = lab.run(["sh", "-c", f"ls /proc/{pid}/fd; cat /proc/{pid}/environ"], node=NODE)
    assert done.stdout == ""
    save(lab, job, 2)
    order(lab, job, "stop.JOB")
    completed(lab, job)


def arrived(folder: Path, steps: int) -> bool:
    """Whether so many steps are complete in a folder, each file as its manifest says."""
    found = 0
    for step in sorted(folder.glob("step-*")):
        parts = layout.read_parts(str(step))
        whole = layout.covers(parts)
        errors = [layout.check_file(f"{step}/{f.name}", f) for part in parts for f in part.files]
        found += whole and not any(errors)
    return found == steps


def test_epilog_returns_while_the_destination_is_still_being_filled(lab: Lab) -> None:
    size = 24_000_000
    inside = INSIDE / "home/alice/ckpt"
    job = start(lab, f"cpus=1 checkpoint={inside}/%u-%j", "alice", f"--export=ALL,SIZE={size}")
    folder = lab.home() / f"ckpt/alice-{job}"
    _, how, done = save(lab, job, 1)
    assert (how, done) == ("ring", "True")
    order(lab, job, "stop.JOB")
    completed(lab, job)
    wait_until(lambda: lab.node(NODE)["State"] == "IDLE", "the Epilog is through")
    assert not arrived(folder, 1), "else nothing is shown here"
    kept = cache_files(lab, job)
    pid = worker_pid(lab, job)
    lab.kill(("node", NODE))
    lab.start(("node", NODE))
    wait_until(lambda: arrived(folder, 1), f"it is at the destination: {lab.log(('node', NODE))}")
    there = {
        f"{f.parent.name}/{f.name}": hashlib.sha256(f.read_bytes()).hexdigest()
        for f in folder.glob("step-*/*.safetensors")
    }
    assert there == kept
    assert folder.stat().st_uid == 61001
    wait_until(lambda: record(lab, job)["checkpoints"].get("done"), "its worker is done")
    assert record(lab, job)["checkpoints"]["unflushed"] == 0
    wait_until(lambda: lab.run(["kill", "-0", str(pid)], user="root").returncode, "it has ended")


def cache_files(lab: Lab, job: int) -> dict[str, str]:
    """Checksums of the files of ranks in the node's cache."""
    folder = f"/crater-cache/checkpoint/{lab.spec.name}/{job}"
    words = ["sh", "-c", f"cd {folder} && sha256sum step-*/*.safetensors"]
    done = lab.run(words, user="root", node=NODE, check=True)
    pairs = (line.split() for line in done.stdout.splitlines())
    return {name: digest for digest, name in pairs}
