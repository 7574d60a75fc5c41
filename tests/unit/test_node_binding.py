"""Memory binding on a fake cgroup tree whose files behave like the kernel's."""

from __future__ import annotations

from pathlib import Path

import pytest
from node_fakes import FakeTree, make_sys, wait_for

from crater_slurm.node import cgroups, inotify
from crater_slurm.node.binding import Binder
from crater_slurm.node.topology import Topology
from crater_slurm.node.watch import Watcher


class Jobs:
    """Which jobs are strict, and which were left soft."""

    def __init__(self, *strict: str) -> None:
        self.strict_names = set(strict)
        self.reasons: dict[str, str] = {}

    def strict(self, name: str) -> bool:
        return name in self.strict_names

    def soft(self, name: str) -> str:
        return self.reasons.get(name, "")

    def set_soft(self, name: str, reason: str) -> None:
        self.reasons.setdefault(name, reason)


class Machine:
    """Two NUMA nodes of four CPUs and 2048 MiB each, with Slurm's tree."""

    def __init__(self, folder: Path, *strict: str, mode="hard", used=(0, 0), reserve=48) -> None:
        self.tree = FakeTree(folder / "cgroup")
        self.sys = make_sys(folder / "sys", {0: ("0-3", 2048), 1: ("4-7", 2048)})
        self.topology = Topology.read(self.sys)
        self.jobs = Jobs(*strict)
        self.used = list(used)
        self.binder = Binder(
            self.tree,
            self.topology,
            self.jobs,
            mode=mode,
            reserve_mib=reserve,
            unreclaimable_mib=lambda node: self.used[node],
        )


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path, "job_1", "job_2", "sA3DM8KXK9VV00")


def path_of(folder: Path, machine: Machine) -> str:
    return "/" + str(folder.relative_to(machine.tree.root))


def test_a_strict_job_is_narrowed_at_its_steps_user_folder_and_nowhere_else(machine) -> None:
    user = machine.tree.run_job("job_1", 1000, "0-3")
    machine.binder.reconcile()
    assert machine.tree.writes == [("job_1/step_batch/user", "0")]
    assert machine.tree.mems(user.parent.parent) == "0-1"
    assert machine.tree.mems(user.parent) == ""


def test_a_second_pass_writes_nothing(machine) -> None:
    machine.tree.run_job("job_1", 1000, "4-7")
    machine.binder.reconcile()
    machine.binder.reconcile()
    assert machine.tree.writes == [("job_1/step_batch/user", "1")]


def test_a_job_under_a_sluid_is_found_as_well(machine) -> None:
    user = machine.tree.run_job("sA3DM8KXK9VV00", 1000, "4-5", step="extern")
    machine.binder.reconcile()
    assert machine.tree.mems(user) == "1"


def test_a_job_without_a_plan_is_counted_but_never_narrowed(machine) -> None:
    user = machine.tree.run_job("job_9", 1500, "0-3")
    strict = machine.tree.run_job("job_1", 600, "0-3")
    machine.binder.reconcile()
    assert machine.tree.mems(user) == "0-1"
    assert machine.tree.mems(strict) == "0-1"
    assert "2 jobs could put 2100 MiB on NUMA node 0, which has 2000" in machine.jobs.soft("job_1")


def test_a_spanning_job_stays_on_both_nodes(machine) -> None:
    user = machine.tree.run_job("job_1", 3000, "0-7")
    machine.binder.reconcile()
    assert machine.tree.mems(user) == "0-1"
    assert machine.jobs.soft("job_1") == ""


def test_memory_use_by_others_and_the_reserve_shrink_the_room(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "job_1", used=(1000, 0), reserve=100)
    user = machine.tree.run_job("job_1", 949, "0-3")  # 2048 - 1000 - 100 = 948
    machine.binder.reconcile()
    assert machine.tree.mems(user) == "0-1"
    assert "949 MiB is more than the 948 MiB" in machine.jobs.soft("job_1")


def test_what_jobs_hold_is_not_counted_again_as_others_use(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "job_1", used=(1000, 0))
    user = machine.tree.run_job("job_1", 2000, "0-3")
    (user.parent.parent / "memory.numa_stat").write_text(f"anon N0={1000 * 2**20} N1=0\n")
    machine.binder.reconcile()
    assert machine.tree.mems(user) == "0"


