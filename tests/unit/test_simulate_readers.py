"""Traces and inventories as they come: units, arrays, steps, several nodes, and damage."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from crater_slurm.cli import simulate_nodes
from crater_slurm.errors import CraterError, UsageError
from crater_slurm.simulate import sacct_json
from crater_slurm.simulate.study import read_trace
from crater_slurm.simulate.trace import Task
from tests.unit.simulate_samples import nodes

ON = nodes(8, 8)
HEADER = "JobID|Submit|Eligible|Start|End|ElapsedRaw|ReqTRES|AllocTRES|NNodes|TimelimitRaw|State"
T = "2025-03-01T10:00:00"
EPOCH = 1740823200.0
NODES = "sn,cpu_milli,memory_mib,gpu,model\nn0,64000,262144,2,T4\nn1,96000,262144,8,\n"
PODS = (
    "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,creation_time,deletion_time\n"
    "a,1000,10,1,500,T4|a100,0,100\nb,1000,10,0,0,,10,110\n"
)
JOBCOMP = (
    "JobId=7 UserId=ann(1000) GroupId=ann(1000) Name=a JobState=b Tres=c JobState=COMPLETED "
    "Partition=main TimeLimit=90 StartTime=2025-03-01T10:00:05 EndTime=2025-03-01T10:10:05 "
    "NodeList=a[1-2] NodeCnt=2 ProcCnt=8 WorkDir=/home/ann/x Tres=y ReservationName= "
    "Tres=cpu=8,mem=3G,node=2,billing=8,gres/gpu=4 Account= QOS= WcKey= Cluster=unknown "
    "SubmitTime=2025-03-01T10:00:00 EligibleTime=2025-03-01T10:00:00 DerivedExitCode=0:0 "
    "ExitCode=0:0 \n"
)


def read(tmp_path: Path, text: str, **more: Any) -> tuple[list[Task], list[str]]:
    file = tmp_path / "trace"
    file.write_text(text)
    trace = read_trace(file, ON, **more)
    return list(trace.tasks), trace.notes.lines()


def row(job: str = "1", tres: str = "cpu=4,mem=16G,gres/gpu=2", **fields: str) -> str:
    values = {
        "JobID": job, "Submit": T, "Eligible": T, "Start": T, "End": T, "ElapsedRaw": "600",
        "ReqTRES": tres, "AllocTRES": "", "NNodes": "1", "TimelimitRaw": "60",
        "State": "COMPLETED",
    } | fields  # fmt: skip
    return HEADER + "\n" + "|".join(values[name] for name in HEADER.split("|")) + "\n"


def test_a_job_of_sacct_has_its_units(tmp_path: Path) -> None:
    (task,), _ = read(tmp_path, row())
    assert (task.arrival, task.duration, task.limit, task.nodes) == (EPOCH, 600, 3600, 1)
    assert (task.need.count, task.need.milli, task.need.take) == (2, 1000, (4000, 16 * 1024))


@pytest.mark.parametrize(
    ("memory", "mib"),
    [("512M", 512), ("16G", 16384), ("1.5G", 1536), ("2T", 2 * 2**20), ("2048K", 2), ("900", 900)],
)
def test_memory_of_tres_is_in_powers_of_1024(tmp_path: Path, memory: str, mib: int) -> None:
    (task,), _ = read(tmp_path, row(tres=f"cpu=1,mem={memory}"))
    assert task.need.take[1] == mib


@pytest.mark.parametrize(
    ("memory", "mib"), [("4G", 4096), ("4Gn", 4096), ("1000Mc", 8000), ("0", 0), ("", 0)]
)
def test_memory_as_older_releases_print_it(tmp_path: Path, memory: str, mib: int) -> None:
    text = f"JobID|Submit|Elapsed|ReqCPUS|ReqMem\n5|{T}|1-02:00:00|8|{memory}\n"
    (task,), _ = read(tmp_path, text)
    assert (task.duration, task.need.take) == (93600, (8000, mib))


def test_steps_are_left_out_and_each_task_of_an_array_is_a_job(tmp_path: Path) -> None:
    lines = [
        row("9_1"),
        row("9_1.batch"),
        row("9_2"),
        row("9_2.0"),
        row("9_[3-9]", State="PENDING", ElapsedRaw="0"),
    ]
    text = HEADER + "\n" + "".join(line.split("\n")[1] + "\n" for line in lines)
    tasks, notes = read(tmp_path, text)
    assert [task.name for task in tasks] == ["9_1", "9_2"]
    assert "steps of jobs left out: 2 jobs" in notes
    assert "jobs that never ran left out: 1 jobs" in notes


def test_a_job_of_several_nodes_takes_the_same_of_each(tmp_path: Path) -> None:
    (task,), notes = read(tmp_path, row(tres="cpu=10,mem=9G,gres/gpu=5", NNodes="2"))
    assert task.nodes == 2
    assert (task.need.count, task.need.take) == (3, (5000, 4608))
    assert any(line.startswith("several nodes that start together") for line in notes)


def test_shards_are_a_part_of_a_gpu_or_whole_ones(tmp_path: Path) -> None:
    (task,), _ = read(tmp_path, row(tres="cpu=1,gres/shard=25"))
    assert (task.need.count, task.need.milli) == (1, 250)
    (task,), _ = read(tmp_path, row(tres="cpu=1,gres/shard=25"), shards=10)
    assert (task.need.count, task.need.milli) == (3, 1000)


def test_a_typed_gpu_goes_to_its_model_or_to_any_that_is_said(tmp_path: Path) -> None:
    (task,), _ = read(tmp_path, row(tres="cpu=1,gres/gpu=2,gres/gpu:a100=2"))
    assert (task.need.count, task.need.allowed) == (2, 1)
    (task,), notes = read(tmp_path, row(tres="cpu=1,gres/gpu:v100=2"))
    assert (task.need.count, task.need.allowed >> 1 & 1) == (2, 1)
    assert "GPU type v100 is of no node, any GPU is taken: 1 jobs" in notes


def test_a_waiting_dependency_is_no_waiting_time(tmp_path: Path) -> None:
    (task,), _ = read(tmp_path, row(Eligible="2025-03-01T11:00:00"))
    assert task.arrival == EPOCH + 3600
    (task,), _ = read(tmp_path, row(Eligible="Unknown"))
    assert task.arrival == EPOCH


def test_what_never_ran_is_left_out_and_what_still_runs_is_said(tmp_path: Path) -> None:
    tasks, notes = read(tmp_path, row(State="CANCELLED by 0", ElapsedRaw="0"))
    assert (tasks, notes) == ([], ["jobs that never ran left out: 1 jobs"])
    _, notes = read(tmp_path, row(tres="cpu=1"))
    assert "GPUs: none recorded; Slurm records them with AccountingStorageTRES=gres/gpu" in notes
    tasks, notes = read(tmp_path, row(State="RUNNING"))
    assert len(tasks) == 1
    assert "jobs still running taken to end when the dump was made: 1 jobs" in notes


def old_json() -> dict[str, Any]:
    """As Slurm 22.05 prints a job (dbv0.0.38): plain numbers and words."""
    return {
        "job_id": 4,
        "allocation_nodes": 1,
        "state": {"current": "COMPLETED", "reason": "None"},
        "time": {"elapsed": 600, "eligible": 1740823200, "submission": 1740823100, "limit": 60},
        "tres": {
            "requested": [
                {"type": "cpu", "name": None, "id": 1, "count": 4},
                {"type": "mem", "name": None, "id": 2, "count": 16384},
                {"type": "gres", "name": "gpu", "id": 1001, "count": 2},
            ],
            "allocated": [],
        },
        "steps": [],
    }


def new_json() -> dict[str, Any]:
    """As Slurm 24.11 prints it: numbers that may be unset, states as a list."""
    limit = {"set": True, "infinite": False, "number": 60}
    tres = old_json()["tres"]
    named = [entry | {"name": entry["name"] or ""} for entry in tres["requested"]]
    return old_json() | {
        "state": {"current": ["COMPLETED"], "reason": "None"},
        "time": old_json()["time"] | {"limit": limit},
        "tres": {"requested": named, "allocated": []},
    }


@pytest.mark.parametrize("job", [old_json(), new_json()], ids=["22.05", "24.11"])
def test_sacct_json_of_either_age_is_the_same_job(tmp_path: Path, job: dict[str, Any]) -> None:
    meta = {"plugin": {"type": "x"}, "Slurm": {"version": {"major": "24"}}}
    tasks, _ = read(tmp_path, json.dumps({"meta": meta, "jobs": [job, job], "errors": []}))
    expected, _ = read(tmp_path, row("4"))
    assert tasks == expected * 2


def test_json_larger_than_a_chunk_is_read_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sacct_json, "_CHUNK", 7)
    tasks, _ = read(tmp_path, json.dumps({"meta": {}, "jobs": [new_json()] * 3}, indent=1))
    assert len(tasks) == 3


def test_a_jobcomp_line_is_read_whatever_the_user_named_things(tmp_path: Path) -> None:
    (task,), _ = read(tmp_path, JOBCOMP)
    assert (task.name, task.nodes, task.duration, task.limit) == ("7", 2, 600, 5400)
    assert (task.need.count, task.need.take) == (2, (4000, 1536))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (row(ElapsedRaw="soon"), r"trace:2: ElapsedRaw is 'soon', which is no number"),
        (row(Eligible="March"), r"trace:2: Eligible is 'March'; it should be like 2025"),
        (row(tres="cpu=x"), r"trace:2: TRES 'cpu=x' is not NAME=AMOUNT"),
        (row() + "1|2\n", r"trace:3: 2 fields, but the header has 11"),
        (row(tres="cpu=1,gres/gpu=999"), r"999 GPUs or shards a node; at most 64"),
        ("JobID|State\n", r"has no column eligible or submit; make it with sacct"),
        ('{"jobs": [1]}', r"jobs\[0\] is int, not an object"),
        ('{"jobs": [{"time": 3}]}', r"jobs\[0\]: time is 3"),
        ('{"jobs": [{', r"is no whole JSON"),
        ('{"meta": {}}', r'without a list "jobs"'),
        ("JobId=7 nonsense\n", r"trace:1: no line of jobcomp/filetxt"),
        ("runtime\n12\nlong\n", r"trace:3: runtime is 'long', which is no number of seconds"),
        ("hello\n", r"is no trace: its first line has neither"),
        ("", r"is no trace"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read(tmp_path, text)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_damaged_dump_never_ends_in_a_traceback(tmp_path: Path, data: st.DataObject) -> None:
    whole = data.draw(
        st.sampled_from(
            [row(), JOBCOMP, json.dumps({"jobs": [new_json()]}), "runtime,gpus\n3,1\n", PODS]
        )
    )
    at = data.draw(st.integers(0, len(whole)))
    end = data.draw(st.integers(at, min(len(whole), at + 20)))
    damaged = whole[:at] + data.draw(st.text(max_size=8)) + whole[end:]
    file = tmp_path / "damaged"
    file.write_text(damaged, encoding="utf-8", errors="surrogatepass")
    try:
        list(read_trace(file, ON).tasks)
    except CraterError as error:
        assert str(error)


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, len(NODES)), st.integers(0, 20), st.text(max_size=8))
def test_a_damaged_list_of_nodes_never_ends_in_a_traceback(
    tmp_path: Path, at: int, length: int, text: str
) -> None:
    file = tmp_path / "nodes.csv"
    file.write_text(NODES[:at] + text + NODES[at + length :], "utf-8", "surrogatepass")
    try:
        assert simulate_nodes.read(str(file)).names
    except CraterError as error:
        assert str(error)


def test_philly_run_times_get_gpus_by_the_stated_rule(tmp_path: Path) -> None:
    tasks, notes = read(tmp_path, "runtime\n" + "60.0\n" * 4000)
    count = Counter(task.need.count for task in tasks)
    for gpus, share in {1: 0.70, 2: 0.10, 4: 0.15, 8: 0.05}.items():
        assert count[gpus] / 4000 == pytest.approx(share, abs=0.025)
    # 64 CPUs and 1,000,000 MiB for 8 GPUs, half of it: 4 CPUs and 62,500 MiB a GPU.
    assert {task.need.take[0] // task.need.count for task in tasks} == {4000}
    assert {task.need.take[1] // task.need.count for task in tasks} == {62_500}
    assert "GPUs: none in this trace, drawn as 70 % 1, 10 % 2, 15 % 4, 5 % 8" in notes


def test_philly_columns_that_are_there_are_used(tmp_path: Path) -> None:
    (task,), _ = read(tmp_path, "runtime,submit,gpus,cpus,memory_mib\n60,5,4,3,77\n")
    assert (task.arrival, task.need.count, task.need.take) == (5.0, 4, (3000, 77))


def test_a_lab_s_inventory_counts_bandwidth_and_nvme_too() -> None:
    """a100-slow-nvme: 2 x 16 cores, 141.3 + 137.9 GB/s, one drive of 210,000 IOPS."""
    found = simulate_nodes.read("slow-nvme")
    assert found.kinds == ("cpu_milli", "memory_mib", "bandwidth_mb_s", "read_iops")
    assert (32_000, 257_024, 279_200, 210_000) in found.rest
    need = found.need(cpu_milli=4000, memory_mib=10, gpus=1)
    assert need.take == (4000, 10, 16_000, 0)
    assert "memory bandwidth: none in traces, 4 GB/s a CPU" in found.notes


def test_profiles_and_inventories_are_read_from_files(tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_text("nodes:\n  - {name: 'x[1-3]', profile: l4-inference}\n")
    assert simulate_nodes.read(str(file)).names == ("x1", "x2", "x3")
    file.write_text("{}")
    with pytest.raises(UsageError):
        simulate_nodes.read(str(file))
    with pytest.raises(UsageError, match="no inventory is named"):
        simulate_nodes.read("nothing-of-that-name")
