"""What a job needs: its directives joined with the user's own options, which win."""

from __future__ import annotations

from typing import Any

import pytest
from cluster_samples import option
from hypothesis import given, settings
from hypothesis import strategies as st

from crater_slurm.model.directives import parse_script
from crater_slurm.model.job import GpuOption, GpuScope, Job
from crater_slurm.placement.need import Joined, Need, join


def joined(words: str = "", **options: Any) -> Joined:
    return join(parse_script(f"#CRATER {words}").request, Job(user_id=1, **options))


def test_a_job_that_says_nothing_needs_nothing() -> None:
    assert joined() == Joined(Need())


def test_directives_alone_are_the_need() -> None:
    found = joined(
        "gpus=2 gpu-memory=16GiB gpu-type=A100 precision=bf16 cpus=8 avx=avx2 "
        "memory-bandwidth=140 ssd-iops=800k ssd-latency=100us cache=200 numa=strict"
    )
    assert found.notes == ()
    assert found.need == Need(
        gpus=2,
        gpu_type="a100",
        gpu_memory_mib=16384,
        precision="bf16",
        cpus=8,
        avx="avx2",
        memory_bandwidth_gb_s=140,
        ssd_iops=800_000,
        ssd_latency_us=100,
        cache_gb=200,
        strict=True,
    )


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"gpus": (option(4),)}, "--gres or --gpus-per-node asks for 4 per node and wins"),
        ({"gpus": (option(4, scope=GpuScope.JOB),)}, "--gpus asks for 4 per node and wins"),
        (
            {"gpus": (option(2, scope=GpuScope.TASK),), "tasks": 2},
            "--gpus-per-task asks for 4 per node and wins",
        ),
        (
            {"gpus": (option(2, scope=GpuScope.SOCKET),), "sockets_per_node": 2},
            "--gpus-per-socket asks for 4 per node and wins",
        ),
    ],
)
def test_a_gpu_option_wins_over_gpus_and_says_so(options: dict[str, Any], says: str) -> None:
    found = joined("gpus=2", **options)
    assert found.need.gpus == 4
    assert found.notes == (f"{says} over gpus=2",)


def test_an_option_that_agrees_is_no_news() -> None:
    assert joined("gpus=2", gpus=(option(2),)).notes == ()
    assert joined("cpus=8", cpus_per_task=8).notes == ()


def test_an_option_of_no_gpus_wins_too() -> None:
    found = joined("gpus=2 gpu-memory=16GiB", gpus=(option(0),))
    assert (found.need.gpus, found.need.gpu_memory_mib) == (0, None)


def test_a_type_in_the_option_wins_over_gpu_type() -> None:
    found = joined("gpu-type=a100", gpus=(option(2, "H100"),))
    assert (found.need.gpu_type, found.need.gres_type) == ("h100", "H100")
    assert not found.need.untyped
    assert found.notes == ("the option's GPU type H100 wins over gpu-type=a100",)


def test_an_option_without_a_type_is_known_as_such() -> None:
    assert joined("gpu-type=a100", gpus=(option(2),)).need.untyped
    assert joined("", gpus=(option(1, "a"), option(1, "b"))).need.untyped
    assert not joined("gpu-type=a100 gpus=2").need.untyped


@pytest.mark.parametrize("words", ["gpu-memory=16GiB", "gpu-type=a100"])
def test_a_gpu_s_quality_alone_asks_for_one_gpu(words: str) -> None:
    found = joined(words)
    assert found.need.gpus == 1
    assert found.notes == ("gpu-type or gpu-memory without gpus asks for one GPU",)


def test_a_precision_alone_asks_for_no_gpu() -> None:
    assert joined("precision=bf16").need == Need()


def test_shards_are_the_user_s_own_business() -> None:
    shards = GpuOption(GpuScope.NODE, 8, None, shards=True)
    found = joined("gpus=2 gpu-memory=16GiB", gpus=(shards,))
    assert found.need.gpus == 0
    assert found.need.gpu_memory_mib == 16384
    assert found.notes == ("the option for GPU shards wins over gpus=2",)


@pytest.mark.parametrize(
    ("words", "options", "cpus", "threads"),
    [
        ("", {}, None, False),
        ("cpus=8", {}, 8, False),
        ("", {"cpus_per_task": 6}, 6, True),
        ("cpus=8", {"cpus_per_task": 6}, 6, True),
        ("", {"tasks_per_node": 4, "cpus_per_task": 3}, 12, True),
        # -n alone leaves the cores of a task open, and the directive fills that.
        ("cpus=8", {"tasks": 2}, 8, False),
        ("cpus=8", {"tasks": 16, "min_nodes": 2}, 8, False),
        ("cpus=2", {"tasks": 4, "min_nodes": 1}, 4, False),
        # Slurm gives each task as many: 10 cores for 3 tasks are 4 each.
        ("cpus=10", {"tasks": 3, "min_nodes": 1}, 12, False),
        # Without -N Slurm may spread the tasks, so that one is all that a node must hold ...
        ("", {"tasks": 64, "cpus_per_task": 2}, 2, True),
        ("", {"tasks": 64}, 1, True),
        # ... unless they must stay together.
        ("numa=strict", {"tasks": 8, "cpus_per_task": 2}, 16, True),
        ("", {"gpus": (option(2),), "cpus_per_gpu": 6}, 12, True),
        ("cpus=4", {"gpus": (option(2),), "cpus_per_gpu": 6}, 12, True),
    ],
)
def test_cpus_come_from_the_options_where_those_say_them(
    words: str, options: dict[str, Any], cpus: int | None, threads: bool
) -> None:
    need = joined(words, **options).need
    assert (need.cpus, need.cpus_are_threads) == (cpus, threads)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"cpus_per_task": 6}, "the options ask for 6 CPUs and win over cpus=10"),
        (
            {"gpus": (option(2),), "cpus_per_gpu": 6},
            "--cpus-per-gpu asks for 12 CPUs and wins over cpus=10",
        ),
        ({"tasks": 3, "min_nodes": 1}, "cpus=10 shared by 3 tasks asks for 12 cores"),
    ],
)
def test_other_cpus_than_the_directive_s_are_said(options: dict[str, Any], says: str) -> None:
    assert joined("cpus=10", **options).notes == (says,)


