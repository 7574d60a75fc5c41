"""Tasks as batch scripts: golden ones, and values that a shell must never get to interpret."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from task_documents import CASES, llama, put

from crater_slurm.alldata import quoting, templates
from crater_slurm.alldata.batch import program_of, render
from crater_slurm.alldata.request import request_of
from crater_slurm.alldata.task import parse
from crater_slurm.cli.main import crater
from crater_slurm.config.submit import Submit
from crater_slurm.errors import UsageError
from crater_slurm.model.directives import parse_script
from crater_slurm.model.request import TASKS

VALID = sorted((CASES / "valid").glob("*.json"))
NOWHERE = Submit(templates=Path("/nonexistent"))
HOSTILE = (
    *("$(touch owned)", "`touch owned`", "'; touch owned; '", '"; touch owned; "', "a b", "*"),
    *("\\", "'", '"', "''", "!!", "~", "-rf", "--", "#x", "a=b", "$HOME", "${IFS}", "{a,b}"),
    *("&& touch owned", "| touch owned", "> owned", "数据", "é", "%s%n", "{{ 7*7 }}", "{% raw %}"),
)


def script_of(document: Any, site: Submit = NOWHERE, **how: Any) -> str:
    return render(parse(json.dumps(document)), site, **how).script


def with_program(*command: str, **blocks: Any) -> dict[str, Any]:
    return llama() | {"run_config": {"command": list(command)}} | blocks


@pytest.mark.parametrize("case", VALID, ids=lambda p: p.stem)
def test_a_task_becomes_this_script(case: Path) -> None:
    expected = (CASES / "expected" / f"valid-{case.stem}.sh").read_text()
    assert render(parse(case.read_bytes()), NOWHERE).script == expected


@pytest.mark.parametrize("case", VALID, ids=lambda p: p.stem)
def test_the_script_asks_for_what_the_task_asks_for(case: Path) -> None:
    task = parse(case.read_bytes())
    found = parse_script(render(task, NOWHERE).script)
    assert found.request == request_of(task)
    assert not found.notes


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="no shellcheck")
@pytest.mark.parametrize("case", sorted((CASES / "expected").glob("*.sh")), ids=lambda p: p.stem)
def test_bash_and_shellcheck_find_nothing_wrong(case: Path) -> None:
    subprocess.run(["bash", "-n", str(case)], check=True)
    subprocess.run(["shellcheck", "--severity=warning", str(case)], check=True)


# What arrives, by running the scripts with stand-ins for everything that they call.

_STAND_IN = """#!/bin/bash
for word in "$0" "$@"; do printf '%s\\0' "$word"; done >> "$ARRIVED"
case ${0##*/} in
    scontrol) echo node-1; echo node-2 ;;
