"""Cache folders: rules, room, mounts, and everything a user may put in the way."""

from __future__ import annotations

import ctypes
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from node_fakes import USER, as_user

from crater_slurm.config.cache import Cache as CacheSettings
from crater_slurm.errors import ConfigError
from crater_slurm.node import cache, mounts, safefs
from crater_slurm.node.bounded import Bounded
from crater_slurm.node.cache import KINDS, Cache

OTHER = 65533
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="changes owners, so it needs root")
pytestmark = as_root


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o755)
    for above in [folder, *folder.parents][:-2]:
        above.chmod(0o755)  # other users must be able to get as far as the cache
    return folder


def make(base: Path, **settings) -> Cache:
    values = {"mount_point": base, "require_mount": False, "min_free_percent": 0, **settings}
    return Cache(CacheSettings.model_validate(values))


def mode_and_owner(path: Path) -> tuple[str, int, int]:
    status = path.lstat()
    return oct(stat.S_IMODE(status.st_mode)), status.st_uid, status.st_gid


def test_folders_are_the_users_alone_below_roots_own(base: Path) -> None:
    folders = make(base).prepare("c1", "7", USER, USER)
    assert folders.problem == ""
    assert folders.paths == {kind: f"{base}/{kind}/c1/7" for kind in KINDS}
    for kind in KINDS:
        assert mode_and_owner(base / kind / "c1" / "7") == ("0o700", USER, USER)
        assert mode_and_owner(base / kind) == ("0o711", 0, 0)
        assert mode_and_owner(base / kind / "c1") == ("0o711", 0, 0)
    assert mode_and_owner(base / cache.TRASH) == ("0o700", 0, 0)


def test_the_user_can_write_there_and_nobody_else_can_read(base: Path) -> None:
    make(base).prepare("c1", "7", USER, USER)
    path = str(base / "checkpoint/c1/7")
    code = "import os, sys; os.chdir(sys.argv[1]); open('model.pt', 'w'); print(os.listdir())"
    assert as_user(code, path).stdout == "['model.pt']\n"
    assert (
        "PermissionError"
        in as_user("import os, sys; os.listdir(sys.argv[1])", path, uid=OTHER).stderr
    )
    listing = as_user("import os, sys; os.listdir(sys.argv[1])", str(base / "checkpoint/c1"))
    assert "PermissionError" in listing.stderr, "jobs of others are not even listed"


def test_leftovers_of_the_same_job_id_are_set_aside(base: Path) -> None:
    subject = make(base)
    subject.prepare("c1", "7", USER, USER)
    (base / "temp/c1/7/old").write_text("x")
    subject.prepare("c1", "7", OTHER, OTHER)
    assert list((base / "temp/c1/7").iterdir()) == []
    assert mode_and_owner(base / "temp/c1/7") == ("0o700", OTHER, OTHER)
    subject.sweep()
    assert list((base / cache.TRASH).iterdir()) == []


def test_a_restart_keeps_its_checkpoints_and_nothing_else(base: Path) -> None:
    subject = make(base)
    subject.prepare("c1", "7", USER, USER)
    for kind in KINDS:
        (base / kind / "c1/7/file").write_text("x")
    subject.prepare("c1", "7", USER, USER, keep=("checkpoint",))
    assert [(base / kind / "c1/7/file").exists() for kind in KINDS] == [True, False, False]


def test_a_restart_never_keeps_another_users_folder(base: Path) -> None:
    subject = make(base)
    subject.prepare("c1", "7", USER, USER)
    (base / "checkpoint/c1/7/secret").write_text("x")
    subject.prepare("c1", "7", OTHER, OTHER, keep=KINDS)
    assert list((base / "checkpoint/c1/7").iterdir()) == []


def test_release_is_instant_and_only_this_jobs(base: Path) -> None:
    subject = make(base)
    for job in ("7", "8", "77"):
        subject.prepare("c1", job, USER, USER)
        (base / f"temp/c1/{job}/file").write_text("x")
    assert subject.release("c1", "7")
    assert sorted(p.name for p in (base / "temp/c1").iterdir()) == ["77", "8"]
    assert len(list((base / cache.TRASH).iterdir())) == 3, "moved, not yet deleted"
    assert subject.release("c1", "7"), "twice is fine"
    subject.sweep()
    assert list((base / cache.TRASH).iterdir()) == []


def test_release_without_any_prolog_is_fine(base: Path) -> None:
    assert make(base).release("c1", "4711")


def test_release_of_some_kinds_leaves_the_others(base: Path) -> None:
    subject = make(base)
    subject.prepare("c1", "7", USER, USER)
    subject.release("c1", "7", ("dataset", "temp"))
    assert [(base / kind / "c1/7").exists() for kind in KINDS] == [True, False, False]


# Attacks


