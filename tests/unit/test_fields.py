"""The job as the filter's message tells it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crater_slurm.model.job import GpuOption, GpuScope, Job, JobKind
from crater_slurm.slurm.fields import job_from_fields


def job(**fields: str) -> Job:
    return job_from_fields({"uid": "1000"} | {f"field.{k}": v for k, v in fields.items()})


def test_a_job_of_which_nothing_was_said_has_nothing() -> None:
    assert job() == Job(user_id=1000)


def test_plain_options_arrive() -> None:
    found = job(
        partition="gpu,all",
        min_nodes="2",
        max_nodes="4",
        num_tasks="8",
        ntasks_per_node="4",
        cpus_per_task="3",
        min_cpus="24",
        features="a100",
        exc_nodes="n1",
        req_nodes="n[2-3]",
        sockets_per_node="2",
        cores_per_socket="8",
        array_inx="0-9",
        comment="mine",
        threads_per_core="1",
        time_limit="90",
        reservation="course",
        immediate="1",
    )
    assert (found.threads_per_core, found.time_limit_minutes) == (1, 90)
    assert found.immediate
    assert found.reservation == "course"
    assert found.partitions == ("gpu", "all")
    assert (found.min_nodes, found.max_nodes, found.tasks, found.tasks_per_node) == (2, 4, 8, 4)
    assert (found.cpus_per_task, found.min_cpus) == (3, 24)
    assert (found.features, found.exclude, found.node_list) == ("a100", "n1", "n[2-3]")
    assert (found.sockets_per_node, found.cores_per_socket) == (2, 8)
    assert found.array
    assert found.comment == "mine"


@pytest.mark.parametrize(
    ("field", "scope"),
    [
        ("tres_per_node", GpuScope.NODE),
        ("gres", GpuScope.NODE),
        ("tres_per_job", GpuScope.JOB),
        ("tres_per_socket", GpuScope.SOCKET),
        ("tres_per_task", GpuScope.TASK),
    ],
)
@pytest.mark.parametrize("text", ["gres:gpu:a100:2", "gres/gpu:a100:2", "gres/gpu:a100=2"])
def test_gpus_arrive_from_every_option_in_every_version_s_spelling(
    field: str, scope: GpuScope, text: str
) -> None:
    assert job(**{field: text}).gpus == (GpuOption(scope, 2, "a100"),)


@pytest.mark.parametrize(
    ("field", "value", "option"),
    [
        ("cpus_per_tres", "gres/gpu:2", "--cpus-per-gpu"),
        ("mem_per_tres", "gres:gpu:1024", "--mem-per-gpu"),
        ("ntasks_per_gpu", "2", "--ntasks-per-gpu"),
        ("tres_bind", "gres/gpu:closest", "--gpu-bind"),
    ],
)
def test_what_is_said_for_each_gpu_is_known_by_its_option(
    field: str, value: str, option: str
) -> None:
    assert job(**{field: value}).per_gpu == (option,)


def test_22_05_shows_the_same_option_under_two_names_and_it_counts_once() -> None:
    assert job(gres="gres:gpu:2", tres_per_node="gres:gpu:2").gpus_per_node == 2


def test_shards_are_no_whole_gpus() -> None:
    found = job(tres_per_node="gres/shard:8")
    assert found.gpus == (GpuOption(GpuScope.NODE, 8, None, shards=True),)
    assert found.gpus_per_node is None


def test_other_gres_of_the_user_are_kept_apart() -> None:
    assert job(tres_per_node="gres/gpu:2,gres/membw:140,gres/nvme:7").gres == {
        "membw": 140,
        "nvme": 7,
    }


def test_cpus_of_tres_per_task_are_no_gpus() -> None:
    assert job(tres_per_task="cpu=4,gres/gpu=1").gpus == (GpuOption(GpuScope.TASK, 1),)


def test_cpus_per_gpu_arrive() -> None:
    assert job(cpus_per_tres="gres/gpu:8").cpus_per_gpu == 8
    assert job(cpus_per_tres="gres:gpu:8").cpus_per_gpu == 8


def test_tasks_per_gpu_give_the_tasks() -> None:
    assert job(tres_per_node="gres/gpu:4", ntasks_per_gpu="2").tasks == 8
    assert job(tres_per_node="gres/gpu:4", ntasks_per_gpu="2", num_tasks="3").tasks == 3


@pytest.mark.parametrize(
    ("flags", "enforce", "disable"),
    [("0", False, False), ("16", True, False), ("524288", False, True), ("524304", True, True)],
)
def test_binding_flags_are_bits(flags: str, enforce: bool, disable: bool) -> None:
    found = job(bitflags=flags)
    assert (found.enforce_binding, found.disable_binding) == (enforce, disable)


@pytest.mark.parametrize(("shared", "exclusive"), [("0", True), ("1", False), ("", False)])
def test_exclusive_is_shared_zero(shared: str, exclusive: bool) -> None:
    assert job(shared=shared).exclusive is exclusive


@pytest.mark.parametrize("text", ["", "x", "nan", "inf", "1e400", "-1", "-inf"])
def test_what_is_no_amount_is_as_if_it_was_not_said(text: str) -> None:
    assert job(num_tasks=text).tasks is None


def test_numbers_may_come_as_lua_writes_them() -> None:
    assert job(num_tasks="8.0").tasks == 8
    assert job(num_tasks="1e3").tasks == 1000


def test_memory_of_zero_means_all_of_the_node_and_is_no_amount() -> None:
    assert job(min_mem_per_node="0").memory_per_node_mib is None
    assert job(min_mem_per_node="1024").memory_per_node_mib == 1024
    assert job(min_mem_per_cpu="512").memory_per_cpu_mib == 512


@pytest.mark.parametrize("kind", list(JobKind))
def test_the_kind_arrives(kind: JobKind) -> None:
    assert job_from_fields({"uid": "1", "kind": kind.value}).kind is kind


@pytest.mark.parametrize(("het", "component"), [("0", 0), ("2", 2), ("", None), ("x", None)])
def test_the_component_of_a_heterogeneous_job_arrives(het: str, component: int | None) -> None:
    assert job_from_fields({"uid": "1", "het": het}).het_component == component


@pytest.mark.parametrize(
    ("options", "per_node"),
    [
        ({}, None),
        ({"tasks": 4}, 4),
        ({"tasks": 4, "cpus_per_task": 2}, 8),
        ({"cpus_per_task": 6}, 6),
        ({"tasks": 5, "min_nodes": 2}, 3),  # 5 tasks on 2 nodes: 3 on one of them
        ({"tasks_per_node": 2, "cpus_per_task": 3, "min_nodes": 4}, 6),
    ],
)
def test_cpus_per_node_follow_from_tasks(options: dict[str, int], per_node: int | None) -> None:
    assert Job(user_id=1, **options).cpus_per_node == per_node  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("scope", "options", "per_node"),
    [
        (GpuScope.NODE, {"min_nodes": 4}, 3),
        (GpuScope.JOB, {"min_nodes": 2}, 2),
        (GpuScope.JOB, {}, 3),
        (GpuScope.TASK, {"tasks_per_node": 2}, 6),
        (GpuScope.TASK, {"tasks": 3, "min_nodes": 2}, 6),
        (GpuScope.TASK, {}, 3),
        (GpuScope.SOCKET, {"sockets_per_node": 2}, 6),
    ],
)
def test_gpus_per_node_follow_from_what_they_are_per(
    scope: GpuScope, options: dict[str, int], per_node: int
) -> None:
    asked = (GpuOption(scope, 3),)
    assert Job(user_id=1, gpus=asked, **options).gpus_per_node == per_node  # type: ignore[arg-type]


FIELDS = st.sampled_from(
    [
        *("gres", "tres_per_node", "tres_per_job", "tres_per_task", "cpus_per_tres"),
        *("min_nodes", "num_tasks", "ntasks_per_gpu", "bitflags", "shared", "partition"),
    ]
)


@settings(max_examples=200)
@given(st.dictionaries(FIELDS, st.text(max_size=30)), st.text(max_size=8), st.text(max_size=4))
def test_any_message_is_a_job_or_a_value_error(fields: dict[str, str], uid: str, het: str) -> None:
    message = {"uid": uid, "het": het} | {f"field.{k}": v for k, v in fields.items()}
    try:
        found = job_from_fields(message)
    except ValueError:
        return
    assert found.nodes >= 1
