"""A placement as Slurm's own job fields, and the user's options that are never touched."""

from __future__ import annotations

from typing import Any

import pytest
from cluster_samples import option
from hypothesis import given, settings
from hypothesis import strategies as st

from crater_slurm.model.job import GpuOption, GpuScope, Job
from crater_slurm.model.plan import Placement
from crater_slurm.slurm import gres
from crater_slurm.slurm.fields import job_from_fields
from crater_slurm.slurm.levers import Changes, changes

EVERY = frozenset({"membw", "nviops", "nvme"})
STRICT = Placement(gpus=2, cores=8, domains=1, domain_gpus=2)


def asked(
    placement: Placement, raw: dict[str, str] | None = None, exclude: str = "", **options: Any
) -> Changes:
    """Changes for a job with these fields (as text) or options (as typed)."""
    fields = {f"field.{k}": v for k, v in (raw or {}).items()}
    job = job_from_fields({"uid": "1000"} | fields) if raw else Job(user_id=1000, **options)
    return changes(placement, job, fields, exclude=exclude, gres_names=EVERY)


def test_nothing_planned_changes_nothing() -> None:
    assert asked(Placement()) == Changes()


def test_a_strict_job_is_tied_to_its_sockets_in_all_the_ways_that_slurm_needs() -> None:
    found = asked(STRICT)
    assert found.fields == {
        "gres": "gpu:2",
        "tres_per_socket": "gres/gpu:2",
        "sockets_per_node": "1",
        "num_tasks": "1",  # 24.11 and later give the whole socket without
        "cpus_per_task": "8",
        "min_cpus": "8",
        "min_nodes": "1",
        "max_nodes": "1",
    }
    assert found.flags == ["GRES_ENFORCE_BIND"]
    assert found.notes == []
    assert found.together


@pytest.mark.parametrize("style", [":", "/"])
def test_the_separator_is_this_slurms(style: str) -> None:
    found = changes(STRICT, Job(user_id=1), {}, gres_style=style)
    assert found.fields["tres_per_socket"] == f"gres{style}gpu:2"
    assert found.fields["gres"] == "gpu:2", "Slurm adds its own prefix here"


def test_a_typed_gpu_has_the_same_type_everywhere() -> None:
    found = asked(Placement(gpus=4, gpu_type="a100", domains=2, domain_gpus=2))
    assert found.fields["gres"] == "gpu:a100:4"
    assert found.fields["tres_per_socket"] == "gres/gpu:a100:2"
    assert found.fields["sockets_per_node"] == "2"


def test_the_user_s_own_type_is_repeated_and_ours_is_not_added() -> None:
    found = asked(STRICT, {"tres_per_node": "gres/gpu:a100:2"})
    assert "gres" not in found.fields
    assert found.fields["tres_per_socket"] == "gres/gpu:a100:2"


def test_gpus_that_can_t_be_shared_evenly_keep_their_cores_at_least() -> None:
    found = asked(Placement(gpus=3, cores=8, domains=2))
    assert found.flags == ["GRES_ENFORCE_BIND"]
    assert "tres_per_socket" not in found.fields
    assert not found.together
    assert found.notes == [
        "3 GPUs can't be shared evenly among 2 NUMA nodes: cores stay beside the GPUs, "
        "the number of NUMA nodes is Slurm's choice"
    ]


def test_a_strict_job_without_gpus_is_one_task_on_one_socket() -> None:
    found = asked(Placement(cores=8, domains=1))
    assert found.fields == {
        "num_tasks": "1",
        "cpus_per_task": "8",
        "min_cpus": "8",
        "cores_per_socket": "8",
        "sockets_per_node": "1",
        "ntasks_per_socket": "1",
    }
    assert found.together
    assert found.flags == []


@pytest.mark.parametrize(("own", "cpus"), [("2", "16"), ("1", "8"), ("4", "16")])
def test_a_user_s_own_threads_per_core_win_and_the_cores_stay(own: str, cpus: str) -> None:
    found = asked(Placement(cores=8, threads_per_core=2), {"threads_per_core": own})
    assert "threads_per_core" not in found.fields
    assert found.fields["cpus_per_task"] == found.fields["min_cpus"] == cpus