esac
"""


def run(folder: Path, script: str, *stand_ins: str, **variables: str) -> list[list[str]]:
    """Run a script; the words that each stand-in was called with, its name first."""
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    for name in stand_ins:
        (programs / name).write_text(_STAND_IN)
        (programs / name).chmod(0o755)
    arrived = folder / "arrived"
    arrived.write_bytes(b"")
    environment = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "ARRIVED": str(arrived),
        "SLURM_JOB_ID": "123456",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_NODELIST": "node-[1-2]",
        "SLURM_CPUS_ON_NODE": "16",
        "HOME": str(folder),
    } | variables
    done = subprocess.run(
        ["bash"], input=script.encode(), env=environment, cwd=folder, capture_output=True
    )
    assert done.returncode == 0, done.stderr.decode()
    assert not (folder / "owned").exists()
    calls: list[list[str]] = []
    for word in arrived.read_bytes().decode().split("\0")[:-1]:
        if word.startswith(f"{programs}/"):
            calls.append([Path(word).name])
        else:
            calls[-1].append(word)
    return calls


def test_arguments_arrive_byte_for_byte(tmp_path: Path) -> None:
    script = script_of(with_program("program", *HOSTILE, ""))
    assert run(tmp_path, script, "program") == [["program", *HOSTILE, ""]]


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(
    st.lists(
        st.text(
            st.sampled_from("'\"\\$`!#;&|<>(){}[]*?~ =%-") | st.characters(codec="utf-8"),
            max_size=30,
        ).filter(lambda word: word.isprintable()),
        max_size=8,
    )
)
def test_any_arguments_arrive_byte_for_byte(
    tmp_path_factory: pytest.TempPathFactory, words: list[str]
) -> None:
    folder = tmp_path_factory.mktemp("run")
    script = script_of(with_program("program", *words))
    assert run(folder, script, "program") == [["program", *words]]


@pytest.mark.parametrize("task_type", TASKS)
def test_variables_hold_what_the_task_says(tmp_path: Path, task_type: str) -> None:
    train, val = "/data/" + "".join(HOSTILE), " ".join(HOSTILE)
    document = with_program("env", task_type=task_type)
    document["data_config"] |= {"train_dataset": train, "val_dataset": val}
    document["model_config"]["name"] = "m'$(touch owned)`touch owned`\\"
    document["training_config"] = {"lora_rank": 8, "lora_alpha": 16, "stage": "sft"}
    script = script_of(document).replace("exec -- ", "export ARRIVED; exec -- ")
    file = tmp_path / "script"
    file.write_text(script)
    done = subprocess.run(
        ["bash", str(file)],
        env={"PATH": os.environ["PATH"], "SLURM_CPUS_ON_NODE": "4"},
        cwd=tmp_path,
        capture_output=True,
        check=True,
    )
    found = dict(line.split("=", 1) for line in done.stdout.decode().splitlines() if "=" in line)
    assert found["TASK_TRAIN_DATASET"] == train
    assert found["TASK_VAL_DATASET"] == val
    assert found["TASK_MODEL"] == "m'$(touch owned)`touch owned`\\"
    assert (found["TASK_LORA_RANK"], found["TASK_LORA_ALPHA"]) == ("8", "16")
    assert found["TASK_TYPE"] == task_type
    assert not (tmp_path / "owned").exists()


def test_words_that_mean_something_to_a_shell_are_programs(tmp_path: Path) -> None:
    """exec runs programs alone, and an assignment is none."""
    for word in ("eval", "if", "A=b", "exit"):
        assert run(tmp_path, script_of(with_program(word, "x")), word) == [[word, "x"]]


def test_one_gpu_needs_no_launcher(tmp_path: Path) -> None:
    document = put(llama(), ("resource_requirements", "gpu", "count"), 1)
    script = script_of(document, words=("train.py", "--lr", "1e-4"))
    assert run(tmp_path, script, "python3", "torchrun") == [["python3", "train.py", "--lr", "1e-4"]]


def test_several_gpus_get_a_process_each(tmp_path: Path) -> None:
    script = script_of(llama(), words=("train.py", "a b"))
    assert run(tmp_path, script, "python3", "torchrun") == [
        ["torchrun", "--standalone", "--nproc-per-node=2", "train.py", "a b"]
    ]


def test_several_nodes_get_a_task_each(tmp_path: Path) -> None:
    document = llama() | {"scheduling_config": {"nodes": 2}}
    script = script_of(document, words=("train.py",))
    (asked, (srun, *words)) = run(tmp_path, script, "srun", "scontrol", "torchrun")
    assert asked == ["scontrol", "show", "hostnames", "node-[1-2]"]
    assert srun == "srun"
    assert words == [
        *("--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--cpus-per-task=16"),
        "--kill-on-bad-exit=1",
        *("torchrun", "--nnodes=2", "--nproc-per-node=2", "--rdzv-id=123456"),
        *("--rdzv-backend=c10d", "--rdzv-endpoint=node-1:23456", "train.py"),
    ]


def test_a_step_takes_the_cores_that_its_job_was_told(tmp_path: Path) -> None:
    """Slurm refuses a step whose --cpus-per-task contradicts the job's variable."""
    document = llama() | {"scheduling_config": {"nodes": 2}}
    script = script_of(document, words=("a.sh",))
    calls = run(tmp_path, script, "srun", "scontrol", SLURM_CPUS_PER_TASK="8")
    assert "--cpus-per-task=8" in calls[1]


