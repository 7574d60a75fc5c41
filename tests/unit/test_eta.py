"""crater eta: Slurm's estimate in words, why there is none, and what becomes of max-wait."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from queue_samples import NOW, array, queued

from crater_slurm.cli import eta
from crater_slurm.cli.main import crater
from crater_slurm.errors import UnavailableError
from crater_slurm.model import token
from crater_slurm.model.plan import Plan
from crater_slurm.scheduler import client as scheduler
from crater_slurm.slurm import estimates


def told(promise: float | None = None, waited: float = 60, **fields: Any) -> list[str]:
    """Lines about a job that has waited so long, with dates cut out."""
    now = NOW + waited
    text = list(eta.lines(eta.describe(queued(**fields), promise, now), now))
    return [re.sub(r"\d{4}-\d\d-\d\d [\d:]{8}[+-][\d:]{5}", "T", line) for line in text]


def test_an_estimate_and_a_promise_that_it_keeps() -> None:
    assert told(3600, start=NOW + 1800) == [
        "Job 7: expected start T, in 29 min",
        "  waits since T; Slurm's reason: Priority",
        "  max-wait=1 h would be kept, 30 min to spare: nothing will be done for it",
    ]


def test_a_promise_that_would_be_broken_is_broken_or_has_no_forecast() -> None:
    assert told(600, start=NOW + 1800)[-1] == "  max-wait=10 min would be broken: 20 min too late"
    assert told(600, waited=700)[-1] == "  max-wait=10 min is broken, since T"
    assert told(600)[-1] == "  max-wait=10 min runs out at T"
    assert told(600, eligible=None, reason="JobHeldUser")[-1] == (
        "  max-wait=10 min does not run yet: the job is not in line"
    )


def test_a_job_that_runs() -> None:
    running = {"state": "RUNNING", "start": NOW + 500, "reason": "None"}
    assert told(600, waited=9000, **running) == [
        "Job 7 is RUNNING, since T",
        "  max-wait=10 min was kept",
    ]
    assert told(400, waited=9000, **running)[-1] == "  max-wait=6 min 40 s was broken"


def test_the_record_for_programs() -> None:
    found = eta.describe(array(5, "1-3", start=NOW + 1800), 3600, NOW + 60)
    assert found == {
        "job": "5_[1-3]",
        "state": "PENDING",
        "reason": "Priority",
        "eligible": NOW,
        "start": NOW + 1800,
        "wait_seconds": 1740,
        "why_unknown": "",
        "max_wait_seconds": 3600,
        "breaks_at": NOW + 3600,
        "kept": True,
    }


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "Slurm's backfill has not looked at it yet"),
        ({"start": NOW + 500 * 86400}, "jobs ahead of it have no time limit"),
        ({"start": NOW - 5}, "Slurm's last estimate has passed"),
        ({"reason": "JobHeldUser"}, "its user holds it"),
        ({"reason": "Dependency"}, "it waits for another job"),
        ({"reason": "QOSMaxJobsPerUserLimit"}, "a limit of its account or QOS holds it back (QOSM"),
        ({"reason": "AssocGrpGRES"}, "a limit of its account or QOS"),
        ({"reason": "ReqNodeNotAvail, UnavailableNodes:a1"}, "nodes that it needs are not avail"),
        ({"reason": "PartitionTimeLimit"}, "its time limit is longer than its partition's"),
    ],
)
def test_why_there_is_no_estimate(fields: dict[str, Any], words: str) -> None:
    found = eta.describe(queued(**fields), None, NOW)
    assert (found["start"], found["wait_seconds"], found["kept"]) == (None, None, None)
    assert found["why_unknown"].startswith(words)
    assert told(waited=0, **fields)[0].startswith(f"Job 7: no expected start: {words}")


@pytest.mark.parametrize(
    ("line", "start"),
    [
        (
            "Job 9 to start at 1795997614 using 32 processors on nodes a1 in partition gpu",
            1795997614,
        ),
        (
            "Job 9 to start at 1795997623 a using 32 processors on nodes a1 in partition gpu",
            1795997623,
        ),
        ("Job 9 to start at 2026-11-29T23:50:16 using 32 processors", None),
        ("crater: planned 1 GPU; 3 of 3 nodes can run it", None),
    ],
    ids=["22.05 and 24.11", "26.05", "no seconds", "crater's line"],
)
def test_what_sbatch_says_of_a_script(line: str, start: float | None) -> None:
    assert estimates.from_test_only(["crater: planned 1 GPU", line]) == start


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0, "0 s"), (59.4, "59 s"), (3600, "1 h"), (3661, "1 h 1 min"), (90_061, "1 d 1 h")],
)
def test_durations(seconds: float, words: str) -> None:
    assert eta._duration(seconds) == words


# The command

SQUEUE = """#!/bin/sh
for word; do last=$word; done
now=$(date +%s)
for field in 7 7 7 1000 PENDING Resources gpu 100 0 '(null)' $((now - 60)) $((now - 60)) \
    $((now + 600)) '' '{comment}'; do printf '%s%s' "$field" "${{last##*:0}}"; done
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Settings that find stand-ins of Slurm's commands, and a scheduler that knows plan p1."""
    settings = tmp_path / "crater.yaml"
    settings.write_text(f"slurm: {{bin_dir: {tmp_path}}}\n")
    monkeypatch.setenv("CRATER_CONFIG", str(settings))

    def decision(url: str, key: str, timeout_seconds: float = 10) -> Any:
        if key != "p1" and not key.startswith("check-"):
            raise UnavailableError("crater-scheduler does not answer")
        return {"decision": {"request": {"gpus": 1, "max_wait_seconds": 300}}}

    monkeypatch.setattr(scheduler, "decision", decision)
    return tmp_path


