"""One checkpoint worker: started, found again after a restart, talked to, and ended.

The worker listens on a socket in a folder of root's and outlives this daemon. It starts as root,
takes off its rights and is then the job's user: what it sends is bounded by its reader, and who
does not read what we send is cut off after a moment.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from crater_slurm import paths
from crater_slurm.files import read_text
from crater_slurm.job.wire import Channel, WireError

_log = logging.getLogger("crater.node.workers")

_SEND_SECONDS = 2.0
#: More messages a second than a worker ever needs are slowed down, so that it costs nobody else.
_MESSAGES_PER_SECOND = 100
_LONGEST_TAIL = 2000
#: -I keeps the environment and the working folder out of what is imported.
_PROGRAM = """\
import os, sys
if sys.argv[1] not in sys.path:
    sys.path.insert(0, sys.argv[1])
number = int(sys.argv[2])
if number != 3:
    os.dup2(number, 3)
    os.close(number)
from crater_slurm.checkpoint.worker import main
sys.exit(main())
"""
_KEPT = ("SSL_CERT_FILE", "SSL_CERT_DIR", "TZ")
_PROXIES = ("http_proxy", "https_proxy", "no_proxy")


class WorkerError(Exception):
    """A worker can't be started or reached; the message is a clause for "couldn't"."""


Receive = Callable[["Worker", dict[str, object]], None]
Lost = Callable[["Worker"], None]


def default_command(number: int) -> list[str]:
    """Command line of a worker whose listening socket is open as ``number``."""
    return [sys.executable, "-I", "-c", _PROGRAM, str(paths.PACKAGE.parent), str(number)]


def environment() -> dict[str, str]:
    """What a worker has in its environment: nothing of a job's, nothing secret."""
    kept = {n: os.environ[n] for n in _KEPT if n in os.environ}
    kept |= {n: v for n, v in os.environ.items() if n.lower() in _PROXIES}
    return kept | {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8", "HOME": "/"}


@dataclass(slots=True)
class Launcher:
    """Starts processes in a systemd scope of their own where that works, else without."""

    scope: bool
    command: Callable[[int], Sequence[str]] = default_command
    serial: int = 0

    @classmethod
    def of(cls, setting: str) -> Launcher:
        systemd = Path("/run/systemd/system").is_dir() and shutil.which("systemd-run")
        return cls(scope=setting == "auto" and bool(systemd))

    def start(self, job_id: str, listening: socket.socket, log: Path) -> subprocess.Popen[bytes]:
        """Start a worker; raises OSError."""
        argv = list(self.command(listening.fileno()))
        if self.scope:
            self.serial += 1
            unit = f"crater-checkpoints-{job_id}-{os.getpid()}-{self.serial}.scope"
            argv = ["systemd-run", "--scope", "--quiet", "--collect", f"--unit={unit}", "--", *argv]
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        output = os.open(log, flags, 0o600)
        try:
            return subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(listening.fileno(),),
                cwd="/",
                env=environment(),
                start_new_session=True,
                umask=0o077,
            )
        finally:
            os.close(output)


