"""A machine's GPUs by NVML, nvidia-smi, the kernel's files and amd-smi, in this order of trust."""

from __future__ import annotations

import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest
import tool_samples as samples

from crater_slurm.model.profile import Gpu, NvLink, PciDevice, PciKind, Software
from crater_slurm.probe import gpus
from crater_slurm.probe.tools.values import Card, Peer, Report

INFORMATION = """Model: \t\t {model}
IRQ:   \t\t 10
GPU UUID: \t {uuid}
Video BIOS: \t 96.00.99.00.01
Bus Type: \t PCIe
DMA Size: \t 52 bits
DMA Mask: \t 0xfffffffffffff
Bus Location: \t {address}
Device Minor: \t {minor}
GPU Firmware: \t 535.129.03
GPU Excluded:\t {excluded}
"""
FIRST, SECOND = "0000:3b:00.0", "0000:d8:00.0"


class Machine:
    """A tree like a machine's root, with GPUs put into it one by one."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.devices: list[PciDevice] = []
        self.notes: list[str] = []

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")

    def card(
        self,
        address: str,
        ids: str = "10de:20b7",
        numa_node: int | None = None,
        driver: str | None = "nvidia",
        class_code: str = "0x030200",
    ) -> None:
        folder = f"sys/bus/pci/devices/{address}"
        self.write(f"{folder}/vendor", "0x" + ids[:4])
        self.write(f"{folder}/device", "0x" + ids[5:])
        self.write(f"{folder}/class", class_code)
        if driver:
            (self.root / folder / "driver").symlink_to(f"../../../../bus/pci/drivers/{driver}")
        self.devices.append(
            PciDevice(address=address, kind=PciKind.GPU, model=ids, numa_node=numa_node)
        )

    def information(self, address: str, minor: int, **more: str) -> None:
        told = {"model": "NVIDIA A30", "uuid": f"GPU-{minor}", "excluded": "No"} | more
        self.write(
            f"proc/driver/nvidia/gpus/{address}/information",
            INFORMATION.format(address=address, minor=minor, **told),
        )

    def read(self) -> tuple[tuple[Gpu, ...], Software]:
        return gpus.read(self.root, tuple(self.devices), self.notes)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.fixture
def live(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes the tree the running machine, on which the tools answer so (None: with this note)."""

    def answer(
        *,
        nvml: Report | str = "NVML says nothing of the GPUs: Driver Not Loaded",
        smi: Report | str = "nvidia-smi says nothing of the GPUs: nvidia-smi is not installed",
        amd: Report | str = "amd-smi says nothing of the GPUs: amd-smi is not installed",
    ) -> None:
        def reader(told: Report | str) -> Any:
            def read(notes: list[str]) -> Report | None:
                if isinstance(told, str):
                    notes.append(told)
                    return None
                return told

            return read

        monkeypatch.setattr(gpus, "_LIVE", machine.root)
        monkeypatch.setattr(gpus.nvml, "read", reader(nvml))
        monkeypatch.setattr(gpus.nvidia_smi, "read", reader(smi))
        monkeypatch.setattr(gpus.amd_smi, "read", reader(amd))

    return answer


def test_a_captured_machine_by_its_driver_s_files(machine: Machine) -> None:
    machine.card(SECOND, numa_node=1)
    machine.card(FIRST, numa_node=0)
    machine.information(FIRST, 0)
    machine.information(SECOND, 1, uuid="GPU-????????-????-????-????-????????????")
    machine.write(
        "proc/driver/nvidia/version",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.15  Release Build  (x)\n"
        "GCC version:  gcc version 12.3.0",
    )
    found, software = machine.read()
    assert found == (
        Gpu(
            index=0,
            model="a30",
            gres_type="a30",
            uuid="GPU-0",
            pci_bus_id=FIRST,
            numa_node=0,
        ),
        Gpu(index=1, model="a30", gres_type="a30", pci_bus_id=SECOND, numa_node=1),
    )
    assert software == Software(gpu_driver="550.54.15")
    assert machine.notes == []


@pytest.mark.parametrize(
    ("ids", "model", "gres_type"),
    [
        ("10de:20b0", "a100-sxm4-40gb", "a100"),
        ("10de:2330", "h100-sxm5-80gb", "h100"),
        ("1002:74a1", "mi300x", "mi300x"),
        ("10de:1e81", "10de-1e81", None),
    ],
)
def test_without_a_driver_s_name_the_pci_ids_name_the_model(
    machine: Machine, ids: str, model: str, gres_type: str | None
) -> None:
    machine.card(FIRST, ids, driver=None)
    (gpu,), _ = machine.read()
    assert (gpu.model, gpu.gres_type) == (model, gres_type)


