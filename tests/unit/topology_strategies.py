"""Profiles as odd as hardware, firmware and people can make them, for property tests."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import Phase
from hypothesis import strategies as st

from crater_slurm.model.profile import (
    Cache,
    Cpu,
    Gpu,
    NodeProfile,
    NumaKind,
    NumaNode,
    NvLink,
    Nvme,
    PciDevice,
    PciKind,
    PciLink,
)

#: Shrinking a whole node takes minutes; a failing one is read as it is.
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)

NAMES = st.one_of(
    st.sampled_from(
        [
            "mlx5_0",
            "<script>alert(1)</script>",
            'a"b\\N & c]]>',
            "line\nbreak\ttab\x00\x1b[31m",
            "\ud800",
            "超长的名字" * 40,
            "x" * 5000,
            "",
            "\u202egpu",
        ]
    ),
    st.text(max_size=12),
)
MAYBE_NODE = st.none() | st.integers(-1, 5)
ADDRESSES = st.one_of(
    st.builds(
        "{:04x}:{:02x}:00.{}".format, st.integers(0, 1), st.integers(0, 9), st.integers(0, 1)
    ),
    st.builds("10000:{:02x}:00.0".format, st.integers(0, 9)),
    NAMES,
)
LINKS = st.none() | st.builds(
    PciLink, speed_gt_s=st.sampled_from([2.5, 16.0, 32.0, 17.3]), width=st.integers(1, 32)
)
PCI = st.builds(
    PciDevice,
    address=ADDRESSES,
    kind=st.sampled_from(PciKind),
    names=st.lists(NAMES, max_size=3).map(tuple),
    model=st.none() | NAMES,
    numa_node=MAYBE_NODE,
    local_cpus=st.lists(st.integers(0, 40), max_size=4).map(tuple),
    root=st.none() | st.sampled_from(["pci0000:00", "pci0000:80", "<b>"]) | NAMES,
    bridges=st.lists(ADDRESSES, max_size=12).map(tuple),
    link=LINKS,
    max_link=LINKS,
)
DRIVES = st.builds(
    Nvme,
    name=NAMES,
    model=st.none() | NAMES,
    pci_bus_id=st.none() | ADDRESSES,
    size_gb=st.none() | st.integers(0, 10**6),
    numa_node=MAYBE_NODE,
    random_read_iops=st.none() | st.integers(0, 10**9),
)


@st.composite
def numa_nodes(draw: st.DrawFn) -> tuple[NumaNode, ...]:
    count = draw(st.integers(0, 6))
    return tuple(
        NumaNode(
            id=i * draw(st.sampled_from([1, 1, 8])) + i,
            cpus=() if draw(st.booleans()) else tuple(range(8 * i, 8 * i + 8)),
            kind=draw(st.none() | st.sampled_from(NumaKind)),
            socket=draw(st.none() | st.integers(0, 3)),
            memory_mib=draw(st.none() | st.integers(0, 2**31)),
            memory_bandwidth_gb_s=draw(st.none() | st.floats(0.1, 20_000)),
            distances=draw(st.sampled_from([(), (10,), tuple(range(10, 10 + count))])),
        )
        for i in range(count)
    )


GPUS = st.builds(
    Gpu,
    index=st.just(0),
    model=NAMES,
    pci_bus_id=st.none() | ADDRESSES,
    numa_node=MAYBE_NODE,
    compute_capability=st.sampled_from([None, "8.0", "gfx942"]),
    nvlinks=st.lists(
        st.builds(
            NvLink,
            peer=st.integers(0, 70),
            bandwidth_gb_s=st.sampled_from([None, 50.0, 600.0, 0.0]),
        ),
        max_size=3,
        unique_by=lambda link: link.peer,
    ).map(tuple),
)


@st.composite
def gpus(draw: st.DrawFn) -> tuple[Gpu, ...]:
    """None to five, or 64 of a few makes."""
    few = draw(st.lists(GPUS, max_size=5))
    count = 64 if few and draw(st.booleans()) else len(few)
    return tuple(
        replace(
            few[i % len(few)],
            index=i,
            nvlinks=tuple(link for link in few[i % len(few)].nvlinks if link.peer != i),
        )
        for i in range(count)
    )


def profiles() -> st.SearchStrategy[NodeProfile]:
    caches = st.builds(
        Cache,
        cpus=st.lists(st.integers(0, 48), max_size=6).map(tuple),
        size_kib=st.none() | st.integers(1, 2**24),
    )
    return st.builds(
        NodeProfile,
        name=NAMES,
        cpu=st.builds(
            Cpu,
            model=st.none() | NAMES,
            sockets=st.integers(1, 4),
            cores_per_socket=st.integers(1, 16),
            l3_caches=st.lists(caches, max_size=5).map(tuple),
        ),
        numa_nodes=numa_nodes(),
        gpus=gpus(),
        nvmes=st.lists(DRIVES, max_size=4).map(tuple),
        pci_devices=st.lists(PCI, max_size=12).map(tuple),
        memory_mib=st.none() | st.integers(1, 2**31),
    )
