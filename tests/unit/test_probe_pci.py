"""GPUs, NICs and NVMe drives in a PCI tree, and what already lives on a drive."""

from __future__ import annotations

from pathlib import Path

import pytest
from probe_trees import link, pci, two_sockets, write

from crater_slurm.model.profile import Nvme, PciDevice, PciKind, PciLink
from crater_slurm.probe.profile import scan

SWITCH = "pci0000:80/0000:80:01.0/0000:81:00.0/0000:82:04.0"


def devices(root: Path) -> dict[str, PciDevice]:
    return {d.address: d for d in scan("n1", root).profile.pci_devices}


def test_a_gpu_below_a_switch_has_its_bridges_root_port_first(tmp_path: Path) -> None:
    two_sockets(tmp_path)
    pci(
        tmp_path,
        f"{SWITCH}/0000:83:00.0",
        **{"class": "0x030200", "vendor": "0x10de", "device": "0x2330", "numa_node": "1"},
        local_cpulist="2-3,6-7",
        current_link_speed="16.0 GT/s PCIe",
        current_link_width="16",
        max_link_speed="32.0 GT/s PCIe",
        max_link_width="16",
    )
    gpu = devices(tmp_path)["0000:83:00.0"]
    assert (gpu.kind, gpu.root, gpu.numa_node) == (PciKind.GPU, "pci0000:80", 1)
    assert gpu.bridges == ("0000:80:01.0", "0000:81:00.0", "0000:82:04.0")
    assert gpu.local_cpus == (2, 3, 6, 7)
    assert gpu.model == "10de:2330"
    assert gpu.link == PciLink(speed_gt_s=16.0, width=16)
    assert gpu.max_link == PciLink(speed_gt_s=32.0, width=16)


@pytest.mark.parametrize(
    ("speed", "width"),
    [("Unknown speed", "16"), ("16.0 GT/s PCIe", "0"), ("16.0 GT/s PCIe", "255"), ("", "")],
)
def test_a_link_that_the_kernel_does_not_know_stays_unknown(
    speed: str, width: str, tmp_path: Path
) -> None:
    two_sockets(tmp_path)
    pci(
        tmp_path,
        "pci0000:00/0000:01:00.0",
        **{"class": "0x020000"},
        current_link_speed=speed,
        current_link_width=width,
    )
    assert devices(tmp_path)["0000:01:00.0"].link is None


@pytest.mark.parametrize(
    ("code", "vendor", "kind"),
    [
        ("0x030000", "0x10de", PciKind.GPU),
        ("0x038000", "0x1002", PciKind.GPU),
        ("0x120000", "0x1da3", PciKind.GPU),
        ("0x030000", "0x1a03", None),  # ASPEED, a management controller
        ("0x030000", "0x102b", None),  # Matrox, another
        ("0x030000", "0x1af4", None),  # a virtual machine's display
        ("0x020700", "0x15b3", PciKind.NIC),
        ("0x010802", "0x144d", PciKind.NVME),
        ("0x010400", "0x1000", None),  # RAID
        ("0x0b4000", "0x1bcf", None),
    ],
)
def test_what_a_device_is_follows_from_class_and_vendor(
    code: str, vendor: str, kind: PciKind | None, tmp_path: Path
) -> None:
    two_sockets(tmp_path)
    pci(tmp_path, "pci0000:00/0000:01:00.0", **{"class": code, "vendor": vendor})
    assert [d.kind for d in devices(tmp_path).values()] == ([kind] if kind else [])


def test_a_nic_has_its_names_and_its_virtual_functions_are_counted(tmp_path: Path) -> None:
    two_sockets(tmp_path)
    nic = "pci0000:00/0000:00:01.0/0000:01:00"
    for function in ("0", "1", "2"):
        pci(tmp_path, f"{nic}.{function}", **{"class": "0x020700", "numa_node": "-1"})
    for function in ("1", "2"):
        link(tmp_path, f"sys/devices/{nic}.{function}/physfn", f"sys/devices/{nic}.0")
    write(tmp_path, {f"sys/devices/{nic}.0/{n}/x": "" for n in ("net/ib0", "infiniband/mlx5_0")})
    found = scan("n1", tmp_path)
    (device,) = found.profile.pci_devices
    assert (device.names, device.numa_node) == (("ib0", "mlx5_0"), None)
    assert "2 virtual functions of PCI devices are left out" in found.notes


def test_a_drive_behind_vmd_has_a_domain_of_32_bits_and_the_host_bridge_of_the_machine(
    tmp_path: Path,
) -> None:
    two_sockets(tmp_path)
    drive = "pci0000:64/0000:64:05.5/pci10000:00/10000:00:02.0/10000:01:00.0"
    pci(tmp_path, drive, **{"class": "0x010802"})
    (device,) = devices(tmp_path).values()
    assert (device.address, device.root) == ("10000:01:00.0", "pci0000:64")
    assert device.bridges == ("0000:64:05.5", "10000:00:02.0")


