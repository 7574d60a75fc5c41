"""After a node is lost: what the others hold is found, brought, checked, and reaches its place."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from peer_samples import JOB, Node, Proxy, make_part, same_files, wait_until

from crater_slurm.checkpoint.peers.frames import TransportError
from crater_slurm.checkpoint.peers.store import PeerStore, folder_bytes
from crater_slurm.checkpoint.peers.survey import Have, choose, needed, read_heads
from crater_slurm.checkpoint.spec import Remote
from crater_slurm.job import layout

RUN = f"{JOB}.0"


def have(
    node: str, step: int, ranks: str, owner: str = "", time: float = 0, run: str = RUN
) -> Have:
    members = frozenset(int(rank) for rank in ranks)
    return Have(node, owner, "step", step, run, 4, time or step, members)


def test_the_newest_step_that_all_hold_together_is_chosen() -> None:
    haves = [have("a", 1, "01"), have("b", 1, "23"), have("a", 2, "01"), have("c", 2, "2")]
    choice = choose(haves, "a", "step")
    assert choice is not None and choice.step == 1
    assert [parts[0].node for parts in needed(choice, None)] == ["a", "b"]
    assert [parts[0].node for parts in needed(choice, [3])] == ["b"]
    assert needed(choice, [9]) == []


def test_a_copy_stands_for_the_lost_node() -> None:
    choice = choose([have("a", 2, "01"), have("a", 2, "23", owner="b")], "a", "step")
    assert choice is not None
    assert [(p[0].node, p[0].owner) for p in needed(choice, None)] == [("a", ""), ("a", "b")]


def test_what_is_here_comes_first_then_the_owner_then_copies() -> None:
    haves = [
        have("c", 2, "23", owner="b"),
        have("b", 2, "23"),
        have("a", 2, "23", owner="b"),
        have("a", 2, "01"),
    ]
    choice = choose(haves, "a", "step")
    assert choice is not None
    assert [p.node for p in choice.sources[3]] == ["a", "b", "c"]


def test_parts_of_two_runs_never_make_one_step() -> None:
    assert choose([have("a", 2, "01"), have("b", 2, "23", run="x.1")], "a", "step") is None


def test_the_newer_save_counts_though_its_step_is_lower() -> None:
    haves = [have("a", 200, "0123", time=10), have("a", 100, "0123", time=20, run="x.1")]
    choice = choose(haves, "a", "step")
    assert choice is not None and choice.step == 100
    chosen = choose(haves, "a", "step", 200)
    assert chosen is not None and chosen.step == 200


def test_a_step_saved_twice_is_taken_from_its_last_save() -> None:
    haves = [have("a", 1, "0123", time=1), have("b", 1, "0123", owner="a", time=2)]
    choice = choose(haves, "c", "step")
    assert choice is not None
    assert [part.node for part in choice.sources[0]] == ["b"]


JSON = st.recursive(
    st.none() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=10,
)
HEADS = st.dictionaries(
    st.sampled_from(["owner", "name", "step", "run", "world_size", "time", "ranks"]), JSON
)


@given(st.lists(HEADS, max_size=4), st.binary(max_size=30))
def test_hostile_lists_are_left_out(heads: list[object], raw: bytes) -> None:
    read_heads("n", raw)
    for found in read_heads("n", json.dumps(heads).encode()):
        assert 0 <= min(found.ranks) <= max(found.ranks) < found.world_size
        layout.step_name(found.step, found.name)


class Three:
    """Nodes a, b and c with a rank each: b keeps a's part, c keeps b's, a keeps c's."""

    def __init__(self, folder: Path) -> None:
        self.nodes = {name: Node(name, folder / name) for name in "abc"}
        addresses = {name: node.address for name, node in self.nodes.items()}
        for node in self.nodes.values():
            node.work(list("abc"), addresses)
        for rank, node in enumerate(self.nodes.values()):
            for step in (1, 2):
                path, manifest = make_part(
                    node.folder, step, [rank], world=3, node=node.name, at=float(step)
                )
                assert node.copies
                node.copies.on_saved(path, manifest)
                wait_until(lambda node=node, step=step: len(node.sent) == step)

    def lose(self, name: str) -> None:
        self.nodes[name].stop()
        shutil.rmtree(self.nodes[name].folder)

    def fresh(self, name: str, folder: Path, nodes: str, known: str) -> Node:
        """A node that joins for the next run, which knows the addresses of ``known``."""
        node = self.nodes[name] = Node(name, folder)
        addresses = {other: self.nodes[other].address for other in known}
        node.work(list(nodes), addresses)
        return node

    def stop(self) -> None:
        for node in self.nodes.values():
            node.stop()


@pytest.fixture
def three(tmp_path: Path) -> Iterator[Three]:
    nodes = Three(tmp_path)
    yield nodes
    nodes.stop()


