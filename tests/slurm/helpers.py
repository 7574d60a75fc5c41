"""What the tests of jobs share: submitting, waiting, and reading where Slurm put a job."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from sysconfig import get_path
from typing import Any

import yaml

import crater_slurm.lab as lab_package
from crater_slurm import paths
from crater_slurm.lab import Lab
from crater_slurm.lab.places import INSIDE
from crater_slurm.model.cpuset import parse_cpulist
from crater_slurm.slurm import gres, hostlist

#: For things that take a second; a busy machine must not fail a test.
PATIENCE = 90.0
#: Where a lab's users find crater.
PEOPLE = "/run/people"
HOOKS = {"Prolog": "prolog", "Epilog": "epilog", "TaskProlog": "task_prolog"}


@dataclass(frozen=True)
class Said:
    """The outcome of a submission: job id (None when refused) and what the user was told."""

    job: int | None
    lines: tuple[str, ...]

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    @property
    def plan(self) -> str:
        """Id of the plan that the message names."""
        found = re.search(r"crater explain (\w+)", self.text)
        assert found, self.text
        return found.group(1)


@dataclass(frozen=True)
class Share:
    """A job's share of one node: its cores by Slurm's ids, its GPUs by index, counted gres."""

    node: str
    cpus: tuple[int, ...]
    gpus: tuple[int, ...]
    counts: dict[str, int]


def patient_lab(factory: Callable[..., Lab], hook_seconds: int = 20, **fields: Any) -> Lab:
    """A lab whose filter and hooks wait longer than a site's, because this machine may be busy."""
    conf = {name: f"{INSIDE}/hooks/{script}.sh" for name, script in HOOKS.items()}
    conf |= fields.pop("slurm_conf", {})
    lab = factory(slurm_conf=conf, **fields)
    folder = lab.folders.base / "hooks"
    folder.mkdir()
    for name in HOOKS.values():
        file = folder / f"{name}.sh"
        file.write_text(
            f"#!/bin/sh\nexec /usr/lib/crater/prolog/{name}.sh timeout={hook_seconds}\n"
        )
        file.chmod(0o755)
    return ready(lab)


def ready(lab: Lab) -> Lab:
    """Let a lab's filter wait, and its users find crater."""
    file = lab.folders.crater_etc / "filter.lua"
    # Otherwise the filter's breaker would open by chance.
    file.write_text("return {deadline_ms = 2000, breaker_seconds = 1}\n")
    file.chmod(0o644)
    bring_python(lab)
    if "scheduler" in lab.spec.daemons and lab.spec.seeded:
        planning(lab)
    return lab


def bring_python(lab: Lab, node: str | None = None) -> None:
    """Let everybody find this installation there; it may lie in a folder of root's."""
    folders = {
        "python": Path(sys.base_prefix),
        "crater_slurm": paths.PACKAGE,
        "site": Path(get_path("purelib")),
        "templates": paths.share("templates"),
    }
    for name, source in folders.items():
        target = f"{PEOPLE}/{name}"
        for words in (["mkdir", "-p", target], ["mount", "--bind", str(source), target]):
            lab.run(words, user="root", node=node, machine_side=True, check=True)
    # So that it is found to be a source tree, with its templates beside the package.
    tree = ["touch", f"{PEOPLE}/pyproject.toml"]
    lab.run(tree, user="root", node=node, machine_side=True, check=True)


def planning(lab: Lab) -> None:
    """Wait until crater-scheduler has read the cluster and plans jobs."""
    wait_until(
        lambda: "crater: planned" in submit(lab, "--test-only", crater="cpus=1").text,
        "crater-scheduler plans",
    )


def submit(
    lab: Lab,
    *options: str,
    crater: str = "",
    body: str = "sleep 600",
    user: str = "alice",
    **how: Any,
) -> Said:
    """sbatch a script with a #CRATER line and a body."""
    lines = ["#!/bin/bash", *([f"#CRATER {crater}"] if crater else []), body, ""]
    done = lab.run(
        ["sbatch", "--parsable", *options], input="\n".join(lines), user=user, timeout=120, **how
    )
    number = done.stdout.strip().split(";")[0]
    said = tuple(re.sub(r"^sbatch: (error: )?", "", line) for line in done.stderr.splitlines())
    return Said(int(number) if number.isdigit() and not done.returncode else None, said)


