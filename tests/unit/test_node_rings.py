"""The ring's door: whose trainer is let in, what it costs, and what a stranger gets."""

from __future__ import annotations

import os
import socket
import subprocess
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from node_fakes import USER, make_proc, wait_for
from worker_fakes import Node, answer

from crater_slurm.job.wire import Channel
from crater_slurm.node import ring_access
from crater_slurm.node.jobs import JobRecord
from crater_slurm.node.request import Peer, RequestError

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="starts workers of other users")
GIB = 2**30


@pytest.fixture
def node(open_path: Path) -> Iterator[Node]:
    made = Node(open_path)
    yield made
    made.close()


def refused(channel: Channel) -> str:
    message = answer(channel)
    assert message["op"] == "error"
    return str(message["error"])


def test_a_trainer_of_the_job_talks_to_the_job_s_worker(node: Node) -> None:
    node.job()
    lane = answer(node.open())
    assert lane["op"] == "lane"
    assert lane["asked_by"] == os.getpid()
    assert lane["run"] == "7.0"
    assert lane["pid"] != os.getpid()
    assert Path(f"/proc/{lane['pid']}").exists()


def test_all_ranks_of_a_job_have_one_worker(node: Node) -> None:
    node.job()
    lanes = [answer(node.open(rank=rank, local_world=4)) for rank in range(4)]
    assert len({lane["pid"] for lane in lanes}) == 1


def test_a_lane_of_before_is_handed_on(node: Node) -> None:
    node.job()
    fd = os.memfd_create("lane")
    assert answer(node.open(fds=(fd,)))["fds"] == 2
    os.close(fd)


def test_the_ring_takes_its_share_of_the_room_that_the_job_s_limit_leaves(node: Node) -> None:
    job = node.tree.scope / "job_7"
    (job / "memory.stat").write_text(f"anon {2 * GIB}\nfile {5 * GIB}\nkernel 0\n")
    (job / "memory.current").write_text(f"{7 * GIB}\n")
    node.job()
    assert answer(node.open(local_world=2))["bytes"] == (8 - 2) * GIB // 2 // 2
    # The first rank has touched its lane; the second gets one of the same length.
    (job / "memory.stat").write_text(f"anon {2 * GIB}\nshmem {3 * GIB // 2}\nkernel 0\n")
    assert answer(node.open(rank=1, local_world=2))["bytes"] == 3 * GIB // 2
    # Nearly nothing is left: never more than nine tenths of what there is.
    (job / "memory.stat").write_text(f"anon {7 * GIB}\nkernel 0\n")
    assert answer(node.open(rank=1, local_world=2))["bytes"] == int(GIB * 0.9)


def test_the_site_s_and_the_user_s_own_limit_of_the_ring_count(node: Node) -> None:
    node.job(ring_gb=1)
    assert answer(node.open())["bytes"] == 10**9


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"op": "begin"}, "before an open"),
        ({"version": 99}, "version 99"),
        ({"job": "../7"}, "no job id"),
        ({"job": 7}, "text belongs there"),
        ({"job": "8"}, "not running here"),
        ({"run": "7.3"}, "this is 7.0"),
        ({"local_world": 0}, "local_world=0"),
        ({"local_world": 1e9}, "local_world"),
        ({"bytes": -1}, "bytes=-1"),
    ],
)
def test_a_first_message_that_can_t_be_is_refused_with_the_reason(
    node: Node, message: dict[str, object], reason: str
) -> None:
    node.job()
    assert reason in refused(node.open(**message))


@pytest.mark.parametrize(
    "raw", [b"", b"x", b"[]", b"{}", b'{"op":1}', b"[" * 50000, b"\xff" * 70000]
)
def test_garbage_costs_nobody_else_anything(node: Node, raw: bytes) -> None:
    node.job()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(5)
        connection.connect(str(node.folder / "run/ring.sock"))
        connection.send(raw)
        assert b"error" in connection.recv(70000)
    assert answer(node.open())["op"] == "lane"


def test_who_says_nothing_is_gone_after_the_deadline(node: Node) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(10)
        connection.connect(str(node.folder / "run/ring.sock"))
        assert connection.recv(100) == b""
    assert wait_for(lambda: not node.rings._by_uid)


def test_a_process_of_another_job_is_refused(node: Node) -> None:
    node.job()
    node.job("8")
    node.trainer(os.getpid(), 0, "job_8")
    assert "process of job_8" in refused(node.open("7"))
    assert answer(node.open("8"))["op"] == "lane"


