"""Checkpoints under kill -9: what ``load()`` returns is always the newest complete step.

    python bench/crash.py [--rounds 300] [--seed N] [--folder DIR] [--flush]

The real crater-io-daemon with a job of its own that a Prolog has told it of, the job's real
worker, and two ranks that save as fast as they can, as another user. In each round one of them,
or several at once, are killed at a random moment and started again. Then the newest step is loaded
and compared byte for byte; it must be none older than what a rank was ever told to be saved, from
one life of the trainers alone, every folder with a final name must agree with its manifest, and no
step that was complete may be gone. ``--flush``: only rounds with a destination. With an odd seed
each start of the trainers is a step of Slurm's, by which their files are told apart. Needs root.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.table import show  # noqa: E402
from crater_slurm.hooks import frame  # noqa: E402
from crater_slurm.job import layout  # noqa: E402
from crater_slurm.model.plan import Plan  # noqa: E402
from crater_slurm.model.token import SignedPlan, sign  # noqa: E402
from crater_slurm.node import worker  # noqa: E402

USER, JOB, RANKS, KEEP = 65534, "7", 2, 5
KINDS = ("trainer", "worker", "daemon", "daemon and worker", "worker and trainer", "all")
_KEY = bytes(range(32))
_START_S, _LOAD_S = 60.0, 60.0

#: What runs as the job's user.
PROGRAM = (ROOT / "bench/crash_trainer.py").read_text()


class CrashError(AssertionError):
    """The rule was broken; the message says how."""


@dataclasses.dataclass
class Report:
    """What a soak has seen."""

    rounds: int = 0
    kills: Counter[str] = dataclasses.field(default_factory=Counter)
    saved: int = 0  # steps that a rank was told to be saved
    last: int = 0
    flushed: int = 0  # complete steps at the destination that were read, in all rounds
    seconds: float = 0.0


class Job:
    """One job on one node, all of it below ``folder``, which its user can reach."""

    def __init__(self, folder: Path, seed: int, *, flush: bool, size: int = 400_000) -> None:
        self.folder, self.chance, self.size = folder, random.Random(seed), size
        self.cache = folder / "cache/checkpoint/c1" / JOB
        self.destination = folder / "away" if flush else None
        self.life, self.starts = 0, bool(seed % 2)
        self.report = Report()
        self.daemon: subprocess.Popen[str] | None = None
        self.trainers: list[subprocess.Popen[str]] = []
        self._workers: set[tuple[int, str]] = set()
        self._lay_out()

    def _lay_out(self) -> None:
        self.folder.mkdir(exist_ok=True)
        self.folder.chmod(0o755)
        (self.folder / "plan.key").write_text(_KEY.hex() + "\n")
        (self.folder / "plan.key").chmod(0o600)
        (self.folder / "cache").mkdir(mode=0o755)
        for name in ("away", "logs"):
            (self.folder / name).mkdir(mode=0o755)
            os.chown(self.folder / name, USER, USER)
        cache = {"mount_point": str(self.folder / "cache"), "require_mount": False,
                 "min_free_percent": 0}  # fmt: skip
        node = {
            "socket": str(self.folder / "run/node.sock"), "state_dir": str(self.folder / "state"),
            "cgroup_root": str(self.folder / "cgroup"), "report": False, "listen": "",
            "cache": cache, "checkpoints": {"keep_last": KEEP, "scope": False},
        }  # fmt: skip
        plan = {"key_file": str(self.folder / "plan.key")}
        (self.folder / "crater.yaml").write_text(json.dumps({"plan": plan, "node": node}))

    # The daemon and the worker

    def start(self) -> None:
        """The daemon; at the first time also the job's Prolog."""
        path = self.folder / "notify"
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
            notify.bind(str(path))
            notify.settimeout(_START_S)
            with (self.folder / "daemon.log").open("a") as log:
                self.daemon = subprocess.Popen(
                    [sys.executable, "-m", "crater_slurm.node", "--foreground",
                     "--config", str(self.folder / "crater.yaml")],
                    cwd=ROOT, stderr=log, text=True,
                    env={**os.environ, "NOTIFY_SOCKET": str(path), "PYTHONPATH": str(ROOT)},
                )  # fmt: skip
            notify.recv(100)
        if not self.cache.exists():
            self._prolog()

    def _prolog(self) -> None:
        where = str(self.destination) if self.destination else None
        plan = SignedPlan(Plan(id="p1", checkpoint=where), USER, "c1", 1_700_000_000, False)
        env = {
            "SLURM_JOB_ID": JOB, "SLURM_JOB_UID": str(USER), "SLURM_JOB_GID": str(USER),
            "SLURM_CLUSTER_NAME": "c1", "SLURMD_NODENAME": "n1",
            "SLURM_JOB_COMMENT": sign(plan, _KEY),
        }  # fmt: skip
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(_START_S)
            connection.connect(str(self.folder / "run/node.sock"))
            pairs = [("op", "prolog"), *((f"env.{key}", value) for key, value in env.items())]
            connection.sendall(frame.encode(pairs))
            answer = list(frame.receive(connection))
        if ("status", "ok") not in answer:
            raise CrashError(f"the Prolog was answered {answer}")

    def worker(self) -> tuple[int, str] | None:
        """The worker that the daemon has noted: process and birth."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            record = json.loads((self.folder / f"state/jobs/{JOB}.json").read_text())
            known = record["checkpoints"]["worker"]
            found = (int(known["pid"]), str(known["born"]))
            self._workers.add(found)
            return found
        return None

    # The trainers

    def _command(self, *arguments: str) -> list[str]:
        # The interpreter that runs this may lie where another user may not go.
        python = "/usr/bin/python3" if Path("/usr/bin/python3").exists() else sys.executable
        return [python, "-c", PROGRAM, arguments[0], str(self.size), *arguments[1:]]

    def _environment(self, rank: int) -> dict[str, str]:
        paths = sorted((self.folder / "run/job").iterdir())
        return {
            "PATH": "/usr/bin:/bin", "PYTHONPATH": str(paths[0]), "SLURM_JOB_ID": JOB,
            "SLURM_CLUSTER_NAME": "c1", "SLURMD_NODENAME": "n1", "RANK": str(rank),
            "WORLD_SIZE": str(RANKS), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(RANKS),
            "CRATER_RING": str(self.folder / "run/ring.sock"),
            "CRATER_CHECKPOINT_PATH": str(self.cache),
            "CRATER_CHECKPOINT_DIR": str(self.cache),
            **(
                {"SLURM_STEP_ID": str(self.life), "SLURM_STEP_NUM_TASKS": str(RANKS)}
                if self.starts
                else {}
            ),
        }  # fmt: skip

    def train(self, step: int) -> None:
        """Start the ranks anew, from a step."""
        self.life += 1
        for rank in range(RANKS):
            log = self.folder / f"logs/rank-{rank}"
            with (self.folder / "trainers.log").open("a") as errors:
                self.trainers.append(
                    subprocess.Popen(
                        self._command("train", str(step), str(self.life), str(log)),
                        env=self._environment(rank),
                        stdout=subprocess.PIPE,
                        stderr=errors,
                        text=True,
                        user=USER,
                        group=USER,
                        extra_groups=[],
                        cwd="/",
                    )
                )
        for trainer in self.trainers:
            self._first_save(trainer)

    def _first_save(self, trainer: subprocess.Popen[str]) -> None:
        assert trainer.stdout is not None
        if not trainer.stdout.readline():
            raise CrashError(f"a rank ended: {self._tail('trainers.log')}")
        os.set_blocking(trainer.stdout.fileno(), False)

    def drink(self) -> None:
        """Read what the ranks print, so that they never wait for a reader."""
        for trainer in self.trainers:
            assert trainer.stdout is not None
            with contextlib.suppress(BlockingIOError, TypeError):
                os.read(trainer.stdout.fileno(), 1 << 16)
            if trainer.poll() is not None:
                raise CrashError(f"a rank ended by itself: {self._tail('trainers.log')}")

    def look(self) -> tuple[int, int]:
        """Step and life of what a new process loads."""
        done = subprocess.run(
            self._command("look"), env=self._environment(0), capture_output=True, text=True,
            user=USER, group=USER, extra_groups=[], cwd="/", timeout=_LOAD_S, check=False,
        )  # fmt: skip
        if done.returncode:
            raise CrashError(f"load() failed: {done.stderr[-2000:]}")
        step, life = map(int, done.stdout.split())
        return step, life

    def _tail(self, name: str) -> str:
        return (self.folder / name).read_text()[-2000:]

    # What must hold

    def told(self) -> dict[int, int]:
        """Steps that a rank was told to be saved, and the latest life in which it was. What the
        worker calls saved is so for all ranks; a rank that wrote by itself speaks for itself."""
        found: dict[int, int] = {}
        alone: Counter[tuple[int, int]] = Counter()
        for path in (self.folder / "logs").iterdir():
            for line in path.read_text().splitlines(keepends=True):
                if line.endswith("\n"):
                    step, life = map(int, line.split()[:2])
                    alone[step, life] += 1
                    if line.split()[2] != "ring" and alone[step, life] < RANKS:
                        continue
                    found[step] = max(life, found.get(step, 0))
        return found

    def complete(self, folder: Path, *, still: bool) -> set[int]:
        """The complete steps of a folder, after all of it was compared with its manifests.

        ``still``: nothing writes there now, so nothing may go while it is read.
        """
        found = set()
        for name in sorted(path.name for path in folder.iterdir()):
            parsed = layout.parse_step_name(name)
            if parsed is None:
                if not name.startswith(".") and name not in ("fake.json",):
                    raise CrashError(f"{folder / name} has a final name, and is no step")
                continue
            parts = self._parts(folder / name)
            for part in parts:
                for entry in part.files:
                    wrong = layout.check_file(str(folder / name / entry.name), entry)
                    if wrong and (still or self._parts(folder / name) == parts):
                        raise CrashError(f"{folder / name}: {wrong}")
            if layout.covers(parts):
                found.add(parsed[1])
        return found

    @staticmethod
    def _parts(folder: Path) -> list[layout.Manifest]:
        try:
            return layout.read_parts(str(folder))
        except FileNotFoundError:  # removed by the rule of keeping meanwhile
            return []

    # A round

    def kill(self, kind: str) -> None:
        """kill -9, all of them at once."""
        known = self.worker() if "worker" in kind or kind == "all" else None
        if kind in ("trainer", "worker and trainer", "all"):
            for trainer in self.trainers:
                trainer.send_signal(signal.SIGKILL)
        if known is not None:
            _kill(known)
        if "daemon" in kind or kind == "all":
            assert self.daemon is not None
            self.daemon.kill()
            self.daemon.wait()
            self.daemon = None
        if kind in ("trainer", "worker and trainer", "all"):
            self._bury()

    def _bury(self) -> None:
        for trainer in self.trainers:
            trainer.wait()
            assert trainer.stdout is not None
            trainer.stdout.close()
        self.trainers = []

    def round(self) -> None:
        """Run for a moment, kill, look at what is there, start again, load and compare."""
        kind = self.chance.choice(KINDS)
        until = time.monotonic() + self.chance.uniform(0.0, 0.6)
        while time.monotonic() < until:
            self.drink()
            time.sleep(0.005)
        before = self.complete(self.cache, still=False)
        self.kill(kind)
        self.report.kills[kind] += 1
        told = self.told()
        after = self.complete(self.cache, still=kind == "all")
        self._nothing_lost(before, after)
        if self.daemon is None:
            self.start()
        step, life = self.look()
        self._newest(told, step, life)
        if self.destination:
            self.report.flushed += len(self.complete(self.destination, still=False))
        if not self.trainers:
            self.train(step)
        self.worker()
        self.report.rounds += 1
        self.report.last = step

    def _nothing_lost(self, before: set[int], after: set[int]) -> None:
        newest = sorted(before | after)[-KEEP:]
        lost = [step for step in newest if step in before and step not in after]
        if lost:
            raise CrashError(f"complete and lost: {lost}; there were {before}, there are {after}")

    def _newest(self, told: dict[int, int], step: int, life: int) -> None:
        newest = max(told, default=0)
        if step < newest:
            raise CrashError(f"load() gave step {step}, and {newest} was called saved")
        if life < told.get(step, 0):
            raise CrashError(
                f"load() gave step {step} of life {life}, and that of {told[step]} was called saved"
            )

    def run(self, rounds: int) -> Report:
        """The soak. Raises CrashError when the rule is broken."""
        began = time.monotonic()
        self.start()
        self.train(0)
        for number in range(rounds):
            try:
                self.round()
            except CrashError as error:
                raise CrashError(f"round {number}: {error}") from error
        self.report.saved = len(self.told())
        self.report.seconds = time.monotonic() - began
        return self.report

    def stop(self) -> None:
        """End what was started here."""
        self.worker()
        for trainer in self.trainers:
            trainer.kill()
        self._bury()
        if self.daemon is not None:
            self.daemon.kill()
            self.daemon.wait()
        self.worker()
        for known in self._workers:
            _kill(known)


def _kill(known: tuple[int, str]) -> None:
    with contextlib.suppress(OSError):  # it is gone already
        worker.signal_exactly(*known, signal.SIGKILL)


@contextlib.contextmanager
def a_job(folder: Path, seed: int, *, flush: bool):  # type: ignore[no-untyped-def]
    """A job that is ended whatever happens."""
    job = Job(folder, seed, flush=flush)
    try:
        yield job
    finally:
        job.stop()


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--folder", default="/var/tmp", help="where all of it happens")
    parser.add_argument("--flush", action="store_true", help="only with a destination")
    asked = parser.parse_args(argv)
    ways = (True,) if asked.flush else (False, True)
    print(f"seed {asked.seed}", flush=True)
    rows = []
    for flush in ways:
        folder = Path(tempfile.mkdtemp(dir=asked.folder, prefix="crater-crash-"))
        with a_job(folder, asked.seed, flush=flush) as job:
            found = job.run(asked.rounds // len(ways))
        rows.append(_row(found, flush))
        shutil.rmtree(folder)  # kept where the rule was broken
    show(
        f"Killed and loaded again (`python bench/crash.py --rounds {asked.rounds} --seed "
        f"{asked.seed}`)",
        ["flush", "rounds", *KINDS, "steps saved", "read at the destination", "s"],
        rows,
    )


def _row(found: Report, flush: bool) -> list[str]:
    kills = [str(found.kills[kind]) for kind in KINDS]
    return [
        "to a path" if flush else "none", str(found.rounds), *kills, f"{found.saved:,}",
        f"{found.flushed:,}" if flush else "", f"{found.seconds:.0f}",
    ]  # fmt: skip


if __name__ == "__main__":
    main()
