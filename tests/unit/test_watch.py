"""What crater-scheduler does for waiting jobs: proven, within limits, once, and never at any price."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from cluster_samples import node
from prometheus_client import CollectorRegistry, generate_latest
from queue_samples import NOW, Clock, FakeSlurm, array, at, keys, queued, submitted

from crater_slurm.config.settings import Reconcile, Sla
from crater_slurm.errors import SlurmError, StoreError
from crater_slurm.model import token
from crater_slurm.model.plan import Decision, Mode, Plan
from crater_slurm.model.queue import QueuedJob
from crater_slurm.model.request import Request
from crater_slurm.placement.reconcile import Wanted
from crater_slurm.scheduler import replan
from crater_slurm.scheduler.actions import Actor
from crater_slurm.scheduler.health import Board
from crater_slurm.scheduler.planned import Planned, PlannedJobs
from crater_slurm.scheduler.reconcile import Reconciler
from crater_slurm.scheduler.sla import SlaWatch
from crater_slurm.scheduler.state import View
from crater_slurm.scheduler.utilization import Utilization
from crater_slurm.scheduler.watch import QueueWatch
from crater_slurm.store.repository import Store

FAST = "gpus=1 ssd-latency=100us max-wait=1000s"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(f"sqlite:///{tmp_path / 'crater.db'}", create=True) as found:
        yield found


@pytest.fixture
def slurm() -> FakeSlurm:
    return FakeSlurm()


@pytest.fixture
def clock() -> Clock:
    return Clock()


def actor(store: Store, slurm: FakeSlurm, clock: Clock, **more: Any) -> Actor:
    return Actor(slurm.update, lambda: store, clock, **{"dry_run": False} | more)


def away() -> Store:
    raise StoreError("the store is locked")


def outcomes(store: Store, plan: str = "p1") -> list[tuple[str, str, str]]:
    return [(a.job, a.action, a.outcome) for a in store.actions([plan]).get(plan, [])]


# Which jobs are crater's


def planned(store: Store, *jobs: QueuedJob) -> list[Planned]:
    return PlannedJobs(keys, lambda: store).of(jobs, "test")


def test_a_job_with_a_genuine_token_comes_with_its_decision(store: Store) -> None:
    decision, comment = submitted(FAST, node("x1"))
    store.save_decision(decision)
    (found,) = planned(store, queued(comment=f"mine {comment}"), queued(8, comment="mine"))
    assert found.job.id == 7
    assert found.decision.request == decision.request
    assert found.decision.submitted == decision.submitted


def test_tokens_that_prove_nothing_are_no_plan(store: Store) -> None:
    decision, comment = submitted(FAST, node("x1"))
    store.save_decision(decision)
    forged = token.sign(token.SignedPlan(Plan(id="p1"), 1000, "test", 1), b"z" * 32)
    assert planned(store, queued(comment=comment, user_id=2000)) == []
    assert planned(store, queued(comment=forged)) == []
    assert planned(store, queued(comment=comment[:-1])) == []
    assert planned(store, array(7, "1-3", comment=comment)) == [], "it was no array's"
    assert PlannedJobs(list, lambda: store).of([queued(comment=comment)], "test") == []
    assert PlannedJobs(keys, lambda: store).of([queued(comment=comment)], "other") == []


def test_a_copied_token_counts_for_the_first_job_alone(store: Store) -> None:
    decision, comment = submitted(FAST, node("x1"))
    store.save_decision(decision)
    jobs = [queued(n, comment=comment) for n in (9, 7, 8)]
    assert [p.job.id for p in planned(store, *jobs)] == [7]


def test_all_entries_of_an_array_share_its_token(store: Store) -> None:
    decision, comment = submitted(FAST, node("x1"), array_inx="1-9")
    store.save_decision(decision)
    entries = [array(7, "3-9", comment=comment), queued(8, array_id=7, tasks="1", comment=comment)]
    assert [p.job.id for p in planned(store, *entries)] == [7, 8]
    assert planned(store, *entries, queued(9, comment=comment))[-1].job.id == 8


@pytest.mark.parametrize("change", [{"mode": Mode.ADVISE}, {"user_id": 5}])
def test_a_decision_that_was_not_in_force_for_this_user_is_none(
    store: Store, change: dict[str, Any]
) -> None:
    decision, comment = submitted(FAST, node("x1"))
    store.save_decision(dataclasses.replace(decision, **change))
    assert planned(store, queued(comment=comment)) == []


def test_decisions_are_read_once_and_forgotten_with_their_job(store: Store) -> None:
    decision, comment = submitted(FAST, node("x1"))
    store.save_decision(decision)
    known = PlannedJobs(keys, lambda: store)
    known.of([queued(comment=comment)], "test")
    known._open_store = away
    assert len(known.of([queued(comment=comment)], "test")) == 1
    known.of([], "test")
    with pytest.raises(StoreError):
        known.of([queued(comment=comment)], "test")


# Promises


def waiting(words: str = FAST, plan: str = "p1", **fields: Any) -> Planned:
    decision, comment = submitted(words, node("x1"), plan_id=plan)
    return Planned(queued(comment=comment, **fields), decision)


SLA = Sla(enabled=True, least_wait_seconds=1)
VIEW = at(1, node("x1"))


def test_a_promise_about_to_break_raises_the_job_once(
    store: Store, slurm: FakeSlurm, clock: Clock
) -> None:
    watch = SlaWatch(SLA, actor(store, slurm, clock), lambda: store)
    clock.now = NOW + 799
    watch.look([waiting()], VIEW)
    assert slurm.updates == []
    clock.now = NOW + 800
    watch.look([waiting()], VIEW)
    watch.look([waiting(nice=-1000)], VIEW)
    again = SlaWatch(SLA, actor(store, slurm, clock), lambda: store)  # after a restart
    again.look([waiting(nice=-1000)], VIEW)
    assert slurm.updates == [("7", {"nice": "-1000"})]
    assert outcomes(store) == [("7", "priority", "done")]
    assert again.late == 0
    clock.now = NOW + 1001
    again.look([waiting(nice=-1000)], VIEW)
    assert again.late == 1


def test_the_qos_step_sets_the_qos_that_the_admin_named(
    store: Store, slurm: FakeSlurm, clock: Clock
) -> None:
    settings = Sla(enabled=True, least_wait_seconds=1, steps=("priority", "qos"), qos="urgent")
    watch = SlaWatch(settings, actor(store, slurm, clock), lambda: store)
    for now in (NOW + 850, NOW + 900, NOW + 950):
        clock.now = now
        watch.look([waiting()], VIEW)
    assert slurm.updates == [("7", {"nice": "-1000"}), ("7", {"qos": "urgent"})]


def test_a_step_that_slurm_refuses_is_recorded_in_slurm_s_words_and_not_repeated(
    store: Store, slurm: FakeSlurm, clock: Clock
) -> None:
    slurm.refuses = "scontrol failed: Invalid qos specification"
    clock.now = NOW + 900
    watch = SlaWatch(SLA, actor(store, slurm, clock), lambda: store)
    watch.look([waiting()], VIEW)
    slurm.refuses = ""
    watch.look([waiting()], VIEW)
    assert slurm.updates == []
    (act,) = store.actions(["p1"])["p1"]
    assert (act.outcome, act.message) == (
        "failed",
        "waited 900 s of max-wait=1000s (90%); scontrol failed: Invalid qos specification",
    )


def test_a_crash_between_the_note_and_the_step_takes_no_step_twice(
    store: Store, slurm: FakeSlurm, clock: Clock
) -> None:
    def dies(label: str, **changes: str | int) -> None:
        slurm.update(label, **changes)
        raise KeyboardInterrupt

    clock.now = NOW + 900
    broken = Actor(dies, lambda: store, clock, dry_run=False)
    with pytest.raises(KeyboardInterrupt):
        SlaWatch(SLA, broken, lambda: store).look([waiting()], VIEW)
    assert outcomes(store) == [("7", "priority", "begun")]
    SlaWatch(SLA, actor(store, slurm, clock), lambda: store).look([waiting()], VIEW)
    assert len(slurm.updates) == 1


def test_while_the_store_is_away_nothing_is_done(
    store: Store, slurm: FakeSlurm, clock: Clock
) -> None:
    clock.now = NOW + 900
    for opened in (away, lambda: store):
        watch = SlaWatch(SLA, Actor(slurm.update, away, clock, dry_run=False), opened)
        with pytest.raises(StoreError):
            watch.look([waiting()], VIEW)
    assert slurm.updates == []


def test_a_dry_run_notes_once_and_does_not_count_later(
    store: Store, slurm: FakeSlurm, clock: Clock
) -> None:
    clock.now = NOW + 900
    dry = SlaWatch(SLA, actor(store, slurm, clock, dry_run=True), lambda: store)
    dry.look([waiting()], VIEW)
    dry.look([waiting()], VIEW)
    assert (slurm.updates, outcomes(store)) == ([], [("7", "priority", "dry_run")])
    SlaWatch(SLA, actor(store, slurm, clock), lambda: store).look([waiting()], VIEW)
    assert outcomes(store)[-1] == ("7", "priority", "done")


def test_a_job_without_max_wait_has_no_promise(
    store: Store, slurm: FakeSlurm, clock: Clock
) -> None:
    clock.now = NOW + 10**6
    SlaWatch(SLA, actor(store, slurm, clock), lambda: store).look([waiting("gpus=1")], VIEW)
    assert slurm.updates == []


def test_it_is_off_unless_the_admin_switches_it_on(
    store: Store, slurm: FakeSlurm, clock: Clock
) -> None:
    assert not SlaWatch(Sla(), actor(store, slurm, clock), lambda: store).wants(VIEW)
    assert SlaWatch(SLA, actor(store, slurm, clock), lambda: store).wants(VIEW)


# Excluded nodes


def reconciler(
    store: Store, slurm: FakeSlurm, clock: Clock, dry_run: bool = False, **settings: Any
) -> Reconciler:
    def plan_again(decision: Decision, view: View) -> Any:
        return replan.wanted(decision, view, {"membw"})

    acts = actor(store, slurm, clock, dry_run=dry_run)
    return Reconciler(Reconcile(**settings), acts, lambda: store, plan_again)


BEFORE = (node("x1"), node("y1", latency_us=165))
AFTER = at(2, node("x1"), node("y1"))


def excluding(number: int = 7, excluded: str = "y1", **fields: Any) -> Planned:
    decision, comment = submitted(FAST, *BEFORE, plan_id=f"p{number}")
    return Planned(queued(number, comment=comment, excluded=excluded, **fields), decision)


def test_a_waiting_job_may_use_the_repaired_node(
    store: Store, slurm: FakeSlurm, clock: Clock
) -> None:
    part = reconciler(store, slurm, clock)
    part.look([excluding()], AFTER)
    assert slurm.updates == [("7", {"excluded": ""})]
    assert outcomes(store, "p7") == [("7", "exclude", "done")]
    part.look([excluding(excluded="")], at(3, *BEFORE))  # and it breaks again
    assert slurm.updates[1:] == [("7", {"excluded": "y1"})]


@pytest.mark.parametrize(
    "job",
    [
        excluding(excluded="x1"),
        excluding(excluded="y[1-"),
        excluding(excluded=""),
        excluding(partition="other"),
        excluding(requested="x1"),
        excluding(state="RUNNING"),
        Planned(dataclasses.replace(excluding().job, excluded=None), excluding().decision),
    ],
    ids=["edited", "no host list", "cleared", "moved", "pinned", "started", "not asked"],
)
def test_a_job_that_is_not_as_crater_left_it_is_left_alone(
    store: Store, slurm: FakeSlurm, clock: Clock, job: Planned
) -> None:
    reconciler(store, slurm, clock).look([job], AFTER)
    assert slurm.updates == []
    assert store.actions(["p7"]) == {}


def test_the_same_nodes_in_other_words_are_the_same(
    store: Store, slurm: FakeSlurm, clock: Clock
) -> None:
    machines = [node("x1"), node("y1", latency_us=165), node("y2", latency_us=165)]
    decision, comment = submitted(FAST, *machines)
    job = queued(comment=comment, excluded="y2,y1")
    reconciler(store, slurm, clock).look([Planned(job, decision)], at(2, *machines[:2], node("y2")))
    assert slurm.updates == [("7", {"excluded": "y1"})]


def test_so_many_jobs_a_minute_and_the_rest_later(
    store: Store, slurm: FakeSlurm, clock: Clock
) -> None:
    part = reconciler(store, slurm, clock, per_minute=2)
    jobs = {n: excluding(n) for n in (1, 2, 3)}

    def turn() -> list[str]:
        before = len(slurm.updates)
        assert part.wants(AFTER)
        part.look(list(jobs.values()), AFTER)
        done = [label for label, _ in slurm.updates[before:]]
        for label in done:
            jobs[int(label)] = excluding(int(label), excluded="")
        return done

    assert turn() == ["1", "2"]
    assert turn() == []
    clock.now += 61
    assert turn() == ["3"]


def test_it_looks_twice_after_a_change_and_then_not_until_the_next(
    store: Store, slurm: FakeSlurm, clock: Clock
) -> None:
    part = reconciler(store, slurm, clock)
    for _ in range(2):
        assert part.wants(AFTER)
        part.look([], AFTER)
    assert not part.wants(AFTER)
    assert part.wants(at(3, *BEFORE))
    assert not reconciler(store, slurm, clock, enabled=False).wants(AFTER)


def test_a_job_that_became_impossible_is_noted_once_and_keeps_its_list(
    store: Store, slurm: FakeSlurm, clock: Clock
) -> None:
    part = reconciler(store, slurm, clock)
    broken = at(2, node("x1", latency_us=300), BEFORE[1])
    for _ in range(3):
        part.look([excluding()], broken)
    assert slurm.updates == []
    assert outcomes(store, "p7") == [("7", "infeasible", "noted")]
    part.look([excluding()], AFTER)  # repaired: the job goes on
    assert slurm.updates == [("7", {"excluded": ""})]


def test_a_dry_run_changes_no_job(store: Store, slurm: FakeSlurm, clock: Clock) -> None:
    reconciler(store, slurm, clock, dry_run=True).look([excluding()], AFTER)
    assert (slurm.updates, outcomes(store, "p7")) == ([], [("7", "exclude", "dry_run")])


def test_a_change_that_slurm_refuses_is_tried_a_few_times_and_no_other_job_waits_for_it(
    store: Store, slurm: FakeSlurm, clock: Clock
) -> None:
    part = reconciler(store, slurm, clock)
    slurm.refuses = "scontrol failed: Job is no longer pending execution"
    for _ in range(5):
        part.look([excluding()], AFTER)
    assert outcomes(store, "p7") == [("7", "exclude", "failed")] * 3
    slurm.refuses = ""
    part.look([excluding(), excluding(8)], AFTER)
    assert slurm.updates == [("8", {"excluded": ""})]


def test_jobs_of_scrontab_are_slurm_s_own(store: Store, slurm: FakeSlurm, clock: Clock) -> None:
    job = excluding()
    decision = dataclasses.replace(
        job.decision, submitted=job.decision.submitted | {"kind": "cron"}
    )
    reconciler(store, slurm, clock).look([Planned(job.job, decision)], AFTER)
    assert slurm.updates == []


def test_another_way_of_planning_can_be_put_in_its_place(
    store: Store, slurm: FakeSlurm, clock: Clock
) -> None:
    """Whoever knows of degraded nodes takes the planner's answer and adds to it."""

    def cautious(decision: Decision, view: View) -> Any:
        found = replan.wanted(decision, view, set())
        return found and dataclasses.replace(found, excluded=found.excluded | {"x1"})

    part = Reconciler(Reconcile(), actor(store, slurm, clock), lambda: store, cautious)
    part.look([excluding()], AFTER)
    assert slurm.updates == [("7", {"excluded": "x1"})]


