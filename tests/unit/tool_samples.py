"""Captured output of tools where it is there, and samples of the same formats written by hand."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

_DEFAULT = Path(__file__).resolve().parents[3] / "shared/data"
CAPTURES = Path(os.environ.get("CRATER_TEST_DATA", _DEFAULT)) / "captures"


def capture(name: str) -> str:
    """The text of a captured file; skips the test where the captures aren't."""
    file = CAPTURES / name
    if not file.exists():
        pytest.skip(f"no capture {name} (CRATER_TEST_DATA)")
    return file.read_text(encoding="utf-8")


def sections(text: str) -> dict[str, str]:
    """The sections of an nvidia_gpu_exporter capture by title, as ``idle :: query (-q)``."""
    parts = re.split(r"^#{80}\n((?:# .*\n)+)#{80}\n", text, flags=re.MULTILINE)
    return {
        head.splitlines()[0].removeprefix("# "): body
        for head, body in zip(parts[1::2], parts[2::2], strict=True)
    }


def section(name: str, title: str) -> str:
    """The one section of a captured machine whose title begins so."""
    found = sections(capture(f"nvidia_gpu_exporter/linux-x86_64__nvidia-{name}.txt"))
    (text,) = (body for head, body in found.items() if head.startswith(title))
    return text


# Written by hand, after the formats of the tools named.

TOPO_NICS = (
    "\t\x1b[4mGPU0\tGPU1\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tNV18\tPIX\tSYS\t0-31,64-95\t0\t\tN/A\n"
    "GPU1\tNV18\t X \tSYS\tPXB\t32-63,96-127\t1\t\tN/A\n"
    "NIC0\tPIX\tSYS\t X \tSYS\t\t\t\t\n"
    "NIC1\tSYS\tPXB\tSYS\t X \t\t\t\t\n"
    "\nLegend:\n\n  X    = Self\n  NV#  = Connection traversing a bonded set of # NVLinks\n"
    "\nNIC Legend:\n\n  NIC0: mlx5_0\n  NIC1: mlx5_bond_0\n\n"
)
TOPO_OLD = (
    "\tGPU0\tGPU1\tmlx5_0\tCPU Affinity\tNUMA Affinity\n"
    "GPU0\t X \tNODE\tPHB\t0-11\t\tN/A\n"
    "GPU1\tNODE\t X \tNODE\t0-11\t\tN/A\n"
    "mlx5_0\tPHB\tNODE\t X \t\t\n"
)
TOPO_GRACE = (
    "\tGPU0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\nGPU0\t X \t0-71\t0\t\t1\n\nLegend:\n"
)
TOPO_PASTED = """
        GPU0    NIC0    CPU Affinity    NUMA Affinity   GPU NUMA ID
GPU0     X      PHB     0-251   0               N/A
NIC0    PHB      X

Legend:
"""
NVLINK_INACTIVE = (
    "GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-a)\n"
    "\t Link 0: 25 GB/s\n\t Link 1: <inactive>\n\t Link 2: 25 GB/s\n"
)
TABLE_MIXED = (
    "index, name, uuid, pci.bus_id, driver_version, memory.total [MiB], compute_cap, mig.mode.current\n"
    "0, Tesla P100-PCIE-16GB, GPU-a, 00000000:3B:00.0, 535.1, 16384 MiB, 6.0, [N/A]\n"
    "1, Tesla P100-PCIE-16GB, GPU-b, 00000000:D8:00.0, 535.1, [Not Supported], ERR!, \n"
)
QUERY_TWO = """
==============NVSMI LOG==============

Timestamp                                 : Mon Mar  4 10:00:00 2024
Driver Version                            : 470.57.02
CUDA Version                              : 11.4

Attached GPUs                             : 2
GPU 00000000:3B:00.0
    Product Name                          : NVIDIA A30
    MIG Mode
        Current                           : Disabled
    GPU UUID                              : GPU-a
    Minor Number                          : 1
    FB Memory Usage
        Total                             : 24576 MiB
GPU 00000000:D8:00.0
    Product Name                          : NVIDIA A30
    GPU UUID                              : GPU-b
    Minor Number                          : ERR!
"""
AMD_LIST = """[
  {"gpu": 0, "bdf": "0000:0c:00.0", "uuid": "0eff74a1-0000-1000-80b1-3d1f5c64a8d0", "kfd_id": 1, "node_id": 1, "partition_id": 0},
  {"gpu": 1, "bdf": "0000:22:00.0", "uuid": "a3ff74a1-0000-1000-80f2-b04a8e9d1c11", "kfd_id": 2, "node_id": 2, "partition_id": 0}
]"""
AMD_STATIC = """{"gpu_data": [
  {"gpu": 0,
   "asic": {"market_name": "AMD Instinct MI300X", "vendor_id": "0x1002", "device_id": "0x74a1",
            "num_compute_units": 304, "target_graphics_version": "gfx942"},
   "bus": {"bdf": "0000:0c:00.0", "max_pcie_width": 16, "max_pcie_speed": {"value": 32, "unit": "GT/s"}},
   "driver": {"name": "amdgpu", "version": "6.10.5"},
   "vram": {"type": "HBM3", "size": {"value": 196592, "unit": "MB"}},
   "numa": {"node": 1, "affinity": 0}}
]}"""
AMD_TEXT = """GPU: 0
    ASIC:
        MARKET_NAME: AMD Instinct MI210
        VENDOR_ID: 0x1002
        NUM_COMPUTE_UNITS: 104
        TARGET_GRAPHICS_VERSION: gfx90a
    BUS:
        BDF: 0000:63:00.0
        MAX_PCIE_SPEED: 16 GT/s
    DRIVER:
        NAME: amdgpu
        VERSION: 6.7.0
    VRAM:
        TYPE: HBM2e
        SIZE: 65520 MB
    NUMA:
        NODE: 3
        AFFINITY: N/A

GPU: 1
    ASIC:
        MARKET_NAME: N/A
    BUS:
        BDF: 0000:83:00.0
"""
AMD_LIST_TEXT = """GPU: 0
    BDF: 0000:63:00.0
    UUID: 12ff740f-0000-1000-8012-345678901234
"""