def test_nvml_is_believed_and_the_kernel_fills_the_rest(machine: Machine, live: Any) -> None:
    machine.card(FIRST, numa_node=0)
    machine.card(SECOND, numa_node=1)
    machine.information(FIRST, 0, model="NVIDIA A30X")
    both = (Peer(address=SECOND, bandwidth_gb_s=200), Peer(address="0000:ff:00.0"))
    live(
        nvml=Report(
            cards=(
                Card(address=SECOND, model="NVIDIA A30", mig=True, mig_instances=("1g.6gb",)),
                Card(address=FIRST, model="NVIDIA A30", memory_mib=24576, peers=both),
            ),
            driver="590.48.01",
            cuda="13.1",
        )
    )
    found, software = machine.read()
    assert found == (
        Gpu(
            index=0,
            model="a30",
            gres_type="a30",
            uuid="GPU-0",
            pci_bus_id=FIRST,
            numa_node=0,
            memory_mib=24576,
            nvlinks=(NvLink(peer=1, bandwidth_gb_s=200),),
        ),
        Gpu(
            index=1,
            model="a30",
            gres_type="a30",
            pci_bus_id=SECOND,
            numa_node=1,
            mig_capable=True,
            mig_instances=("1g.6gb",),
        ),
    )
    assert software == Software(gpu_driver="590.48.01", cuda="13.1")
    assert machine.notes == []


def test_nvidia_smi_takes_over_where_nvml_is_missing(machine: Machine, live: Any) -> None:
    machine.card(FIRST)
    live(smi=Report(cards=(Card(address=FIRST, model="NVIDIA A30", uuid="GPU-a"),), driver="535.1"))
    (gpu,), software = machine.read()
    assert (gpu.uuid, software.gpu_driver) == ("GPU-a", "535.1")
    assert machine.notes == ["NVML says nothing of the GPUs: Driver Not Loaded"]


def test_gpus_without_a_working_driver_stay_and_are_told(machine: Machine, live: Any) -> None:
    machine.card(FIRST, driver=None)
    machine.card(SECOND, driver=None)
    live()
    found, _ = machine.read()
    assert [gpu.model for gpu in found] == ["a30", "a30"]
    assert machine.notes == [
        f"2 NVIDIA GPUs at {FIRST}, {SECOND} have no working driver: NVML says nothing of the "
        "GPUs: Driver Not Loaded; nvidia-smi says nothing of the GPUs: nvidia-smi is not installed"
    ]


def test_one_gpu_that_fell_off_the_bus_keeps_its_place(machine: Machine, live: Any) -> None:
    machine.card(FIRST)
    machine.card(SECOND)
    live(nvml=Report(cards=(Card(address=SECOND, model="NVIDIA A30", uuid="GPU-b"),)))
    found, _ = machine.read()
    assert [(gpu.index, gpu.uuid) for gpu in found] == [(0, None), (1, "GPU-b")]
    assert machine.notes == [
        f"the NVIDIA GPU at {FIRST} has no working driver: the driver does not list it"
    ]


def test_a_gpu_that_jobs_can_t_have_is_left_out(machine: Machine) -> None:
    machine.card(FIRST, driver="vfio-pci")
    machine.card(SECOND)
    machine.information(SECOND, 0, excluded="Yes")
    assert machine.read()[0] == ()
    assert machine.notes == [
        f"the GPU at {FIRST} is left out: bound to vfio-pci",
        f"the GPU at {SECOND} is left out: excluded in the driver's settings",
    ]


def test_minors_out_of_pci_order_are_told(machine: Machine) -> None:
    """Slurm counts the files of File=/dev/nvidia[0-N], and N is the minor."""
    machine.card(FIRST)
    machine.card(SECOND)
    machine.information(FIRST, 1)
    machine.information(SECOND, 0)
    found, _ = machine.read()
    assert [gpu.pci_bus_id for gpu in found] == [FIRST, SECOND]
    assert machine.notes == [
        "by PCI address the GPUs are /dev/nvidia1, 0; gres.conf must list the files in this "
        "order, or Slurm's GPU numbers are others than crater's"
    ]


