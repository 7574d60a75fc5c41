"""``crater observations`` and what ``crater explain`` shows of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from crater_slurm.cli import observed_view
from crater_slurm.cli.explanation import lines
from crater_slurm.cli.main import crater
from crater_slurm.model.observation import Observation
from crater_slurm.store.observations import observation_to_dict
from crater_slurm.store.repository import Store

TRAINED = Observation(
    job_id=7,
    plan_id="p1",
    node="gn01",
    time=1000.0,
    seconds=7530.0,
    ended=True,
    succeeded=True,
    samples=251,
    gpus=2,
    key="llama-3-8b|lora|torch",
    workload={
        "model": "llama-3-8b",
        "method": "lora",
        "framework": "torch",
        "precision": "bf16",
        "micro_batch": 4,
        "tensor_parallel": 1,
        "gpus": 2,
    },
    host_memory_peak_mib=21_504,
    host_memory_total_peak_mib=92_160,
    gpu_memory_peak_mib=17_613,
    gpu_memory_size_mib=40_960,
    cpu_cores_mean=5.25,
    gpu_utilization_mean_percent=63.2,
    gpu_utilization_max_percent=100.0,
    ssd_read_mb_s_peak=812.0,
    ssd_write_mb_s_peak=0.0,
)
KILLED = Observation(
    job_id=8,
    plan_id="p2",
    node="gn02",
    time=2000.0,
    seconds=45.0,
    ended=True,
    succeeded=False,
    oom_kills=1,
    samples=2,
    host_memory_peak_mib=900,
)


@pytest.fixture
def run(tmp_path: Path) -> Any:
    url = f"sqlite:///{tmp_path}/crater.db"
    config = tmp_path / "crater.yaml"
    config.write_text(f"store: {{url: '{url}'}}\n")
    with Store.open(url, create=True) as store:
        store.add_observations([TRAINED, KILLED])

    def call(*words: str) -> Result:
        return CliRunner().invoke(crater, ["--config", str(config), "observations", *words])

    return call


def test_what_was_learnt_is_a_table_the_newest_first(run: Any) -> None:
    shown = [[cell.strip() for cell in line.split("  ") if cell.strip()]
             for line in run("list").stdout.splitlines()]  # fmt: skip
    assert shown == [
        ["JOB", "NODE", "WORKLOAD", "SETTINGS", "GPU MEMORY", "HOST MEMORY", "GPU USE",
         "SEEN FOR", "COUNTS"],
        ["8", "gn02", "-", "-", "-", ">= 900 MiB", "-", "45 s, failed", "no"],
        ["7", "gn01", "llama-3-8b|lora|torch", "precision=bf16 micro_batch=4 gpus=2", "17.2 GiB",
         "21 GiB", "63 %", "2 h 5 min, ended well", "yes"],
    ]  # fmt: skip


def test_one_workload_as_json(run: Any) -> None:
    (seen,) = json.loads(run("list", "--key", "llama-3-8b|lora|torch", "--json").stdout)
    assert seen == observation_to_dict(TRAINED) | {"counts": True}
    assert len(json.loads(run("list", "--limit", "1", "--json").stdout)) == 1
    assert json.loads(run("list", "--key", "nothing", "--json").stdout) == []


def test_nothing_seen_is_said(run: Any) -> None:
    assert run("list", "--key", "gpt||").stdout.startswith("nothing of 'gpt||' was observed yet")


def explained(seen: list[dict[str, Any]]) -> list[str]:
    return list(lines({}, (), {}, (), seen))


def test_explain_says_what_the_job_really_used() -> None:
    assert explained([observation_to_dict(TRAINED), observation_to_dict(KILLED)]) == [
        "",
        "What the job got",
        "  seen on gn01 for 2 h 5 min, ended well:",
        "    peak GPU memory 17.2 GiB of 40 GiB, host memory 21 GiB (90 GiB with page cache), "
        "GPU utilization mean 63 %, at most 100 %, 5.25 cores in the mean, read at most 812 MB/s",
        "  seen on gn02 for 45 s, failed:",
        "    host memory 900 MiB, killed for its memory: it needs more",
    ]
    assert explained([]) == []


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"ended": False, "seconds": 61.0}, "1 min, still running"),
        ({"ended": True, "succeeded": None, "seconds": 3600.0}, "1 h 0 min, ended"),
    ],
)
def test_how_long_and_how_it_went(fields: dict[str, Any], words: str) -> None:
    assert observed_view.span(fields) == words


def test_where_nothing_was_measured_it_is_said() -> None:
    assert observed_view.sentence({}) == "nothing could be measured"
