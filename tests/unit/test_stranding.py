"""What a job strands: the batch measure, costs worked out by hand, and the preference made of it."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from cluster_samples import GIB, gpus, node, replan, view
from hypothesis import given, settings
from hypothesis import strategies as st
from packing_samples import MILLIS

from crater_slurm.errors import SlurmError
from crater_slurm.model.cluster import NodeUse
from crater_slurm.model.profile import NodeProfile
from crater_slurm.placement.packing import batch, kernels
from crater_slurm.placement.packing.score import packs_of
from crater_slurm.placement.packing.state import Cluster, Mix, Need
from crater_slurm.placement.stranding import Kind, Rest, Taken, masks, value
from crater_slurm.scheduler import preferring as preferring_module
from crater_slurm.scheduler.preferring import Preferring
from crater_slurm.scheduler.state import View
from crater_slurm.slurm import occupancy
from crater_slurm.slurm.client import Client

A100 = frozenset({"a100-pcie-40gb"})
#: One GPU with four cores, and nothing else counts.
USUAL = Kind(1, (4, 0, 0, 0, 0), A100)

needs = st.builds(
    lambda gpus, milli, cpu, allowed: Need(gpus, milli if gpus == 1 else 1000, (cpu, 1), allowed),
    st.integers(1, 4),
    st.sampled_from(MILLIS),
    st.integers(0, 8),
    st.sampled_from([1, 2, 3]),
)
states = st.lists(
    st.tuples(
        st.lists(st.sampled_from([0, 190, 500, 810, 1000]), min_size=4, max_size=4),
        st.integers(0, 20),
        st.integers(0, 1),
    ),
    min_size=1,
    max_size=6,
)


@given(st.lists(st.tuples(needs, st.integers(1, 9)), min_size=1, max_size=5), states)
@settings(max_examples=80)
def test_many_states_at_once_are_worth_what_each_is_alone(
    mix: list[tuple[Need, int]], rests: list[tuple[list[int], int, int]]
) -> None:
    measure = packs_of(Mix.of((need, float(count)) for need, count in mix), streams=4, length=16)
    free = np.array([row for row, _, _ in rests], np.int64)
    rest = np.array([[cpu, cpu] for _, cpu, _ in rests], np.int64)
    models = np.array([model for _, _, model in rests], np.int64)
    together = batch.packs(free, rest, models, measure)
    alone = [
        kernels.packs(free[n].copy(), rest[n], int(models[n]), measure) for n in range(len(rests))
    ]
    assert together.tolist() == alone


@given(needs, states)
@settings(max_examples=60)
def test_what_fits_is_the_same_without_loops(
    need: Need, rests: list[tuple[list[int], int, int]]
) -> None:
    nodes = Cluster([4] * len(rests), [m for *_, m in rests], [[cpu, cpu] for _, cpu, _ in rests])
    nodes.gpus[:] = [row for row, _, _ in rests]
    assert batch.fitting(nodes, need).tolist() == nodes.fitting(need).tolist()


def rest_of(*machines: tuple[NodeProfile, NodeUse]) -> Rest:
    profiles, used = zip(*machines, strict=True)
    return Rest(profiles, used, np.ones(len(machines), np.bool_))


def cost(rest: Rest, kind: Kind, *seen: Kind) -> list[float | None]:
    """Of each node by itself, under the mix of ``seen``."""
    count = rest.cluster.nodes
    groups = masks([1 << n for n in range(count)], count)
    (found,) = rest.look([(kind, groups)], packs_of(rest.mix(Counter(seen))))
    return [one.lost if one else None for one in found]


def test_a_job_of_the_mix_costs_its_own_gpus() -> None:
    """32 cores are eight jobs of four, and there are four GPUs: each takes one job's worth."""
    assert cost(rest_of((node(), NodeUse())), USUAL, USUAL) == [0.0]


def test_cores_without_gpus_strand_gpus() -> None:
    """20 of 32 cores leave 12, three jobs' worth, for the three GPUs that are left; 24 leave two
    jobs' worth, and so one GPU more is lost than the job takes."""
    empty = rest_of((node(), NodeUse()))
    assert cost(empty, dataclasses.replace(USUAL, take=(20, 0, 0, 0, 0)), USUAL) == [0.0]
    assert cost(empty, dataclasses.replace(USUAL, take=(24, 0, 0, 0, 0)), USUAL) == [1000.0]


