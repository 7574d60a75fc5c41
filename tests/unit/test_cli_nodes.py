"""``crater nodes`` and ``crater db`` as people and scripts see them."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest
import yaml
from click.testing import CliRunner, Result
from store_samples import plain_profile, rich_profile

from crater_slurm.cli.db import db
from crater_slurm.cli.nodes import nodes
from crater_slurm.config import Loaded, Settings
from crater_slurm.errors import CraterError, StoreError, UsageError
from crater_slurm.store.codec import profile_to_dict
from crater_slurm.store.migrations import HEAD
from crater_slurm.store.repository import Store

Run = Callable[..., Result]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "crater.db"


@pytest.fixture
def run(file: Path) -> Run:
    """Runs a command with settings that name the store; our own errors come through."""

    @click.group()
    @click.pass_context
    def crater(context: click.Context) -> None:
        context.obj = Loaded(Settings.model_validate({"store": {"url": f"sqlite:///{file}"}}))

    crater.add_command(nodes)
    crater.add_command(db)

    def invoke(*arguments: object) -> Result:
        result = CliRunner().invoke(crater, [str(item) for item in arguments])
        if isinstance(result.exception, CraterError):
            raise result.exception
        assert result.exception is None or isinstance(result.exception, SystemExit), result.output
        return result

    return invoke


@pytest.fixture
def store(file: Path) -> Store:
    return Store.open(f"sqlite:///{file}", create=True)


@pytest.fixture
def gpu_node(store: Store) -> None:
    store.save_profile(rich_profile("gn01"))


# db


def test_upgrade_makes_the_store_and_then_leaves_it(run: Run, file: Path) -> None:
    assert run("db", "current").stdout == f"{file} has no tables yet; run 'crater db upgrade'\n"
    assert not file.exists()
    assert run("db", "upgrade").stdout == f"{file} made, revision {HEAD}\n"
    assert run("db", "upgrade").stdout == f"{file} is at revision {HEAD} already\n"
    assert run("db", "current").stdout == f"{file} is at revision {HEAD}, the newest\n"
    assert json.loads(run("db", "current", "--json").stdout) == {
        "store": str(file),
        "current": HEAD,
        "newest": HEAD,
    }


def test_check_counts_rows(run: Run, gpu_node: None) -> None:
    report = json.loads(run("db", "check", "--json").stdout)
    assert report["problems"] == []
    assert report["rows"]["gpu"] == 4
    assert "  gpu                   4\n" in run("db", "check").stdout


def test_check_fails_on_what_is_wrong(run: Run, file: Path, gpu_node: None) -> None:
    sqlite3.connect(file).execute("ALTER TABLE gpu ADD COLUMN colour TEXT")
    with pytest.raises(StoreError, match=r"the tables differ from this version's: .*colour"):
        run("db", "check")


def test_commands_without_a_store_say_what_to_do(run: Run) -> None:
    for command in (("nodes", "list"), ("nodes", "export"), ("db", "check")):
        with pytest.raises(StoreError, match="does not exist; run 'crater db upgrade'"):
            run(*command)


def test_without_a_root_command_the_usual_settings_count(
    file: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CRATER_STORE__URL", f"sqlite:///{file}")
    result = CliRunner().invoke(nodes, ["list", "--json"])
    assert result.stdout == "[]\n"


def test_the_root_commands_settings_file_counts(file: Path, store: Store, tmp_path: Path) -> None:
    from crater_slurm.cli.main import crater

    config = tmp_path / "crater.yaml"
    config.write_text(f"store: {{url: 'sqlite:///{file}'}}")
    result = CliRunner().invoke(crater, ["--config", str(config), "nodes", "list", "--json"])
    assert result.stdout == "[]\n"


# nodes


def test_an_empty_list_says_how_to_fill_it(run: Run, store: Store) -> None:
    assert "run crater-probe on the nodes, or import a file" in run("nodes", "list").stdout


def test_the_list_is_complete_and_plain_when_piped(run: Run, store: Store) -> None:
    name = "a-node-with-quite-a-long-name-that-is-still-a-name.cluster.example.org"
    store.save_profiles([rich_profile("gn01"), plain_profile(name)])
    output = run("nodes", "list").stdout
    lines = output.splitlines()
    assert " ".join(lines[0].split()) == (
        "NODE GPUS CORES NUMA MEMORY BANDWIDTH NVME READ KNOWN BY"
    )
    assert lines[1].startswith(f"{name}  ")
    assert lines[1].split() == [name, "-", "2", "1", "-", "-", "-", "declared"]
    assert "1 x a100-pcie-40gb, 1 x Tesla, x, 1 x unbekannte Karte, 1 x t4" in lines[2]
    assert "503 GiB" in lines[2]
    assert "850000 IOPS" in lines[2]
    assert lines[2].endswith("derived 2026-03-01T12:00:00Z")
    assert "\x1b" not in output


def test_the_list_as_json(run: Run, store: Store) -> None:
    store.save_profile(plain_profile("cn01"))
    assert json.loads(run("nodes", "list", "--json").stdout) == [
        {
            "name": "cn01",
            "gpus": {},
            "cores": 2,
            "numa_nodes": 1,
            "memory_mib": None,
            "memory_bandwidth_gb_s": None,
            "random_read_iops": None,
            "method": "declared",
            "time": None,
        }
    ]


def test_show_gives_value_unit_method_and_time(run: Run, gpu_node: None) -> None:
    lines = run("nodes", "show", "gn01").stdout.splitlines()
    rows = {line.split()[0]: line.split()[1:] for line in lines[2:]}
    assert lines[0] == "gn01, derived 2026-03-01T12:00:00Z"
    assert rows["gpus[0].memory_mib"] == ["40960", "MiB", "declared", "2026-03-01T12:00:00Z"]
    assert rows["gpus[0].sm_count"] == ["108", "catalogue", "-"]
    assert rows["nvmes[0].read_latency_us"] == ["87.2", "µs", "measured", "2026-03-01T12:00:00Z"]
    assert rows["gpus[3].memory_mib"] == ["-", "-", "-"]
    assert rows["numa_nodes[0].cpus"] == ["0-3,8-11", "derived", "2026-03-01T12:00:00Z"]


def test_show_as_json(run: Run, gpu_node: None) -> None:
    shown = json.loads(run("nodes", "show", "gn01", "--json").stdout)
    values = {entry.pop("path"): entry for entry in shown["values"]}
    assert shown["name"] == "gn01"
    assert values["gpus[0].memory_bandwidth_gb_s"] == {
        "value": 1555.0,
        "unit": "GB/s",
        "method": "derived",
        "time": "2026-03-01T12:00:00Z",
    }
    assert values["gpus[3].sm_count"] == {
        "value": None,
        "unit": "1",
        "method": None,
        "time": None,
    }
    assert values["cpu.avx"]["value"] == ["avx", "avx2"]


def test_an_unknown_node_is_told_with_the_nearest(run: Run, gpu_node: None) -> None:
    for command in (("show", "gn1"), ("export", "gn1"), ("remove", "gn1"), ("diff", "gn01", "gn1")):
        with pytest.raises(UsageError, match="no profile of node gn1; did you mean gn01"):
            run("nodes", *command)
    with pytest.raises(UsageError, match="'crater nodes list' shows those"):
        run("nodes", "show", "zzz")


@pytest.mark.parametrize("form", ["yaml", "json"])
def test_what_was_exported_can_be_imported(
    run: Run, store: Store, tmp_path: Path, form: str
) -> None:
    profiles = [rich_profile("gn01"), plain_profile("gn02")]
    store.save_profiles(profiles)
    exported = tmp_path / f"nodes.{form}"
    exported.write_text(run("nodes", "export", "--format", form).stdout, encoding="utf-8")
    run("nodes", "remove", "gn[01-02]")
    assert store.names() == []
    output = run("nodes", "import", exported).stdout
    assert output == "gn01: new\ngn02: new\n2 stored, 0 as they were\n"
    assert store.profile("gn02") == profiles[1]
    # The catalogue completes the T4, which the first profile knew nothing of.
    assert store.profile("gn01").gpus[3].sm_count == 40  # type: ignore[union-attr]
    exported.write_text(run("nodes", "export", "--format", form).stdout, encoding="utf-8")
    assert run("nodes", "import", exported).stdout.endswith("0 stored, 2 as they were\n")


def test_one_node_is_exported_as_itself(run: Run, gpu_node: None) -> None:
    assert yaml.safe_load(run("nodes", "export", "gn01").stdout) == profile_to_dict(
        rich_profile("gn01")
    )


@pytest.fixture
def overlay(tmp_path: Path) -> Path:
    file = tmp_path / "probe-config.yaml"
    file.write_text(
        "gpu: {a100-pcie-40gb: {memory_bandwidth_gbps: 2038}}\n"
        "ssd: {nvme1n1: {latency_us: 95, method: measured}}\n"
    )
    return file


def test_a_dry_run_shows_the_change_and_stores_nothing(
    run: Run, store: Store, gpu_node: None, overlay: Path
) -> None:
    result = run("nodes", "import", overlay, "--node", "gn01", "--dry-run")
    assert result.stdout.splitlines() == [
        "gn01:",
        "VALUE OF                  NOW  METHOD  NEW    METHOD",
        "nvmes[1].read_latency_us  -    -       95 µs  measured",
        "dry run: nothing was stored",
    ]
    assert "is +31% off the catalogue's 1555 GB/s" in result.stderr
    assert "'override: true' takes the file's (gpus[0])" in result.stderr
    assert store.profile("gn01") == rich_profile("gn01")


def test_an_import_stores_what_it_showed(
    run: Run, store: Store, gpu_node: None, overlay: Path
) -> None:
    result = run("nodes", "import", overlay, "--node", "gn01", "--json")
    (change,) = json.loads(result.stdout)["nodes"]
    assert (change["name"], change["new"], len(change["warnings"])) == ("gn01", False, 2)
    assert change["changes"] == [
        {
            "path": "nvmes[1].read_latency_us",
            "old": None,
            "new": 95.0,
            "old_method": None,
            "new_method": "measured",
        }
    ]
    assert store.profile("gn01").nvmes[1].read_latency_us == 95  # type: ignore[union-attr]


def test_an_import_with_a_mistake_stores_nothing(run: Run, store: Store, tmp_path: Path) -> None:
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text(yaml.safe_dump(profile_to_dict(plain_profile("a"))))
    bad.write_text("name: b\ncpu: {sockets: 0, cores_per_socket: 1}\nnuma_nodes: []\n")
    with pytest.raises(UsageError, match=r"bad.yaml: b: cpu.sockets: 0 is not a whole number"):
        run("nodes", "import", good, bad)
    assert store.names() == []


def test_a_host_list_names_many_nodes(run: Run, store: Store, tmp_path: Path) -> None:
    file = tmp_path / "p.yaml"
    data = profile_to_dict(plain_profile())
    del data["name"]
    file.write_text(yaml.safe_dump(data))
    run("nodes", "import", file, "--node", "cn[08-10]")
    assert store.names() == ["cn08", "cn09", "cn10"]


def test_nodes_are_compared(run: Run, store: Store, overlay: Path) -> None:
    store.save_profiles([rich_profile("gn01"), rich_profile("gn02"), plain_profile("cn01")])
    assert run("nodes", "diff", "gn01", "gn02").stdout == "gn01 and gn02 have the same values\n"
    found = json.loads(run("nodes", "diff", "gn01", "cn01", "--json").stdout)
    assert {
        "path": "cache_gb",
        "old": 3000,
        "new": None,
        "old_method": "derived",
        "new_method": None,
    } in found
    lines = run("nodes", "diff", "gn01", overlay).stdout.splitlines()
    assert lines[1].split() == ["nvmes[1].read_latency_us", "-", "-", "95", "µs", "measured"]
    assert len(lines) == 2


def test_a_node_is_compared_with_a_file_of_profiles(
    run: Run, gpu_node: None, tmp_path: Path
) -> None:
    file = tmp_path / "nodes.yaml"
    entries = [profile_to_dict(plain_profile("a")), profile_to_dict(plain_profile("b"))]
    file.write_text(yaml.safe_dump(entries[0]))
    assert "cpu.sockets" in run("nodes", "diff", "gn01", file).stdout
    file.write_text(yaml.safe_dump(entries))
    with pytest.raises(UsageError, match="has several nodes, but not gn01"):
        run("nodes", "diff", "gn01", file)


def test_the_commands_load_nothing_heavy() -> None:
    script = (
        "import sys, crater_slurm.cli.nodes, crater_slurm.cli.db\n"
        "heavy = {'sqlalchemy', 'alembic', 'rich', 'yaml', 'pydantic'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={"PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")
