"""crater-scheduler without root: it submits as a task's user through sudo, by the documented rule
and no other. The rule, the users and the program are there in the lab alone."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import (
    PEOPLE,
    api_token,
    ask_api,
    completed,
    patient_lab,
    small_task,
    variables,
    wait_until,
)

from crater_slurm.lab import Lab
from crater_slurm.lab.places import INSIDE

SERVICE, PLATFORM = "crater", "aiplatform"
SUBMIT = "/usr/bin/crater-submit"
CONF = {
    "submit": {"timeout_seconds": 20},
    "alldata": {"submit_as": {"alldata": PLATFORM, "other": "alice"}, "look_seconds": 2},
    "scheduler": {"requests_per_second": 1000, "requests_burst": 1000},
}


def documented() -> str:
    """The sudoers file of docs/api.md, as it stands there."""
    text = (Path(__file__).parents[2] / "docs/api.md").read_text()
    lines = re.findall(r"^ +((?:Defaults!|crater ALL=).*)$", text, re.MULTILINE)
    assert len(lines) == 2
    return "".join(f"{line}\n" for line in lines)


def root(lab: Lab, *words: str, text: str | None = None) -> None:
    lab.run(list(words), user="root", machine_side=True, input=text, check=True)


def write(lab: Lab, file: str, text: str, mode: str) -> None:
    root(lab, "sh", "-c", f"cat > {file} && chmod {mode} {file}", text=text)


def add_user(lab: Lab, name: str, uid: int) -> None:
    home = INSIDE / "home" / name
    # No password, and none to be looked up.
    line = f"{name}:*:{uid}:{uid}::{home}:/bin/sh"
    root(lab, "sh", "-c", f"echo '{line}' >> /etc/passwd; echo '{name}:*:{uid}:' >> /etc/group")
    lab.home(name).mkdir()
    os.chown(lab.home(name), uid, uid)


def program(module: str) -> str:
    """A program of this installation's, as a package would put it into /usr/bin."""
    python = Path(sys.executable).resolve().relative_to(Path(sys.base_prefix).resolve())
    return (
        f"#!/bin/sh\nexport PYTHONHOME={PEOPLE}/python LD_LIBRARY_PATH={PEOPLE}/python/lib "
        f"PYTHONPATH={PEOPLE}:{PEOPLE}/site PYTHONDONTWRITEBYTECODE=1\n"
        f'exec {PEOPLE}/python/{python} -c "{module}" "$@"\n'
    )


@pytest.fixture(scope="module")
def lab(lab_factory: Any) -> Iterator[Lab]:
    if shutil.which("sudo") is None:
        pytest.skip("this machine has no sudo")
    made = patient_lab(lab_factory, inventory="cpu", crater_conf=CONF)
    if made.runtime.facts()["rooted"]:
        pytest.skip("sudo's child may not enter the root of another Slurm than the machine's")
    for name, uid in ((SERVICE, 61010), (PLATFORM, 61011)):
        add_user(made, name, uid)
    layer = "/run/usr-bin"
    root(made, "mkdir", "-p", f"{layer}/upper", f"{layer}/work")
    options = f"lowerdir=/usr/bin,upperdir={layer}/upper,workdir={layer}/work"
    root(made, "mount", "-t", "overlay", "-o", options, "crater-lab", "/usr/bin")
    submit = "import sys; from crater_slurm.cli.services import submit; sys.exit(submit())"
    write(made, SUBMIT, program(submit), "755")
    write(made, "/etc/sudoers.d/crater-test", documented(), "440")
    root(made, "visudo", "--check")
    made.kill("scheduler")
    process = start(made)
    yield made
    process.terminate()
    process.wait(30)


def start(lab: Lab) -> subprocess.Popen[bytes]:
    """crater-scheduler as its own user, and nobody's more."""
    for part in ("run", "lib"):
        root(lab, "chown", "-R", SERVICE, f"{INSIDE}/ctl/{part}")
    root(lab, "chown", SERVICE, "/etc/crater/plan.key")
    write(lab, "/run/crater-scheduler", program("import sys; from crater_slurm.scheduler.main "
          "import main; sys.exit(main())"), "755")  # fmt: skip
    words = lab.command(["/run/crater-scheduler"], user=SERVICE, machine_side=True,
                        environment={"SECRET": "of the daemon"})  # fmt: skip
    output = (lab.folders.log / "scheduler-own.out").open("wb")
    with output:
        process = subprocess.Popen(words, stdout=output, stderr=output)
    healthy = ["curl", "-fsS", "-m", "10", "http://127.0.0.1:9192/healthz"]
    try:
        wait_until(lambda: not lab.run(healthy, machine_side=True).returncode, "it is healthy")
    except AssertionError:
        pytest.fail(Path(output.name).read_text() + lab.run(healthy[:1] + healthy[4:]).stdout)
    return process


