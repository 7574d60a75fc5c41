# SPDX-License-Identifier: Apache-2.0
"""The parts of the bed that need no guest."""

from __future__ import annotations

import getpass
import itertools
import json
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from . import alloc, emulator
from .emulator import PROGRAM
from .errors import BedUnavailableError, GuestError
from .guest import Guest, qemu_command
from .image import GUEST_FILES, SUITE_OF_RELEASE, Image
from .mirror import codename, mirror_of_suite, proxy_options
from .parts import Cache, recipe_hash
from .slurm import Hooks, parse_record, slurm_conf, step_folder

TARGETS = [
    "nodistro main http://vendor.invalid/repo/",
    "bookworm-security main http://one.invalid/debian-security/",
    "bookworm contrib http://two.invalid/debian/",
    "bookworm main http://three.invalid/debian/",
    "bookworm main http://four.invalid/debian/",
]


class TestMirror:
    def test_is_where_the_suite_itself_comes_from(self) -> None:
        assert mirror_of_suite("bookworm", TARGETS) == "http://three.invalid/debian"

    @pytest.mark.parametrize("suite", ["trixie", ""])
    def test_missing_says_what_to_set(self, suite: str) -> None:
        with pytest.raises(BedUnavailableError, match="set CRATER_VM_MIRROR"):
            mirror_of_suite(suite, TARGETS)

    def test_codename_of_this_system(self) -> None:
        assert codename('ID=debian\nVERSION_CODENAME=trixie\nNAME="x"\n') == "trixie"
        assert codename("ID=arch\n") == ""

    def test_proxies_are_taken_over_and_nothing_else(self) -> None:
        dump = 'Acquire::http "";\nAcquire::http::Proxy "http://p.invalid:1/";\nAcquire::Queue "1";'
        assert proxy_options(dump) == ['Acquire::http::Proxy "http://p.invalid:1/";']


class TestCache:
    def test_builds_a_recipe_once_and_drops_the_old_one(self, tmp_path: Path) -> None:
        cache, built = Cache(tmp_path / "new" / "cache"), []

        def build(folder: Path) -> None:
            built.append(folder)
            (folder / "file").write_text("whole")

        first = cache.part("kind", {"packages": ["a"]}, build)
        assert cache.part("kind", {"packages": ["a"]}, build) == first
        assert len(built) == 1
        second = cache.part("kind", {"packages": ["a", "b"]}, build)
        assert len(built) == 2
        assert (second / "file").read_text() == "whole"
        assert not first.exists()

    def test_failed_build_leaves_nothing(self, tmp_path: Path) -> None:
        def build(folder: Path) -> None:
            (folder / "half").write_text("half")
            raise BedUnavailableError("mirror away")

        with pytest.raises(BedUnavailableError, match="mirror away"):
            Cache(tmp_path).part("kind", {}, build)
        assert [path.name for path in tmp_path.iterdir()] == ["lock"]

    def test_leavings_of_a_killed_build_are_swept(self, tmp_path: Path) -> None:
        (tmp_path / "growing-kind").mkdir()
        part = Cache(tmp_path).part("kind", {}, lambda folder: None)
        assert part.is_dir()
        assert not list(tmp_path.glob("growing-*"))

    def test_hash_depends_on_content_and_not_on_order(self) -> None:
        assert recipe_hash({"a": 1, "b": 2}) == recipe_hash({"b": 2, "a": 1})
        assert recipe_hash({"a": 1}) != recipe_hash({"a": 2})


