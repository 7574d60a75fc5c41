"""Profiles and decisions with every field set, for the tests of the store."""

from __future__ import annotations

from datetime import UTC, datetime

from crater_slurm.model.plan import Condition, Decision, Mode, Plan, Verdict
from crater_slurm.model.profile import (
    Cache,
    Cpu,
    Dimm,
    Gpu,
    Method,
    NodeProfile,
    NumaKind,
    NumaNode,
    NvLink,
    Nvme,
    PciDevice,
    PciKind,
    PciLink,
    Provenance,
    Software,
)

NOON = datetime(2026, 3, 1, 12, 0, 0, 123456, tzinfo=UTC)


def rich_profile(name: str = "gn01") -> NodeProfile:
    """A node with every field set somewhere, and unknown somewhere else."""
    return NodeProfile(
        name=name,
        cpu=Cpu(
            model="EPYC 7763 – 64 Kerne",
            arch="x86_64",
            sockets=2,
            cores_per_socket=4,
            threads_per_core=2,
            avx=frozenset({"avx", "avx2"}),
            l3_caches=(
                Cache(cpus=(0, 1, 2, 3, 8, 9, 10, 11), size_kib=32768),
                Cache(cpus=(4, 5, 6, 7)),
            ),
        ),
        numa_nodes=(
            NumaNode(
                id=0,
                cpus=(0, 1, 2, 3, 8, 9, 10, 11),
                socket=0,
                memory_mib=257536,
                memory_bandwidth_gb_s=0.1 + 0.2,
                distances=(10, 32, 80),
                kind=NumaKind.CPU,
                remote_bandwidth_gb_s=(138.7, 60.25, 1 / 3),
                firmware_bandwidth_gb_s=131.072,
                firmware_latency_ns=26,
            ),
            NumaNode(id=1, cpus=(4, 5, 6, 7), memory_mib=0),
            NumaNode(id=4, cpus=(), kind=NumaKind.GPU_MEMORY),
        ),
        gpus=(
            Gpu(
                index=1,
                model="a100-pcie-40gb",
                gres_type="a100",
                uuid="GPU-5a1c",
                pci_bus_id="0000:17:00.0",
                numa_node=0,
                sm_count=108,
                tensor_cores=True,
                memory_mib=40960,
                memory_bandwidth_gb_s=1555,
                precisions=frozenset({"fp16", "bf16"}),
                compute_capability="8.0",
                nvlinks=(NvLink(0, 600.0), NvLink(3, 600.0), NvLink(2, None)),
                mig_capable=True,
                mig_instances=("1g.5gb", "3g.20gb"),
            ),
            Gpu(index=0, model="Tesla, x", precisions=frozenset(), nvlinks=(NvLink(1, 600.0),)),
            Gpu(index=2, model="unbekannte Karte", tensor_cores=False, mig_capable=False),
            Gpu(index=3, model="t4"),
        ),
        nvmes=(
            Nvme(
                name="nvme0n1",
                stable_id="eui.0025385",
                model="Samsung PM9A3",
                size_gb=3840,
                numa_node=1,
                random_read_iops=850_000,
                random_write_iops=180_000,
                read_latency_us=87.2,
                iops_stability_ratio=0.92,
                sequential_write_mb_s=3950.5,
                firmware="GDC7302Q",
                pci_bus_id="0000:41:00.0",
                uses=("partitions", "mounted at /crater-cache, noatime"),
                wear_percent=3,
            ),
            Nvme(name="nvme1n1"),
        ),
        pci_devices=(
            PciDevice(
                address="0000:17:00.0",
                kind=PciKind.GPU,
                names=("nvidia0",),
                model="10de:20f1",
                numa_node=0,
                local_cpus=(0, 1, 2, 3),
                root="pci0000:16",
                bridges=("0000:16:02.0", "0000:17:00.0"),
                link=PciLink(speed_gt_s=8.0, width=8),
                max_link=PciLink(speed_gt_s=16.0, width=16),
            ),
            PciDevice(address="0000:5e:00.0", kind=PciKind.NIC, names=("ib0", "mlx5_0")),
            PciDevice(address="10000:01:00.0", kind=PciKind.NVME),
        ),
        dimms=(
            Dimm(slot="A1", size_mib=65536, kind="DDR4", speed_mt_s=3200, channel="0/A"),
            Dimm(slot="B, 1", size_mib=32768),
        ),
        software=Software(kernel="6.12.9-amd64", gpu_driver="590.48.01", cuda="13.1"),
        memory_mib=515_072,
        cache_gb=3000,
        source=Provenance(Method.DERIVED, NOON),
        provenance={
            "gpus[0].sm_count": Provenance(Method.CATALOGUE),
            "gpus[0].nvlinks[1].bandwidth_gb_s": Provenance(Method.DECLARED),
            "gpus[0].memory_mib": Provenance(Method.DECLARED, NOON, override=True),
            "numa_nodes[0].memory_bandwidth_gb_s": Provenance(Method.MEASURED, NOON),
            "nvmes[0].read_latency_us": Provenance(Method.MEASURED, NOON),
        },
    )


def plain_profile(name: str = "cn01") -> NodeProfile:
    """A node with nothing but processors."""
    return NodeProfile(
        name=name,
        cpu=Cpu(sockets=1, cores_per_socket=2),
        numa_nodes=(NumaNode(id=0, cpus=(0, 1)),),
    )


def rich_decision(
    key: str = "d1", *, user_id: int = 1000, time: float = 1_772_366_400.25
) -> Decision:
    """A decision with every field set."""
    return Decision(
        id=key,
        verdict=Verdict.PLANNED,
        mode=Mode.ENFORCE,
        time=time,
        user_id=user_id,
        user_name="ada",
        request={"gpus": 2, "numa": "strict", "memory_bandwidth_gb_s": 138.7},
        options={"partition": "gpu", "exclusive": None},
        submitted={"kind": "batch", "field.partition": "gpu"},
        conditions=(
            Condition(
                name="gpu_memory",
                need="16 GiB",
                have="40 GiB",
                passed_nodes=3,
                failed_nodes=1,
                failed_examples=("gn09", "gn10"),
                reason="card too small",
            ),
        ),
        nodes_considered=4,
        nodes_passed=3,
        passed_nodes="gn[01-03]",
        excluded=(("gn09", 1, "gpu_memory"),),
        nearest_node="gn01",
        smallest_change=("gpus=1",),
        plan=Plan(id=key, gpus=2, gpu_type="a100", memory_bandwidth_gb_s=138.7, domains=1),
        fields={"tres_per_node": "gres/gpu:a100:2"},
        environment={"CRATER_PRECISION": "bf16"},
        messages=("crater: 3 nodes fit",),
        duration_us=412.5,
    )
