"""``crater submit`` and ``crater-submit`` with stand-ins for Slurm and for crater-scheduler."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from task_documents import CASES, LLAMA, llama

from crater_slurm.alldata.advice import notes
from crater_slurm.alldata.remote import Server, read_token
from crater_slurm.alldata.sending import ConflictError
from crater_slurm.alldata.task import fingerprint, parse
from crater_slurm.errors import UnavailableError, UsageError

HOSTILE = CASES / "valid" / "005-hostile-texts.json"
#: sbatch that keeps what it was given and shows the job in the queue.
SBATCH = """#!/bin/bash
cat > "$KEPT/script"
printf '%s\\n' "$@" > "$KEPT/words"
env > "$KEPT/env"
for word in "$@"; do
    case $word in --comment=*) echo "42|PENDING|${word#--comment=}" >> "$KEPT/queue" ;; esac
done
echo "sbatch: crater: planned" >&2
echo 42
"""
SQUEUE = '#!/bin/bash\ntouch "$KEPT/queue"; cat "$KEPT/queue"\n'
SCONTROL = """#!/bin/bash
echo "JobId=42 JobName=x JobState=${STATE:-FAILED} Reason=None ExitCode=${CODE:-3:0} NodeList=a1"
"""
SACCT = "#!/bin/bash\necho 'Slurm accounting storage is disabled' >&2; exit 1\n"
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def slurm(tmp_path: Path) -> Path:
    """A folder of Slurm commands; what sbatch was given lies in it."""
    stand_ins = {"sbatch": SBATCH, "squeue": SQUEUE, "scontrol": SCONTROL, "sacct": SACCT}
    for name, text in stand_ins.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return tmp_path


@pytest.fixture
def submit(slurm: Path) -> Run:
    def run(*words: object, text: str | None = None, **variables: str) -> Any:
        code = "import sys; from crater_slurm.cli.submit import main; sys.exit(main())"
        environment = {
            "PATH": f"{slurm}:{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join(sys.path),
            "HOME": str(slurm),
            "KEPT": str(slurm),
        } | variables
        return subprocess.run(
            [sys.executable, "-c", code, *map(str, words)],
            env=environment,
            input=text or "",
            capture_output=True,
            text=True,
            check=False,
            cwd=slurm,
        )

    return run


def test_a_task_is_submitted_and_sbatch_s_line_is_printed(submit: Run, slurm: Path) -> None:
    done = submit(LLAMA, "-p", "gpu", "--", "train.py")
    assert (done.returncode, done.stdout) == (0, "Submitted batch job 42\n")
    assert "sbatch: crater: planned\n" in done.stderr
    words = (slurm / "words").read_text().splitlines()
    task = parse(LLAMA.read_bytes())
    mark = fingerprint(task, ["train.py"], ["-p", "gpu"], None)
    assert words == ["--parsable", f"--comment=crater-task:{task.task_id}/{mark}", "-p", "gpu"]
    assert (slurm / "script").read_text().startswith("#!/bin/bash\n# Rendered by crater")


def test_the_script_that_sbatch_gets_is_the_one_that_dry_run_shows(
    submit: Run, slurm: Path
) -> None:
    submit(HOSTILE)
    shown = submit(HOSTILE, "--dry-run")
    script, _, last = shown.stdout.rstrip("\n").rpartition("\n")
    assert (slurm / "script").read_text() == f"{script}\n"
    assert last.startswith("# sbatch --comment=crater-task:hostile/")


def test_dry_run_needs_no_slurm(submit: Run) -> None:
    done = submit("-", "--dry-run", "--json", text=LLAMA.read_text(), PATH="/nonexistent")
    told = json.loads(done.stdout)
    assert done.returncode == 0
    assert told["script"] == (CASES / "expected" / "valid-001-llama-3-8b.sh").read_text()
    assert told["sbatch"][0] == "sbatch"
    assert any("names no program" in note for note in told["notes"])


@pytest.mark.parametrize("word", ["--parsable", "--json"])
def test_the_answer_can_be_read_by_programs(submit: Run, word: str) -> None:
    done = submit(LLAMA, word)
    if word == "--parsable":
        assert done.stdout == "42\n"
    else:
        told = json.loads(done.stdout)
        assert (told["job_id"], told["task_id"]) == (42, "task-20240520-llama3-8b")
        assert (told["fresh"], told["template"]) == (True, "llm_finetune")


def test_the_same_task_is_not_sent_again(submit: Run, slurm: Path) -> None:
    submit(LLAMA)
    (slurm / "words").unlink()
    done = submit(LLAMA)
    assert (done.returncode, done.stdout) == (0, "Submitted batch job 42\n")
    assert "was submitted before; this is its job" in done.stderr
    assert not (slurm / "words").exists()
    assert submit(LLAMA, "--", "other.py").returncode == 7


def test_an_enclosing_job_s_variables_stay_here(submit: Run, slurm: Path) -> None:
    submit(LLAMA, SLURM_CPU_BIND="map_cpu:0", SBATCH_PARTITION="x", SLURM_CONF="/c", PMIX_RANK="1")
    found = (slurm / "env").read_text()
    assert "SLURM_CONF=/c" in found
    assert "SLURM_CPU_BIND" not in found
    assert "SBATCH_" not in found
    assert "PMIX_" not in found


@pytest.mark.parametrize(
    ("state", "code", "status"),
    [("FAILED", "3:0", 3), ("COMPLETED", "0:0", 0), ("TIMEOUT", "0:15", 124)],
)
def test_wait_exits_as_the_job_did(submit: Run, state: str, code: str, status: int) -> None:
    done = submit(LLAMA, "--wait", STATE=state, CODE=code)
    assert (done.returncode, done.stdout) == (status, "Submitted batch job 42\n")
    assert f"crater: job 42: {state}" in done.stderr


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        ((CASES / "invalid" / "003-out-of-range.json",), 2, "must be at least 1 MiB; it is 0"),
        (("gone.json",), 2, "the task gone.json can't be read: No such file"),
        ((LLAMA, "train.py"), 2, "put -- before a program"),
        ((LLAMA, "--", "--lr"), 2, "is no program"),
        ((LLAMA, "--template", "nosuch"), 2, "there is no template 'nosuch'"),
        ((LLAMA, "--comment"), 2, "--comment needs a value"),
        ((LLAMA, "--comment", "crater-plan:1.a.b"), 2, "crater writes itself"),
        ((LLAMA, "--wait", "--array=1-5"), 202, "--wait follows one job"),
        ((LLAMA, "--server", "ftp://x"), 2, "is no address"),
        ((LLAMA, "--server", "http://example.org", "--dry-run"), 2, "don't go together"),
        ((LLAMA, "--server", "https://x", "-p", "gpu"), 2, "-p and --server don't go together"),
        ((LLAMA, "--server", "https://x", "--token-file", "/gone"), 2, "can't be read"),
    ],
)
def test_what_can_t_be_meant_is_said(
    submit: Run, slurm: Path, words: tuple[object, ...], status: int, message: str
) -> None:
    done = submit(*words)
    assert done.returncode == status, done.stderr
    assert message in done.stderr
    assert done.stdout == ""
    assert not (slurm / "words").exists()


@pytest.mark.parametrize(
    ("sbatch", "status", "message"),
    [
        ("echo 'sbatch: error: crater: no node has 16 GPUs' >&2; exit 1", 1, "no node has 16"),
        ("echo '(connect failure)' >&2; exit 1", 4, "nothing was submitted"),
        ("exit 0", 8, "it is not sent twice"),
    ],
)
def test_each_way_to_fail_has_its_exit_code(
    submit: Run, slurm: Path, sbatch: str, status: int, message: str
) -> None:
    (slurm / "sbatch").write_text(f"#!/bin/bash\n{sbatch}\n")
    few = {"CRATER_SUBMIT__SEARCH_SECONDS": "0"}
    done = submit(LLAMA, **few)
    assert (done.returncode, done.stdout) == (status, "")
    assert message in done.stderr
    waiting = submit(LLAMA, "--wait", **few)
    assert waiting.returncode == 200 + status


def test_without_slurm_s_commands_that_is_said(submit: Run) -> None:
    done = submit(LLAMA, PATH="/nonexistent")
    assert done.returncode == 4
    assert "install Slurm's client commands" in done.stderr


def test_a_large_task_is_refused_unread(submit: Run) -> None:
    done = submit("-", text='{"task_id": "' + "x" * 2**20 + '"}')
    assert done.returncode == 2
    assert "a task has at most 262,144" in done.stderr
    assert len(done.stderr) < 200


def test_any_other_line_is_sbatch_s(submit: Run, slurm: Path) -> None:
    (slurm / "sbatch").write_text('#!/bin/bash\necho "$@"; exit 9\n')
    (slurm / "job.sh").write_text("#!/bin/sh\n")
    done = submit("--wait", "-p", "gpu", "job.sh", "task.json", "--json")
    assert (done.returncode, done.stdout) == (9, "--wait -p gpu job.sh task.json --json\n")
    assert submit().returncode == 9


def test_help_is_crater_s_own(submit: Run) -> None:
    done = submit("--help")
    assert done.returncode == 0
    assert done.stdout.startswith("Usage: crater-submit [OPTIONS] TASK.json [SBATCH OPTIONS]")


# Advice.


def advice(**changes: Any) -> tuple[str, ...]:
    document = llama()
    document["resource_requirements"]["gpu"] |= changes.pop("gpu", {})
    return notes(parse(json.dumps(document | changes)))


def test_memory_that_will_not_do_is_told() -> None:
    (note,) = advice(training_config={"method": "full"})
    assert note.startswith(
        "/resource_requirements/gpu/memory_mb: 16 GiB may be too little: Llama-3-8B with full"
    )
    assert (
        advice(model_config={"name": "bert-base", "precision": "bf16", "quantization": None}) == ()
    )
    assert (
        advice(model_config={"name": "nobody-knows", "precision": None, "quantization": None}) == ()
    )


def test_a_shared_card_is_given_in_slices() -> None:
    """16,384 MiB of an A100 40 GB are 13 slices of 1,280 MiB."""
    (note, *_) = advice(gpu={"sharing": True, "count": 1})
    assert "in slices of 1,280 MiB, so 16,384 MiB takes 13 of them, 16,640 MiB" in note
    assert not any("slices" in n for n in advice(gpu={"sharing": True, "memory_mb": 12800}))


def test_more_than_the_card_has_is_told() -> None:
    (note, *_) = advice(gpu={"memory_mb": 50000})
    assert "50,000 MiB is more than an a100-pcie-40gb has, 40,960 MiB" in note


def test_a_wait_that_nobody_will_shorten_is_told() -> None:
    sla = {"min_gpu_utilization_percent": None}
    told = advice(sla=sla | {"max_queue_time_seconds": 1800, "displayed_wait_seconds": 1800})
    assert any("no escalation will ever happen; write 1,440" in note for note in told)
    told = advice(sla=sla | {"max_queue_time_seconds": 1440, "displayed_wait_seconds": 1800})
    assert not any("escalation" in note for note in told)


# Through the API.


class Api:
    """A server that answers as it is told and keeps what it was asked."""

    def __init__(self) -> None:
        self.answers: list[tuple[int, Any]] = []
        self.asked: list[tuple[str, str, str | None, Any]] = []
        api = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self._answer()

            def do_GET(self) -> None:
                self._answer()

            def _answer(self) -> None:
                size = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(size)) if size else None
                token = self.headers.get("Authorization")
                api.asked.append((self.command, self.path, token, body))
                status, answer = api.answers.pop(0)
                self.send_response(status)
                if status in (301, 302):
                    self.send_header("Location", f"http://{self.headers['Host']}/elsewhere")
                self.end_headers()
                text = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                self.wfile.write(text)

            def log_message(self, *_: object) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def api() -> Iterator[Api]:
    made = Api()
    thread = threading.Thread(target=made.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield made
    made.server.shutdown()
    thread.join()
    made.server.server_close()


def test_a_task_goes_to_the_server_with_its_token(submit: Run, api: Api, slurm: Path) -> None:
    api.answers = [(202, {"task_id": "task-20240520-llama3-8b", "job_id": 7})]
    file = slurm / "token"
    file.write_text("secret-1\n")
    file.chmod(0o600)
    done = submit(LLAMA, "--server", api.url, "--token-file", file, "--", "train.py", "1")
    assert (done.returncode, done.stdout) == (0, "Submitted batch job 7\n"), done.stderr
    sent = llama() | {"run_config": {"script": "train.py", "arguments": ["1"]}}
    assert api.asked == [("POST", "/api/v1/schedule", "Bearer secret-1", sent)]
    assert not (slurm / "words").exists()


@pytest.mark.parametrize(
    ("end", "status"),
    [
        ({"status": "failed", "exit_code": "5:0"}, 5),
        ({"status": "failed", "exit_code": "0:9"}, 137),
        ({"status": "completed", "exit_code": "0:0"}, 0),
        ({"status": "timeout", "exit_code": None}, 124),
        ({"status": "cancelled", "exit_code": "0:15"}, 130),
        ({"status": "rejected"}, 201),
        ({"status": "unknown"}, 125),
    ],
)
def test_waiting_asks_the_server(submit: Run, api: Api, end: dict[str, Any], status: int) -> None:
    api.answers = [(202, {"job_id": 7}), (200, end)]
    done = submit(LLAMA, "--server", api.url, "--wait")
    assert done.returncode == status, done.stderr
    assert api.asked[1][1] == "/api/v1/tasks/task-20240520-llama3-8b"


@pytest.mark.parametrize(
    ("status", "answer", "code", "message"),
    [
        (
            422,
            {"detail": [{"pointer": "/a", "message": "is bad", "value": "1"}]},
            2,
            "/a: is bad",
        ),
        (422, {"detail": [{"code": "refused", "message": "no 16 GPUs"}]}, 1, "no 16 GPUs"),
        (409, {"detail": "sent before with another content"}, 7, "another content"),
        (401, {"detail": "no such token"}, 1, "does not take this token (401): no such token"),
        (404, {"detail": "Not Found"}, 1, "answers 404: Not Found"),
        (500, b"<html>", 5, "answers 500"),
        (429, {"detail": "too many"}, 5, "answers 429: too many"),
        (302, {}, 5, "answers 302"),
        (202, b"no json", 5, "no JSON"),
        (422, {"detail": "\x1b[2Jred"}, 2, "?[2Jred"),
    ],
)
def test_what_the_server_says_is_passed_on(
    submit: Run, api: Api, status: int, answer: Any, code: int, message: str
) -> None:
    api.answers = [(status, answer)]
    done = submit(LLAMA, "--server", api.url)
    assert (done.returncode, done.stdout) == (code, "")
    assert message in done.stderr
    assert len(api.asked) == 1


def test_a_server_that_is_not_there_is_said() -> None:
    with pytest.raises(UnavailableError, match="the task may be sent again"):
        Server("http://127.0.0.1:9", None, 1).submit({})


def test_a_token_never_travels_in_clear() -> None:
    with pytest.raises(UsageError, match="would travel in clear"):
        Server("http://crater.example.org", "secret")
    Server("http://localhost:9192", "secret")
    Server("https://crater.example.org", "secret")


@pytest.mark.parametrize("text", ["", "two words", "a\nb", "é", "a\x00b"])
def test_a_token_file_holds_one_token(tmp_path: Path, text: str) -> None:
    file = tmp_path / "token"
    file.write_text(text)
    file.chmod(0o600)
    with pytest.raises(UsageError, match="one token and nothing else"):
        read_token(file)


def test_a_token_file_is_private(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("t")
    file.chmod(0o640)
    with pytest.raises(UsageError, match="chmod 600"):
        read_token(file)


def test_a_conflict_of_the_server_s_is_one_of_ours(api: Api) -> None:
    api.answers = [(409, {"detail": "no"})]
    with pytest.raises(ConflictError):
        Server(api.url, None).submit({})