def accepted(said: Said) -> int:
    assert said.job is not None, said.text
    return said.job


def wait_until(condition: Callable[[], Any], what: str, seconds: float = PATIENCE) -> Any:
    """The first true value of a condition."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.1)
    return value


def running(lab: Lab, job: int | str) -> dict[str, str]:
    """Wait until a job runs; its record."""
    return lab.wait_job(job, ["RUNNING"], timeout=PATIENCE)


def completed(lab: Lab, job: int | str) -> dict[str, str]:
    return lab.wait_job(job, ["COMPLETED"], timeout=PATIENCE)


def waits(lab: Lab, job: int | str, reason: str = "Resources") -> None:
    """Wait until Slurm has looked at a job and left it pending for that reason."""
    wait_until(lambda: lab.job(job)["Reason"] != "None", f"job {job} is looked at")
    record = lab.job(job)
    assert (record["JobState"], record["Reason"]) == ("PENDING", reason)


def settled(lab: Lab, job: int | str) -> str:
    """RUNNING or PENDING, once Slurm has tried to start a job."""

    def state() -> str:
        record = lab.job(job)
        if record["JobState"] == "PENDING" and record["Reason"] in ("None", "Priority"):
            return ""
        return record["JobState"]

    return str(wait_until(state, f"job {job} is scheduled"))


def cancel(lab: Lab, *jobs: int | str) -> None:
    """Cancel jobs (all without arguments) and wait until their nodes are done with them."""
    numbers = [str(job) for job in jobs]
    for words in [numbers] if jobs else [[f"--user={user}"] for user in ("alice", "bob", "root")]:
        lab.run(["scancel", *words], user="root")
    chosen = [f"--jobs={','.join(numbers)}"] if jobs else []
    wait_until(
        lambda: not lab.run(["squeue", "--noheader", *chosen], user="root").stdout.strip(),
        "the nodes are done with cancelled jobs",
    )


def shares(lab: Lab, job: int | str) -> list[Share]:
    """Where a running job is, node by node, as slurmctld tells it."""
    text = lab.run(["scontrol", "-d", "-o", "show", "job", str(job)], user="root", check=True)
    found = []
    for nodes, cpus, given in re.findall(
        r"\bNodes=(\S+) CPU_IDs=(\S+) Mem=\S+ GRES=(\S*)", text.stdout.splitlines()[0]
    ):
        index = re.search(r"\bgpu:[^,]*\(IDX:([0-9,-]*)\)", given)
        counts = gres.totals(re.sub(r"\(CNT:(\d+)\)", r":\1", given))
        for node in hostlist.expand(nodes):
            gpus = parse_cpulist(index.group(1)) if index else ()
            found.append(Share(node, parse_cpulist(cpus), gpus, counts))
    return sorted(found, key=lambda share: share.node)


def numa_of_cpus(lab: Lab, share: Share) -> set[int]:
    """NUMA nodes of a share's cores: Slurm's ids count through them one after the other."""
    profile = lab.nodes.profile_of(share.node)
    size = len(profile.numa_nodes[0].cpus)
    assert all(len(node.cpus) == size for node in profile.numa_nodes)
    return {profile.numa_nodes[cpu // size].id for cpu in share.cpus}


def numa_of_gpus(lab: Lab, share: Share) -> set[int]:
    profile = lab.nodes.profile_of(share.node)
    return {gpu.numa_node for gpu in profile.gpus if gpu.index in share.gpus}


def output(lab: Lab, job: int | str, user: str = "alice") -> str:
    file = lab.home(user) / f"slurm-{job}.out"
    return file.read_text() if file.exists() else ""


def variables(text: str, prefix: str = "") -> dict[str, str]:
    """NAME=value lines of a job's output."""
    pairs = (line.partition("=") for line in text.splitlines() if "=" in line)
    return {name: value for name, _, value in pairs if name.startswith(prefix)}


