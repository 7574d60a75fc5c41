"""Builds what a lab sees as its file system, in the lab's own mount namespace.

The machine's own folders are bound as they are, so that files which people edit are always the
real ones. Only four are the lab's: /run and /tmp are new, /etc, /usr/lib and /var/lib get a thin
writable layer in memory. So mount points and users appear in the lab without a trace on the
machine. A Slurm of another version comes from a root of its own, below ``INSIDE_ROOT``, which is
joined to the same /proc, /dev, /run and /tmp.

Runs in pid 1 of the lab: standard library only.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterable
from pathlib import Path

from crater_slurm.lab.places import CONTROLLER, INSIDE, INSIDE_ROOT, USERS, Folders

#: Top-level folders that the view makes itself.
_OWN = {"proc", "sys", "dev", "run", "tmp", "etc", "lost+found", INSIDE.name, ".lab"}
#: Folders with a thin writable layer.
_LAYERED = ("etc", "usr/lib", "var/lib")
#: Top-level folders that a root of its own brings along; all others are shared with it.
_SYSTEM = _OWN | {"bin", "boot", "sbin", "usr", "var", "lib", "lib32", "lib64", "libx32"}
#: Beyond this the names of the nodes stay out of /etc/hosts: no slurmd runs for so many.
_MAX_HOSTS = 2000


def run(*command: str | Path) -> None:
    """Run a command; RuntimeError with its own words when it fails."""
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr.strip() or f"exit status {done.returncode}").splitlines()[0]
        raise RuntimeError(f"{said} (error of {' '.join(map(str, command))})")


def bind(source: Path, target: Path, *, recursive: bool = True) -> None:
    """Make a folder or file visible at another place too."""
    if source.is_dir():
        target.mkdir(parents=True, exist_ok=True)
    elif not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
    run("mount", "--rbind" if recursive else "--bind", source, target)


def build(
    folders: Folders,
    *,
    root: Path | None,
    shared: Iterable[tuple[Path, Path]],
    needed: Iterable[Path],
    nodes: Iterable[str],
) -> None:
    """Build the view and make it this process's root.

    ``root`` is the root folder of another Slurm; ``shared`` are (source, target) that both sides
    see read-only at the target; ``needed`` are paths that must stay visible to this side.
    """
    view = folders.view
    mounted = _mount_points()  # before the view adds its own
    run("mount", "-t", "tmpfs", "-o", "mode=755", "crater-lab", view)
    # Otherwise the machine's folders, bound into the view, would contain the view.
    run("mount", "--make-unbindable", view)
    scratch = view / ".lab"
    scratch.mkdir()
    # Writable layers must lie on a mount that can be bound.
    run("mount", "-t", "tmpfs", "-o", "mode=700", "crater-lab", scratch)
    _bind_machine(view)
    for layered in _LAYERED:
        lower = Path("/") / layered
        _layer(lower, view / layered, scratch / layered.replace("/", "-"))
        for point in _topmost(mounted, lower):
            if (view / point.relative_to("/")).exists():
                bind(point, view / point.relative_to("/"))
    _make_own(view, folders)
    for path in needed:
        if not (view / path.relative_to("/")).exists():
            bind(path, view / path.relative_to("/"))
    sides = [view]
    if root is not None:
        sides.append(_join_root(view, root, scratch))
    for side in sides:
        for source, target in shared:
            _share(source, side / target.relative_to("/"))
        _write_etc(side / "etc", list(nodes))
    run("mount", "--make-private", view)
    _enter(view)


def _bind_machine(view: Path) -> None:
    for entry in sorted(Path("/").iterdir()):
        target = view / entry.name
        if entry.is_symlink():
            target.symlink_to(entry.readlink())
        elif entry.is_dir() and entry.name not in _OWN:
            bind(entry, target)


def _layer(lower: Path, target: Path, scratch: Path) -> None:
    """A writable layer in memory over a folder; it sees that folder's own file system only."""
    upper, work = scratch / "upper", scratch / "work"
    for folder in (upper, work, target):
        folder.mkdir(parents=True, exist_ok=True)
    options = f"lowerdir={lower},upperdir={upper},workdir={work}"
    run("mount", "-t", "overlay", "-o", options, "crater-lab", target)


