"""sbatch as the task's user: who becomes whom, what sbatch says, and nothing that a shell reads."""

from __future__ import annotations

import getpass
import json
import os
import pwd
import subprocess
from pathlib import Path
from typing import Any

import pytest
from task_samples import llama

from crater_slurm.alldata import run_as
from crater_slurm.alldata import submitter as submitter_module
from crater_slurm.alldata.batch import render
from crater_slurm.alldata.run_as import Account, RunAs, UserError
from crater_slurm.alldata.submission import AwayError, DoubtError, RefusedError
from crater_slurm.alldata.submitter import SbatchSubmitter
from crater_slurm.alldata.task import Task, parse
from crater_slurm.config.settings import Settings
from crater_slurm.config.submit import Submit
from crater_slurm.errors import ConfigError, SlurmError, UsageError
from crater_slurm.slurm import job_search
from crater_slurm.slurm.client import Client

ALICE = Account("alice", 61001, 61001, "/home/alice")
TASK = parse(llama())


class Sbatch:
    """Stands in for subprocess: keeps the call, answers as told."""

    def __init__(self, code: int = 0, out: str = "7\n", err: str = "") -> None:
        self.code, self.out, self.err = code, out, err
        self.error: Exception | None = None
        self.words: list[str] = []
        self.how: dict[str, Any] = {}

    def __call__(self, words: list[str], **how: Any) -> subprocess.CompletedProcess[str]:
        self.words, self.how = words, how
        if self.error:
            raise self.error
        return subprocess.CompletedProcess(words, self.code, self.out, self.err)


def submitter(sbatch: Sbatch, euid: int = 0, **client: Any) -> SbatchSubmitter:
    become = RunAs("/usr/bin/crater-submit", euid=lambda: euid)
    script = lambda task: render(task, Submit()).script  # noqa: E731
    return SbatchSubmitter(Client(**client), script, become, seconds=5, execute=sbatch)


@pytest.fixture(autouse=True)
def _groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getgrouplist", lambda name, gid: [gid, 4242])


def test_root_becomes_the_user_in_the_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "9")
    monkeypatch.setenv("SBATCH_PARTITION", "gold")
    monkeypatch.setenv("SECRET", "x")
    sbatch = Sbatch(err="sbatch: crater: planned (crater explain d559ef05edb9)\n")
    done = submitter(sbatch, conf=Path("/etc/slurm/other.conf")).submit(TASK, ALICE, "ab12")
    assert (done.job_id, done.plan_id) == (7, "d559ef05edb9")
    assert sbatch.words[1:6] == ["--reuid=61001", "--regid=61001", "--groups=61001,4242", "--",
                                 "sbatch"]  # fmt: skip
    assert sbatch.words[6:9] == [
        "--parsable",
        "--propagate=NONE",
        f"--comment=crater-task:t1/{run_fingerprint(TASK)} crater-run:ab12",
    ]
    assert "--chdir=/home/alice" in sbatch.words
    assert "user" not in sbatch.how
    env = sbatch.how["env"]
    assert env["HOME"] == "/home/alice"
    assert env["SLURM_CONF"] == "/etc/slurm/other.conf"
    assert not {"SLURM_JOB_ID", "SBATCH_PARTITION", "SECRET"} & env.keys()
    assert sbatch.how["stdin"].startswith("#!/bin/bash\n")


def run_fingerprint(task: Task) -> str:
    from crater_slurm.alldata.task import fingerprint

    return fingerprint(task)


@pytest.mark.parametrize(
    ("mode", "asks"), [("enforce", False), ("observe", True), ("advise", True), ("off", True)]
)
def test_a_script_asks_slurm_itself_for_what_the_filter_will_not(
    monkeypatch: pytest.MonkeyPatch, mode: str, asks: bool
) -> None:
    sbatch = Sbatch()
    made = submitter_module.submitter(Settings(filter={"mode": mode}), Client())
    monkeypatch.setattr(made, "_execute", sbatch)
    monkeypatch.setattr(made, "_become", RunAs("", euid=lambda: ALICE.uid))
    made.submit(TASK, ALICE, "ab12")
    script = sbatch.how["stdin"]
    assert ("#SBATCH --gres=gpu:2" in script) is asks
    assert " gpus=2 gpu-memory=16GiB\n" in script


