"""``crater checkpoints``: folders, URLs, and jobs through a daemon with a real worker."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoint_samples import MIB, content, make_step
from checkpoint_worker import Trainer
from node_fakes import USER, wait_for
from s3_server import KEY, SECRET, Server
from test_node_metrics import text
from worker_fakes import Node as Fake

from crater_slurm.errors import CraterError, UnavailableError
from crater_slurm.job.wire import Channel
from crater_slurm.node import ask
from crater_slurm.node.jobs import ENDED
from crater_slurm.node.questions import Questions
from crater_slurm.node.request import Answer, Peer, Request
from crater_slurm.node.server import Server as Hooks
from crater_slurm.node.worker import Launcher
from crater_slurm.node.workers import Workers

TREE = Path(__file__).parents[2]
root = pytest.mark.skipif(os.geteuid() != 0, reason="starts workers")


def crater(*arguments: object, code: int = 0, **environ: str) -> str:
    """What the command prints; with another exit code what it says of the error."""
    done = subprocess.run(
        [sys.executable, "-m", "crater_slurm.cli", *map(str, arguments)],
        capture_output=True, text=True, cwd=TREE, timeout=120, check=False,
        env={**os.environ, "CRATER_CONFIG": "", **environ},
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout if code == 0 or not done.stderr else done.stderr


def read(*arguments: object, **environ: str) -> Any:
    return json.loads(crater(*arguments, "--json", **environ))


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Step 10 whole of two nodes, step 20 half."""
    make_step(tmp_path / "ckpt", 10, {0: 9 * MIB, 1: 3}, world=4)
    make_step(tmp_path / "ckpt", 10, {2: MIB, 3: 0}, world=4, node="n2")
    make_step(tmp_path / "ckpt", 20, {0: 5}, world=2)
    return tmp_path / "ckpt"


def test_a_folder_is_listed_with_what_is_complete(place: Path) -> None:
    found = read("checkpoints", "list", place)["steps"]
    assert [(s["step"], s["complete"], s["ranks"], s["world"], s["parts"]) for s in found] == [
        (20, False, 1, 2, 1), (10, True, 4, 4, 2),
    ]  # fmt: skip
    lines = crater("checkpoints", "list", place).splitlines()
    assert lines[0].split() == ["STEP", "SIZE", "AGE", "RUN", "RANKS", "PARTS", "STATE"]
    assert "incomplete" in lines[1] and "4/4" in lines[2]


def test_a_step_is_shown_with_its_files_and_the_newest_complete_one_unless_named(
    place: Path,
) -> None:
    (one,) = read("checkpoints", "show", place)[str(place)]
    assert one["step"] == 10
    assert [(f["file"], f["rank"], f["node"]) for f in one["files"]][2] == (
        "rank-00002.safetensors", 2, "n2",
    )  # fmt: skip
    assert [m["manifest"] for m in one["manifests"]] == [
        "manifest-00000.json",
        "manifest-00002.json",
    ]
    assert "incomplete" in crater("checkpoints", "show", place, 20)
    said = crater("checkpoints", "show", place, 30, code=1)
    assert "no step 30" in said and "crater checkpoints list" in said


def test_damage_is_found_by_the_checksums_and_told_by_the_exit_code(place: Path) -> None:
    assert "all bytes agree" in crater("checkpoints", "verify", place, 10)
    with (place / "step-000000010/rank-00000.safetensors").open("r+b") as file:
        file.seek(8 * MIB + 5)
        file.write(b"xx")
    (place / "step-000000010/rank-00001.safetensors").write_bytes(b"short")
    said = crater("checkpoints", "verify", place, 10, code=1)
    assert "rank-00000.safetensors is damaged between byte 8388608 and 9437184" in said
    assert "rank-00001.safetensors has 5 bytes, its manifest says 3 bytes" in said


