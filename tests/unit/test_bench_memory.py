"""Memory bandwidth: what is a figure and what is refused, and one small measurement for real."""

from __future__ import annotations

import dataclasses
import os
import threading
from pathlib import Path

import pytest

from crater_slurm.errors import CraterError, UsageError
from crater_slurm.model.profile import Cache, Cpu, Dimm, NodeProfile, NumaNode
from crater_slurm.probe.bench import machine, memory, numa
from crater_slurm.probe.bench.memory import MemoryOptions, Pair
from crater_slurm.probe.bench.result import Measurement, Repeats, noise, percentile
from crater_slurm.probe.bench.team import ADD, COPY, Team

PROFILE = NodeProfile(
    name="n1",
    cpu=Cpu(
        sockets=2,
        cores_per_socket=2,
        l3_caches=(Cache(cpus=(0, 1), size_kib=262144), Cache(cpus=(2, 3), size_kib=32768)),
    ),
    numa_nodes=(
        NumaNode(id=0, cpus=(0, 1), memory_mib=4096),
        NumaNode(id=1, cpus=(2, 3), memory_mib=4096),
        NumaNode(id=4, cpus=(), memory_mib=8192),
        NumaNode(id=5, cpus=(), memory_mib=0),
    ),
)


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    return root


def test_median_and_spread_of_repeats() -> None:
    repeats = Repeats((10.0, 12.0, 11.0, 10.5, 11.5))
    assert repeats.median == 11.0
    assert repeats.spread == pytest.approx(2 / 11)


def test_repeats_that_differ_by_ten_percent_are_a_figure_and_by_more_are_not() -> None:
    assert noise(Repeats((9.5, 10.0, 10.5)), "GB/s", 0.1) is None
    said = noise(Repeats((11.0, 12.1, 13.8)), "GB/s", 3.1)
    assert said == (
        "measured 12.1 GB/s, spread 23 %: the machine is busy (load 3.1); run it again when idle"
    )


def test_percentiles_lie_between_neighbours() -> None:
    assert percentile([40, 10, 30, 20], 0) == 10
    assert percentile([40, 10, 30, 20], 50) == 25
    assert percentile([40, 10, 30, 20], 99) == pytest.approx(39.7)
    assert percentile([7], 1) == 7


def judged(values: tuple[float, ...], *, allow_noise: bool) -> Measurement:
    options = MemoryOptions(allow_noise=allow_noise)
    return memory.judged("node 0", "how", Repeats(values), 3.1, options)


def test_noise_is_refused_and_where_it_is_allowed_no_profile_gets_it() -> None:
    assert judged((10.0, 14.0), allow_noise=False).value is None
    allowed = dataclasses.replace(judged((10.0, 14.0), allow_noise=True), path="x")
    assert allowed.value == 12.0
    assert not allowed.for_profile
    assert allowed.unfit == "noise: spread 33 %, load 3.1"
    quiet = dataclasses.replace(judged((10.0, 10.5), allow_noise=True), path="x")
    assert quiet.for_profile


def test_arrays_are_four_times_the_l3_and_at_least_512_mib() -> None:
    first, second = PROFILE.numa_nodes[:2]
    assert memory.total_mib(PROFILE, first) == 1024  # 4 x 256 MiB
    assert memory.total_mib(PROFILE, second) == 512  # 4 x 32 MiB is less
    unknown = dataclasses.replace(PROFILE, cpu=Cpu(sockets=2, cores_per_socket=2))
    assert memory.total_mib(unknown, first) == 2048


def dimms(*channels: str, speed: int | None = 3200) -> tuple[Dimm, ...]:
    return tuple(
        Dimm(slot=str(i), size_mib=1, channel=name, speed_mt_s=speed)
        for i, name in enumerate(channels)
    )


def test_two_modules_of_a_channel_share_it() -> None:
    assert memory.channels_gb_s(dimms("A", "A", "B")) == pytest.approx(51.2)  # 2 x 3200 x 8 B
    assert memory.channels_gb_s(dimms("A", speed=None)) is None
    assert memory.channels_gb_s(()) is None