def test_a_newcomer_widens_before_it_has_a_task_and_for_good(machine) -> None:
    user = machine.tree.run_job("job_1", 1500, "0-3")
    machine.binder.reconcile()
    assert machine.tree.mems(user) == "0"
    machine.tree.slurm_job("job_9")
    machine.binder.reconcile()
    assert machine.tree.mems(user) == "0", "no limit is set yet, and nothing runs there"
    machine.tree.slurm_step("job_9", "extern", "0-3")
    machine.tree.slurm_limit("job_9", 600)
    machine.binder.reconcile()
    assert machine.tree.mems(user) == "0-1"
    for folder in sorted((machine.tree.scope / "job_9").rglob("*"), reverse=True):
        folder.rmdir() if folder.is_dir() else folder.unlink()
    (machine.tree.scope / "job_9").rmdir()
    machine.binder.reconcile()
    assert machine.tree.mems(user) == "0-1", "its memory may lie anywhere by now"
    assert machine.jobs.soft("job_1")


def test_a_newcomer_without_a_limit_counts_as_soon_as_it_has_a_task(machine) -> None:
    user = machine.tree.run_job("job_1", 100, "0-3")
    machine.binder.reconcile()
    machine.tree.slurm_job("job_9")
    machine.tree.slurm_step("job_9", "extern", "4-7")
    machine.binder.reconcile()
    assert machine.tree.mems(user) == "0"
    machine.tree.slurm_task("job_9", "extern")
    machine.binder.reconcile()
    assert machine.tree.mems(user) == "0-1"
    assert machine.jobs.soft("job_1") == "job_9 has no memory limit and could fill NUMA node 0"


def test_a_strict_newcomer_whose_cores_are_unknown_pushes_nobody_aside(machine) -> None:
    first = machine.tree.run_job("job_1", 1500, "0-3")
    machine.binder.reconcile()
    machine.tree.slurm_job("job_2")
    machine.tree.slurm_limit("job_2", 1500)
    machine.binder.reconcile()
    second = machine.tree.slurm_step("job_2", "batch", "4-7")
    machine.binder.reconcile()
    assert [machine.tree.mems(u) for u in (first, second)] == ["0", "1"]


def test_a_step_that_slurm_has_not_written_yet_is_left_alone(machine) -> None:
    machine.tree.slurm_job("job_1")
    machine.tree.slurm_limit("job_1", 100)
    user = machine.tree.scope / "job_1/step_0/user"
    machine.tree._mkdir(user.parent)
    machine.tree._mkdir(user)
    machine.binder.reconcile()
    assert machine.tree.writes == []


def test_task_prolog_confirms_a_hard_binding(machine) -> None:
    machine.tree.run_job("job_1", 1000, "0-3")
    task = machine.tree.scope / "job_1/step_batch/user/task_0"
    given = machine.binder.confirm(path_of(task, machine), range(4))
    assert (given.kind, given.mems) == ("hard", frozenset({0}))


def test_tasks_with_different_affinity_are_narrowed_each(machine) -> None:
    user = machine.tree.run_job("job_1", 1000, "0-7", step="0")
    machine.tree.slurm_task("job_1", "0", 1)
    for task, cpus, node in ((0, range(4), 0), (1, range(4, 8), 1)):
        given = machine.binder.confirm(path_of(user / f"task_{task}", machine), cpus)
        assert (given.kind, given.mems) == ("hard", frozenset({node}))
    assert [machine.tree.mems(user / f"task_{i}") for i in (0, 1)] == ["0", "1"]
    assert machine.tree.mems(user) == "0-1"
    # A newcomer that does not fit takes the tasks' limits away as well.
    machine.tree.run_job("job_9", 1500, "0-3")
    machine.binder.reconcile()
    assert [machine.tree.mems(user / f"task_{i}") for i in (0, 1)] == ["", ""]


def test_task_prolog_says_why_a_job_is_soft(machine) -> None:
    machine.tree.run_job("job_1", 2001, "0-3")
    task = machine.tree.scope / "job_1/step_batch/user/task_0"
    given = machine.binder.confirm(path_of(task, machine), range(4))
    assert given.kind == "soft"
    assert given.reason == "its limit of 2001 MiB is more than the 2000 MiB of NUMA node 0"
    assert given.mems == {0, 1}


def test_a_refusing_kernel_makes_the_job_soft_not_failed(machine, monkeypatch) -> None:
    def refuse(folder: Path, nodes) -> None:
        raise PermissionError(13, "Permission denied")

    machine.tree.run_job("job_1", 1000, "0-3")
    monkeypatch.setattr(machine.tree, "write_mems", refuse)
    task = machine.tree.scope / "job_1/step_batch/user/task_0"
    given = machine.binder.confirm(path_of(task, machine), range(4))
    assert (given.kind, given.reason) == ("soft", "couldn't write cpuset.mems: Permission denied")


@pytest.mark.parametrize(
    "cgroup",
    ["/", "/user.slice", "/system.slice/n1_slurmstepd.scope/job_1/step_0/user",
     "/system.slice/../../etc/job_1/step_0/user/task_0", ""],
)  # fmt: skip
def test_a_caller_outside_a_task_is_never_bound(machine, cgroup: str) -> None:
    machine.tree.run_job("job_1", 1000, "0-3")
    assert machine.binder.confirm(cgroup, range(4)).kind == "soft"
    assert machine.tree.writes == []