def test_cores_per_socket_count_cores_whatever_threads_the_user_wants() -> None:
    placement = Placement(cores=8, threads_per_core=2, domains=1)
    found = asked(placement, {"threads_per_core": "2"})
    assert (found.fields["cpus_per_task"], found.fields["cores_per_socket"]) == ("16", "8")


def test_a_user_s_own_cpus_are_threads_and_cores_per_socket_are_not() -> None:
    placement = Placement(domains=1, threads_per_core=2)
    assert asked(placement, {"cpus_per_task": "16"}).fields["cores_per_socket"] == "8"
    assert asked(placement, {"cpus_per_task": "15"}).fields["cores_per_socket"] == "8"


def test_several_tasks_without_gpus_can_t_be_kept_together_and_that_is_said() -> None:
    found = asked(Placement(cores=8, domains=1), tasks=4, min_nodes=1)
    assert "cores_per_socket" not in found.fields
    assert not found.together
    assert found.notes[0].startswith("Slurm has no option that keeps several tasks")


@pytest.mark.parametrize(
    ("placement", "options", "fields"),
    [
        (Placement(cores=8), {}, {"num_tasks": "1", "cpus_per_task": "8", "min_cpus": "8"}),
        (
            Placement(cores=8),
            {"tasks": 2},
            {"cpus_per_task": "4", "min_cpus": "8", "min_nodes": "1", "max_nodes": "1"},
        ),
        (
            Placement(cores=8, nodes=2),
            {"min_nodes": 2},
            {"num_tasks": "2", "cpus_per_task": "8", "min_cpus": "16"},
        ),
        (
            Placement(cores=12, nodes=2),
            {"tasks": 8, "min_nodes": 2},
            {"cpus_per_task": "3", "min_cpus": "24", "ntasks_per_node": "4"},
        ),
        (
            Placement(cores=12, nodes=2),
            {"tasks": 7, "min_nodes": 2},
            {"cpus_per_task": "3", "min_cpus": "21"},
        ),
        (
            Placement(cores=8, nodes=2),
            {"tasks_per_node": 2, "min_nodes": 2},
            {"num_tasks": "4", "cpus_per_task": "4", "min_cpus": "16"},
        ),
        (
            Placement(cores=8, threads_per_core=2),
            {},
            {"num_tasks": "1", "cpus_per_task": "8", "min_cpus": "8", "threads_per_core": "1"},
        ),
        (Placement(threads_per_core=2), {"cpus_per_task": 8}, {}),
    ],
)
def test_cores_become_tasks_and_cpus_per_task(
    placement: Placement, options: dict[str, Any], fields: dict[str, str]
) -> None:
    assert asked(placement, **options).fields == fields


def test_consumed_resources_are_asked_for_where_slurm_has_them() -> None:
    placement = Placement(consume={"membw": 140, "nviops": 9, "nvme": 7})
    assert asked(placement).fields == {"gres": "membw:140,nviops:9,nvme:7"}
    found = changes(placement, Job(user_id=1), {}, gres_names=frozenset({"nvme"}))
    assert found.fields == {"gres": "nvme:7"}
    assert changes(placement, Job(user_id=1), {}).fields == {}


@pytest.mark.parametrize("prefix", ["", "gres/", "gres:"])
@pytest.mark.parametrize("name", ["gres", "tres_per_node"])
def test_the_user_s_own_gres_are_kept_and_merged(prefix: str, name: str) -> None:
    own = f"{prefix}gpu:a100:2,{prefix}craynetwork:1,{prefix}nvme:500"
    found = asked(Placement(gpus=2, consume={"membw": 140, "nvme": 7}), {name: own})
    assert found.fields["gres"] == "gpu:a100:2,craynetwork:1,nvme:500,membw:140"


def test_excluded_nodes_are_added_to_the_user_s_own() -> None:
    assert asked(Placement(), exclude="n[1-3]").fields == {"exc_nodes": "n[1-3]"}
    found = asked(Placement(), {"exc_nodes": "bad1"}, exclude="n[1-3]")
    assert found.fields == {"exc_nodes": "bad1,n[1-3]"}
    assert asked(Placement(), {"exc_nodes": "bad1"}).fields == {}


