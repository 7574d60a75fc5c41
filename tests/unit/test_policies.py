"""Each policy's choice on small clusters, worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from packing_samples import cluster, plain, share, whole

from crater_slurm.config import Settings
from crater_slurm.placement.packing.state import Cluster, Mix, Need
from crater_slurm.simulate.policies import POLICIES, SCORE_SHARE, TOLERANCE, Policy

MIX = Mix.of([(share(500), 0.5), (whole(), 0.5)])


def policy(name: str, found: Cluster, mix: Mix = MIX, seed: int = 0) -> Policy:
    return POLICIES[name].make(found, mix, np.random.default_rng(seed))


def put(chooser: Policy, need: Need, node: int, gpu: int | None = None) -> None:
    chooser.cluster.place(need, node, gpu)
    chooser.placed(need, node)


@pytest.mark.parametrize("name", POLICIES)
def test_what_fits_on_one_node_goes_there_and_what_fits_nowhere_is_refused(name: str) -> None:
    found = cluster((2, 4), (1, 20), (4, 4), models=(0, 0, 1))
    chooser = policy(name, found)
    assert chooser.choose(share(500, 9)) is not None
    assert chooser.choose(share(500, 9))[0] == 1  # type: ignore[index]
    assert chooser.choose(whole(3, 4))[0] == 2  # type: ignore[index]
    assert chooser.choose(plain(20))[0] == 1  # type: ignore[index]
    assert chooser.choose(whole(3, 5)) is None
    assert chooser.choose(whole(3, 1, allowed=0b01)) is None
    assert chooser.choose(plain(21)) is None


@pytest.mark.parametrize("name", POLICIES)
def test_a_cluster_without_gpus_takes_what_needs_none(name: str) -> None:
    chooser = policy(name, cluster((0, 4), (0, 20)))
    assert chooser.choose(plain(20)) is not None
    assert chooser.choose(plain(20))[0] == 1  # type: ignore[index]
    assert chooser.choose(whole()) is None


def test_random_takes_every_node_and_every_gpu() -> None:
    chooser = policy("random", cluster((2, 9), (2, 9)))
    chosen = {chooser.choose(share(500)) for _ in range(100)}
    assert chosen == {(node, gpu) for node in (0, 1) for gpu in (0, 1)}
    assert {chooser.choose(whole()) for _ in range(100)} == {(0, None), (1, None)}


def test_first_fit_takes_the_first() -> None:
    assert policy("firstfit", cluster((1, 1), (1, 5), (1, 5))).choose(share(500, 2)) == (1, None)


def test_slurm_takes_from_the_shortest_row_of_neighbours() -> None:
    there = cluster((2, 9), (2, 9), (2, 1), (4, 9))
    assert policy("slurm", there).choose(whole(cpu=2)) == (3, None)
    assert policy("slurm-weights", there).choose(whole(cpu=2)) == (0, None)  # fewer GPUs


def test_best_fit_leaves_least() -> None:
    # Left of the largest node's 100 CPU and 8 GPUs: (90 % + 7/8) / 2 and (10 % + 1/8) / 2.
    assert policy("bestfit", cluster((8, 100), (2, 20))).choose(whole(1, 10)) == (1, None)
    # (0 % + 7/8) / 2 = 44 % on the first, (90 % + 1/8) / 2 = 51 % on the second.
    assert policy("bestfit", cluster((8, 10), (2, 100))).choose(whole(1, 10)) == (0, None)


def test_dot_product_takes_the_smallest_product() -> None:
    # Free x asked, as shares of 100 CPU and 8 GPUs: (1 x 0.5 + 2/8 x 1/8) / 2 = 27 % against
    # (0.5 x 0.5 + 8/8 x 1/8) / 2 = 19 %.
    chooser = policy("dotprod", cluster((2, 100), (8, 50)))
    assert chooser.choose(whole(1, 50)) == (1, None)
    # With little CPU asked the GPUs decide: 2/8 x 1/8 against 8/8 x 1/8.
    assert chooser.choose(whole(1, 1)) == (0, None)


def test_packing_takes_shared_gpus_then_used_nodes_then_small_idle_ones() -> None:
    chooser = policy("packing", cluster((2, 99), (4, 99), (8, 99)))
    assert chooser.choose(share(300)) == (0, None)  # all idle: 33 - 2, 33 - 4, 33 - 8
    put(chooser, whole(), 2)
    assert chooser.choose(share(300)) == (2, None)  # a free GPU of a used node: 50 - 1
    put(chooser, share(300), 1)
    assert chooser.choose(share(300)) == (1, None)  # 700 left on a shared GPU: 100 - 7
    put(chooser, share(500), 0)
    assert chooser.choose(share(300)) == (0, None)  # 500 left: 100 - 5
    assert chooser.choose(share(600)) == (1, None)  # which 600 does not fit
    assert chooser.choose(whole(2))[0] in (1, 2)  # type: ignore[index]  # 50 - 2 each; 0 has one


def test_clustering_keeps_like_with_like() -> None:
    chooser = policy("clustering", cluster((8, 99), (4, 99), (2, 99)))
    # All idle: 25 and up to 25 more, by what the node lacks to 8 free GPUs.
    assert chooser.choose(whole(2)) == (2, None)
    put(chooser, whole(2), 0)
    put(chooser, share(500), 1)
    assert chooser.choose(whole(2)) == (0, None)  # its kind alone: 75 and more
    assert chooser.choose(share(500)) == (1, None)
    put(chooser, share(500), 0)
    assert chooser.choose(whole(2)) == (0, None)  # its kind among others: 50 and more
    assert chooser.choose(share(500)) == (1, None)  # 75 and 12, against 50 and 7
    assert chooser.choose(whole()) == (2, None)  # idle, 25 and 18; the others have other kinds
    chooser.released(whole(2), 0)
    assert chooser.choose(whole(2)) == (2, None)  # its kind runs nowhere: the idle node


def test_fgd_fills_the_gpu_whose_rest_is_a_fragment() -> None:
    # Half the mix is whole GPUs. A share on the free GPU makes 500 of it useless to them: F grows
    # by 0.5 x 500. On the GPU in use it ends a fragment: F falls by 0.5 x 500.
    chooser = policy("fgd", cluster((1, 9), (1, 9), (1, 9)))
    put(chooser, share(500), 1)
    assert chooser.choose(share(500)) == (1, 0)


def test_fgd_chooses_the_gpu_within_a_node() -> None:
    chooser = policy("fgd", cluster((3, 9)))
    put(chooser, share(500), 0, 2)
    assert chooser.choose(share(500)) == (0, 2)


def test_crater_does_not_strand_gpus_without_cpu() -> None:
    mix = Mix.of([(share(500, 1), 1.0)])
    # The first node's 2 GPUs hold 4 shares with 10 CPU, and 1 with what is left beside 9 CPU:
    # 1500 are lost. The second has CPU for all: 500 are lost, which is what is taken.
    assert policy("crater", cluster((2, 10), (1, 100)), mix).choose(share(500, 9)) == (1, 0)
    # Best fit prefers the first, whose CPU it fills.
    assert policy("bestfit", cluster((2, 10), (1, 100)), mix).choose(share(500, 9)) == (0, None)


def test_crater_keeps_whole_gpus_whole() -> None:
    chooser = policy("crater", cluster((2, 9), (2, 9)), Mix.of([(whole(), 1.0)]))
    put(chooser, share(300), 1, 1)
    assert chooser.choose(share(300)) == (1, 1)


def test_crater_takes_the_fuller_of_equals() -> None:
    chooser = policy("crater", cluster((1, 9), (1, 9), (1, 9)))
    put(chooser, plain(4), 1)
    assert chooser.choose(whole(1, 1)) == (1, None)


def test_crater_learns_from_arrivals_and_from_nothing_else() -> None:
    lure = Mix.of([(whole(), 1.0)])
    chooser = policy("crater-learning", cluster((2, 10), (1, 100)), lure)
    need = share(500, 9)
    for arrival in range(31):
        chooser.arrived(share(500, 1))
        assert chooser.choose(need)[0] == 0, arrival  # type: ignore[index]  # no mix yet: node order
    chooser.arrived(share(500, 1))
    assert chooser.choose(need) == (1, 0)  # as crater with the mix of these


def test_crater_rebuilds_its_mix_after_twice_as_many_and_later_every_2000() -> None:
    chooser = policy("crater-learning", cluster((1, 9)))
    made = []
    chooser._scorer.judge_by = lambda _: made.append(sum(chooser._seen.values()))  # type: ignore[attr-defined]
    for _ in range(7000):
        chooser.arrived(share(500))
    assert made == [32, 64, 128, 256, 512, 1024, 2048, 4048, 6048]


@pytest.mark.parametrize("name", ["packing", "clustering", "bestfit", "dotprod", "fgd"])
def test_equal_nodes_are_taken_in_an_order_that_stays_for_a_run(name: str) -> None:
    nodes = [(2, 9)] * 20
    firsts = set()
    for seed in range(20):
        chooser = policy(name, cluster(*nodes), seed=seed)
        chosen = {chooser.choose(whole()) for _ in range(5)}
        assert len(chosen) == 1
        firsts |= chosen
    assert len(firsts) > 5


def test_what_is_simulated_is_what_settings_have_by_default() -> None:
    own = Settings().score
    assert (own.fragmentation, own.tolerance) == (SCORE_SHARE, TOLERANCE)


def test_only_models_are_preferred_and_slurm_takes_one_of_those() -> None:
    """A job of eight CPUs leaves one of nine, too few for the other GPU, and four of twelve."""
    there = cluster((2, 9), (2, 12), (2, 12), models=(0, 1, 1))
    chooser = policy("crater-prefer", there, Mix.of([(whole(cpu=4), 1.0)]))
    assert chooser.choose(whole(cpu=8)) == (1, None)
    there.place(whole(2, cpu=12), 1)
    assert chooser.choose(whole(cpu=8)) == (2, None)
    there.place(whole(2, cpu=12), 2)
    assert chooser.choose(whole(cpu=8)) == (0, None), "none of the preferred has room"


def test_the_largest_node_is_not_preferred_while_slurm_would_take_another() -> None:
    """Of ten nodes one has more CPUs, of which a job of eight leaves enough for the other GPU."""
    there = cluster(*[(2, 9)] * 9, (2, 12), models=(*[0] * 9, 1))
    chooser = policy("crater-prefer", there, Mix.of([(whole(cpu=4), 1.0)]))
    job = whole(cpu=8)
    for node in range(9):
        assert chooser.choose(job) == (node, None)
        there.place(whole(cpu=4), node)
    assert chooser.choose(job) == (9, None), "no other has room"
