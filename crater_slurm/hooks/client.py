"""The client that Slurm's hooks run: one question to crater-io-daemon, one answer, a deadline.

    python3 -I -S -E client.py prolog|epilog|task_prolog [socket=PATH] [timeout=SECONDS] ...

It runs as a plain file on the node's own Python (3.6 and later), once per job and task, so it
imports nothing that isn't built into the interpreter: ``os``, ``socket`` and ``json`` would cost
more than everything done here. It refuses to decide anything. Whatever goes wrong, it writes one
line to syslog and exits 0: a non-zero Prolog drains the node, a non-zero TaskProlog kills a task.
"""

import _socket
import posix
import sys
from time import monotonic, sleep

TYPE_CHECKING = False
if TYPE_CHECKING or __package__:
    from crater_slurm.hooks import frame
else:  # a plain file under -I: its own folder is not on the path
    sys.path.insert(0, __file__.rpartition("/")[0] or ".")
    import frame

OPERATIONS = ("prolog", "epilog", "task_prolog")
SOCKET = "/run/crater/node.sock"
OFF_SWITCH = "/etc/crater/off"
SYSLOG = "/dev/log"
#: Seconds for connecting, sending and receiving together.
TIMEOUT = 2.0
#: The only codes that a daemon may make Prolog exit with (docs/hooks.md), and only if the site
#: asked for it (node.drain_on); by default it never does. Epilog and TaskProlog always exit 0.
NODE_FAULTS = (10, 11)
#: What the daemon is told; the rest of the environment is the job's own business.
VARIABLES = (
    b"SLURM_JOB_ID",
    b"SLURM_JOB_UID",
    b"SLURM_JOB_GID",
    b"SLURM_JOB_USER",
    b"SLURM_JOB_COMMENT",
    b"SLURM_JOB_EXTRA",
    b"SLURM_JOB_GPUS",
    b"SLURM_STEP_GPUS",
    b"SLURM_JOB_RESTART_COUNT",
    b"SLURM_JOB_NODELIST",
    b"SLURM_NODELIST",
    b"SLURM_JOB_NUM_NODES",
    b"SLURM_JOB_CPUS_PER_NODE",
    b"SLURM_JOB_SLUID",
    b"SLURM_JOB_EXIT_CODE2",
    b"SLURM_CLUSTER_NAME",
    b"SLURMD_NODENAME",
    b"SLURM_ARRAY_JOB_ID",
    b"SLURM_ARRAY_TASK_ID",
    b"SLURM_STEP_ID",
    b"SLURM_PROCID",
    b"SLURM_LOCALID",
    b"CUDA_VISIBLE_DEVICES",
    b"PYTHONPATH",
)
_TASK_LINES = ("export ", "unset ", "print ")
_WARNING, _INFO = 28, 30  # syslog priority: facility daemon, severity warning or info
_RETRY_SECONDS = 0.005


class HookError(Exception):
    """The daemon could not be asked; the message reads after "couldn't"."""


class DeadlineSocket:
    """A connection whose connect, sends and receives all end at one moment."""

    def __init__(self, path: str, seconds: float) -> None:
        self._end = monotonic() + seconds
        self._seconds = seconds
        self._path = path
        self._socket = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)

    def _arm(self) -> None:
        left = self._end - monotonic()
        if left <= 0:
            raise HookError("get an answer from crater-io-daemon within %g s" % self._seconds)
        self._socket.settimeout(left)

    def connect(self) -> None:
        """Connect; a full backlog (EAGAIN on a Unix socket) is tried again until the deadline."""
        while True:
            self._arm()
            try:
                return self._socket.connect(self._path)
            except BlockingIOError:
                sleep(_RETRY_SECONDS)
            except OSError as error:
                reason = error.strerror or str(error)
                raise HookError("reach crater-io-daemon at %s: %s" % (self._path, reason)) from None

    def send(self, data: bytes) -> None:
        self._arm()
        self._socket.sendall(data)

    def recv(self, size: int) -> bytes:
        self._arm()
        return self._socket.recv(size)


def ask(operation: str, path: str, seconds: float) -> "list[tuple[str, str]]":
    """The daemon's answer as pairs; raises HookError, which says in words what went wrong."""
    environment = posix.environ
    pairs = [(b"op", operation.encode())]
    for name in VARIABLES:
        if name in environment:
            pairs.append((b"env." + name, environment[name]))
    connection = DeadlineSocket(path, seconds)
    connection.connect()
    try:
        connection.send(frame.encode(pairs))
        return frame.receive(connection)  # type: ignore[arg-type]  # all it uses is recv
    except frame.FrameError as error:
        raise HookError("read the answer of crater-io-daemon: %s" % error) from None
    except _socket.timeout:
        raise HookError("get an answer from crater-io-daemon within %g s" % seconds) from None
    except OSError as error:
        raise HookError("talk to crater-io-daemon: %s" % (error.strerror or error)) from None


def log(path: str, priority: int, operation: str, text: str) -> None:
    """One line to syslog; a machine without syslog, or a full one, is no reason to wait."""
    line = "<%d>crater: %s: %s" % (priority, operation, " ".join(text.split()))
    try:
        datagram = _socket.socket(_socket.AF_UNIX, _socket.SOCK_DGRAM)
        datagram.setblocking(False)
        datagram.connect(path)
        datagram.send(line[:900].encode("utf-8", "backslashreplace"))
        datagram.close()
    except OSError:
        pass


def write_lines(lines: "list[str]") -> None:
    """Print TaskProlog lines; anything that is none, or hides a second one, is left out."""
    good = [line for line in lines if line.startswith(_TASK_LINES) and "\n" not in line]
    data = "".join(line + "\n" for line in good).encode("utf-8", "surrogateescape")
    while data:
        data = data[posix.write(1, data) :]


def act(operation: str, answer: "list[tuple[str, str]]", syslog: str) -> int:
    """Do what an answer says; returns the hook's exit code."""
    code = 0
    for key, value in answer:
        if key == "log":
            log(syslog, _INFO, operation, value)
        elif (
            key == "exit"
            and operation == "prolog"
            and value in ("%d" % fault for fault in NODE_FAULTS)
        ):
            code = int(value)
    if operation == "task_prolog":
        write_lines([value for key, value in answer if key == "line"])
    return code


def main(arguments: "list[str]") -> int:
    """Exit code of the hook named by the first argument; NAME=VALUE options follow it."""
    operation = arguments[0] if arguments else ""
    options = dict(argument.split("=", 1) for argument in arguments[1:] if "=" in argument)
    syslog = options.get("syslog", SYSLOG)
    try:
        if operation not in OPERATIONS:
            raise HookError(
                "run a hook named %r: not one of %s" % (operation, ", ".join(OPERATIONS))
            )
        try:
            posix.stat(options.get("off", OFF_SWITCH))
            return 0
        except OSError:
            pass
        timeout = float(options.get("timeout", TIMEOUT))
        return act(operation, ask(operation, options.get("socket", SOCKET), timeout), syslog)
    except HookError as failure:
        log(syslog, _WARNING, operation, "couldn't %s" % failure)
    except Exception as error:
        log(syslog, _WARNING, operation, "couldn't finish: %r" % error)
    return 0


if __name__ == "__main__":
    # Tearing the interpreter down takes longer than asking; nothing here needs it.
    posix._exit(main(sys.argv[1:]))