def _mount_points() -> list[Path]:
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return [Path(line.split()[4].encode().decode("unicode_escape")) for line in lines]


def _topmost(points: list[Path], folder: Path) -> list[Path]:
    """Mount points below a folder, without those below another of them."""
    found: list[Path] = []
    for point in sorted(set(points)):
        if folder in point.parents and not any(f in point.parents for f in found):
            found.append(point)
    return found


def _make_own(view: Path, folders: Folders) -> None:
    for name in ("proc", "run"):
        (view / name).mkdir(exist_ok=True)
    run("mount", "-t", "proc", "proc", view / "proc")
    run("mount", "-t", "tmpfs", "-o", "mode=755", "crater-lab", view / "run")
    for name in ("lock", "munge"):
        (view / "run" / name).mkdir()
    bind(Path("/sys"), view / "sys")
    bind(Path("/dev"), view / "dev")
    run("mount", "-t", "tmpfs", "-o", "mode=1777", "crater-lab", view / "dev/shm")
    bind(folders.tmp, view / "tmp")
    bind(folders.base, view / INSIDE.name, recursive=False)


def _join_root(view: Path, root: Path, scratch: Path) -> Path:
    """The other Slurm's root, with a writable layer and the lab's own folders in it."""
    side = view / INSIDE_ROOT.relative_to("/")
    _layer(root, side, scratch / "root")
    for name in ("proc", "sys", "dev", "run", "tmp"):
        bind(view / name, side / name)
    bind(view / INSIDE.name, side / INSIDE.name, recursive=False)
    for entry in sorted(view.iterdir()):
        if entry.is_dir() and not entry.is_symlink() and entry.name not in _SYSTEM:
            bind(entry, side / entry.name)
    return side


def _share(source: Path, target: Path) -> None:
    if target.exists() and target.samefile(source):
        return
    bind(source, target)
    run("mount", "-o", "remount,bind,ro", target)


def _write_etc(etc: Path, nodes: list[str]) -> None:
    """Users of the lab, and names that need no network."""
    shell = "/bin/bash" if (etc.parent / "bin/bash").exists() else "/bin/sh"
    inside = Folders(INSIDE)
    passwd, group = _without_users(etc / "passwd"), _without_users(etc / "group")
    for user in USERS:
        passwd += f"{user.name}:x:{user.uid}:{user.uid}::{inside.home(user.name)}:{shell}\n"
        group += f"{user.name}:x:{user.uid}:\n"
    names = [CONTROLLER, *nodes[:_MAX_HOSTS]]
    files = {
        "passwd": passwd,
        "group": group,
        "hosts": "".join(f"127.0.0.1 {name}\n" for name in ("localhost", *names)),
        "nsswitch.conf": "passwd: files\ngroup: files\nshadow: files\nhosts: files\n",
        "hostname": f"{CONTROLLER}\n",
    }
    mounted = _mount_points()
    for name, text in files.items():
        # Containers have single files mounted here, which belong to the machine.
        if etc / name in mounted:
            run("umount", etc / name)
        (etc / name).write_text(text)


def _without_users(table: Path) -> str:
    """A table of users or groups without those that the lab has of its own."""
    taken = {user.name for user in USERS} | {str(user.uid) for user in USERS}
    lines = [line.split(":") for line in table.read_text().splitlines()]
    return "".join(":".join(words) + "\n" for words in lines if not taken & {words[0], *words[2:3]})


def _enter(view: Path) -> None:
    """Make the view this process's root and let go of the old one."""
    old = view / ".lab/old"
    old.mkdir()
    # The C library's function, because not every util-linux package has the command.
    library = ctypes.CDLL(None, use_errno=True)
    if library.pivot_root(os.fsencode(view), os.fsencode(old)):
        raise OSError(ctypes.get_errno(), "pivot_root to the lab's view failed")
    os.chdir("/")
    run("umount", "--lazy", "/.lab/old")