class Health:
    """Which nodes are degraded, and whether that is known yet."""

    def __init__(self, *degraded: str) -> None:
        self.board = Board(grades=(degraded,) if degraded else ())
        self.known = True


def with_health(store: Store, slurm: FakeSlurm, clock: Clock, health: Health) -> Reconciler:
    return Reconciler(
        Reconcile(),
        actor(store, slurm, clock),
        lambda: store,
        lambda decision, view: replan.wanted(decision, view, set()),
        lambda: health.board,
        lambda: health.known,
    )


def test_it_looks_again_when_other_nodes_are_degraded(
    store: Store, slurm: FakeSlurm, clock: Clock
) -> None:
    health = Health()
    part = with_health(store, slurm, clock, health)
    for degraded in ([], ["x1"], ["x1", "y1"], []):
        health.board = Health(*degraded).board
        for _ in range(2):
            assert part.wants(AFTER)
            part.look([], AFTER)
        assert not part.wants(AFTER), degraded


def test_until_health_is_known_nothing_is_changed_and_then_everything_is_looked_at(
    store: Store, slurm: FakeSlurm, clock: Clock
) -> None:
    health = Health()
    part = with_health(store, slurm, clock, health)
    health.known = False
    assert not part.wants(AFTER)
    health.known = True
    assert part.wants(AFTER)


