"""Decisions on their way to the store: never waited for, never lost without a count."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

import pytest

from crater_slurm.errors import StoreError
from crater_slurm.model.observation import Observation
from crater_slurm.model.plan import Decision, Mode, Verdict
from crater_slurm.scheduler import recorder as recorder_module
from crater_slurm.scheduler.recorder import Recorder
from crater_slurm.store.records import Grant
from crater_slurm.store.repository import Store


class FakeStore:
    """A store that can be away, and that chokes on the decisions named."""

    def __init__(self) -> None:
        self.away = ""
        self.poison: set[str] = set()
        self.decisions: dict[str, Decision] = {}
        self.grants: list[Grant] = []
        self.observations: list[Observation] = []
        self.pruned: list[tuple[int, float]] = []

    def opened(self) -> FakeStore:
        if self.away:
            raise StoreError(self.away)
        return self

    def save_decisions(self, decisions: Iterable[Decision]) -> None:
        found = list(decisions)
        if any(d.id in self.poison for d in found):
            raise TypeError("a value that JSON does not know")
        self.decisions |= {d.id: d for d in found}

    def save_grant(self, grant: Grant) -> None:
        self.grants.append(grant)

    def add_observations(self, observations: Iterable[Observation]) -> None:
        self.observations += observations

    def decision(self, key: str) -> Decision | None:
        return self.decisions.get(key)

    def prune(self, days: int, now: float) -> None:
        self.pruned.append((days, now))


def decision(name: str) -> Decision:
    return Decision(id=name, verdict=Verdict.PLANNED, mode=Mode.ENFORCE, time=1.0, user_id=1000)


GRANT = Grant(job_id=7, plan_id="d1", node="n1", time=2.0, got={"phase": "prolog"})


@pytest.fixture
def store() -> FakeStore:
    return FakeStore()


@pytest.fixture
def recorder(store: FakeStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    monkeypatch.setattr(recorder_module, "_RETRY_SECONDS", 0.02)
    found = Recorder(store.opened, keep_days=90)  # type: ignore[arg-type]
    found.start()
    yield found
    store.away = ""
    found.stop()


def wait_until(condition: object, seconds: float = 5) -> None:
    end = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end
        time.sleep(0.005)


def test_decisions_and_grants_reach_the_store(recorder: Recorder, store: FakeStore) -> None:
    recorder.add(decision("d1"))
    recorder.add(GRANT)
    wait_until(lambda: store.grants == [GRANT])
    assert store.decisions == {"d1": decision("d1")}


def test_observations_reach_the_store_also_after_it_was_away(
    recorder: Recorder, store: FakeStore
) -> None:
    one = Observation(job_id=7, plan_id="d1", node="n1", time=2.0, seconds=1.0)
    store.away = "locked"
    recorder.add(one)
    recorder.add(GRANT)
    wait_until(lambda: recorder.problem == "locked")
    store.away = ""
    wait_until(lambda: store.observations == [one])
    assert store.grants == [GRANT]


def test_a_decision_can_be_asked_for_before_it_is_written(
    recorder: Recorder, store: FakeStore
) -> None:
    store.away = "locked"
    recorder.add(decision("d1"), check="check-abc")
    assert recorder.decision("d1") == decision("d1")
    assert recorder.decision("check-abc") == decision("d1")


def test_an_older_decision_comes_from_the_store(recorder: Recorder, store: FakeStore) -> None:
    store.decisions["old"] = decision("old")
    assert recorder.decision("old") == decision("old")
    assert recorder.decision("never") is None


def test_what_is_kept_in_memory_is_bounded(
    recorder: Recorder, store: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder_module, "_RECENT", 3)
    for i in range(5):
        recorder.add(decision(f"d{i}"), check=f"c{i}")
    assert list(recorder._recent) == ["d2", "d3", "d4"]
    assert list(recorder._checks) == ["c2", "c3", "c4"]


def test_what_could_not_be_written_is_written_when_the_store_is_back(
    recorder: Recorder, store: FakeStore
) -> None:
    store.away = "the database is locked"
    recorder.add(decision("d1"))
    recorder.add(GRANT)
    wait_until(lambda: recorder.problem == "the database is locked")
    recorder.add(decision("d2"))
    store.away = ""
    wait_until(lambda: set(store.decisions) == {"d1", "d2"})
    wait_until(lambda: recorder.problem == "")
    assert store.grants == [GRANT]
    assert recorder.dropped == 0


def test_while_the_store_is_away_the_waiting_is_bounded_and_counted(
    recorder: Recorder, store: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder_module, "_MOST_WAITING", 10)
    store.away = "locked"
    for i in range(15):
        recorder.add(decision(f"d{i}"))
    wait_until(lambda: recorder.dropped == 5)
    store.away = ""
    wait_until(lambda: len(store.decisions) == 10)
    assert "d14" in store.decisions, "the oldest go first"


def test_a_record_that_can_t_be_written_holds_up_no_other(
    recorder: Recorder, store: FakeStore
) -> None:
    store.away = "locked"
    store.poison = {"bad"}
    for name in ("d1", "bad", "d2"):
        recorder.add(decision(name))
    wait_until(lambda: recorder.problem == "locked")
    store.away = ""
    wait_until(lambda: set(store.decisions) == {"d1", "d2"})
    wait_until(lambda: recorder.dropped == 1)
    recorder.add(decision("d3"))
    wait_until(lambda: "d3" in store.decisions)


def test_a_full_queue_never_blocks_a_submission(store: FakeStore) -> None:
    stuck = Recorder(store.opened, keep_days=1)  # type: ignore[arg-type]
    begin = time.monotonic()
    for i in range(recorder_module._MOST_WAITING + 3):
        stuck.add(GRANT if i else decision("first"))
    assert time.monotonic() - begin < 5
    assert stuck.dropped == 3


def test_what_waits_is_written_at_the_end(store: FakeStore) -> None:
    late = Recorder(store.opened, keep_days=1)  # type: ignore[arg-type]
    for i in range(700):
        late.add(decision(f"d{i}"))
    late.start()
    late.stop()
    assert len(store.decisions) == 700


def test_old_decisions_are_removed_now_and_then(recorder: Recorder, store: FakeStore) -> None:
    recorder.add(decision("d1"))
    wait_until(lambda: len(store.pruned) == 1)
    recorder.add(decision("d2"))
    wait_until(lambda: "d2" in store.decisions)
    assert [days for days, _ in store.pruned] == [90]


def test_words_that_are_no_utf8_are_kept_in_a_real_store(tmp_path) -> None:  # type: ignore[no-untyped-def]
    """A constraint of bytes, as any user can write one."""
    import dataclasses

    odd = dataclasses.replace(decision("d1"), options={"features": "\udcff\x00"})
    with Store.open(f"sqlite:///{tmp_path}/s.db", create=True) as real:
        recorder = Recorder(lambda: real, keep_days=90)
        recorder.start()
        recorder.add(odd)
        recorder.stop()
        assert real.decision("d1") == odd
        assert recorder.dropped == 0
