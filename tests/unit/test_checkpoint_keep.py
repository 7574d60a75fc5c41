"""The rules of keeping: by example, and what holds for any set of steps."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from crater_slurm.checkpoint import keep
from crater_slurm.checkpoint.keep import Item


def items(*steps: int) -> list[Item]:
    return [Item("step", n, "7.0", 1000.0 + n) for n in steps]


def numbers(found: list[Item]) -> list[int]:
    return [item.step for item in found]


def test_the_newest_few_and_the_steps_that_are_divided_stay() -> None:
    there = items(*range(10, 110, 10))
    assert numbers(keep.removable(there, 2, 0)) == [10, 20, 30, 40, 50, 60, 70, 80]
    assert numbers(keep.removable(there, 2, 30)) == [10, 20, 40, 50, 70, 80]
    assert keep.removable(there, 0, 0) == []
    assert keep.removable(there, 20, 0) == []


def test_a_run_that_went_back_keeps_what_it_just_saved_and_what_a_restart_would_take() -> None:
    back = [Item("step", 110, "7.1", 5000.0), Item("step", 120, "7.1", 5001.0)]
    gone = keep.removable([*items(100, 200, 300), *back], 1, 0)
    assert numbers(gone) == [100, 110, 200]


def test_of_one_step_saved_twice_the_later_save_stays() -> None:
    twice = [Item("step", 10, "7.0", 1.0), Item("step", 10, "7.1", 2.0)]
    assert keep.removable(twice, 5, 0) == twice[:1]


def test_names_are_kept_apart() -> None:
    best = Item("best", 10, "7.0", 1.0)
    assert keep.removable([best, *items(20, 30)], 1, 0) == items(20)


def test_a_step_is_superseded_only_by_a_newer_complete_one() -> None:
    ten = items(10)[0]
    assert not keep.superseded(ten, [], 1, 0)
    assert not keep.superseded(ten, items(5), 1, 0)
    assert keep.superseded(ten, items(20), 1, 0)
    assert not keep.superseded(ten, items(20), 2, 0)
    assert not keep.superseded(ten, items(20), 1, 5)
    assert not keep.superseded(ten, items(20), 0, 0)
    # Saved after a higher step, so by a run that went back: it is the newest there is.
    assert not keep.superseded(Item("step", 10, "7.1", 9000.0), items(20), 1, 0)


ANY = st.builds(
    Item,
    name=st.sampled_from(["step", "best"]),
    step=st.integers(0, 60),
    run=st.sampled_from(["7.0", "7.1", "8.0"]),
    time=st.integers(0, 60).map(float),
    complete=st.booleans(),
    safe=st.booleans(),
    busy=st.booleans(),
)
SETS = st.lists(ANY, max_size=25, unique_by=lambda item: (item.name, item.step, item.run))


@given(SETS, st.integers(0, 5), st.integers(0, 20))
def test_nothing_that_is_needed_is_ever_removed(
    there: list[Item], keep_last: int, keep_every: int
) -> None:
    gone = keep.removable(there, keep_last, keep_every)
    for item in gone:
        assert item.complete
        assert item.safe
        assert not item.busy
    for name in ("step", "best"):
        whole = [i for i in there if i.name == name and i.complete]
        left = [i for i in whole if i not in gone]
        if whole:
            assert max(whole, key=lambda i: (i.step, i.time)) in left
            assert max(i.time for i in whole) in {i.time for i in left} or keep_last == 0
            assert {i.step for i in left} >= set(
                sorted({i.step for i in whole}, reverse=True)[: max(1, keep_last)]
            )
        if keep_every:
            every = {i.step for i in whole if i.step % keep_every == 0}
            assert every <= {i.step for i in left}


@given(SETS, st.integers(0, 5), st.integers(0, 20))
def test_the_rules_are_at_rest_after_they_were_applied(
    there: list[Item], keep_last: int, keep_every: int
) -> None:
    gone = keep.removable(there, keep_last, keep_every)
    left = [item for item in there if item not in gone]
    assert keep.removable(left, keep_last, keep_every) == []


@given(SETS)
def test_a_full_cache_gives_up_only_safe_steps_and_never_the_newest(there: list[Item]) -> None:
    gone = keep.evictable(there)
    assert all(i.complete and i.safe and not i.busy for i in gone)
    for name in ("step", "best"):
        whole = [i for i in there if i.name == name and i.complete]
        if whole:
            assert max(whole, key=lambda i: (i.step, i.time)) not in gone


@given(SETS, ANY, st.integers(1, 5), st.integers(0, 20))
def test_what_is_superseded_would_be_removed_and_something_newer_is_there(
    there: list[Item], item: Item, keep_last: int, keep_every: int
) -> None:
    complete = [i for i in there if i.complete]
    if keep.superseded(item, complete, keep_last, keep_every):
        assert any(i.step > item.step and i.time > item.time for i in complete)
        # Of a step that several runs saved only the newest save counts.
        again = any(
            (i.name, i.step) == (item.name, item.step) and i.time > item.time for i in complete
        )
        assert not keep_every or item.step % keep_every or again


def test_an_older_save_of_a_step_that_is_kept_is_superseded() -> None:
    older = Item("step", 1, "7.0", 0.0)
    there = [Item("step", 1, "8.0", 1.0), Item("step", 2, "8.0", 2.0)]
    assert keep.superseded(older, there, 1, 1)
    assert not keep.superseded(older, there[1:], 1, 1)
