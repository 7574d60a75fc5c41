"""Workers over the life of jobs and daemons: started, found again, replaced, settled, requeued."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import stat
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from node_fakes import USER, wait_for
from worker_fakes import Node, answer, command, saved, tell

from crater_slurm.config.checkpoints import Remote
from crater_slurm.job.wire import WireError
from crater_slurm.node import checkpoints_state, epilog, upkeep, worker
from crater_slurm.node.jobs import ENDED
from crater_slurm.node.request import Answer
from crater_slurm.node.worker import Launcher, WorkerError
from crater_slurm.node.worker_mail import Mail, Slot

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="starts workers of other users")


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path)
    yield made
    made.close()


def end(node: Node, job_id: str = "7") -> None:
    """The job's Epilog."""
    done = Answer()
    with node.services.store.exclusive(job_id):
        epilog.end(node.services, node.record(job_id), done)
    node.workers.wake()


def pid_of(node: Node) -> int:
    return int(node.record().checkpoints["worker"]["pid"])


def gone(pid: int) -> bool:
    return wait_for(lambda: not worker.birth(pid))


def folder(node: Node) -> Path:
    return node.folder / "cache/checkpoint/c1/7"


def test_a_worker_becomes_the_job_s_user_and_its_socket_stays_root_s(open_path: Path) -> None:
    node = Node(open_path, uid=USER)
    node.job(checkpoint="on")
    node.workers.wake()
    assert wait_for(lambda: "worker" in node.record().checkpoints)
    pid = pid_of(node)
    status = Path(f"/proc/{pid}/status")
    assert wait_for(lambda: f"Uid:\t{USER}\t{USER}" in status.read_text())
    workers = node.folder / "run/workers"
    assert stat.S_IMODE(workers.stat().st_mode) == 0o700
    assert os.getsid(pid) == pid
    environ = Path(f"/proc/{pid}/environ").read_bytes()
    assert {e.split(b"=")[0] for e in environ.split(b"\0") if e} <= {
        b"PATH", b"LC_ALL", b"HOME", b"TZ", b"http_proxy", b"https_proxy", b"no_proxy",
        b"HTTP_PROXY", b"HTTPS_PROXY", b"NO_PROXY", b"SSL_CERT_FILE", b"SSL_CERT_DIR",
    }  # fmt: skip
    node.stop()
    os.kill(pid, signal.SIGKILL)


def test_a_job_that_never_saves_costs_no_process(node: Node) -> None:
    node.job()
    node.workers.round()
    assert not node.record().checkpoints
    end(node)
    assert not folder(node).exists()


def test_a_job_with_a_destination_has_its_worker_from_the_start(node: Node) -> None:
    node.job(checkpoint="/project/%u/%j")
    node.workers.wake()
    assert wait_for(lambda: node.record().checkpoints.get("destination") == "/project/root/7")
    assert wait_for(lambda: "steps" in node.record().checkpoints)


def test_a_new_daemon_finds_the_worker_of_the_last_one(node: Node) -> None:
    node.job()
    trainer = node.open()
    first = answer(trainer)["pid"]
    tell(trainer, "save", step=5)
    assert saved(node, 1)
    node.stop()
    assert tell(trainer, "save", step=6)["op"] == "did", "the worker works on without a daemon"
    node.start()
    assert saved(node, 2)
    assert answer(node.open())["pid"] == first


@pytest.mark.parametrize("before", [False, True])
def test_a_worker_that_no_daemon_has_noted_is_not_taken_over(node: Node, before: bool) -> None:
    """The daemon was killed after it had started the worker; a worker ``before`` is dead too."""
    node.job()
    if before:
        os.kill(int(str(answer(node.open())["pid"])), signal.SIGKILL)
    node.stop()
    orphan = worker.launch(node.launcher, "7", node.folder / "run/workers")
    orphan.channel.close()
    node.start()
    assert wait_for(lambda: answer(node.open())["pid"] == pid_of(node) != orphan.pid)
    assert worker.birth(pid_of(node)) == node.record().checkpoints["worker"]["born"]
    assert orphan.process is not None
    orphan.process.kill()
    orphan.process.wait()