def test_a_stranded_gpu_is_the_cheapest() -> None:
    """With two cores left the other GPUs are of no use to the mix; a job of two cores takes one."""
    small = dataclasses.replace(USUAL, take=(2, 0, 0, 0, 0))
    poor = (node("n2"), NodeUse(cpus=30, gres={"gpu": 1}))
    assert cost(rest_of((node(), NodeUse()), poor), small, USUAL) == [0.0, -1000.0]


@pytest.mark.parametrize(("weights", "expected"), [(None, 0.0), ([1, 2], 0.0), ([2, 1], -1000.0)])
def test_of_a_group_the_node_counts_that_slurm_takes(
    weights: list[int] | None, expected: float
) -> None:
    small = dataclasses.replace(USUAL, take=(2, 0, 0, 0, 0))
    used = [NodeUse(), NodeUse(cpus=30, gres={"gpu": 1})]
    rest = Rest([node(), node("n2")], used, np.ones(2, np.bool_), weights)
    both = masks([0b11], 2)
    ((found,),) = rest.look([(small, both)], packs_of(rest.mix({USUAL: 1})))
    assert found == Taken(0 if expected == 0.0 else 1, expected)


def test_many_kinds_at_once_cost_what_each_does_alone() -> None:
    machines = [(node(f"n{i}"), NodeUse(cpus=5 * i, gres={"gpu": i})) for i in range(5)]
    rest = rest_of(*machines)
    measure = packs_of(rest.mix({USUAL: 1}))
    kinds = [dataclasses.replace(USUAL, take=(cpus, 0, 0, 0, 0)) for cpus in (1, 4, 9, 33)]
    groups = masks([0b00011, 0b11100, 0b11111], 5)
    together = rest.look([(kind, groups) for kind in kinds], measure)
    assert together == [rest.look([(kind, groups)], measure)[0] for kind in kinds]
    assert together[-1] == [None] * 3
    assert rest.look([], measure) == []


def test_no_room_is_told_as_such() -> None:
    full = (node(), NodeUse(gres={"gpu": 4}))
    assert cost(rest_of(full), USUAL, USUAL) == [None]
    unknown = Rest([None], [NodeUse()], np.ones(1, np.bool_))
    assert cost(unknown, USUAL, USUAL) == [None]
    down = Rest([node()], [NodeUse()], np.zeros(1, np.bool_))
    assert cost(down, USUAL, USUAL) == [None]


def test_shards_take_their_part_of_a_card() -> None:
    used = NodeUse(shards=((3, 10), (0, 10), (10, 10), (0, 10)))
    rest = rest_of((node(), used))
    assert rest.cluster.gpus.tolist() == [[700, 1000, 0, 1000]]


def test_whole_gpus_are_where_slurm_says_and_else_where_no_shards_are() -> None:
    used = NodeUse(gres={"gpu": 2}, shards=((3, 10), (0, 10), (0, 10), (0, 10)))
    told = dataclasses.replace(used, gpus=(1, 3))
    assert rest_of((node(), told)).cluster.gpus.tolist() == [[700, 0, 1000, 0]]
    assert rest_of((node(), used)).cluster.gpus.tolist() == [[700, 0, 0, 1000]]


def test_the_rest_is_what_jobs_left() -> None:
    used = NodeUse(cpus=6, memory_mib=1024, gres={"membw": 100, "nviops": 400_000, "nvme": 50})
    (found,) = rest_of((node(threads=2), used)).cluster.rest.tolist()
    # 32 cores of two threads; 280.7 GB/s; 256 GiB.
    assert found == [29, 255 * GIB, 181, 500_000, 2950]


@pytest.mark.parametrize(
    ("lost", "gpus_taken", "part"),
    [(0, 2, 0.5), (2000, 2, 0.0), (-2000, 2, 1.0), (1000, 2, 0.25), (9e9, 1, 0.0), (500, 0, 0.25)],
)
def test_a_cost_as_a_part_of_a_score(lost: float, gpus_taken: int, part: float) -> None:
    assert value(lost, gpus_taken) == part


# --- Beside the submissions -------------------------------------------------------------------

SMALL = gpus(0, 0, 1, 1, model="l4", gres_type="l4", memory_mib=40 * GIB)
FEATURES = {"a1": {"gpu_a100"}, "b1": {"gpu_l4"}}


def made(there: View, used: dict[str, NodeUse], share: float = 0.5) -> Preferring:
    profiles = {p.name: p for p in (node("a1"), node("b1", cards=SMALL))}
    return Preferring(
        lambda: there, lambda: profiles, lambda: used, share=share, tolerance=0.05, seconds=60
    )