def test_without_setpriv_root_becomes_the_user_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_as, "_setpriv", lambda: None)
    sbatch = Sbatch()
    submitter(sbatch).submit(TASK, ALICE, "ab12")
    assert sbatch.words[0] == "sbatch"
    how = {name: sbatch.how[name] for name in ("user", "group", "extra_groups")}
    assert how == {"user": 61001, "group": 61001, "extra_groups": [61001, 4242]}


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_setpriv_leaves_nothing_of_root(monkeypatch: pytest.MonkeyPatch) -> None:
    words, how = RunAs("").submission(ALICE, "sh")
    told = "id -u; id -g; id -G; grep -E 'Cap(Eff|Prm)' /proc/self/status"
    env = {"PATH": os.environ["PATH"]}
    done = run_as.run([*words, "-c", told], stdin="", seconds=60, env=env, **how)
    assert done.stdout.split() == ["61001", "61001", "61001", "4242", "CapPrm:", "0" * 16,
                                   "CapEff:", "0" * 16], done.stderr  # fmt: skip
    done = run_as.run([*words[:-1], "/no/such/sbatch"], stdin="", seconds=60, env=env, **how)
    assert done.returncode
    assert done.stderr.startswith("setpriv:")


def test_a_service_user_asks_sudo_for_one_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_as, "_name_of", lambda uid: "slurm")
    sbatch = Sbatch()
    submitter(sbatch, euid=64030).submit(TASK, ALICE, "ab12")
    assert sbatch.words[:6] == ["sudo", "-n", "-u", "alice", "--", "/usr/bin/crater-submit"]
    assert "user" not in sbatch.how


def test_the_user_runs_sbatch_and_anybody_else_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    sbatch = Sbatch()
    submitter(sbatch, euid=ALICE.uid).submit(TASK, ALICE, "ab12")
    assert sbatch.words[0] == "sbatch"
    monkeypatch.setattr(run_as, "_name_of", lambda uid: "bob")
    with pytest.raises(AwayError, match="runs as bob and can't submit as alice; run it as root"):
        submitter(Sbatch(), euid=61002).submit(TASK, ALICE, "ab12")
    with pytest.raises(ConfigError, match="sudoers"):
        RunAs("x", euid=lambda: 61002).submission(ALICE, "sbatch")


def test_root_and_system_users_are_never_submitted_as() -> None:
    for name in ("root", "daemon"):
        with pytest.raises(UserError, match="never submitted as root or a system user"):
            run_as.account(name, 1000)
    with pytest.raises(UserError, match="there is no user 'nobody-here'"):
        run_as.account("nobody-here", 1000)
    with pytest.raises(UserError, match="there is no user"):
        run_as.account("a\0b", 1000)
    with pytest.raises(UserError):  # whatever a site sets
        run_as.account("root", 1)


