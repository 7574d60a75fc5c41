"""The submit filter inside a real slurmctld, with a daemon that answers, hangs, hangs up or lies.

Whatever goes wrong beside slurmctld, a submission must go through, soon; and no user may carry a
plan from one job to another.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from crater_slurm.hooks import frame
from crater_slurm.lab import Lab

TOKEN = "crater-plan:1.payload.signature"
SCRIPT = "#!/bin/sh\n#CRATER gpus=2\nsleep 1\n"
INSTALLED = "/usr/lib/crater/job_submit/crater.lua"
Answer = list[tuple[str, str]]


class FakeScheduler:
    """Listens where crater-scheduler would, in the lab's /run/crater."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.requests: list[dict[str, str]] = []
        self.connections = 0
        self.answer: Callable[[dict[str, str]], Answer] = self.plan
        self.fault: str | None = None
        self._held: list[socket.socket] = []
        self._listener: socket.socket | None = None
        self.start()

    def start(self) -> None:
        self.path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(self.path))
        self.path.chmod(0o666)  # slurmctld may run as slurm
        self._listener.listen(64)
        threading.Thread(target=self._serve, args=(self._listener,), daemon=True).start()

    def _serve(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            self.connections += 1
            if self.fault == "hang":
                self._held.append(connection)
                continue
            with contextlib.suppress(OSError, frame.FrameError), connection:
                if self.fault != "hang up":
                    self.reply(connection)

    def reply(self, connection: socket.socket) -> None:
        request = dict(frame.receive(connection))
        self.requests.append(request)
        data = frame.encode(self.answer(request))
        connection.sendall(data[: len(data) // 2] if self.fault == "half" else data)

    @staticmethod
    def plan(request: dict[str, str]) -> Answer:
        """Accept, with a plan in the comment as the real one does."""
        if request["op"] == "modify":
            return [("verdict", "accept")]
        comment = f"{request.get('field.comment', '')} {TOKEN}".strip()
        return [("verdict", "accept"), ("set.comment", comment)]

    def stop(self) -> None:
        if self._listener:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            self._listener = None
        self.path.unlink(missing_ok=True)
        while self._held:
            self._held.pop().close()


class Site:
    """A lab with the filter, the fake scheduler beside it, and settings that a test may break."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.script = lab.folders.etc / "job_submit.lua"
        self.original = self.script.read_text()
        self.conf = lab.folders.crater_etc / "filter.lua"
        self.off = lab.folders.crater_etc / "off"
        self.scheduler = FakeScheduler(lab.folders.controller / "run" / "filter.sock")

    def settings(self, text: str) -> None:
        self.conf.write_text(text)
        self.conf.chmod(0o644)

    def install(self, text: str | None = None) -> None:
        """Put a job_submit.lua in place (the original one by default); slurmctld loads it anew."""
        # slurmctld compares whole seconds.
        time.sleep(1.1)
        self.script.write_text(self.original if text is None else text)
        os.utime(self.script)

    def sbatch(self, *options: str, script: str = SCRIPT, **how: Any) -> int:
        return self.lab.sbatch("--hold", *options, script=script, **how)

    def comment(self, job: int) -> str:
        return self.lab.job(job).get("Comment", "").strip()

    def update(self, job: int, *changes: str, user: str = "alice") -> tuple[int, str]:
        done = self.lab.run(["scontrol", "update", f"job={job}", *changes], user=user)
        return done.returncode, done.stderr

    def seconds(self, *options: str, script: str = SCRIPT) -> float:
        begin = time.monotonic()
        self.sbatch(*options, script=script)
        return time.monotonic() - begin


@pytest.fixture(scope="module")
def shared(lab_factory: Any) -> Iterator[Site]:
    site = Site(lab_factory(inventory="a100-pcie", daemons=()))
    yield site
    site.scheduler.stop()


@pytest.fixture
def site(shared: Site) -> Site:
    """A site where all is well: right settings, a fresh filter, a scheduler that answers."""
    shared.off.unlink(missing_ok=True)
    # Long enough that a busy machine isn't taken for a hanging daemon.
    shared.settings("return {deadline_ms = 1000, breaker_seconds = 86400}\n")
    shared.scheduler.stop()
    shared.scheduler.start()
    shared.scheduler.fault = None
    shared.scheduler.answer = shared.scheduler.plan
    shared.scheduler.requests.clear()
    shared.install()
    return shared


def test_an_answer_reaches_the_job(site: Site) -> None:
    site.scheduler.answer = lambda request: [
        ("verdict", "accept"),
        ("set.gres", "gpu:a100:2"),
        ("set.exc_nodes", "a2"),
        ("set.num_tasks", "1"),
        ("set.cpus_per_task", "4"),
        ("set.min_cpus", "4"),
        ("set.comment", request["field.comment"] + " " + TOKEN),
        ("flag", "GRES_ENFORCE_BIND"),
        ("env.CRATER_TEST", "50% done, $(id)"),
        ("message", "crater: 100% of %d GPUs"),
        ("message", "crater: and\na third line"),
        ("log", "a line with %s"),
    ]
    script = "#!/bin/sh\n#CRATER gpus=2\nprintenv CRATER_TEST > seen.new; mv seen.new seen\n"
    done = site.lab.run(
        ["sbatch", "--parsable", "--comment=mine crater-plan:1.forged.x"], input=script
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines() == [
        "sbatch: crater: 100% of %d GPUs",
        "sbatch: crater: and",
        "sbatch: a third line",
    ]
    job = site.lab.job(int(done.stdout))
    assert job["Comment"].strip() == f"mine {TOKEN}"
    assert job["ExcNodeList"] == "a2"
    assert job["CPUs/Task"] == "4"
    assert job["NumCPUs"].split("-")[0] == "4"
    assert job["GresEnforceBind"] == "Yes"
    style = site.scheduler.requests[0]["gres_style"]
    assert job["TresPerNode"] == f"gres{style}gpu:a100:2"
    assert "crater: a line with %s" in site.lab.log("slurmctld")
    site.lab.wait_job(int(done.stdout), ["COMPLETED"])
    assert (site.lab.home() / "seen").read_text() == "50% done, $(id)\n"


def test_the_request_tells_the_job(site: Site, slurm_version: tuple[int, int]) -> None:
    site.sbatch("--comment=words", "--mem=65534", "--time=10", "--array=1-2", "-n2", "-c3")
    request = site.scheduler.requests[0]
    # --mem=65534 must not be taken for "unset", which it is in 16 bits.
    expected = {
        "op": "submit",
        "gres_style": ":" if slurm_version < (23, 2) else "/",
        "uid": "61001",
        "user": "alice",
        "kind": "batch",
        "script": "#!/bin/sh\n#CRATER gpus=2",
        "field.comment": "words",
        "field.num_tasks": "2",
        "field.cpus_per_task": "3",
        "field.min_mem_per_node": "65534",
        "field.time_limit": "10",
        "field.array_inx": "1-2",
    }
    assert {key: request.get(key) for key in expected} == expected
    unset = {"gres", "features", "max_nodes", "ntasks_per_node", "sockets_per_node", "shared"}
    assert not [name for name in unset if f"field.{name}" in request]


def test_kinds_of_submission(site: Site) -> None:
    site.lab.run(["salloc", "-n1", "--comment=crater: gpus=1", "true"], check=True)
    site.lab.run(["srun", "-n1", "--comment=crater: gpus=1", "true"], check=True)
    site.lab.run(["sbatch", "--test-only", "-n1"], input=SCRIPT, check=True)
    het = (
        "#!/bin/sh\n#CRATER gpus=1\n#SBATCH -n1\n#SBATCH hetjob\n#SBATCH -n2 --comment=crater\n:\n"
    )
    site.sbatch(script=het)
    site.sbatch(script="#!/bin/sh\nsleep 1\n")
    told = [(request["kind"], request.get("het")) for request in site.scheduler.requests]
    assert told == [
        ("interactive", None),
        ("interactive", None),
        ("batch", None),
        ("batch", "0"),
        ("interactive", "1"),  # Slurm gives the script to the first component only
    ]


def test_a_refusal_is_told(site: Site) -> None:
    site.scheduler.answer = lambda _: [("verdict", "reject"), ("message", "no node has 9 GPUs")]
    for options in ([], ["--test-only"]):
        done = site.lab.run(["sbatch", *options], input=SCRIPT)
        assert done.returncode != 0
        assert "sbatch: error: no node has 9 GPUs" in done.stderr


# A daemon that fails -------------------------------------------------------------------------


def test_a_hanging_daemon_costs_its_deadline_once(site: Site) -> None:
    site.settings("return {deadline_ms = 400, breaker_seconds = 86400}\n")
    site.install()
    usual = min(site.seconds(script="#!/bin/sh\n:\n") for _ in range(5))
    site.scheduler.fault = "hang"
    before = site.scheduler.connections
    first = site.seconds()
    later = sorted(site.seconds() for _ in range(9))
    assert 0.35 < first < 0.4 + usual + 1
    assert later[4] < 0.3, "the breaker doesn't spare later submissions"
    assert site.scheduler.connections == before + 1
    assert "did not answer within 400 ms; jobs pass without it" in site.lab.log("slurmctld")


@pytest.mark.parametrize("fault", ["hang up", "half", "unknown", "gone"])
def test_a_broken_daemon_costs_no_submission(site: Site, fault: str) -> None:
    """Among them the broken pipe: SIGPIPE would end a slurmctld that doesn't expect it."""
    site.settings("return {deadline_ms = 1000, breaker_seconds = 1}\n")
    site.install()
    site.scheduler.fault = fault
    site.scheduler.answer = lambda _: [("verdict", "accept"), ("set.warp", "9")]
    if fault == "gone":
        site.scheduler.stop()
    for _ in range(3):
        assert site.comment(site.sbatch("--comment=mine")) == "mine"
        time.sleep(1.05)
    assert "UP" in site.lab.run(["scontrol", "ping"]).stdout


def test_the_filter_comes_back_by_itself(site: Site) -> None:
    site.settings("return {deadline_ms = 1000, breaker_seconds = 1}\n")
    site.install()
    site.scheduler.stop()
    assert site.comment(site.sbatch("--comment=a")) == "a"
    site.scheduler.start()
    time.sleep(1.1)
    assert site.comment(site.sbatch("--comment=b")) == f"b {TOKEN}"
    log = site.lab.log("slurmctld")
    assert "crater-scheduler answers again" in log


def test_a_site_may_refuse_when_nobody_answers(site: Site) -> None:
    site.settings('return {unavailable = "reject"}\n')
    site.install()
    site.scheduler.stop()
    done = site.lab.run(["sbatch"], input=SCRIPT)
    assert done.returncode != 0
    assert "the crater scheduler can't be asked" in done.stderr
    site.sbatch(script="#!/bin/sh\n:\n")  # nobody else is harmed


def test_lua_socket_serves_where_lua_posix_is_missing(site: Site) -> None:
    site.settings("return {deadline_ms = 400, breaker_seconds = 1}\n")
    blocked = 'package.preload["posix.sys.socket"] = function() error("not installed") end\n'
    site.install(blocked + site.original)
    assert site.comment(site.sbatch("--comment=a")) == f"a {TOKEN}"
    site.scheduler.fault = "hang"
    assert 0.35 < site.seconds() < 2
    time.sleep(1.05)
    site.scheduler.fault = "hang up"
    assert site.comment(site.sbatch("--comment=b")) == "b"
    site.scheduler.fault = None
    time.sleep(1.05)
    assert site.comment(site.sbatch("--comment=c")) == f"c {TOKEN}"


# Files that are broken -----------------------------------------------------------------------


def test_the_script_may_be_touched_and_slurm_reconfigured(site: Site) -> None:
    for act in (site.install, lambda: site.lab.run(["scontrol", "reconfigure"], user="root")):
        act()
        time.sleep(0.5)
        assert site.comment(site.sbatch("--comment=a")) == f"a {TOKEN}"


@pytest.mark.parametrize("crater", ["return {", "error('x')", "return 7", None])
def test_a_broken_filter_costs_no_submission(site: Site, crater: str | None) -> None:
    broken = site.lab.folders.etc / "broken.lua"
    broken.unlink(missing_ok=True)
    if crater is not None:
        broken.write_text(crater)
    assert INSTALLED in site.original
    site.install(site.original.replace(INSTALLED, "/crater-lab/etc/broken.lua"))
    job = site.sbatch("--comment=a")
    assert site.comment(job) == "a"
    assert site.update(job, "comment=b") == (0, "")
    assert site.comment(job) == "b"
    assert "the filter can't be loaded, jobs pass without it" in site.lab.log("slurmctld")
    assert site.scheduler.requests == []
    # slurmctld starts with it, too
    site.lab.restart_slurmctld()
    site.sbatch("--comment=a")


def test_a_broken_script_keeps_the_previous_one(site: Site) -> None:
    site.sbatch()
    site.install("this is no Lua")
    assert site.comment(site.sbatch("--comment=a")) == f"a {TOKEN}"


@pytest.mark.parametrize(
    "text", ["return {", "while true do end", "return {socket = 7, nonsense = 1}", "os.exit(1)"]
)
def test_broken_settings_cost_no_submission(site: Site, text: str) -> None:
    site.settings(text)
    site.install()
    # Their defaults are where the lab's scheduler listens.
    assert site.comment(site.sbatch("--comment=a")) == f"a {TOKEN}"
    assert "/etc/crater/filter.lua: " in site.lab.log("slurmctld")


def test_settings_change_without_a_restart(site: Site) -> None:
    plain = "#!/bin/sh\n:\n"
    site.sbatch(script=plain)
    site.settings('return {ask = "always"}\n')
    time.sleep(5.5)
    site.sbatch(script=plain)
    assert len(site.scheduler.requests) == 1


def test_the_off_switch_needs_no_daemon_and_no_permission(site: Site) -> None:
    site.off.touch()
    site.off.chmod(0)
    assert site.comment(site.sbatch(f"--comment={TOKEN}")) == TOKEN
    assert site.scheduler.requests == []
    site.off.unlink()
    assert site.comment(site.sbatch("--comment=a")) == f"a {TOKEN}"


# Plans are not the user's to move ------------------------------------------------------------


def test_a_plan_stays_with_its_job(site: Site, slurm_version: tuple[int, int]) -> None:
    job = site.sbatch("--comment=first")
    assert site.comment(job) == f"first {TOKEN}"
    for change, expected in [
        ("comment=edited", f"edited {TOKEN}"),
        ("comment=x crater-plan:1.f.g y", f"x y {TOKEN}"),
        ("comment=", TOKEN),
    ]:
        for user in ("alice", "root"):
            assert site.update(job, change, user=user) == (0, "")
            assert site.comment(job) == expected
    assert [request["op"] for request in site.scheduler.requests] == ["submit"]
    code, said = site.update(job, "comment=" + "c" * 1000)
    assert code != 0
    assert site.comment(job) == TOKEN
    if slurm_version >= (23, 2):  # 22.05 drops what a modification's filter says
        assert "also holds its plan, which leaves room for" in said


def test_a_plan_can_not_be_brought_along(site: Site) -> None:
    site.scheduler.stop()
    for user in ("alice", "root"):
        job = site.sbatch(f"--comment=stolen {TOKEN}", user=user)
        assert site.comment(job) == "stolen"
        assert site.update(job, f"comment=again {TOKEN}", user=user) == (0, "")
        assert site.comment(job) == "again"


def test_the_scheduler_judges_modifications_of_planned_jobs(
    site: Site, slurm_version: tuple[int, int]
) -> None:
    job = site.sbatch("--comment=mine")
    site.scheduler.requests.clear()
    site.scheduler.answer = lambda request: [
        ("verdict", "reject" if "field.exc_nodes" in request else "accept"),
        ("message", "the plan needs its node"),
    ]
    code, said = site.update(job, "excnodelist=a1", "comment=other")
    assert code != 0
    assert ("the plan needs its node" in said) == (slurm_version >= (23, 2))
    assert site.comment(job) == f"mine {TOKEN}"
    assert site.update(job, "timelimit=5")[0] == 0
    assert site.update(job, "jobname=new")[0] == 0  # nothing that a plan is about
    first, second = site.scheduler.requests
    assert first["record.comment"] == f"mine {TOKEN}"
    assert first["record.job_id"] == str(job)
    assert first["record.user_id"] == "61001"
    assert first["uid"] == "61001"
    assert first["field.comment"] == "other"
    assert "script" not in first
    assert second["field.time_limit"] == "5"
    site.scheduler.stop()
    assert site.update(job, "excnodelist=a1")[0] == 0