def test_the_second_job_of_a_kind_prefers_where_it_strands_less() -> None:
    """On a1 its 16 cores would leave GPUs without cores; b1's cores are few already."""
    there = view(node("a1"), node("b1", cards=SMALL), features=FEATURES)
    preferring = made(there, {"b1": NodeUse(cpus=16, gres={"gpu": 3})})
    usual = replan(there.planner, "gpus=1 cpus=8")
    for _ in range(9):
        preferring.learn(usual, there.planner.inventory)
    outcome = replan(there.planner, "gpus=1 cpus=16")
    first = preferring.look(outcome, there.planner.inventory)
    assert first is outcome, "nothing is known of the cluster yet"
    preferring.refresh()
    second = preferring.look(outcome, there.planner.inventory)
    assert second.prefer == "gpu_l4"
    best, other = second.ranked
    assert (best.example, other.example) == ("b1", "a1")
    assert [t.name for t in best.score.terms] == ["cpu-cores", "fragmentation"]
    assert sum(t.weight for t in best.score.terms) == pytest.approx(1)
    assert best.score.terms[-1].value > other.score.terms[-1].value
    assert "strands" in other.score.terms[-1].why


def test_nodes_that_no_feature_tells_apart_are_one_choice() -> None:
    """a2 has too few cores for its GPUs, and shares its feature with a1, so that Slurm can't be
    told it alone; a1 is lighter and is what Slurm takes of both."""
    few = node("a2", cores=8)
    there = view(
        *(node("a1"), few, node("b1", cards=SMALL)), features=FEATURES | {"a2": {"gpu_a100"}}
    )
    profiles = {p.name: p for p in (node("a1"), few, node("b1", cards=SMALL))}
    preferring = Preferring(
        lambda: there, lambda: profiles, dict, share=0.9, tolerance=0.01, seconds=60
    )
    outcome = replan(there.planner, "gpus=1 cpus=8")
    preferring.learn(outcome, there.planner.inventory)
    preferring.look(outcome, there.planner.inventory)
    preferring.refresh()
    found = preferring.look(outcome, there.planner.inventory)
    assert sorted(group.nodes for group in found.ranked) == [0b011, 0b100]


@pytest.mark.parametrize("full", [False, True])
def test_the_largest_node_is_left_to_those_that_need_it(full: bool) -> None:
    """Of ten nodes one has twice the cores, too many for its GPUs, so that the mix loses nothing to
    a job of 16 cores there. It is preferred all the same only where no other has room."""
    machines = [node(f"a{i}") for i in range(9)] + [node("z1", cores=64)]
    features = {m.name: {"gpu_a100"} for m in machines} | {"z1": {"gpu_a100", "fat"}}
    there = view(*machines, features=features)
    profiles = {machine.name: machine for machine in machines}
    used = {m.name: NodeUse(gres={"gpu": 4}) for m in machines[:9] if full}
    preferring = Preferring(
        lambda: there, lambda: profiles, lambda: used, share=0.9, tolerance=0.01, seconds=60
    )
    inventory = there.planner.inventory
    outcome = replan(there.planner, "gpus=1 cpus=16")
    preferring.learn(replan(there.planner, "gpus=1 cpus=8"), inventory)
    preferring.look(outcome, inventory)
    preferring.refresh()
    found = preferring.look(outcome, inventory)
    assert found.prefer == "", "on the nine, or on the one with room, where Slurm puts it anyway"
    best = found.ranked[0]
    assert best.example == "z1"
    left = "left to jobs that only the few largest nodes can take"
    assert (left in best.score.terms[-1].why) is not full


def test_what_was_found_for_another_inventory_does_not_count() -> None:
    there = view(node("a1"), node("b1", cards=SMALL), features=FEATURES)
    preferring = made(there, {})
    outcome = replan(there.planner, "gpus=1 cpus=16")
    preferring.learn(outcome, there.planner.inventory)
    preferring.look(outcome, there.planner.inventory)
    preferring.refresh()
    other = view(node("a1"), node("b1", cards=SMALL), features=FEATURES)
    assert preferring.look(outcome, other.planner.inventory) is outcome


def test_where_nothing_has_room_slurm_has_no_choice() -> None:
    there = view(node("a1"), node("b1", cards=SMALL), features=FEATURES)
    full = NodeUse(gres={"gpu": 4})
    preferring = made(there, {"a1": full, "b1": full})
    outcome = replan(there.planner, "gpus=1 cpus=16")
    preferring.learn(outcome, there.planner.inventory)
    preferring.look(outcome, there.planner.inventory)
    preferring.refresh()
    found = preferring.look(outcome, there.planner.inventory)
    assert found.prefer == ""
    assert {group.score.terms[-1].why for group in found.ranked} == {"no room now"}