def test_best_effort_jobs_are_told_that_nothing_was_asked(machine) -> None:
    user = machine.tree.run_job("job_9", 1000, "0-3")
    assert machine.binder.confirm(path_of(user / "task_0", machine), range(4)).kind == "none"


@pytest.mark.parametrize(("mode", "kind"), [("soft", "soft"), ("off", "none")])
def test_the_site_can_switch_hard_binding_off(tmp_path: Path, mode: str, kind: str) -> None:
    machine = Machine(tmp_path, "job_1", mode=mode)
    user = machine.tree.run_job("job_1", 1000, "0-3")
    given = machine.binder.confirm(path_of(user / "task_0", machine), range(4))
    assert (given.kind, given.reason) == (kind, f"node.memory_binding is {mode}")
    machine.binder.reconcile()
    assert machine.tree.writes == []


def test_cgroup_v1_or_a_missing_cpuset_controller_means_soft(machine) -> None:
    (machine.tree.root / "cgroup.controllers").write_text("cpu io memory pids\n")
    assert "no cpuset controller" in machine.binder.unusable()
    (machine.tree.root / "cgroup.controllers").unlink()
    assert "no cgroup v2" in machine.binder.unusable()


def test_without_constrained_cores_only_the_tasks_affinity_narrows(machine) -> None:
    # ConstrainCores=no: Slurm writes neither cpuset file, every level inherits all CPUs.
    machine.tree.slurm_job("job_1")
    machine.tree.slurm_limit("job_1", 1000)
    user = machine.tree.scope / "job_1/step_0/user"
    machine.tree._mkdir(user.parent)
    machine.tree._mkdir(user)
    task = machine.tree.slurm_task("job_1", "0")
    given = machine.binder.confirm(path_of(task, machine), range(4))
    assert (given.kind, given.mems) == ("hard", frozenset({0}))
    assert machine.tree.mems(task) == "0"


def test_stopping_widens_everything_and_starting_narrows_it_again(machine) -> None:
    user = machine.tree.run_job("job_1", 1000, "0-3")
    machine.binder.reconcile()
    machine.binder.release()
    assert machine.tree.mems(user) == "0-1"
    again = Binder(
        machine.tree, machine.topology, machine.jobs, reserve_mib=48,
        unreclaimable_mib=lambda node: 0,
    )  # fmt: skip
    again.reconcile()
    assert machine.tree.mems(user) == "0"


def test_a_soft_job_that_a_crash_left_narrow_is_widened_at_the_next_start(machine) -> None:
    user = machine.tree.run_job("job_1", 1000, "0-3")
    machine.binder.reconcile()
    machine.jobs.set_soft("job_1", "decided just before the crash")
    machine.binder.reconcile()
    assert machine.tree.mems(user) == "0-1"


def test_every_slurmd_of_the_machine_counts(machine) -> None:
    user = machine.tree.run_job("job_1", 1500, "0-3")
    other = FakeTree.__new__(FakeTree)
    other.__dict__.update(
        machine.tree.__dict__, scope=machine.tree.scope.parent / "n2_slurmstepd.scope"
    )
    (other.scope / "system").mkdir(parents=True)
    other.run_job("job_1x", 600, "0-3")
    machine.binder.reconcile()
    assert machine.tree.mems(user) == "0-1"


# The trigger


@pytest.fixture
def watched(machine):
    passes: list[int] = []

    def changed() -> None:
        passes.append(1)
        machine.binder.reconcile()

    watcher = Watcher(machine.tree.root, changed)
    watcher.start()
    machine.passes, machine.watcher = passes, watcher
    yield machine
    watcher.stop()


def test_slurms_own_write_triggers_without_any_task_prolog(watched) -> None:
    watched.tree.slurm_job("job_1")
    user = watched.tree.slurm_step("job_1", "extern", "0-3")
    watched.tree.slurm_limit("job_1", 1000)
    assert wait_for(lambda: watched.tree.mems(user) == "0")
    later = watched.tree.slurm_step("job_1", "0", "0-1")
    assert wait_for(lambda: watched.tree.mems(later) == "0")
    assert watched.tree.mems(user) == "0"


def test_a_newcomer_widens_by_its_limit_alone(watched) -> None:
    user = watched.tree.run_job("job_1", 1500, "0-3")
    assert wait_for(lambda: watched.tree.mems(user) == "0")
    watched.tree.slurm_job("job_9")
    watched.tree.slurm_step("job_9", "extern", "4-7")
    watched.tree.slurm_limit("job_9", 600)
    assert wait_for(lambda: watched.tree.mems(user) == "0-1")
    assert not list((watched.tree.scope / "job_9").rglob("task_*"))


