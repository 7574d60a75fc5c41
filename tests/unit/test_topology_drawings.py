"""Drawings as people see them, and that no profile, however odd, breaks one."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import xml.etree.ElementTree as Xml
from dataclasses import replace

import pytest
from hypothesis import given, settings
from topology_samples import GEN4_X8, GEN4_X16, big_node, numa_nodes, pci
from topology_strategies import PHASES, profiles

from crater_slurm.lab.inventory import load, shipped
from crater_slurm.model.profile import Cpu, NodeProfile, NumaKind, NumaNode, PciKind, PciLink
from crater_slurm.topology import data, dot, svg, text, words
from crater_slurm.topology.scene import Shape, scene, walk

SHIPPED = {entry.names[0]: entry.profile for name in shipped() for entry in load(name).entries}
SVG = "{http://www.w3.org/2000/svg}"


def frames_are_straight(drawing: str) -> None:
    """All lines of the picture are as wide, and begin and end with a frame."""
    picture = drawing.partition("\n\n")[0].splitlines()
    framed = [line for line in picture if line[:1] in "┌│└+|" and not line.startswith("(!)")]
    assert len({len(line) for line in framed}) == 1
    assert all(line[-1] in "┐│┘+|" for line in framed)


# text


def test_a_node_is_boxes_in_boxes_with_its_devices_in_their_numa_node() -> None:
    profile = NodeProfile(
        name="n1",
        cpu=Cpu(model="Xeon 6346", sockets=2, cores_per_socket=4),
        numa_nodes=numa_nodes(2, 4),
        pci_devices=(
            pci("0000:02:00.0", PciKind.NIC, "pci0000:00", ("0000:00:1.0",), 0, ("eth0",), GEN4_X8, GEN4_X16),
        ),
    )  # fmt: skip
    assert text.draw(profile, 60).splitlines()[:13] == [
        "┌─ n1 ─────────────────────────────────────────────────────┐",
        "│ 2 x Xeon 6346, 4 cores each                              │",
        "│ ┌─ package 0 ──────────────────────────────────────────┐ │",
        "│ │ ┌─ NUMA node 0 ────────────────────────────────────┐ │ │",
        "│ │ │ 251.5 GiB, 88.5 GB/s declared                    │ │ │",
        "│ │ │ CPUs 0-3                                         │ │ │",
        "│ │ │ ┌─ PCI root 0000:00 ───────────────────────────┐ │ │ │",
        "│ │ │ │ NIC 0  eth0  PCIe 4.0 x8 of x16 (!)          │ │ │ │",
        "│ │ │ └──────────────────────────────────────────────┘ │ │ │",
        "│ │ └──────────────────────────────────────────────────┘ │ │",
        "│ └──────────────────────────────────────────────────────┘ │",
        "│ ┌─ package 1 ──────────────────────────────────────────┐ │",
        "│ │ ┌─ NUMA node 1 ────────────────────────────────────┐ │ │",
    ]


def test_eight_gpus_on_four_numa_nodes_stay_readable() -> None:
    drawing = text.draw(big_node())
    frames_are_straight(drawing)
    assert max(map(len, drawing.splitlines())) == 100
    assert len(drawing.partition("\n\n")[0].splitlines()) < 60
    for part in (
        "NVLink  GPU 0-7 each to each: NV12, 600 GB/s",
        "PCI root 0000:00, switch 01:00.0",
        "GPU 0-1  a100-sxm4-80gb",
        "NIC 6-7  mlx5_6 ib6, mlx5_7 ib7",
        "PCIe 4.0 x8 of x16 (!)",
        "GPU 4-5  mlx5_4, mlx5_5 (PIX)  nvme2n1 (PIX)",
    ):
        assert part in drawing
    # The GPU with half of its lanes is not grouped with the other.
    assert re.search(r"GPU 5  a100-sxm4-80gb", drawing)


def test_the_matrix_is_cut_into_blocks_that_fit_and_is_whole() -> None:
    drawing = text.draw(big_node())
    blocks = [b.splitlines() for b in drawing.split("\n\n") if b.split()[0] in ("GPU0", "NIC7")]
    assert [len(block) for block in blocks] == [21, 21]
    heads = [word for block in blocks for word in block[0].split()]
    assert heads == [
        *(f"GPU{i}" for i in range(8)),
        *(f"NIC{i}" for i in range(8)),
        *(f"NVMe{i}" for i in range(4)),
        "NUMA",
    ]
    assert blocks[0][1].split()[:4] == ["GPU0", "X", "NV12", "NV12"]
    assert blocks[1][4].split() == ["GPU3", "SYS", "SYS", "PIX", "SYS", "SYS", "1"]


def test_ascii_takes_the_place_of_boxes() -> None:
    drawing = text.draw(replace(big_node(), name="nœud"), ascii_only=True)
    drawing.encode("ascii")
    assert drawing.startswith("+- n?ud ---")
    frames_are_straight(drawing)


def test_wide_characters_do_not_bend_the_frame() -> None:
    frames_are_straight(text.draw(replace(big_node(), name="机架一")))


def test_the_legend_explains_the_classes_that_occur_and_no_others() -> None:
    legend = text.draw(big_node()).partition("X    =")[2]
    assert "NV#  = NVLink" in legend
    assert "PXB" not in legend
    assert "NIC0 = mlx5_0 ib0; NIC1 = mlx5_1 ib1" in legend


def test_memory_without_cpus_and_gpu_memory_are_said() -> None:
    profile = replace(
        big_node(),
        numa_nodes=(
            *numa_nodes(2, 4),
            NumaNode(id=2, cpus=(), kind=NumaKind.MEMORY, memory_mib=65536),
            NumaNode(id=3, cpus=(), kind=NumaKind.GPU_MEMORY),
        ),
    )
    drawing = text.draw(profile)
    assert "NUMA node 2, memory only" in drawing
    assert "NUMA node 3, GPU memory" in drawing
    assert "no CPUs" in drawing


def test_devices_without_a_numa_node_are_shown_apart() -> None:
    profile = replace(
        big_node(), gpus=(), nvmes=(), pci_devices=(pci("0000:02:00.0", PciKind.NIC),)
    )
    (apart,) = [box for box in walk(scene(profile)) if box.shape is Shape.ELSEWHERE]
    assert apart.title == "NUMA node not known"
    assert [box.title for box in apart.children] == ["NIC 0"]


def test_the_ports_of_a_card_stand_apart_from_other_cards() -> None:
    found = tuple(
        pci(f"0000:0{card}:00.{port}", PciKind.NIC, "pci0000:00", (f"0000:00:0{card}.0",), 0)
        for card in (2, 3)
        for port in (0, 1)
    )
    profile = replace(big_node(), gpus=(), nvmes=(), pci_devices=found)
    titles = [box.title for box in walk(scene(profile)) if box.shape is Shape.NIC]
    assert titles == ["NIC 0-1", "NIC 2-3"]


@pytest.mark.parametrize(
    ("now", "most", "expected"),
    [
        ((16, 16), (16, 16), "PCIe 4.0 x16"),
        ((16, 8), (16, 16), "PCIe 4.0 x8 of x16 (!)"),
        ((2.5, 16), (16, 16), "PCIe 1.0 of 4.0, x16 (!)"),
        ((8, 4), (32, 16), "PCIe 3.0 x4 of 5.0 x16 (!)"),
        ((64, 16), None, "PCIe 6.0 x16"),
        (None, (32, 4), "PCIe up to 5.0 x4"),
        ((17, 1), None, "PCIe 17 GT/s x1"),
        (None, None, ""),
    ],
)
def test_a_link_below_its_maximum_is_marked(
    now: tuple[float, int] | None, most: tuple[float, int] | None, expected: str
) -> None:
    made = [PciLink(speed_gt_s=l[0], width=l[1]) if l else None for l in (now, most)]  # noqa: E741
    assert words.link(*made) == expected


# all forms


@pytest.mark.parametrize("name", sorted(SHIPPED))
def test_every_profile_that_ships_draws(name: str) -> None:
    profile = SHIPPED[name]
    drawing = text.draw(profile)
    frames_are_straight(drawing)
    assert max(map(len, drawing.splitlines())) <= 100
    Xml.fromstring(svg.draw(profile))
    for node in profile.numa_nodes:
        assert f"NUMA node {node.id}" in drawing
    # They have no PCI paths, so nothing nearer than another NUMA node may be claimed.
    classes = {how for row in data.graph(profile)["matrix"]["classes"] for how in row}
    assert {how for how in classes if not how.startswith("NV")} <= {"X", "?", "SYS", "local"}


def test_the_svg_needs_nothing_from_elsewhere_and_is_the_same_each_time() -> None:
    drawing = svg.draw(big_node())
    assert drawing == svg.draw(big_node())
    tree = Xml.fromstring(drawing)
    tags = {element.tag.removeprefix(SVG) for element in tree.iter()}
    assert tags == {"svg", "title", "style", "rect", "g", "text"}
    assert not re.search(r"href|url\(|@import|@font-face", drawing)
    assert "prefers-color-scheme:dark" in drawing
    said = [element.text for element in tree.iter(f"{SVG}text")]
    assert "251.5 GiB, 88.5 GB/s measured" in said
    assert "PCIe 4.0 x8 of x16 (!)" in said


def test_boxes_of_the_svg_lie_inside_the_box_around_them() -> None:
    def edges(group: Xml.Element) -> tuple[float, float, float, float]:
        box = group.find(f"{SVG}rect")
        assert box is not None
        x, y, w, h = (float(box.get(key, "")) for key in ("x", "y", "width", "height"))
        return x, y, x + w, y + h

    for group in Xml.fromstring(svg.draw(big_node())).iter(f"{SVG}g"):
        left, top, right, bottom = edges(group)
        inner = [edges(child) for child in group.findall(f"{SVG}g")]
        for x, y, to_x, to_y in inner:
            assert left < x < to_x < right
            assert top < y < to_y < bottom
        for i, one in enumerate(inner):
            for two in inner[i + 1 :]:
                assert one[2] < two[0] or two[2] < one[0] or one[3] < two[1] or two[3] < one[1]


def test_names_are_escaped_in_svg_and_dot() -> None:
    profile = replace(big_node(), name='<script>"x"\\N</script>')
    assert "<script" not in svg.draw(profile)
    assert r'graph "<script>\"x\"\\N</script>"' in dot.draw(profile)


def test_dot_joins_devices_to_their_switch_and_gpus_to_nvlink() -> None:
    drawing = dot.draw(big_node())
    gpu = re.search(r'(gpu\d+) \[label="GPU 0-1', drawing)
    root = re.search(r'(root\d+) \[label="PCI root 0000:00, switch', drawing)
    hub = re.search(r'(nvlink\d+) \[label="NVLink NV12"', drawing)
    assert gpu and root and hub
    assert f"{root[1]} -- {gpu[1]}\n" in drawing
    assert f"{gpu[1]} -- {hub[1]} [" in drawing


@pytest.mark.skipif(shutil.which("dot") is None, reason="Graphviz is not installed")
def test_graphviz_reads_the_dot_text() -> None:
    done = subprocess.run(
        ["dot", "-Tplain"], input=dot.draw(big_node()), text=True, capture_output=True
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_json_graph_names_every_bridge_once_and_carries_links() -> None:
    graph = data.graph(big_node())
    ids = [node["id"] for node in graph["nodes"]]
    assert len(ids) == len(set(ids))
    # A root port, an upstream port and five downstream ports on each of four host bridges.
    assert sum(node["kind"] == "bridge" for node in graph["nodes"]) == 28
    assert {edge[key] for edge in graph["edges"] for key in ("from", "to")} <= set(ids)
    (link,) = [edge for edge in graph["edges"] if edge["to"] == "GPU5" and edge["kind"] == "pci"]
    assert link["below_maximum"] is True
    assert link["link"] == {"speed_gt_s": 16, "width": 8, "bandwidth_gb_s": 15.754}
    devices = graph["matrix"]["devices"]
    row = dict(zip(devices, graph["matrix"]["classes"][devices.index("GPU5")], strict=True))
    assert (row["NIC4"], row["NUMA2"], row["NUMA0"], row["GPU0"]) == ("PIX", "local", "SYS", "NV12")
    assert graph["nearest"][5]["nvme"][0] == {"id": "NVMe2", "class": "PIX"}


@settings(max_examples=25, phases=PHASES)
@given(profiles())
def test_no_profile_breaks_a_drawing(profile: NodeProfile) -> None:
    for drawing in (text.draw(profile), text.draw(profile, 20, ascii_only=True)):
        frames_are_straight(drawing)
        assert all(c.isprintable() or c == "\n" for c in drawing)
        drawing.encode()
    assert max(map(len, text.draw(profile).splitlines())) <= 100
    tree = Xml.fromstring(svg.draw(profile))
    assert {e.tag for e in tree.iter()} <= {
        f"{SVG}{t}" for t in ("svg", "title", "style", "rect", "g", "text")
    }
    assert all(c.isprintable() or c == "\n" for c in dot.draw(profile))
    graph = json.loads(json.dumps(data.graph(profile)))
    ids = {node["id"] for node in graph["nodes"]}
    assert {edge[key] for edge in graph["edges"] for key in ("from", "to")} <= ids
