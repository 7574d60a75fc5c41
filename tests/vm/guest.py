# SPDX-License-Identifier: Apache-2.0
"""A QEMU guest with two NUMA nodes: boot it, run scripts in it, put files in it, end it.

The machine is emulated (no KVM), so it boots anywhere and its times mean nothing. What is true to
a real node: 2 sockets of 4 cores, 2 GiB of memory on each of two NUMA nodes at distance 21, one
NVMe drive and one display controller behind a PCI root of each node, cgroup v2, Debian's kernel.

    node 0   CPUs 0-3   NVMe serial CRATER0      node 1   CPUs 4-7   NVMe serial CRATER1

Nothing of a guest outlives it: its disks are overlays that QEMU drops at exit, its network leads
nowhere but to the command agent (guest_files/agent.py), and the kernel ends QEMU when the process
that booted it ends, however that ends.
"""

from __future__ import annotations

import dataclasses
import io
import json
import shlex
import socket
import subprocess
import tarfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Self

from .errors import GuestError
from .image import GUEST_HOME, Image

AGENT_PORT = 2222
BOOT_SECONDS = 300
"""Patience for a boot; it takes 30 to 50 s on two free cores."""
GRACE_SECONDS = 60
"""How much longer than the agent the host waits before it takes the guest for hung."""
BOOT_TRIES = 3
TRY_AGAIN = (
    "Could not set up host forwarding rule",
    "kthread timer wakeup didn't happen",
)
"""By chance and before anything of ours runs: another process takes the free port before QEMU binds
it; on a busy machine, an emulated CPU loses its timer while the kernel starts, and waits for ever.
"""

NOT_PUSHED = ("__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache")


@dataclasses.dataclass(frozen=True)
class Result:
    """How a script ended. A script that ran out of time has been killed, rc is -9."""

    rc: int
    stdout: str
    stderr: str
    timed_out: bool = False

    def describe(self) -> str:
        """Return the whole result in words, for an error message."""
        ended = "ran out of time" if self.timed_out else f"ended with {self.rc}"
        return f"{ended}\n--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}"


