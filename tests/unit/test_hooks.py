"""The hooks as slurmd runs them: whatever the daemon does, they end in time and exit 0."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from crater_slurm.hooks import client, frame

TREE = Path(__file__).parents[2]
CLIENT = TREE / "crater_slurm/hooks/client.py"
PYTHON = "/usr/bin/python3"
OPERATIONS = ("prolog", "epilog", "task_prolog")
HOSTILE = "my 'run' \"x\"; $(touch /tmp/no) `id`\nexport A=B \u00e9\u4e2d crater-plan:x"


class Daemon:
    """A fake daemon: ``behave(connection)`` is what it does with each caller."""

    def __init__(self, path: Path, behave) -> None:
        self.path = path
        self.behave = behave
        self.questions: list[list[tuple[str, str]]] = []
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.bind(str(path))
        self.socket.listen(8)
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self.socket.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            self.behave(self, connection)


def answering(*pairs: tuple[str, str]):
    def behave(daemon: Daemon, connection: socket.socket) -> None:
        daemon.questions.append(frame.receive(connection))
        connection.sendall(frame.encode(pairs))

    return behave


def sending(data: bytes):
    def behave(daemon: Daemon, connection: socket.socket) -> None:
        frame.receive(connection)
        connection.sendall(data)

    return behave


@pytest.fixture
def place(tmp_path: Path):
    """A run folder with the marks set, and a syslog to read."""
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs/7").touch()
    log = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    log.bind(str(tmp_path / "log"))
    log.setblocking(False)

    class Place:
        path = tmp_path
        socket = tmp_path / "node.sock"

        def start(self, behave) -> Daemon:
            self.daemon = Daemon(self.socket, behave)
            return self.daemon

        def run(self, operation: str, *options: str, script: bool = True, env=None):
            """Run a hook the way slurmd does: no PATH, its own environment only."""
            start = [str(TREE / f"prolog/{operation}.sh")]
            if not script:
                start = [PYTHON, "-I", "-S", "-E", str(CLIENT), operation]
            arguments = [f"socket={self.socket}", f"syslog={tmp_path}/log", f"off={tmp_path}/off"]
            base = {"SLURM_JOB_ID": "7", "SLURM_JOB_COMMENT": HOSTILE}
            began = time.monotonic()
            done = subprocess.run(
                [*start, *arguments, *options], env=env or base, capture_output=True, timeout=30
            )
            done.seconds = time.monotonic() - began
            return done

        def log(self) -> list[str]:
            lines = []
            with contextlib.suppress(BlockingIOError):
                while True:
                    lines.append(log.recv(2000).decode())
            return lines

    yield Place()
    log.close()


OK = answering(("status", "ok"), ("exit", "0"))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_hook_sends_its_variables_unchanged(place, operation: str) -> None:
    daemon = place.start(OK)
    env = {
        "SLURM_JOB_ID": "7", "SLURM_JOB_COMMENT": HOSTILE, "SECRET": "x", "SLURM_JOB_UID": "1000",
        "PYTHONPATH": "/nonexistent", "PYTHONSTARTUP": "/nonexistent", "IFS": "/",
    }  # fmt: skip
    done = place.run(operation, env=env)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    (question,) = daemon.questions
    assert question == [
        ("op", operation),
        ("env.SLURM_JOB_ID", "7"),
        ("env.SLURM_JOB_UID", "1000"),
        ("env.SLURM_JOB_COMMENT", HOSTILE),
        ("env.PYTHONPATH", "/nonexistent"),
    ]
    assert place.log() == []


def test_bytes_that_are_no_text_arrive_unchanged(place) -> None:
    daemon = place.start(OK)
    place.run("prolog", env={b"SLURM_JOB_COMMENT": b"crater-plan:\xff\xfe\x80"})
    value = dict(daemon.questions[0])["env.SLURM_JOB_COMMENT"]
    assert value.encode("utf-8", "surrogateescape") == b"crater-plan:\xff\xfe\x80"


def test_task_prolog_prints_only_task_prolog_lines(place) -> None:
    place.start(
        answering(
            ("status", "ok"),
            ("line", "export CRATER_PLAN_ID=p1"),
            ("line", "unset CRATER_TMPDIR"),
            ("line", "print crater: hello"),
            ("line", "rm -rf /"),
            ("line", "export A=1\nexport B=2"),
            ("line", " export C=3"),
            ("other", "export D=4"),
        )
    )
    done = place.run("task_prolog")
    assert done.stdout.decode() == (
        "export CRATER_PLAN_ID=p1\nunset CRATER_TMPDIR\nprint crater: hello\n"
    )


@pytest.mark.parametrize("operation", ["prolog", "epilog"])
def test_root_hooks_print_nothing(place, operation: str) -> None:
    place.start(answering(("line", "export A=1")))
    assert place.run(operation).stdout == b""


def test_lines_for_syslog_are_logged_one_by_one(place) -> None:
    place.start(answering(("status", "error"), ("log", "couldn't do X: reason\nsecond")))
    place.run("prolog")
    assert place.log() == ["<30>crater: prolog: couldn't do X: reason second"]


@pytest.mark.parametrize(
    ("operation", "sent", "code"),
    [
        ("prolog", "0", 0), ("prolog", "10", 10), ("prolog", "11", 11), ("prolog", "1", 0),
        ("prolog", "255", 0), ("prolog", "-1", 0), ("prolog", "x", 0), ("prolog", " 10", 0),
        ("epilog", "10", 0), ("task_prolog", "10", 0),
    ],
)  # fmt: skip
def test_only_the_documented_codes_of_prolog_ever_leave(place, operation, sent, code) -> None:
    place.start(answering(("status", "error"), ("exit", sent)))
    assert place.run(operation).returncode == code


def test_the_documented_codes_are_those_of_the_daemon() -> None:
    from crater_slurm.node.prolog import FAULT_EXITS

    assert tuple(sorted(FAULT_EXITS.values())) == client.NODE_FAULTS
    text = (TREE / "docs/hooks.md").read_text()
    for fault, code in FAULT_EXITS.items():
        assert f"| {code} | `{fault}`" in text


def test_the_variables_are_those_of_the_protocol() -> None:
    text = (TREE / "docs/protocols.md").read_text().partition("## Node")[2].partition("Answer:")[0]
    import re

    assert set(re.findall(r"`((?:SLURM|CUDA|PYTHON)\w+)`", text)) == {
        v.decode() for v in client.VARIABLES
    }


# A daemon that is not well


def hang(daemon: Daemon, connection: socket.socket) -> None:
    time.sleep(10)


def dribble(daemon: Daemon, connection: socket.socket) -> None:
    frame.receive(connection)
    for byte in frame.encode([("status", "ok"), ("line", "x" * 1000)]):
        connection.sendall(bytes([byte]))
        time.sleep(0.05)


def close_at_once(daemon: Daemon, connection: socket.socket) -> None:
    pass


def reset(daemon: Daemon, connection: socket.socket) -> None:
    connection.recv(1)


WHOLE = frame.encode([("status", "ok"), ("line", "export A=1"), ("exit", "10")])
UNWELL = {
    "hangs": (hang, "couldn't get an answer from crater-io-daemon within 0.3 s"),
    "dribbles": (dribble, "couldn't get an answer from crater-io-daemon within 0.3 s"),
    "closes": (close_at_once, "couldn't"),
    "resets": (reset, "couldn't"),
    "garbage": (sending(b"\xff\0nonsense" * 50), "couldn't read the answer"),
    "html": (sending(b"HTTP/1.1 200 OK\r\n\r\n"), "couldn't read the answer"),
    "half": (sending(WHOLE[:-5]), "couldn't read the answer of crater-io-daemon: half a frame"),
    "header only": (sending(b"CRATER1 50\n"), "couldn't read the answer"),
    "too long": (sending(b"CRATER1 99999999\n"), "couldn't read the answer"),
    "trailing": (sending(WHOLE + b"x"), "couldn't read the answer"),
    "odd": (sending(b"CRATER1 4\n1:a,"), "couldn't read the answer"),
    "nothing": (sending(b""), "couldn't read the answer"),
}


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("case", UNWELL)
def test_an_unwell_daemon_costs_at_most_the_deadline(place, operation: str, case: str) -> None:
    behave, reason = UNWELL[case]
    place.start(behave)
    timeout = 0.3 if "within" in reason else 9
    done = place.run(operation, f"timeout={timeout}")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    assert done.seconds < 1.5
    (line,) = place.log()
    assert line.startswith(f"<28>crater: {operation}: {reason}")


@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_absent_daemon_costs_nothing(place, operation: str) -> None:
    done = place.run(operation)
    assert (done.returncode, done.stdout) == (0, b"")
    assert done.seconds < 1
    (line,) = place.log()
    assert line == (
        f"<28>crater: {operation}: couldn't reach crater-io-daemon at {place.socket}: "
        "No such file or directory"
    )


def test_a_daemon_that_died_costs_nothing(place) -> None:
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(place.socket))
    stale.close()
    done = place.run("prolog")
    assert done.returncode == 0
    assert "Connection refused" in place.log()[0]


_STOPPED = """
import socket, sys
s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); s.listen(0); print("up", flush=True)
s.accept()
"""


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_stopped_daemon_costs_the_deadline_also_with_a_full_backlog(place, operation) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", _STOPPED, str(place.socket)], stdout=subprocess.PIPE
    )
    process.stdout.readline()
    process.send_signal(signal.SIGSTOP)
    waiting = []
    try:
        assert place.run(operation, "timeout=0.3").seconds < 1.5
        for _ in range(4):  # now the backlog is full: connect itself would block
            other = socket.socket(socket.AF_UNIX)
            other.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                other.connect(str(place.socket))
            waiting.append(other)
        done = place.run(operation, "timeout=0.3")
        assert done.returncode == 0
        assert 0.3 < done.seconds < 1.5
        assert "couldn't get an answer from crater-io-daemon within 0.3 s" in place.log()[-1]
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        for other in waiting:
            other.close()


def test_a_backlog_that_clears_is_waited_for(place) -> None:
    late = socket.socket(socket.AF_UNIX)
    late.bind(str(place.socket))
    late.listen(0)
    blockers = []
    for _ in range(2):
        blocker = socket.socket(socket.AF_UNIX)
        blocker.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            blocker.connect(str(place.socket))
        blockers.append(blocker)

    def serve() -> None:
        time.sleep(0.3)
        while True:
            connection, _ = late.accept()
            with connection, contextlib.suppress(frame.FrameError, OSError):
                connection.settimeout(0.2)
                frame.receive(connection)
                connection.sendall(frame.encode([("line", "export A=1")]))
                return

    threading.Thread(target=serve, daemon=True).start()
    done = place.run("task_prolog", "timeout=5")
    assert done.stdout == b"export A=1\n"
    for item in (*blockers, late):
        item.close()


def test_a_syslog_that_is_away_or_full_is_no_reason_to_wait(place) -> None:
    for path in (place.path / "nolog", place.path / "full"):
        if path.name == "full":
            full = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            full.bind(str(path))
            sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            sender.setblocking(False)
            sender.connect(str(path))
            with contextlib.suppress(BlockingIOError):
                while True:
                    sender.send(b"x")
        done = place.run("prolog", f"syslog={path}")
        assert done.returncode == 0
        assert done.seconds < 1


def test_a_closed_stdout_does_not_fail_a_task(place) -> None:
    place.start(answering(("line", "export A=1")))
    script = f"exec >&-; exec '{TREE}/prolog/task_prolog.sh' socket={place.socket}"
    done = subprocess.run(["/bin/sh", "-c", script], env={"SLURM_JOB_ID": "7"}, timeout=30)
    assert done.returncode == 0


# Off, not ours, not there


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("script", [True, False])
def test_the_off_switch_asks_nobody(place, operation: str, script: bool) -> None:
    daemon = place.start(answering(("exit", "10"), ("line", "export A=1")))
    (place.path / "off").touch()
    done = place.run(operation, script=script)
    assert (done.returncode, done.stdout) == (0, b"")
    assert daemon.questions == []


def test_a_prolog_of_a_job_without_a_plan_asks_nobody(place) -> None:
    daemon = place.start(OK)
    place.run("prolog", env={"SLURM_JOB_ID": "8", "SLURM_JOB_COMMENT": "mine"})
    place.run("prolog", env={"SLURM_JOB_ID": "8"})
    assert daemon.questions == []
    place.run("prolog", env={"SLURM_JOB_ID": "8", "SLURM_JOB_EXTRA": "x crater-plan:1.a.b"})
    (place.path / "jobs/all").touch()
    place.run("prolog", env={"SLURM_JOB_ID": "8"})
    assert len(daemon.questions) == 2


@pytest.mark.parametrize("operation", ["epilog", "task_prolog"])
@pytest.mark.parametrize("job", ["8", "../jobs/8", "", None, "$(id)"])
def test_a_job_that_was_not_prepared_asks_nobody(place, operation: str, job) -> None:
    daemon = place.start(OK)
    env = {} if job is None else {"SLURM_JOB_ID": job}
    done = place.run(operation, env={**env, "X": "1"})
    assert done.returncode == 0
    assert daemon.questions == []


@pytest.mark.parametrize("operation", OPERATIONS)
def test_without_python_or_client_a_hook_does_nothing(place, operation: str, tmp_path) -> None:
    broken = tmp_path / "opt/crater/prolog"
    broken.mkdir(parents=True)
    text = (TREE / f"prolog/{operation}.sh").read_text()
    for name, old in (("nopython", "python3"), ("noclient", "hooks/client.py")):
        script = broken / f"{name}.sh"
        script.write_text(text.replace(old, "nothing-here").replace("platform-python", "nothing"))
        script.chmod(0o755)
        done = subprocess.run(
            [str(script), f"socket={place.socket}"],
            env={"SLURM_JOB_ID": "7", "SLURM_JOB_COMMENT": "crater-plan:x"}, capture_output=True,
        )  # fmt: skip
        assert (done.returncode, done.stdout) == (0, b"")


@pytest.mark.parametrize("layout", ["installed", "wheel", "linked"])
def test_a_script_finds_its_client(place, layout: str, tmp_path: Path) -> None:
    hooks, scripts = {
        "installed": ("lib/hooks", "lib/prolog"),
        "wheel": ("pkg/hooks", "pkg/share/prolog"),
        "linked": ("lib/hooks", "lib/prolog"),
    }[layout]
    shutil.copytree(TREE / "crater_slurm/hooks", tmp_path / hooks)
    shutil.copytree(TREE / "prolog", tmp_path / scripts)
    script = tmp_path / scripts / "prolog.sh"
    if layout == "linked":
        (tmp_path / "prolog.d").mkdir()
        (tmp_path / "prolog.d/10-crater").symlink_to(script)
        script = tmp_path / "prolog.d/10-crater"
    daemon = place.start(OK)
    subprocess.run(
        [str(script), f"socket={place.socket}"],
        env={"SLURM_JOB_COMMENT": "crater-plan:x"}, check=True,
    )  # fmt: skip
    assert len(daemon.questions) == 1


def test_an_unknown_operation_or_a_wrong_option_is_logged_and_exits_0(place) -> None:
    done = subprocess.run([PYTHON, "-I", str(CLIENT), "nonsense", f"syslog={place.path}/log"])
    assert done.returncode == 0
    assert place.run("prolog", "timeout=soon", script=False).returncode == 0
    first, second = place.log()
    assert "couldn't run a hook named 'nonsense'" in first
    assert "couldn't finish" in second


# What it is made of


def test_the_client_imports_nothing_that_takes_time() -> None:
    code = (
        "import sys; before = set(sys.modules); sys.argv = ['x']; sys.path.insert(0, sys.argv[0]);"
        f"sys.path.insert(0, {str(CLIENT.parent)!r}); import client;"
        "print(sorted(set(sys.modules) - before))"
    )
    done = subprocess.run(
        [PYTHON, "-I", "-S", "-E", "-c", code], capture_output=True, text=True, check=True
    )
    assert set(eval(done.stdout)) <= {"_socket", "client", "frame", "posix", "time"}


def test_the_client_is_written_for_python_3_6() -> None:
    import ast

    for name in ("client.py", "frame.py"):
        ast.parse((CLIENT.parent / name).read_text(), feature_version=(3, 6))


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="shellcheck is not installed")
def test_the_scripts_pass_shellcheck() -> None:
    scripts = [str(TREE / f"prolog/{name}.sh") for name in OPERATIONS]
    assert subprocess.run(["shellcheck", *scripts], capture_output=True).stdout == b""


@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_scripts_can_be_run_and_nobody_but_root_writes_them(operation: str) -> None:
    mode = (TREE / f"prolog/{operation}.sh").stat().st_mode
    assert mode & 0o111 == 0o111
    assert mode & 0o022 == 0
    assert os.access(TREE / f"prolog/{operation}.sh", os.X_OK)