def test_a_domain_of_five_digits_comes_after_the_others(machine: Machine) -> None:
    machine.card("10000:01:00.0")
    machine.card("ffff:01:00.0")
    assert [g.pci_bus_id for g in machine.read()[0]] == ["ffff:01:00.0", "10000:01:00.0"]


@pytest.mark.parametrize(("pci", "numa_node"), [(0, 0), (None, 0), (1, 0)])
def test_the_memory_of_a_grace_gpu_is_no_place_for_a_job(
    machine: Machine, live: Any, pci: int | None, numa_node: int
) -> None:
    machine.card("0009:01:00.0", numa_node=pci)
    live(nvml=Report(cards=(Card(address="0009:01:00.0", numa_node=0, memory_node=1),)))
    assert machine.read()[0][0].numa_node == numa_node


def test_a_machine_without_gpus_has_none_and_nothing_to_tell(machine: Machine, live: Any) -> None:
    live()
    assert machine.read() == ((), Software())
    assert machine.notes == []


def test_amd_s_gpus_by_amd_smi(machine: Machine, live: Any) -> None:
    machine.card(FIRST, "1002:74a1", numa_node=1, driver="amdgpu", class_code="0x120000")
    machine.card("0000:0a:00.0", "1002:164e", driver="amdgpu", class_code="0x030000")
    told = Card(
        address=FIRST,
        model="AMD Instinct MI300X",
        memory_mib=196592,
        compute_capability="gfx942",
    )
    live(amd=Report(cards=(told,), driver="6.10.5"))
    found, software = machine.read()
    # The processor's own display at 0a:00.0 is no GPU for jobs.
    assert found == (
        Gpu(
            index=0,
            model="mi300x",
            gres_type="mi300x",
            pci_bus_id=FIRST,
            numa_node=1,
            memory_mib=196592,
            compute_capability="gfx942",
        ),
    )
    assert software == Software(gpu_driver="6.10.5")


def test_amd_s_gpus_without_amd_smi_are_known_by_their_ids(machine: Machine, live: Any) -> None:
    machine.card(FIRST, "1002:740f", driver="amdgpu", class_code="0x038000")
    live()
    (gpu,), _ = machine.read()
    assert gpu.model == "mi210"
    assert machine.notes == ["amd-smi says nothing of the GPUs: amd-smi is not installed"]


def test_consumer_cards_have_their_own_ids_and_no_facts(machine: Machine) -> None:
    machine.card(FIRST, "10de:2702")
    machine.information(FIRST, 0, model="NVIDIA GeForce RTX 4080 SUPER")
    (gpu,), _ = machine.read()
    assert (gpu.model, gpu.gres_type, gpu.memory_mib) == ("rtx-4080-super", None, None)


def test_damaged_driver_files_leave_values_unknown(machine: Machine) -> None:
    machine.card(FIRST)
    folder = "proc/driver/nvidia"
    machine.write(f"{folder}/gpus/{FIRST}/information", "Model\nDevice Minor: x\n:\n\0")
    machine.write(f"{folder}/version", "NVRM version: what")
    (gpu,), software = machine.read()
    assert (gpu.model, gpu.uuid, software.gpu_driver) == ("a30", None, None)


def test_a_captured_machine_with_a_p100(tmp_path: Path) -> None:
    """It has the PCI devices of its host, and nothing of the driver's files in /proc."""
    archive = samples.CAPTURES / "ghw-snapshots/linux-amd64-accel-nvidia.tar.gz"
    if not archive.exists():
        pytest.skip("no captured machine (CRATER_TEST_DATA)")
    if shutil.disk_usage(tmp_path).free < 2**26:
        pytest.skip("no room for a captured machine")
    with tarfile.open(archive) as tar:
        # Python 3.11.2, Debian 12's, has no filters yet.
        how: dict[str, Any] = {"filter": "tar"} if hasattr(tarfile, "tar_filter") else {}
        tar.extractall(tmp_path, **how)
    device = PciDevice(address="0000:06:00.0", kind=PciKind.GPU, model="10de:15f8", numa_node=0)
    notes: list[str] = []
    found, software = gpus.read(tmp_path, (device,), notes)
    assert found == (
        Gpu(
            index=0,
            model="p100-pcie-16gb",
            gres_type="p100",
            pci_bus_id="0000:06:00.0",
            numa_node=0,
        ),
    )
    assert software == Software()
    assert notes == []