def saved(tmp_path: Path, step: int) -> Path:
    """What all three saved of a step, made anew: it is the same, byte for byte."""
    for rank in range(3):
        make_part(tmp_path / "all", step, [rank], world=3, node="abc"[rank], at=float(step))
    return tmp_path / "all" / layout.step_name(step)


def test_a_lost_node_loses_nothing(three: Three, tmp_path: Path) -> None:
    three.lose("a")
    node = three.fresh("d", tmp_path / "d", "dbc", "bc")
    assert node.copies
    brought = node.copies.fetch("step")
    assert brought is not None
    assert (brought.step, brought.run, brought.fetched_bytes) == (2, RUN, 300_000)
    assert same_files(Path(brought.folder), saved(tmp_path, 2))
    assert layout.covers(layout.read_parts(brought.folder))
    assert folder_bytes(str(node.folder)) < 310_000, "nothing is kept twice"


def test_a_node_fetches_only_the_ranks_it_wants(three: Three, tmp_path: Path) -> None:
    three.lose("a")
    node = three.fresh("d", tmp_path / "d", "dbc", "bc")
    assert node.copies
    brought = node.copies.fetch("step", ranks=[0])
    assert brought is not None and brought.fetched_bytes == 100_000
    assert [p.ranks for p in layout.read_parts(brought.folder)] == [[0]]


def test_what_is_here_already_is_not_fetched(three: Three, tmp_path: Path) -> None:
    """b has its own part and a's copy: only c's travels, and b's own folder gets the others."""
    node = three.nodes["b"]
    assert node.copies
    brought = node.copies.fetch("step")
    assert brought is not None and brought.fetched_bytes == 100_000
    assert brought.folder == str(node.folder / "step-000000002")
    assert same_files(Path(brought.folder), saved(tmp_path, 2))
    assert node.peer_steps("a") == [f"step-000000001.{RUN}", f"step-000000002.{RUN}"]
    again = node.copies.fetch("step", 2)
    assert again is not None and again.fetched_bytes == 0 and again.folder == brought.folder


def test_two_lost_neighbours_lose_the_newest_step_and_it_is_not_made_up(
    three: Three, tmp_path: Path
) -> None:
    three.lose("a")
    three.lose("b")
    node = three.fresh("d", tmp_path / "d", "dec", "c")
    assert node.copies and node.copies.fetch("step") is None


def test_a_run_on_other_nodes_finds_the_old_ones_by_one_that_stayed(
    three: Three, tmp_path: Path
) -> None:
    """Node a is lost; the requeued job has c, d and e. b is out of it, but holds a's copy."""
    three.lose("a")
    node = three.fresh("d", tmp_path / "d", "cde", "c")
    assert node.copies
    brought = node.copies.fetch("step")
    assert brought is not None
    assert same_files(Path(brought.folder), saved(tmp_path, 2))


def test_the_addresses_of_earlier_runs_are_kept_beside_the_checkpoints(
    three: Three, tmp_path: Path
) -> None:
    three.nodes["c"].stop()
    again = three.fresh("c", tmp_path / "c", "cd", "")
    assert again.copies
    brought = again.copies.fetch("step")
    assert brought is not None and same_files(Path(brought.folder), saved(tmp_path, 2))
    (again.folder / ".peers.json").write_text("[1")
    damaged = three.fresh("c", tmp_path / "c", "cd", "")
    assert damaged.copies
    assert any("is damaged" in line for line in damaged.logged)


@pytest.mark.parametrize("where", ["owner", "copy"])
def test_a_damaged_source_is_left_for_the_next(three: Three, tmp_path: Path, where: str) -> None:
    place = {
        "owner": three.nodes["a"].folder / "step-000000002",
        "copy": three.nodes["b"].folder / ".peer-a" / f"step-000000002.{RUN}",
    }[where]
    with open(place / "rank-00000.safetensors", "r+b") as file:
        file.seek(50_000)
        file.write(b"damage")
    node = three.nodes["b"] if where == "copy" else three.fresh("d", tmp_path / "d", "d", "abc")
    assert node.copies
    brought = node.copies.fetch("step")
    assert brought is not None
    assert same_files(Path(brought.folder), saved(tmp_path, 2))
    assert any("damaged" in line for line in node.logged)


def test_when_every_source_is_damaged_nothing_gets_a_final_name(
    three: Three, tmp_path: Path
) -> None:
    for place in (
        three.nodes["a"].folder / "step-000000002",
        three.nodes["b"].folder / ".peer-a" / f"step-000000002.{RUN}",
    ):
        (place / "rank-00000.safetensors").write_bytes(bytes(100_000))
    node = three.fresh("d", tmp_path / "d", "d", "abc")
    assert node.copies
    with pytest.raises(TransportError, match="have step 2"):
        node.copies.fetch("step")
    assert list(node.folder.glob("step-*")) == []