@dataclass(slots=True)
class Worker:
    """A connection to a running worker of one run of a job. ``pid`` 0: not known, found again
    without a record."""

    job_id: str
    channel: Channel
    run: str = ""
    pid: int = 0
    born: str = ""
    process: subprocess.Popen[bytes] | None = None
    log: Path | None = None
    since: float = field(default_factory=time.monotonic)
    told_end: bool = False
    heard: bool = False
    #: Its failure has been counted already.
    counted: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def listen(self, receive: Receive, lost: Lost) -> None:
        """Read its messages in a thread of its own; ``lost`` is called once, at its end."""
        thread = threading.Thread(
            target=self._read, args=(receive, lost), name=f"worker {self.job_id}", daemon=True
        )
        thread.start()

    def send(self, message: Mapping[str, object], fds: Sequence[int] = ()) -> None:
        """Send a message; raises WorkerError, and the connection is then given up."""
        try:
            with self._lock:
                self.channel.send(dict(message), list(fds))
        except (OSError, WireError) as error:
            self.cut()
            raise WorkerError(f"reach the worker of job {self.job_id}: {error}") from error

    def cut(self) -> None:
        """Give the connection up; its reader then ends, and says that the worker is lost."""
        with contextlib.suppress(OSError):
            self.channel.socket.shutdown(socket.SHUT_RDWR)

    def _read(self, receive: Receive, lost: Lost) -> None:
        try:
            self._read_all(receive)
        except (WireError, OSError) as error:
            _log.debug("workers: job %s: couldn't %s", self.job_id, error)
        except Exception:
            _log.exception("workers: couldn't take a message of job %s's worker", self.job_id)
        self.channel.close()
        lost(self)

    def _read_all(self, receive: Receive) -> None:
        poll = select.poll()
        poll.register(self.channel, select.POLLIN)
        begin, count = time.monotonic(), 0
        while True:
            poll.poll()
            try:
                message, fds = self.channel.receive(wait=False)
            except (BlockingIOError, TimeoutError):
                continue
            for fd in fds:  # it has nothing to give us
                os.close(fd)
            self.heard = True
            receive(self, message)
            count += 1
            if count >= _MESSAGES_PER_SECOND:
                time.sleep(max(0.0, begin + 1 - time.monotonic()))
                begin, count = time.monotonic(), 0

    def alive(self) -> bool:
        """Whether its process runs, as far as it is known."""
        if self.process is not None:
            return self.process.poll() is None
        return bool(self.pid) and bool(self.born) and birth(self.pid) == self.born

    def end(self, seconds: float) -> bool:
        """Ask its process to end, make it end after ``seconds``; whether it is gone."""
        self.cut()
        for number, patience in ((signal.SIGTERM, seconds), (signal.SIGKILL, 2.0)):
            if not self.alive():
                return True
            with contextlib.suppress(OSError):
                signal_exactly(self.pid, self.born, number)
            until = time.monotonic() + patience
            while self.alive() and time.monotonic() < until:
                time.sleep(0.02)
        return not self.alive()

    def last_words(self) -> str:
        """What it wrote to its output, such as a traceback; one line, bounded."""
        try:
            with (self.log or Path(os.devnull)).open("rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - _LONGEST_TAIL))
                text = file.read(_LONGEST_TAIL).decode("utf-8", "replace")
        except OSError:
            return ""
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return "".join(c if c.isprintable() else " " for c in " | ".join(lines[-4:]))[-500:]


def birth(pid: int) -> str:
    """When a process started, in the kernel's ticks; empty when it is gone or a zombie."""
    text = read_text(f"/proc/{pid}/stat") or ""
    fields = text.rpartition(") ")[2].split()
    return "" if len(fields) < 20 or fields[0] == "Z" else fields[19]


def signal_exactly(pid: int, born: str, number: signal.Signals) -> None:
    """Send a signal to the process that started at ``born``, and to no later one of its number."""
    fd = os.pidfd_open(pid)
    try:
        if birth(pid) == born:
            signal.pidfd_send_signal(fd, number)
    finally:
        os.close(fd)


def listen_at(path: Path) -> socket.socket:
    """A listening socket that a worker is to be given."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        path.unlink(missing_ok=True)
        listening.bind(str(path))
        listening.listen(8)
    except OSError:
        listening.close()
        raise
    return listening


def connect(path: Path) -> Channel:
    """Connect to a worker's socket; raises OSError when nobody listens there."""
    channel = Channel.connect(str(path), _SEND_SECONDS)
    channel.socket.settimeout(_SEND_SECONDS)
    return channel


def launch(launcher: Launcher, job_id: str, folder: Path) -> Worker:
    """Start a worker and connect to it. Raises WorkerError."""
    path, log = folder / f"{job_id}.sock", folder / f"{job_id}.log"
    try:
        with listen_at(path) as listening:
            process = launcher.start(job_id, listening, log)
            channel = connect(path)
    except OSError as error:
        raise WorkerError(f"start a worker for job {job_id}: {error}") from error
    return Worker(
        job_id, channel, pid=process.pid, born=birth(process.pid), process=process, log=log
    )


def find(job_id: str, folder: Path, pid: int = 0, born: str = "") -> Worker | None:
    """The worker that an earlier daemon started, if it still listens."""
    try:
        channel = connect(folder / f"{job_id}.sock")
    except OSError:
        return None
    return Worker(job_id, channel, pid=pid, born=born, log=folder / f"{job_id}.log")