def test_a_step_is_copied_into_another_folder_whole_or_not_at_all(
    place: Path, tmp_path: Path
) -> None:
    found = read("checkpoints", "restore", place, "--to", tmp_path / "here")
    assert found["folder"] == str(tmp_path / "here/step-000000010")
    assert content(found["folder"]) == content(place / "step-000000010")
    assert "not complete" in crater("checkpoints", "restore", place, 20, "--to", tmp_path, code=1)
    assert "--to FOLDER" in crater("checkpoints", "restore", place, code=2)


def test_what_a_job_left_in_a_folder_is_flushed_by_who_names_it(
    place: Path, tmp_path: Path
) -> None:
    found = read("checkpoints", "flush", place, "--to", tmp_path / "away")["steps"]
    assert {(s["step"], s["state"]) for s in found} == {(10, "flushed"), (20, "flushed")}
    assert content(tmp_path / "away/step-000000010") == content(place / "step-000000010")
    assert "--to" in crater("checkpoints", "flush", place, code=2)
    (tmp_path / "none").mkdir()
    said = crater("checkpoints", "flush", tmp_path / "none", "--to", tmp_path / "away", code=1)
    assert "has no checkpoints" in said


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("list", "/nowhere"), 2, "name a job id, a folder with checkpoints, or a URL"),
        (("list", "ftp://x/y"), 2, "neither an absolute path nor a URL"),
        (("list",), 2, "name a job, a folder or a URL"),
        (("flush", "7", "--to", "/x"), 2, "a job has its own destination"),
        (("list", "7"), 5, "does not answer at"),
        (("show", "s3://bucket/x"), 1, "no profile 'default'"),
    ],
)
def test_what_is_wrong_is_said_with_a_way_out(
    tmp_path: Path, arguments: tuple[str, ...], code: int, said: str
) -> None:
    config = tmp_path / "crater.yaml"
    config.write_text(json.dumps({"node": {"socket": str(tmp_path / "no.sock")}}))
    environ = {"CRATER_CONFIG": str(config), "HOME": str(tmp_path), "SLURM_JOB_ID": ""}
    assert said in crater("checkpoints", *arguments, code=code, **environ)


def test_a_url_is_read_with_the_user_s_own_keys_which_are_never_shown(
    s3: Server, place: Path, tmp_path: Path
) -> None:
    bucket = s3.bucket()
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws/credentials").write_text(
        f"[work]\naws_access_key_id={KEY}\naws_secret_access_key={SECRET}\n"
        f"endpoint_url={s3.endpoint}\nregion=us-east-1\n"
    )
    keys = ("--profile", "work")
    url, home = f"s3://{bucket}/ada", {"HOME": str(tmp_path)}
    said = crater("checkpoints", "flush", place, "--to", url, *keys, **home)
    said += crater("checkpoints", "list", url, *keys, **home)
    said += crater("checkpoints", "show", url, 10, *keys, **home)
    said += crater("checkpoints", "verify", url, *keys, "--json", **home)
    found = read("checkpoints", "restore", url, "--to", tmp_path / "back", *keys, **home)
    assert content(found["folder"]) == content(place / "step-000000010")
    said += crater("checkpoints", "list", f"s3://{bucket}x/ada", *keys, code=1, **home)
    assert SECRET not in said and KEY not in said


class Node(Fake):
    """A daemon with real workers and the hooks' socket."""

    def start(self) -> None:
        super().start()
        self.rings.stop()
        self.workers.stop()
        self.workers = Workers(self.services, Launcher(scope=False))
        self.rings = type(self.rings)(self.services, self.workers, timeout=1.0)
        self.workers.start()
        self.rings.start()
        self.questions = Questions(self.services, self.workers)
        self.hooks = Hooks(self.settings.node.socket, self.questions.answer)
        self.hooks.start()
        (self.folder / "crater.yaml").write_text(
            json.dumps({"node": {"socket": str(self.settings.node.socket)}})
        )

    def stop(self) -> None:
        self.hooks.stop()
        super().stop()

    @property
    def environ(self) -> dict[str, str]:
        return {"CRATER_CONFIG": str(self.folder / "crater.yaml")}

    # What a Trainer of the tests wants of a daemon.

    @property
    def spec(self) -> Any:
        return type("Spec", (), {"job_id": "7", "run": "7.0"})

    def lane(self, opening: dict[str, Any], lane: int | None = None) -> Channel:
        channel = Channel.connect(str(self.folder / "run/ring.sock"))
        channel.send(opening)
        return channel


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path)
    yield made
    made.close()