def test_bits_that_flip_on_the_way_back_are_seen(three: Three, tmp_path: Path) -> None:
    """The proxy stands before c; what it damages is c's own part, which nobody else can give."""
    three.lose("a")
    proxy = Proxy(three.nodes["c"].address)
    proxy.alter_back = lambda data: (
        data.replace(data[-9:-1], bytes(8)) if len(data) > 5000 else data
    )
    node = Node("d", tmp_path / "d")
    node.work(["d"], {"c": proxy.address})
    assert node.copies
    with pytest.raises(TransportError):
        node.copies.fetch("step", ranks=[2])
    assert list(node.folder.glob("step-*")) == []
    node.stop()
    proxy.close()


def test_nobody_to_ask_is_no_checkpoint(tmp_path: Path) -> None:
    node = Node("d", tmp_path / "d")
    node.work(["d"], {"x": "127.0.0.1:1", "y": "no such host:1", "z": "nonsense"})
    assert node.copies and node.copies.fetch("step") is None
    node.stop()


REMOTE = Remote(url="/shared/ckpt")


class Lost:
    """Node b with a's copy; a is there, gone, or has flushed."""

    def __init__(self, folder: Path) -> None:
        self.a, self.b = Node("a", folder / "a"), Node("b", folder / "b")
        self.b.work(["a", "b"], {"a": self.a.address}, remote=REMOTE)
        copies = self.a.work(["a", "b"], {"b": self.b.address}, remote=REMOTE)
        self.path, self.manifest = make_part(self.a.folder, 3, [0], world=2)
        copies.on_saved(self.path, self.manifest)
        wait_until(lambda: self.a.sent)

    def tick(self, ended: bool = True) -> bool:
        assert self.b.copies
        return self.b.copies.look_after(ended)


@pytest.fixture
def lost(tmp_path: Path) -> Iterator[Lost]:
    nodes = Lost(tmp_path)
    yield nodes
    nodes.a.stop()
    nodes.b.stop()


def test_a_lost_node_s_part_is_brought_to_the_destination_by_its_partner(lost: Lost) -> None:
    lost.a.stop()
    assert lost.tick() and lost.b.flushes == []
    lost.b.now = 599.0
    assert lost.tick() and lost.b.flushes == [], "it may come back"
    lost.b.now = 600.0
    assert lost.tick()
    kept = str(lost.b.folder / ".peer-a" / f"step-000000003.{RUN}")
    assert lost.b.flushes == [(kept, lost.manifest)]
    assert lost.tick() and len(lost.b.flushes) == 1
    assert lost.b.copies
    lost.b.copies.on_flushed(kept, lost.manifest)
    assert not lost.tick()


def test_an_owner_that_answers_does_its_work_itself(lost: Lost) -> None:
    for lost.b.now in (0.0, 1000.0, 5000.0):
        assert lost.tick()
    lost.a.flushed.add(("step", 3, RUN))
    assert not lost.tick()
    lost.a.stop()
    lost.b.now = 9000.0
    assert not lost.tick() and lost.b.flushes == [], "it is remembered"


def test_an_owner_that_has_flushed_says_so_by_itself(lost: Lost) -> None:
    assert lost.a.copies
    lost.a.copies.on_flushed(lost.path, lost.manifest)
    store = PeerStore(str(lost.b.folder))
    key = f"step-000000003.{RUN} 3.0"
    wait_until(lambda: store.is_flushed("a", key))
    lost.a.stop()
    assert not lost.tick()


def test_an_owner_that_has_lost_the_part_itself_is_no_better_than_a_silent_one(lost: Lost) -> None:
    shutil.rmtree(lost.path)
    for lost.b.now in (0.0, 599.0):
        assert lost.tick() and lost.b.flushes == []
    lost.b.now = 600.0
    assert lost.tick()
    assert [manifest.step for _, manifest in lost.b.flushes] == [3]


def test_while_the_owner_is_in_the_job_nobody_looks_after_its_parts(lost: Lost) -> None:
    lost.a.stop()
    for lost.b.now in (0.0, 1000.0):
        assert not lost.tick(ended=False)
    assert lost.b.flushes == []


def test_an_owner_that_is_no_longer_in_the_job_is_looked_after_during_the_run(
    lost: Lost, tmp_path: Path
) -> None:
    lost.a.stop()
    lost.b.stop()
    again = Node("b", lost.b.folder)
    again.work(["b", "d"], {}, remote=REMOTE)
    assert again.copies
    for again.now in (0.0, 1000.0):
        assert again.copies.look_after(ended=False)
    assert [manifest.step for _, manifest in again.flushes] == [3]
    again.stop()


def test_without_a_destination_there_is_nothing_to_look_after(tmp_path: Path) -> None:
    nodes = Lost(tmp_path)
    nodes.b.stop()
    again = Node("b", nodes.b.folder)
    again.work(["a", "b"], {})
    assert again.copies and not again.copies.look_after(ended=True)
    for node in (nodes.a, again):
        node.stop()
