"""A job that writes large files beside its cache is told so, in its output and in crater explain.

A lab's nodes share the machine's kernel and may have no cgroup v2, so the job's cgroup is a folder
that the test fills with the job's real process. All else is real, also ``scontrol notify``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from helpers import (
    accepted,
    all_well,
    cancel,
    crater,
    explained,
    output,
    patient_lab,
    running,
    submit,
    wait_until,
)

from crater_slurm.lab import Lab

#: Below /var/lib/crater, which every node has for itself.
ROOT = "/var/lib/crater/cgroup"
CONF = {
    "node": {
        "sample_seconds": 0.3,
        "cgroup_root": ROOT,
        "checkpoints": {"direct_write_mb": 32, "direct_write_checkpoint_mb": 32},
    }
}
#: Where a home lies for the kernel; /home is another name of it.
HOME = "/crater-lab/home/alice"
#: Writes 64 MiB into the folder that it is given and holds the file open until it is told to go.
BODY = """\
cat >write.py <<'END'
import os, sys, time
job = os.environ["SLURM_JOB_ID"]
with open(os.path.join(sys.argv[1], f"state-{job}.bin"), "wb", 0) as file:
    for _ in range(64):
        file.write(bytes(1 << 20))
    open("pid-" + job, "w").write(str(os.getpid()))
    while not os.path.exists("go-" + job):
        time.sleep(0.05)
END
python3 write.py FOLDER
"""


@pytest.fixture(scope="module")
def cluster(lab_factory: Any) -> Lab:
    return patient_lab(lab_factory, inventory="cpu", crater_conf=CONF)


@pytest.fixture
def lab(cluster: Lab) -> Iterator[Lab]:
    yield cluster
    cancel(cluster)


def writes(lab: Lab, folder: str) -> tuple[int, str]:
    """A job with checkpoints that writes into a folder, seen by its node's daemon: job, node."""
    said = submit(lab, crater="cpus=1 cache=1GB checkpoint=on", body=BODY.replace("FOLDER", folder))
    job = accepted(said)
    node = running(lab, job)["NodeList"]
    file = lab.home("alice") / f"pid-{job}"
    pid = wait_until(lambda: file.exists() and file.read_text(), f"job {job} writes")
    place = lab.folders.node(node) / f"lib/cgroup/system.slice/{node}_slurmstepd.scope/job_{job}"
    place.mkdir(parents=True)
    (place / "memory.current").write_text("1\n")
    (place / "cgroup.procs").write_text(f"{pid}\n")
    return job, node


def end(lab: Lab, job: int, node: str) -> None:
    (lab.home("alice") / f"go-{job}").touch()
    lab.wait_job(job, ["COMPLETED"], timeout=90)


def looks(lab: Lab, job: int) -> int:
    found = explained(lab, job)["observations"]
    return int(found[0]["samples"]) if found else 0


def test_a_large_file_beside_the_cache_is_told_once(lab: Lab) -> None:
    job, node = writes(lab, "$HOME")
    warning = "crater: this job writes large files to this node's disk beside its cache"
    wait_until(lambda: warning in output(lab, job), f"job {job} is told")
    name = f"{HOME}/state-{job}.bin (0.0671 GB)"

    def told() -> Any:
        return next((g for g in explained(lab, job)["grants"] if "direct_writes" in g["got"]), None)

    grant = wait_until(told, "crater-scheduler knows it")
    assert (grant["node"], grant["got"]["direct_writes"]) == (node, [name])
    assert f"direct writes: {name}" in crater(lab, "explain", str(job)).stdout
    seen = looks(lab, job)
    wait_until(lambda: looks(lab, job) > seen, "the daemon looks on")
    end(lab, job, node)
    assert output(lab, job).count(warning) == 1
    assert f"{name}. checkpoint.save() of crater_slurm.job" in output(lab, job)
    all_well(lab)


def test_one_in_the_cache_is_nobodys_business(lab: Lab) -> None:
    job, node = writes(lab, "$CRATER_CACHE_PATH")
    wait_until(lambda: looks(lab, job) >= 10, "the daemon has looked at the job")
    end(lab, job, node)
    assert "beside its cache" not in output(lab, job)
    assert all("direct_writes" not in g["got"] for g in explained(lab, job)["grants"])
    all_well(lab)