@pytest.mark.parametrize("unprefer", [True, False])
def test_a_preference_goes_in_the_same_breath_as_its_nodes(
    store: Store, slurm: FakeSlurm, clock: Clock, unprefer: bool
) -> None:
    def answer(decision: Decision, view: View) -> Wanted:
        return Wanted(excluded=frozenset({"x1"}), unprefer=unprefer)

    part = Reconciler(Reconcile(), actor(store, slurm, clock), lambda: store, answer)
    part.look([excluding()], AFTER)
    also = {"prefer": ""} if unprefer else {}
    assert slurm.updates == [("7", {"excluded": "x1"} | also)]


# The thread


class Part:
    def __init__(self, wanted: bool = True, needs_excluded: bool = False) -> None:
        self.wanted = wanted
        self.needs_excluded = needs_excluded
        self.looks = 0
        self.fails: Exception | None = None

    def wants(self, view: View) -> bool:
        return self.wanted

    def look(self, planned: Sequence[Planned], view: View) -> None:
        self.looks += 1
        if self.fails:
            raise self.fails


class Site:
    """A watch over two parts, and what it asked of Slurm."""

    def __init__(self, store: Store) -> None:
        self.parts = [Part(), Part(wanted=False, needs_excluded=True)]
        self.asked: list[bool] = []
        self.view: View | None = VIEW
        self.off = False
        self.away = ""
        self.watch = QueueWatch(
            self.parts,
            read=self.read,
            planned=PlannedJobs(keys, lambda: store),
            view=lambda: self.view,
            off=lambda: self.off,
            seconds=0.01,
        )

    def read(self, excluded: bool) -> list[QueuedJob]:
        self.asked.append(excluded)
        if self.away:
            raise SlurmError(self.away)
        return []