def test_links_that_lead_nowhere_or_in_a_circle_do_not_fail(tmp_path: Path) -> None:
    two_sockets(tmp_path)
    link(tmp_path, "sys/bus/pci/devices/0000:01:00.0", "sys/devices/gone")
    link(tmp_path, "sys/bus/pci/devices/0000:02:00.0", "sys/bus/pci/devices/0000:02:00.0")
    write(tmp_path, {"sys/bus/pci/devices/0000:03:00.0/class": "0x020000"})
    assert [(a, d.root) for a, d in devices(tmp_path).items()] == [("0000:03:00.0", None)]


# --- NVMe


def drive(root: Path) -> Nvme:
    (found,) = scan("n1", root).profile.nvmes
    return found


def multipath(root: Path) -> None:
    """A drive as Linux 5.x shows it with native multipath: the namespace hangs on a subsystem."""
    two_sockets(root)
    place = "sys/devices/pci0000:00/0000:00:06.0/0000:04:00.0"
    subsystem = "sys/devices/virtual/nvme-subsystem/nvme-subsys1"
    pci(root, "pci0000:00/0000:00:06.0/0000:04:00.0", **{"class": "0x010802"})
    controller = {
        "model": "Test 9100 ",
        "serial": "S1 ",
        "firmware_rev": "2.1",
        "address": "0000:04:00.0",
        "transport": "pcie",
        "numa_node": "-1",
    }
    write(root, {f"{place}/nvme/nvme1/{name}": text for name, text in controller.items()})
    write(root, {f"{subsystem}/nvme1n1/size": "2000409264"})
    link(root, f"{subsystem}/nvme1", f"{place}/nvme/nvme1")
    link(root, f"{subsystem}/nvme1n1/device", subsystem)
    (root / "sys/block/nvme0n1").rename(root / "sys/block/other")
    link(root, "sys/block/nvme1n1", f"{subsystem}/nvme1n1")
    write(root, {"sys/block/nvme1c1n1/size": "2000409264"})


def test_a_path_of_multipath_is_no_drive_and_the_drive_has_its_controller(tmp_path: Path) -> None:
    multipath(tmp_path)
    found = drive(tmp_path)
    assert (found.name, found.pci_bus_id, found.numa_node) == ("nvme1n1", "0000:04:00.0", None)
    assert (found.model, found.firmware, found.stable_id) == ("Test 9100", "2.1", "S1")
    assert found.size_gb == 1024
    assert devices(tmp_path)["0000:04:00.0"].names == ("nvme1n1",)


def test_a_namespace_of_another_host_is_left_out_with_a_note(tmp_path: Path) -> None:
    multipath(tmp_path)
    place = "sys/devices/pci0000:00/0000:00:06.0/0000:04:00.0/nvme/nvme1/transport"
    write(tmp_path, {place: "tcp"})
    found = scan("n1", tmp_path)
    assert found.profile.nvmes == ()
    assert "nvme1n1 is left out: it is no local drive but reached by tcp" in found.notes


def test_an_empty_drive_has_no_uses(tmp_path: Path) -> None:
    two_sockets(tmp_path)
    assert drive(tmp_path).uses == ()


def test_uses_name_partitions_mounts_swap_and_what_is_built_on_top(tmp_path: Path) -> None:
    two_sockets(tmp_path)
    base = "sys/block/nvme0n1"
    write(
        tmp_path,
        {
            f"{base}/nvme0n1p1/partition": "1",
            f"{base}/nvme0n1p2/partition": "2",
            f"{base}/nvme0n1p2/holders/dm-0/x": "",
            f"{base}/nvme0n1p3/partition": "3",
            f"{base}/nvme0n1p3/holders/md127/x": "",
            "sys/block/dm-0/dm/name": "rhel-root",
            "sys/block/dm-0/dm/uuid": "LVM-abc",
            "sys/block/md127/size": "1",
            "proc/mounts": "/dev/nvme0n1p1 /boot\\040efi vfat rw 0 0\n"
            "/dev/mapper/rhel-root / xfs rw 0 0",
            "proc/swaps": "Filename Type Size\n/dev/md127 partition 100 0 -2",
        },
    )
    assert drive(tmp_path).uses == (
        "partitions",
        "mounted at /boot efi",
        "LVM volume rhel-root",
        "mounted at /",
        "part of md127",
        "swap",
    )


def test_a_mount_is_found_by_its_number_where_the_kernel_calls_it_root(tmp_path: Path) -> None:
    two_sockets(tmp_path)
    write(
        tmp_path,
        {
            "sys/block/nvme0n1/dev": "259:0",
            "proc/self/mountinfo": "22 1 259:0 / / rw shared:1 - ext4 /dev/root rw",
        },
    )
    assert drive(tmp_path).uses == ("mounted at /",)


def test_holders_in_a_circle_end(tmp_path: Path) -> None:
    two_sockets(tmp_path)
    write(tmp_path, {f"sys/block/{d}/holders/dm-0/x": "" for d in ("nvme0n1", "dm-0")})
    assert drive(tmp_path).uses == ("part of dm-0",)
