"""AllData's tasks on a real Slurm: sent through the API, told by callbacks, and none lost or run
twice when crater-scheduler, slurmctld or the platform goes away."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import (
    API,
    PEOPLE,
    api_token,
    cancel,
    crater,
    inventory,
    llama_task,
    numa_of_cpus,
    output,
    patient_lab,
    profile,
    script,
    shares,
    small_task,
    variables,
    wait_until,
)

from crater_slurm.job import layout
from crater_slurm.lab import Lab
from crater_slurm.lab.places import INSIDE
from crater_slurm.model.cpuset import parse_cpulist

HOLD = """#!/bin/bash
env > env.$SLURM_JOB_ID
touch ready.$SLURM_JOB_ID
until [ -e go.$SLURM_JOB_ID ]; do sleep 0.1; done
exit $(cat go.$SLURM_JOB_ID)
"""
#: sbatch as crater-scheduler finds it. While the file ``hold`` is there, sbatch keeps
#: its answer to itself: the job is there, and nobody has heard of it yet.
BIN = "/crater-lab/bin"
SBATCH = f"""#!/bin/bash
answer="$({BIN}/sbatch.real "$@")" || exit
if [ -e {BIN}/hold ]; then echo "$answer" > /tmp/held; sleep 30; fi
echo "$answer"
"""
FAKE = "127.0.0.1:9195"
CONF = {
    "submit": {"settle_seconds": 5},
    "scheduler": {"requests_per_second": 1000, "requests_burst": 1000},
    "alldata": {
        "submit_as": {"alldata": "alice"},
        "look_seconds": 2,
        "callback": {
            "url": f"http://{FAKE}/callback",
            "allow_http": True,
            "user": "crater",
            "password_file": "/etc/crater/callback.password",
            "hmac_key_file": "/etc/crater/callback.key",
            "timeout_seconds": 2,
            "first_wait_seconds": 0.2,
            # A scheduler is killed with a callback in hand, by chance; another waits for this.
            "lease_seconds": 10,
            "longest_wait_seconds": 1,
        },
    },
}


class Platform:
    """AllData, faked, beside a lab's slurmctld; and what it does with crater's API."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.process: subprocess.Popen[bytes] | None = None
        self.token = api_token(lab, "alldata")

    def start(self) -> None:
        program = Path(sys.executable).resolve().relative_to(Path(sys.base_prefix).resolve())
        words = ["-m", "crater_slurm.cli", "alldata", "fake", "--listen", FAKE, "--user", "crater"]
        words += ["--password-file", "/etc/crater/callback.password"]
        words += ["--hmac-key-file", "/etc/crater/callback.key"]
        environment = {
            "PYTHONHOME": f"{PEOPLE}/python",
            "LD_LIBRARY_PATH": f"{PEOPLE}/python/lib",
            "PYTHONPATH": f"{PEOPLE}:{PEOPLE}/site",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        command = self.lab.command(
            [f"{PEOPLE}/python/{program}", *words],
            user="root",
            machine_side=True,
            environment=environment,
        )
        self.process = subprocess.Popen(command)
        wait_until(lambda: self.ask("GET", f"http://{FAKE}/control/received"), "the fake answers")

    def stop(self) -> None:
        self.lab.run(["pkill", "-f", "alldata fak[e]"], user="root", machine_side=True)
        if self.process:
            self.process.wait(30)

    def ask(self, method: str, url: str, body: Any = None, *, token: str = "") -> Any:
        """What an address answers, with the HTTP status under ``http``; None if nobody does."""
        words = ["curl", "-sS", "-m", "60", "-X", method, "-w", "\n%{http_code}", url]
        if token:
            words += ["-H", f"Authorization: Bearer {token}"]
        if body is not None:
            words += ["-H", "Content-Type: application/json", "--data-binary", "@-"]
        text = None if body is None else json.dumps(body)
        done = self.lab.run(words, user="root", machine_side=True, input=text, timeout=90)
        if done.returncode:
            return None
        content, _, status = done.stdout.rpartition("\n")
        return json.loads(content or "{}") | {"http": int(status)}

    def api(self, method: str, path: str, body: Any = None) -> Any:
        return self.ask(method, API + path, body, token=self.token)

    def send(self, document: dict[str, Any]) -> dict[str, Any]:
        answer = self.api("POST", "/schedule", document)
        assert answer["http"] == 202, answer
        return dict(answer)

    def told(self, task_id: str) -> list[dict[str, Any]]:
        """What arrived of a task, repeats left out."""
        url = f"http://{FAKE}/control/received?task_id={task_id}"
        found = self.ask("GET", url)["received"]
        return [one["body"] for one in found if not one["repeat"]]

    def statuses(self, task_id: str) -> list[str]:
        return [one["status"] for one in self.told(task_id)]

    def hears(self, task_id: str, *statuses: str) -> list[dict[str, Any]]:
        """Wait until exactly these were told."""
        wait_until(
            lambda: len(self.statuses(task_id)) >= len(statuses), f"{task_id}: {statuses} are told"
        )
        assert self.statuses(task_id) == list(statuses)
        assert self.ask("GET", f"http://{FAKE}/control/received")["problems"] == []
        return self.told(task_id)

    def fault(self, kind: str, times: int, seconds: float = 1.0) -> None:
        body = {"kind": kind, "times": times, "seconds": seconds}
        assert self.ask("POST", f"http://{FAKE}/control/faults", body)["http"] == 201


@pytest.fixture(scope="module")
def lab(lab_factory: Any, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    a100 = profile("a100-pcie-40gb")
    nodes = [("a1", a100), ("a2", a100), ("l1", profile("l4-inference"))]
    file = inventory(tmp_path_factory.mktemp("alldata"), *nodes)
    made = patient_lab(lab_factory, inventory=file, cache_mib=2048, crater_conf=CONF)
    script(made, "hold.sh", HOLD)
    return made


@pytest.fixture(scope="module")
def platform(lab: Lab) -> Iterator[Platform]:
    commands(lab)
    for name, text in (("callback.password", "sécret\n"), ("callback.key", "0123456789abcdef\n")):
        file = lab.folders.crater_etc / name
        file.write_text(text)
        file.chmod(0o600)
    lab.kill("scheduler")
    lab.start("scheduler")
    made = Platform(lab)
    made.start()
    wait_until(lambda: made.api("GET", "/nodes"), "the API answers")
    yield made
    made.stop()


def commands(lab: Lab) -> None:
    """sbatch of our own before the lab's, which is to work for users in a chroot too."""
    folder = lab.path(BIN)
    real = (folder / "sbatch").read_text()
    if " chroot " in real:
        found = shutil.which("chroot")
        assert found
        shutil.copy(found, folder / "chroot")
        # cap_sys_chroot=ep: crater-scheduler starts sbatch as the user, who may not chroot.
        capability = struct.pack("<5I", 0x02000001, 1 << 18, 0, 0, 0)
        os.setxattr(folder / "chroot", "security.capability", capability)
        real = real.replace(" chroot ", f" {BIN}/chroot ")
    for name, text in (("sbatch.real", real), ("sbatch", SBATCH)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)


@pytest.fixture(autouse=True)
def _clean(lab: Lab, platform: Platform) -> Iterator[None]:
    yield
    (lab.path(BIN) / "hold").unlink(missing_ok=True)
    cancel(lab)
    platform.ask("DELETE", f"http://{FAKE}/control/faults")
    assert platform.ask("GET", f"http://{FAKE}/control/received")["problems"] == []


def llama(task_id: str, **changes: Any) -> dict[str, Any]:
    """The source text's task under another id, with a program that waits to be let go."""
    return llama_task(task_id, **{"run_config": {"command": ["bash", "hold.sh"]}} | changes)


def small(task_id: str, *command: str, **changes: Any) -> dict[str, Any]:
    """One core, no GPU, a program that waits to be let go, or another."""
    return small_task(task_id, *(command or ("bash", "hold.sh")), **changes)


def ready(lab: Lab, job: int) -> None:
    wait_until((lab.home() / f"ready.{job}").exists, f"job {job} has started its work")


def let_go(lab: Lab, job: int, code: int = 0) -> None:
    file = lab.home() / f"go.{job}"
    file.with_suffix(".new").write_text(f"{code}\n")
    file.with_suffix(".new").rename(file)


def jobs_named(lab: Lab, name: str) -> list[str]:
    done = lab.run(
        ["squeue", "--noheader", "--states=all", f"--name={name}", "--format=%i"], user="root"
    )
    return list(done.stdout.split())


def test_the_source_text_s_task_is_told_as_slurm_and_the_node_have_it(
    lab: Lab, platform: Platform
) -> None:
    answer = platform.send(llama("llama-1"))
    job = answer["job_id"]
    assert answer["decision"]["verdict"] == "planned"
    assert platform.send(llama("llama-1"))["job_id"] == job
    ready(lab, job)
    (share,) = shares(lab, job)
    scheduled, running = platform.hears("llama-1", "scheduled", "running")
    environment = variables((lab.home() / f"env.{job}").read_text())
    got = scheduled["allocated_resources"]
    assert scheduled["job_id"] == job
    assert got["node"] == share.node == lab.job(job)["NodeList"]
    assert got["gpu_ids"] == [str(gpu) for gpu in share.gpus]
    assert got["gpu_ids"] == environment["CRATER_GPU_IDS_HOST"].split(",")
    assert got["cpu_cores"] == list(share.cpus)
    assert got["cpu_cores"] == list(parse_cpulist(environment["CRATER_CPU_LIST"]))
    assert len(got["cpu_cores"]) == 32 == int(environment["CRATER_CPU_CORES"])
    assert got["cpu_cores_source"] == "cpuset"
    assert got["numa_nodes"] == sorted(numa_of_cpus(lab, share))
    assert got["checkpoint_path"] == environment["CRATER_CHECKPOINT_PATH"]
    assert running["allocated_resources"] == got
    let_go(lab, job)
    *_, completed = platform.hears("llama-1", "scheduled", "running", "completed")
    assert (completed["exit_code"], completed["signal"]) == (0, 0)
    assert lab.job(job)["UserId"].startswith("alice(")
    shown = platform.api("GET", "/tasks/llama-1")
    assert [one["delivery"] for one in shown["callbacks"]] == ["delivered"] * 3
    assert jobs_named(lab, "llama-1") == [str(job)]


SAVER = """
import os, time
from crater_slurm.job import checkpoint

job = os.environ["SLURM_JOB_ID"]
checkpoint.load()
checkpoint.save({"step": 10, "data": os.urandom(3_000_000)}, 10)
assert checkpoint.wait(60)
open(f"ready.{job}", "w").close()
while not os.path.exists(f"go.{job}"):
    time.sleep(0.1)
checkpoint.save({"step": 20, "data": os.urandom(12_000_000)}, 20)
assert checkpoint.wait(60)
"""


def test_a_checkpoint_that_reached_its_destination_is_told_also_after_the_end(
    lab: Lab, platform: Platform
) -> None:
    (lab.home() / "save.py").write_text(SAVER)
    away = INSIDE / "home/alice/away"
    document = small(
        "saves", "/usr/bin/python3", "save.py", checkpoint_config={"destination": str(away)}
    )
    job = platform.send(document)["job_id"]
    ready(lab, job)
    *_, first = platform.hears("saves", "scheduled", "running", "flushed")
    node = lab.job(job)["NodeList"]
    parts = layout.read_parts(str(lab.home() / "away/step-000000010"))
    assert layout.covers(parts)
    assert first["checkpoint"] == {
        "name": "step",
        "step": 10,
        "run": f"{job}.0",
        "bytes": sum(part.size for part in parts),
        "destination": str(away),
        "nodes": [node],
    }
    lab.kill(("node", node))
    let_go(lab, job)
    platform.hears("saves", "scheduled", "running", "flushed", "completed")
    lab.start(("node", node))
    told = platform.hears("saves", "scheduled", "running", "flushed", "completed", "flushed")
    assert [one["sequence"] for one in told] == [1, 2, 3, 4, 5]
    assert told[-1]["checkpoint"]["step"] == 20


def test_every_node_of_a_job_is_told(lab: Lab, platform: Platform) -> None:
    document = small("two-nodes", scheduling_config={"nodes": 2})
    document["resource_requirements"]["gpu"]["count"] = 1
    job = platform.send(document)["job_id"]
    scheduled, _ = platform.hears("two-nodes", "scheduled", "running")
    expected = [(s.node, [str(g) for g in s.gpus], list(s.cpus)) for s in shares(lab, job)]
    told = [(n["node"], n["gpu_ids"], n["cpu_cores"]) for n in scheduled["nodes"]]
    assert sorted(told) == expected
    assert len(told) == 2


def test_how_a_job_ended_is_told(lab: Lab, platform: Platform) -> None:
    job = platform.send(small("fails"))["job_id"]
    ready(lab, job)
    let_go(lab, job, 3)
    *_, failed = platform.hears("fails", "scheduled", "running", "failed")
    assert failed["exit_code"] == 3
    job = platform.send(small("ended-by-hand"))["job_id"]
    ready(lab, job)
    answer = platform.api("POST", "/tasks/ended-by-hand/cancel")
    assert answer["http"] == 202
    platform.hears("ended-by-hand", "scheduled", "running", "cancelled")
    held = {"scheduling_config": {"time_limit_seconds": 60}}
    job = platform.send(small("waits", **held))["job_id"]
    ready(lab, job)
    lab.run(["scontrol", "requeue", str(job)], user="root", check=True)
    platform.hears("waits", "scheduled", "running", "requeued")
    lab.run(["scancel", str(job)], user="root", check=True)
    platform.hears("waits", "scheduled", "running", "requeued", "cancelled")


def test_a_task_that_a_user_submits_by_command_is_told_too(lab: Lab, platform: Platform) -> None:
    document = json.dumps(small("by-command"))
    done = crater(lab, "submit", "-", "--test-only", input=document)
    assert done.returncode == 0, done.stderr
    done = crater(lab, "submit", "-", "--parsable", input=document)
    assert done.returncode == 0, done.stderr
    job = int(done.stdout)
    ready(lab, job)
    let_go(lab, job)
    told = platform.hears("by-command", "scheduled", "running", "completed")
    assert {one["job_id"] for one in told} == {job}


def test_what_slurm_refuses_is_told_as_rejected(lab: Lab, platform: Platform) -> None:
    document = small("odd", scheduling_config={"partition": "gold"})
    answer = platform.api("POST", "/schedule", document)
    assert answer["http"] == 422
    assert "partition" in answer["detail"][0]["message"].lower()
    (rejected,) = platform.hears("odd", "rejected")
    assert "partition" in rejected["reason"].lower()


def test_hostile_words_reach_no_shell(lab: Lab, platform: Platform) -> None:
    evil = "$(touch /tmp/evil) `touch /tmp/evil`; touch '/tmp/evil' \" & | > * \\"
    job = platform.send(small("evil", "printf", "%s", evil))["job_id"]
    platform.hears("evil", "scheduled", "running", "completed")
    assert output(lab, job).strip() == evil
    assert lab.run(["ls", "/tmp/evil"], user="root").returncode


def test_a_scheduler_killed_between_sbatch_and_commit_finds_its_job(
    lab: Lab, platform: Platform
) -> None:
    (lab.path(BIN) / "hold").touch()
    url, token = f"{API}/schedule", platform.token
    words = ["curl", "-s", "-m", "30", "-H", f"Authorization: Bearer {token}", "-d", "@-", url]
    process = subprocess.Popen(
        lab.command(words, user="root", machine_side=True), stdin=subprocess.PIPE
    )
    assert process.stdin
    process.stdin.write(json.dumps(small("killed")).encode())
    process.stdin.close()
    jobs = wait_until(lambda: jobs_named(lab, "killed"), "Slurm has the job")
    lab.kill("scheduler")
    (lab.path(BIN) / "hold").unlink()
    lab.start("scheduler")
    process.wait(60)
    job = int(jobs[0])
    ready(lab, job)
    platform.hears("killed", "scheduled", "running")
    assert platform.send(small("killed"))["job_id"] == job
    let_go(lab, job)
    platform.hears("killed", "scheduled", "running", "completed")
    assert jobs_named(lab, "killed") == jobs


def test_a_scheduler_killed_between_a_change_and_its_callback_tells_it_later(
    lab: Lab, platform: Platform
) -> None:
    platform.fault("error", 1_000_000)
    job = platform.send(small("untold"))["job_id"]
    ready(lab, job)
    wait_until(
        lambda: platform.api("GET", "/tasks/untold")["status"] == "running", "it is written down"
    )
    lab.kill("scheduler")
    let_go(lab, job)
    lab.wait_job(job, ["COMPLETED"], timeout=60)
    platform.ask("DELETE", f"http://{FAKE}/control/faults")
    lab.start("scheduler")
    platform.hears("untold", "scheduled", "running", "completed")


def test_a_platform_that_is_away_or_takes_and_does_not_answer_hears_everything_once(
    lab: Lab, platform: Platform
) -> None:
    platform.stop()
    job = platform.send(small("away"))["job_id"]
    ready(lab, job)
    let_go(lab, job)
    wait_until(
        lambda: platform.api("GET", "/tasks/away")["status"] == "completed", "it is written down"
    )
    platform.start()
    platform.hears("away", "scheduled", "running", "completed")
    platform.fault("lost_answer", 2, seconds=3)
    job = platform.send(small("lost"))["job_id"]
    ready(lab, job)
    let_go(lab, job)
    platform.hears("lost", "scheduled", "running", "completed")


def test_slurmctld_that_restarts_costs_nothing(lab: Lab, platform: Platform) -> None:
    job = platform.send(small("restart"))["job_id"]
    ready(lab, job)
    platform.hears("restart", "scheduled", "running")
    lab.restart_slurmctld()
    let_go(lab, job)
    lab.wait_job(job, ["COMPLETED"], timeout=60)
    platform.hears("restart", "scheduled", "running", "completed")


def test_a_task_that_comes_while_slurmctld_is_away_is_submitted_when_it_is_back(
    lab: Lab, platform: Platform
) -> None:
    lab.stop("slurmctld")
    answer = platform.send(small("meanwhile"))
    assert (answer["status"], answer["job_id"]) == ("submitting", None)
    lab.start("slurmctld")
    job = wait_until(
        lambda: platform.api("GET", "/tasks/meanwhile")["job_id"], "its job is submitted"
    )
    ready(lab, job)
    let_go(lab, job)
    platform.hears("meanwhile", "scheduled", "running", "completed")
    assert jobs_named(lab, "meanwhile") == [str(job)]
