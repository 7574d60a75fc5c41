"""nvidia-smi's table, list, ``-q`` and links, on captured machines and on samples by hand.

What is expected of a capture was written down from reading it.
"""

from __future__ import annotations

from typing import Any

import pytest
import tool_samples as samples

from crater_slurm.errors import CraterError
from crater_slurm.model.profile import PciLink
from crater_slurm.probe.tools import nvidia_smi, nvidia_smi_links, nvidia_smi_query
from crater_slurm.probe.tools.nvidia_smi import ListedGpu, MigInstance
from crater_slurm.probe.tools.nvidia_smi_query import MigDevice
from crater_slurm.probe.tools.run import Output
from crater_slurm.probe.tools.values import Card

MASKED = "GPU-00000000-0000-0000-0000-000000000000"
#: name, address, memory in MiB, compute capability, MIG, driver, CUDA, generation
MACHINES: dict[str, tuple[Any, ...]] = {
    "geforce-rtx-2080-super__595.71.05": (
        *("NVIDIA GeForce RTX 2080 SUPER", "0000:0c:00.0", 8192, "7.5", None),
        *("595.71.05", "13.2", 8.0),
    ),
    "geforce-rtx-2080-super__610.57.04": (
        *("NVIDIA GeForce RTX 2080 SUPER", "0000:0c:00.0", 8192, "7.5", None),
        *("610.57.04", "13.3", 8.0),
    ),
    "geforce-rtx-4080-super__595.71.05": (
        *("NVIDIA GeForce RTX 4080 SUPER", "0000:01:00.0", 16376, "8.9", None),
        *("595.71.05", "13.2", 16.0),
    ),
    "h100-80gb-hbm3__590.48.01": (
        *("NVIDIA H100 80GB HBM3", "0000:00:09.0", 81559, "9.0", False),
        *("590.48.01", "13.1", 32.0),
    ),
    "h100-mig__590.48.01": (
        *("NVIDIA H100 80GB HBM3", "0000:00:09.0", 81559, "9.0", True),
        *("590.48.01", "13.1", 32.0),
    ),
    "h200-mig__590.48.01": (
        *("NVIDIA H200", "0000:83:00.0", 143771, "9.0", True),
        *("590.48.01", "13.1", 32.0),
    ),
    "h200__590.48.01": (
        *("NVIDIA H200", "0000:83:00.0", 143771, "9.0", False),
        *("590.48.01", "13.1", 32.0),
    ),
    "l40s__595.80": (
        *("NVIDIA L40S", "0000:01:00.0", 46068, "8.9", None),
        *("595.80", "13.2", 16.0),
    ),
}


@pytest.mark.parametrize("state", ["idle", "load"])
@pytest.mark.parametrize("machine", MACHINES)
def test_a_captured_table(machine: str, state: str) -> None:
    name, address, memory_mib, capability, mig, driver, _, _ = MACHINES[machine]
    rows = nvidia_smi.parse_table(samples.section(machine, f"{state} :: query-gpu (csv"))
    report = nvidia_smi.cards(rows)
    assert report.driver == driver
    assert report.cards == (
        Card(
            address=address,
            model=name,
            uuid=MASKED,
            memory_mib=memory_mib,
            compute_capability=capability,
            mig=mig,
        ),
    )
    assert rows[0]["temperature.memory"] is None or mig is not None  # N/A without brackets
    assert rows[0]["clocks.applications.memory"] is None  # [Requested functionality has been ...]


@pytest.mark.parametrize("state", ["idle", "load"])
@pytest.mark.parametrize("machine", MACHINES)
def test_a_captured_query(machine: str, state: str) -> None:
    name, address, memory_mib, _, mig, driver, cuda, speed_gt_s = MACHINES[machine]
    report, (gpu,) = nvidia_smi_query.parse(samples.section(machine, f"{state} :: query (-q)"))
    assert (report.driver, report.cuda) == (driver, cuda)
    assert report.cards == (
        Card(address=address, model=name, uuid=MASKED, minor=0, memory_mib=memory_mib, mig=mig),
    )
    assert gpu.max_link == PciLink(speed_gt_s=speed_gt_s, width=16)
    assert gpu.c2c is (None if mig is None else False)
    assert len(gpu.mig_devices) == {"h100-mig__590.48.01": 4, "h200-mig__590.48.01": 5}.get(
        machine, 0
    )