@pytest.mark.parametrize(
    ("bandwidth", "warns"), [(20.4, True), (20.6, False), (51.0, False), (51.4, True)]
)
def test_a_figure_outside_40_to_100_percent_of_the_channels_warns(
    bandwidth: float, warns: bool
) -> None:
    profile = dataclasses.replace(PROFILE, dimms=dimms("A", "B", "C", "D"))  # 51.2 GB/s a node
    assert (memory.implausible(profile, bandwidth) is not None) == warns
    assert memory.implausible(PROFILE, bandwidth) is None


def test_pairs_are_all_targets_with_memory_from_all_nodes_with_cpus() -> None:
    assert numa.places(PROFILE, None, all_pairs=False) == [(0, 0), (1, 1)]
    everything = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert numa.places(PROFILE, None, all_pairs=True) == everything
    assert numa.places(PROFILE, [1], all_pairs=True) == everything[3:]


@pytest.mark.parametrize("wrong", [4, 9])
def test_a_node_that_has_no_cpus_can_t_be_chosen(wrong: int) -> None:
    with pytest.raises(UsageError, match=rf"NUMA node {wrong} has no CPUs here; .*\[0, 1\]"):
        numa.places(PROFILE, [wrong], all_pairs=False)


def test_one_thread_of_each_core_is_used_the_first_that_may_be(tmp_path: Path) -> None:
    base = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    root = write(tmp_path, {base.format(i): f"{i % 2},{i % 2 + 2}" for i in range(4)})
    assert machine.one_thread_per_core((0, 1, 2, 3), root) == (0, 1)
    assert machine.one_thread_per_core((1, 2), root) == (1, 2)  # of core 0 only thread 2
    assert machine.one_thread_per_core((7,), root) == (7,)


def meminfo(root: Path, **kib: int) -> Path:
    lines = "\n".join(
        f"Node 1 {key.replace('_', '(')}{')' if '_' in key else ''}:   {value} kB"
        for key, value in kib.items()
    )
    return write(root, {"sys/devices/system/node/node1/meminfo": lines})


def test_free_memory_counts_clean_cache_and_keeps_a_margin(tmp_path: Path) -> None:
    gib = 2**20
    root = meminfo(
        tmp_path, MemTotal=40 * gib, MemFree=4 * gib, Active_file=2 * gib, Inactive_file=gib,
        Dirty=gib, SReclaimable=gib,
    )  # fmt: skip
    # 4 + (2 + 1 - 1) + 1 = 7 GiB, less 5 % of 40
    assert machine.free_memory_mib(1, root) == 5 * 1024


def test_the_margin_of_a_small_node_is_256_mib(tmp_path: Path) -> None:
    root = meminfo(tmp_path, MemTotal=2**20, MemFree=2**20)
    assert machine.free_memory_mib(1, root) == 768
    with pytest.raises(CraterError, match="NUMA node 3"):
        machine.free_memory_mib(3, root)


def test_the_tightest_cgroup_limit_above_counts(tmp_path: Path) -> None:
    base = "sys/fs/cgroup/a"
    files = {
        "proc/self/cgroup": "1:name=systemd:/\n0::/a/b",
        f"{base}/memory.max": str(300 * 2**20),
        f"{base}/memory.current": str(100 * 2**20),
        f"{base}/b/memory.max": "max",
        f"{base}/b/memory.current": "0",
    }
    assert machine.cgroup_left_mib(write(tmp_path, files)) == 200
    assert machine.cgroup_left_mib(tmp_path / "none") is None


def test_a_limit_of_cgroup_v1_counts_too(tmp_path: Path) -> None:
    base = "sys/fs/cgroup/memory/slurm/job_7"
    files = {
        "proc/self/cgroup": "9:cpu,memory:/slurm/job_7\n0::/",
        f"{base}/memory.limit_in_bytes": str(64 * 2**20),
        f"{base}/memory.usage_in_bytes": str(2**20),
    }
    assert machine.cgroup_left_mib(write(tmp_path, files)) == 63