def test_apptainer_sees_the_job_s_folders(tmp_path: Path) -> None:
    (tmp_path / "c k").mkdir()
    container = {"image": "docker://pytorch", "mounts": ["/a b:/x", "/c:/c:ro"]}
    document = llama() | {"run_config": {"script": "train.py", "container": container}}
    script = script_of(document)
    (call,) = run(
        tmp_path,
        script,
        "apptainer",
        CRATER_CHECKPOINT_PATH=str(tmp_path / "c k"),
        CRATER_CACHE_PATH="/not/there",
    )
    assert call == [
        *("apptainer", "exec", "--nv", "--bind", "/a b:/x", "--bind", "/c:/c:ro"),
        *("--bind", str(tmp_path / "c k"), "docker://pytorch"),
        *("torchrun", "--standalone", "--nproc-per-node=2", "train.py"),
    ]


def test_pyxis_is_started_by_srun(tmp_path: Path) -> None:
    container = {"image": "nvcr.io#nvidia/pytorch:24", "runtime": "pyxis", "mounts": ["/a:/b"]}
    run_config = {"command": ["x", "'"], "container": container, "working_directory": "/w d"}
    script = script_of(llama() | {"run_config": run_config}).replace("cd -- '/w d'", "")
    (call,) = run(tmp_path, script, "srun", SLURM_JOB_NUM_NODES="1", CRATER_TMPDIR=str(tmp_path))
    assert call == [
        *("srun", "--nodes=1", "--ntasks=1", "--ntasks-per-node=1", "--cpus-per-task=16"),
        *("--kill-on-bad-exit=1", "--container-image=nvcr.io#nvidia/pytorch:24"),
        *(f"--container-mounts=/a:/b,{tmp_path}:{tmp_path}", "--container-workdir=/w d", "x", "'"),
    ]


