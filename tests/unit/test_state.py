"""The picture of the cluster: replaced as a whole, kept when a refresh fails, never stale."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import time
import weakref
from collections.abc import Iterator

import pytest
from cluster_samples import cluster, node

from crater_slurm.errors import SlurmError, StoreError
from crater_slurm.model.cluster import Partition, Reservation, SlurmCluster
from crater_slurm.model.job import Job
from crater_slurm.model.profile import NodeProfile
from crater_slurm.model.request import Request
from crater_slurm.placement.need import Need
from crater_slurm.placement.planner import Planner, Scope
from crater_slurm.placement.sharing import Policy
from crater_slurm.scheduler import state as state_module
from crater_slurm.scheduler.state import State
from crater_slurm.store.repository import Snapshot


class FakeSlurm:
    def __init__(self, found: SlurmCluster) -> None:
        self.found = found
        self.away = ""
        self.asked = 0

    def cluster(self) -> SlurmCluster:
        self.asked += 1
        if self.away:
            raise SlurmError(self.away)
        return dataclasses.replace(self.found, time=time.time())


class FakeStore:
    def __init__(self, *profiles: NodeProfile) -> None:
        self.profiles = {p.name: (1, p) for p in profiles}
        self.at = 1
        self.away = ""
        self.snapshots = 0

    def opened(self) -> FakeStore:
        if self.away:
            raise StoreError(self.away)
        return self

    def put(self, profile: NodeProfile) -> None:
        self.at += 1
        self.profiles[profile.name] = (self.at, profile)

    def remove(self, name: str) -> None:
        self.at += 1
        del self.profiles[name]

    def version(self) -> int:
        return self.at

    def snapshot(self, since: int | None = None) -> Snapshot:
        self.snapshots += 1
        changed = tuple(p for at, p in self.profiles.values() if since is None or at > since)
        return Snapshot(self.at, changed, tuple(self.profiles))


@pytest.fixture
def store() -> FakeStore:
    return FakeStore(node("n1"), node("n2"))


@pytest.fixture
def slurm() -> FakeSlurm:
    return FakeSlurm(cluster([node("n1"), node("n2")]))


@pytest.fixture
def state(slurm: FakeSlurm, store: FakeStore) -> State:
    return State(slurm, store.opened, refresh_seconds=0, allow_declared=True)  # type: ignore[arg-type]


def test_before_the_first_refresh_nothing_is_known(state: State) -> None:
    assert state.view is None
    assert state.problem == "the cluster has not been read yet"


def test_a_refresh_joins_slurm_s_nodes_with_their_profiles(state: State) -> None:
    state.refresh()
    assert state.view is not None
    assert state.view.profiles == 2
    assert state.view.planner.inventory.names == ("n1", "n2")
    assert state.view.planner.inventory.unknown == 0


def test_the_site_s_way_of_sharing_reaches_the_planner(slurm: FakeSlurm, store: FakeStore) -> None:
    policy = Policy(reserve=2)
    state = State(
        slurm,  # type: ignore[arg-type]
        store.opened,  # type: ignore[arg-type]
        refresh_seconds=0,
        allow_declared=True,
        sharing_policy=policy,
    )
    state.refresh()
    assert state.view is not None
    assert state.view.planner.sharing_policy == policy


def test_nothing_is_shared_where_slurm_may_spread_a_job_s_shards(
    slurm: FakeSlurm, store: FakeStore
) -> None:
    state = State(
        slurm,  # type: ignore[arg-type]
        store.opened,  # type: ignore[arg-type]
        refresh_seconds=0,
        allow_declared=True,
        sharing_policy=Policy(),
    )
    state.refresh()
    spreads = frozenset({"CR_CORE", "MULTIPLE_SHARING_GRES_PJ"})
    slurm.found = dataclasses.replace(slurm.found, select_parameters=spreads)
    state.refresh()
    assert state.view is not None
    assert state.view.planner.sharing_policy is None


def test_while_nothing_changes_the_planner_stays_and_the_picture_is_as_young_as_slurm_s_word(
    state: State,
) -> None:
    state.refresh()
    assert state.view is not None
    first = state.view
    time.sleep(0.01)
    state.refresh()
    assert state.view.planner is first.planner
    assert state.view.serial == first.serial
    assert state.view.cluster.time > first.cluster.time


def test_slurm_is_asked_only_when_it_is_time(slurm: FakeSlurm, store: FakeStore) -> None:
    state = State(slurm, store.opened, refresh_seconds=60, allow_declared=True)  # type: ignore[arg-type]
    state.refresh()
    state.refresh()
    assert slurm.asked == 1
    store.put(node("n2", cards=()))
    state.refresh()
    assert slurm.asked == 1
    assert state.view is not None
    assert len(state.view.planner.inventory.classes(Need(gpus=1, cache_gb=50))) == 2, (
        "the store has its own time"
    )


def test_the_store_is_read_whole_once_and_then_only_what_changed(
    state: State, store: FakeStore
) -> None:
    state.refresh()
    state.refresh()
    assert store.snapshots == 1
    store.put(node("n2", cache_gb=1))
    state.refresh()
    assert store.snapshots == 2


@pytest.mark.parametrize(
    "change",
    [
        lambda c: dataclasses.replace(c, nodes=c.nodes[:1]),
        lambda c: dataclasses.replace(c, default_partition="other"),
        lambda c: dataclasses.replace(
            c, nodes=(dataclasses.replace(c.nodes[0], state="down"), *c.nodes[1:])
        ),
        lambda c: dataclasses.replace(c, partitions=(Partition(name="gpu", max_nodes=1),)),
        lambda c: dataclasses.replace(c, reservations=(Reservation(name="r", start=0, end=1),)),
        lambda c: dataclasses.replace(c, enforce_limits="ALL"),
    ],
    ids=["nodes", "default partition", "state", "limits", "reservations", "enforcement"],
)
def test_what_slurm_changes_is_seen(state: State, slurm: FakeSlurm, change) -> None:  # type: ignore[no-untyped-def]
    state.refresh()
    assert state.view is not None
    before = state.view.planner
    slurm.found = change(slurm.found)
    state.refresh()
    assert state.view.planner is not before
    assert state.view.serial == 2, "whoever watches the pictures sees that it is another one"


def test_new_gres_names_are_seen_without_a_new_planner(state: State, slurm: FakeSlurm) -> None:
    state.refresh()
    slurm.found = dataclasses.replace(slurm.found, gres_types=frozenset({"gpu"}))
    state.refresh()
    assert state.view is not None
    assert state.view.cluster.gres_types == {"gpu"}


def test_a_removed_profile_makes_its_node_unknown(state: State, store: FakeStore) -> None:
    state.refresh()
    store.remove("n1")
    state.refresh()
    assert state.view is not None
    inventory = state.view.planner.inventory
    assert inventory.names_of(inventory.unknown) == ["n1"]


@pytest.mark.parametrize("who", ["slurm", "store"])
def test_a_failed_refresh_keeps_the_last_picture(
    state: State, slurm: FakeSlurm, store: FakeStore, who: str
) -> None:
    state.refresh()
    before = state.view
    for side in (slurm, store):
        side.away = "away" if side is (slurm if who == "slurm" else store) else ""
    with pytest.raises((SlurmError, StoreError), match="away"):
        state.refresh()
    assert state.view is before


def test_profiles_that_change_while_slurm_is_away_count_at_once_and_are_not_lost(
    state: State, slurm: FakeSlurm, store: FakeStore
) -> None:
    state.refresh()
    slurm.away = "away"
    store.put(node("n2", cards=()))
    with pytest.raises(SlurmError):
        state.refresh()
    assert state.view is not None
    assert len(state.view.planner.inventory.classes(Need(gpus=1, cache_gb=50))) == 2


def test_profiles_read_before_slurm_ever_answered_are_there_when_it_does(
    state: State, slurm: FakeSlurm
) -> None:
    slurm.away = "starting"
    with pytest.raises(SlurmError):
        state.refresh()
    assert state.view is None
    slurm.away = ""
    state.refresh()
    assert state.view is not None
    assert state.view.profiles == 2


def test_what_could_not_be_joined_is_joined_the_next_time(
    state: State, store: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    state.refresh()
    store.put(node("n2", cards=()))
    with monkeypatch.context() as broken:
        broken.setattr(state_module.inventory, "build", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            state.refresh()
    state.refresh()
    assert state.view is not None
    assert len(state.view.planner.inventory.classes(Need(gpus=1, cache_gb=50))) == 2


def test_host_lists_are_put_into_words_once(state: State) -> None:
    state.refresh()
    view = state.view
    assert view is not None
    assert view.hostlist(0b11) == "n[1-2]"
    assert view.hostlist(0b11) is view.hostlist(0b11)
    assert view.hostlist(0) == ""


@pytest.fixture
def running(state: State, monkeypatch: pytest.MonkeyPatch) -> Iterator[State]:
    monkeypatch.setattr(state_module, "_STORE_POLL_SECONDS", 0.02)
    state.start()
    yield state
    state.stop()


def wait_until(condition: object) -> None:
    end = time.monotonic() + 8
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end
        time.sleep(0.01)


def test_the_thread_says_what_is_wrong_and_when_it_is_right_again(
    slurm: FakeSlurm, running: State
) -> None:
    wait_until(lambda: running.view is not None and running.problem == "")
    slurm.away = "Unable to contact slurm controller"
    wait_until(lambda: "Unable to contact slurm controller" in running.problem)
    slurm.away = ""
    wait_until(lambda: running.problem == "")


def test_a_fault_of_ours_does_not_end_the_thread(slurm: FakeSlurm, running: State) -> None:
    wait_until(lambda: running.problem == "")
    good, slurm.found = slurm.found, None  # type: ignore[assignment]
    wait_until(lambda: running.problem.endswith("see the log"))
    slurm.found = good
    wait_until(lambda: running.problem == "")


def test_a_picture_goes_by_itself_when_the_next_takes_its_place(
    state: State, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pictures are kept from the garbage collector, so one that held a circle would stay."""

    class Watched(Planner):  # without slots, so that it can be referred to weakly
        pass

    monkeypatch.setattr(state_module, "Planner", Watched)
    state.refresh()
    assert state.view is not None
    for gpus in (1, 99):
        state.view.planner.plan("p", Request(gpus=gpus), Job(user_id=1), Scope())
    state.view.hostlist(state.view.planner.inventory.everything)
    old = weakref.ref(state.view.planner)
    slurm.found = dataclasses.replace(slurm.found, nodes=slurm.found.nodes[:1])
    gc.disable()
    try:
        state.refresh()
        assert old() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("away", ["", "away"])
