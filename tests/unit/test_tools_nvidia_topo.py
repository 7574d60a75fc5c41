"""The matrix of ``nvidia-smi topo -m``, on captured machines and on samples by hand."""

from __future__ import annotations

import pytest
import tool_samples as samples

from crater_slurm.errors import CraterError
from crater_slurm.probe.tools import nvidia_smi_topo
from crater_slurm.probe.tools.nvidia_smi_topo import Device, Topology, parse
from crater_slurm.probe.tools.run import Output

CPUS = {
    "geforce-rtx-2080-super__595.71.05": 24,
    "geforce-rtx-2080-super__610.57.04": 24,
    "geforce-rtx-4080-super__595.71.05": 16,
    "h100-80gb-hbm3__590.48.01": 20,
    "h100-mig__590.48.01": 20,
    "h200-mig__590.48.01": 24,
    "h200__590.48.01": 24,
    "l40s__595.80": 8,
}


@pytest.mark.parametrize("machine", CPUS)
def test_captured_machines_of_one_gpu(machine: str) -> None:
    expected = Topology(
        (
            Device(
                name="GPU0",
                links={"GPU0": "X"},
                cpus=tuple(range(CPUS[machine])),
                numa_nodes=(0,),
            ),
        )
    )
    assert parse(samples.section(machine, "capabilities :: topo -m")) == expected
    file = f"nvidia_gpu_exporter/topo-m/linux-x86_64__nvidia-{machine}.txt"
    assert parse(samples.capture(file)) == expected


def test_nics_have_the_names_of_the_legend_and_no_affinity() -> None:
    topology = parse(samples.TOPO_NICS)
    assert [d.name for d in topology.devices] == ["GPU0", "GPU1", "mlx5_0", "mlx5_bond_0"]
    gpu, nic = topology.devices[0], topology.devices[2]
    assert gpu.links == {"GPU0": "X", "GPU1": "NV18", "mlx5_0": "PIX", "mlx5_bond_0": "SYS"}
    assert gpu.cpus == (*range(32), *range(64, 96))
    assert gpu.numa_nodes == (0,)
    assert (nic.cpus, nic.numa_nodes, nic.gpu_numa_node) == ((), (), None)
    assert topology.link("GPU1", "mlx5_bond_0") == "PXB"
    assert topology.link("GPU7", "GPU0") is None


def test_older_drivers_name_nics_in_the_matrix() -> None:
    topology = parse(samples.TOPO_OLD)
    assert topology.link("GPU0", "mlx5_0") == "PHB"
    assert topology.devices[0].cpus == tuple(range(12))
    assert topology.devices[0].numa_nodes == ()  # N/A


def test_the_memory_of_a_grace_gpu_is_a_numa_node() -> None:
    (gpu,) = parse(samples.TOPO_GRACE).devices
    assert (gpu.numa_nodes, gpu.gpu_numa_node, len(gpu.cpus)) == ((0,), 1, 72)


def test_a_matrix_that_was_pasted_with_spaces() -> None:
    topology = parse(samples.TOPO_PASTED)
    assert topology.link("NIC0", "GPU0") == "PHB"
    assert len(topology.devices[0].cpus) == 252


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("NIC1\tSYS\tPXB\tSYS\t X \t\t\t\t\n", "", "columns GPU0 .* NIC1, but rows GPU0 .* NIC0$"),
        ("NV18\tPIX", "FAST\tPIX", "row GPU0: 'FAST' is no link such as PIX"),
        ("NV18\tPIX", "NV12\tPIX", "GPU0 has NV12 to GPU1, which has NV18 back"),
        ("0-31,64-95", "0-x", "row GPU0"),
        ("0-31,64-95", "0-999999999", "is no list of CPUs"),
        ("mlx5_bond_0", "mlx5_0", "two devices have one name"),
        ("\tPXB\tSYS\t X ", "", "row NIC1"),
    ],
)
def test_a_matrix_that_contradicts_itself_says_so(old: str, new: str, why: str) -> None:
    with pytest.raises(CraterError, match=why):
        parse(samples.TOPO_NICS.replace(old, new))


@pytest.mark.parametrize("text", ["", "NVIDIA-SMI has failed because it couldn't\n"])
def test_what_is_no_matrix_says_so(text: str) -> None:
    with pytest.raises(CraterError, match="topo -m: (nothing was printed|NVIDIA-SMI has failed)"):
        parse(text)


def test_reading_says_why_there_is_no_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []
    for output in (Output("", "nvidia-smi is not installed"), Output("what?")):
        monkeypatch.setattr(nvidia_smi_topo, "run", lambda argv, output=output: output)
        assert nvidia_smi_topo.read(notes) is None
    assert notes == [
        "nvidia-smi topo -m says nothing: nvidia-smi is not installed",
        "nvidia-smi topo -m: what?",
    ]
    monkeypatch.setattr(nvidia_smi_topo, "run", lambda argv: Output(samples.TOPO_GRACE))
    assert nvidia_smi_topo.read(notes) == parse(samples.TOPO_GRACE)