def test_captured_mig_instances_of_a_query() -> None:
    text = samples.section("h100-mig__590.48.01", "idle :: query (-q)")
    _, (gpu,) = nvidia_smi_query.parse(text)
    assert gpu.mig_devices == (
        MigDevice(index=0, gpu_instance=2, compute_instance=0, sm_count=60, memory_mib=40448),
        MigDevice(index=1, gpu_instance=3, compute_instance=0, sm_count=32, memory_mib=20096),
        MigDevice(index=2, gpu_instance=9, compute_instance=0, sm_count=16, memory_mib=9984),
        MigDevice(index=3, gpu_instance=10, compute_instance=0, sm_count=16, memory_mib=9984),
    )
    text = samples.section("h200-mig__590.48.01", "idle :: query (-q)")
    _, (gpu,) = nvidia_smi_query.parse(text)
    # Two compute instances share GPU instance 2, and its memory.
    assert [(d.gpu_instance, d.sm_count, d.memory_mib) for d in gpu.mig_devices] == [
        (2, 16, 71424),
        (2, 32, 71424),
        (3, 32, 33280),
        (9, 16, 16384),
        (10, 16, 16384),
    ]


@pytest.mark.parametrize("machine", MACHINES)
def test_a_captured_list(machine: str) -> None:
    instances = {
        "h100-mig__590.48.01": ("3g.40gb", "2g.20gb", "1g.10gb", "1g.10gb"),
        "h200-mig__590.48.01": ("1c.3g.71gb", "2c.3g.71gb", "2g.35gb", "1g.18gb", "1g.18gb"),
    }.get(machine, ())
    assert nvidia_smi.parse_list(samples.section(machine, "capabilities :: list (-L)")) == (
        ListedGpu(
            0,
            MACHINES[machine][0],
            MASKED,
            tuple(
                MigInstance(profile, i, f"MIG-0000000{i}-0000-0000-0000-00000000000{i}")
                for i, profile in enumerate(instances)
            ),
        ),
    )


@pytest.mark.parametrize("machine", MACHINES)
def test_captured_nvlinks(machine: str) -> None:
    text = samples.section(machine, "capabilities :: nvlink -s")
    (gpu,) = nvidia_smi_links.parse(text)
    assert (gpu.index, gpu.name, gpu.uuid) == (0, MACHINES[machine][0], MASKED)
    if machine in ("h100-80gb-hbm3__590.48.01", "h200__590.48.01"):
        assert gpu.speeds_gb_s == (26.562,) * 18
        assert gpu.reason is None
    else:
        assert gpu.speeds_gb_s == ()
        assert gpu.reason == {
            "h100-mig__590.48.01": "Nvlink queries are not supported for Devices in MIG mode",
            "h200-mig__590.48.01": "Nvlink queries are not supported for Devices in MIG mode",
            "geforce-rtx-4080-super__595.71.05": "Device does not have or support Nvlink",
            "l40s__595.80": "Device does not have or support Nvlink",
        }.get(machine, "NVML: Unable to retrieve Nvlink information as all links are inActive")


def test_the_captured_grace_machines_have_chip_to_chip_links() -> None:
    (gpu,) = nvidia_smi_links.parse(samples.capture("virtualclient/nvidia-smi__query-c2c.txt"))
    assert (gpu.name, gpu.uuid) == (
        "NVIDIA GH200 480GB",
        "GPU-8d852f73-f973-0769-9c78-5e52c7b36f16",
    )
    assert gpu.speeds_gb_s == (
        *(44.712, 44.713, 44.714, 44.715, 44.716),
        *(44.717, 44.718, 44.719, 44.720, 44.721),
    )
    four = nvidia_smi_links.parse(
        samples.capture("virtualclient/nvidia-smi__query-c2c-multiple-gpu.txt")
    )
    assert [gpu.index for gpu in four] == [0, 1, 2, 3]
    assert {gpu.name for gpu in four} == {"NVIDIA Graphics Device"}
    assert four[3].uuid == "GPU-61c6af66-6309-c0a0-03f3-7cc9ac97ab99"
    assert four[0].speeds_gb_s == (44.712, 44.713, 44.714, 44.715, 44.716)
    assert four[3].speeds_gb_s == (44.727, 44.728, 44.729, 44.730, 44.731)