def saved(node: Node, away: Path, *steps: int) -> dict[int, bytes]:
    """Job 7 has saved these, and they are flushed."""
    node.job(checkpoint=str(away))
    trainer = Trainer(node)  # type: ignore[arg-type]
    data = {step: os.urandom(500_000 + step) for step in steps}
    for step, some in data.items():
        trainer.saved(trainer.save(step, some))
        trainer.hear("flushed", step=step)
    trainer.close()
    return data


@root
def test_a_job_s_steps_with_where_they_are(node: Node, tmp_path: Path) -> None:
    away = tmp_path / "away"
    saved(node, away, 10, 20)
    shutil.rmtree(away / "step-000000010")
    found = read("checkpoints", "list", "7", **node.environ)
    assert [(s["step"], s["where"], s["state"], s["complete"]) for s in found["steps"]] == [
        (20, ["cache", "destination"], "flushed", True), (10, ["cache"], "flushed", True),
    ]  # fmt: skip
    shown = crater("checkpoints", "list", **node.environ, SLURM_JOB_ID="7")
    assert f"destination: {away}" in shown and "cache, destination" in shown
    both = read("checkpoints", "show", "7", "20", **node.environ)
    assert [len(both[where]) for where in ("cache", "destination")] == [1, 1]
    assert "no step 30" in crater("checkpoints", "show", "7", "30", code=1, **node.environ)


@root
def test_a_job_s_steps_are_verified_here_and_asked_for_there(node: Node, tmp_path: Path) -> None:
    away = tmp_path / "away"
    saved(node, away, 10)
    with (away / "step-000000010/rank-00000.safetensors").open("r+b") as file:
        file.write(b"xx")
    assert "all bytes agree" in crater("checkpoints", "verify", "7", **node.environ)
    said = crater("checkpoints", "verify", "7", "--destination", code=1, **node.environ)
    assert "is damaged between byte 0 and 500010" in said


@root
def test_a_job_s_step_comes_back_to_its_cache_and_into_a_folder(node: Node, tmp_path: Path) -> None:
    saved(node, tmp_path / "away", 10, 20)
    cache = Path(node.record().folders["checkpoint"])
    before = content(cache / "step-000000010")
    shutil.rmtree(cache / "step-000000010")
    found = read("checkpoints", "restore", "7", "10", **node.environ)
    assert (found["folder"], found["source"]) == (str(cache / "step-000000010"), "remote")
    assert content(found["folder"]) == before
    to = ("--to", tmp_path / "mine")
    found = read("checkpoints", "restore", "7", "20", *to, **node.environ)
    assert content(found["folder"]) == content(cache / "step-000000020")
    assert "no step 30" in crater("checkpoints", "restore", "7", "30", code=1, **node.environ)


@root
def test_a_flush_that_fails_is_told_and_one_asked_for_again_is_waited_for(
    node: Node, tmp_path: Path
) -> None:
    away = tmp_path / "away"
    away.write_text("in the way")
    node.job(checkpoint=str(away / "ckpt"))
    trainer = Trainer(node)  # type: ignore[arg-type]
    trainer.saved(trainer.save(10, b"x" * 5000))
    said = crater("checkpoints", "flush", "7", code=1, **node.environ)
    assert "no folder is in the way" in said and "next try at" in said
    (row,) = read("checkpoints", "list", "7", **node.environ)["steps"]
    assert row["since"] > 0 and row["where"] == ["cache"]
    away.unlink()
    away.mkdir()
    said = crater("checkpoints", "flush", "7", **node.environ)
    assert f"all of job 7 on this node is at {away}/ckpt" in said
    assert (away / "ckpt/step-000000010/manifest-00000.json").exists()