@pytest.mark.parametrize("kind", KINDS)
def test_a_link_in_place_of_a_kind_is_refused(base: Path, tmp_path: Path, kind: str) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (base / kind).symlink_to(target)
    folders = make(base).prepare("c1", "7", USER, USER)
    assert folders.paths == {}
    assert folders.problem == f"couldn't use {kind!r}: it is a link or a file, not a folder"
    assert list(target.iterdir()) == []


def test_a_folder_that_a_user_made_first_is_refused(base: Path) -> None:
    (base / "checkpoint").mkdir()
    os.chown(base / "checkpoint", USER, USER)
    assert f"belongs to uid {USER}" in make(base).prepare("c1", "7", USER, USER).problem


def test_a_cache_that_anyone_can_write_to_is_refused(base: Path) -> None:
    base.chmod(0o777)
    assert "chmod 0711" in make(base).prepare("c1", "7", USER, USER).problem


def test_a_link_in_place_of_the_jobs_folder_is_moved_not_followed(
    base: Path, tmp_path: Path
) -> None:
    target = tmp_path / "victim"
    target.mkdir()
    (target / "precious").write_text("x")
    subject = make(base)
    subject.prepare("c1", "6", USER, USER)
    (base / "temp/c1/7").symlink_to(target)
    assert subject.prepare("c1", "7", USER, USER, keep=KINDS).problem == ""
    assert not (base / "temp/c1/7").is_symlink()
    subject.sweep()
    assert (target / "precious").read_text() == "x"
    assert mode_and_owner(target)[1] == 0


def test_links_inside_are_removed_not_followed(base: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "precious").write_text("x")
    subject = make(base)
    subject.prepare("c1", "7", USER, USER)
    inside = base / "temp/c1/7"
    (inside / "folder").symlink_to(victim)
    (inside / "file").symlink_to(victim / "precious")
    os.link(victim / "precious", inside / "hard")
    subject.release("c1", "7")
    subject.sweep()
    assert list((base / cache.TRASH).iterdir()) == []
    assert (victim / "precious").read_text() == "x"
    assert mode_and_owner(victim / "precious")[1] == 0


def test_hostile_names_are_removed(base: Path) -> None:
    subject = make(base)
    subject.prepare("c1", "7", USER, USER)
    inside = os.fsencode(base / "temp/c1/7")
    for name in (b"a\nb", b"\xff\xfe", b"-rf *", b"; rm -rf ~", b"...", b"x" * 255, b"\x1b[2J"):
        os.mkdir(inside + b"/" + name)
        open(inside + b"/" + name + b"/" + name[:200], "w").close()
    subject.release("c1", "7")
    subject.sweep()
    assert list((base / cache.TRASH).iterdir()) == []


def test_unreadable_and_special_files_are_removed(base: Path) -> None:
    subject = make(base)
    subject.prepare("c1", "7", USER, USER)
    inside = base / "temp/c1/7"
    (inside / "closed").mkdir()
    (inside / "closed/file").write_text("x")
    (inside / "closed").chmod(0)
    os.mkfifo(inside / "pipe")
    os.mknod(inside / "device", 0o600 | stat.S_IFCHR, os.makedev(1, 3))
    subject.release("c1", "7")
    subject.sweep()
    assert list((base / cache.TRASH).iterdir()) == []


