"""A small checkpoint worker for tests of the daemon: the real messages, steps as numbers in a file.

Trainers of a test steer it: ``save`` and ``flush`` change its steps, ``die`` kills it, ``stop``
makes it deaf, ``tell`` sends the daemon whatever the message holds.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path

from node_fakes import FakeTree, make_proc, settings, wait_for

from crater_slurm.job.wire import VERSION, Channel
from crater_slurm.model.plan import Plan
from crater_slurm.node import worker
from crater_slurm.node.jobs import PREPARED, JobRecord
from crater_slurm.node.rings import Rings
from crater_slurm.node.services import Roots, Services
from crater_slurm.node.worker import Launcher
from crater_slurm.node.workers import Workers

TREE = Path(__file__).parents[2]

PROGRAM = """\
import json, os, select, signal, socket, sys
sys.path.insert(0, sys.argv[1])
from crater_slurm.checkpoint.spec import Spec
from crater_slurm.job.wire import Channel, WireError

os.dup2(int(sys.argv[2]), 3)
door = socket.socket(fileno=3)
spec, steps, ended = None, {}, False
daemons, trainers = [], []


def read(number, default):
    try:
        with open(f"{spec.folder}/{number}") as file:
            return json.load(file)
    except OSError:
        return default


def state():
    with open(f"{spec.folder}/fake.json", "w") as file:
        json.dump(steps, file)
    told = [
        {"name": "step", "step": int(n), "run": spec.run, "bytes": 10, "local": True,
         "flushed": f or not spec.remote.url, "arrived": int(f), "world": 1}
        for n, f in steps.items()
    ]
    safe = not spec.remote.url or all(steps.values())
    done = ended and (safe or not os.path.exists(f"{spec.folder}/slow"))
    for channel in daemons:
        channel.send({"op": "state", "steps": told, "counters": {"steps": len(told)},
                      "idle": True, "done": done})
    if done:
        sys.exit(0)


def daemon(channel, message, fds):
    global spec, steps, ended
    if message["op"] == "spec":
        first, spec = spec is None, Spec.from_json(message["spec"])
        if first:
            os.setgid(spec.gid)
            os.setuid(spec.uid)
        steps = read("fake.json", {})
        state()
    elif message["op"] == "lane":
        trainer = Channel(socket.socket(fileno=fds[0]))
        trainers.append(trainer)
        trainer.send({"op": "lane", "bytes": message["limit"], "pid": os.getpid(),
                      "uid": os.getuid(), "fds": len(fds), "run": spec.run,
                      "asked_by": message["pid"], "restore": spec.restore})
    elif message["op"] == "ended":
        ended = True
        state()
    elif message["op"] == "requeued":
        for trainer in trainers:
            trainer.send({"op": "requeued", "ok": message["ok"], "error": message["error"]})
    else:
        channel.send({"op": "answer", "id": message["id"], "steps": sorted(steps)})


def trainer(channel, message):
    operation = message["op"]
    if operation == "save":
        steps[str(message["step"])] = False
        state()
    elif operation == "flush":
        steps.update(dict.fromkeys(steps, True))
        state()
    elif operation == "die":
        sys.stderr.write("Traceback\\nBoom: it broke\\n")
        sys.stderr.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    elif operation == "deaf":
        while True:
            signal.pause()
    elif operation == "requeue":
        daemons[-1].send({"op": "requeue", "id": 1, "reason": message["reason"]})
        return
    elif operation == "tell":
        raw = message["raw"].encode()
        for one in daemons:
            one.socket.send(raw)
    channel.send({"op": "did", "what": operation})


while True:
    ready, _, _ = select.select([door, *daemons, *trainers], [], [])
    for found in ready:
        if found is door:
            daemons.append(Channel(door.accept()[0]))
            continue
        try:
            message, fds = found.receive()
            if found in daemons:
                daemon(found, message, fds)
            else:
                trainer(found, message)
        except (WireError, OSError):
            found.close()
            (daemons if found in daemons else trainers).remove(found)
