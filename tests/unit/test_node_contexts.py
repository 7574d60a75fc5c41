"""Prolog, TaskProlog and Epilog as Slurm calls them: in order, twice, and without each other."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
from node_fakes import ROOT, USER, FakeTree, ask, make_proc, make_sys, settings, signed

from crater_slurm.node import cache, upkeep, worker_spec
from crater_slurm.node.request import Answer, Peer
from crater_slurm.node.server import dispatch
from crater_slurm.node.services import Roots, Services

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="changes owners, so it needs root")

TASK = Peer(4242, USER, USER)
KINDS = ("checkpoint", "dataset", "temp")


class Reports(list):
    def send(self, report) -> None:
        self.append(report)

    @property
    def phases(self) -> list[str]:
        return [report["phase"] for report in self]


class Node:
    """A node with two NUMA nodes, whose hooks are called like functions."""

    def __init__(self, folder: Path, **node) -> None:
        self.folder = folder
        self.settings = settings(folder, memory_reserve_mib=0, **node)
        self.tree = FakeTree(folder / "cgroup")
        make_sys(folder / "sys", {0: ("0-3", 2048), 1: ("4-7", 2048)})
        self.task_at("/user.slice")
        self.reports = Reports()
        self.start()

    def start(self) -> None:
        self.services = Services(self.settings, Roots(self.folder / "proc", self.folder / "sys"))
        self.services.spool = self.reports
        self.services.tree = self.tree
        self.services.binder._tree = self.tree
        upkeep.recover(self.services)

    def task_at(self, cgroup: str, cpus: str = "0-3", uid: int = USER) -> None:
        make_proc(self.folder / "proc", TASK.pid, uid, cpus, cgroup)

    def hook(self, operation: str, peer: Peer = ROOT, **env) -> Answer:
        answer = dispatch(self.services, ask(operation, peer, **env))
        for work in answer.afterwards:
            work()
        return answer

    def prolog(self, comment: str | None = None, **env) -> Answer:
        return self.hook("prolog", SLURM_JOB_COMMENT=comment or signed(numa="strict"), **env)

    def record(self, job_id: str = "7"):
        return self.services.store.get(job_id)

    def cache_path(self, kind: str, job_id: str = "7") -> Path:
        return self.folder / "cache" / kind / "c1" / job_id

    def marks(self) -> list[str]:
        return sorted(p.name for p in (self.folder / "run/jobs").iterdir())


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_one_job_from_prolog_to_epilog(node: Node) -> None:
    answer = node.prolog(SLURM_JOB_GPUS="2,3")
    assert (answer.status, answer.exit, answer.logs) == ("ok", 0, [])
    assert all(node.cache_path(kind).is_dir() for kind in KINDS)
    assert node.marks() == ["7"]
    user = node.tree.run_job("job_7", 1000, "0-3")
    node.task_at("/system.slice/n1_slurmstepd.scope/job_7/step_batch/user/task_0")
    answer = node.hook("task_prolog", TASK, CUDA_VISIBLE_DEVICES="0,1")
    assert "export CRATER_CPU_LIST=0-3" in answer.lines
    assert "export CRATER_NUMA_NODE=0" in answer.lines
    assert "export CRATER_GPU_IDS_HOST=2,3" in answer.lines
    assert f"export CRATER_TMPDIR={node.cache_path('temp')}" in answer.lines
    assert node.tree.mems(user) == "0"
    assert node.record().grant["given"] == "hard"
    (user.parent.parent / "memory.numa_stat").write_text(f"anon N0={300 * 2**20} N1=0\n")
    assert node.hook("epilog").exit == 0
    assert not any(node.cache_path(kind).exists() for kind in KINDS)
    assert node.marks() == []
    assert node.record().grant["memory_mib"] == {"0": 300, "1": 0}
    assert node.reports.phases == ["prolog", "task", "epilog"]
    report = node.reports[-1]
    assert (report["job_id"], report["plan_id"], report["node"]) == ("7", "p1", "n1")
    assert (report["grant"]["given"], report["grant"]["numa_nodes"]) == ("hard", [0])


def test_the_last_sample_counts_when_the_cgroup_is_gone_by_epilog(node: Node) -> None:
    node.prolog()
    user = node.tree.run_job("job_7", 1000, "0-3")
    node.task_at("/system.slice/n1_slurmstepd.scope/job_7/step_batch/user/task_0")
    node.hook("task_prolog", TASK)
    stat = user.parent.parent / "memory.numa_stat"
    stat.write_text(f"anon N0={512 * 2**20} N1={2**20}\n")
    upkeep.watch_memory(node.services)
    stat.unlink()
    node.hook("epilog")
    assert node.record().grant["memory_mib"] == {"0": 512, "1": 1}


def test_a_job_without_a_plan_leaves_no_trace(node: Node) -> None:
    answer = node.prolog(comment="my own comment")
    assert answer.pairs() == [("status", "ok"), ("exit", "0")]
    assert node.record() is None
    assert node.marks() == []
    assert list((node.folder / "cache").iterdir()) == []
    assert node.hook("task_prolog", TASK).lines == []
    assert node.hook("epilog").status == "ok"
    assert node.reports == []


def test_a_site_may_want_every_job_prepared(tmp_path: Path) -> None:
    node = Node(tmp_path, environment_for_all=True)
    assert node.marks() == ["all"]
    node.prolog(comment="no plan here")
    lines = node.hook("task_prolog", TASK).lines
    assert f"export CRATER_TMPDIR={node.cache_path('temp')}" in lines
    assert "unset CRATER_PLAN_ID" in lines
    assert node.record().grant["given"] == "none" or node.record().grant["asked"] == "none"


def test_a_forged_plan_runs_as_a_job_without_one_and_is_reported(node: Node) -> None:
    answer = node.prolog(comment=signed(key=b"x" * 32))
    assert answer.exit == 0
    assert "plan ignored: the plan token is not signed" in answer.logs[0]
    assert not node.cache_path("temp").exists()
    lines = node.hook("task_prolog", TASK).lines
    assert lines == [
        "print crater: this job runs without its plan: "
        "the plan token is not signed with this cluster's plan key"
    ]
    assert node.hook("task_prolog", TASK).lines == [], "told once, not once per task"
    assert node.reports[0]["grant"]["plan_problem"].startswith("the plan token is not signed")


def test_a_copied_token_is_refused_even_after_a_restart_of_the_daemon(node: Node) -> None:
    comment = signed()
    node.prolog(comment)
    node.start()
    answer = node.prolog(comment, SLURM_JOB_ID="8")
    assert "copy of job 7's" in answer.logs[0]
    assert node.record("8").plan is None
    assert not node.cache_path("temp", "8").exists()
    assert node.prolog(comment).logs == [], "the first job keeps its plan"


def test_array_tasks_share_their_token(node: Node) -> None:
    comment = signed(array=True)
    node.prolog(comment)
    assert node.prolog(comment, SLURM_JOB_ID="8").logs == []
    assert node.record("8").plan is not None


def test_the_plans_gpu_count_never_beats_slurms(node: Node) -> None:
    node.prolog(signed(gpus=8), SLURM_JOB_GPUS="3")
    lines = node.hook("task_prolog", TASK, CUDA_VISIBLE_DEVICES="0").lines
    assert "export CRATER_GPU_IDS=0" in lines
    assert "export CRATER_GPU_IDS_HOST=3" in lines


# Twice, out of order, without each other


def test_a_second_prolog_of_a_running_job_takes_nothing_away(node: Node) -> None:
    node.prolog()
    for kind in KINDS:
        (node.cache_path(kind) / "file").write_text("x")
    node.hook("task_prolog", TASK)
    node.prolog()
    assert all((node.cache_path(kind) / "file").exists() for kind in KINDS)
    assert node.record().grant != {}


def test_a_requeue_on_the_same_node_keeps_checkpoints_and_clears_the_rest(node: Node) -> None:
    node.prolog()
    for kind in KINDS:
        (node.cache_path(kind) / "file").write_text("x")
    node.prolog(SLURM_JOB_RESTART_COUNT="1")
    assert [(node.cache_path(kind) / "file").exists() for kind in KINDS] == [True, False, False]


def test_a_requeue_after_an_epilog_finds_its_checkpoints_where_the_site_keeps_them(
    tmp_path: Path,
) -> None:
    node = Node(tmp_path, cache={"keep": "keep_checkpoints"})
    node.prolog()
    (node.cache_path("checkpoint") / "file").write_text("x")
    node.hook("epilog")
    node.prolog(SLURM_JOB_RESTART_COUNT="1")
    assert (node.cache_path("checkpoint") / "file").exists()


def test_a_new_job_with_an_old_id_finds_nothing_of_it(node: Node) -> None:
    node.prolog()
    (node.cache_path("checkpoint") / "file").write_text("x")
    node.hook("epilog")
    node.prolog(signed(user=USER, id="p2"))
    assert list(node.cache_path("checkpoint").iterdir()) == []


def test_a_lost_epilog_leaves_nothing_for_the_next_job_with_that_id(node: Node) -> None:
    node.prolog()
    (node.cache_path("checkpoint") / "file").write_text("x")
    node.prolog(signed(user=1000, id="p2"), SLURM_JOB_UID="1000", SLURM_JOB_GID="1000")
    assert list(node.cache_path("checkpoint").iterdir()) == []
    assert node.cache_path("checkpoint").stat().st_uid == 1000


def test_an_epilog_without_its_prolog_cleans_what_is_there(node: Node) -> None:
    node.prolog()
    (node.folder / "state/jobs/7.json").unlink()
    node.start()
    assert node.record() is None
    assert node.hook("epilog").status == "ok"
    assert not node.cache_path("temp").exists()


def test_a_second_epilog_reports_nothing_again(node: Node) -> None:
    node.prolog()
    node.hook("epilog")
    node.hook("epilog")
    assert node.reports.phases == ["prolog", "epilog"]


def test_a_daemon_restart_between_prolog_and_epilog_changes_nothing(node: Node) -> None:
    node.prolog()
    (node.folder / "run/jobs/7").unlink()  # systemd may clear /run with the service
    node.start()
    assert node.marks() == ["7"]
    assert f"export CRATER_TMPDIR={node.cache_path('temp')}" in node.hook("task_prolog", TASK).lines
    node.hook("epilog")
    assert not node.cache_path("temp").exists()


def test_after_a_reboot_earlier_jobs_have_ended(node: Node) -> None:
    node.prolog()
    (node.folder / "proc/sys/kernel/random/boot_id").write_text("boot-2\n")
    node.start()
    assert node.record().phase == "ended"
    assert not node.cache_path("temp").exists()
    assert node.marks() == []
    assert node.reports.phases == ["prolog", "epilog"]


def test_an_epilog_waits_for_the_prolog_that_it_overtakes(node: Node, monkeypatch) -> None:
    inside, go_on = threading.Event(), threading.Event()
    real = cache.Cache.prepare

    def slow(self, *args, **how):
        inside.set()
        go_on.wait(10)
        return real(self, *args, **how)

    monkeypatch.setattr(cache.Cache, "prepare", slow)
    first = threading.Thread(target=node.prolog)
    first.start()
    assert inside.wait(10)
    second = threading.Thread(target=node.hook, args=("epilog",))
    second.start()
    go_on.set()
    first.join(10)
    second.join(10)
    assert node.record().phase == "ended"
    assert not node.cache_path("temp").exists()


def test_a_task_prolog_after_the_epilog_gets_nothing(node: Node) -> None:
    node.prolog()
    node.hook("epilog")
    assert node.hook("task_prolog", TASK).lines == []


# Trust


@pytest.mark.parametrize("operation", ["prolog", "epilog"])
def test_users_are_not_obeyed(node: Node, operation: str) -> None:
    answer = node.hook(operation, TASK, SLURM_JOB_COMMENT=signed())
    assert answer.status == "error"
    assert answer.exit == 0
    assert answer.logs == [f"couldn't obey uid {USER}: only Slurm's own hooks may ask"]
    assert node.record() is None


@pytest.mark.parametrize("uid", [0, 1000])
def test_a_task_prolog_about_another_users_job_is_refused(node: Node, uid: int) -> None:
    node.prolog()
    answer = node.hook("task_prolog", Peer(TASK.pid, uid, uid))
    assert (answer.status, answer.lines) == ("error", [])


def test_a_recycled_pid_of_another_user_is_noticed(node: Node) -> None:
    node.prolog()
    node.task_at("/", uid=1000)
    assert "is another user's" in node.hook("task_prolog", TASK).logs[0]


def test_a_task_of_another_job_can_not_use_this_jobs_plan(node: Node) -> None:
    node.prolog()
    node.tree.run_job("job_8", 1000, "0-3")
    node.task_at("/system.slice/n1_slurmstepd.scope/job_8/step_batch/user/task_0")
    answer = node.hook("task_prolog", TASK)
    assert answer.status == "ok"
    assert node.tree.writes == []
    assert node.record().grant == {}, "what job 8 says is no news of job 7"


@pytest.mark.parametrize(
    "env",
    [
        {"SLURM_JOB_ID": "../../etc"}, {"SLURM_JOB_ID": "7\nexport X=1"}, {"SLURM_JOB_ID": ""},
        {"SLURM_JOB_ID": None}, {"SLURM_JOB_ID": "7/8"}, {"SLURM_JOB_ID": ".."},
        {"SLURM_JOB_ID": "x" * 101}, {"SLURM_CLUSTER_NAME": "../c"}, {"SLURM_CLUSTER_NAME": ".x"},
        {"SLURM_CLUSTER_NAME": "c1\n"}, {"SLURM_JOB_UID": "-1"}, {"SLURM_JOB_UID": "root"},
        {"SLURM_JOB_UID": None}, {"SLURM_JOB_GID": "1e3"}, {"SLURM_JOB_UID": "9" * 12},
        {"SLURM_JOB_UID": "\u0663"}, {"SLURMD_NODENAME": "n1/../n2"}, {"SLURM_JOB_SLUID": "a/b"},
    ],
)  # fmt: skip
def test_variables_that_slurm_would_not_send_are_refused(node: Node, env) -> None:
    answer = node.hook("prolog", SLURM_JOB_COMMENT=signed(), **env)
    assert (answer.status, answer.exit) == ("error", 0)
    assert list((node.folder / "cache").iterdir()) == []
    assert list((node.folder / "state/jobs").iterdir()) == []


def test_a_fault_of_ours_becomes_an_answer(node: Node, monkeypatch) -> None:
    def fail(*_args, **_how) -> None:
        raise RuntimeError("surprise")

    monkeypatch.setattr(cache.Cache, "prepare", fail)
    answer = node.prolog()
    assert (answer.status, answer.exit) == ("error", 0)
    assert answer.logs == ["couldn't finish: RuntimeError, see the log of crater-io-daemon"]


# A cache that is missing


def test_without_a_cache_the_job_runs_and_is_told_once(tmp_path: Path) -> None:
    node = Node(tmp_path, cache={"require_mount": True})
    answer = node.prolog()
    assert answer.exit == 0
    assert answer.logs == [f"job 7: no cache: nothing is mounted at {tmp_path / 'cache'}"]
    lines = node.hook("task_prolog", TASK).lines
    assert "unset CRATER_TMPDIR" in lines
    assert "unset CRATER_CHECKPOINT_PATH" in lines
    told = f"print crater: no local cache for this job: nothing is mounted at {tmp_path / 'cache'}"
    assert lines[-1] == told
    assert told not in node.hook("task_prolog", TASK).lines


def test_a_site_may_want_such_a_node_drained(tmp_path: Path) -> None:
    node = Node(tmp_path, cache={"require_mount": True}, drain_on=["cache_missing"])
    assert node.prolog().exit == 10
    assert node.hook("epilog").exit == 0


def test_a_cache_smaller_than_the_plan_says_is_told(node: Node, monkeypatch) -> None:
    monkeypatch.setattr(cache.Cache, "free_gb", lambda self: 12.4)
    node.prolog(signed(cache_gb=100))
    lines = node.hook("task_prolog", TASK).lines
    assert lines[-1] == "print crater: the local cache has 12 GB free, the plan says 100"


# Binding, as the job's record tells it


def test_a_newcomer_turns_the_record_soft(node: Node) -> None:
    node.prolog()
    user = node.tree.run_job("job_7", 1500, "0-3")
    node.task_at("/system.slice/n1_slurmstepd.scope/job_7/step_batch/user/task_0")
    node.hook("task_prolog", TASK)
    assert node.record().grant["given"] == "hard"
    node.tree.run_job("job_9", 1000, "0-3")
    node.services.binder.reconcile()
    assert node.tree.mems(user) == "0-1"
    assert node.record().grant["given"] == "soft"
    assert "2 jobs could put 2500 MiB" in node.record().grant["reason"]
    node.start()
    node.services.binder.reconcile()
    assert node.tree.mems(user) == "0-1", "soft outlives a restart of the daemon"


def test_the_record_grows_by_steps_not_by_tasks(node: Node) -> None:
    node.prolog()
    user = node.tree.run_job("job_7", 1000, "0-1", step="0")
    node.tree.slurm_task("job_7", "0", 1)
    for task, cpu in ((0, "0"), (1, "1")):
        path = f"/{(user / f'task_{task}').relative_to(node.tree.root)}"
        node.task_at(path, cpus=cpu)
        assert f"export CRATER_CPU_LIST={cpu}" in node.hook("task_prolog", TASK).lines
    assert node.record().grant["cpus"] == "0-1"
    assert node.reports.phases == ["prolog", "task"]
    later = node.tree.slurm_step("job_7", "1", "2-3")
    node.tree.slurm_task("job_7", "1")
    node.task_at(f"/{(later / 'task_0').relative_to(node.tree.root)}", cpus="2-3")
    node.hook("task_prolog", TASK)
    assert node.record().grant["cpus"] == "0-3"
    assert node.reports.phases == ["prolog", "task", "task"]


def test_cpus_by_slurms_word(tmp_path: Path) -> None:
    node = Node(tmp_path, cpu_source="slurm")
    node.services.slurm_cpus._known["7", "n1"] = (16, 17, 18, 19, 20)
    node.services.slurm_cpus.forget = lambda job: None
    node.prolog()
    lines = node.hook("task_prolog", TASK).lines
    assert "export CRATER_CPU_CORES=5" in lines
    assert "export CRATER_CPU_LIST=16-20" in lines
    assert "export CRATER_PREPROC_CPUS=20" in lines
    assert "unset CRATER_NUMA_NODE" in lines, "without a profile Slurm's ids belong to no node"
    assert node.record().grant["cpus"] == "16-20"


# Upkeep


def age(node: Node, hours: float) -> None:
    record = node.record()
    record.ended = time.time() - hours * 3600
    node.services.store.save(record)
    upkeep.tidy(node.services)


def test_kept_checkpoints_go_when_their_time_has_come(tmp_path: Path) -> None:
    node = Node(tmp_path, cache={"keep": "keep_checkpoints", "keep_checkpoints_hours": 5})
    node.prolog()
    (node.cache_path("checkpoint") / "file").write_text("x")
    node.hook("epilog")
    age(node, 4.9)
    assert (node.cache_path("checkpoint") / "file").exists()
    age(node, 5.1)
    assert not node.cache_path("checkpoint").exists()


def test_records_are_kept_for_a_week_and_then_forgotten(node: Node) -> None:
    node.prolog()
    node.hook("epilog")
    age(node, 7 * 24 - 1)
    assert node.record() is not None
    age(node, 7 * 24 + 1)
    assert node.record() is None


def test_folders_that_could_not_be_removed_are_tried_again(node: Node, monkeypatch) -> None:
    node.prolog()
    with monkeypatch.context() as patched:
        patched.setattr(cache.Cache, "release", lambda *_: False)
        node.hook("epilog")
    assert node.cache_path("temp").exists()
    upkeep.tidy(node.services)
    assert not node.cache_path("temp").exists()
    assert node.record().folders == {}


def test_running_jobs_are_never_tidied(node: Node) -> None:
    node.prolog()
    upkeep.tidy(node.services)
    assert node.cache_path("temp").exists()


def test_an_ended_job_that_was_prepared_anew_is_not_tidied(tmp_path: Path) -> None:
    node = Node(tmp_path, cache={"keep": "keep_checkpoints", "keep_checkpoints_hours": 5})
    node.prolog()
    node.hook("epilog")
    node.record().ended = time.time() - 6 * 3600
    node.prolog(SLURM_JOB_RESTART_COUNT="1")
    upkeep.tidy(node.services)
    assert node.cache_path("checkpoint").exists()


def variables(answer: Answer) -> dict[str, str | None]:
    """What TaskProlog lines set, None for what they unset."""
    found: dict[str, str | None] = {}
    for line in answer.lines:
        verb, _, rest = line.partition(" ")
        name, _, value = rest.partition("=")
        if verb in ("export", "unset"):
            found[name] = value if verb == "export" else None
    return found


@pytest.mark.parametrize(
    ("plan", "ring", "destination"),
    [
        ({}, True, None),
        ({"checkpoint": "on"}, True, "/site/nobody"),
        ({"checkpoint": "off"}, False, None),
        ({"checkpoint": "/p/%u/%j"}, True, "/p/nobody/7"),
        ({"checkpoint": "/p/%x"}, True, None),  # not known yet: Slurm has to be asked
        ({"checkpoint": "s3://else/where"}, True, None),
    ],
)
def test_a_task_learns_where_its_ring_and_its_checkpoints_go(
    tmp_path: Path, plan: dict[str, str], ring: bool, destination: str | None
) -> None:
    node = Node(tmp_path, checkpoints={"destination": "/site/%u"})
    node.services.job_path = "/run/crater/job/1"
    node.prolog(signed(**plan), SLURM_JOB_USER="nobody", SLURM_JOB_RESTART_COUNT="2")
    told = variables(node.hook("task_prolog", TASK, PYTHONPATH="/own"))
    assert told["CRATER_RING"] == (str(tmp_path / "run/ring.sock") if ring else None)
    assert told["CRATER_CHECKPOINT_DESTINATION"] == destination
    assert told["CRATER_RUN"] == "7.2"
    assert told["CRATER_JOB_PATH"] == "/run/crater/job/1"
    assert told["PYTHONPATH"] == "/own:/run/crater/job/1"


@pytest.mark.parametrize(
    ("wish", "ring"), [("on", True), ("s3://ckpt/nobody/x", True), ("/p/%u", False), (None, False)]
)
def test_without_a_cache_the_ring_leads_to_what_an_object_store_holds(
    tmp_path: Path, wish: str | None, ring: bool
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("access_key_id = a\nsecret_access_key = s\n")
    keys.chmod(0o600)
    remote = {"name": "main", "url": "s3://ckpt", "credentials_file": str(keys)}
    node = Node(tmp_path, checkpoints={"destination": "s3://ckpt/%u/%j", "remotes": [remote]})
    (tmp_path / "cache").rename(tmp_path / "gone")
    node.prolog(signed(checkpoint=wish), SLURM_JOB_USER="nobody")
    record = node.record()
    assert record.cache_problem and not record.folders
    told = variables(node.hook("task_prolog", TASK))
    assert (told["CRATER_RING"] is not None, told["CRATER_CHECKPOINT_PATH"]) == (ring, None)
    if ring:
        place = worker_spec.destination(node.services, record)
        spec = worker_spec.build(node.services, record, place)
        assert spec.remote.url.startswith("s3://ckpt/nobody/")
        assert spec.folder == str(node.cache_path("checkpoint"))


def test_a_destination_that_can_not_be_is_told_once(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.prolog(signed(checkpoint="s3://else/where"), SLURM_JOB_USER="nobody")
    said = [line for line in node.hook("task_prolog", TASK).lines if line.startswith("print")]
    assert len(said) == 1
    assert "checkpoints stay on this node: s3://else/where is in none" in said[0]
    assert not [x for x in node.hook("task_prolog", TASK).lines if x.startswith("print")]


@pytest.mark.parametrize("known", [None, "/own", "/a\n/b", ""])
def test_pythonpath_is_left_alone_where_the_site_says_so(tmp_path: Path, known: str | None) -> None:
    node = Node(tmp_path, checkpoints={"append_pythonpath": False})
    node.services.job_path = "/run/crater/job/1"
    node.prolog()
    told = variables(node.hook("task_prolog", TASK, PYTHONPATH=known))
    assert "PYTHONPATH" not in told
    assert told["CRATER_JOB_PATH"] == "/run/crater/job/1"


def test_without_checkpoints_tasks_hear_nothing_of_them(tmp_path: Path) -> None:
    node = Node(tmp_path, checkpoints={"enabled": False})
    node.services.job_path = "/run/crater/job/1"
    node.prolog(signed(checkpoint="on"))
    told = variables(node.hook("task_prolog", TASK))
    assert told["CRATER_RING"] is None
    assert told["CRATER_JOB_PATH"] is None
    assert "PYTHONPATH" not in told


def test_checkpoints_that_are_not_safe_outlive_the_job_and_a_new_plan(node: Node) -> None:
    node.prolog(signed(checkpoint="/p"))
    record = node.record()
    record.checkpoints = {"used": True, "destination": "/p", "unflushed": 1, "saved": True}
    node.hook("epilog")
    assert node.cache_path("checkpoint").exists()
    assert not node.cache_path("temp").exists()
    node.hook("prolog", SLURM_JOB_COMMENT="without a plan", SLURM_JOB_RESTART_COUNT="1")
    assert node.cache_path("checkpoint").exists()
    node.prolog(signed(checkpoint="/p"), SLURM_JOB_RESTART_COUNT="1")
    assert node.record().checkpoints["unflushed"] == 1
    assert node.cache_path("checkpoint").exists()
