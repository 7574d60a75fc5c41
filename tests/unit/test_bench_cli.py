"""``crater-probe bench``: what it plans, refuses and prints, and what reaches the profile's file."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner, Result

from crater_slurm.cli import probe_profile
from crater_slurm.cli.probe import probe
from crater_slurm.errors import CraterError
from crater_slurm.model.profile import Cpu, Method, NodeProfile, NumaNode, Provenance
from crater_slurm.probe.bench import lock, numa
from crater_slurm.probe.bench.result import Measurement
from crater_slurm.store.codec import profile_from_dict, profile_to_dict

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
PROFILE = NodeProfile(
    name="n1",
    cpu=Cpu(sockets=1, cores_per_socket=2),
    numa_nodes=(
        NumaNode(id=0, cpus=(0,), memory_mib=900),
        NumaNode(id=1, cpus=(1,), memory_mib=900),
    ),
)
FIGURES = {(0, 0): 100.0, (0, 1): 60.0, (1, 0): 61.0, (1, 1): 101.0}


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of two NUMA nodes whose benchmark has its figures at once."""

    def measure(
        profile: NodeProfile, places: list[tuple[int, int]], options: object, announce: object
    ) -> list[Measurement]:
        paths = {
            (i, j): f"numa_nodes[{i}]."
            + ("memory_bandwidth_gb_s" if i == j else f"remote_bandwidth_gb_s[{j}]")
            for i, j in places
        }
        return [
            Measurement(what=path, value=FIGURES[at], unit="GB/s", time=NOON, path=path)
            for at, path in paths.items()
        ]

    monkeypatch.setattr(probe_profile, "scan", lambda *_: SimpleNamespace(profile=PROFILE))
    monkeypatch.setattr(numa, "bench", measure)
    monkeypatch.setattr(lock, "lock_file", lambda: tmp_path / "bench.lock")
    path = tmp_path / "new" / "profile.json"
    monkeypatch.setenv("CRATER_NODE__PROFILE", str(path))
    monkeypatch.setenv("CRATER_NODE__CACHE__MOUNT_POINT", "/no/such/cache")
    return path


def run(*words: str) -> Result:
    return CliRunner().invoke(probe, ["bench", *words])


def stored(path: Path) -> NodeProfile:
    return profile_from_dict(json.loads(path.read_text()))


def test_without_a_profile_a_scan_is_written_with_the_figures(file: Path) -> None:
    done = run("memory")
    assert done.exit_code == 0, done.output
    assert f"numa_nodes[0].memory_bandwidth_gb_s written to {file}" in done.output
    assert file.stat().st_mode & 0o777 == 0o644
    profile = stored(file)
    assert [n.memory_bandwidth_gb_s for n in profile.numa_nodes] == [100, 101]
    origin = profile.where_from("numa_nodes[1].memory_bandwidth_gb_s")
    assert origin == Provenance(Method.MEASURED, NOON)


def test_the_matrix_has_a_row_for_each_node(file: Path) -> None:
    assert run("numa").exit_code == 0
    rows = [n.remote_bandwidth_gb_s for n in stored(file).numa_nodes]
    assert rows == [(100, 60), (61, 101)]


def test_what_else_the_file_says_stays(file: Path) -> None:
    file.parent.mkdir()
    document = profile_to_dict(PROFILE) | {"cache_gb": 3000}
    file.write_text(json.dumps(document))
    assert run("memory", "--nodes", "1").exit_code == 0
    assert stored(file).cache_gb == 3000
    assert [n.memory_bandwidth_gb_s for n in stored(file).numa_nodes] == [None, 101]


@pytest.mark.parametrize("option", ["--no-write", "--dry-run"])
def test_nothing_is_written_where_nothing_is_to_be(file: Path, option: str) -> None:
    assert run("memory", option).exit_code == 0
    assert not file.parent.exists()


def test_json_has_value_unit_time_and_path(file: Path) -> None:
    done = CliRunner().invoke(probe, ["bench", "memory", "--json", "--nodes", "0"])
    document = json.loads(done.stdout)
    (entry,) = document["results"]
    assert (entry["value"], entry["unit"], entry["time"]) == (100, "GB/s", NOON.isoformat())
    assert document["written"] == {"file": str(file), "paths": [entry["path"]]}


def test_a_dry_run_says_time_memory_space_and_fio_s_job(file: Path, tmp_path: Path) -> None:
    done = run("all", "--dry-run", "--quick", "--dir", str(tmp_path), "--allow-any-filesystem")
    assert done.exit_code == 0, done.output
    assert "memory bandwidth from NUMA node 0 to 1: 5 s, 2048 MiB of memory" in done.output
    assert "random read, 4k: 6 s, 1024 MiB of space" in done.output
    assert "    iodepth=64\n" in done.output
    assert "nothing was done" in done.output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["memory", "--nodes", "7"], "NUMA node 7 has no CPUs here"),
        (["memory", "--nodes", "x"], "--nodes x: 'x' is no cpulist range"),
        (["nvme"], "nothing is mounted at /no/such/cache"),
        (["nvme", "--dir", "/dev/null"], "/dev/null is no folder"),
        (["nvme", "--dir", "/proc"], "is on proc"),
    ],
)
def test_what_can_t_be_done_is_said_before_anything_is_done(
    file: Path, words: list[str], message: str
) -> None:
    error = run(*words).exception
    assert isinstance(error, CraterError)
    assert message in str(error)


def test_a_drive_that_can_t_be_measured_does_not_stop_the_rest_of_all(file: Path) -> None:
    done = run("all", "--dir", "/proc")
    assert isinstance(done.exception, CraterError)
    assert "1 of 5 refused, the first: /proc is on proc" in str(done.exception)
    assert stored(file).numa_nodes[1].memory_bandwidth_gb_s == 101


def test_a_file_of_another_machine_is_refused_before_the_measurement(file: Path) -> None:
    file.parent.mkdir()
    other = profile_to_dict(PROFILE)
    other["numa_nodes"][1]["cpus"] = ""
    file.write_text(json.dumps(other))
    assert "other NUMA nodes or CPUs than this machine" in str(run("memory").exception)


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, '{"name": "n1", "unknown": 1}'])
def test_a_file_that_is_no_profile_is_an_error(file: Path, text: str) -> None:
    file.parent.mkdir()
    file.write_text(text)
    assert isinstance(run("memory").exception, CraterError)
    assert file.read_text() == text