"""


def command(number: int) -> list[str]:
    return [sys.executable, "-I", "-c", PROGRAM, str(TREE), str(number)]


class Node:
    """A daemon's rings and workers over plain folders; this process is job 7's trainer."""

    def __init__(self, folder: Path, uid: int = 0, **checkpoints: object) -> None:
        self.folder = folder
        self.uid = uid
        (folder / "run").mkdir(exist_ok=True)
        (folder / "proc").mkdir(exist_ok=True)
        self.settings = settings(folder, checkpoints=checkpoints)
        if not (folder / "cgroup/system.slice").exists():
            self.tree = FakeTree(folder / "cgroup")
            self.tree.run_job("job_7", 8 * 1024, "0-1")
        self.trainer(os.getpid(), uid)
        (folder / "proc/meminfo").write_text(f"MemAvailable: {64 * 2**20} kB\n")
        self.start()

    def trainer(self, pid: int, uid: int, job: str = "job_7") -> None:
        """Let a process be a task of a job, as far as /proc tells."""
        cgroup = f"/system.slice/n1_slurmstepd.scope/{job}/step_batch/user/task_0"
        make_proc(self.folder / "proc", pid, uid, "0-1", cgroup)

    def start(self) -> None:
        """A daemon, also after ``stop`` or as if the last one had been killed."""
        self.services = Services(self.settings, Roots(proc=self.folder / "proc"))
        self.launcher = Launcher(scope=False, command=command)
        self.workers = Workers(self.services, self.launcher)
        self.rings = Rings(self.services, self.workers, timeout=1.0)
        self.workers.start()
        self.rings.start()

    def stop(self) -> None:
        self.rings.stop()
        self.workers.stop()

    def close(self) -> None:
        """Stop, and kill the workers that are left."""
        self.stop()
        for record in self.services.store.all():
            known = record.checkpoints.get("worker", {})
            with contextlib.suppress(OSError):
                worker.signal_exactly(known.get("pid", 0), known.get("born", ""), signal.SIGKILL)

    def job(self, job_id: str = "7", restarts: int = 0, **plan: object) -> JobRecord:
        """A prepared job with its folders, owned by its user."""
        record = JobRecord(
            job_id=job_id,
            uid=self.uid,
            gid=self.uid,
            cluster="c1",
            node="n1",
            user="root" if self.uid == 0 else "nobody",
            boot=self.services.boot,
            restarts=restarts,
            phase=PREPARED,
            plan={"id": "p1", **plan} if plan else None,
        )
        if record.plan:
            Plan(**record.plan)
        keep = ("checkpoint",) if restarts else ()
        found = self.services.cache.prepare("c1", job_id, self.uid, self.uid, keep)
        assert not found.problem
        record.folders = found.paths
        self.services.store.save(record)
        return record

    def open(self, job_id: str = "7", fds: tuple[int, ...] = (), **more: object) -> Channel:
        """Connect to the ring as a trainer and say open."""
        channel = Channel.connect(str(self.folder / "run/ring.sock"))
        channel.socket.settimeout(10)
        message = {
            "op": "open", "version": VERSION, "job": job_id, "rank": 0, "local_rank": 0,
            "world": 1, "local_world": 1, "bytes": 1 << 20, "slots": 1, **more,
        }  # fmt: skip
        channel.send(message, fds)
        return channel

    def record(self, job_id: str = "7") -> JobRecord:
        found = self.services.store.get(job_id)
        assert found is not None
        return found


def answer(channel: Channel) -> dict[str, object]:
    """The next message of the other end."""
    message, fds = channel.receive()
    for fd in fds:
        os.close(fd)
    return message


def tell(channel: Channel, operation: str, **more: object) -> dict[str, object]:
    """Steer the worker at the other end, and its answer."""
    channel.send({"op": operation, **more})
    return answer(channel)


def saved(node: Node, steps: int, job_id: str = "7") -> bool:
    """Whether the daemon has heard of so many steps."""
    return wait_for(lambda: len(node.record(job_id).checkpoints.get("steps", [])) == steps)
