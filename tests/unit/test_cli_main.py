"""``crater``: errors as words and codes, help, settings, and explain and check against stand-ins."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from crater_slurm import __version__, errors
from crater_slurm.cli import main as cli
from crater_slurm.cli.main import COMMANDS, crater
from crater_slurm.model import token
from crater_slurm.model.plan import Plan
from crater_slurm.scheduler import client as scheduler
from crater_slurm.slurm.environment import clean_environment


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs ``crater`` with an empty settings file, and says what it printed where."""
    settings = tmp_path / "crater.yaml"
    settings.write_text("")
    monkeypatch.setenv("CRATER_CONFIG", str(settings))

    def invoke(*words: str) -> Any:
        return CliRunner().invoke(crater, words)

    return invoke


def raising(error: BaseException) -> click.Command:
    @click.command()
    def broken() -> None:
        raise error

    return broken


CODES = {
    errors.CraterError: 1,
    errors.UsageError: 2,
    errors.ConfigError: 2,
    errors.StoreError: 3,
    errors.SlurmError: 4,
    errors.UnavailableError: 5,
    errors.LabError: 6,
}


@pytest.mark.parametrize("kind", CODES, ids=lambda k: k.__name__)
def test_an_error_is_a_sentence_on_stderr_and_the_code_of_its_class(
    run: Any, monkeypatch: pytest.MonkeyPatch, kind: type[errors.CraterError]
) -> None:
    broken = raising(kind("the file a is not there; make it"))
    monkeypatch.setattr(cli.LazyGroup, "get_command", lambda *_: broken)
    done = run("nodes")
    assert done.exit_code == CODES[kind]
    assert done.stderr == "crater: ERROR: the file a is not there; make it\n"
    assert done.stdout == ""