def test_another_user_is_refused(node: Node) -> None:
    node.job()
    code = """
        import json, socket, sys
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.settimeout(10)
            connection.connect(sys.argv[1])
            message = {"op": "open", "version": 1, "job": "7", "rank": 0, "local_world": 1, "bytes": 1}
            connection.send(json.dumps(message).encode())
            print(connection.recv(9999).decode())
    """
    done = subprocess.run(
        ["/usr/bin/python3", "-I", "-c", textwrap.dedent(code), str(node.folder / "run/ring.sock")],
        user=USER, group=USER, extra_groups=[], capture_output=True, text=True, timeout=20,
    )  # fmt: skip
    assert f"for uid {USER}" in done.stdout, done.stderr


def test_a_job_without_a_ring_is_told_so(node: Node) -> None:
    node.job(checkpoint="off")
    assert "it has none" in refused(node.open())


def test_what_cannot_be_a_trainer_of_the_job_without_cgroups(tmp_path: Path) -> None:
    proc = make_proc(tmp_path, 50, 1000, "0-3")
    record = JobRecord("7", 1000, 1000, "c1")
    peer = Peer(50, 1000, 1000)

    def environ(pid: int, parent: int, uid: int, text: bytes) -> None:
        make_proc(proc, pid, uid, "0-3")
        status = (proc / str(pid) / "status").read_text()
        (proc / str(pid) / "status").write_text(f"PPid:\t{parent}\n{status}")
        (proc / str(pid) / "environ").write_bytes(text)

    environ(50, 40, 1000, b"A=B\0")
    environ(40, 30, 1000, b"A=B\0SLURM_JOB_ID=7\0")
    assert ring_access.check(record, peer, tmp_path, proc) is None
    environ(40, 30, 1000, b"SLURM_JOB_ID=70\0")
    with pytest.raises(RequestError, match="no cgroup of Slurm"):
        ring_access.check(record, peer, tmp_path, proc)
    environ(40, 30, 0, b"SLURM_JOB_ID=7\0")  # another user's word is none
    with pytest.raises(RequestError, match="no cgroup of Slurm"):
        ring_access.check(record, peer, tmp_path, proc)
    environ(40, 50, 1000, b"")  # a circle
    with pytest.raises(RequestError, match="no cgroup of Slurm"):
        ring_access.check(record, peer, tmp_path, proc)


def test_the_cgroup_of_v1_tells_the_job_and_its_room(tmp_path: Path) -> None:
    proc = make_proc(tmp_path, 50, 1000, "0-3")
    lines = (
        "12:cpuset:/slurm/uid_1000/job_7/step_0/task_0\n"
        "5:memory:/slurm/uid_1000/job_7/step_0/task_0\n1:name=systemd:/x\n0::/x\n"
    )
    (proc / "50/cgroup").write_text(lines)
    (proc / "meminfo").write_text(f"MemAvailable: {100 * 2**20} kB\n")
    job = tmp_path / "cg/memory/slurm/uid_1000/job_7"
    step = job / "step_0"
    (step / "task_0").mkdir(parents=True)
    (job / "memory.limit_in_bytes").write_text(f"{8 * GIB}\n")
    (job / "memory.stat").write_text(f"rss 1\ntotal_rss {3 * GIB}\ntotal_shmem {GIB}\n")
    (step / "memory.limit_in_bytes").write_text(f"{(1 << 63) - 4096}\n")
    record = JobRecord("7", 1000, 1000, "c1")
    place = ring_access.check(record, Peer(50, 1000, 1000), tmp_path / "cg", proc)
    assert place is not None
    assert place.version == 1
    assert ring_access.room_bytes(place, proc) == 4 * GIB
    (step / "memory.limit_in_bytes").write_text(f"{2 * GIB}\n")
    (step / "memory.stat").write_text(f"total_rss {GIB}\ntotal_shmem 0\n")
    assert ring_access.room_bytes(place, proc) == GIB
    with pytest.raises(RequestError, match="job_7"):
        ring_access.check(JobRecord("8", 1000, 1000, "c1"), Peer(50, 1000, 1000), tmp_path, proc)


def test_a_number_that_is_another_user_s_process_by_now_is_refused(tmp_path: Path) -> None:
    proc = make_proc(
        tmp_path, 50, 1001, "0-3", "/s.slice/slurmstepd.scope/job_7/step_0/user/task_0"
    )
    with pytest.raises(RequestError, match="gone"):
        ring_access.check(JobRecord("7", 1000, 1000, "c1"), Peer(50, 1000, 1000), tmp_path, proc)