def test_a_lost_event_queue_leads_to_a_new_scan(watched, monkeypatch) -> None:
    user = watched.tree.run_job("job_1", 1500, "0-3")
    assert wait_for(lambda: watched.tree.mems(user) == "0")
    lost: list[inotify.Event] = []
    real = inotify.Inotify.read

    def read(self, timeout):
        events = real(self, timeout)
        if events and not lost:
            lost.extend(events)
            return [inotify.Event(-1, inotify.Q_OVERFLOW, "")]
        return events

    monkeypatch.setattr(inotify.Inotify, "read", read)
    passes = len(watched.passes)
    watched.tree.slurm_job("job_9")  # ends the read that is going on
    assert wait_for(lambda: len(watched.passes) > passes)
    watched.tree.slurm_job("job_2")
    second = watched.tree.slurm_step("job_2", "batch", "4-7")
    watched.tree.slurm_limit("job_2", 100)
    assert wait_for(lambda: watched.tree.mems(second) == "1")
    assert lost


def test_our_own_writes_do_not_start_a_storm(watched) -> None:
    user = watched.tree.run_job("job_1", 1500, "0-3")
    assert wait_for(lambda: watched.tree.mems(user) == "0")
    wait_for(lambda: False, 0.3)
    settled = len(watched.passes)
    wait_for(lambda: False, 0.3)
    assert len(watched.passes) == settled


def test_without_inotify_the_tree_is_polled(machine, monkeypatch) -> None:
    def fail(self) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(inotify.Inotify, "__init__", fail)
    monkeypatch.setattr("crater_slurm.node.watch._POLL_SECONDS", 0.05)
    watcher = Watcher(machine.tree.root, machine.binder.reconcile)
    watcher.start()
    user = machine.tree.run_job("job_1", 1500, "0-3")
    assert wait_for(lambda: machine.tree.mems(user) == "0")
    watcher.stop()


def test_a_surprise_in_one_pass_does_not_end_the_watch(machine) -> None:
    calls: list[int] = []

    def changed() -> None:
        calls.append(1)
        raise RuntimeError("surprise")

    watcher = Watcher(machine.tree.root, changed)
    watcher.start()
    first = len(calls)
    machine.tree.slurm_job("job_1")
    assert wait_for(lambda: len(calls) > first)
    watcher.stop()


# What is read


def test_memory_by_node_adds_what_can_not_be_dropped(tmp_path: Path) -> None:
    (tmp_path / "memory.numa_stat").write_text(
        f"anon N0={3 * 2**20} N1=0\nfile N0={900 * 2**20} N1=0\nshmem N0={2**20} N1={2**21}\n"
    )
    assert cgroups.memory_by_node(tmp_path) == {0: 4, 1: 2}
    assert cgroups.memory_by_node(tmp_path / "gone") == {}


def test_a_memory_limit_is_rounded_up_to_whole_mebibytes(machine) -> None:
    machine.tree.slurm_job("job_1")
    (machine.tree.scope / "job_1/memory.max").write_text(f"{10 * 2**20 + 1}\n")
    (job,) = machine.tree.scan()
    assert job.limit_mib == 11


def test_memory_only_nodes_stay_with_the_cores_next_to_them(tmp_path: Path) -> None:
    # As on a Grace Hopper pair: nodes 0 and 1 have the CPUs, 2 and 3 are the GPUs' memory.
    make_sys(
        tmp_path,
        {0: ("0-3", 1000), 1: ("4-7", 1000), 2: ("", 500), 3: ("", 500)},
        {0: "10 40 80 120", 1: "40 10 120 80", 2: "80 120 10 160", 3: "120 80 160 10"},
    )
    topology = Topology.read(tmp_path)
    assert topology.mask_of({0, 1}) == {0, 2}
    assert topology.mask_of({5}) == {1, 3}
    assert topology.nodes_of({5}) == {1}
    assert topology.mask_of({0, 5}) == {0, 1, 2, 3}


def test_cores_of_a_node_without_memory_are_not_confined(tmp_path: Path) -> None:
    make_sys(tmp_path, {0: ("0-3", 1000), 1: ("4-7", 0)})
    assert Topology.read(tmp_path).mask_of({4}) == {0}


def test_reclaimable_caches_are_not_counted_as_use(tmp_path: Path) -> None:
    make_sys(tmp_path, {0: ("0-3", 1000)})
    (tmp_path / "devices/system/node/node0/meminfo").write_text(
        "Node 0 MemTotal: 1024000 kB\nNode 0 MemFree: 102400 kB\nNode 0 Active(file): 204800 kB\n"
        "Node 0 Inactive(file): 102400 kB\nNode 0 SReclaimable: 102400 kB\n"
    )
    assert Topology.read(tmp_path).unreclaimable_mib(0) == 500
