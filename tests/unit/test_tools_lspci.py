"""``lspci -vv`` of two captured machines, and of a sample by hand."""

from __future__ import annotations

import pytest
import tool_samples as samples

from crater_slurm.errors import CraterError
from crater_slurm.model.profile import PciLink
from crater_slurm.probe.tools import lspci
from crater_slurm.probe.tools.lspci import Device
from crater_slurm.probe.tools.run import Output

GEN3_X16 = PciLink(speed_gt_s=8, width=16)
GEN4_X16 = PciLink(speed_gt_s=16, width=16)


def test_a_captured_machine_with_an_idle_t4() -> None:
    assert lspci.parse(samples.capture("virtualclient/lspci__linux-1.txt")) == (
        Device(
            address="0001:00:00.0",
            class_name="3D controller",
            name="NVIDIA Corporation TU104GL [Tesla T4]",
            numa_node=0,
            link=PciLink(speed_gt_s=2.5, width=16),
            max_link=GEN3_X16,
            slower=True,
            driver="nvidia",
        ),
        Device(
            address="c93f:00:02.0",
            class_name="Ethernet controller",
            name="Mellanox Technologies MT27710 Family [ConnectX-4 Lx Virtual Function]",
            numa_node=0,
            max_link=PciLink(speed_gt_s=8, width=8),
            slower=True,
            narrower=True,
            driver="mlx5_core",
        ),
    )


def test_a_captured_machine_with_eight_a100() -> None:
    devices = lspci.parse(samples.capture("virtualclient/lspci__linux-2.txt"))
    assert len(devices) == 31
    gpus = [d for d in devices if d.class_name == "3D controller"]
    assert {d.address: d.numa_node for d in gpus} == {
        "0001:00:00.0": 1,
        "0002:00:00.0": 1,
        "0003:00:00.0": 0,
        "0004:00:00.0": 0,
        "000b:00:00.0": 3,
        "000c:00:00.0": 3,
        "000d:00:00.0": 2,
        "000e:00:00.0": 2,
    }
    assert {(d.name, d.driver) for d in gpus} == {("NVIDIA Corporation Device 20b0", "nvidia")}
    assert {(d.link, d.max_link, d.slower) for d in gpus} == {(GEN4_X16, GEN4_X16, False)}
    switches = [d for d in devices if d.class_name == "Bridge"]
    assert [d.address for d in switches] == [f"{n:04x}:00:00.0" for n in range(5, 11)]
    assert {d.driver for d in switches} == {"nvidia-nvswitch"}
    cards = [d for d in devices if d.class_name == "Infiniband controller"]
    assert {d.address: d.numa_node for d in cards} == {
        "0101:00:00.0": 1,
        "0102:00:00.0": 1,
        "0103:00:00.0": 0,
        "0104:00:00.0": 0,
        "0105:00:00.0": 3,
        "0106:00:00.0": 3,
        "0107:00:00.0": 2,
        "0108:00:00.0": 2,
    }
    assert {(d.link, d.max_link) for d in cards} == {(None, GEN4_X16)}  # virtual functions
    drives = [d for d in devices if d.class_name == "Non-Volatile memory controller"]
    assert [d.address[:4] for d in drives] == [
        *("3f9f", "4ab1", "5e67", "7584", "75e7", "7816", "987c", "da68"),
    ]
    assert {d.name for d in drives} == {"Microsoft Corporation Device b111"}
    assert {d.link for d in drives} == {PciLink(speed_gt_s=8, width=4)}


def test_numbers_beside_the_names_and_a_short_address() -> None:
    gpu, drive = lspci.parse(samples.LSPCI_NN)
    assert gpu == Device(
        address="0000:3b:00.0",
        class_name="3D controller",
        name="NVIDIA Corporation GA100GL [A30 PCIe]",
        ids=("10de", "20b7"),
        numa_node=0,
        link=PciLink(speed_gt_s=16, width=8),
        max_link=GEN4_X16,
        narrower=True,
        driver="nvidia",
    )
    assert drive == Device(
        address="0000:41:00.0",
        class_name="Non-Volatile memory controller",
        name="Samsung Electronics Co Ltd NVMe SSD",
        ids=("144d", "a80a"),
    )


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("lspci: Cannot open /proc/bus/pci\n", "'lspci: Cannot open /proc/bus/pci' is no device"),
        (samples.LSPCI_NN * 2, "two devices with the address 0000:3b:00.0"),
    ],
)
def test_what_is_no_output_of_lspci_says_so(text: str, why: str) -> None:
    with pytest.raises(CraterError, match=why):
        lspci.parse(text)


def test_no_devices_is_no_error() -> None:
    assert lspci.parse("\n") == ()


def test_reading_notes_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []
    for output in (Output(samples.LSPCI_NN), Output("", "lspci is not installed"), Output("?")):
        monkeypatch.setattr(lspci, "run", lambda argv, output=output: output)
        lspci.read(notes)
    assert notes == [
        "lspci tells no link speeds without root",
        "lspci says nothing: lspci is not installed",
        "lspci: '?' is no device",
    ]