def test_the_captured_table_of_one_h100_has_no_units_in_its_cells() -> None:
    text = samples.capture("virtualclient/nvidia-smi__query-gpu-1xH100.csv")
    report = nvidia_smi.cards(nvidia_smi.parse_table(text))
    assert report.driver == "535.161.07"
    assert report.cards == (
        Card(address="0000:0a:00.0", model="NVIDIA H100 80GB HBM3", memory_mib=81559),
    )


def test_the_captured_table_of_a_t4_leaves_unknown_what_it_does_not_know() -> None:
    text = samples.capture("virtualclient/nvidia-smi__query-gpu-1xT4-NA.csv")
    (row,) = nvidia_smi.parse_table(text)
    assert (row["temperature.gpu"], row["temperature.memory"], row["power.draw.average"]) == (
        "26",
        None,
        None,
    )
    assert nvidia_smi.cards([row]).cards == (
        Card(address="0001:01:00.0", model="Tesla T4", memory_mib=15360),
    )


def test_the_captured_table_of_eight_h100_repeats_its_bus_ids() -> None:
    text = samples.capture("virtualclient/nvidia-smi__query-gpu-8xH100.csv")
    rows = nvidia_smi.parse_table(text)
    assert [row["index"] for row in rows] == list("01234567")
    with pytest.raises(CraterError, match="two GPUs with the bus id 0000:0a:00.0"):
        nvidia_smi.cards(rows)


def test_cells_that_say_unknown_in_many_ways() -> None:
    first, second = nvidia_smi.cards(nvidia_smi.parse_table(samples.TABLE_MIXED)).cards
    assert (first.memory_mib, first.compute_capability, first.mig) == (16384, "6.0", None)
    assert second == Card(address="0000:d8:00.0", model="Tesla P100-PCIE-16GB", uuid="GPU-b")


def test_a_table_without_header_and_units() -> None:
    text = "0, NVIDIA A30, 00000000:3B:00.0, 24576\n"
    (row,) = nvidia_smi.parse_table(text, ["index", "name", "pci.bus_id", "memory.total"])
    assert nvidia_smi.cards([row]).cards == (
        Card(address="0000:3b:00.0", model="NVIDIA A30", memory_mib=24576),
    )


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make "
            "sure that the latest NVIDIA driver is installed and running.\n",
            "couldn't communicate",
        ),
        ("Failed to initialize NVML: Driver/library version mismatch\n", "version mismatch"),
        ('Field "mig.x" is not a valid field to query.\n', "not a valid field"),
        ("index, name\n0\n", "has 1 cells for 2 columns"),
        ("name, name\nA, B\n", "two columns have one name"),
        ("index, name\n0, NVIDIA A30\n", "no pci.bus_id"),
        ("index, pci.bus_id\n0, 3B:00\n", "'3B:00' is no PCI address"),
        (samples.TABLE_MIXED.replace("GPU-b", "GPU-a"), "two GPUs with the UUID GPU-a"),
    ],
)
def test_a_table_that_is_none_says_so(text: str, why: str) -> None:
    with pytest.raises(CraterError, match=why):
        nvidia_smi.cards(nvidia_smi.parse_table(text))


@pytest.mark.parametrize("text", ["", "\n", "No devices were found\n"])
def test_no_devices_is_no_error(text: str) -> None:
    assert nvidia_smi.parse_table(text) == []
    assert nvidia_smi.parse_list(text) == ()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("GPU 0: NVIDIA A30 (UUID: GPU-a)\nGPU 1: NVIDIA A30 (UUID: GPU-a)\n", "two GPUs with"),
        ("  MIG 1g.5gb     Device  0: (UUID: MIG-a)\n", "is no GPU or MIG instance"),
        (
            "Unable to determine the device handle for gpu 0000:3B:00.0: GPU is lost.  Reboot\n",
            "GPU is lost",
        ),
    ],
)
def test_a_list_that_is_none_says_so(text: str, why: str) -> None:
    with pytest.raises(CraterError, match=why):
        nvidia_smi.parse_list(text)