@pytest.mark.parametrize(
    ("code", "out", "err", "error", "said"),
    [
        (1, "", "sbatch: error: Batch job submission failed: Invalid partition name specified\n",
         RefusedError, "Invalid partition name specified"),
        (1, "", "sbatch: error: crater: no node can run it\nsbatch: error: Batch job submission "
         "failed: Unspecified error\n", RefusedError, "crater: no node can run it; Unspecified"),
        (1, "", "sbatch: error: Batch job submission failed: Unable to contact slurm controller "
         "(connect failure)\n", AwayError, "connect failure"),
        (1, "", "sbatch: error: Unable to resolve \"ctl\": Unknown host\n", AwayError, "resolve"),
        (1, "", "sbatch: error: Batch job submission failed: Socket timed out on send/recv "
         "operation\n", DoubtError, "timed out"),
        (1, "", "sbatch: error: Zero Bytes were transmitted or received\n", DoubtError, "Zero"),
        (1, "", "sudo: a password is required\n", AwayError, "sudoers line is in docs/api.md"),
        (1, "", "sudo: unable to resolve host ctl: Name or service not known\nsbatch: error: Batch "
         "job submission failed: Invalid qos specification\n", RefusedError, "Invalid qos"),
        (1, "", "sudo: unable to resolve host ctl: Name or service not known\nsbatch: error: Batch "
         "job submission failed: Socket timed out on send/recv operation\n", DoubtError, "timed"),
        (127, "", "setpriv: failed to execute sbatch: No such file or directory\n", AwayError,
         "failed to execute sbatch: No such file or directory$"),
        (-9, "", "", DoubtError, "ended with -9"),
        (137, "", "Killed\n", DoubtError, "Killed"),
        (0, "", "", DoubtError, "names no job"),
        (0, "Submitted batch job 7\n", "", DoubtError, "names no job"),
    ],
)  # fmt: skip
def test_what_sbatch_says_is_sorted(
    code: int, out: str, err: str, error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        submitter(Sbatch(code, out, err)).submit(TASK, ALICE, "ab12")


def test_an_sbatch_that_hangs_is_a_doubt_and_one_that_is_not_there_is_none() -> None:
    sbatch = Sbatch()
    sbatch.error = subprocess.TimeoutExpired("sbatch", 5)
    with pytest.raises(DoubtError, match="did not answer within 5 s"):
        submitter(sbatch).submit(TASK, ALICE, "ab12")
    sbatch.error = FileNotFoundError(2, "No such file or directory")
    with pytest.raises(AwayError, match="can't be run: No such file"):
        submitter(sbatch).submit(TASK, ALICE, "ab12")


def test_a_command_that_may_not_be_ended_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As sudo is by a service user."""
    left: list[subprocess.Popen[str]] = []

    def forbidden(process: subprocess.Popen[str]) -> None:
        left.append(process)
        raise PermissionError(1, "Operation not permitted")

    kill = subprocess.Popen.kill
    monkeypatch.setattr(subprocess.Popen, "kill", forbidden)
    how = {"seconds": 0.05, "env": {"PATH": os.environ["PATH"]}}
    with pytest.raises(subprocess.TimeoutExpired):
        run_as.run(["sleep", "600"], stdin="x" * 1_000_000, **how)
    monkeypatch.undo()
    (process,) = left
    assert process.poll() is None
    kill(process)
    process.wait()
    with pytest.raises(subprocess.TimeoutExpired):
        run_as.run(["sleep", "600"], stdin="", **how)


def test_a_cluster_s_name_behind_the_id_is_understood() -> None:
    assert submitter(Sbatch(out="12;other\n")).submit(TASK, ALICE, "ab12").job_id == 12


def test_a_task_that_can_not_be_rendered_is_refused() -> None:
    def no(task: Task) -> str:
        raise UsageError("no program is known")

    made = submitter(Sbatch())
    made._render = no
    with pytest.raises(RefusedError, match="no program is known"):
        made.submit(TASK, ALICE, "ab12")


def test_hostile_words_stay_words(tmp_path: Path) -> None:
    """Through a real process: an sbatch that prints what it was given, and runs the script."""
    program = tmp_path / "sbatch"
    program.write_text(
        '#!/bin/sh\ncat > "$0.script"\nfor w; do echo "$w"; done > "$0.words"\necho 7\n'
    )
    program.chmod(0o755)
    evil = "$(touch EVIL) `touch EVIL`; touch EVIL ' \" | & > EVIL"
    body = json.loads(llama())
    body["run_config"] = {"command": ["printf", "%s", evil]}
    me = pwd.getpwnam(getpass.getuser())
    own = Account(me.pw_name, os.geteuid(), me.pw_gid, me.pw_dir)
    made = SbatchSubmitter(
        Client(bin_dir=tmp_path),
        lambda task: render(task, Submit()).script,
        RunAs("x"),
        seconds=30,
    )
    assert made.submit(parse(json.dumps(body)), own, "ab12").job_id == 7
    script = (tmp_path / "sbatch.script").read_text()
    done = subprocess.run(["bash"], input=script, text=True, capture_output=True, cwd=tmp_path)
    assert done.stdout == evil
    assert not (tmp_path / "EVIL").exists()


class _Squeue:
    def __init__(self, text: str) -> None:
        self.text = text

    def run(self, command: str, *words: str) -> str:
        wanted = words[-1]
        mark = wanted.partition("JobID:0")[2].partition(",")[0]
        return self.text.replace("#", mark)


def test_a_job_is_found_by_its_word_and_by_no_other_s_text() -> None:
    text = (
        "9#x crater-run:ab12 crater-plan:1.a.b#\n8#crater-run:ab12#\n"
        "7#crater-run:ab123#\n6#evil\n5~x~crater-run:ab12\n#\n4#(null)#\n"
    )
    client: Any = _Squeue(text)
    assert job_search.by_comment(client, "alice", "crater-run:ab12") == [8, 9]
    with pytest.raises(SlurmError, match="is no user name"):
        job_search.by_comment(client, "--help", "x")
    with pytest.raises(SlurmError, match="can't be read"):
        job_search.by_comment(_Squeue("9#x"), "alice", "x")  # type: ignore[arg-type]


@pytest.mark.parametrize(("text", "seconds"), [("300 sec", 300), ("2 sec", 2), ("", 0)])
def test_slurmctld_s_memory_is_read(text: str, seconds: float) -> None:
    assert job_search.memory_seconds({"MinJobAge": text}) == seconds
