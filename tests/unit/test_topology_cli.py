"""``crater topo`` as people and scripts call it."""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as Xml
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result
from store_samples import plain_profile, rich_profile
from topology_samples import big_node

from crater_slurm.cli.topo import topo
from crater_slurm.errors import CraterError, UsageError
from crater_slurm.store.codec import profile_to_dict
from crater_slurm.store.repository import Store


def run(*arguments: object) -> Result:
    result = CliRunner().invoke(topo, [str(item) for item in arguments])
    if isinstance(result.exception, CraterError):
        raise result.exception
    assert result.exception is None or isinstance(result.exception, SystemExit), result.output
    return result


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    file = tmp_path / "nodes.yaml"
    file.write_text(yaml.safe_dump(profile_to_dict(big_node())))
    return file


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"sqlite:///{tmp_path / 'crater.db'}"
    monkeypatch.setenv("CRATER_STORE__URL", url)
    Store.open(url, create=True).save_profile(rich_profile("gn01"))


def test_a_file_is_drawn(exported: Path) -> None:
    output = run("--file", exported).stdout
    assert "GPU 4-5  mlx5_4, mlx5_5 (PIX)  nvme2n1 (PIX)" in output


def test_each_form_goes_to_a_file(exported: Path, tmp_path: Path) -> None:
    wanted = tmp_path / "node"
    assert run("--file", exported, "--svg", "-o", wanted).output == ""
    Xml.parse(wanted)
    run("--file", exported, "--dot", "-o", wanted)
    assert wanted.read_text().startswith('graph "gn01" {')
    run("--file", exported, "--json", "-o", wanted)
    assert json.loads(wanted.read_text())["name"] == "gn01"
    run("--file", exported, "-o", wanted)
    assert wanted.read_text(encoding="utf-8").startswith("┌─ gn01 ")


def test_one_form_at_a_time(exported: Path) -> None:
    with pytest.raises(UsageError, match="--json and --svg are two forms; choose one"):
        run("--file", exported, "--svg", "--json")


def test_a_file_that_cannot_be_written_is_told(exported: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"can't write .*: No such file or directory"):
        run("--file", exported, "-o", tmp_path / "no" / "where")


def test_a_profile_without_a_name_has_the_file_s(tmp_path: Path) -> None:
    tree = profile_to_dict(big_node())
    del tree["name"]
    file = tmp_path / "gn77.json"
    file.write_text(json.dumps(tree))
    assert json.loads(run("--file", file, "--json").stdout)["name"] == "gn77"
    assert json.loads(run("--file", file, "--json", "--node", "x1").stdout)["name"] == "x1"


def test_one_of_several_nodes_of_a_file_is_picked_by_name(tmp_path: Path) -> None:
    file = tmp_path / "nodes.yaml"
    nodes = [profile_to_dict(plain_profile(name)) for name in ("cn01", "cn02")]
    file.write_text(yaml.safe_dump({"nodes": nodes}))
    assert json.loads(run("--file", file, "--node", "cn02", "--json").stdout)["name"] == "cn02"
    with pytest.raises(UsageError, match="has 2 nodes; say which with --node"):
        run("--file", file)
    with pytest.raises(UsageError, match="has no node cn2; did you mean cn02"):
        run("--file", file, "--node", "cn2")


def test_a_file_of_sections_holds_no_node(tmp_path: Path) -> None:
    file = tmp_path / "gpu_topology.yaml"
    file.write_text("gpu: {a100-pcie-40gb: {memory_bandwidth_gbps: 1555}}")
    with pytest.raises(UsageError, match="holds no profile such as 'crater nodes export' prints"):
        run("--file", file)


def test_a_node_of_the_store_is_drawn(store: None) -> None:
    assert run("--node", "gn01").stdout.startswith("┌─ gn01 ─")


def test_an_unknown_node_is_told_with_the_nearest(store: None) -> None:
    with pytest.raises(UsageError, match="no profile of node gn1; did you mean gn01"):
        run("--node", "gn1")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /sys")
def test_without_options_this_machine_is_drawn() -> None:
    graph = json.loads(run("--json").stdout)
    assert graph["nodes"][0]["kind"] == "machine"
    assert [node for node in graph["nodes"] if node["kind"] == "numa"]


def test_plain_ascii_where_the_output_has_no_boxes(exported: Path) -> None:
    result = CliRunner(charset="ascii").invoke(topo, ["--file", str(exported)])
    assert result.stdout.startswith("+- gn01 -")