def test_a_task_without_a_program_reports_and_ends_well(tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash"],
        input=script_of(llama()),
        env={"PATH": os.environ["PATH"], "CRATER_GPU_IDS": "0,1", "SECRET": "x"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    lines = done.stdout.splitlines()
    assert lines[0] == "CRATER_GPU_IDS=0,1"
    assert "TASK_ID=task-20240520-llama3-8b" in lines
    assert all(line.startswith(("CRATER_", "TASK_")) for line in lines)
    assert "names no program" in done.stderr


def test_a_program_that_fails_fails_the_job(tmp_path: Path) -> None:
    script = script_of(with_program("bash", "-c", "exit 3"))
    done = subprocess.run(
        ["bash"], input=script.encode(), cwd=tmp_path, env={"PATH": os.environ["PATH"]}
    )
    assert done.returncode == 3


# Which program.


def test_words_behind_the_dashes_win_over_the_task_s_program() -> None:
    task = parse(json.dumps(llama() | {"run_config": {"script": "a.py", "arguments": ["1"]}}))
    assert program_of(task, NOWHERE).words == ("a.py", "1")
    assert program_of(task, NOWHERE, ("b.sh", "2")).words == ("bash", "b.sh", "2")
    with pytest.raises(UsageError, match="is no program"):
        program_of(task, NOWHERE, ("--lr", "1"))


def test_a_site_has_programs_for_tasks_that_name_none() -> None:
    site = NOWHERE.model_copy(update={"programs": {"llm_finetune": ("/opt/ft.py", "--site")}})
    found = program_of(parse(json.dumps(llama())), site)
    assert (found.words, found.python) == (("/opt/ft.py", "--site"), True)


def test_a_site_can_refuse_tasks_without_a_program() -> None:
    site = NOWHERE.model_copy(update={"without_program": "refuse"})
    with pytest.raises(UsageError, match=r"no program is known; name one in /run_config/script"):
        script_of(llama(), site)


# Options for Slurm.


def sbatch_lines(script: str) -> list[str]:
    return [line[8:] for line in script.splitlines() if line.startswith("#SBATCH ")]


def test_slurm_is_asked_for_gpus_and_cores_unless_the_filter_does_it() -> None:
    own = ["--gres=gpu:2", "--cpus-per-task=32", "--threads-per-core=1"]
    assert sbatch_lines(script_of(llama()))[1:] == own
    assert sbatch_lines(script_of(llama(), enforced=True))[1:] == []
    always = NOWHERE.model_copy(update={"slurm_options": "all"})
    assert sbatch_lines(script_of(llama(), always, enforced=True))[1:] == own
    never = NOWHERE.model_copy(update={"slurm_options": "none"})
    assert sbatch_lines(script_of(llama(), never))[1:] == []


@pytest.mark.parametrize(
    ("options", "left"),
    [
        (("-G", "4"), ["--cpus-per-task=32", "--threads-per-core=1"]),
        (("--gpus-per-node=2",), ["--cpus-per-task=32", "--threads-per-core=1"]),
        (("--gres", "gpu:a100:2"), ["--cpus-per-task=32", "--threads-per-core=1"]),
        (("-c8",), ["--gres=gpu:2"]),
        (("--ntasks=4",), ["--gres=gpu:2"]),
        (("--hint=nomultithread", "-p", "-c"), ["--gres=gpu:2"]),
        (("--tres-per-task=gpu:1",), []),
        (("-p", "-G"), ["--gres=gpu:2", "--cpus-per-task=32", "--threads-per-core=1"]),
    ],
)
def test_one_spelling_of_gpus_and_cores_is_left(options: tuple[str, ...], left: list[str]) -> None:
    assert sbatch_lines(script_of(llama(), options=options))[1:] == left


@pytest.mark.parametrize("gpu", [{"mig": "1g.5gb"}, {"sharing": True}])
def test_a_part_of_a_gpu_is_not_asked_for_as_a_whole(gpu: dict[str, Any]) -> None:
    document = llama()
    document["resource_requirements"]["gpu"] |= gpu | {"count": 1}
    assert not any("gres" in line for line in sbatch_lines(script_of(document)))


def test_hardware_threads_are_asked_for_as_such() -> None:
    document = put(llama(), ("resource_requirements", "cpu", "physical_cores"), False)
    assert sbatch_lines(script_of(document))[-1] == "--cpus-per-task=32"


# Templates.


def site_with(folder: Path, **files: str) -> Submit:
    for name, text in files.items():
        (folder / f"{name}.sh.j2").write_text(text)
    return Submit(templates=folder)


def test_a_site_s_template_hides_the_shipped_one_and_can_extend_it(tmp_path: Path) -> None:
    site = site_with(
        tmp_path,
        llm_finetune='{# Ours. #}\n{% extends "crater/llm_finetune.sh.j2" %}\n'
        "{% block environment %}\nmodule load cuda\n{{ super() }}\n{% endblock %}\n",
        own='{% extends "_base.sh.j2" %}',
    )
    script = script_of(llama(), site)
    assert "module load cuda\n" in script
    assert "TOKENIZERS_PARALLELISM" in script
    assert "module load" not in script_of(llama(), site, template="own")
    assert templates.find("llm_finetune", tmp_path).about == "Ours."


def test_a_site_may_change_what_all_templates_begin_with(tmp_path: Path) -> None:
    site = site_with(tmp_path, _base="#!/bin/sh\necho {{ task.task_id|sh }}\n")
    assert script_of(llama(), site) == "#!/bin/sh\necho task-20240520-llama3-8b\n"


def test_a_changed_template_is_read_anew(tmp_path: Path) -> None:
    site = site_with(tmp_path, generic="one\n")
    assert script_of(llama(), site, template="generic") == "one\n"
    site_with(tmp_path, generic="another\n")
    os.utime(tmp_path / "generic.sh.j2", (1, 1))
    assert script_of(llama(), site, template="generic") == "another\n"


def test_a_template_may_be_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.sh.j2"
    file.write_text("#!/bin/sh\necho {{ task.model_config.name|sh }}\n")
    assert script_of(llama(), template=str(file)) == "#!/bin/sh\necho Llama-3-8B\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{{ task.model_config.name }}", r"writes 'Llama-3-8B' as it is; put \|sh behind it"),
        ("{{ task.task_id|upper }}", "as it is"),
        ("{{ program|join(' ') }}", "as it is"),
        ("{{ 'a' ~ task.task_id|sh }}", "as it is"),
        ("{{ task.task_id|sh|replace('a', 'b') }}", "as it is"),
        ("{{ task.model_config.nmae|sh }}", "has no attribute 'nmae'"),
        ("{{ taskk.task_id|sh }}", "'taskk' is undefined"),
        ("{{ task.task_id|sh", "line 1: unexpected end"),
        ("{% include 'other.sh.j2' %}", "other.sh.j2"),
        ("{{ task.sla|sh }}", "quotes a dict; only texts and numbers can be"),
        ("{{ task.sla|sbatch }}", "can't stand behind #SBATCH"),
        ("{{ task.__class__|sh }}", "unsafe|undefined|has no attribute"),
        ("{{ cycler.__init__.__globals__.os.system('touch owned')|sh }}", "unsafe|undefined"),
        ("{{ 'a b'|name }}", "is no name of a variable"),
        ("{% for i in range(9999999) %}x{% endfor %}", "Range too big"),
    ],
)
def test_a_template_that_could_do_harm_does_not_render(
    tmp_path: Path, text: str, message: str
) -> None:
    site = site_with(tmp_path, generic=text)
    with pytest.raises(UsageError, match=message):
        script_of(llama(), site, template="generic")


