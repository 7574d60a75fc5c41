# SPDX-License-Identifier: Apache-2.0
"""crater-probe on a machine with real NUMA nodes and NVMe drives, beside the tools that admins trust.

The machine is emulated, so figures say nothing of hardware: they are noisy, and asked for with
--allow-noise. What is tested is that they are taken, where, and that fio itself gets the like.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from .guest import Guest
from .node import CONFIG, SOURCE, push_source

CACHE = "/crater-cache"
PROFILE = "/var/lib/crater/profile.json"


class Probe:
    """This working tree's commands in the guest."""

    def __init__(self, guest: Guest) -> None:
        self.guest = guest

    def run(self, *words: str, module: str = "crater_slurm.cli.probe", timeout: float = 900) -> Any:
        command = f"cd / && PYTHONPATH={SOURCE} /usr/bin/python3 -m {module} {' '.join(words)}"
        return self.guest.run(command, timeout=timeout)

    def json(self, *words: str, **how: Any) -> Any:
        done = self.run(*words, "--json", **how)
        assert done.stdout.strip(), done.stderr
        return json.loads(done.stdout)


@pytest.fixture(scope="module")
def probe(guest: Guest) -> Iterator[Probe]:
    push_source(guest)
    guest.check(f"mkdir -p {CACHE} /etc/crater && rm -f {PROFILE}")
    guest.write(CONFIG, json.dumps({"node": {"cache": {"mount_point": CACHE}}}))
    drive = guest.check("basename $(dirname $(grep -l CRATER1 /sys/class/nvme/*/serial))/nvme*n1")
    guest.check(f"mkfs.xfs -q -f /dev/{drive} && mount /dev/{drive} {CACHE}")
    yield Probe(guest)
    guest.check(f"umount {CACHE} && wipefs -qa /dev/{drive}; rm -f {PROFILE}")


@pytest.fixture(scope="module")
def scanned(probe: Probe) -> Any:
    return probe.json("scan")


class TestScan:
    def test_agrees_with_numactl(self, guest: Guest, scanned: Any) -> None:
        text = guest.check("numactl --hardware")
        for node in scanned["numa_nodes"]:
            (cpus,) = re.findall(rf"node {node['id']} cpus: ([\d ]+)", text)
            first, last = map(int, node["cpus"].split("-"))
            assert list(map(int, cpus.split())) == list(range(first, last + 1))
            (size,) = re.findall(rf"node {node['id']} size: (\d+) MB", text)
            assert node["memory_mib"] == int(size)
            (row,) = re.findall(rf"^ +{node['id']}: +([\d ]+)$", text, re.MULTILINE)
            assert node["distances"] == list(map(int, row.split()))
        assert [node["kind"] for node in scanned["numa_nodes"]] == ["cpu", "cpu"]

    def test_agrees_with_lstopo(self, guest: Guest, scanned: Any) -> None:
        text = guest.check("lstopo-no-graphics --whole-io -v")
        cpu = scanned["cpu"]
        assert len(re.findall(r"^ *Package L#", text, re.MULTILINE)) == cpu["sockets"] == 2
        cores = len(re.findall(r"^ *Core L#", text, re.MULTILINE))
        assert cores == cpu["sockets"] * cpu["cores_per_socket"] == 8
        caches = len(re.findall(r"^ *L3(?:Cache)? L#", text, re.MULTILINE))
        assert caches == len(cpu.get("l3_caches", []))
        for drive in scanned["nvmes"]:
            address = drive["pci_bus_id"]
            assert address.removeprefix("0000:").removesuffix(".0") in text

    def test_finds_each_drive_on_its_numa_node(self, guest: Guest, scanned: Any) -> None:
        found = {}
        for drive in scanned["nvmes"]:
            serial = guest.check(f"cat /sys/block/{drive['name']}/device/serial").strip()
            found[serial] = (drive["numa_node"], drive["size_gb"])
        assert found == {"CRATER0": (0, 4), "CRATER1": (1, 4)}
        kinds = {d["address"]: d for d in scanned["pci_devices"] if d["kind"] == "nvme"}
        for drive in scanned["nvmes"]:
            device = kinds[drive["pci_bus_id"]]
            assert device["local_cpus"] == ("0-3" if drive["numa_node"] == 0 else "4-7")
            assert len(device["bridges"]) >= 1

    def test_says_what_lives_on_a_drive(self, scanned: Any) -> None:
        uses = {drive["numa_node"]: drive.get("uses", []) for drive in scanned["nvmes"]}
        assert uses[0] == []
        assert any(CACHE in use for use in uses[1])


def test_the_topology_can_be_drawn(probe: Probe) -> None:
    drawn = probe.run("topo", module="crater_slurm.cli")
    assert drawn.rc == 0, drawn.stderr
    assert drawn.stdout.count("NUMA") >= 2
    assert "nvme0n1" in drawn.stdout
    graph = probe.run("topo", "--json", module="crater_slurm.cli")
    assert json.loads(graph.stdout)


class TestBench:
    def test_measures_memory_on_and_between_the_nodes(self, probe: Probe) -> None:
        found = probe.json("bench", "numa", "--quick", "--allow-noise", "--no-write")
        pairs = [r for r in found["results"] if r["unit"] == "GB/s"]
        assert len(pairs) >= 4, found
        for result in pairs:
            assert "lie" not in str(result["refused"]), "pages are where they were wanted"
            assert result["value"] > 0.01

    def test_measures_the_cache_drive_as_fio_does(self, guest: Guest, probe: Probe) -> None:
        options = ("--seconds", "4", "--file-mib", "256", "--allow-noise", "--no-write")
        found = probe.json("bench", "nvme", *options)
        values = {r["what"].rpartition(" of ")[0]: r["value"] for r in found["results"]}
        by_hand = json.loads(
            guest.check(
                f"cd {CACHE} && fio --name=x --filename=by-hand --size=256m --rw=randread --bs=4k"
                " --iodepth=64 --numjobs=4 --ioengine=io_uring --direct=1 --time_based"
                " --runtime=4 --ramp_time=3 --group_reporting --output-format=json 2>/dev/null;"
                " rm -f by-hand",
                timeout=300,
            )
        )
        theirs = float(by_hand["jobs"][0]["read"]["iops"])
        # An emulated drive on a busy machine: the same figure within a factor of three.
        assert theirs / 3 < values["random read"] < theirs * 3
        assert values["random read latency"] > 1
        assert guest.check(f"ls -A {CACHE}") == "", "nothing is left behind"

    def test_refuses_a_device_and_a_memory_file_system(self, guest: Guest, probe: Probe) -> None:
        begin = "head -c 32M /dev/nvme0n1 | sha256sum"
        before = guest.check(begin, timeout=300)
        for target, words in (
            ("/dev/nvme0n1", "folder"),
            ("/dev/shm", "no file system of a local"),
        ):
            done = probe.run("bench", "nvme", "--dir", target, "--seconds", "1")
            assert done.rc != 0
            assert words in done.stderr + done.stdout
        assert guest.check(begin, timeout=300) == before
