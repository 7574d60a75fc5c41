"""Tasks as AllData sends them, submitted by command on a real Slurm: what the job gets, and that
one task is one job whatever happens to sbatch."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers import (
    PEOPLE,
    bring_python,
    cancel,
    completed,
    crater,
    inventory,
    llama_task,
    numa_of_cpus,
    output,
    patient_lab,
    profile,
    python,
    running,
    script,
    shares,
    small_task,
    variables,
    wait_until,
)

from crater_slurm.lab import Lab
from crater_slurm.model import token

#: Prints its environment and its arguments, then waits to be let go.
HOLD = """#!/bin/bash
env > env.$SLURM_JOB_ID
printf '%s\\n' "$@" > arguments.$SLURM_JOB_ID
pwd > folder.$SLURM_JOB_ID
touch ready.$SLURM_JOB_ID
until [ -e go.$SLURM_JOB_ID ]; do sleep 0.1; done
"""


@pytest.fixture(scope="module")
def lab(lab_factory: Any, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """Two nodes that can take the source text's task, and one that can't."""
    a100 = profile("a100-pcie-40gb")
    nodes = [("a1", a100), ("a2", a100), ("l1", profile("l4-inference"))]
    file = inventory(tmp_path_factory.mktemp("tasks"), *nodes)
    made = patient_lab(lab_factory, inventory=file, cache_mib=2048)
    script(made, "hold.sh", HOLD)
    return made


@pytest.fixture(autouse=True)
def _clean(lab: Lab) -> Any:
    yield
    cancel(lab)


def send(lab: Lab, document: dict[str, Any], *words: str, **how: Any) -> Any:
    return crater(lab, "submit", "-", *words, input=json.dumps(document), **how)


def job_of(done: Any) -> int:
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert said[0].startswith("Submitted batch job "), done.stdout
    return int(said[0].split()[3])


def let_go(lab: Lab, job: int) -> None:
    (lab.home() / f"go.{job}").touch()
    completed(lab, job)


def read(lab: Lab, name: str, job: int) -> str:
    wait_until((lab.home() / f"ready.{job}").exists, f"job {job} has started its work")
    return str((lab.home() / f"{name}.{job}").read_text())


def jobs_named(lab: Lab, name: str) -> list[str]:
    done = lab.run(
        ["squeue", "--noheader", "--states=all", f"--name={name}", "--format=%i"], user="root"
    )
    return list(done.stdout.split())


def fake(lab: Lab, name: str, text: str) -> dict[str, str]:
    """A folder of Slurm's commands in which sbatch is our own; the environment that uses it."""
    folder = lab.home() / name
    folder.mkdir()
    folder.chmod(0o777)
    inside = lab.run(["pwd"], check=True).stdout.strip()
    for command in ("squeue", "scontrol", "sacct", "scancel"):
        link = f'ln -s "$(command -v {command})" {name}/{command}'
        lab.run(["sh", "-c", link], machine_side=True, check=True)
    real = lab.run(["sh", "-c", "command -v sbatch"], machine_side=True).stdout.strip()
    (folder / "sbatch").write_text(f"#!/bin/bash\ntouch {inside}/{name}/called\n{text}\n")
    (folder / "sbatch").chmod(0o755)
    return {"CRATER_SLURM__BIN_DIR": f"{inside}/{name}", "REAL_SBATCH": real}


# The source text's own task.


def test_the_source_text_s_task_gets_what_it_asks_for(lab: Lab) -> None:
    done = send(lab, llama_task("llama-1"), "--", "./hold.sh", "--lr", "a b")
    job = job_of(done)
    assert done.stdout == f"Submitted batch job {job}\n"
    assert "sbatch: crater: planned 2 GPUs, 32 cores" in done.stderr
    running(lab, job)
    record = lab.job(job)
    (share,) = shares(lab, job)
    assert share.node in ("a1", "a2")
    assert (len(share.cpus), len(share.gpus)) == (32, 2)
    assert share.counts["membw"] == 140
    assert share.counts["nviops"] == 800_000
    assert record["JobName"] == "llama-1"
    assert record["Comment"].startswith("crater-task:llama-1/")
    assert token.read_unverified(record["Comment"]) is not None
    found = variables(read(lab, "env", job))
    assert found["CRATER_GPU_IDS"] == "0,1"
    assert found["CRATER_CPU_CORES"] == "32"
    assert found["CRATER_PRECISION"] == "bf16"
    assert found["CRATER_NUMA_NODE"] == ",".join(map(str, sorted(numa_of_cpus(lab, share))))
    assert found["CRATER_CHECKPOINT_PATH"].endswith(f"/{lab.spec.name}/{job}")
    assert found["TASK_ID"] == "llama-1"
    assert found["TASK_TRAIN_DATASET"] == "s3://datasets/alpaca/train"
    assert read(lab, "arguments", job) == "--lr\na b\n"
    let_go(lab, job)


