"""Which node Slurm takes: the rule that the score and the simulator go by, against slurmctld."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from helpers import cancel, wait_until

from crater_slurm.lab import Lab
from crater_slurm.placement import order
from crater_slurm.placement.packing.kernels import WHOLE
from crater_slurm.placement.packing.state import Cluster, Need

#: Cores and GPUs of the nodes, in Slurm's order; kinds stand beside each other and apart.
NODES = ((8, 2), (8, 2), (12, 0), (16, 4), (8, 2), (8, 0), (16, 4), (12, 2), (12, 2), (8, 1))
JOBS = 40


@dataclass(frozen=True)
class Machine:
    lab: Lab
    weighted: bool


@pytest.fixture(scope="module", params=[False, True], ids=["alike", "weighted"])
def machine(
    request: pytest.FixtureRequest, lab_factory: Callable[..., Lab], tmp_path_factory: Any
) -> Machine:
    file: Path = tmp_path_factory.mktemp("nodes") / "nodes.yaml"
    nodes = [{"name": f"n{i}", "profile": made(*one)} for i, one in enumerate(NODES, start=1)]
    file.write_text(yaml.safe_dump({"nodes": nodes}))
    lab = lab_factory(inventory=str(file), crater=False, weights=request.param)
    # The lab's own partitions have nodes with GPUs, or without.
    lab.run(["scontrol", "create", "partitionname=all", "nodes=ALL"], user="root", check=True)
    return Machine(lab, request.param)


def made(cores: int, gpus: int) -> dict[str, Any]:
    numa = {"id": 0, "cpus": f"0-{cores - 1}", "socket": 0, "memory_mib": 8192, "distances": [10]}
    cpu = {"model": "of the test", "arch": "x86_64", "sockets": 1, "cores_per_socket": cores}
    cards = [
        {
            "index": i,
            "numa_node": 0,
            "pci_bus_id": f"0000:{i + 1:02x}:00.0",
            "model": "t4",
            "gres_type": "t4",
            "memory_mib": 15360,
        }
        for i in range(gpus)
    ]
    cpu |= {"threads_per_core": 1}
    return {"memory_mib": 8192, "cpu": cpu, "numa_nodes": [numa], "gpus": cards}


@pytest.fixture
def empty(machine: Machine) -> Iterator[Machine]:
    yield machine
    cancel(machine.lab)


def allocated(lab: Lab, need: Need) -> tuple[int, int] | None:
    """Job and node of an allocation that is had at once, or None."""
    gpus = [f"--gres=gpu:{need.count}"] if need.count else []
    what = ["-N1", "-n1", f"-c{need.take[0]}", "--mem=1", *gpus]
    done = lab.run(["salloc", "--immediate", "--no-shell", "-pall", *what], timeout=60)
    if "Granted job allocation" not in done.stderr:
        assert "Unable to allocate" in done.stderr or "busy" in done.stderr, done.stderr
        return None
    job = int(done.stderr.split("Granted job allocation ")[1].split()[0])
    return job, int(lab.job(job)["NodeList"].removeprefix("n")) - 1


def test_slurm_takes_the_node_that_the_rule_says(empty: Machine) -> None:
    """Jobs with and without GPUs come and go; each one's node is told before Slurm is asked."""
    random = np.random.default_rng(7)
    cluster = Cluster([g for _, g in NODES], [0] * len(NODES), [[cores] for cores, _ in NODES])
    weights = 1 + cluster.sizes if empty.weighted else np.ones_like(cluster.sizes)
    running: list[tuple[int, Need, Any]] = []
    refused = 0
    for _ in range(JOBS):
        if running and random.random() < 0.3:
            job, need, there = running.pop(int(random.integers(len(running))))
            empty.lab.run(["scancel", str(job)], user="root", check=True)
            gone(empty.lab, job)
            cluster.release(need, there)
        count = int(random.choice([0, 0, 1, 1, 2, 4]))
        need = Need(count, WHOLE if count else 0, (int(random.integers(1, 7)),))
        able = np.flatnonzero(cluster.fitting(need))
        found = allocated(empty.lab, need)
        if not able.size:
            assert found is None, need
            refused += 1
            continue
        free, release = cluster.rest[able, 0], empty.lab.version
        expected = order.taken(able, weights[able], free, need.take[0], need.count, release)
        assert found, need
        assert found[1] == expected, (need, able.tolist(), free.tolist())
        running.append((found[0], need, cluster.place(need, expected)))
    assert refused < JOBS / 2


def gone(lab: Lab, job: int) -> None:
    """Wait until Slurm has given back what a job had."""
    listed = ["squeue", "--noheader", "--format=%i"]
    wait_until(lambda: str(job) not in lab.run(listed).stdout.split(), f"job {job} is gone")