def memory_device(size: str, locator: str, bank: str, speed: str = "", kind: str = "DDR4") -> str:
    """One table of ``dmidecode -t memory``; ``speed`` is the whole line of the configured one."""
    lines = (
        "Handle 0x1100, DMI type 17, 84 bytes",
        "Memory Device",
        "\tArray Handle: 0x1000",
        "\tTotal Width: 72 bits",
        "\tData Width: 64 bits",
        f"\tSize: {size}",
        "\tForm Factor: DIMM",
        "\tSet: 1",
        f"\tLocator: {locator}",
        f"\tBank Locator: {bank}",
        f"\tType: {kind}",
        "\tType Detail: Synchronous Registered (Buffered)",
        "\tSpeed: 4800 MT/s",
        "\tManufacturer: 00CE00B300CE",
        *([f"\t{speed}"] if speed else []),
        "\tCache Size: None",
    )
    return "\n".join(lines) + "\n"


_DMI_HEAD = """# dmidecode 3.3
Getting SMBIOS data from sysfs.
SMBIOS 3.3.0 present.

Handle 0x1000, DMI type 16, 23 bytes
Physical Memory Array
\tLocation: System Board Or Motherboard
\tMaximum Capacity: 8 TB
\tNumber Of Devices: 16

"""
_3200 = "Configured Memory Speed: 3200 MT/s"
DMI_DELL = _DMI_HEAD + "\n".join(
    (
        *(memory_device("64 GB", f"A{i}", "Not Specified", _3200) for i in range(1, 9)),
        memory_device("No Module Installed", "A9", "Not Specified", kind="Unknown"),
    )
)
DMI_SUPERMICRO = _DMI_HEAD + "\n".join(
    (
        memory_device("16384 MB", "P1-DIMMA1", "P0_Node0_Channel0_Dimm0", _3200),
        memory_device("16384 MB", "P1-DIMMA2", "P0_Node0_Channel0_Dimm1", _3200),
        memory_device(
            "32 GB", "P1-DIMMC1", "P0_Node0_Channel2_Dimm0", "Configured Memory Speed: 2933 MT/s"
        ),
        memory_device(
            "No Module Installed", "P1-DIMMD1", "P0_Node0_Channel3_Dimm0", kind="Unknown"
        ),
    )
)
DMI_AMD = _DMI_HEAD + "\n".join(
    memory_device(
        "64 GB", "DIMM 0", f"P{p} CHANNEL {c}", "Configured Memory Speed: 4800 MT/s", "DDR5"
    )
    for p in (0, 1)
    for c in "ABCDEFGHIJKL"
)
DMI_QEMU = _DMI_HEAD + memory_device("16 GB", "DIMM 0", "Not Specified", kind="RAM")
DMI_OLD = _DMI_HEAD + "\n".join(
    memory_device("8192 MB", f"DIMM_{c}1", f"NODE {n}", "Configured Clock Speed: 2133 MHz")
    for n in (0, 1)
    for c in "ABCD"
)