def test_a_task_without_a_program_says_what_it_was_given(lab: Lab) -> None:
    done = send(lab, llama_task("report-1"))
    assert "names no program: the job will only report" in done.stderr
    job = job_of(done)
    completed(lab, job)
    found = variables(output(lab, job))
    assert (found["CRATER_GPU_IDS"], found["TASK_ID"]) == ("0,1", "report-1")


def test_numa_strict_is_what_it_is_for_directives(lab: Lab) -> None:
    document = llama_task("strict-1", topology_awareness={"numa_binding_policy": "strict"})
    document["resource_requirements"]["cpu"]["cores"] = 8
    done = send(lab, document, "--", "./hold.sh")
    job = job_of(done)
    running(lab, job)
    (share,) = shares(lab, job)
    assert (len(share.cpus), len(share.gpus)) == (8, 2)
    assert len(numa_of_cpus(lab, share)) == 1
    let_go(lab, job)


def test_what_no_node_has_is_refused_in_the_filter_s_words(lab: Lab) -> None:
    document = llama_task("refused-1")
    document["resource_requirements"]["gpu"]["count"] = 16
    done = send(lab, document)
    assert done.returncode == 1
    assert "crater:" in done.stderr
    assert done.stdout == ""
    assert jobs_named(lab, "refused-1") == []


def test_several_nodes_get_one_task_each_with_all_that_the_job_has_there(lab: Lab) -> None:
    document = llama_task("nodes-1", scheduling_config={"nodes": 2})
    document["resource_requirements"]["cpu"]["cores"] = 8
    program = script(
        lab,
        "rank.sh",
        "#!/bin/bash\necho $SLURM_PROCID $(nproc) ${#CRATER_GPU_IDS} $MASTER_ADDR $SLURMD_NODENAME"
        " > rank.$SLURM_JOB_ID.$SLURM_PROCID\n",
    )
    done = send(lab, document, "--", f"./{program}")
    job = job_of(done)
    completed(lab, job)
    ranks = [(lab.home() / f"rank.{job}.{n}").read_text().split() for n in (0, 1)]
    assert [r[0] for r in ranks] == ["0", "1"]
    assert [r[2] for r in ranks] == ["3", "3"]  # "0,1"
    assert {r[4] for r in ranks} == {"a1", "a2"}
    assert [r[3] for r in ranks] == ["a1", "a1"]


def test_a_folder_with_a_space_is_the_job_s(lab: Lab) -> None:
    folder = lab.home() / "run 1"
    folder.mkdir()
    folder.chmod(0o777)
    inside = lab.run(["pwd"], check=True).stdout.strip()
    run = {"command": ["pwd"], "working_directory": f"{inside}/run 1", "output": "out %j.txt"}
    job = job_of(send(lab, small_task("space-1", run_config=run)))
    completed(lab, job)
    assert (folder / f"out {job}.txt").read_text().endswith("/run 1\n")


# One task is one job.


def test_the_same_task_again_is_the_same_job(lab: Lab) -> None:
    first = send(lab, small_task("same-1", "sleep", "600"))
    again = send(lab, small_task("same-1", "sleep", "600"), "--json")
    told = json.loads(again.stdout)
    assert (told["job_id"], told["fresh"]) == (job_of(first), False)
    assert "was submitted before" in again.stderr
    assert len(jobs_named(lab, "same-1")) == 1
    other = send(lab, small_task("same-1", "sleep", "601"))
    assert other.returncode == 7
    assert "with another content" in other.stderr