def test_a_task_is_submitted_as_its_user_by_the_documented_rule(lab: Lab) -> None:
    key = api_token(lab, "alldata", user=SERVICE)
    answer = ask_api(lab, key, "/schedule", small_task("by-sudo", "env"))
    assert answer.get("status") == "submitted", answer
    assert answer["decision"]["verdict"] == "planned"
    job = completed(lab, answer["job_id"])
    assert job["UserId"] == f"{PLATFORM}(61011)"
    assert job["WorkDir"] == str(INSIDE / "home" / PLATFORM)
    seen = variables((lab.home(PLATFORM) / f"slurm-{answer['job_id']}.out").read_text())
    assert (seen["USER"], seen["HOME"]) == (PLATFORM, str(INSIDE / "home" / PLATFORM))
    assert "SECRET" not in seen
    assert not [name for name in seen if name.startswith("SUDO_")]
    wait_until(
        lambda: ask_api(lab, key, "/tasks/by-sudo")["status"] == "completed", "its end is followed"
    )
    assert (
        ask_api(lab, key, "/schedule", small_task("by-sudo", "env"))["job_id"] == answer["job_id"]
    )


def test_what_slurm_refuses_comes_through_sudo(lab: Lab) -> None:
    wrong = small_task("odd", "true") | {"scheduling_config": {"partition": "gold"}}
    key = api_token(lab, "more", "--user", PLATFORM, user=SERVICE)
    answer = ask_api(lab, key, "/schedule", wrong)
    assert "partition" in answer["detail"][0]["message"].lower(), answer


def test_nobody_is_submitted_as_whom_the_rule_does_not_name(lab: Lab) -> None:
    key = api_token(lab, "other", user=SERVICE)
    answer = ask_api(lab, key, "/schedule", small_task("as-alice", "true"))
    assert (answer["status"], answer["job_id"]) == ("submitting", None)
    told = ask_api(lab, key, "/tasks/as-alice")["reason"]
    assert told.startswith("sudo: ")
    assert told.endswith("the sudoers line is in docs/api.md")
    assert not lab.run(["squeue", "-h", "-u", "alice"], user="root").stdout.strip()
    assert ask_api(lab, key, "/tasks/as-alice/cancel", {})["status"] in ("cancelled", "submitting")


def test_the_rule_opens_no_other_command(lab: Lab) -> None:
    sudo = ["sudo", "-n", "-u", PLATFORM, "--"]
    for words in (["sh", "-c", "id"], [SUBMIT, "--version"]):
        done = lab.run([*sudo, *words], user="alice", machine_side=True)
        assert done.returncode
        assert done.stderr.startswith("sudo: "), done.stderr
    done = lab.run([*sudo, "sh", "-c", "id"], user=SERVICE, machine_side=True)
    assert done.stderr.startswith("sudo: ")
    done = lab.run(["sudo", "-n", SUBMIT, "--version"], user=SERVICE, machine_side=True)
    assert done.stderr.startswith("sudo: "), "not as root"


def test_an_sbatch_that_hangs_behind_sudo_is_found_again_and_not_sent_twice(lab: Lab) -> None:
    """sudo is root's: the daemon may not even end it."""
    real = program("import sys; from crater_slurm.cli.services import submit; sys.exit(submit())")
    write(lab, "/usr/bin/crater-submit.real", real, "755")
    late = '#!/bin/sh\nanswer=$(/usr/bin/crater-submit.real "$@")\nsleep 60\necho "$answer"\n'
    write(lab, SUBMIT, late, "755")
    try:
        key = api_token(lab, "late", "--user", PLATFORM, user=SERVICE)
        ask_api(lab, key, "/schedule", small_task("late", "sleep", "300"))
        said = (lab.folders.log / "scheduler-own.out").read_text()
        assert "task late is kept and not submitted yet: sbatch did not answer within 20 s" in said
        job = wait_until(lambda: ask_api(lab, key, "/tasks/late")["job_id"], "its job is found")
        named = ["squeue", "-h", "-n", "late", "-o", "%i %u"]
        assert lab.run(named, user="root").stdout.split() == [str(job), PLATFORM]
    finally:
        write(lab, SUBMIT, real, "755")
