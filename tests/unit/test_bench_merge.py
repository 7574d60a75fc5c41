"""Measured values into a profile: exactly the measured paths, and nothing refused."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime

import pytest

from crater_slurm.errors import CraterError
from crater_slurm.model.profile import (
    Cpu,
    Method,
    NodeProfile,
    NumaNode,
    Nvme,
    Provenance,
)
from crater_slurm.probe.bench.merge import check_same_machine, merged
from crater_slurm.probe.bench.result import Measurement

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
LATER = datetime(2026, 3, 1, 13, tzinfo=UTC)
PROFILE = NodeProfile(
    name="n1",
    cpu=Cpu(sockets=1, cores_per_socket=2),
    numa_nodes=(
        NumaNode(id=0, cpus=(0,), memory_mib=100, remote_bandwidth_gb_s=(1.0, 2.0, 0.0)),
        NumaNode(id=1, cpus=(1,), memory_mib=100, memory_bandwidth_gb_s=99.0),
        NumaNode(id=2, cpus=(), memory_mib=0),
    ),
    nvmes=(Nvme(name="nvme0n1"),),
    source=Provenance(Method.DECLARED),
    provenance={"nvmes[0].size_gb": Provenance(Method.CATALOGUE)},
)


def figure(path: str, value: float, **changes: object) -> Measurement:
    item = Measurement(what="x", value=value, unit="GB/s", time=NOON, path=path)
    return dataclasses.replace(item, **changes)  # type: ignore[arg-type]


def test_a_value_comes_with_method_and_time_and_others_stay() -> None:
    profile, changed = merged(PROFILE, [figure("numa_nodes[0].memory_bandwidth_gb_s", 142.5)])
    assert changed == ("numa_nodes[0].memory_bandwidth_gb_s",)
    assert [n.memory_bandwidth_gb_s for n in profile.numa_nodes] == [142.5, 99.0, None]
    assert profile.where_from(changed[0]) == Provenance(Method.MEASURED, NOON)
    assert profile.where_from("numa_nodes[1].memory_bandwidth_gb_s").method == Method.DECLARED
    assert profile.provenance["nvmes[0].size_gb"] == Provenance(Method.CATALOGUE)
    assert PROFILE.numa_nodes[0].memory_bandwidth_gb_s is None


@pytest.mark.parametrize("changes", [{"refused": "busy"}, {"unfit": "noise"}, {"value": None}])
def test_what_is_refused_or_unfit_stays_out(changes: dict[str, object]) -> None:
    item = dataclasses.replace(figure("numa_nodes[1].memory_bandwidth_gb_s", 5.0), **changes)  # type: ignore[arg-type]
    assert merged(PROFILE, [item]) == (PROFILE, ())


def test_iops_are_whole_numbers() -> None:
    profile, _ = merged(PROFILE, [figure("nvmes[0].random_read_iops", 930_000.4)])
    assert profile.nvmes[0].random_read_iops == 930_000
    assert isinstance(profile.nvmes[0].random_read_iops, int)


def test_a_whole_row_of_the_matrix_is_written_with_the_time_of_its_last_figure() -> None:
    results = [
        figure("numa_nodes[0].memory_bandwidth_gb_s", 100.0),
        figure("numa_nodes[0].remote_bandwidth_gb_s[1]", 60.0, time=LATER),
    ]
    profile, changed = merged(PROFILE, results, matrix=True)
    # There is no memory on the third node.
    assert profile.numa_nodes[0].remote_bandwidth_gb_s == (100.0, 60.0, 0.0)
    path = "numa_nodes[0].remote_bandwidth_gb_s"
    assert changed == ("numa_nodes[0].memory_bandwidth_gb_s", path)
    assert profile.where_from(path) == Provenance(Method.MEASURED, LATER)
    assert profile.numa_nodes[1].remote_bandwidth_gb_s == ()


def test_a_row_that_lacks_a_pair_stays_as_it_was() -> None:
    results = [
        figure("numa_nodes[0].memory_bandwidth_gb_s", 100.0),
        figure("numa_nodes[0].remote_bandwidth_gb_s[1]", 60.0, unfit="noise"),
    ]
    profile, changed = merged(PROFILE, results, matrix=True)
    assert profile.numa_nodes[0].remote_bandwidth_gb_s == (1.0, 2.0, 0.0)
    assert changed == ("numa_nodes[0].memory_bandwidth_gb_s",)


def test_a_profile_of_other_cpus_is_not_written() -> None:
    check_same_machine(PROFILE, PROFILE)
    other = dataclasses.replace(PROFILE, numa_nodes=PROFILE.numa_nodes[:1])
    with pytest.raises(CraterError, match="other NUMA nodes or CPUs than this machine"):
        check_same_machine(other, PROFILE)