class TestEmulator:
    @pytest.fixture
    def own(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
        """Lets this machine have only a QEMU that says so when it is asked for its version."""
        monkeypatch.setenv("PATH", str(tmp_path))

        def says(text: str) -> None:
            (tmp_path / PROGRAM).write_text(f"#!/bin/sh\necho '{text}'\n")
            (tmp_path / PROGRAM).chmod(0o755)

        return says

    @pytest.mark.parametrize("version", ["8.1.0 (v8.1.0)", "8.2.2 (Debian 1:8.2)", "10.0.13"])
    def test_of_this_machine_is_used_where_it_is_sound(
        self, own: Callable[[str], None], tmp_path: Path, version: str
    ) -> None:
        own(f"QEMU emulator version {version}")
        assert emulator.emulator(Cache(tmp_path / "cache")) == (PROGRAM,)
        assert not (tmp_path / "cache").exists()

    @pytest.mark.parametrize("version", ["QEMU emulator version 7.2.22 (Debian)", "8", "?", None])
    def test_else_one_is_kept_that_runs_from_its_own_folder(
        self,
        own: Callable[[str], None],
        monkeypatch: pytest.MonkeyPatch,
        tmp_path: Path,
        version: str | None,
    ) -> None:
        if version:
            own(version)
        built = []
        monkeypatch.setattr(
            emulator,
            "debootstrap",
            lambda suite, packages, tree: (tree.mkdir(), built.append((suite, packages))),
        )
        for _ in range(2):
            command = emulator.emulator(Cache(tmp_path / "cache"))
        assert built == [("trixie", ("qemu-system-x86", "seabios"))]
        (tree,) = (tmp_path / "cache").glob("qemu-*/tree")
        assert command[0] == "env"
        assert all(word.startswith(("-", str(tree))) for word in command[2:])
        assert f"{tree}/usr/bin/{PROGRAM}" in command


class TestMachine:
    def test_every_device_names_its_bus(self, tmp_path: Path) -> None:
        """Without `bus=` QEMU may put a device onto a pxb-pcie, and then does not start."""
        image = Image("24.11", *[tmp_path] * 4)
        command = qemu_command(image, tmp_path / "console", 4711)
        devices = [after for word, after in itertools.pairwise(command) if word == "-device"]
        assert len(devices) == 12
        assert all("bus=" in device for device in devices)
        assert "hostfwd=tcp:127.0.0.1:4711-:2222" in " ".join(command)
        assert sum("snapshot=on" in word for word in command) == 3

    def test_that_does_not_start_is_an_error_with_its_reason(self, tmp_path: Path) -> None:
        if not shutil.which("qemu-system-x86_64"):
            pytest.skip("no QEMU here")
        absent = tmp_path / "absent"
        with pytest.raises(GuestError, match="absent"):
            Guest.boot(Image("24.11", absent, absent, absent, absent), tmp_path)

    @pytest.mark.parametrize(
        ("said", "tries"),
        [
            ("rcu: rcu_preempt kthread timer wakeup didn't happen for 5251 jiffies!", 3),
            ("Kernel panic - not syncing: VFS", 1),
        ],
    )
    def test_whose_kernel_hangs_by_chance_is_booted_again(
        self, tmp_path: Path, said: str, tries: int
    ) -> None:
        """The emulator here is a script that writes to the console, and ends on a panic."""
        program, log = tmp_path / "emulator", tmp_path / "runs"
        program.write_text(
            f"#!/bin/sh\necho >>{log}\nfor word; do case $word in file:*) to=${{word#file:}};; esac;"
            f' done\necho "{said}" >$to\ncase "{said}" in *panic*) ;; *) exec sleep 60;; esac\n'
        )
        program.chmod(0o755)
        image = Image("24.11", *[tmp_path] * 4, emulator=(str(program),))
        with pytest.raises(GuestError, match=re.escape(said)):
            Guest.boot(image, tmp_path)
        assert len(log.read_text().splitlines()) == tries


class TestSlurmConf:
    def test_nodes_and_partitions_come_last_but_for_extra_lines(self) -> None:
        conf = slurm_conf(Hooks(), extra=["PartitionName=other Nodes=n1"]).splitlines()
        assert [line.split("=")[0] for line in conf[-3:]] == [
            *("NodeName", "PartitionName", "PartitionName"),
        ]
        assert conf[-1] == "PartitionName=other Nodes=n1"

    def test_names_the_hooks_that_there_are(self) -> None:
        conf = slurm_conf(Hooks(prolog="/p", task_prolog="/t")).splitlines()
        assert {"Prolog=/p", "TaskProlog=/t"} <= set(conf)
        assert not [line for line in conf if line.startswith(("Epilog=", "TaskEpilog="))]

    def test_setting_of_the_caller_replaces_the_bed_s(self) -> None:
        conf = slurm_conf(Hooks(), {"PrologFlags": "Alloc"}).splitlines()
        assert [line for line in conf if line.startswith("PrologFlags")] == ["PrologFlags=Alloc"]


class TestParsing:
    def test_record_keeps_values_with_blanks(self) -> None:
        text = "JobId=7 JobName=a b UserId=alice(1000) Command=(null) TRES/x=cpu=4,gres/gpu=2"
        assert parse_record(text) == {
            "JobId": "7",
            "JobName": "a b",
            "UserId": "alice(1000)",
            "Command": "(null)",
            "TRES/x": "cpu=4,gres/gpu=2",
        }

    @pytest.mark.parametrize(
        "path",
        [
            "/system.slice/slurmstepd.scope/job_5/step_batch",
            "/system.slice/slurmstepd.scope/sA3DM8KXK9VV00/step_batch",
        ],
    )
    @pytest.mark.parametrize("below", ["", "/user", "/user/task_0", "/slurm"])
    def test_step_folder_of_every_release(self, path: str, below: str) -> None:
        assert step_folder(path + below) == path

    def test_process_outside_a_step_is_an_error(self) -> None:
        with pytest.raises(GuestError, match="not in a Slurm step"):
            step_folder("/system.slice/sshd.service")

    def test_placement_counts_in_mib(self) -> None:
        report = {
            "cpus": "0-3",
            "mems": "0",
            "cgroup": "/c",
            "policy": "default",
            "anon_pages": {"0": 512},
            "numa_stat": {"file": {"0": 3 << 20, "1": 0}},
        }
        (placed,) = alloc.placements(f"noise\n{json.dumps(report)}\nmore\n")
        assert (placed.anon_mib(0), placed.anon_mib(1)) == (2.0, 0.0)
        assert (placed.file_mib(0), placed.file_mib(1)) == (3.0, 0.0)


def test_every_release_has_a_suite_of_its_own() -> None:
    assert len(set(SUITE_OF_RELEASE.values())) == len(SUITE_OF_RELEASE)


def test_agent_answers_a_script_with_its_status_and_outputs() -> None:
    """The agent is plain Python, so its wire form can be tried without a guest."""
    agent: list[str | Path] = [sys.executable, GUEST_FILES / "agent.py", "127.0.0.1", "0"]
    with subprocess.Popen(agent, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            port = int(process.stdout.readline().split()[-1])
            request = {"script": "cat; echo err >&2; exit 5", "user": getpass.getuser()}
            head = json.dumps(request | {"timeout": 10, "stdin": 3}).encode()
            with socket.create_connection(("127.0.0.1", port)) as connection:
                connection.sendall(head + b"\nabc")
                answer = connection.makefile("rb").read()
        finally:
            process.terminate()
    header, _, body = answer.partition(b"\n")
    assert json.loads(header) == {"rc": 5, "timed_out": False, "stdout": 3, "stderr": 4}
    assert body == b"abcerr\n"