def test_a_refresh_leaves_the_collector_on(slurm: FakeSlurm, state: State, away: str) -> None:
    slurm.away = away
    with contextlib.suppress(SlurmError):
        state.refresh()
    assert gc.isenabled()


def test_jobs_that_come_and_go_change_no_picture(slurm: FakeSlurm, state: State) -> None:
    state.refresh()
    assert state.view is not None
    first = state.view.planner
    busy = tuple(dataclasses.replace(n, state="allocated") for n in slurm.found.nodes)
    slurm.found = dataclasses.replace(slurm.found, nodes=busy)
    state.refresh()
    assert state.view.planner is first


def test_new_limits_and_reservations_count_at_once_and_cost_no_new_picture(
    slurm: FakeSlurm, state: State
) -> None:
    state.refresh()
    assert state.view is not None
    first = state.view.planner
    first.plan("p", Request(gpus=1), Job(user_id=1), Scope())
    limit = Partition(name="gpu", max_time_minutes=60)
    held = Reservation(name="maint", start=0.0, end=1.0, nodes=frozenset({"n2", "gone"}))
    slurm.found = dataclasses.replace(
        slurm.found, partitions=(limit,), reservations=(held,), enforce_limits="ALL"
    )
    state.refresh()
    now = state.view.planner
    assert now.inventory.limits == {"gpu": limit}
    assert now.inventory.reservations == ((held, 0b10),)
    assert now.inventory.enforce_limits == "ALL"
    assert now.inventory.measured is first.inventory.measured
    assert now._outcomes is first._outcomes
    state.refresh()
    assert state.view.planner is now, "nothing changed"