def command(site: Path, name: str, text: str) -> None:
    (site / name).write_text(text)
    (site / name).chmod(0o755)


def signed(plan: str) -> str:
    return token.sign(token.SignedPlan(Plan(id=plan), 1000, "hpc", 1), b"k" * 32)


def test_eta_of_a_job(site: Path) -> None:
    command(site, "squeue", SQUEUE.format(comment=f"mine {signed('p1')}"))
    (entry,) = json.loads(CliRunner().invoke(crater, ["eta", "7", "--json"]).output)["jobs"]
    assert (entry["job"], entry["max_wait_seconds"], entry["kept"]) == ("7", 300, False)
    assert 598 <= entry["wait_seconds"] <= 600
    told = CliRunner().invoke(crater, ["eta", "7"]).output
    assert "max-wait=5 min would be broken: " in told


def test_eta_without_the_scheduler_is_slurm_s_estimate_alone(site: Path) -> None:
    command(site, "squeue", SQUEUE.format(comment=signed("p9")))
    done = CliRunner().invoke(crater, ["eta", "7"])
    assert done.exit_code == 0
    assert done.output.startswith("Job 7: expected start ")
    assert "its max-wait is not known: crater-scheduler does not answer" in done.output


def test_eta_of_a_script_submits_nothing(site: Path) -> None:
    script = site / "my job.sh"
    script.write_text("#!/bin/sh\n")
    body = (
        f'#!/bin/sh\nprintf "%s\\n" "$@" "$SLURM_TIME_FORMAT" > {site}/seen\n'
        'echo "sbatch: Job 9 to start at $(($(date +%s) + 60)) a using 1 processors" >&2\n'
    )
    command(site, "sbatch", body)
    done = CliRunner().invoke(crater, ["eta", str(script), "-p", "gpu", "--json"])
    (entry,) = json.loads(done.output)["jobs"]
    assert (entry["job"], entry["script"], entry["kept"]) == (None, str(script), True)
    assert (site / "seen").read_text().split("\n")[:-1] == [
        *("--test-only", "-p", "gpu", str(script), "%s")
    ]
    told = CliRunner().invoke(crater, ["eta", str(script)]).output
    assert told.startswith(f"{script}: expected start ")


def test_eta_of_what_slurm_refuses_or_nobody_has(site: Path) -> None:
    script = site / "job.sh"
    script.write_text("#!/bin/sh\n")
    command(site, "sbatch", "#!/bin/sh\necho 'sbatch: error: invalid partition' >&2; exit 1\n")
    done = CliRunner().invoke(crater, ["eta", str(script)])
    assert (done.exit_code, done.stderr) == (4, "crater: ERROR: invalid partition\n")
    command(site, "squeue", "#!/bin/sh\necho 'slurm_load_jobs error: Invalid job id' >&2; exit 1\n")
    assert CliRunner().invoke(crater, ["eta", "99"]).exit_code == 4
    command(site, "squeue", "#!/bin/sh\n")
    done = CliRunner().invoke(crater, ["eta", "99"])
    assert (done.exit_code, "no longer has job 99" in done.stderr) == (4, True)
    assert CliRunner().invoke(crater, ["eta", "nothing.sh"]).exit_code == 2