@pytest.fixture
def site(store: Store) -> Iterator[Site]:
    found = Site(store)
    yield found
    if found.watch._thread.is_alive():
        found.watch.stop()


def test_one_reading_serves_all_and_excluded_nodes_are_asked_for_when_needed(site: Site) -> None:
    site.watch.look()
    assert (site.asked, [p.looks for p in site.parts]) == ([False], [1, 0])
    site.parts[1].wanted = True
    site.watch.look()
    assert (site.asked, [p.looks for p in site.parts]) == ([False, True], [2, 1])


@pytest.mark.parametrize("why", ["off", "no view", "nobody wants"])
def test_slurm_is_not_asked_in_vain(site: Site, why: str) -> None:
    site.off = why == "off"
    site.view = None if why == "no view" else VIEW
    site.parts[0].wanted = why != "nobody wants"
    site.watch.look()
    assert site.asked == []


def wait_until(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + 8
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_whatever_fails_is_said_and_tried_again(site: Site) -> None:
    site.away = "slurm_load_jobs error: Unable to contact slurm controller"
    site.watch.start()
    wait_until(lambda: site.watch.problem.endswith(site.away))
    site.parts[0].fails = ZeroDivisionError()
    site.away = ""
    wait_until(lambda: site.watch.problem.endswith("see the log"))
    site.parts[0].fails = None
    wait_until(lambda: site.watch.problem == "")


# GPU use of running jobs


def test_a_job_below_its_gpu_use_is_shown_until_it_keeps_its_promise() -> None:
    registry = CollectorRegistry()
    found = Utilization(registry)
    request = Request(min_gpu_utilization_percent=65)
    assert found.observe("7", "p1", request, 31.0, 1200)
    line = 'crater_job_below_utilization{job="7"} 31.0'
    assert line in generate_latest(registry).decode()
    (note,) = found.notes("p1")
    assert note.startswith("job 7: its GPUs are 31 % busy in the mean of 20 min, below ")
    assert found.notes("p2") == []
    assert found.observe("7", "p1", request, 80.0, 1800) == ""
    assert found.notes("p1") == []
    assert line not in generate_latest(registry).decode()
    found.forget("7")