@root
def test_a_worker_is_started_for_a_job_that_has_ended(node: Node, tmp_path: Path) -> None:
    saved(node, tmp_path / "away", 10)
    with node.services.store.exclusive("7"):
        record = node.record()
        record.phase = ENDED
        node.services.store.save(record)
    node.workers.wake()
    assert wait_for(lambda: node.record().checkpoints.get("done") is True, 20)
    assert wait_for(lambda: node.workers.count() == 0, 20)
    (row,) = read("checkpoints", "list", "7", **node.environ)["steps"]
    assert row["where"] == ["cache", "destination"]
    assert wait_for(lambda: node.workers.count() == 0, 20), "it goes again"


@root
def test_a_real_flush_and_restore_are_on_the_metrics_page(node: Node, tmp_path: Path) -> None:
    data = saved(node, tmp_path / "away", 10)
    shutil.rmtree(Path(node.record().folders["checkpoint"]) / "step-000000010")
    read("checkpoints", "restore", "7", "10", **node.environ)
    size = float(len(data[10]))
    lines = [
        f'crater_io_daemon_checkpoint_bytes_total{{stage="{stage}"}} {size}'
        for stage in ("drain", "flush", "restore")
    ]
    lines += [
        'crater_io_daemon_checkpoints_total{result="flushed"} 1.0',
        'crater_io_daemon_checkpoints_total{result="restored"} 1.0',
        'crater_io_daemon_checkpoint_seconds_count{stage="flush"} 1.0',
        "crater_io_daemon_flush_pending_steps 0.0",
        "crater_io_daemon_cache_hit_ratio 0.0",
    ]
    assert wait_for(lambda: all(line in text(node.services) for line in lines), 20)
    assert node.record().checkpoints["unflushed"] == 0


def asked(node: Node, uid: int, question: object, job: str = "7") -> Answer:
    env = {"SLURM_JOB_ID": job, "CRATER_QUESTION": json.dumps(question)}
    return node.questions.answer(Request("checkpoints", env, Peer(1, uid, uid)))


@root
def test_only_root_and_the_job_s_user_are_answered(open_path: Path) -> None:
    node = Node(open_path, uid=USER)
    try:
        node.job(checkpoint="on")
        assert asked(node, USER, {"op": "list"}).status == "ok"
        assert asked(node, 0, {"op": "list"}).status == "ok"
        refused = asked(node, USER + 1, {"op": "list"})
        assert (refused.status, refused.lines) == ("error", [])
        assert "another user's" in refused.logs[0]
    finally:
        node.close()


@root
@pytest.mark.parametrize(
    "question",
    [None, [], {"op": "ended"}, {"op": "spec", "spec": "x"}, {"op": "onward"}, {"op": ["list"]},
     {"op": "show", "step": "1"}, {"op": "show", "step": True}, {"op": "list", "name": "x" * 3000}],
)  # fmt: skip
def test_a_question_of_another_kind_never_reaches_a_worker(node: Node, question: object) -> None:
    node.job()
    assert asked(node, 0, question).status == "error"
    assert node.workers.count() == 0


@root
def test_a_job_that_is_not_here_is_said_so(node: Node) -> None:
    assert "nothing on this node" in asked(node, 0, {"op": "list"}, "99").logs[0]
    with pytest.raises(CraterError, match="job 99: couldn't find job 99"):
        ask.ask(node.settings.node.socket, "99", {"op": "list"})
    with pytest.raises(UnavailableError, match="Run this on a node of the job"):
        ask.ask(node.folder / "no.sock", "7", {"op": "list"})
