"""Stand-ins for what the node daemon works on: Slurm's cgroup tree, /sys, /proc, signed plans."""

from __future__ import annotations

import subprocess
import textwrap
import threading
from pathlib import Path

from crater_slurm.config.settings import Settings
from crater_slurm.hooks import frame
from crater_slurm.model.cpuset import format_cpulist
from crater_slurm.model.plan import Plan
from crater_slurm.model.token import SignedPlan, sign
from crater_slurm.node import cgroups
from crater_slurm.node.request import Peer, Request

KEY = bytes(range(32))
USER = 65534  # nobody: a user that every machine has
ROOT = Peer(1, 0, 0)


def signed(user: int = USER, cluster: str = "c1", array: bool = False, key: bytes = KEY, **plan):
    """A comment with the user's own text and a genuine token."""
    plan = {"id": "p1", **plan}
    return "my run " + sign(SignedPlan(Plan(**plan), user, cluster, 1_700_000_000, array), key)


def ask(operation: str, peer: Peer = ROOT, **env: str) -> Request:
    """A hook's question with the variables that Slurm always sends, changed by ``env``."""
    base = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_UID": str(USER),
        "SLURM_JOB_GID": str(USER),
        "SLURM_CLUSTER_NAME": "c1",
        "SLURMD_NODENAME": "n1",
    }
    merged = {k: v for k, v in {**base, **env}.items() if v is not None}
    return Request(operation, merged, peer)


def settings(folder: Path, **node) -> Settings:
    """Settings with everything below ``folder``; the cache is a plain folder there."""
    (folder / "plan.key").write_text(KEY.hex() + "\n")
    (folder / "plan.key").chmod(0o600)
    (folder / "cache").mkdir(mode=0o755, exist_ok=True)
    (folder / "cgroup").mkdir(exist_ok=True)
    cache = {
        "mount_point": folder / "cache",
        "require_mount": False,
        "min_free_percent": 0,
        **node.pop("cache", {}),
    }
    return Settings.model_validate(
        {
            "plan": {"key_file": folder / "plan.key"},
            "node": {
                "socket": folder / "run/node.sock",
                "state_dir": folder / "state",
                "profile": folder / "profile.json",
                "cgroup_root": folder / "cgroup",
                "report": False,
                "listen": "",
                "cache": cache,
                **node,
            },
        }
    )


def make_sys(
    root: Path, nodes: dict[int, tuple[str, int]], distances: dict[int, str] | None = None
):
    """A /sys with NUMA nodes: id -> (cpulist, MiB). All memory is free."""
    for number, (cpus, mib) in nodes.items():
        folder = root / f"devices/system/node/node{number}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cpus + "\n")
        default = " ".join("10" if n == number else "21" for n in nodes)
        (folder / "distance").write_text((distances or {}).get(number, default) + "\n")
        (folder / "meminfo").write_text(
            f"Node {number} MemTotal:       {mib * 1024} kB\n"
            f"Node {number} MemFree:        {mib * 1024} kB\n"
            f"Node {number} Active(file):   0 kB\n"
        )
    return root


def make_proc(root: Path, pid: int, uid: int, cpus: str, cgroup: str = "/user.slice"):
    """A /proc with one process and a boot id."""
    (root / "sys/kernel/random").mkdir(parents=True, exist_ok=True)
    (root / "sys/kernel/random/boot_id").write_text("boot-1\n")
    folder = root / str(pid)
    folder.mkdir(exist_ok=True)
    (folder / "cgroup").write_text(f"0::{cgroup}\n")
    (folder / "status").write_text(
        f"Name:\tx\nUid:\t{uid}\t{uid}\t{uid}\t{uid}\nCpus_allowed_list:\t{cpus}\n"
    )
    return root


