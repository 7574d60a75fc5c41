"""What nodes report: merged into the store, changes as events, and only the node itself is heard."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from store_samples import rich_profile

from crater_slurm.errors import SlurmError, UsageError
from crater_slurm.model.health import DriveHealth, NodeHealth
from crater_slurm.model.profile import Method, Provenance
from crater_slurm.scheduler.reports import Reports, is_of_node
from crater_slurm.slurm.munge import Credential
from crater_slurm.store.codec import profile_to_dict
from crater_slurm.store.health import health_to_dict
from crater_slurm.store.repository import Store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(f"sqlite:///{tmp_path}/crater.db", create=True) as found:
        yield found


@pytest.fixture
def reports(store: Store) -> Reports:
    return Reports(lambda: store)


def scanned() -> dict[str, Any]:
    """What a scan tells of gn01: nothing that was measured or declared."""
    bare = dataclasses.replace(
        rich_profile(),
        numa_nodes=tuple(
            dataclasses.replace(n, memory_bandwidth_gb_s=None, remote_bandwidth_gb_s=())
            for n in rich_profile().numa_nodes
        ),
        cache_gb=None,
        source=Provenance(Method.MEASURED),
        provenance={},
    )
    return profile_to_dict(bare)


def test_a_first_report_makes_the_node_known(reports: Reports, store: Store) -> None:
    (event,) = reports.take_profile("gn01", scanned())
    assert event.kind == "node_new"
    assert store.names() == ["gn01"]
    assert [e.kind for e in store.events("gn01")] == ["node_new"]


def test_the_same_report_again_changes_nothing(reports: Reports, store: Store) -> None:
    reports.take_profile("gn01", scanned())
    version = store.version()
    assert reports.take_profile("gn01", scanned()) == []
    assert store.version() == version


def test_what_an_admin_and_a_calibration_said_stays(reports: Reports, store: Store) -> None:
    store.save_profile(rich_profile())
    reports.take_profile("gn01", scanned())
    found = store.profile("gn01")
    assert found is not None
    assert found.numa_nodes[0].memory_bandwidth_gb_s == 0.1 + 0.2
    assert found.where_from("numa_nodes[0].memory_bandwidth_gb_s").method is Method.MEASURED
    assert found.cache_gb == 3000


def test_lost_hardware_is_an_event_with_old_and_new(reports: Reports, store: Store) -> None:
    reports.take_profile("gn01", scanned())
    left = scanned()
    left["gpus"] = [dict(g, nvlinks=[]) for g in left["gpus"] if g["index"] != 1]
    for gpu in left["gpus"]:
        gpu.pop("nvlinks")
    kinds = [event.kind for event in reports.take_profile("gn01", left)]
    assert kinds[0] == "gpu_lost"
    newest = next(e for e in store.events("gn01") if e.kind == "gpu_lost")
    assert (newest.old, newest.new) == ("a100-pcie-40gb", None)


def test_a_node_can_not_speak_for_another(reports: Reports, store: Store) -> None:
    reports.take_profile("gn02", scanned())
    assert store.names() == ["gn02"], "the name is that of the node that was proven"


def test_a_bad_report_changes_nothing(reports: Reports, store: Store) -> None:
    with pytest.raises(UsageError, match="gn01: cpuu"):
        reports.take_profile("gn01", scanned() | {"cpuu": 1})
    assert store.names() == []


def latency(value: float) -> dict[str, Any]:
    drive = DriveHealth(name="nvme0n1", latency_us=value)
    return health_to_dict(NodeHealth(node="gn01", time=1.0, drives=(drive,)))


def test_a_drive_that_became_slow_is_told_once_and_when_it_recovered(
    reports: Reports, store: Store
) -> None:
    store.save_profile(rich_profile())  # calibrated at 87.2 µs
    told = [
        [event.kind for event in reports.take_health("gn01", latency(value))]
        for value in (90, 130, 130, 90, 130, 130, 130, 130, 90, 130, 90, 90, 90, 90)
    ]
    assert list(itertools.chain.from_iterable(told)) == ["nvme_slow", "nvme_recovered"]
    slow = next(e for e in store.events("gn01") if e.kind == "nvme_slow")
    assert (slow.old, slow.new) == ("87.2 µs", "130 µs")
    assert slow.message == "nvme0n1 answers 49% slower than when it was calibrated."


def test_one_slow_moment_is_no_event(reports: Reports, store: Store) -> None:
    store.save_profile(rich_profile())
    assert reports.take_health("gn01", latency(5000.0)) == []
    assert reports.take_health("gn01", latency(80.0)) == []


def test_health_is_kept_as_the_newest_also_of_an_unknown_node(reports: Reports) -> None:
    assert reports.health("gn01") is None
    reports.take_health("gn01", latency(1.0))
    reports.take_health("gn01", latency(2.0))
    found = reports.health("gn01")
    assert found is not None
    assert found.drives[0].latency_us == 2.0


# Whose report it is


def proof(host: str, address: str = "10.0.0.1") -> Credential:
    return Credential(0, 0, "", host, address)


def record(**fields: str) -> Any:
    def ask(_: str) -> Mapping[str, str]:
        return fields

    return ask


def no_slurm(_: str) -> Mapping[str, str]:
    raise SlurmError("slurmctld is away")


@pytest.mark.parametrize(
    ("credential", "ask", "own"),
    [
        (proof("gn01"), no_slurm, True),
        (proof("gn01.cluster.example"), no_slurm, True),
        (proof("gn02"), no_slurm, False),
        (proof("gn02"), record(NodeHostName="gn01", NodeAddr="gn01"), False),
        (proof("host7"), record(NodeHostName="host7"), True),
        (proof("x", "192.0.2.9"), record(NodeAddr="192.0.2.9"), True),
        (proof("x", "127.0.0.1"), record(NodeAddr="localhost"), True),
        (proof("x", "192.0.2.8"), record(NodeAddr="192.0.2.9"), False),
        (proof("", ""), record(NodeHostName="", NodeAddr=""), False),
        (proof("x"), record(NodeAddr="no.such.host.invalid"), False),
    ],
)
def test_a_report_is_taken_from_the_node_itself(
    credential: Credential, ask: Any, own: bool
) -> None:
    assert is_of_node(credential, "gn01", ask) is own