def test_a_query_of_an_older_driver() -> None:
    report, (first, second) = nvidia_smi_query.parse(samples.QUERY_TWO)
    assert (report.driver, report.cuda) == ("470.57.02", "11.4")
    assert first.card == Card(
        address="0000:3b:00.0",
        model="NVIDIA A30",
        uuid="GPU-a",
        minor=1,
        memory_mib=24576,
        mig=False,
    )
    assert second.card == Card(address="0000:d8:00.0", model="NVIDIA A30", uuid="GPU-b")
    assert first.max_link is None


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("GPU 00000000:D8:00.0", "", "2 attached GPUs, and 1 are described"),
        ("00000000:D8", "00000000:3B", "two GPUs with the bus id 0000:3b:00.0"),
        ("GPU-b", "GPU-a", "two GPUs with the UUID GPU-a"),
        ("Attached GPUs", "Attached", "no number of attached GPUs"),
        ("NVSMI LOG", "LOG", "-q: ==============LOG"),
    ],
)
def test_a_query_that_contradicts_itself_says_so(old: str, new: str, why: str) -> None:
    with pytest.raises(CraterError, match=why):
        nvidia_smi_query.parse(samples.QUERY_TWO.replace(old, new))


def test_an_inactive_link_has_no_speed() -> None:
    (gpu,) = nvidia_smi_links.parse(samples.NVLINK_INACTIVE)
    assert gpu.speeds_gb_s == (25.0, None, 25.0)


@pytest.mark.parametrize(
    "text", [" Link 0: 25 GB/s\n", "GPU 0: A (UUID: GPU-a)\n Link 1: 25 GB/s\n", "no driver\n"]
)
def test_links_out_of_order_are_an_error(text: str) -> None:
    with pytest.raises(CraterError, match="nvidia-smi links"):
        nvidia_smi_links.parse(text)


def test_what_a_link_carries_is_less_than_its_line_rate() -> None:
    assert nvidia_smi_links.carried_gb_s(26.562) == 25  # NVLink 4: x 16/17
    assert nvidia_smi_links.carried_gb_s(53.125) == 50  # NVLink 5
    assert nvidia_smi_links.carried_gb_s(25.781) == 25.781  # NVLink 3: as the driver says
    assert 26.5625 * 16 / 17 == 25


def answers(monkeypatch: pytest.MonkeyPatch, *outputs: Output) -> list[list[str]]:
    """nvidia-smi answers these one after the other; what it was asked is returned."""
    left, asked = list(outputs), []

    def run(argv: list[str], **_: object) -> Output:
        asked.append(argv)
        return left.pop(0)

    monkeypatch.setattr(nvidia_smi, "run", run)
    return asked


def test_reading_asks_for_mig_instances_only_where_mig_is_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = samples.TABLE_MIXED.replace("6.0, [N/A]", "8.0, Enabled")
    names = (
        "GPU 0: A (UUID: GPU-a)\n  MIG 1g.5gb     Device  0: (UUID: MIG-1)\n"
        "GPU 1: A (UUID: GPU-b)\n"
    )
    asked = answers(monkeypatch, Output(table), Output(names))
    notes: list[str] = []
    report = nvidia_smi.read(notes)
    assert report is not None
    assert [card.mig_instances for card in report.cards] == [("1g.5gb",), ()]
    assert asked[1] == ["nvidia-smi", "-L"]
    assert notes == []


def test_an_older_driver_is_asked_for_less(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = 'Field "mig.mode.current" is not a valid field to query.\n'
    table = (
        "index, name, uuid, pci.bus_id, driver_version, memory.total [MiB]\n"
        "0, Tesla V100-PCIE-16GB, GPU-a, 00000000:3B:00.0, 418.87, 16160 MiB\n"
    )
    answers(monkeypatch, Output(refused, "nvidia-smi failed with exit status 2: "), Output(table))
    report = nvidia_smi.read([])
    assert report is not None
    assert (report.driver, report.cards[0].memory_mib) == ("418.87", 16160)


def test_reading_says_why_there_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []
    answers(monkeypatch, Output("", "nvidia-smi took longer than 30 s"))
    assert nvidia_smi.read(notes) is None
    answers(monkeypatch, Output("index, name\n0, A\n"))
    assert nvidia_smi.read(notes) is None
    assert notes == [
        "nvidia-smi says nothing of the GPUs: nvidia-smi took longer than 30 s",
        "nvidia-smi says nothing of the GPUs: nvidia-smi --query-gpu: a GPU has no pci.bus_id",
    ]