def test_the_job_is_found_by_slurm_alone(lab: Lab) -> None:
    """From another login node there is no memory of the first submission."""
    job = job_of(send(lab, small_task("same-2", "sleep", "600")))
    elsewhere = {"XDG_STATE_HOME": "/tmp/elsewhere"}
    assert job_of(send(lab, small_task("same-2", "sleep", "600"), environment=elsewhere)) == job


def test_another_user_s_job_of_that_name_is_not_ours(lab: Lab) -> None:
    document = small_task("theirs-1", "sleep", "600")
    made = send(lab, document)
    comment = lab.job(job_of(made))["Comment"].split()[0]
    forged = lab.run(
        ["sbatch", "--parsable", f"--comment={comment}", "--wrap", "sleep 600"], user="bob"
    )
    assert forged.returncode == 0
    lab.run(["scancel", str(job_of(made))])
    environment = {"XDG_STATE_HOME": "/tmp/elsewhere-2"}
    bobs = send(lab, document, user="bob", environment=environment)
    assert job_of(bobs) == int(forged.stdout)
    assert job_of(send(lab, document, environment=environment)) == job_of(made)


def test_an_sbatch_that_submits_and_hangs_is_not_sent_twice(lab: Lab) -> None:
    environment = fake(lab, "hangs", '"$REAL_SBATCH" "$@" >/dev/null; sleep 600')
    done = send(
        lab, small_task("hangs-1", "sleep", "600"), "--timeout", "5", environment=environment
    )
    job = job_of(done)
    assert (lab.home() / "hangs" / "called").exists()
    assert jobs_named(lab, "hangs-1") == [str(job)]


def test_an_sbatch_that_hangs_before_it_submits_leaves_a_doubt(lab: Lab) -> None:
    environment = fake(lab, "hangs-early", "sleep 600")
    environment["CRATER_SUBMIT__SEARCH_SECONDS"] = "1"
    document = small_task("hangs-2", "sleep", "600")
    done = send(lab, document, "--timeout", "1", environment=environment)
    assert done.returncode == 8
    assert "it is not sent twice" in done.stderr
    soon = send(lab, document)
    assert soon.returncode == 8
    assert "may still be on its way" in soon.stderr
    assert jobs_named(lab, "hangs-2") == []
    late = send(lab, document, environment={"CRATER_SUBMIT__SETTLE_SECONDS": "0"})
    assert jobs_named(lab, "hangs-2") == [str(job_of(late))]


def test_two_submissions_at_a_time_make_one_job(lab: Lab) -> None:
    """They are started together in the lab and wait for each other."""
    (lab.home() / "both.json").write_text(json.dumps(small_task("both-1", "sleep", "600")))
    program = Path(sys.executable).resolve().relative_to(Path(sys.base_prefix).resolve())
    one = f"{PEOPLE}/python/{program} -m crater_slurm.cli submit both.json"
    done = crater_shell(lab, f"{one} > 1.out & {one} > 2.out & {one} > 3.out & wait")
    assert done.returncode == 0, done.stderr
    said = {(lab.home() / f"{n}.out").read_text() for n in (1, 2, 3)}
    (number,) = jobs_named(lab, "both-1")
    assert said == {f"Submitted batch job {number}\n"}


def crater_shell(lab: Lab, text: str) -> Any:
    """A shell in the lab that can run crater; through Python, which brings its environment."""
    code = (
        "import subprocess, sys; sys.exit(subprocess.run(['bash', '-c', sys.argv[1]]).returncode)"
    )
    return python(lab, "-c", code, text)


# From inside a job, and waiting.


def test_nothing_of_an_enclosing_job_is_passed_on(lab: Lab) -> None:
    inherited = {
        "SLURM_CPU_BIND": "map_cpu:0",
        "SLURM_CPU_BIND_TYPE": "map_cpu:",
        "SLURM_NTASKS": "7",
        "SLURM_JOB_ID": "1",
        "SLURM_EXPORT_ENV": "NONE",
        "SBATCH_PARTITION": "nosuch",
        "SBATCH_ARRAY_INX": "1-5",
        "PMIX_RANK": "3",
        "PMI_SIZE": "2",
    }
    job = job_of(send(lab, small_task("clean-1", "bash", "hold.sh"), environment=inherited))
    found = variables(read(lab, "env", job))
    assert found["SLURM_JOB_ID"] == str(job)
    assert not found.keys() & {"SLURM_CPU_BIND", "SBATCH_PARTITION", "PMIX_RANK", "PMI_SIZE"}
    assert found.get("SLURM_NTASKS", "1") == "1"
    assert "SLURM_CONF" in found
    let_go(lab, job)