def python(
    lab: Lab,
    *words: str,
    user: str = "alice",
    environment: dict[str, str] | None = None,
    **how: Any,
) -> Any:
    """Run this installation's Python in the lab, with all that crater can import."""
    node = how.get("node")
    if node and lab.node_run(node, ["test", "-d", f"{PEOPLE}/python/bin"]).returncode:
        bring_python(lab, node)
    program = Path(sys.executable).resolve().relative_to(Path(sys.base_prefix).resolve())
    variables_ = {
        "PYTHONHOME": f"{PEOPLE}/python",
        "LD_LIBRARY_PATH": f"{PEOPLE}/python/lib",
        "PYTHONPATH": f"{PEOPLE}:{PEOPLE}/site",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    return lab.run(
        [f"{PEOPLE}/python/{program}", *words],
        user=user,
        machine_side=True,
        timeout=120,
        environment=variables_ | (environment or {}),
        **how,
    )


def crater(lab: Lab, *words: str, user: str = "alice", **how: Any) -> Any:
    """Run crater as people do, beside slurmctld."""
    return python(lab, "-m", "crater_slurm.cli", *words, user=user, **how)


def explained(lab: Lab, key: int | str, user: str = "alice") -> dict[str, Any]:
    """``crater explain KEY --json``."""
    done = crater(lab, "explain", str(key), "--json", user=user)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def script(lab: Lab, name: str, text: str, user: str = "alice") -> str:
    """Put a file into a user's home in the lab; its name there."""
    file = lab.home(user) / name
    file.write_text(text)
    file.chmod(0o755)
    return name


def all_well(lab: Lab) -> None:
    """No node was drained or lost: what must hold after every fault."""
    reasons = lab.run(["sinfo", "--noheader", "--list-reasons"], user="root").stdout.strip()
    states = set(lab.node_states().values())
    assert not reasons
    assert states <= {"idle", "mixed", "allocated", "completing"}, states


def profile(name: str) -> dict[str, Any]:
    """A profile that comes with crater, for a test to change."""
    file = Path(lab_package.__file__).parent / "profiles" / f"{name}.yaml"
    # Through JSON, so that what YAML shares between its parts is not changed together.
    return dict(json.loads(json.dumps(yaml.safe_load(file.read_text()), default=str)))


def inventory(folder: Path, *nodes: tuple[str, dict[str, Any]], name: str = "own") -> str:
    """An inventory file of nodes and their profiles."""
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump({"nodes": [{"name": n, "profile": p} for n, p in nodes]}))
    return str(file)


API = "http://127.0.0.1:9192/api/v1"
LLAMA = Path(__file__).parents[1] / "unit" / "tasks" / "valid" / "001-llama-3-8b.json"


def api_token(lab: Lab, client: str, *options: str, user: str = "root") -> str:
    """A new token of a platform's; ``user`` owns crater-scheduler's store."""
    words = ("tokens", "create", f"t-{client}", "--client", client, *options)
    done = crater(lab, *words, user=user)
    assert done.returncode == 0, done.stderr
    return str(done.stdout.strip())


def ask_api(lab: Lab, token: str, path: str, body: Any = None) -> dict[str, Any]:
    """What crater-scheduler answers a platform; a POST where there is a body."""
    words = ["curl", "-sS", "-m", "60", "-H", f"Authorization: Bearer {token}", API + path]
    words += ["--data-binary", "@-"] if body is not None else []
    text = None if body is None else json.dumps(body)
    done = lab.run(words, user="root", machine_side=True, input=text, timeout=90, check=True)
    return dict(json.loads(done.stdout))


def llama_task(task_id: str, **changes: Any) -> dict[str, Any]:
    """The source text's task under another id."""
    return json.loads(LLAMA.read_text()) | {"task_id": task_id} | changes


def small_task(task_id: str, *command: str, **changes: Any) -> dict[str, Any]:
    """A task of one core, no GPU, one program; of no program where none is given."""
    none: dict[str, Any] = {
        "task_type": "generic",
        "model_config": None,
        "data_config": None,
        "sla": None,
        "resource_requirements": {
            "gpu": {"count": 0, "memory_mb": None, "type": None},
            "cpu": {"cores": 1, "avx_support": None},
            "memory": None,
            "ssd": None,
        },
    }
    if command:
        none["run_config"] = {"command": list(command)}
    return {"task_id": task_id} | none | changes
