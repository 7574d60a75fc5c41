"""A new report over what is known: nothing measured is lost, nothing stale is kept, all is told."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from store_samples import plain_profile, rich_profile

from crater_slurm.model.profile import (
    Cpu,
    Dimm,
    Gpu,
    Method,
    NodeProfile,
    NumaNode,
    Nvme,
    PciDevice,
    PciKind,
    Provenance,
    Software,
)
from crater_slurm.store.codec import profile_from_dict, profile_to_dict
from crater_slurm.store.drift import drift
from crater_slurm.store.merge import merge
from crater_slurm.store.records import Event

MARCH = Provenance(Method.MEASURED, datetime(2026, 3, 1, tzinfo=UTC))
APRIL = Provenance(Method.MEASURED, datetime(2026, 4, 1, tzinfo=UTC))
NOW = 1000.0


def scanned(**changes: Any) -> NodeProfile:
    """What a scan without any measurement says of a node with two GPUs and two drives."""
    base = NodeProfile(
        name="gn01",
        cpu=Cpu(model="EPYC", sockets=2, cores_per_socket=2, avx=frozenset({"avx2"})),
        numa_nodes=(
            NumaNode(id=0, cpus=(0, 1), memory_mib=100_000),
            NumaNode(id=1, cpus=(2, 3), memory_mib=100_000),
        ),
        gpus=(
            Gpu(index=0, model="a100", uuid="GPU-a", pci_bus_id="0000:01:00.0", memory_mib=40960),
            Gpu(index=1, model="a100", uuid="GPU-b", pci_bus_id="0000:02:00.0", memory_mib=40960),
        ),
        nvmes=(
            Nvme(name="nvme0n1", stable_id="S1", model="PM9A3", size_gb=3840, wear_percent=1),
            Nvme(name="nvme1n1", stable_id="S2", model="PM9A3", size_gb=3840, wear_percent=1),
        ),
        dimms=(Dimm(slot="A1", size_mib=65536), Dimm(slot="B1", size_mib=65536)),
        software=Software(kernel="6.12", gpu_driver="590.48"),
        source=APRIL,
    )
    return dataclasses.replace(base, **changes)


def calibrated() -> NodeProfile:
    """The same node, measured in March."""
    base = scanned()
    return dataclasses.replace(
        base,
        numa_nodes=tuple(
            dataclasses.replace(n, memory_bandwidth_gb_s=142.0 - n.id) for n in base.numa_nodes
        ),
        nvmes=tuple(
            dataclasses.replace(d, random_read_iops=800_000, read_latency_us=80.0)
            for d in base.nvmes
        ),
        cache_gb=3000,
        source=MARCH,
        provenance={"cache_gb": Provenance(Method.DECLARED)},
    )


def kinds(found: list[Event]) -> list[str]:
    return [event.kind for event in found]


# Merging


def test_a_first_report_is_the_profile() -> None:
    assert merge(None, scanned()) == scanned()


def test_what_was_measured_stays_with_its_method_and_time() -> None:
    merged = merge(calibrated(), scanned())
    assert [n.memory_bandwidth_gb_s for n in merged.numa_nodes] == [142.0, 141.0]
    assert merged.nvmes[1].random_read_iops == 800_000
    assert merged.where_from("numa_nodes[1].memory_bandwidth_gb_s") == MARCH
    assert merged.where_from("nvmes[0].read_latency_us") == MARCH
    assert (merged.cache_gb, merged.where_from("cache_gb").method) == (3000, Method.DECLARED)
    assert merged.where_from("gpus[0].memory_mib") == APRIL


def test_what_was_measured_again_takes_its_place() -> None:
    fresh = scanned()
    node = dataclasses.replace(fresh.numa_nodes[0], memory_bandwidth_gb_s=139.0)
    merged = merge(calibrated(), scanned(numa_nodes=(node, fresh.numa_nodes[1])))
    assert [n.memory_bandwidth_gb_s for n in merged.numa_nodes] == [139.0, 141.0]


def test_a_node_that_lost_a_module_has_no_bandwidth_any_more() -> None:
    lost = NumaNode(id=0, cpus=(0, 1), memory_mib=75_000)
    merged = merge(calibrated(), scanned(numa_nodes=(lost, scanned().numa_nodes[1])))
    assert [n.memory_bandwidth_gb_s for n in merged.numa_nodes] == [None, 141.0]


def test_a_little_memory_more_or_less_is_the_same_node() -> None:
    boot = NumaNode(id=0, cpus=(0, 1), memory_mib=99_000)
    merged = merge(calibrated(), scanned(numa_nodes=(boot, scanned().numa_nodes[1])))
    assert merged.numa_nodes[0].memory_bandwidth_gb_s == 142.0


def test_values_follow_a_drive_to_its_new_name() -> None:
    first, second = scanned().nvmes
    swapped = (
        dataclasses.replace(second, name="nvme0n1"),
        dataclasses.replace(first, name="nvme1n1"),
    )
    old = calibrated()
    slow = dataclasses.replace(old.nvmes[1], random_read_iops=300_000)
    merged = merge(dataclasses.replace(old, nvmes=(old.nvmes[0], slow)), scanned(nvmes=swapped))
    assert [(d.name, d.random_read_iops) for d in merged.nvmes] == [
        ("nvme0n1", 300_000),
        ("nvme1n1", 800_000),
    ]


def test_a_replaced_drive_starts_unknown() -> None:
    other = dataclasses.replace(scanned().nvmes[0], stable_id="S9")
    merged = merge(calibrated(), scanned(nvmes=(other, scanned().nvmes[1])))
    assert [d.random_read_iops for d in merged.nvmes] == [None, 800_000]


def test_a_declared_drive_is_the_one_of_its_name() -> None:
    declared = NodeProfile(
        name="gn01",
        cpu=scanned().cpu,
        numa_nodes=scanned().numa_nodes,
        nvmes=(Nvme(name="nvme0n1", random_read_iops=500_000),),
    )
    merged = merge(declared, scanned())
    assert [d.random_read_iops for d in merged.nvmes] == [500_000, None]
    assert merged.where_from("nvmes[0].random_read_iops").method is Method.DECLARED


def test_an_override_stays_over_what_the_machine_says() -> None:
    pinned = Provenance(Method.DECLARED, override=True)
    old = calibrated()
    gpu = dataclasses.replace(old.gpus[1], memory_mib=40_000)
    old = dataclasses.replace(
        old, gpus=(old.gpus[0], gpu), provenance={"gpus[1].memory_mib": pinned}
    )
    reordered = tuple(dataclasses.replace(g, index=1 - g.index) for g in reversed(scanned().gpus))
    merged = merge(old, scanned(gpus=reordered))
    assert [g.memory_mib for g in merged.gpus] == [40_000, 40_960]
    assert merged.where_from("gpus[0].memory_mib") == pinned
    assert [g.index for g in merged.gpus] == [0, 1]


def test_what_a_node_only_repeats_is_no_news() -> None:
    repeated = scanned(cache_gb=1, provenance={"cache_gb": Provenance(Method.DECLARED)})
    assert merge(calibrated(), repeated).cache_gb == 3000


def test_a_declared_value_gives_way_to_the_machine() -> None:
    old = dataclasses.replace(
        scanned(),
        gpus=(dataclasses.replace(scanned().gpus[0], memory_mib=1), scanned().gpus[1]),
        provenance={"gpus[0].memory_mib": Provenance(Method.DECLARED)},
    )
    assert merge(old, scanned()).gpus[0].memory_mib == 40_960


def test_a_lost_gpu_is_not_kept() -> None:
    assert len(merge(calibrated(), scanned(gpus=scanned().gpus[:1])).gpus) == 1


@pytest.mark.parametrize("old", [rich_profile(), plain_profile("gn01"), calibrated()])
@pytest.mark.parametrize("new", [rich_profile(), plain_profile("gn01"), scanned()])
def test_a_merged_profile_can_be_stored_and_merging_again_changes_nothing(
    old: NodeProfile, new: NodeProfile
) -> None:
    merged = merge(old, new)
    assert profile_from_dict(profile_to_dict(merged)) == merged
    assert merge(merged, new) == merged


# Drift


def test_the_first_profile_is_one_event() -> None:
    assert kinds(drift(None, scanned(), NOW)) == ["node_new"]


def test_nothing_new_is_no_event() -> None:
    assert drift(calibrated(), merge(calibrated(), scanned()), NOW) == []


def test_a_lost_gpu_is_one_event_and_not_a_change_of_all_behind_it() -> None:
    left = dataclasses.replace(scanned().gpus[1], index=0)
    (event,) = drift(scanned(), scanned(gpus=(left,)), NOW)
    assert event == Event(
        node="gn01",
        time=NOW,
        kind="gpu_lost",
        message="GPU 0 (a100 at 0000:01:00.0) is gone.",
        path="gpus[0]",
        old="a100",
        new=None,
    )


def test_a_lost_module_is_told_with_the_memory_that_went() -> None:
    node = dataclasses.replace(scanned().numa_nodes[0], memory_mib=34_464)
    new = scanned(numa_nodes=(node, scanned().numa_nodes[1]), dimms=scanned().dimms[1:])
    module, memory = drift(scanned(), new, NOW)
    assert (module.kind, module.message) == ("dimm_lost", "The memory module in A1 is gone.")
    assert memory.kind == "memory_changed"
    assert memory.message.startswith("NUMA node 0 has 64 GiB less memory than before;")
    assert (memory.old, memory.new) == ("100000 MiB", "34464 MiB")


def test_a_scan_that_may_not_read_modules_loses_none() -> None:
    assert drift(scanned(), scanned(dimms=()), NOW) == []


@pytest.mark.parametrize(
    ("field", "was", "now", "kind"),
    [
        ("random_read_iops", 800_000, 560_000, "nvme_slower"),
        ("random_read_iops", 800_000, 570_000, "nvme_measured"),
        ("random_read_iops", 800_000, 760_000, None),
        ("read_latency_us", 70.0, 100.0, "nvme_slower"),
        ("read_latency_us", 80.0, 100.0, "nvme_measured"),
        ("read_latency_us", 100.0, 50.0, "nvme_measured"),
        ("sequential_write_mb_s", 3000.0, 2000.0, "nvme_slower"),
    ],
)
def test_a_drive_that_lost_30_percent_is_told_as_slower(
    field: str, was: float, now: float, kind: str | None
) -> None:
    def drive(value: float) -> NodeProfile:
        first = dataclasses.replace(scanned().nvmes[0], **{field: value})
        return scanned(nvmes=(first, scanned().nvmes[1]))

    assert kinds(drift(drive(was), drive(now), NOW)) == ([kind] if kind else [])


@pytest.mark.parametrize(
    ("was", "now", "told"),
    [(None, 0.69, True), (0.9, 0.69, True), (0.6, 0.69, False), (0.69, 0.7, False)],
)
def test_a_drive_that_became_unsteady_is_told(was: float | None, now: float, told: bool) -> None:
    def ratio(value: float | None) -> NodeProfile:
        first = dataclasses.replace(scanned().nvmes[0], iops_stability_ratio=value)
        return scanned(nvmes=(first, scanned().nvmes[1]))

    found = [e for e in drift(ratio(was), ratio(now), NOW) if e.kind == "nvme_unsteady"]
    assert len(found) == told
    if told:
        assert "0.69 of the IOPS" in found[0].message
        assert "weight 0.3" in found[0].message
    first = drift(None, ratio(now), NOW)
    assert ("nvme_unsteady" in kinds(first)) is (now < 0.7)


def test_wear_is_told_by_steps_of_ten() -> None:
    def worn(percent: int) -> NodeProfile:
        first = dataclasses.replace(scanned().nvmes[0], wear_percent=percent)
        return scanned(nvmes=(first, scanned().nvmes[1]))

    assert drift(worn(11), worn(19), NOW) == []
    (event,) = drift(worn(19), worn(20), NOW)
    assert event.message == "nvme0n1 (PM9A3) has used 20 % of its rated endurance."


def test_a_new_kernel_and_a_lost_nic_are_told() -> None:
    nic = PciDevice(address="0000:5e:00.0", kind=PciKind.NIC)
    gpu = PciDevice(address="0000:01:00.0", kind=PciKind.GPU)
    old = scanned(pci_devices=(nic, gpu))
    new = scanned(pci_devices=(gpu,), software=Software(kernel="6.13", gpu_driver="590.48"))
    software, lost = drift(old, new, NOW)
    assert (software.kind, software.old, software.new) == ("software_changed", "6.12", "6.13")
    assert (lost.kind, lost.message) == ("nic_lost", "The NIC at 0000:5e:00.0 is gone.")


@given(st.permutations(range(2)), st.permutations(range(2)))
def test_order_alone_is_no_drift(gpus: list[int], nvmes: list[int]) -> None:
    new = scanned(
        gpus=tuple(scanned().gpus[i] for i in gpus),
        nvmes=tuple(scanned().nvmes[i] for i in nvmes),
    )
    assert drift(calibrated(), merge(calibrated(), new), NOW) == []
