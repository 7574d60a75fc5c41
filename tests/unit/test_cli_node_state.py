"""``crater nodes events`` and ``health``: what an admin sees first in the night."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from store_samples import plain_profile

from crater_slurm.cli.main import crater
from crater_slurm.errors import CraterError
from crater_slurm.model.health import DriveHealth, GpuHealth, NodeHealth, NumaHealth
from crater_slurm.scheduler import client
from crater_slurm.store.health import health_to_dict
from crater_slurm.store.records import Event
from crater_slurm.store.repository import Store

LOST = Event(
    node="gn01",
    time=1_772_366_400.0,
    kind="gpu_lost",
    message="GPU 3 (a100) is gone.",
    path="gpus[3]",
    old="a100",
)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    url = f"sqlite:///{tmp_path}/crater.db"
    config = tmp_path / "crater.yaml"
    config.write_text(f"store: {{url: '{url}'}}\n")
    with Store.open(url, create=True) as store:
        store.save_profiles([plain_profile("gn01"), plain_profile("gn02")])
        store.add_events([LOST])

    def call(*words: str) -> Result:
        return CliRunner().invoke(crater, ["--config", str(config), "nodes", *words])

    return call


def test_events_are_a_table_with_both_values(run: Any) -> None:
    lines = run("events").stdout.splitlines()
    assert lines[0].split() == ["TIME", "NODE", "EVENT", "WAS", "IS", "WHAT"]
    assert lines[1].split()[2:] == [
        "gn01",
        "gpu_lost",
        "a100",
        "-",
        "GPU",
        "3",
        "(a100)",
        "is",
        "gone.",
    ]


def test_events_of_one_node_as_json(run: Any) -> None:
    (event,) = json.loads(run("events", "gn01", "--json").stdout)
    assert (event["kind"], event["old"], event["new"]) == ("gpu_lost", "a100", None)
    assert json.loads(run("events", "gn02", "--json").stdout) == []


def test_a_quiet_node_and_an_unknown_one(run: Any) -> None:
    assert run("events", "gn02").stdout == "nothing happened yet\n"
    unknown = run("events", "gn03")
    assert unknown.exit_code != 0
    assert "there is no profile of node gn03" in unknown.stderr


HEALTH = NodeHealth(
    node="gn01",
    time=1.0,
    load=3.5,
    numa_nodes=(NumaHealth(id=0, cpu_utilization_percent=12.5, memory_used_mib=1024),),
    gpus=(GpuHealth(index=0, model="a100", temperature_c=71, throttled=("thermal",)),),
    drives=(
        DriveHealth(name="nvme0n1", latency_us=90.5, read_iops=10),
        DriveHealth(name="nvme1n1"),
    ),
)


def test_health_is_told_part_by_part_with_units(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def node_health(url: str, name: str) -> dict[str, Any]:
        asked.append((url, name))
        return health_to_dict(HEALTH) | {"age_seconds": 4.2}

    monkeypatch.setattr(client, "node_health", node_health)
    lines = run("health", "gn01").stdout.splitlines()
    assert asked == [("http://127.0.0.1:9192", "gn01")]
    assert lines[0] == "gn01, reported 4.2 s ago, load 3.5"
    assert [" ".join(line.split()) for line in lines[2:]] == [
        "NUMA node 0 cpu utilization 12.5 %, memory used 1024 MiB",
        "GPU 0 (a100) temperature 71 °C, throttled thermal",
        "nvme0n1 read 10 IOPS, latency 90.5 µs",
        "nvme1n1 unknown",
    ]
    assert json.loads(run("health", "gn01", "--json").stdout)["load"] == 3.5


HOT = {
    "node": "gn01",
    "score": 0.225,
    "tier": 3,
    "degraded": True,
    "faults": ["gpu_temperature"],
    "flags": [],
    "own_weight": 1,
    "weight": 10001,
    "terms": [
        {
            "name": "load",
            "value": 0.5,
            "seen": "1.50 of each CPU",
            "threshold": "1",
            "grave": False,
        },
        {
            "name": "gpu_temperature",
            "value": 0.25,
            "seen": "GPU 3 at 89 °C",
            "threshold": "80 to 92 °C",
            "grave": True,
        },
    ],
}
WELL = {
    "node": "gn02",
    "score": 1.0,
    "tier": 0,
    "degraded": False,
    "faults": [],
    "terms": [],
    "flags": ["no_report"],
    "own_weight": None,
    "weight": 7,
}


def test_a_score_is_shown_with_its_terms(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    told = health_to_dict(HEALTH) | {"age_seconds": 4.2, "judged": HOT}
    monkeypatch.setattr(client, "node_health", lambda url, name: told)
    lines = [" ".join(line.split()) for line in run("health", "gn01").stdout.splitlines()]
    assert "score 0.23, tier 3, degraded, gpu_temperature" in lines
    assert lines[-1] == "gpu_temperature 0.25 GPU 3 at 89 °C 80 to 92 °C"


def test_all_nodes_are_a_table_with_the_worst_of_each(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = {"nodes": [HOT, WELL], "warnings": ["Prometheus does not answer"]}
    monkeypatch.setattr(client, "cluster_health", lambda url: told)
    done = run("health")
    assert [" ".join(line.split()) for line in done.stdout.splitlines()] == [
        "NODE SCORE FLAGS WEIGHT WORST",
        "gn01 0.23 tier 3, degraded, gpu_temperature 10001 (own 1) "
        "gpu_temperature: GPU 3 at 89 °C; load: 1.50 of each CPU",
        "gn02 1.00 no_report 7 -",
    ]
    assert done.stderr == "crater: warning: Prometheus does not answer\n"
    assert json.loads(run("health", "--json").stdout) == told


def test_a_node_that_never_reported_is_an_error(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def node_health(url: str, name: str) -> dict[str, Any]:
        raise CraterError(f"{name} has not reported since the scheduler started")

    monkeypatch.setattr(client, "node_health", node_health)
    done = run("health", "gn01")
    assert done.exit_code != 0
    assert "gn01 has not reported" in done.stderr