def test_each_line_of_an_error_says_whose_it_is(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = raising(errors.UsageError("line 2: a\nline 3: b"))
    monkeypatch.setattr(cli.LazyGroup, "get_command", lambda *_: broken)
    assert run("nodes").stderr == "crater: ERROR: line 2: a\ncrater: ERROR: line 3: b\n"


def test_an_error_without_words_has_its_name(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli.LazyGroup, "get_command", lambda *_: raising(errors.StoreError("")))
    assert run("nodes").stderr == "crater: ERROR: StoreError\n"


def test_a_reader_that_went_away_is_no_error_of_ours(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli.LazyGroup, "get_command", lambda *_: raising(BrokenPipeError()))
    done = run("nodes")
    assert done.exit_code in (1, 141)  # click itself answers 1 where it sees the pipe first
    assert "Traceback" not in done.output


def test_help_lists_every_command_with_its_line(run: Any) -> None:
    done = run("--help")
    assert done.exit_code == 0
    for name, (_, line) in COMMANDS.items():
        assert f"  {name} " in done.output
        assert line in done.output


def test_the_version_is_told(run: Any) -> None:
    assert run("--version").output == f"crater, version {__version__}\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_can_be_loaded_and_says_what_it_does(run: Any, name: str) -> None:
    done = run(name, "--help")
    assert done.exit_code == 0
    assert f"Usage: crater {name}" in done.output


@pytest.mark.parametrize(("word", "meant"), [("node", "nodes"), ("explian", "explain")])
def test_a_mistyped_command_is_met_with_the_nearest(run: Any, word: str, meant: str) -> None:
    done = run(word)
    assert done.exit_code == 2
    assert f"there is no command '{word}'; did you mean {meant}?" in done.stderr


def test_a_word_like_none_of_them_is_said_to_be_no_command(run: Any) -> None:
    done = run("zzz")
    assert done.exit_code == 2
    assert "there is no command 'zzz'\n" in done.stderr


def test_a_real_process_exits_with_the_code_too(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "crater_slurm.cli",
            "--config",
            str(tmp_path / "no.yaml"),
            "config",
            "show",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("crater: ERROR: can't read the settings file")


def test_config_show_prints_every_value_and_where_it_comes_from(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "crater.yaml").write_text("filter: {mode: advise}")
    monkeypatch.setenv("CRATER_SLURM__TIMEOUT_SECONDS", "3")
    lines = run("config", "show").output.splitlines()
    assert f'filter.mode = "advise"    [{tmp_path / "crater.yaml"}]' in lines
    assert "slurm.timeout_seconds = 3.0    [$CRATER_SLURM__TIMEOUT_SECONDS]" in lines
    assert "scheduler.refresh_seconds = 30.0" in lines
    assert "    observe logs, advise" in run("config", "show", "--describe").output
    shown = json.loads(run("config", "show", "--json").output)
    assert shown["filter"]["mode"] == "advise"


def test_config_sample_is_the_file_to_copy(run: Any) -> None:
    from crater_slurm.config.sample import sample

    assert run("config", "sample").output == sample()


# --- explain and check -------------------------------------------------------------------------

DECISION = {
    "id": "p1",
    "verdict": "planned",
    "mode": "enforce",
    "time": 1_700_000_000.0,
    "request": {"gpus": 2},
    "plan": {"id": "p1", "gpus": 2, "numa": "strict", "domains": 1},
}
PLAN = token.sign(
    token.SignedPlan(Plan(id="p1", gpus=2, numa="strict", domains=1), 1000, "hpc", 1), b"k" * 32
)


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the scheduler answers, by key; anything else is not found. ``*`` answers every key."""
    known: dict[str, Any] = {"p1": {"decision": DECISION, "grants": []}}

    def decision(url: str, key: str, timeout_seconds: float = 10) -> Any:
        found = known.get(key, known.get("*"))
        if isinstance(found, Exception):
            raise found
        if found is None:
            raise scheduler.NotFoundError(f"there is no decision {key}")
        return found

    monkeypatch.setattr(scheduler, "decision", decision)
    return known


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts a stand-in of a Slurm command where the settings find it."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("CRATER_SLURM__BIN_DIR", str(folder))

    def command(name: str, body: str) -> None:
        file = folder / name
        file.write_text(f"#!/bin/sh\n{body}\n")
        file.chmod(0o755)

    return command


def test_a_plan_is_explained_by_its_id(run: Any, answers: dict[str, Any]) -> None:
    done = run("explain", "p1")
    assert done.exit_code == 0
    assert done.output.startswith("Plan p1: planned (enforce), ")
    assert "  asked    gpus=2" in done.output


def test_a_plan_that_nobody_knows_is_an_error(run: Any, answers: dict[str, Any]) -> None:
    done = run("explain", "p9")
    assert done.exit_code == 1
    assert done.stderr == "crater: ERROR: there is no decision p9\n"


def test_a_job_is_explained_by_the_plan_in_its_comment(
    run: Any, answers: dict[str, Any], slurm: Any
) -> None:
    slurm("scontrol", f'echo "JobId=7 JobName=t JobState=PENDING Reason=Resources Comment={PLAN}"')
    done = run("explain", "7")
    assert done.output.startswith(
        "Job 7 (t) is PENDING; Slurm's reason: Resources\nPlan p1: planned"
    )


def test_a_job_without_a_plan_is_explained_as_such(
    run: Any, answers: dict[str, Any], slurm: Any
) -> None:
    slurm("scontrol", 'echo "JobId=7 JobName=t JobState=RUNNING Reason=None NodeList=n1"')
    done = run("explain", "7")
    assert done.output.splitlines() == [
        "Job 7 (t) is RUNNING; on n1",
        "",
        "this job has no crater plan: it had no directives, or mode=off",
    ]


def test_without_the_scheduler_the_plan_in_the_comment_is_still_told(
    run: Any, answers: dict[str, Any], slurm: Any
) -> None:
    answers["p1"] = errors.UnavailableError("crater-scheduler does not answer")
    slurm("scontrol", f'echo "JobId=7 JobName=t JobState=RUNNING Reason=None Comment={PLAN}"')
    done = run("explain", "7")
    assert done.exit_code == 0
    assert "Plan, per node: 2 GPUs, on 1 NUMA node, numa=strict" in done.output
    assert "only the plan in the job's comment is known: crater-scheduler does not" in done.output


def test_a_job_that_slurm_does_not_know_is_slurm_s_error(run: Any, slurm: Any) -> None:
    slurm("scontrol", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    done = run("explain", "7")
    assert done.exit_code == 4
    assert "Invalid job id specified" in done.stderr


def test_json_has_the_whole_record(run: Any, answers: dict[str, Any]) -> None:
    document = json.loads(run("explain", "p1", "--json").output)
    assert document == {
        "decision": DECISION,
        "grants": [],
        "observations": [],
        "actions": [],
        "job": {},
        "notes": [],
    }


@pytest.fixture
def script(tmp_path: Path) -> Path:
    file = tmp_path / "job with spaces.sh"
    file.write_text("#!/bin/sh\n#CRATER gpus=2\n")
    return file


def test_check_lets_slurm_read_script_and_options_without_submitting(
    run: Any, answers: dict[str, Any], slurm: Any, script: Path, tmp_path: Path
) -> None:
    slurm(
        "sbatch",
        f'printf "%s\\n" "$@" "$CRATER_CHECK" > {tmp_path}/seen; echo "sbatch: Job 1 to start" >&2',
    )
    answers["*"] = answers["p1"]
    done = run("check", str(script), "-p", "gpu", "--gres=gpu:4")
    assert done.exit_code == 0
    assert "Plan p1: planned" in done.output
    assert "Slurm: Job 1 to start" in done.output
    *words, nonce = (tmp_path / "seen").read_text().splitlines()
    assert words == ["--test-only", "-p", "gpu", "--gres=gpu:4", str(script)]
    assert nonce.startswith("check-")


def test_check_exits_1_when_the_job_would_be_refused(
    run: Any, answers: dict[str, Any], slurm: Any, script: Path
) -> None:
    slurm("sbatch", "exit 1")
    refused = DECISION | {"verdict": "refused", "plan": None, "smallest_change": ["cpus=16"]}
    answers["*"] = {"decision": refused, "grants": []}
    done = run("check", str(script))
    assert done.exit_code == 1
    assert "It would fit with cpus=16" in done.output


def test_check_of_a_script_without_directives_says_so(
    run: Any, answers: dict[str, Any], slurm: Any, script: Path
) -> None:
    slurm("sbatch", "echo 'sbatch: Job 1 to start' >&2")
    done = run("check", str(script))
    assert done.exit_code == 0
    assert "crater made no decision: the script has no directives" in done.output


def test_check_of_what_slurm_itself_refuses_is_slurm_s_error(
    run: Any, answers: dict[str, Any], slurm: Any, script: Path
) -> None:
    slurm("sbatch", "echo 'sbatch: error: invalid partition specified: none' >&2; exit 1")
    done = run("check", str(script), "-p", "none")
    assert done.exit_code == 4
    assert "invalid partition specified: none" in done.stderr


def test_check_of_no_script_and_without_sbatch_are_errors_in_words(
    run: Any, slurm: Any, script: Path
) -> None:
    assert "there is no script" in run("check", "none.sh").stderr
    done = run("check", str(script))
    assert done.exit_code == 4
    assert "sbatch' is not there; install Slurm's client commands" in done.stderr


def test_what_an_enclosing_job_left_is_no_option_of_the_next() -> None:
    environment = {
        "SLURM_JOB_ID": "1",
        "SLURM_CPU_BIND": "map_cpu:0",
        "SBATCH_PARTITION": "x",
        "SRUN_CPUS_PER_TASK": "1",
        "PMIX_RANK": "0",
        "PMI_SIZE": "2",
        "SLURM_CONF": "/etc/slurm/slurm.conf",
        "PATH": "/bin",
        "CRATER_CHECK": "x",
    }
    assert clean_environment(environment) == {
        "SLURM_CONF": "/etc/slurm/slurm.conf",
        "PATH": "/bin",
        "CRATER_CHECK": "x",
    }


def test_crater_submit_becomes_sbatch(tmp_path: Path) -> None:
    file = tmp_path / "sbatch"
    file.write_text('#!/bin/sh\necho "$# $1 $SLURM_JOB_ID."; exit 7\n')
    file.chmod(0o755)
    code = "import sys; from crater_slurm.cli.submit import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", code, "my job.sh", "--wait"],
        env=os.environ | {"PATH": str(tmp_path), "SLURM_JOB_ID": "9"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (7, "2 my job.sh .\n")


def test_crater_submit_without_sbatch_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from crater_slurm.cli.submit import main

    monkeypatch.setenv("PATH", "/nonexistent")
    assert main(["job.sh"]) == 4
    assert capsys.readouterr().err.startswith("crater-submit: ERROR: can't run sbatch")
