# SPDX-License-Identifier: Apache-2.0
"""What the node daemon sees of a job in Slurm's real cgroup v2 tree."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Iterator
from typing import Any

import pytest

from . import alloc
from .binding_helpers import (
    JOB_SECONDS,
    SETTINGS,
    STATE,
    closed_record,
    finish,
    install_hooks,
    submit,
    with_plan,
)
from .guest import Guest
from .node import crater_node, push_source
from .slurm import Slurm, slurm_up

ANON_MIB, FILE_MIB = 200, 60
OBSERVING: dict[str, Any] = SETTINGS | {"node": SETTINGS["node"] | {"sample_seconds": 3}}


@pytest.fixture(scope="module")
def slurm(guest: Guest) -> Iterator[Slurm]:
    """A Slurm that runs our hooks, beside a node daemon that looks often."""
    push_source(guest)
    running = slurm_up(guest, install_hooks(guest))
    with crater_node(guest, OBSERVING, arguments=["--foreground"]):
        yield running
    running.down()


def holds(file: str, condition: str) -> str:
    """Bash that asks whether a condition on the fields of a JSON file holds."""
    code = f"import json; exit(not eval({condition!r}, json.load(open({file!r}))))"
    return f"python3 -c {shlex.quote(code)}"


def test_memory_is_seen_without_page_cache_and_reported_at_the_end(
    guest: Guest, slurm: Slurm
) -> None:
    go, file = f"/tmp/observe-{time.monotonic_ns()}", "/home/alice/observe"
    script = (
        f"{alloc.COMMAND} --anon-mib {ANON_MIB} --file {file} --file-mib {FILE_MIB} --hold {go}"
    )
    job = submit(slurm, script, "-n1", "--mem=600M", with_plan(guest, numa="best_effort"))
    kept = f"{STATE}/peaks/{job}.json"
    try:
        enough = holds(kept, f"need_mib >= {ANON_MIB}")
        guest.wait_for(enough, JOB_SECONDS, what="the job's need is seen", interval=2)
        looks = json.loads(guest.read(kept))["samples"]
        again = holds(kept, f"samples >= {looks + 2}")
        guest.wait_for(again, JOB_SECONDS, what="two looks at what it then was", interval=2)
    finally:
        guest.check(f"touch {go}")
    assert finish(slurm, job).exit_code == "0:0"
    assert closed_record(guest, job)["exit_code"] == "0:0"
    report = guest.wait_for(f"grep -h '\"ended\": true' {STATE}/observed/*.json", 60)
    told = json.loads(report)
    assert (told["job_id"], told["node"], told["succeeded"]) == (str(job), "n1", True)
    figures = told["figures"]
    # Python, bash and slurmstepd in the job's cgroup take some MiB beside the allocation.
    assert ANON_MIB <= figures["host_memory_peak_mib"] < ANON_MIB + 60
    assert figures["host_memory_total_peak_mib"] >= ANON_MIB + FILE_MIB
    assert 0 < figures["cpu_cores_mean"] <= 8
    assert "gpu_memory_peak_mib" not in figures
    # The io controller is off below Slurm's scope, so the processes' own counters are summed.
    assert figures["ssd_write_mb_s_peak"] > 0
    guest.check(f"rm -f {file}")