class FakeTree(cgroups.Tree):
    """A cgroup v2 tree of plain files. Writes have the kernel's effect on ``*.effective``, and
    ``slurm_*`` do what slurmd and slurmstepd do, in their order."""

    def __init__(self, root: Path, scope: str = "n1_slurmstepd.scope", mems: str = "0-1"):
        super().__init__(root)
        self.writes: list[tuple[str, str]] = []
        self.all_mems = mems
        root.mkdir(exist_ok=True)
        (root / "cgroup.controllers").write_text("cpuset cpu io memory pids\n")
        self.scope = root / "system.slice" / scope
        (self.scope / "system").mkdir(parents=True)

    def write_mems(self, folder, nodes) -> None:
        super().write_mems(folder, nodes)
        self.writes.append((str(folder.relative_to(self.scope)), format_cpulist(nodes)))
        self.refresh()

    def refresh(self) -> None:
        """What the kernel does by itself: effective = own set, else the parent's."""
        for folder in sorted(p for p in self.scope.rglob("*") if p.is_dir()):
            above = folder.parent
            for name in ("cpuset.mems", "cpuset.cpus"):
                own = (folder / name).read_text().strip() if (folder / name).exists() else ""
                inherited = above / f"{name}.effective"
                default = self.all_mems if name == "cpuset.mems" else "0-7"
                if not own:
                    own = inherited.read_text().strip() if inherited.exists() else default
                target = folder / f"{name}.effective"
                if not target.exists() or target.read_text() != own + "\n":
                    target.write_text(own + "\n")

    def slurm_job(self, name: str) -> Path:
        job = self.scope / name
        self._mkdir(job)
        (job / "memory.max").write_text("max\n")
        return job

    def slurm_limit(self, name: str, mib: int) -> None:
        (self.scope / name / "memory.max").write_text(f"{mib * 2**20}\n")

    def slurm_step(self, name: str, step: str, cpus: str) -> Path:
        job = self.scope / name
        user = job / f"step_{step}" / "user"
        (job / "cpuset.mems").write_text(self.all_mems + "\n")
        self._mkdir(user.parent)
        self._mkdir(user)
        (user / "cpuset.cpus").write_text(cpus + "\n")
        self.refresh()  # the kernel's effect is part of the write
        (user / "cpuset.mems").write_text(self.all_mems + "\n")
        self.refresh()
        return user

    def slurm_task(self, name: str, step: str, task: int = 0) -> Path:
        folder = self.scope / name / f"step_{step}" / "user" / f"task_{task}"
        self._mkdir(folder)
        self.refresh()
        return folder

    def run_job(self, name: str, mib: int | None, cpus: str, step: str = "batch") -> Path:
        """A whole job with one running task; returns its ``step_X/user``."""
        self.slurm_job(name)
        user = self.slurm_step(name, step, cpus)
        if mib is not None:
            self.slurm_limit(name, mib)
        self.slurm_task(name, step)
        return user

    def mems(self, folder: Path) -> str:
        return (folder / "cpuset.mems").read_text().strip()

    def _mkdir(self, folder: Path) -> None:
        folder.mkdir()
        for name in ("cpuset.mems", "cpuset.cpus"):
            (folder / name).write_text("\n")
        self.refresh()


def wait_for(condition, seconds: float = 5.0) -> bool:
    """Whether a condition became true in time, for what other threads do."""
    pause = threading.Event()
    for _ in range(int(seconds / 0.01)):
        if condition():
            return True
        pause.wait(0.01)
    return bool(condition())


def as_user(code: str, *arguments: str, uid: int = USER) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process of another user, on an interpreter that this user can reach."""
    return subprocess.run(
        ["/usr/bin/python3", "-I", "-c", textwrap.dedent(code), *arguments],
        user=uid, group=uid, extra_groups=[], capture_output=True, text=True, timeout=20,
    )  # fmt: skip


def answer_of(connection) -> dict[str, list[str]]:
    """An answer's values by key."""
    found: dict[str, list[str]] = {}
    for key, value in frame.receive(connection):
        found.setdefault(key, []).append(value)
    return found