def test_busy_cpus_are_seen_in_the_kernel_s_ticks(tmp_path: Path) -> None:
    root = write(tmp_path, {"proc/stat": "cpu  9 9 9 9\ncpu0 10 0 10 70 10 0 0 0 5 0\nintr 1"})
    assert machine.cpu_ticks(root) == {0: (20, 100)}
    assert machine.busy_share({0: (20, 100)}, {0: (35, 200)}, [0, 1]) == 0.15
    assert machine.busy_share({}, {}, [0]) == 0


def pair(**changes: object) -> Pair:
    usable = {"cpu_node": 0, "memory_node": 0, "cpus": (0,), "missing_cores": 0, "total_mib": 64}
    return Pair(**{**usable, **changes})  # type: ignore[arg-type]


def test_too_little_free_memory_is_refused_with_both_figures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine, "allowed_memory_nodes", lambda: frozenset({0}))
    monkeypatch.setattr(machine, "free_memory_mib", lambda node: 1000)
    monkeypatch.setattr(machine, "cgroup_left_mib", lambda: 100)
    assert memory.obstacle(pair(total_mib=100)) is None
    assert "101 MiB are needed on NUMA node 0, and 100 MiB can be" in (
        memory.obstacle(pair(total_mib=101)) or ""
    )
    assert "may use no CPU of NUMA node 0" in (memory.obstacle(pair(cpus=())) or "")
    assert "may use no memory of NUMA node 1" in (memory.obstacle(pair(memory_node=1)) or "")


def test_busy_cpus_are_refused_with_the_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "cpus_busy", lambda cpus: 0.42)
    monkeypatch.setattr(machine, "load", lambda: 7.0)
    assert "node 0 are 42 % busy (at most 10 %; load 7.0)" in (memory.busy(pair()) or "")
    (found,) = bench_first_node(monkeypatch, allow_noise=False)
    assert "42 % busy" in (found.refused or "")


def bench_first_node(monkeypatch: pytest.MonkeyPatch, *, allow_noise: bool) -> list[Measurement]:
    monkeypatch.setattr(memory, "obstacle", lambda plan: None)
    options = MemoryOptions(allow_noise=allow_noise)
    return numa.bench(PROFILE, [(0, 0)], options, lambda what, seconds: None)


def test_steady_repeats_beside_somebody_s_load_reach_no_profile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = []

    def measure(plan: Pair, options: MemoryOptions, what: str, unfit: str | None) -> object:
        seen.append(unfit)
        figure = judged((10.0, 10.1), allow_noise=True)
        return dataclasses.replace(figure, unfit=unfit), figure

    monkeypatch.setattr(machine, "cpus_busy", lambda cpus: 0.42)
    monkeypatch.setattr(memory, "measure_pair", measure)
    add, _ = bench_first_node(monkeypatch, allow_noise=True)
    assert (add.path, add.for_profile) == ("numa_nodes[0].memory_bandwidth_gb_s", False)
    assert "42 % busy" in seen[0]


def small_team() -> Team:
    node = min(machine.allowed_memory_nodes())
    return Team(sorted(machine.allowed_cpus())[:2], node, 16 * 2**20)


def test_a_small_measurement_for_real_lies_where_it_should() -> None:
    before = os.sched_getaffinity(0)
    team = small_team()
    try:
        with team:
            for kernel in (ADD, COPY):
                repeats = team.bandwidth_gb_s(kernel, 2, 0.02)
                assert len(repeats.values) == 2
                assert 0.01 < repeats.median < 10_000
    except CraterError as error:
        if "forbids it" not in str(error):
            raise
        pytest.skip(f"memory policies are not permitted here: {error}")
    assert team.sampled > 0
    assert team.misplaced == 0
    assert os.sched_getaffinity(0) == before


def test_a_node_that_is_not_there_is_an_error_and_no_thread_stays() -> None:
    before = threading.active_count()
    with (
        pytest.raises(CraterError, match="NUMA node 63"),
        Team(sorted(machine.allowed_cpus())[:2], 63, 4 * 2**20),
    ):
        pass
    assert threading.active_count() == before
