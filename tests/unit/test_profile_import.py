"""Files of profiles, and files of values that are laid over profiles."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from store_samples import plain_profile, rich_profile

from crater_slurm.errors import UsageError
from crater_slurm.model.profile import Gpu, Method, NodeProfile, NumaNode, Nvme, Provenance
from crater_slurm.store.codec import profile_to_dict
from crater_slurm.store.diff import Difference, differences, show_value
from crater_slurm.store.importers import Change, plan_import, read_file

DECLARED = Provenance(Method.DECLARED)


def a100_node(name: str = "gn01", method: Method = Method.DERIVED) -> NodeProfile:
    """Two A100 as a driver tells them, with what the catalogue adds, on two NUMA nodes."""
    return dataclasses.replace(
        plain_profile(name),
        cpu=dataclasses.replace(plain_profile().cpu, sockets=2, cores_per_socket=32),
        numa_nodes=(
            NumaNode(id=0, cpus=tuple(range(32))),
            NumaNode(id=1, cpus=tuple(range(32, 64))),
        ),
        gpus=tuple(
            Gpu(index=i, model="a100-pcie-40gb", memory_mib=40960, memory_bandwidth_gb_s=1555)
            for i in range(2)
        ),
        nvmes=(Nvme(name="nvme0n1", stable_id="eui.77", random_read_iops=900_000),),
        source=Provenance(method),
        provenance={
            f"gpus[{i}].memory_bandwidth_gb_s": Provenance(Method.CATALOGUE) for i in range(2)
        },
    )


@pytest.fixture
def lay(tmp_path: Path) -> Any:
    """Applies the text of a file to a node; the node and the warnings come back."""

    def apply(text: str, node: NodeProfile | None = None) -> tuple[NodeProfile, tuple[str, ...]]:
        file = tmp_path / "probe-config.yaml"
        file.write_text(text)
        node = node or a100_node()
        (change,) = plan_import([read_file(file)], {node.name: node}, (node.name,))
        assert change.old is node
        return change.new, tuple(warning.replace(str(file), "FILE") for warning in change.warnings)

    return apply


def write(file: Path, data: object) -> Path:
    file.write_text(json.dumps(data) if file.suffix == ".json" else yaml.safe_dump(data))
    return file


def changes_of(
    *files: Path, present: tuple[NodeProfile, ...] = (), nodes: tuple[str, ...] = ()
) -> list[Change]:
    return plan_import([read_file(file) for file in files], {p.name: p for p in present}, nodes)


# Our own profiles


@pytest.mark.parametrize("name", ["nodes.yaml", "nodes.json"])
@pytest.mark.parametrize("form", ["nodes", "list", "mapping"])
def test_many_profiles_in_one_file(tmp_path: Path, name: str, form: str) -> None:
    entries = [profile_to_dict(rich_profile("a")), profile_to_dict(plain_profile("b"))]
    by_name = {
        entry["name"]: {key: value for key, value in entry.items() if key != "name"}
        for entry in entries
    }
    document = {"nodes": {"nodes": entries}, "list": entries, "mapping": {"nodes": by_name}}[form]
    found = changes_of(write(tmp_path / name, document))
    assert [change.new.name for change in found] == ["a", "b"]
    assert found[1].new == plain_profile("b")
    assert [change.old for change in found] == [None, None]


def test_several_documents_and_merge_keys_are_yaml(tmp_path: Path) -> None:
    file = tmp_path / "nodes.yaml"
    file.write_text(
        "---\n"
        "name: a\n"
        "cpu: {sockets: 1, cores_per_socket: 2}\n"
        "numa_nodes: [{id: 0, cpus: 0-1}]\n"
        "gpus:\n"
        "  - &card {index: 0, model: t4}\n"
        "  - {<<: *card, index: 1}\n"
        "---\n"
        "name: b\n"
        "cpu: {sockets: 1, cores_per_socket: 2}\n"
        "numa_nodes: [{id: 0, cpus: [0-1]}]\n"
        "---\n"
    )
    a, b = changes_of(file)
    assert [(gpu.index, gpu.model) for gpu in a.new.gpus] == [(0, "t4"), (1, "t4")]
    assert b.new == plain_profile("b")


def test_a_profile_without_a_name_is_for_the_named_nodes(tmp_path: Path) -> None:
    data = profile_to_dict(plain_profile())
    del data["name"]
    file = write(tmp_path / "profile.yaml", data)
    assert [change.new for change in changes_of(file, nodes=("a", "b"))] == [
        plain_profile("a"),
        plain_profile("b"),
    ]
    with pytest.raises(UsageError, match="has a profile without a name; say whose with --node"):
        changes_of(file)


def test_a_declared_gpu_is_completed_from_the_catalogue(tmp_path: Path) -> None:
    profile = dataclasses.replace(plain_profile(), gpus=(Gpu(index=0, model="NVIDIA L4"),))
    (change,) = changes_of(write(tmp_path / "p.yaml", profile_to_dict(profile)))
    gpu = change.new.gpus[0]
    assert (gpu.model, gpu.sm_count, gpu.memory_mib) == ("l4", 58, 23034)
    assert change.new.where_from("gpus[0].sm_count").method is Method.CATALOGUE
    assert change.new.where_from("gpus[0].model").method is Method.DECLARED


def test_a_declared_profile_over_a_measured_one_is_warned_of(tmp_path: Path) -> None:
    file = write(tmp_path / "p.yaml", profile_to_dict(plain_profile("gn01")))
    (change,) = changes_of(file, present=(a100_node(),))
    assert change.warnings == (
        "gn01: a whole profile that is declared replaces one that was derived on the machine",
    )
    (change,) = changes_of(file, present=(plain_profile("gn01"),))
    assert change.warnings == ()


def test_a_later_file_sees_the_earlier(tmp_path: Path) -> None:
    first = write(tmp_path / "p.yaml", profile_to_dict(a100_node()))
    second = tmp_path / "cpu_topology.yaml"
    second.write_text("cpu: {numa_nodes: [{id: 0, cores: [0-31], memory_bandwidth_gbps: 142}]}")
    (change,) = changes_of(first, second, nodes=("gn01",))
    assert change.old is None
    assert change.new.numa_nodes[0].memory_bandwidth_gb_s == 142


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("7", "the document: 7 is not a mapping"),
        ("- 7", r"\[0\]: 7 is not a mapping"),
        ("nodes: [7]", r"nodes\[0\]: 7 is not a mapping"),
        ("nodes: 7", "nodes: 7 is not a mapping"),
        ("nodes: []\nextra: 1", "extra: unknown 'extra'"),
        ("name: a\nname: b", "the key 'name' is there twice"),
        ("name: [", "can't be read"),
        ("name: a", "a: cpu is missing"),
        ("gpus: []\nname: a\ncpu: {sockets: 1}", "a: cpu.cores_per_socket is missing"),
        ("ssds: {}", "ssds: unknown 'ssds'; did you mean ssd?"),
        ("!!python/object:os.system {}", "can't be read"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    with pytest.raises(UsageError, match=message) as caught:
        read_file(file)
    assert str(file) in str(caught.value)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"can't read .*: No such file"):
        read_file(tmp_path / "nothing.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"name: \xfc")
    with pytest.raises(UsageError, match="is not text in UTF-8"):
        read_file(tmp_path / "latin.yaml")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(UsageError, match=r"bad.json can't be read"):
        read_file(tmp_path / "bad.json")


def test_a_node_twice_in_one_file_is_refused(tmp_path: Path) -> None:
    data = profile_to_dict(plain_profile("a"))
    with pytest.raises(UsageError, match="has the node a twice"):
        read_file(write(tmp_path / "p.yaml", [data, data]))


# gpu:


def test_the_well_known_wrong_bandwidth_is_warned_of_with_both_figures(lay: Any) -> None:
    new, warnings = lay(
        "gpu:\n"
        "  a100-pcie-40gb:\n"
        "    sm_count: 108\n"
        "    tensor_core_support: true\n"
        "    memory_bandwidth_gbps: 2038\n"
    )
    assert [gpu.memory_bandwidth_gb_s for gpu in new.gpus] == [1555, 1555]
    assert [gpu.sm_count for gpu in new.gpus] == [108, 108]
    assert [gpu.tensor_cores for gpu in new.gpus] == [True, True]
    assert new.where_from("gpus[1].sm_count") == DECLARED
    assert warnings == (
        "FILE: gpu.a100-pcie-40gb: a100-pcie-40gb with 2038 GB/s of memory bandwidth is +31% off "
        "the catalogue's 1555 GB/s",
        "FILE: gpu.a100-pcie-40gb: gn01 keeps memory_bandwidth_gb_s = 1555 GB/s (catalogue) over "
        "the file's 2038 GB/s (declared); 'override: true' takes the file's (gpus[0], gpus[1])",
    )


def test_override_takes_the_files_value_and_still_warns(lay: Any) -> None:
    new, warnings = lay("gpu: {a100-pcie-40gb: {memory_bandwidth_gbps: 2038, override: true}}")
    assert [gpu.memory_bandwidth_gb_s for gpu in new.gpus] == [2038, 2038]
    source = new.where_from("gpus[0].memory_bandwidth_gb_s")
    assert source == dataclasses.replace(DECLARED, override=True), "so that no report undoes it"
    assert len(warnings) == 1
    assert "is +31% off the catalogue's 1555 GB/s" in warnings[0]


def test_a_measured_bandwidth_beats_the_catalogue(lay: Any) -> None:
    new, warnings = lay(
        "gpu: {a100-pcie-40gb: {memory_bandwidth_gbps: 1490, method: measured, "
        "time: 2026-03-01T12:00:00Z}}"
    )
    assert new.gpus[0].memory_bandwidth_gb_s == 1490
    assert new.where_from("gpus[0].memory_bandwidth_gb_s").method is Method.MEASURED
    assert new.where_from("gpus[0].memory_bandwidth_gb_s").time is not None
    assert warnings == ()


def test_the_driver_wins_over_a_declared_sm_count(lay: Any) -> None:
    node = a100_node()
    node = dataclasses.replace(node, gpus=(dataclasses.replace(node.gpus[0], sm_count=108),))
    new, warnings = lay("gpu: {a100-pcie-40gb: {sm_count: 104}}", node)
    assert new.gpus[0].sm_count == 108
    assert len(warnings) == 2
    assert warnings[0].endswith("a100-pcie-40gb with 104 SMs, but the catalogue has 108")
    assert "keeps sm_count = 108 (derived) over the file's 104 (declared)" in warnings[1]


@pytest.mark.parametrize("key", ["NVIDIA A100-PCIE-40GB", "a100-pcie-40gb", "A100-PCIE-40GB"])
def test_a_model_is_found_by_id_or_driver_name(lay: Any, key: str) -> None:
    new, warnings = lay(f"gpu: {{'{key}': {{sm_count: 108}}}}")
    assert new.gpus[0].sm_count == 108
    assert warnings == ()


def test_a_model_that_the_node_lacks_is_warned_of(lay: Any) -> None:
    new, warnings = lay("gpu: {l4: {sm_count: 58}}")
    assert new == a100_node()
    assert warnings == ("FILE: gpu.l4: gn01 has no such GPU; it has a100-pcie-40gb",)


def test_models_may_stand_at_the_top_of_the_file(lay: Any) -> None:
    new, _ = lay("a100-pcie-40gb: {sm_count: 108, memory_bandwidth_gbps: 1555}")
    assert new.gpus[0].sm_count == 108


def test_a_gpu_section_alone_is_for_every_node_with_the_model(tmp_path: Path) -> None:
    file = tmp_path / "gpu_topology.yaml"
    file.write_text("gpu: {a100-pcie-40gb: {sm_count: 108}}")
    present = (a100_node("a"), plain_profile("b"), a100_node("c"))
    assert [change.new.name for change in changes_of(file, present=present)] == ["a", "c"]
    with pytest.raises(UsageError, match="no node has a GPU of the models a100-pcie-40gb"):
        changes_of(file, present=(plain_profile("b"),))


# cpu:


def test_a_measured_numa_bandwidth_is_taken(lay: Any) -> None:
    new, warnings = lay(
        "cpu:\n"
        "  numa_nodes:\n"
        "    - id: 0\n"
        "      cores: [0-31]\n"
        "      memory_bandwidth_gbps: 142\n"
        "      method: measured\n"
        "    - {id: 1, cores: [32-47, 48, '49-63'], memory_bandwidth_gbps: 138.7,\n"
        "       method: measured}\n"
    )
    assert [node.memory_bandwidth_gb_s for node in new.numa_nodes] == [142, 138.7]
    assert new.memory_bandwidth_gb_s == pytest.approx(280.7)
    assert new.where_from("numa_nodes[1].memory_bandwidth_gb_s").method is Method.MEASURED
    assert warnings == ()


def test_a_method_at_the_top_is_for_the_whole_file(lay: Any) -> None:
    new, _ = lay("method: measured\ncpu: {numa_nodes: [{id: 0, memory_bandwidth_gbps: 142}]}")
    assert new.where_from("numa_nodes[0].memory_bandwidth_gb_s").method is Method.MEASURED


def test_a_nominal_numa_bandwidth_counts_as_declared_and_says_so(lay: Any) -> None:
    new, warnings = lay("cpu: {numa_nodes: [{id: 0, memory_bandwidth_gbps: 256}]}")
    assert new.where_from("numa_nodes[0].memory_bandwidth_gb_s") == DECLARED
    assert warnings == (
        "FILE: cpu.numa_nodes[0]: the memory bandwidth counts as declared; if somebody measured "
        "it, say 'method: measured'",
    )


def test_cores_without_their_siblings_agree_and_the_kernels_list_stays(lay: Any) -> None:
    new, warnings = lay("cpu: {numa_nodes: [{id: 0, cores: [0-15]}]}")
    assert new.numa_nodes[0].cpus == tuple(range(32))
    assert warnings == ()


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("[{id: 2, cores: [0-31]}]", "gn01 has no NUMA node 2; it has 0-1"),
        ("[{id: 0, cores: [0-32]}]", "CPUs 32 are not in NUMA node 0 of gn01, which has 0-31"),
        ("[{id: 0, cores: [0-127]}]", "CPUs 32-127 are not in NUMA node 0"),
        (
            "[{id: 0, cores: [0-31]}, {id: 1, cores: [31-63]}]",
            "cores 31 are in node 0 and in node 1; each CPU has one NUMA node",
        ),
        ("[{id: 0}, {id: 0}]", r"cpu.numa_nodes: id 0 is there twice"),
        ("[{cores: [0-31]}]", r"cpu.numa_nodes\[0\]: id is missing"),
        ("[{id: 0, core: [0-31]}]", "unknown 'core'; did you mean cores?"),
        ("{id: 0}", "is not a list such as"),
        ("[{id: 0, memory_bandwidth_gbps: '142'}]", "'142' is not a number above 0"),
        ("[{id: 0, memory_bandwidth_gbps: 142000}]", "142000 is not a number above 0 up to 20000"),
        (
            "[{id: 0, memory_bandwidth_gbps: 1, memory_bandwidth_gb_s: 1}]",
            "memory_bandwidth_gb_s is given twice, under two names",
        ),
    ],
)
def test_a_wrong_cpu_section_is_refused(lay: Any, section: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        lay(f"cpu: {{numa_nodes: {section}}}")


# ssd:


@pytest.mark.parametrize("key", ["nvme0n1", "eui.77"])
@pytest.mark.parametrize("prefix", ["", "ssd_"])
def test_a_drive_is_found_by_name_or_stable_id(lay: Any, key: str, prefix: str) -> None:
    new, warnings = lay(
        "ssd:\n"
        f"  {key}:\n"
        f"    {prefix}latency_us: 87.2\n"
        f"    {prefix}iops_stability_ratio: 0.92\n"
        "    use_io_uring: true\n"
        "    seq_write_mb_s: 3950\n"
        "    random_write_iops: 180000\n"
    )
    assert new.nvmes == (
        Nvme(
            name="nvme0n1",
            stable_id="eui.77",
            random_read_iops=900_000,
            random_write_iops=180_000,
            read_latency_us=87.2,
            iops_stability_ratio=0.92,
            sequential_write_mb_s=3950,
        ),
    )
    assert new.where_from("nvmes[0].read_latency_us") == DECLARED
    assert new.where_from("nvmes[0].random_read_iops").method is Method.DERIVED
    assert warnings == ()


def test_a_drive_that_the_node_lacks_is_refused(lay: Any) -> None:
    with pytest.raises(UsageError, match="gn01 has no such drive; it has nvme0n1"):
        lay("ssd: {nvme1n1: {latency_us: 87}}")


def test_a_node_that_nobody_probed_for_drives_gets_the_declared_one(lay: Any) -> None:
    new, _ = lay("ssd: {nvme0n1: {latency_us: 87}}", plain_profile())
    assert new.nvmes == (Nvme(name="nvme0n1", read_latency_us=87),)
    assert new.where_from("nvmes[0].name") == DECLARED


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("{latncy_us: 87}", r"ssd.nvme0n1.latncy_us: unknown 'latncy_us'; did you mean latency_us"),
        ("{latency_us: 87, ssd_latency_us: 88}", "read_latency_us is given twice"),
        ("{use_io_uring: sometimes}", "'sometimes' is not true or false"),
        ("{iops_stability_ratio: 92}", "92 is not a number from 0 to 1"),
        ("{random_read_iops: 1.2e6}", "'1.2e6' is not a whole number"),
        ("{method: guessed}", "'guessed' is not one of measured"),
        ("fast", "'fast' is not a mapping"),
    ],
)
def test_a_wrong_drive_is_refused(lay: Any, entry: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        lay(f"ssd: {{nvme0n1: {entry}}}")


def test_sections_of_one_node_need_to_know_which(tmp_path: Path) -> None:
    file = tmp_path / "ssd.yaml"
    file.write_text("ssd: {nvme0n1: {latency_us: 87}}")
    with pytest.raises(UsageError, match="holds values of one node; say which with --node"):
        changes_of(file, present=(a100_node(),))
    with pytest.raises(UsageError, match="adds values to gn07, which has no profile yet"):
        changes_of(file, present=(a100_node(),), nodes=("gn07",))


# Differences


def test_differences_name_value_unit_and_method() -> None:
    old, new = a100_node(), a100_node()
    new = dataclasses.replace(
        new,
        cache_gb=3000,
        gpus=(dataclasses.replace(new.gpus[0], sm_count=108), *new.gpus[1:]),
        nvmes=(),
        provenance={**new.provenance, "gpus[0].sm_count": Provenance(Method.MEASURED)},
    )
    derived = Provenance(Method.DERIVED)
    found = differences(old, new)
    assert found[0] == Difference("gpus[0].sm_count", None, 108, None, Provenance(Method.MEASURED))
    assert {item.path for item in found} == {
        "gpus[0].sm_count",
        "nvmes[0].name",
        "nvmes[0].stable_id",
        "nvmes[0].random_read_iops",
        "cache_gb",
    }
    assert Difference("nvmes[0].random_read_iops", 900_000, None, derived, None) in found
    assert differences(old, old) == []
    assert differences(old, dataclasses.replace(old, name="other")) == []


@pytest.mark.parametrize(
    ("path", "value", "shown"),
    [
        ("gpus[0].memory_bandwidth_gb_s", 1555.0, "1555 GB/s"),
        ("numa_nodes[0].memory_bandwidth_gb_s", 138.7, "138.7 GB/s"),
        ("nvmes[0].sequential_write_mb_s", 1_234_567.0, "1234567 MB/s"),
        ("nvmes[0].iops_stability_ratio", 0.92, "0.92"),
        ("nvmes[0].read_latency_us", 87.25, "87.25 µs"),
        ("numa_nodes[0].cpus", (0, 1, 2, 3, 8), "0-3,8"),
        ("numa_nodes[0].distances", (10, 32), "10 32"),
        ("cpu.avx", frozenset(), "none"),
        ("cpu.avx", frozenset({"avx2", "avx"}), "avx avx2"),
        ("gpus[0].tensor_cores", False, "no"),
        ("gpus[0].nvlinks", (), "-"),
        ("cache_gb", None, "-"),
        ("gpus[0].sm_count", 108, "108"),
    ],
)
def test_values_are_shown_with_their_unit(path: str, value: object, shown: str) -> None:
    assert show_value(path, value) == shown
