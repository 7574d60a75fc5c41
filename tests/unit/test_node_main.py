"""The daemon as a process: starts once, says when it is ready, ends cleanly, needs little."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from node_fakes import KEY, USER, answer_of, signed, wait_for

from crater_slurm.hooks import frame
from crater_slurm.node import lifecycle

TREE = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(
    os.geteuid() != 0, reason="prepares jobs of others, so it needs root"
)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "plan.key").write_text(KEY.hex() + "\n")
    (tmp_path / "plan.key").chmod(0o600)
    (tmp_path / "cache").mkdir(mode=0o755)
    path = tmp_path / "crater.yaml"
    node = {
        "socket": str(tmp_path / "run/node.sock"), "state_dir": str(tmp_path / "state"),
        "cgroup_root": str(tmp_path / "cgroup"), "report": False, "listen": "",
        "cache": {
            "mount_point": str(tmp_path / "cache"), "require_mount": False, "min_free_percent": 0,
        },
    }  # fmt: skip
    path.write_text(json.dumps({"plan": {"key_file": str(tmp_path / "plan.key")}, "node": node}))
    return path


def command(config: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "crater_slurm.node", "--config", str(config), *arguments]


class Running:
    """A daemon in the foreground, ready when the constructor returns."""

    def __init__(self, config: Path) -> None:
        self.socket = config.parent / "run/node.sock"
        notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        notify.bind(str(config.parent / f"notify{time.monotonic_ns()}"))
        notify.settimeout(30)
        self.process = subprocess.Popen(
            command(config, "--foreground"), cwd=TREE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "NOTIFY_SOCKET": notify.getsockname()},
        )  # fmt: skip
        self.states = [notify.recv(100)]
        self.notify = notify

    def ask(self, operation: str, **env: str) -> dict[str, list[str]]:
        base = {
            "SLURM_JOB_ID": "7", "SLURM_JOB_UID": str(USER), "SLURM_JOB_GID": str(USER),
            "SLURM_CLUSTER_NAME": "c1", "SLURMD_NODENAME": "n1",
        }  # fmt: skip
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(10)
            connection.connect(str(self.socket))
            pairs = [("op", operation), *((f"env.{k}", v) for k, v in {**base, **env}.items())]
            connection.sendall(frame.encode(pairs))
            return answer_of(connection)

    def stop(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        self.process.send_signal(number)
        _, errors = self.process.communicate(timeout=30)
        return self.process.returncode, errors


@pytest.fixture
def daemon(config: Path):
    running = Running(config)
    yield running
    if running.process.poll() is None:
        running.process.kill()
        running.process.communicate()


def test_it_says_when_it_is_ready_and_ends_cleanly_on_sigterm(daemon: Running) -> None:
    assert daemon.states == [b"READY=1"]
    assert daemon.ask("ping")["status"] == ["ok"]
    code, errors = daemon.stop()
    assert code == 0
    assert errors.splitlines()[-1] == "crater-io-daemon: stopped"
    assert daemon.notify.recv(100) == b"STOPPING=1"
    assert not daemon.socket.exists()


def test_a_second_one_is_refused_with_the_first_ones_pid(daemon: Running, config: Path) -> None:
    second = subprocess.run(
        command(config, "--foreground"), cwd=TREE, capture_output=True, text=True, timeout=30
    )
    assert second.returncode == 5
    assert f"runs already, as process {daemon.process.pid}" in second.stderr
    assert daemon.ask("ping")["status"] == ["ok"]


def test_kill_9_between_prolog_and_epilog_loses_nothing(daemon: Running, config: Path) -> None:
    comment = signed()
    assert daemon.ask("prolog", SLURM_JOB_COMMENT=comment)["status"] == ["ok"]
    daemon.process.kill()
    daemon.process.communicate()
    assert daemon.socket.exists(), "a crash leaves the socket file behind"
    again = Running(config)
    assert (
        "copy of job 7"
        in again.ask("prolog", SLURM_JOB_ID="8", SLURM_JOB_COMMENT=comment)["log"][0]
    )
    assert (config.parent / "cache/temp/c1/7").is_dir()
    again.ask("epilog")
    assert not (config.parent / "cache/temp/c1/7").exists()
    trash = config.parent / "cache/.crater-trash"
    assert wait_for(lambda: not list(trash.iterdir())), "deleted in the background"
    assert again.stop()[0] == 0


def test_in_the_background_the_command_returns_when_the_daemon_is_ready(config: Path) -> None:
    done = subprocess.run(command(config), cwd=TREE, stderr=subprocess.DEVNULL, timeout=30)
    assert done.returncode == 0
    pid = int((config.parent / "state/lock").read_text())
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(config.parent / "run/node.sock"))
    os.kill(pid, signal.SIGTERM)
    ended = wait_for(lambda: not Path(f"/proc/{pid}").exists(), 20)
    if not ended:
        os.kill(pid, signal.SIGKILL)
    assert ended
    assert not (config.parent / "run/node.sock").exists()


@pytest.mark.parametrize(
    ("text", "code", "message"),
    [
        ("node: {sockett: /x}", 2, "did you mean socket?"),
        ("node: {cache: {device: /dev/nvme0n1}}", 2, "node.cache.device"),
        ("node: {memory_binding: strict}", 2, "memory_binding"),
        ("node: [", 2, "is not YAML"),
        ("node: {socket: /proc/nope/node.sock}", 1, "couldn't start"),
    ],
)
def test_a_wrong_setting_stops_it_at_once(tmp_path: Path, text, code, message) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    done = subprocess.run(
        command(path, "--foreground"), cwd=TREE, capture_output=True, text=True, timeout=30
    )
    assert (done.returncode, message in done.stderr) == (code, True), done.stderr


def test_it_needs_no_more_than_yaml_and_pydantic() -> None:
    code = (
        "import sys; import crater_slurm.node.main; "
        "print([m for m in ('sqlalchemy', 'fastapi', 'click', 'rich', 'psutil', 'pynvml', 'numpy', "
        "'jinja2', 'httpx', 'uvicorn') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=TREE, capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


def test_the_lock_goes_with_the_process(tmp_path: Path) -> None:
    first = lifecycle.OnlyOne(tmp_path / "lock")
    first.write_pid()
    with pytest.raises(lifecycle.UnavailableError, match=f"process {os.getpid()}"):
        lifecycle.OnlyOne(tmp_path / "lock")
    first.release()
    lifecycle.OnlyOne(tmp_path / "lock").release()
