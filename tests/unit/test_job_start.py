"""init, loader_kwargs and precision: what a rank is told, what it has, what torch is given."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from job_session import alone

from crater_slurm.job import casting, environment, loader, start, stop
from crater_slurm.job.environment import read

__all__ = ["alone"]
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def told_nothing(monkeypatch: pytest.MonkeyPatch, alone: Path) -> None:
    monkeypatch.setattr(start, "_told", set())


# The environment

SRUN = {
    "SLURM_JOB_ID": "4711", "SLURM_RESTART_COUNT": "2", "SLURM_PROCID": "5", "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "8", "SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_CLUSTER_NAME": "c1", "SLURMD_NODENAME": "gpu07", "SLURM_JOB_END_TIME": "1790000000",
}  # fmt: skip


def test_an_srun_step_says_who_a_rank_is() -> None:
    env = read(SRUN)
    assert (env.rank, env.world_size, env.local_rank, env.local_world_size) == (5, 8, 1, 4)
    assert (env.run, env.cluster, env.node, env.deadline) == ("4711.2", "c1", "gpu07", 1790000000.0)


def test_the_batch_script_is_one_process_whatever_ntasks_says() -> None:
    env = read({"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "8"})
    assert (env.rank, env.world_size, env.local_world_size) == (0, 1, 1)


def test_torchrun_within_srun_has_the_last_word() -> None:
    torchrun = {"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8"}
    env = read({**SRUN, **torchrun})
    assert (env.rank, env.world_size, env.local_rank, env.local_world_size) == (9, 16, 1, 8)


@pytest.mark.parametrize("tasks", ["4(x2)", "1,7", "7(x1),1", "3(x1),5,2"])
def test_the_ranks_of_a_node_are_read_as_slurm_spells_them(tasks: str) -> None:
    expected = {"4(x2)": 4, "1,7": 7, "7(x1),1": 1, "3(x1),5,2": 5}[tasks]
    assert read({**SRUN, "SLURM_STEP_TASKS_PER_NODE": tasks}).local_world_size == expected


def test_crater_s_variables_are_read_and_rubbish_is_nothing() -> None:
    env = read({
        "CRATER_GPU_IDS": "0,1", "CRATER_CPU_LIST": "8-11,40", "CRATER_NUMA_NODE": "1",
        "CRATER_PREPROC_CPUS": "11", "CRATER_CHECKPOINT_PATH": "/c", "CRATER_RING": "",
        "RANK": "x", "WORLD_SIZE": "-3", "SLURM_JOB_END_TIME": "soon",
    })  # fmt: skip
    assert env.gpu_ids == (0, 1) and env.cpus == (8, 9, 10, 11, 40) and env.numa_nodes == (1,)
    assert env.preprocessing_cpus == (11,) and env.folder == "/c" and env.ring is None
    assert (env.rank, env.world_size, env.deadline) == (0, 1, None)
    assert environment.numbers("auto,3,5-x,1-99999999999") == (3,)


def test_two_runs_outside_slurm_are_told_apart() -> None:
    assert read({}).run.startswith(f"local.{os.getpid()}-")
    ranks = [
        read({"RANK": r, "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "a/b", "MASTER_PORT": "29500"})
        for r in "01"
    ]
    assert ranks[0].run == ranks[1].run == "local.a_b-29500"


# The binding


def bound(monkeypatch: pytest.MonkeyPatch, have: set[int]) -> list[set[int]]:
    asked: list[set[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: asked[-1] if asked else have)
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cpus: asked.append(set(cpus)))
    monkeypatch.setattr(start, "node_cpus", lambda folder: {})
    return asked


def begun(signal: str | int | None = None, **options: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        start.init(signal=signal, **options)
    return [str(w.message) for w in caught]


def test_a_process_bound_as_planned_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = bound(monkeypatch, {4, 5})
    monkeypatch.setenv("CRATER_CPU_LIST", "4-5")
    assert begun() == [] and asked == []


def test_more_cpus_than_planned_are_narrowed_to_those_that_are_both(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = bound(monkeypatch, {0, 1, 4, 5})
    monkeypatch.setenv("CRATER_CPU_LIST", "4-7")
    assert begun(narrow=False)[0].startswith("This process may run on 2 of the 4 CPUs")
    assert asked == []
    begun()
    assert asked == [{4, 5}]


def test_fewer_or_other_cpus_are_never_widened(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = bound(monkeypatch, {4})
    monkeypatch.setenv("CRATER_CPU_LIST", "4-7")
    assert "on 1 of the 4 CPUs of its plan (4 of 4-7)" in begun()[0]
    monkeypatch.setenv("CRATER_CPU_LIST", "10-11")
    assert "not one is the same. Nothing is changed" in begun()[0]
    assert begun() == [], "each sentence once"
    assert asked == []


def test_gpus_are_counted_and_their_variable_is_never_touched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bound(monkeypatch, {0})
    monkeypatch.setenv("CRATER_GPU_IDS", "0,1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b")
    assert begun() == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,-1,3")
    assert "shows 1 GPUs, and the plan gives this task 2" in begun()[0]
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "2,-1,3"


def test_remote_numa_nodes_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    bound(monkeypatch, {0, 8})
    monkeypatch.setattr(start, "node_cpus", lambda folder: {0: set(range(8)), 1: set(range(8, 16))})
    monkeypatch.setattr(start, "allowed_memory", lambda path: {0})
    monkeypatch.setenv("CRATER_NUMA_NODE", "1")
    cpus, memory = begun()
    assert "CPUs lie on NUMA nodes 0-1, and its plan names 1" in cpus
    assert "memory on NUMA nodes 0 only" in memory


def test_cuda_started_before_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    bound(monkeypatch, {0})
    fake = SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: True))
    monkeypatch.setitem(sys.modules, "torch", fake)
    assert begun() == [
        "CUDA was started before crater_slurm.job.init(): its threads and pinned memory may lie "
        "on the wrong NUMA node. Call init() first."
    ]


def test_the_kernel_s_own_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "node1").mkdir()
    (tmp_path / "node1" / "cpulist").write_text("4-5,9\n")
    (tmp_path / "online").write_text("1")
    assert start.node_cpus(str(tmp_path)) == {1: {4, 5, 9}}
    assert start.node_cpus(str(tmp_path / "none")) == {}
    status = tmp_path / "status"
    status.write_text("Name:\tpython\nMems_allowed:\t3\nMems_allowed_list:\t0-1\n")
    assert start.allowed_memory(str(status)) == {0, 1}


def test_a_signal_by_name_or_number_and_no_such_one() -> None:
    import signal

    before = signal.getsignal(signal.SIGUSR2)
    try:
        begun(signal="usr2")
        assert getattr(signal.getsignal(signal.SIGUSR2), "of_crater", False)
        stop.clear()
        with pytest.raises(ValueError, match="no signal 'SIGFOO'"):
            start.init(signal="SIGFOO")
    finally:
        signal.signal(signal.SIGUSR2, before)


# Loader


def kwargs(monkeypatch: pytest.MonkeyPatch, cpus: str, **variables: str) -> dict[str, Any]:
    mine = set(environment.numbers(cpus))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: mine)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return loader.loader_kwargs()


def test_one_core_has_no_workers_and_nothing_that_needs_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert kwargs(monkeypatch, "3", CUDA_VISIBLE_DEVICES="") == {
        "num_workers": 0, "pin_memory": False,
    }  # fmt: skip


def test_workers_are_the_plan_s_cpus_for_preparing(monkeypatch: pytest.MonkeyPatch) -> None:
    found = kwargs(
        monkeypatch, "0-15", CRATER_CPU_LIST="0-15", CRATER_PREPROC_CPUS="12-15", CRATER_GPU_IDS="0"
    )
    assert found.pop("worker_init_fn").cpus == [12, 13, 14, 15]
    assert found == {
        "num_workers": 4, "pin_memory": True, "prefetch_factor": 3, "persistent_workers": True,
    }  # fmt: skip


def test_ranks_of_torchrun_share_them_and_those_of_srun_don_t(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = {"CRATER_CPU_LIST": "0-31", "CRATER_PREPROC_CPUS": "24-31", "WORLD_SIZE": "4"}
    assert kwargs(monkeypatch, "0-31", **plan, LOCAL_WORLD_SIZE="4")["num_workers"] == 2
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert kwargs(monkeypatch, "0-31", **plan)["num_workers"] == 8


def test_without_a_plan_half_of_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kwargs(monkeypatch, "0-7")["num_workers"] == 4
    assert kwargs(monkeypatch, "0-1")["num_workers"] == 1


def test_a_script_s_own_wishes_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    assert loader.loader_kwargs(num_workers=0, prefetch_factor=8) == {
        "num_workers": 0, "pin_memory": loader._has_gpus(read()),
    }  # fmt: skip
    assert loader.loader_kwargs(num_workers=1, prefetch_factor=8)["prefetch_factor"] == 8


def test_torch_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    data = torch.utils.data.TensorDataset(torch.arange(8))
    for cpus in ("0", "0-7"):
        found = kwargs(monkeypatch, cpus, CUDA_VISIBLE_DEVICES="")
        torch.utils.data.DataLoader(data, batch_size=2, **found)
    monkeypatch.undo()
    used = loader.OnCpus(sorted(os.sched_getaffinity(0)))
    batches = torch.utils.data.DataLoader(data, batch_size=4, num_workers=1, worker_init_fn=used)
    assert [b[0].tolist() for b in batches] == [[0, 1, 2, 3], [4, 5, 6, 7]]


# Precision


@pytest.mark.parametrize(
    ("name", "compute"),
    [
        ("fp32", "fp32"),
        ("tf32", "fp32"),
        ("bf16", "bf16"),
        ("fp8", "bf16"),
        ("int4", "bf16"),
        ("INT8", "bf16"),
    ],
)
def test_on_a_cpu_each_name_computes_in(name: str, compute: str) -> None:
    torch = pytest.importorskip("torch")
    chosen = casting.precision(name, device="cpu")
    assert chosen.compute == compute and chosen.weights_only == (name.lower() in ("int4", "int8"))
    with chosen.autocast():
        product = torch.nn.functional.linear(torch.ones(2, 2), torch.ones(2, 2))
    assert product.dtype is chosen.dtype
    assert not chosen.scaler().is_enabled()


def test_fp16_on_a_cpu_is_bf16_with_a_warning() -> None:
    pytest.importorskip("torch")
    with pytest.warns(RuntimeWarning, match="fp16 is for GPUs"):
        assert casting.precision("fp16", device="cpu").compute == "bf16"


@pytest.mark.parametrize("emulates", [True, False])
def test_a_card_without_bf16_gets_fp16(emulates: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")

    def supported(**options: bool) -> bool:
        if options and not emulates:
            raise TypeError("an older torch")
        return False

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", supported)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    with pytest.warns(
        RuntimeWarning, match=r"Tesla T4 has no bf16; .* fp16 with a gradient scaler"
    ):
        assert casting.precision("bf16", device="cuda").compute == "fp16"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert casting.precision("int4", device="cuda").compute == "fp16"


def test_the_plan_s_word_is_the_default_and_an_unknown_one_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("torch")
    assert casting.precision(device="cpu").name == "fp32"
    monkeypatch.setenv("CRATER_PRECISION", "bf16")
    assert casting.precision(device="cpu").name == "bf16"
    with pytest.raises(ValueError, match="'fp64' is not known; known are fp32, tf32"):
        casting.precision("fp64")


def test_tf32_allows_it_for_products() -> None:
    torch = pytest.importorskip("torch")
    before = torch.backends.cuda.matmul.allow_tf32
    try:
        torch.backends.cuda.matmul.allow_tf32 = False
        casting.precision("tf32", device="cpu")
        assert torch.backends.cuda.matmul.allow_tf32 is True
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


# Several ranks, really

_RANKS = """
import os, signal, sys, time
import torch, torch.distributed as dist
from crater_slurm.job import init, checkpoint
env = init()
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=env.rank, world_size=env.world_size)
assert checkpoint.load() is None
for step in range(1, 4):
    checkpoint.save({"rank": env.rank, "step": step}, step)
if env.rank == 1:                       # one rank's newest is damaged
    path = os.path.join(os.environ["CRATER_CHECKPOINT_DIR"], "step-000000003", "rank-00001.safetensors")
    with open(path, "r+b") as file:
        file.seek(20); file.write(b"!!!!")
dist.barrier()
found = checkpoint.load()
assert (found.step, found.state["rank"]) == (2, env.rank), found
if env.rank == 0:
    os.kill(os.getpid(), signal.SIGUSR2)  # only one rank has had the signal
assert checkpoint.due(10) and checkpoint.should_stop()
checkpoint.save({"rank": env.rank}, 10)
assert not checkpoint.due(11)
print("good", env.rank)
"""


def test_ranks_agree_on_what_to_load_and_when_to_save(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    env = {
        **os.environ, "PYTHONPATH": str(ROOT), "CRATER_CHECKPOINT_DIR": str(tmp_path / "c"),
        "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "SLURM_JOB_ID": "7", "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", _RANKS, str(tmp_path / "store")],
            env={**env, "RANK": r, "LOCAL_RANK": r},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for r in "01"
    ]  # fmt: skip
    for number, rank in enumerate(ranks):
        out, error = rank.communicate(timeout=240)
        assert out.strip() == f"good {number}", error
