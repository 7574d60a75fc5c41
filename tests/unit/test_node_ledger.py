"""Who may be narrowed to a NUMA node: the truth table of the ledger, worked out by hand."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from crater_slurm.node.ledger import Claim, decide

NODE_0, NODE_1, BOTH = frozenset({0}), frozenset({1}), frozenset({0, 1})
TWO_NODES = {0: 100, 1: 100}


def strict(name: str, limit: int | None, *masks: frozenset[int]) -> Claim:
    return Claim(name, limit, frozenset(masks))


def hard(claims: list[Claim], capacity: dict[int, int] = TWO_NODES) -> dict[str, bool]:
    return {name: ruling.hard for name, ruling in decide(claims, capacity).items()}


def test_one_job_that_fits_its_node_is_hard() -> None:
    assert hard([strict("a", 100, NODE_0)]) == {"a": True}


def test_one_mebibyte_more_than_the_node_has_makes_it_soft_and_says_so() -> None:
    ruling = decide([strict("a", 101, NODE_0)], TWO_NODES)["a"]
    assert not ruling.hard
    assert ruling.reason == "its limit of 101 MiB is more than the 100 MiB of NUMA node 0"


def test_two_jobs_that_fill_a_node_exactly_are_both_hard() -> None:
    assert hard([strict("a", 60, NODE_0), strict("b", 40, NODE_0)]) == {"a": True, "b": True}


def test_two_jobs_that_exceed_a_node_are_both_soft() -> None:
    rulings = decide([strict("a", 60, NODE_0), strict("b", 41, NODE_0)], TWO_NODES)
    assert [rulings[name].hard for name in "ab"] == [False, False]
    assert rulings["a"].reason == ("2 jobs could put 101 MiB on NUMA node 0, which has 100 MiB")


def test_jobs_on_different_nodes_do_not_count_against_each_other() -> None:
    assert hard([strict("a", 90, NODE_0), strict("b", 90, NODE_1)]) == {"a": True, "b": True}


def test_a_job_without_a_plan_counts_on_every_node() -> None:
    plain = Claim("plain", 50)
    assert hard([strict("a", 50, NODE_0), strict("b", 50, NODE_1), plain]) == {
        "a": True,
        "b": True,
    }
    # b goes soft, may then touch node 0 with 51: 50 + 51 + 50 > 100, so a must go soft too.
    assert hard([strict("a", 50, NODE_0), strict("b", 51, NODE_1), plain]) == {
        "a": False,
        "b": False,
    }


def test_a_spanning_job_counts_with_all_it_has_on_each_of_its_nodes() -> None:
    assert hard([strict("a", 30, NODE_0), strict("span", 70, BOTH)]) == {"a": True, "span": True}
    assert hard([strict("a", 30, NODE_0), strict("span", 71, BOTH)]) == {"a": False, "span": True}


def test_a_spanning_job_larger_than_a_node_loses_nothing_by_its_own_mask() -> None:
    assert hard([strict("span", 200, BOTH)]) == {"span": True}


def test_a_job_that_spans_two_of_four_nodes_has_their_room_together() -> None:
    four = dict.fromkeys(range(4), 100)
    assert hard([strict("a", 150, BOTH)], four) == {"a": True}
    assert hard([strict("a", 150, BOTH), strict("b", 51, NODE_1)], four) == {
        "a": False,  # 150 + 51 > 200
        "b": False,  # 150 + 51 > 100
    }


def test_an_unlimited_job_makes_everyone_soft() -> None:
    rulings = decide([strict("a", 1, NODE_0), Claim("scope/job_9", None)], TWO_NODES)
    assert not rulings["a"].hard
    assert rulings["a"].reason == "job_9 has no memory limit and could fill NUMA node 0"


def test_an_unlimited_strict_job_is_soft_itself_and_takes_the_others_with_it() -> None:
    assert hard([strict("a", None, NODE_0), strict("b", 1, NODE_1)]) == {"a": False, "b": False}


def test_tasks_of_one_job_on_different_nodes_need_the_whole_limit_on_each() -> None:
    assert hard([strict("a", 100, NODE_0, NODE_1, BOTH)]) == {"a": True}
    assert hard([strict("a", 101, NODE_0, NODE_1, BOTH)]) == {"a": False}


def test_dropping_one_job_drops_others_until_it_holds() -> None:
    # c is too big for node 1, so it may go anywhere, so a no longer fits node 0.
    assert hard([strict("a", 20, NODE_0), strict("c", 110, NODE_1)]) == {"a": False, "c": False}
    assert hard([strict("a", 20, NODE_0), strict("c", 80, NODE_1)]) == {"a": True, "c": True}


def test_a_node_without_room_carries_nobody() -> None:
    assert hard([strict("a", 1, NODE_0)], {0: 0, 1: 100}) == {"a": False}


def test_jobs_without_masks_get_no_ruling() -> None:
    assert decide([Claim("plain", 10)], TWO_NODES) == {}


masks = st.frozensets(st.frozensets(st.integers(0, 2), min_size=1), max_size=2)
claims = st.lists(
    st.tuples(st.one_of(st.none(), st.integers(1, 120)), masks), min_size=1, max_size=6
).map(lambda items: [Claim(f"j{i}", limit, mask) for i, (limit, mask) in enumerate(items)])


@given(claims)
def test_no_ruling_ever_lets_a_narrowed_set_overflow(jobs: list[Claim]) -> None:
    capacity = {0: 100, 1: 80, 2: 60}
    rulings = decide(jobs, capacity)
    everywhere = frozenset(capacity)
    narrow = {n for n, r in rulings.items() if r.hard}
    for job in jobs:
        if job.name not in narrow:
            continue
        for mask in job.masks - {everywhere}:
            able = [
                other.limit_mib
                for other in jobs
                if (frozenset().union(*other.masks) if other.name in narrow else everywhere) & mask
            ]
            assert None not in able
            assert sum(able) <= sum(capacity[n] for n in mask)


@given(claims, st.randoms())
def test_the_order_of_jobs_does_not_matter(jobs: list[Claim], random) -> None:
    shuffled = jobs[:]
    random.shuffle(shuffled)
    capacity = {0: 100, 1: 80, 2: 60}
    assert hard(jobs, capacity) == hard(shuffled, capacity)