@pytest.mark.parametrize(
    ("raw", "note"),
    [
        ({"bitflags": "524288"}, "--gres-flags=disable-binding wins over numa=strict"),
        (
            {"sockets_per_node": "2"},
            "--sockets-per-node or --cores-per-socket win over numa=strict",
        ),
        (
            {"cores_per_socket": "4"},
            "--sockets-per-node or --cores-per-socket win over numa=strict",
        ),
        ({"tres_per_task": "gres/gpu:2"}, "--gpus-per-task is placed by Slurm task by task"),
        ({"tres_per_socket": "gres/gpu:2"}, "--gpus-per-socket is the user's own placement"),
    ],
)
def test_a_user_s_own_placement_wins_over_numa_strict_and_that_is_said(
    raw: dict[str, str], note: str
) -> None:
    found = asked(STRICT, raw)
    assert not {"tres_per_socket", "sockets_per_node", "cores_per_socket"} & found.fields.keys()
    assert found.flags == []
    assert not found.together
    assert len(found.notes) == 1
    assert found.notes[0].startswith(note)


def test_tasks_per_gpu_never_get_tasks_per_node_beside_them() -> None:
    raw = {"ntasks_per_gpu": "1", "tres_per_node": "gres/gpu:2", "min_nodes": "2"}
    for placement in (
        Placement(gpus=2, cores=8, nodes=2),
        Placement(gpus=2, cores=8, nodes=2, domains=1, domain_gpus=2),
    ):
        assert "ntasks_per_node" not in asked(placement, raw).fields


def test_tasks_per_socket_of_the_user_win_too() -> None:
    found = asked(Placement(cores=8, domains=1), {"ntasks_per_socket": "2"})
    assert not {"ntasks_per_socket", "cores_per_socket", "sockets_per_node"} & found.fields.keys()
    assert found.notes == ["--ntasks-per-socket wins over numa=strict"]


def test_gpus_of_the_whole_job_are_per_node_only_on_one_node() -> None:
    one = asked(STRICT, {"tres_per_job": "gres/gpu:2"})
    assert one.fields["tres_per_socket"] == "gres/gpu:2"
    assert "gres" not in one.fields
    two = asked(
        Placement(gpus=2, cores=8, nodes=2, domains=1, domain_gpus=2),
        {"tres_per_job": "gres/gpu:4", "min_nodes": "2"},
    )
    assert "tres_per_socket" not in two.fields
    assert two.notes[0].startswith("--gpus on several nodes lets Slurm share them out unevenly")


#: A user's option and the fields that are then not ours to set.
FAMILIES = {
    "cpus_per_task": ("4", {"cpus_per_task", "min_cpus"}),
    "num_tasks": ("2", {"num_tasks"}),
    "ntasks_per_node": ("2", {"ntasks_per_node"}),
    "ntasks_per_gpu": ("1", {"ntasks_per_gpu", "ntasks_per_node"}),
    "min_nodes": ("1", {"min_nodes", "max_nodes"}),
    "sockets_per_node": ("2", {"sockets_per_node", "cores_per_socket", "tres_per_socket"}),
    "cores_per_socket": ("4", {"sockets_per_node", "cores_per_socket", "tres_per_socket"}),
    "ntasks_per_socket": ("1", {"ntasks_per_socket"}),
    "tres_per_socket": ("gres/gpu:1", {"tres_per_socket"}),
    "tres_per_task": ("gres/gpu:1", {"tres_per_task", "tres_per_socket"}),
    "tres_per_job": ("gres/gpu:2", {"tres_per_job"}),
    "min_mem_per_node": ("1024", set()),
    "min_mem_per_cpu": ("1024", set()),
    "features": ("a100", {"features"}),
    "req_nodes": ("n1", {"req_nodes"}),
    "shared": ("0", set()),
    "partition": ("gpu", {"partition"}),
    "time_limit": ("5", {"time_limit"}),
}
#: Set in no case, whatever the user said: memory is Slurm's, identity and cost are not ours.
NEVER = {
    *("min_mem_per_node", "min_mem_per_cpu", "mem_per_tres", "partition", "features"),
    *("req_nodes", "time_limit", "qos", "account", "shared", "tres_per_job", "tres_per_task"),
    *("tres_per_node", "cpus_per_tres"),
}
PLACEMENTS = st.builds(
    Placement,
    gpus=st.integers(0, 4),
    gpu_type=st.none() | st.just("a100"),
    cores=st.integers(0, 12),
    threads_per_core=st.integers(1, 2),
    nodes=st.integers(1, 3),
    domains=st.integers(0, 2),
    domain_gpus=st.integers(0, 2),
    consume=st.dictionaries(st.sampled_from(sorted(EVERY)), st.integers(1, 9)),
)


