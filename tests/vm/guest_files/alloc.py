#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Uses memory and tells on which NUMA nodes it lies. Runs in jobs in the guest.

    alloc.py --anon-mib 200 --file /var/tmp/f --file-mib 50 [--hold PATH]

It touches `--anon-mib` of its own memory, writes `--file-mib` to a file through the page cache, and
prints one line of JSON. With `--hold` it then waits until that path exists and prints a second
line, so that a test can change the job's cgroup, or start a rival, between the two.

    cpus, mems    the lists that the kernel allows this process
    cgroup        its path
    policy        the memory policy of the allocation, as in numa_maps
    anon_pages    {node: 4 KiB pages} of the allocation, from numa_maps
    numa_stat     {kind: {node: bytes}} of its cgroup, kinds 'anon', 'file', ... of memory.numa_stat
"""

import argparse
import ctypes
import json
import mmap
import os
import pathlib
import re
import time

MIB = 1 << 20
PAGE = 4096
CGROUPS = pathlib.Path("/sys/fs/cgroup")


def allocate(mib):
    """Return touched private memory. Without huge pages: a page here counts as one in numa_maps,
    and the kernel cannot merge this mapping with a neighbour that has them."""
    memory = mmap.mmap(-1, mib * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    for start in range(0, mib * MIB, PAGE):
        memory[start] = 1
    return memory


def write_file(path, mib):
    """Write a file and let it reach its disk: clean page cache stays where it was written."""
    with open(path, "wb") as file:
        for _ in range(mib):
            file.write(os.urandom(MIB))
        file.flush()
        os.fsync(file.fileno())


def mapping(memory):
    """Return memory policy and {node: pages} of one mapping."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for line in pathlib.Path("/proc/self/numa_maps").read_text().splitlines():
        start, policy, *fields = line.split()
        if int(start, 16) == address:
            found = (re.fullmatch(r"N(\d+)=(\d+)", field) for field in fields)
            return policy, {node[1]: int(node[2]) for node in found if node}
    raise SystemExit(f"alloc: no mapping at {address:x} in numa_maps")


def numa_stat(path):
    """Return memory.numa_stat of a cgroup as {kind: {node: bytes}}."""
    kinds = {}
    for line in (CGROUPS / path.lstrip("/") / "memory.numa_stat").read_text().splitlines():
        kind, *fields = line.split()
        kinds[kind] = {field[1:].split("=")[0]: int(field.split("=")[1]) for field in fields}
    return kinds


def report(memory):
    status = pathlib.Path("/proc/self/status").read_text()
    path = re.search(r"^0::(.*)$", pathlib.Path("/proc/self/cgroup").read_text(), re.M)[1]
    policy, pages = mapping(memory) if memory else ("", {})
    said = {
        "cpus": re.search(r"^Cpus_allowed_list:\s*(.*)$", status, re.M)[1],
        "mems": re.search(r"^Mems_allowed_list:\s*(.*)$", status, re.M)[1],
        "cgroup": path,
        "policy": policy,
        "anon_pages": pages,
        "numa_stat": numa_stat(path),
    }
    print(json.dumps(said), flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--anon-mib", type=int, default=0)
    parser.add_argument("--file")
    parser.add_argument("--file-mib", type=int, default=0)
    parser.add_argument("--hold")
    options = parser.parse_args()
    memory = allocate(options.anon_mib) if options.anon_mib else None
    if options.file:
        write_file(options.file, options.file_mib)
    report(memory)
    if options.hold:
        while not os.path.exists(options.hold):
            time.sleep(0.2)
        report(memory)


main()