def test_a_gpu_type_that_slurm_gives_anew_is_a_new_picture(slurm: FakeSlurm, state: State) -> None:
    state.refresh()
    assert state.view is not None
    first = state.view.planner
    nodes = tuple(
        dataclasses.replace(n, gpu_types=frozenset({"1g.5gb"})) for n in slurm.found.nodes
    )
    slurm.found = dataclasses.replace(slurm.found, nodes=nodes)
    state.refresh()
    assert state.view.planner.inventory is not first.inventory


def test_the_nodes_of_a_feature_expression_are_those_of_the_present_picture(
    slurm: FakeSlurm, state: State
) -> None:
    def featured(*each: set[str]) -> SlurmCluster:
        pairs = zip(slurm.found.nodes, each, strict=True)
        nodes = tuple(dataclasses.replace(n, features=frozenset(f)) for n, f in pairs)
        return dataclasses.replace(slurm.found, nodes=nodes)

    slurm.found = featured({"a", "b"}, {"b"})
    state.refresh()
    for _ in range(2):
        assert state.view is not None
        found = [state.view.matching(text) for text in ("a", "b", "a|b", "a&b", "c", "[a*2&b]")]
        assert found == [0b01, 0b11, 0b11, 0b01, 0, None]
        state.refresh()
    slurm.found = featured({"b"}, {"a", "b"})
    state.refresh()
    assert state.view is not None
    assert state.view.matching("a") == 0b10