def test_a_worker_that_dies_is_started_anew_and_says_what_was_safe(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    node.job()
    trainer = node.open()
    first = answer(trainer)["pid"]
    tell(trainer, "save", step=5)
    assert saved(node, 1)
    trainer.send({"op": "die"})
    with pytest.raises(WireError):
        answer(trainer)
    assert wait_for(lambda: node.record().checkpoints["worker"]["pid"] != first)
    assert answer(node.open())["pid"] == pid_of(node)
    assert saved(node, 1)
    assert "lost its worker: Traceback | Boom: it broke" in caplog.text


def test_workers_that_die_at_once_are_waited_for_longer_and_longer(node: Node) -> None:
    now = [0.0]
    node.workers._clock = lambda: now[0]
    node.workers._loop.stop()  # else it would start them too, at moments of its own
    node.launcher.command = lambda number: ["/bin/sh", "-c", "echo no luck >&2; exit 3"]
    node.job()
    starts = []
    slot = node.workers._slot("7")
    for _ in range(200):
        before = slot.failures
        with contextlib.suppress(WorkerError):
            node.workers.hand_over(node.record(), {"op": "lane"}, ())
        if wait_for(lambda: slot.worker is None and not slot.lock.locked()):
            if slot.failures > before:
                starts.append(now[0])
            now[0] += 5.0
    gaps = [b - a for a, b in itertools.pairwise(starts)]
    assert len(starts) <= 12, "200 attempts within 1000 s"
    assert gaps == sorted(gaps)
    assert gaps[-1] >= 160


def test_epilog_returns_while_a_slow_destination_is_flushed(node: Node) -> None:
    node.job(checkpoint="/slow/place")
    trainer = node.open()
    answer(trainer)
    tell(trainer, "save", step=5)
    assert saved(node, 1)
    (folder(node) / "slow").touch()
    end(node)
    assert node.record().phase == ENDED
    assert not (node.folder / "cache/temp/c1/7").exists()
    assert (folder(node) / "fake.json").exists()
    assert not checkpoints_state.safe_to_remove(node.record())
    upkeep.tidy(node.services)
    assert folder(node).exists()
    pid = pid_of(node)
    trainer.send({"op": "flush"})  # the destination has got it
    assert gone(pid)
    assert wait_for(lambda: checkpoints_state.safe_to_remove(node.record()))
    assert folder(node).exists(), "a copy at hand until it is old or the space is needed"
    assert wait_for(lambda: not (node.folder / "run/workers/7.sock").exists())


def test_a_daemon_that_starts_flushes_what_an_ended_job_left(node: Node) -> None:
    node.job(checkpoint="/slow/place")
    trainer = node.open()
    first = answer(trainer)["pid"]
    tell(trainer, "save", step=5)
    assert saved(node, 1)
    (folder(node) / "slow").touch()
    node.stop()
    os.kill(int(str(first)), signal.SIGKILL)
    end(node)
    assert gone(int(str(first)))
    node.start()
    assert wait_for(lambda: node.record().checkpoints["worker"]["pid"] != first)
    assert wait_for(lambda: checkpoints_state.unflushed(node.record()) == 1)
    assert wait_for(lambda: not node.record().checkpoints["done"])


def test_without_a_destination_the_end_of_a_job_ends_its_worker_and_its_folder(node: Node) -> None:
    node.job()
    trainer = node.open()
    pid = answer(trainer)["pid"]
    tell(trainer, "save", step=5)
    assert saved(node, 1)
    end(node)
    assert gone(int(str(pid)))
    assert wait_for(lambda: not folder(node).exists())
    assert node.record().folders == {}


def test_a_restarted_job_gets_a_worker_of_its_own_run(node: Node) -> None:
    node.job(checkpoint="/slow/place")
    trainer = node.open()
    first = answer(trainer)
    tell(trainer, "save", step=5)
    assert saved(node, 1)
    (folder(node) / "slow").touch()
    end(node)
    before = node.record()
    again = node.job(restarts=1, checkpoint="/slow/place")
    again.checkpoints = checkpoints_state.begin(again, before)
    node.services.store.save(again)
    second = answer(node.open())
    assert second["run"] == "7.1"
    assert second["restore"] is True
    assert first["restore"] is False
    assert gone(int(str(first["pid"]))), "two workers never share a folder"
    assert saved(node, 1)


def test_a_worker_that_reads_nothing_is_replaced(node: Node) -> None:
    node.job()
    trainer = node.open()
    first = answer(trainer)["pid"]
    trainer.send({"op": "deaf"})
    os.kill(int(str(first)), signal.SIGSTOP)
    slot = node.workers._slot("7")
    assert slot.worker is not None
    slot.worker.channel.socket.settimeout(0.2)
    big = {"op": "noise", "text": "x" * 50000}
    with contextlib.suppress(WorkerError):
        for _ in range(100):
            slot.worker.send(big)
    assert wait_for(lambda: slot.worker is None or pid_of(node) != first, 15)
    assert answer(node.open())["pid"] != first
    assert gone(int(str(first)))


@pytest.mark.parametrize(
    "raw",
    [
        "x", "{}", "[]", '{"op":"state"}', '{"op":"state","steps":5,"counters":[]}',
        '{"op":"state","steps":[{"step":{}},{"step":1,"name":[]}],"done":"yes"}',
        '{"op":"answer","id":{"a":1}}', '{"op":"log","level":[],"text":{}}', '{"op":"what"}',
        '{"op":"state","steps":[[[[[[[[1]]]]]]]]}',
    ],
)  # fmt: skip
def test_a_hostile_worker_harms_its_own_job_only(node: Node, raw: str) -> None:
    node.job()
    node.job("8")
    trainer = node.open()
    answer(trainer)
    tell(trainer, "tell", raw=raw)
    assert not node.record("7").checkpoints.get("done")
    node.trainer(os.getpid(), 0, "job_8")
    assert answer(node.open("8"))["op"] == "lane"
    assert wait_for(lambda: node.record("8").checkpoints.get("steps") == [])
    node.services.store.get("8")


def test_a_question_is_answered_by_the_job_s_worker(node: Node) -> None:
    node.job()
    trainer = node.open()
    answer(trainer)
    tell(trainer, "save", step=5)
    assert node.workers.ask("7", {"op": "status"}, 5)["steps"] == ["5"]
    with pytest.raises(WorkerError, match="no checkpoints on this node"):
        node.workers.ask("8", {"op": "status"}, 5)


def requeue_script(node: Node, body: str) -> Path:
    bin_dir = node.folder / "bin"
    bin_dir.mkdir()
    (bin_dir / "scontrol").write_text(f"#!/bin/sh\n{body}\n")
    (bin_dir / "scontrol").chmod(0o755)
    slurm = node.settings.slurm.model_copy(update={"bin_dir": bin_dir})
    node.services.settings = node.settings.model_copy(update={"slurm": slurm})
    return node.folder / "asked"


def test_a_job_is_requeued_as_its_user_and_its_checkpoints_wait_for_it(node: Node) -> None:
    asked = requeue_script(node, f'echo "$(id -u) $*" > {node.folder}/asked')
    node.job()
    trainer = node.open()
    answer(trainer)
    tell(trainer, "save", step=5)
    trainer.send({"op": "requeue", "reason": "time is up"})
    assert answer(trainer) == {"op": "requeued", "ok": True, "error": ""}
    assert asked.read_text() == "0 requeue 7\n"
    end(node)
    assert wait_for(lambda: checkpoints_state.safe_to_remove(node.record()))
    assert (folder(node) / "fake.json").exists()


def test_a_job_is_not_requeued_beyond_the_site_s_limit(node: Node) -> None:
    asked = requeue_script(node, f"touch {node.folder}/asked")
    node.job(restarts=10)
    trainer = node.open()
    answer(trainer)
    trainer.send({"op": "requeue", "reason": ""})
    said = answer(trainer)
    assert said["ok"] is False
    assert "allows 10" in str(said["error"])
    assert not asked.exists()


def test_slurm_s_own_refusal_of_a_requeue_is_told(node: Node) -> None:
    requeue_script(node, "echo 'Requested operation is presently disabled' >&2; exit 1")
    node.job()
    trainer = node.open()
    answer(trainer)
    trainer.send({"op": "requeue", "reason": ""})
    assert "presently disabled" in str(answer(trainer)["error"])
    assert node.record().checkpoints["requeue"] is False


def test_a_scope_that_systemd_does_not_give_is_done_without(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "systemd-run").write_text("#!/bin/sh\necho no bus >&2\nexit 1\n")
    (tmp_path / "systemd-run").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    node.workers._launcher = Launcher(scope=True, command=command)
    node.job(checkpoint="on")
    node.workers.wake()
    assert wait_for(lambda: "steps" in node.record().checkpoints)
    assert node.workers._launcher.scope is False


def test_a_broken_credentials_file_leaves_the_steps_unsafe_and_says_why(node: Node) -> None:
    keys = node.folder / "keys"
    keys.write_text("access_key_id = a\nsecret_access_key = b\n")
    keys.chmod(0o644)
    store = Remote(name="main", url="s3://site", credentials_file=keys)
    checkpoints = node.settings.node.checkpoints.model_copy(update={"remotes": (store,)})
    changed = node.settings.node.model_copy(update={"checkpoints": checkpoints})
    node.services.settings = node.settings.model_copy(update={"node": changed})
    node.job(checkpoint="s3://site/root/run")
    trainer = node.open()
    answer(trainer)
    tell(trainer, "save", step=5)
    assert saved(node, 1)
    known = node.record().checkpoints
    assert known["destination"] == "s3://site/root/run"
    assert "others may read it" in known["problem"]
    assert "access_key" not in (node.folder / "state/jobs/7.json").read_text()
    end(node)
    assert wait_for(lambda: node.record().checkpoints["done"])
    assert not checkpoints_state.safe_to_remove(node.record())
    assert checkpoints_state.unflushed(node.record()) == 1
    # The admin has mended it, and the daemon's next attempt finds the way.
    keys.chmod(0o600)
    (folder(node) / "slow").touch()
    assert wait_for(lambda: node.record().checkpoints["unreachable"] is False, 10)
    assert wait_for(lambda: node.record().checkpoints["done"] is False)


class Told:
    """The spool: what the scheduler would be sent."""

    def __init__(self) -> None:
        self.reports: list[dict[str, Any]] = []
        self.full = False

    def send(self, report: dict[str, Any]) -> None:
        self.reports.append(report)

    def keep(self, report: dict[str, Any]) -> bool:
        if not self.full:
            self.reports.append(report)
        return not self.full

    def steps(self) -> list[int]:
        return [r["grant"]["step"] for r in self.reports if r["phase"] == "flushed"]


def test_each_step_that_arrives_is_told_once_also_over_a_new_daemon(node: Node) -> None:
    told = Told()
    node.services.spool = told  # type: ignore[assignment]
    node.job(checkpoint=str(node.folder / "away"))
    trainer = node.open()
    answer(trainer)
    tell(trainer, "save", step=5)
    assert saved(node, 1)
    assert told.steps() == []
    tell(trainer, "flush")
    assert wait_for(lambda: told.steps() == [5])
    (report,) = [r for r in told.reports if r["phase"] == "flushed"]
    assert (report["job_id"], report["node"]) == ("7", "n1")
    assert report["grant"]["destination"] == str(node.folder / "away")
    assert (report["grant"]["ranks"], report["grant"]["world"]) == (1, 1)
    # A daemon that ends between telling and noting it tells once more: better twice than never.
    noted = node.settings.node.state_dir / "jobs/7.json"
    assert wait_for(lambda: "step/5/7.0" in noted.read_text())
    node.stop()
    node.start()
    node.services.spool = told  # type: ignore[assignment]
    assert wait_for(lambda: node.workers.count() == 1)
    tell(trainer, "save", step=6)
    tell(trainer, "flush")
    assert wait_for(lambda: told.steps() == [5, 6])
    end(node)
    assert wait_for(lambda: node.record().checkpoints.get("done"))
    assert told.steps() == [5, 6]


def test_a_worker_that_makes_up_steps_is_not_told_of_without_end(node: Node) -> None:
    told, now = Told(), [0.0]
    node.services.spool = told  # type: ignore[assignment]
    record = node.job(checkpoint=str(node.folder / "away"))
    record.checkpoints = {"destination": "/p"}
    mail, slot = Mail(node.services, lambda: now[0]), Slot()

    def says(first: int, last: int) -> None:
        steps = [
            {"name": "step", "step": n, "run": "7.0", "flushed": True, "arrived": 1, "world": 1}
            for n in range(first, last)
        ]
        sender = SimpleNamespace(job_id="7", run="7.0")
        mail.receive(sender, slot, {"op": "state", "steps": steps})  # type: ignore[arg-type]

    told.full = True
    says(0, 40)
    told.full = False
    assert told.steps() == [], "what can't be kept is not told, and told once it can be"
    says(0, 41)
    assert told.steps() == list(range(30))
    says(1000, 1064)
    assert len(told.steps()) == 30
    now[0] += 60
    mail.tell("7", slot)
    assert told.steps()[30:] == list(range(1000, 1010))
    says(1000, 1064)
    assert len(told.steps()) == 40