NVME_FLAT = """{
  "Devices" : [
    {
      "NameSpace" : 1,
      "DevicePath" : "/dev/nvme0n1",
      "Firmware" : "2CV1E007",
      "Index" : 0,
      "ModelNumber" : "INTEL SSDPF2KX076TZ",
      "ProductName" : "Non-Volatile memory controller: Intel Corporation Device 0x0b60",
      "SerialNumber" : "PHAX0000000000",
      "UsedBytes" : 7681501126656,
      "MaximumLBA" : 15002931888,
      "PhysicalSize" : 7681501126656,
      "SectorSize" : 512
    },
    {"DevicePath" : "/dev/nvme1n1", "Firmware" : "GDC5602Q", "Index" : "1",
     "ModelNumber" : "SAMSUNG MZQL23T8HCLS-00A07", "SerialNumber" : "S64000000000"}
  ]
}"""
NVME_NESTED = """{"Devices": [{"HostNQN": "nqn.2014-08.org.nvmexpress:uuid:0", "HostID": "0",
  "Subsystems": [
   {"Subsystem": "nvme-subsys0", "SubsystemNQN": "nqn.1", "Controllers": [
     {"Controller": "nvme0", "Cntlid": "0", "SerialNumber": "S64000000000",
      "ModelNumber": "SAMSUNG MZQL23T8HCLS-00A07", "Firmware": "GDC5602Q", "Transport": "pcie",
      "Address": "0000:41:00.0", "Slot": "2", "Namespaces": [
        {"NameSpace": "nvme0n1", "Generic": "ng0n1", "NSID": 1, "UsedBytes": 3840755982336,
         "MaximumLBA": 7501476528, "PhysicalSize": 3840755982336, "SectorSize": 512}],
      "Paths": []}], "Namespaces": []},
   {"Subsystem": "nvme-subsys1", "SubsystemNQN": "nqn.2", "Controllers": [
     {"Controller": "nvme1", "SerialNumber": "X1", "ModelNumber": "dellemc-powerstore",
      "Firmware": "4.1.0.0", "Transport": "tcp", "Address": "traddr=10.1.2.3,trsvcid=4420",
      "Slot": "", "Namespaces": [], "Paths": [{"Path": "nvme1c1n1", "ANAState": "optimized"}]}],
    "Namespaces": [{"NameSpace": "nvme1n1", "Generic": "ng1n1", "NSID": 50}]}]}]}"""
SMART = """{"critical_warning": 0, "temperature": 306, "avail_spare": 100, "spare_thresh": 10,
  "percent_used": 3, "data_units_read": 12345678, "num_err_log_entries": 0}"""
SMART_STRINGS = """{"critical_warning": {"value": "4", "available_spare": 0}, "temperature": "310",
  "percent_used": "104", "data_units_read": "340282366920938463463374607431768211455"}"""
LSPCI_NN = (
    "0000:3b:00.0 3D controller [0302]: NVIDIA Corporation GA100GL [A30 PCIe] [10de:20b7] (rev a1)\n"
    "\tNUMA node: 0\n"
    "\tLnkCap:\tPort #0, Speed 16GT/s, Width x16, ASPM not supported\n"
    "\tLnkSta:\tSpeed 16GT/s, Width x8 (downgraded)\n"
    "\tKernel driver in use: nvidia\n"
    "\n"
    "41:00.0 Non-Volatile memory controller [0108]: Samsung Electronics Co Ltd NVMe SSD [144d:a80a] (prog-if 02 [NVM Express])\n"
    "\tCapabilities: <access denied>\n"
)
