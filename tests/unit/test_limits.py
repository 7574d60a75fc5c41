"""Partitions and reservations as scontrol of 22.05, 24.11 and 26.05 prints them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crater_slurm.model.cluster import Partition, Reservation
from crater_slurm.slurm import limits

# As printed by the releases, with the fields that only some have.
_GPU = (
    "PartitionName=gpu AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL AllocNodes=ALL Default=YES "
    "QoS=N/A DefaultTime=00:30:00 DisableRootJobs=NO {exclusive} GraceTime=0 Hidden=NO MaxNodes=2 "
    "MaxTime=1-02:04:00 MinNodes=1 LLN=NO MaxCPUsPerNode=16 {socket}Nodes=a[1-2],e1,h1,l1,s1 "
    "PriorityJobFactor=1 PriorityTier=1 RootOnly=NO ReqResv=NO OverSubscribe=NO OverTimeLimit=NONE "
    "PreemptMode=OFF State=UP TotalCPUs=488 TotalNodes=6 SelectTypeParameters=NONE "
    "JobDefaults=(null) DefMemPerNode=UNLIMITED MaxMemPerNode=4000 "
    "TRES=cpu=488,mem=4655G,node=6,billing=488\n"
)
_CPU = (
    "PartitionName=cpu AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL AllocNodes=ALL Default=NO "
    "QoS=N/A DefaultTime=NONE DisableRootJobs=NO {exclusive} GraceTime=0 Hidden=NO "
    "MaxNodes=UNLIMITED MaxTime=UNLIMITED MinNodes=0 LLN=NO MaxCPUsPerNode=UNLIMITED {socket}"
    "Nodes=c1 PriorityJobFactor=1 PriorityTier=1 RootOnly=NO ReqResv=NO OverSubscribe=NO "
    "OverTimeLimit=NONE PreemptMode=OFF State=DRAIN TotalCPUs=96 TotalNodes=1 "
    "SelectTypeParameters=NONE JobDefaults=(null) DefMemPerCPU=64 MaxMemPerCPU=4000 "
    "TRES=cpu=96,mem=754G,node=1,billing=96\n"
)
PARTITIONS = {
    "22.05": {"exclusive": "ExclusiveUser=NO", "socket": ""},
    "24.11": {
        "exclusive": "ExclusiveUser=NO ExclusiveTopo=NO",
        "socket": "MaxCPUsPerSocket=UNLIMITED ",
    },
    "26.05": {"exclusive": "Exclusive=NO", "socket": "MaxCPUsPerSocket=UNLIMITED "},
}
_MAINT = (
    "ReservationName=maint StartTime=2026-11-29T23:38:00 EndTime=2026-11-30T00:38:00 "
    "Duration=01:00:00 Nodes=a[1-2],c1 NodeCnt=3 CoreCnt=456 Features=(null) "
    "PartitionName=(null) Flags=MAINT,IGNORE_JOBS,SPEC_NODES,ALL_NODES TRES=cpu=584 {more}"
    "Users=root Groups=(null) Accounts=(null) Licenses=(null) State=ACTIVE BurstBuffer=(null) "
    "{watts}MaxStartDelay=(null)\n"
)
RESERVATIONS = {
    "22.05": {"more": "", "watts": "Watts=n/a "},
    "24.11": {"more": "", "watts": ""},
    "26.05": {"more": "AllowedPartitions=(null) QOS=(null) ", "watts": ""},
}


@pytest.fixture
def utc() -> Iterator[None]:
    """Slurm prints local time; a test needs one that is the same everywhere."""
    before = os.environ.get("TZ")
    os.environ["TZ"] = "UTC"
    time.tzset()
    yield
    if before is None:
        del os.environ["TZ"]
    else:
        os.environ["TZ"] = before
    time.tzset()


@pytest.mark.parametrize("version", PARTITIONS)
def test_partitions_are_the_same_in_every_version_s_words(version: str) -> None:
    words = PARTITIONS[version]
    assert limits.partitions(_GPU.format(**words) + _CPU.format(**words)) == (
        Partition(
            name="gpu",
            state="UP",
            min_nodes=1,
            max_nodes=2,
            max_time_minutes=26 * 60 + 4,
            default_time_minutes=30,
            max_cpus_per_node=16,
            max_memory_per_node_mib=4000,
        ),
        Partition(name="cpu", state="DRAIN"),
    )


@pytest.mark.parametrize("version", RESERVATIONS)
@pytest.mark.usefixtures("utc")
def test_reservations_are_the_same_in_every_version_s_words(version: str) -> None:
    (found,) = limits.reservations(_MAINT.format(**RESERVATIONS[version]))
    assert found == Reservation(
        name="maint",
        start=1795995480.0,
        end=1795995480.0 + 3600,
        nodes=frozenset({"a1", "a2", "c1"}),
        flags=frozenset({"MAINT", "IGNORE_JOBS", "SPEC_NODES", "ALL_NODES"}),
    )
    assert found.blocks
    assert found.confines


def test_a_reservation_of_some_cores_leaves_the_node_to_others() -> None:
    text = _MAINT.format(more="", watts="").strip() + " NodeName=a1 CoreIDs=0-3\n"
    (found,) = limits.reservations(text)
    assert not found.blocks


@pytest.mark.parametrize(
    "text",
    [
        "No reservations in the system\n",
        "",
        "ReservationName=lic StartTime=2026-11-29T23:38:00 EndTime=2026-11-30T00:38:00 "
        "Nodes=(null) Licenses=matlab:1\n",
        "ReservationName=odd StartTime=soon EndTime=2026-11-30T00:38:00 Nodes=a1\n",
        "ReservationName=odd StartTime=2026-11-29T23:38:00 EndTime=2026-11-30T00:38:00 Nodes=a[1\n",
    ],
)
def test_what_holds_no_nodes_or_can_t_be_read_is_no_reservation(text: str) -> None:
    assert limits.reservations(text) == ()


@pytest.mark.parametrize(
    ("text", "minutes"),
    [
        ("00:30:00", 30),
        ("1-02:03:04", 26 * 60 + 4),  # rounded up, as slurmctld keeps minutes
        ("30:00", 30),
        ("2-00:00:00", 2880),
        ("UNLIMITED", None),
        ("NONE", None),
        ("tomorrow", None),
    ],
)
def test_times(text: str, minutes: int | None) -> None:
    (found,) = limits.partitions(f"PartitionName=p MaxTime={text} State=UP")
    assert found.max_time_minutes == minutes


@given(st.text())
def test_no_text_is_an_error(text: str) -> None:
    limits.partitions(text)
    limits.reservations(text)
    limits.partitions(f"PartitionName=p MaxTime={text} MaxNodes={text}")
    limits.reservations(f"ReservationName=r StartTime={text} EndTime={text} Nodes={text}")