def test_many_jobs_at_once_bring_a_new_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preferring_module, "_LEAST_SECONDS", 0.1)
    there = view(node("a1"), node("b1", cards=SMALL), features=FEATURES)
    pictures: list[float] = []

    def used() -> dict[str, NodeUse]:
        pictures.append(time.monotonic())
        return {}

    preferring = Preferring(lambda: there, dict, used, share=0.5, tolerance=0.05, seconds=3600)
    outcome = replan(there.planner, "gpus=1 cpus=8")
    preferring.start()
    try:
        for times in (1, 2):
            wait_for(lambda times=times: len(pictures) == times)  # type: ignore[misc]
            for _ in range(50):
                preferring.learn(outcome, there.planner.inventory)
        wait_for(lambda: len(pictures) == 3)
    finally:
        preferring.stop()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_few_kinds_are_kept() -> None:
    there = view(node("a1"))
    preferring = made(there, {})
    for cpus in range(1, 33):
        for gpu in range(1, 6):
            outcome = replan(there.planner, f"gpus=1 cpus={cpus} gpu-memory={gpu}GiB")
            preferring.look(outcome, there.planner.inventory)
    assert len(preferring._kept) == 128


# --- What Slurm tells -------------------------------------------------------------------------

TEXT = """\
a1|3/29/0/32|100|gpu:a100:1(IDX:0),membw:20,nviops:0,nvme:0|
a1|3/29/0/32|100|gpu:a100:1(IDX:0),membw:20,nviops:0,nvme:0|
c1|0/96/0/96|0|membw:0,nviops:0,nvme:0|
l1|4/20/0/24|2048|gpu:l4:0(IDX:N/A),shard:l4:5(3/10,2/10),membw:0|
"""


def said(text: str) -> Client:
    class Fake(Client):
        def run(self, command: str, *arguments: str) -> str:
            assert command == "sinfo"
            return text

    return Fake()


def test_what_is_in_use_is_read_once_per_node() -> None:
    assert occupancy.read(said(TEXT)) == {
        "a1": NodeUse(cpus=3, memory_mib=100, gres={"gpu": 1, "membw": 20}, gpus=(0,)),
        "c1": NodeUse(),
        "l1": NodeUse(cpus=4, memory_mib=2048, gres={"shard": 5}, shards=((3, 10), (2, 10))),
    }


def test_whole_gpus_in_use_are_read_of_every_type() -> None:
    text = "m1|3/29/0/32|0|gpu:a30:3(IDX:0-1,3),gpu:l4:1(IDX:6),shard:l4:0(0/10,0/10)|\n"
    assert occupancy.read(said(text))["m1"].gpus == (0, 1, 3, 6)


def test_a_line_that_nobody_understands_is_an_error() -> None:
    with pytest.raises(SlurmError, match=r"sinfo's line 'a1\|x/"):
        occupancy.read(said("a1|x/29/0/32|100|gpu:1|\n"))
    assert occupancy.read(said("slurm_load_partitions: error\n")) == {}


def test_a_share_costs_its_part_of_a_card_and_what_it_breaks() -> None:
    """Two A100 with eight cores; the mix is one GPU with four cores each."""
    rest = Rest(
        [node("a1", cards=gpus(0, 0), cores=8, sockets=1, numa=1)], [NodeUse()], np.array([True])
    )
    measure = packs_of(rest.mix({USUAL: 1}))
    half = Kind(1, (2, 0, 0, 0, 0), A100, 500)
    ((found,),) = rest.look([(half, [np.array([True])])], measure)
    assert found == Taken(
        0, 500
    )  # a whole card is lost to the mix, of which the share takes a half
    taken = NodeUse(cpus=2, shards=((15, 31), (0, 31)))
    again = Rest(
        [node("a1", cards=gpus(0, 0), cores=8, sockets=1, numa=1)], [taken], np.array([True])
    )
    ((found,),) = again.look([(half, [np.array([True])])], measure)
    assert found == Taken(0, -500)  # on the card that is broken already it takes what was stranded


def test_shards_whose_cards_slurm_does_not_tell_fill_the_first_ones() -> None:
    use = NodeUse(gres={"gpu": 1, "shard": 40})
    rest = Rest(
        [node("a1", cards=gpus(0, 0, 0, 0), cores=8, sockets=1, numa=1)], [use], np.array([True])
    )
    assert rest.cluster.gpus[0].tolist()[:4] == [0, 0, 750, 1000]