def test_memory_is_slurm_s_and_counted_per_node() -> None:
    assert joined(memory_per_node_mib=1024).need.memory_mib == 1024
    assert joined("cpus=8", memory_per_cpu_mib=512).need.memory_mib == 4096
    assert joined(memory_per_cpu_mib=512).need.memory_mib is None


def test_whole_nodes_can_t_be_kept_on_one_numa_node_and_that_is_said() -> None:
    found = joined("numa=strict", exclusive=True)
    assert not found.need.strict
    assert found.notes == ("--exclusive takes whole nodes and wins over numa=strict",)


def test_nodes_are_the_least_number() -> None:
    assert joined(min_nodes=3, max_nodes=5).need.nodes == 3
    assert joined(min_nodes=0).need.nodes == 1


OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "min_nodes": st.integers(0, 4),
        "tasks": st.integers(0, 9),
        "tasks_per_node": st.integers(0, 9),
        "cpus_per_task": st.integers(0, 9),
        "cpus_per_gpu": st.integers(0, 9),
        "exclusive": st.booleans(),
        "gpus": st.lists(
            st.builds(
                GpuOption,
                st.sampled_from(GpuScope),
                st.integers(0, 9),
                st.none() | st.sampled_from(["a", "b"]),
                st.booleans(),
            ),
            max_size=2,
        ).map(tuple),
    },
)


@settings(max_examples=200)
@given(OPTIONS, st.sampled_from(["", "gpus=2", "cpus=8", "gpus=2 cpus=8 numa=strict"]))
def test_any_options_join_to_amounts_that_are_none_or_not_negative(
    options: dict[str, Any], words: str
) -> None:
    need = joined(words, **options).need
    assert need.nodes >= 1
    assert need.gpus >= 0
    assert need.cpus is None or need.cpus >= 0


@pytest.mark.parametrize(
    ("words", "options", "cpus", "threads", "in_options"),
    [
        ("cpus=8", {}, 8, False, False),
        ("cpus=8 physical-cores=yes", {}, 8, False, False),
        ("cpus=8 physical-cores=no", {}, 8, True, False),
        ("gpus=1", {"cpus_per_task": 8}, 8, True, True),
        ("physical-cores=yes", {"cpus_per_task": 8}, 8, False, True),
        ("physical-cores=no", {"cpus_per_task": 8}, 8, True, True),
        ("cpus=4 physical-cores=yes", {"cpus_per_task": 8}, 8, False, True),
        ("cpus=4 physical-cores=no", {"cpus_per_task": 8}, 8, True, True),
        ("physical-cores=yes", {"cpus_per_task": 8, "threads_per_core": 2}, 8, True, True),
        ("physical-cores=yes", {"cpus_per_gpu": 4, "gpus": (option(2),)}, 8, False, True),
    ],
)
def test_physical_cores_say_what_a_cpu_is(
    words: str, options: dict[str, Any], cpus: int, threads: bool, in_options: bool
) -> None:
    need = joined(words, **options).need
    assert (need.cpus, need.cpus_are_threads, need.cpus_in_options) == (cpus, threads, in_options)


@pytest.mark.parametrize(
    ("own", "said", "told"),
    [(1, "yes", False), (2, "no", False), (1, "no", True), (2, "yes", True)],
)
def test_threads_per_core_win_over_physical_cores(own: int, said: str, told: bool) -> None:
    notes = joined(f"physical-cores={said}", threads_per_core=own, cpus_per_task=4).notes
    assert notes == ((f"--threads-per-core={own} wins over physical-cores={said}",) if told else ())


@pytest.mark.parametrize(("own", "threads"), [(1, False), (2, True), (None, True)])
def test_of_one_thread_of_each_core_the_options_count_cores(own: int | None, threads: bool) -> None:
    """Slurm wants 32 cores for -c 32 --threads-per-core=1: 16 with two threads each don't do."""
    need = joined("gpus=1", threads_per_core=own, cpus_per_task=32).need
    assert (need.cpus, need.cpus_are_threads) == (32, threads)


@pytest.mark.parametrize("words", ["mig=1g.5gb", "tensor-cores=yes", "mig=1g.5gb tensor-cores=yes"])
def test_what_is_asked_of_a_gpu_asks_for_one(words: str) -> None:
    found = joined(words)
    assert found.need.gpus == 1
    assert found.notes == ("mig or tensor-cores without gpus asks for one GPU",)


def test_needs_of_gpus_are_none_of_a_job_without_gpus() -> None:
    need = joined("gpus=0 tensor-cores=yes mig=1g.5gb driver=535 cuda=12.2").need
    assert need == Need(driver="535", cuda="12.2")
    assert joined("gpus=1 tensor-cores=no").need == Need(gpus=1)