def test_a_tree_deeper_than_any_stack_is_removed(base: Path) -> None:
    subject = make(base)
    subject.prepare("c1", "7", USER, USER)
    fd = os.open(base / "temp/c1/7", os.O_RDONLY)
    for _ in range(3000):
        os.mkdir("d", dir_fd=fd)
        below = os.open("d", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(fd)
    subject.release("c1", "7")
    subject.sweep()
    assert list((base / cache.TRASH).iterdir()) == []


def unshared(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a mount namespace of its own."""
    return subprocess.run(
        ["unshare", "--mount", "--propagation", "private", sys.executable, "-c", code, *arguments],
        capture_output=True, text=True, timeout=30, cwd=Path(__file__).parents[2],
    )  # fmt: skip


_REMOVE_WITH_MOUNT = """
import subprocess, sys
from pathlib import Path
from crater_slurm.config.cache import Cache as Settings
from crater_slurm.node.cache import Cache
base, victim = Path(sys.argv[1]), Path(sys.argv[2])
cache = Cache(Settings(mount_point=base, require_mount=False, min_free_percent=0))
cache.prepare("c1", "7", 65534, 65534)
inside = base / "temp/c1/7/mnt"
inside.mkdir()
subprocess.run(["mount", "--bind", str(victim), str(inside)], check=True)
cache.release("c1", "7")
cache.sweep()
print((victim / "precious").exists(), len(list((base / ".crater-trash").iterdir())))
"""


def test_a_bind_mount_inside_is_never_entered_though_it_is_the_same_device(
    base: Path, tmp_path: Path
) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "precious").write_text("x")
    done = unshared(_REMOVE_WITH_MOUNT, str(base), str(victim))
    assert done.stdout == "True 1\n", done.stderr


# Room and mounts


def test_a_full_cache_gives_no_folders_and_says_how_full(base: Path, monkeypatch) -> None:
    subject = make(base, min_free_percent=2)
    real = os.statvfs(base)
    full = os.statvfs_result((*real[:2], 1000, 100, 19, *real[5:10]))
    monkeypatch.setattr(os, "statvfs", lambda _: full)
    folders = subject.prepare("c1", "7", USER, USER)
    assert (folders.paths, folders.problem) == ({}, "the cache is full, 1.9 % are free")
    assert folders.fault == "", "a full cache is no fault of the node"


def test_leftovers_go_before_the_room_is_counted(base: Path, monkeypatch) -> None:
    subject = make(base)
    subject.prepare("c1", "7", USER, USER)
    monkeypatch.setattr(Cache, "_check_room", lambda self, root: (_ for _ in ()).throw(
        cache.CacheProblemError("full")))  # fmt: skip
    subject.prepare("c1", "7", USER, USER)
    assert not (base / "temp/c1/7").exists()


def test_size_gb_counts_what_the_cache_holds_on_a_shared_file_system(base: Path) -> None:
    subject = make(base, size_gb=1)
    subject.prepare("c1", "6", USER, USER)
    with (base / "temp/c1/6/big").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, 1_000_000_000)
    subject.measure()
    assert subject.prepare("c1", "7", USER, USER).problem == "the cache holds its 1 GB already"
    (base / "temp/c1/6/big").unlink()
    subject.measure()
    assert subject.prepare("c1", "7", USER, USER).problem == ""


def test_a_plain_folder_is_no_cache_by_default(base: Path) -> None:
    folders = make(base, require_mount=True).prepare("c1", "7", USER, USER)
    assert folders.problem == f"nothing is mounted at {base}"
    assert folders.fault == cache.MISSING
    assert list(base.iterdir()) == []


def test_a_missing_folder_is_said(tmp_path: Path) -> None:
    folders = make(tmp_path / "gone").prepare("c1", "7", USER, USER)
    assert folders.problem == f"there is no folder {tmp_path / 'gone'}"
    assert folders.fault == cache.MISSING


MOUNTINFO = "36 25 259:1 / {point} rw,noatime shared:1 - xfs /dev/nvme0n1 {super}\n"


def test_a_read_only_cache_is_said(base: Path) -> None:
    text = MOUNTINFO.format(point=base, super="ro,attr2")
    subject = Cache(CacheSettings(mount_point=base, min_free_percent=0), lambda: text)
    folders = subject.prepare("c1", "7", USER, USER)
    assert (folders.problem, folders.fault) == (
        f"the cache at {base} is read-only",
        cache.READ_ONLY,
    )


def test_mountinfo_is_read_with_its_escapes_and_the_topmost_mount_wins() -> None:
    text = (
        "36 25 8:1 / /a\\040b rw - ext4 /dev/sda1 rw\n"
        "37 36 259:1 / /a\\040b rw,noatime master:1 shared:2 - xfs /dev/nvme0n1 ro,attr2\n"
        "38 25 0:5 / /a\\040b/c rw - tmpfs tmpfs rw\n"
    )
    found = mounts.find_mount(Path("/a b"), text)
    assert found is not None
    assert (found.source, found.filesystem, found.read_only) == ("/dev/nvme0n1", "xfs", True)
    assert mounts.find_mount(Path("/a"), text) is None


@pytest.mark.parametrize(
    "device", ["/dev/nvme0n1", "/dev/sda", "nvme0n1", "/dev/disk/by-path/x", "UUID=",
               "/dev/disk/by-id/../../sda", "UUID=a b", "LABEL=x\n"],
)  # fmt: skip
def test_only_stable_device_names_are_taken(device: str) -> None:
    with pytest.raises(ConfigError, match="may change with the next boot"):
        mounts.check_device_name(device)
    with pytest.raises(ValueError, match="pattern"):
        CacheSettings(device=device)


class Commands:
    """The commands that mounting runs, with scripted answers."""

    def __init__(self, **answers: str) -> None:
        self.answers = answers
        self.ran: list[list[str]] = []

    def __call__(self, command) -> str:
        self.ran.append(list(command))
        return self.answers.get(command[0], "")


@pytest.fixture
def block_device(monkeypatch) -> str:
    real = Path.stat

    def fake(self, **how):
        if str(self) == "/dev/fake":
            return os.stat_result((stat.S_IFBLK | 0o600, 1, 1, 1, 0, 0, 0, 0, 0, 0))
        return real(self, **how)

    monkeypatch.setattr(Path, "stat", fake)
    return "/dev/fake"


def test_a_device_with_a_file_system_is_mounted_and_nothing_else_is_run(base, block_device) -> None:
    run = Commands(
        findfs=block_device + "\n", blkid="DEVNAME=/dev/fake\nTYPE=xfs\nUSAGE=filesystem\n"
    )
    text = mounts.mount_device("UUID=abc", base, run)
    assert run.ran == [
        ["findfs", "UUID=abc"],
        ["blkid", "-p", "-o", "export", "/dev/fake"],
        ["mount", "-o", "noatime,nosuid,nodev", "/dev/fake", str(base)],
    ]
    assert text == f"mounted UUID=abc (/dev/fake, xfs) at {base}"


@pytest.mark.parametrize(
    ("blkid", "holds"),
    [("", "nothing that blkid knows"), ("TYPE=crypto_LUKS\nUSAGE=crypto\n", "crypto_LUKS"),
     ("TYPE=linux_raid_member\nUSAGE=raid\n", "linux_raid_member"), ("PTTYPE=gpt\n", "nothing")],
)  # fmt: skip
def test_a_device_without_a_file_system_is_never_touched(base, block_device, blkid, holds) -> None:
    run = Commands(findfs=block_device, blkid=blkid)
    with pytest.raises(mounts.MountError, match=f"holds {holds}.*never formats"):
        mounts.mount_device("LABEL=cache", base, run)
    assert [command[0] for command in run.ran] == ["findfs", "blkid"]


def test_a_mount_point_with_files_is_never_covered(base: Path) -> None:
    (base / "file").write_text("x")
    run = Commands()
    with pytest.raises(mounts.MountError, match="not empty"):
        mounts.mount_device("UUID=abc", base, run)
    assert run.ran == []


def test_no_command_of_the_package_can_format(base: Path) -> None:
    folder = Path(mounts.__file__).parent
    source = "".join(p.read_text() for p in folder.glob("*.py"))
    assert "mkfs" not in source
    assert "wipefs" not in source


def test_a_failing_mount_is_retried_only_after_a_minute(base: Path, monkeypatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(mounts, "mount_device", lambda *_: calls.append(1) or "mounted")
    subject = Cache(CacheSettings(mount_point=base, device="UUID=abc"), lambda: "")
    subject.ensure_mounted()
    subject.ensure_mounted()
    assert calls == [1]


# Hanging drives


def test_a_hanging_cache_costs_a_job_its_cache_and_a_second(base: Path, monkeypatch) -> None:
    release = threading.Event()
    monkeypatch.setattr(Cache, "_prepare", lambda *_: release.wait(30) and {})
    monkeypatch.setattr(cache, "_PATIENCE_SECONDS", 0.1)
    folders = make(base).prepare("c1", "7", USER, USER)
    release.set()
    assert (folders.problem, folders.fault) == ("the cache does not answer", cache.MISSING)


def test_stuck_calls_are_not_joined_by_more(base: Path) -> None:
    release = threading.Event()
    subject = Bounded(limit=2)
    for _ in range(2):
        with pytest.raises(TimeoutError, match="no result"):
            subject.call(lambda: release.wait(30), 0.05)
    with pytest.raises(TimeoutError, match="still hang"):
        subject.call(lambda: 1, 0.05)
    release.set()
    assert subject.call(lambda: 1, 5) == 1


def test_errors_of_bounded_work_reach_the_caller() -> None:
    def fail() -> None:
        raise OSError(5, "Input/output error")

    with pytest.raises(OSError, match="Input/output error"):
        Bounded().call(fail, 5)


def test_an_input_output_error_is_a_reason_not_a_failure(base: Path, monkeypatch) -> None:
    def fail(*_args) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(safefs, "make_private", fail)
    folders = make(base).prepare("c1", "7", USER, USER)
    assert folders.problem == "the cache can't be written: Input/output error"


def test_trash_of_an_earlier_daemon_is_swept(base: Path) -> None:
    make(base).prepare("c1", "7", USER, USER)
    (base / cache.TRASH / "temp.c1.5.123.0").mkdir()
    make(base).sweep()
    assert list((base / cache.TRASH).iterdir()) == []


def test_what_can_not_be_deleted_stays_and_does_not_loop(base: Path, monkeypatch) -> None:
    subject = make(base)
    subject.prepare("c1", "7", USER, USER)
    (base / "temp/c1/7/file").write_text("x")
    subject.release("c1", "7")
    real = os.unlink

    def refuse(path, **how):
        if str(path) == "file":
            raise PermissionError(1, "Operation not permitted")
        return real(path, **how)

    monkeypatch.setattr(os, "unlink", refuse)
    subject.sweep()
    assert len(list((base / cache.TRASH).iterdir())) == 1


def test_the_libc_of_this_machine_has_inotify() -> None:
    assert ctypes.CDLL(None).inotify_init1