@pytest.mark.parametrize(
    ("command", "status", "told"),
    [
        ("exit 0", 0, "COMPLETED, exit code 0"),
        ("exit 3", 3, "FAILED, exit code 3"),
        ("kill -KILL $$", 137, "FAILED, exit code"),
    ],
)
def test_wait_ends_as_the_job_does(lab: Lab, command: str, status: int, told: str) -> None:
    name = f"wait-{status}"
    done = send(lab, small_task(name, "bash", "-c", command), "--wait")
    assert done.returncode == status, done.stderr
    number = done.stdout.split()[-1]
    assert f"crater: job {number}: {told}" in done.stderr


def test_wait_says_how_it_ended_as_json(lab: Lab) -> None:
    done = send(lab, small_task("wait-json", "bash", "-c", "exit 4"), "--wait", "--json")
    told = json.loads(done.stdout)
    assert (done.returncode, told["state"], told["exit_code"], told["status"]) == (
        4,
        "FAILED",
        4,
        4,
    )


@pytest.mark.parametrize(
    ("option", "state", "said"),
    [
        ("--cancel-on-signal", "CANCELLED", "cancelled, because of SIGTERM"),
        ("", "RUNNING", "goes on"),
    ],
)
def test_sigterm_cancels_the_job_if_asked(lab: Lab, option: str, state: str, said: str) -> None:
    name = f"term-{state}"
    (lab.home() / f"{name}.json").write_text(json.dumps(small_task(name, "bash", "hold.sh")))
    program = Path(sys.executable).resolve().relative_to(Path(sys.base_prefix).resolve())
    line = (
        f"{PEOPLE}/python/{program} -m crater_slurm.cli submit {name}.json --wait {option} "
        f"2> {name}.err & until grep -q RUNNING {name}.err; do sleep 0.1; done; "
        "kill -TERM $!; wait $!; echo status=$?"
    )
    done = crater_shell(lab, line)
    assert "status=143" in done.stdout, done.stdout + done.stderr
    assert said in (lab.home() / f"{name}.err").read_text()
    (number,) = jobs_named(lab, name)
    assert lab.job(number)["JobState"] == state


# What is sbatch's stays sbatch's.


def test_an_sbatch_line_is_passed_through(lab: Lab) -> None:
    script(lab, "plain.sh", '#!/bin/bash\n#CRATER cpus=1\necho "$1|$2"\n')
    done = crater(lab, "submit", "--job-name", "plain", "plain.sh", "a b", "--json")
    job = job_of(done)
    completed(lab, job)
    assert lab.job(job)["JobName"] == "plain"
    assert output(lab, job) == "a b|--json\n"


def test_sbatch_s_options_win_over_the_task_s(lab: Lab) -> None:
    words = ("--job-name=other", "--comment", "mine", "-n", "2", "--hold", "--parsable")
    done = send(lab, llama_task("options-1"), *words)
    assert done.returncode == 0, done.stderr
    record = lab.job(int(done.stdout))
    assert record["JobName"] == "other"
    assert " mine crater-plan:" in record["Comment"]
    assert record["NumTasks"] == "2"


def test_test_only_submits_nothing(lab: Lab) -> None:
    done = send(lab, llama_task("only-1"), "--test-only")
    assert done.returncode == 0, done.stderr
    assert "crater: planned 2 GPUs, 32 cores" in done.stderr
    assert jobs_named(lab, "only-1") == []


def test_slurm_alone_gives_gpus_and_cores_too(lab_factory: Any) -> None:
    """Where crater's filter is absent or only observes."""
    alone = lab_factory(inventory="a100-pcie", crater=False)
    bring_python(alone)
    document = llama_task("alone-1")
    document["resource_requirements"]["cpu"]["cores"] = 8
    script(alone, "hold.sh", HOLD)
    observes = {"CRATER_FILTER__MODE": "observe"}
    job = job_of(send(alone, document, "--", "./hold.sh", environment=observes))
    running(alone, job)
    (share,) = shares(alone, job)
    assert (len(share.cpus), len(share.gpus)) == (8, 2)
    cancel(alone, job)