class Guest:
    """A running guest. Leave it by `shutdown`, or use it as a context manager."""

    def __init__(self, release: str, process: subprocess.Popen[bytes], port: int, console: Path):
        self.release = release
        self.logs: list[str] = ["/dev/null"]
        """Files in the guest whose ends belong into the report of a failed test."""
        self.boot_seconds = 0.0
        self._process = process
        self._port = port
        self._console = console

    @classmethod
    def boot(cls, image: Image, folder: Path) -> Self:
        """Start a guest and wait for its agent; `folder` gets its console. Raises GuestError."""
        for _ in range(BOOT_TRIES):
            guest = cls._start(image, folder)
            try:
                guest._await_agent()
            except BaseException as error:
                guest.shutdown()
                last = str(error)
                if not any(chance in last for chance in TRY_AGAIN):
                    raise
                continue
            return guest
        raise GuestError(f"no boot in {BOOT_TRIES} tries; the last one: {last}")

    @classmethod
    def _start(cls, image: Image, folder: Path) -> Self:
        console, log, port = folder / "console.log", folder / "qemu.log", _free_port()
        console.unlink(missing_ok=True)
        with open(log, "wb") as output:
            process = subprocess.Popen(
                qemu_command(image, console, port),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return cls(image.release, process, port, console)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def shutdown(self) -> None:
        """End QEMU, this guest's own process and no other; the disks vanish with it."""
        self._process.terminate()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def run(
        self, script: str, timeout: float = 120, *, user: str = "root", stdin: bytes = b""
    ) -> Result:
        """Run a bash script as `user` in that user's home and return how it ended.

        Processes that the script leaves behind go on, unless the script ran out of time. Raises
        GuestError only when the guest itself is gone or hangs.
        """
        request = {"script": script, "user": user, "timeout": timeout, "stdin": len(stdin)}
        try:
            with self._connect(timeout + GRACE_SECONDS) as connection:
                connection.sendall(json.dumps(request).encode() + b"\n" + stdin)
                with connection.makefile("rb") as answer:
                    header = answer.readline()
                    if not header:
                        raise ConnectionError("the agent hung up")
                    ended = json.loads(header)
                    stdout, stderr = (answer.read(ended[name]) for name in ("stdout", "stderr"))
        except OSError as error:
            raise GuestError(f"guest {self.release}: {error!r}\n{self.console_tail()}") from error
        texts = (stdout.decode(errors="replace"), stderr.decode(errors="replace"))
        return Result(ended["rc"], *texts, timed_out=ended["timed_out"])

    def check(
        self, script: str, timeout: float = 120, *, user: str = "root", stdin: bytes = b""
    ) -> str:
        """Run a script that must succeed and return its output without white space at the ends."""
        result = self.run(script, timeout, user=user, stdin=stdin)
        if result.rc != 0:
            raise GuestError(f"guest {self.release}, {user}: {script}\n{result.describe()}")
        return result.stdout.strip()

    def wait_for(
        self, condition: str, timeout: float = 120, *, what: str = "", interval: float = 0.5
    ) -> str:
        """Repeat a bash condition in the guest until it holds; return its standard output then.

        Each time costs an emulated machine dearly: four programs are started for it.
        """
        seen = f"until seen=$( ( {condition}\n) 2>/dev/null )"
        loop = f'{seen}; do sleep {interval}; done; printf %s "$seen"'
        result = self.run(loop, timeout)
        if result.rc != 0:
            last = self.run(condition)
            wish = what or condition
            raise GuestError(f"waited {timeout} s in vain for {wish}; now it {last.describe()}")
        return result.stdout.strip()

    def read(self, path: str) -> str:
        """Return the text of a file in the guest, without white space at its ends."""
        return self.check(f"cat {shlex.quote(path)}")

    def write(self, path: str, text: str, mode: int = 0o644) -> None:
        """Make or replace a file of root in the guest, and the folders above it."""
        self.check(f"install -D -m {mode:o} /dev/stdin {shlex.quote(path)}", stdin=text.encode())

    def push(self, sources: Iterable[Path], folder: str) -> None:
        """Copy files and trees, by their own names, into a folder of the guest, owned by root."""
        archive = io.BytesIO()
        with tarfile.open(fileobj=archive, mode="w") as tar:
            for path in sources:
                tar.add(path, arcname=path.name, filter=_as_root)
        quoted = shlex.quote(folder)
        self.check(f"mkdir -p {quoted} && tar -C {quoted} -xf -", stdin=archive.getvalue())

    def console_tail(self, lines: int = 30) -> str:
        """Return the last lines of the guest's console, and of QEMU's own output."""
        texts = []
        for path in (self._console, self._console.with_name("qemu.log")):
            if path.exists():
                last = path.read_text("utf-8", errors="replace").splitlines()[-lines:]
                texts += [f"--- end of {path.name}", *last]
        return "\n".join(texts)

    def diagnostics(self) -> str:
        """Return what may explain a failed test: the ends of the console and of all logs."""
        try:
            logs = self.run(f"tail -n 25 {' '.join(self.logs)}", timeout=30).stdout
        except GuestError as error:
            return str(error)
        return f"{self.console_tail()}\n{logs}"

    def _connect(self, timeout: float) -> socket.socket:
        if (status := self._process.poll()) is not None:
            raise ConnectionError(f"QEMU ended with {status}")
        return socket.create_connection(("127.0.0.1", self._port), timeout=timeout)

    def _await_agent(self) -> None:
        """QEMU accepts connections before the guest does, so only an answer counts."""
        begin = time.monotonic()
        while time.monotonic() - begin < BOOT_SECONDS:
            if self._process.poll() is not None:
                raise GuestError(f"QEMU ended at once\n{self.console_tail()}")
            console = self._console_text()
            if "agent: listening" in console and self.run("true").rc == 0:
                self.boot_seconds = time.monotonic() - begin
                return
            if any(chance in console for chance in TRY_AGAIN):
                raise GuestError(f"the kernel hangs\n{console}")
            time.sleep(0.3)
        raise GuestError(f"no agent after {BOOT_SECONDS} s\n{self.console_tail()}")

    def _console_text(self) -> str:
        return self._console.read_text("utf-8", "replace") if self._console.exists() else ""


def qemu_command(image: Image, console: Path, port: int) -> list[str]:
    """Return the command that boots a guest; see the module's head for the machine it makes.

    With a pxb-pcie there, QEMU may put a device without `bus=` on it and then refuse to start, so
    every device names its bus.
    """
    kernel_options = (
        f"root=/dev/vda rw console=ttyS0 quiet panic=-1 mitigations=off init={GUEST_HOME}/init.sh"
    )
    command = [
        *("setpriv", "--pdeathsig", "KILL", "nice", "-n", "5", *image.emulator),
        *("-machine", "q35,i8042=off", "-accel", "tcg,thread=multi", "-cpu", "max,la57=off"),
        *("-smp", "8,sockets=2,cores=4,threads=1", "-m", "4096"),
        *("-kernel", str(image.kernel), "-initrd", str(image.initrd), "-append", kernel_options),
        *("-display", "none", "-vga", "none", "-monitor", "none", "-no-reboot"),
        *("-serial", f"file:{console}"),
        *("-drive", f"file={image.root},format=raw,if=none,id=root,snapshot=on"),
        *("-device", "virtio-blk-pci,drive=root,bus=pcie.0"),
        *("-netdev", f"user,id=net0,restrict=on,hostfwd=tcp:127.0.0.1:{port}-:{AGENT_PORT}"),
        *("-device", "virtio-net-pci,netdev=net0,bus=pcie.0,romfile="),
    ]
    for node in (0, 1):
        command += _numa_node(node, image.nvme)
    return [*command, "-numa", "dist,src=0,dst=1,val=21"]


def _numa_node(node: int, nvme: Path) -> list[str]:
    """Return one NUMA node with its CPUs, its memory and the two devices behind its PCI root."""
    root = f"pci-node{node}"
    return [
        *("-object", f"memory-backend-ram,id=memory{node},size=2G"),
        *("-numa", f"node,nodeid={node},cpus={4 * node}-{4 * node + 3},memdev=memory{node}"),
        *("-device", f"pxb-pcie,id={root},bus_nr={64 * (node + 1)},bus=pcie.0,numa_node={node}"),
        *("-device", f"pcie-root-port,id={root}-nvme,bus={root},chassis={10 * (node + 1)}"),
        *("-drive", f"file={nvme},format=raw,if=none,id=drive{node},snapshot=on"),
        *("-device", f"nvme,serial=CRATER{node},drive=drive{node},bus={root}-nvme"),
        *("-device", f"pcie-root-port,id={root}-display,bus={root},chassis={10 * (node + 1) + 1}"),
        *("-device", f"bochs-display,bus={root}-display"),
    ]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _as_root(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    if Path(member.name).name in NOT_PUSHED:
        return None
    member.uid = member.gid = 0
    member.uname = member.gname = "root"
    return member