@settings(max_examples=300)
@given(PLACEMENTS, st.sets(st.sampled_from(sorted(FAMILIES)), max_size=5), st.booleans())
def test_no_option_family_that_the_user_used_is_overridden_or_doubled(
    placement: Placement, used: set[str], gpus_per_node: bool
) -> None:
    raw = {name: FAMILIES[name][0] for name in used}
    if gpus_per_node:
        raw["tres_per_node"] = "gres/gpu:2,gres/membw:5"
    found = asked(placement, raw | {"comment": "x"})
    forbidden = set(NEVER).union(*(FAMILIES[name][1] for name in used))
    assert not forbidden & found.fields.keys()
    names = [g.name for g in gres.parse(found.fields.get("gres", ""))]
    assert len(names) == len(set(names)), "a gres is there twice"
    if "gres" in found.fields and gpus_per_node:
        assert found.fields["gres"].startswith("gpu:2,membw:5,")
    has_gpus = gpus_per_node or used & {"tres_per_job", "tres_per_task", "tres_per_socket"}
    if has_gpus:
        assert names.count("gpu") == int(gpus_per_node and "gres" in found.fields)
    assert all(
        value.isdigit()
        for name, value in found.fields.items()
        if name != "gres" and ("tres" not in name)
    )
    if found.together and placement.gpus:
        each = gres.parse(found.fields["tres_per_socket"])[0].count
        assert each == placement.domain_gpus


def test_shards_are_never_given_gpus_beside_them() -> None:
    shards = GpuOption(GpuScope.NODE, 8, None, shards=True)
    assert "gres" not in asked(Placement(gpus=0), gpus=(shards,)).fields
    assert "gres" not in asked(Placement(gpus=1), gpus=(option(1),)).fields


@pytest.mark.parametrize(
    ("placement", "options", "fields"),
    [
        # physical-cores=no: the directive's CPUs are threads, and Slurm gives both of a core.
        (
            Placement(cores=8, threads_per_core=2, cores_are_threads=True),
            {},
            {"num_tasks": "1", "cpus_per_task": "8", "min_cpus": "8"},
        ),
        # physical-cores=yes: the option's CPUs are cores.
        (
            Placement(threads_per_core=2, options_are_cores=True),
            {"cpus_per_task": 8},
            {"threads_per_core": "1"},
        ),
        (Placement(threads_per_core=1, options_are_cores=True), {"cpus_per_task": 8}, {}),
    ],
)
def test_physical_cores_say_how_many_threads_of_a_core_are_used(
    placement: Placement, options: dict[str, Any], fields: dict[str, str]
) -> None:
    assert changes(placement, Job(user_id=1, **options), {}).fields == fields


def test_threads_without_gpus_are_kept_on_the_cores_that_they_take() -> None:
    placement = Placement(cores=8, threads_per_core=2, cores_are_threads=True, domains=1)
    found = changes(placement, Job(user_id=1), {})
    assert (found.fields["cpus_per_task"], found.fields["cores_per_socket"]) == ("8", "4")
    physical = Placement(threads_per_core=2, options_are_cores=True, domains=1)
    found = changes(physical, Job(user_id=1, cpus_per_task=8, tasks=1), {})
    assert (found.fields["threads_per_core"], found.fields["cores_per_socket"]) == ("1", "8")