def test_an_unknown_template_names_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"no template 'infrence'; did you mean inference\?"):
        script_of(llama(), template="infrence")


@pytest.mark.parametrize("value", ["a\nb", "a\x00", "\x1b[0m", "a\rb", "\ud800", "a\u2028"])
def test_nothing_unprintable_is_ever_quoted(value: str) -> None:
    with pytest.raises(UsageError, match="control characters"):
        quoting.sh(value)
    with pytest.raises(UsageError):
        quoting.sbatch(value)


@pytest.mark.parametrize("value", ['a"b', "a'b", "a\\b", "a`b", "a$b"])
def test_sbatch_s_own_quotation_marks_are_refused(value: str) -> None:
    with pytest.raises(UsageError, match="can't stand behind #SBATCH"):
        quoting.sbatch(f"--comment={value}")


@pytest.mark.parametrize("path", ['/a"b', "/a'b", "/a\\b", "/a`id`", "/a$(id)", "/a#b"])
def test_a_folder_that_sbatch_would_misread_is_the_task_s_mistake(path: str) -> None:
    with pytest.raises(UsageError, match="/run_config/working_directory: must be an absolute path"):
        script_of(llama() | {"run_config": {"working_directory": path}})


def test_crater_templates_lists_shows_and_renders(tmp_path: Path) -> None:
    site_with(tmp_path, generic="{# Of this site. #}\n#!/bin/sh\n")
    environment = {"CRATER_SUBMIT__TEMPLATES": str(tmp_path)}

    def invoke(*words: str) -> Any:
        return CliRunner(env=environment).invoke(crater, ["templates", *words])

    found = {row["name"]: row for row in json.loads(invoke("list", "--json").output)}
    assert found.keys() == set(TASKS)
    assert found["generic"] == {"name": "generic", "from": "site", "about": "Of this site."}
    assert all(row["about"] for row in found.values())
    assert "generic" in invoke("list").output
    assert invoke("show", "generic").output == "{# Of this site. #}\n#!/bin/sh\n"
    case = VALID[7]
    expected = (CASES / "expected" / f"valid-{case.stem}.sh").read_text()
    assert invoke("render", str(case)).stdout == expected
    assert invoke("show", "nosuch").exit_code == 2
