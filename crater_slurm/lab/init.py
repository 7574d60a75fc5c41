"""Pid 1 of a lab: builds what the lab sees, then reaps what its processes leave.

Everything in the lab is in its process namespace, so nothing outlives it. Started by ``Lab.up``
in new namespaces as ``python -m crater_slurm.lab.init FOLDER READY_FD``; says ``ready`` on the
descriptor, or why it can't on standard error. Standard library only.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from crater_slurm.lab import cgroups, view
from crater_slurm.lab.places import CONTROLLER, INSIDE, INSIDE_ROOT, NODES, Folders


def main() -> int:
    """Set the lab up and stay until killed."""
    folder, ready = Path(sys.argv[1]), int(sys.argv[2])
    spec = json.loads((folder / "init.json").read_text())
    try:
        _set_up(Folders(folder), spec)
    except (OSError, RuntimeError, KeyError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    os.write(ready, b"ready")
    os.close(ready)
    _reap()
    return 0


def _set_up(folders: Folders, spec: dict[str, Any]) -> None:
    view.run("hostname", CONTROLLER)
    view.run("ip", "link", "set", "lo", "up")
    # With nothing but 127.0.0.1 the resolver holds that there is no network, and slurmctld
    # can't listen. An address of the documentation range is nobody's.
    view.run("ip", "address", "add", "192.0.2.1/32", "dev", "lo")
    if spec["cgroup"]:
        cgroups.enter(spec["cgroup"])
    view.build(
        folders,
        root=Path(spec["root"]) if spec["root"] else None,
        shared=[(Path(a), Path(b)) for a, b in spec["shared"]],
        needed=[Path(p) for p in spec["needed"]],
        nodes=spec["nodes"],
    )
    sides = ["", str(INSIDE_ROOT)] if spec["root"] else [""]
    inside = Folders(INSIDE)
    _mount_all("ctl", _controller_mounts(inside, sides))
    NODES.mkdir()
    if spec["node_namespaces"]:
        started = {
            node: _start_node(node, _node_mounts(inside, node, sides, spec["cache_mib"]))
            for node in spec["nodes"]
        }
        for node, process in started.items():
            _await_node(node, process)


def _controller_mounts(inside: Folders, sides: list[str]) -> list[str]:
    lines = []
    for side in sides:
        lines += [
            _bound(inside.crater_etc, f"{side}/etc/crater"),
            _bound(inside.controller / "run", f"{side}/run/crater"),
            _bound(inside.controller / "lib", f"{side}/var/lib/crater"),
        ]
    return lines


def _node_mounts(inside: Folders, node: str, sides: list[str], cache_mib: int) -> list[str]:
    cache, shm = "/crater-cache", "/dev/shm"  # noqa: S108 - shared memory is meant
    lines = [
        _memory(f"cache-{node}", cache, f"size={cache_mib}m,mode=755"),
        _memory(f"shm-{node}", shm, "mode=1777"),
    ]
    for side in sides:
        lines += [
            _bound(inside.node(node) / "run", f"{side}/run/crater"),
            _bound(inside.node(node) / "lib", f"{side}/var/lib/crater"),
        ]
        if side:
            lines += [_bound(Path(cache), side + cache), _bound(Path(shm), side + shm)]
    return lines


def _bound(source: Path, target: str) -> str:
    return f"{source} {target} none bind,X-mount.mkdir 0 0\n"


def _memory(name: str, target: str, options: str) -> str:
    return f"{name} {target} tmpfs {options},X-mount.mkdir 0 0\n"


def _fstab(name: str, lines: list[str]) -> Path:
    table = NODES.parent / f"fstab.{name}"
    table.write_text("".join(lines))
    return table


def _mount_all(name: str, lines: list[str]) -> None:
    view.run("mount", "--all", "--fstab", _fstab(name, lines))


def _start_node(node: str, lines: list[str]) -> subprocess.Popen[str]:
    """A process that makes the node's own mounts and host name, and keeps them by staying.

    Pinning a mount namespace to a file would need no process, but fails by chance on kernels whose
    namespace numbers do not grow from CPU to CPU.
    """
    command = 'hostname "$1" && mount --all --fstab "$2" && echo ready && exec sleep infinity'
    # fmt: off
    return subprocess.Popen(
        ["unshare", "--mount", "--uts", "--propagation", "private",
         "sh", "-c", command, "sh", node, str(_fstab(node, lines))],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True,
    )
    # fmt: on


def _await_node(node: str, process: subprocess.Popen[str]) -> None:
    """Wait until the node is set up, and say where its namespaces are."""
    assert process.stdout
    if process.stdout.readline() != "ready\n":
        raise RuntimeError(f"the node {node} could not be set up")
    # Relative, because the machine follows it too, from outside.
    (NODES / node).symlink_to(f"../../proc/{process.pid}/ns")


def _reap() -> None:
    """Collect every process that ends; nothing else may run in pid 1."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    while True:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass
        signal.sigwait({signal.SIGCHLD})


if __name__ == "__main__":
    sys.exit(main())
