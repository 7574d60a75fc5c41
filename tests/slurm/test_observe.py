"""What a real job needed is watched on its node and known beside slurmctld, from sbatch to explain.

A lab's nodes share the machine's kernel and may have no cgroup v2, so the job's cgroup is a folder
that the test fills with what /proc says of the job's real process. All else is real.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import (
    accepted,
    all_well,
    cancel,
    crater,
    explained,
    patient_lab,
    running,
    submit,
    wait_until,
)

from crater_slurm.lab import Lab

MIB = 2**20
#: Below /var/lib/crater, which every node has for itself.
ROOT = "/var/lib/crater/cgroup"
CONF = {"node": {"sample_seconds": 0.3, "cgroup_root": ROOT}}
ASKED = "cpus=1 model=llama-3-8b method=lora framework=torch micro-batch=4"
KEY = "llama-3-8b|lora|torch"
#: Holds 300 MB until it is told to go, and writes its process number where the test finds it.
BODY = """\
cat >hold.py <<'END'
import os, sys, time
held = b"x" * (300 * 10**6)
open("pid-" + sys.argv[1], "w").write(str(os.getpid()))
while not os.path.exists("go-" + sys.argv[1]):
    time.sleep(0.05)
END
python3 hold.py $SLURM_JOB_ID
exit {code}
"""


@pytest.fixture(scope="module")
def cluster(lab_factory: Any) -> Lab:
    return patient_lab(lab_factory, inventory="a100-pcie", crater_conf=CONF)


@pytest.fixture
def lab(cluster: Lab) -> Iterator[Lab]:
    yield cluster
    cancel(cluster)


def held(lab: Lab, job: int) -> tuple[str, int]:
    """Waits until a job holds its memory: its node, and the bytes that the kernel counts."""
    node = running(lab, job)["NodeList"]
    file = lab.home("alice") / f"pid-{job}"
    pid = wait_until(lambda: file.exists() and file.read_text(), f"job {job} holds its memory")
    status = lab.node_run(node, ["cat", f"/proc/{pid}/status"]).stdout
    found = re.search(r"^RssAnon:\s+(\d+) kB", status, re.M)
    assert found, status
    return node, int(found.group(1)) * 1024


def cgroup(lab: Lab, node: str, job: int, anonymous: int, kills: int = 0) -> Path:
    """The cgroup that Slurm would have made, with page cache ten times the job's need."""
    folder = lab.folders.node(node) / f"lib/cgroup/system.slice/{node}_slurmstepd.scope/job_{job}"
    folder.mkdir(parents=True)
    (folder / "memory.current").write_text(f"{11 * anonymous}\n")
    (folder / "memory.events").write_text(f"oom 0\noom_kill {kills}\n")
    (folder / "cpu.stat").write_text("usage_usec 1000000\n")
    (folder / "memory.stat").write_text(f"anon {anonymous}\nfile {10 * anonymous}\nkernel 0\n")
    return folder


def seen(lab: Lab, job: int, *, ended: bool) -> dict[str, Any]:
    def report() -> Any:
        found = explained(lab, job)["observations"]
        return found[0] if found and found[0]["ended"] is ended else None

    return dict(wait_until(report, f"job {job} is reported"))


def end(lab: Lab, job: int, folder: Path) -> None:
    """Let a job end; Slurm removes its cgroup before the Epilog."""
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    (lab.home("alice") / f"go-{job}").touch()


def test_a_job_s_need_is_seen_while_it_runs_and_kept_when_it_ended(lab: Lab) -> None:
    job = accepted(submit(lab, crater=ASKED, body=BODY.format(code=0)))
    node, anonymous = held(lab, job)
    assert anonymous >= 300 * 10**6
    folder = cgroup(lab, node, job, anonymous)

    now = seen(lab, job, ended=False)
    assert (now["node"], now["key"], now["samples"] % 10) == (node, KEY, 0)
    need = -(-anonymous // MIB)
    assert now["host_memory_peak_mib"] == need

    (folder / "memory.stat").write_text("anon 1048576\nkernel 0\n")  # most of it was freed
    lab.stop(("node", node))
    lab.start(("node", node))
    last = now["samples"]
    wait_until(
        lambda: seen(lab, job, ended=False)["samples"] > last, "the daemon goes on after a restart"
    )
    end(lab, job, folder)
    done = seen(lab, job, ended=True)
    assert done["succeeded"] is True
    assert done["host_memory_peak_mib"] == need, "no restart forgets a peak"
    assert done["host_memory_total_peak_mib"] == -(-11 * anonymous // MIB)
    assert done["workload"]["micro_batch"] == 4
    assert "gpu_memory_peak_mib" not in done, "there is no driver to ask"

    text = crater(lab, "explain", str(job)).stdout
    assert f"  seen on {node} for " in text
    total = done["host_memory_total_peak_mib"] / 1024
    assert f"    host memory {need} MiB ({total:.3g} GiB with page cache)" in text
    listed = crater(lab, "observations", "list", "--key", KEY, "--json", user="root")
    (learnt,) = json.loads(listed.stdout)
    assert (learnt["job_id"], learnt["counts"]) == (job, True)
    all_well(lab)


def test_a_job_that_fails_soon_is_kept_but_teaches_nothing(lab: Lab) -> None:
    job = accepted(submit(lab, crater=ASKED, body=BODY.format(code=3)))
    node, anonymous = held(lab, job)
    folder = cgroup(lab, node, job, anonymous)
    peaks = lab.folders.node(node) / f"lib/node/peaks/{job}.json"
    wait_until(peaks.exists, "the job was looked at")
    end(lab, job, folder)
    assert seen(lab, job, ended=True)["succeeded"] is False
    listed = crater(lab, "observations", "list", "--json", user="root")
    assert {one["job_id"]: one["counts"] for one in json.loads(listed.stdout)}[job] is False
