"""What jobs needed, in memory: joined with their decision, bounded, newest first, never too little."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from cluster_samples import decide, node

from crater_slurm.errors import StoreError, UsageError
from crater_slurm.model.observation import FIGURES, Observation, key_of
from crater_slurm.model.plan import Decision, Mode, Verdict
from crater_slurm.model.workload import Workload
from crater_slurm.scheduler import observed as observed_module
from crater_slurm.scheduler.observed import Observed, settings_of
from crater_slurm.store.repository import Store

LLAMA = Workload(model="llama-3-8b", method="lora", framework="torch")
KEY = "llama-3-8b|lora|torch"


def decision(plan_id: str = "p1", **request: object) -> Decision:
    asked = {"model": "Llama-3-8B", "method": "lora", "framework": "torch"} | request
    return Decision(
        id=plan_id,
        verdict=Verdict.PLANNED,
        mode=Mode.ENFORCE,
        time=1.0,
        user_id=1000,
        request={k: v for k, v in asked.items() if v is not None},
    )


class Recorder:
    def __init__(self) -> None:
        self.decisions = {"p1": decision(), "bare": decision("bare", model=None)}
        self.added: list[Observation] = []
        self.asked: list[str] = []
        self.away = False

    def add(self, item: Observation) -> None:
        self.added.append(item)

    def decision(self, key: str) -> Decision | None:
        self.asked.append(key)
        if self.away:
            raise StoreError("the database is locked")
        return self.decisions.get(key)


def report(**fields: Any) -> dict[str, Any]:
    base = {
        "job_id": "7",
        "plan_id": "p1",
        "node": "n1",
        "time": 5000.0,
        "seconds": 900.0,
        "ended": True,
        "succeeded": True,
        "oom_kills": 0,
        "samples": 30,
        "gpus": 1,
        "figures": {"gpu_memory_peak_mib": 17_600, "host_memory_peak_mib": 21_000.4},
    }
    return base | fields


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def store(tmp_path) -> Iterator[Store]:  # type: ignore[no-untyped-def]
    with Store.open(f"sqlite:///{tmp_path}/s.db", create=True) as opened:
        yield opened


Make = Callable[[], Observed]


@pytest.fixture
def observed(recorder: Recorder, store: Store) -> Observed:
    return Observed(lambda: store, recorder, clock=lambda: 10_000.0)  # type: ignore[arg-type]


def jobs(observed: Observed, workload: Workload = LLAMA) -> list[int]:
    return [one.job_id for one in observed.peaks(workload)]


def test_a_report_is_joined_with_its_decision_and_kept(
    observed: Observed, recorder: Recorder
) -> None:
    one = observed.take(report())
    assert one.key == KEY
    assert one.workload == {
        "model": "Llama-3-8B", "method": "lora", "framework": "torch",
        "tensor_parallel": 1, "pipeline_parallel": 1, "gpus": 1,
    }  # fmt: skip
    assert one.host_memory_peak_mib == 21_000
    assert recorder.added == [one]
    assert observed.peaks(LLAMA) == (one,)
    other = dataclasses.replace(LLAMA, method="full")
    assert observed.peaks(other) == ()


def test_what_a_user_stated_is_kept_to_compare_like_with_like() -> None:
    words = "gpus=2 model=llama-3-8b method=qlora precision=bf16 micro-batch=4 sequence-length=2048"
    made = decide(words, node("n1"), node("n2"), min_nodes="2").decision
    assert made is not None
    made = dataclasses.replace(made, request=json.loads(json.dumps(made.request)))
    key, settings = settings_of(made)
    assert key == "llama-3-8b|qlora|"
    assert settings == {
        "model": "llama-3-8b", "method": "qlora", "precision": "bf16", "micro_batch": 4,
        "sequence_length": 2048, "tensor_parallel": 1, "pipeline_parallel": 1,
        "gpus": 4,  # on two nodes
    }  # fmt: skip


def test_a_job_without_model_or_plan_is_kept_without_key(
    observed: Observed, recorder: Recorder
) -> None:
    for plan_id in ("bare", "", "unknown"):
        one = observed.take(report(plan_id=plan_id))
        assert (one.key, one.workload) == (None, {})
    assert len(recorder.added) == 3
    assert jobs(observed) == []


@pytest.mark.parametrize(
    ("fields", "counts"),
    [
        ({"seconds": 40.0}, True),
        ({"seconds": 40.0, "succeeded": False}, False),
        ({"seconds": 40.0, "succeeded": None}, False),
        ({"seconds": 599.0, "ended": False}, False),
        ({"seconds": 600.0, "ended": False}, True),
        ({"seconds": 600.0, "succeeded": False}, True),
        ({"seconds": 40.0, "succeeded": False, "oom_kills": 1}, True),
        ({"seconds": 40.0, "samples": 2}, False),
        ({"seconds": 40.0, "samples": 3}, True),
        ({"seconds": 9000.0, "samples": 2}, False),
        ({"seconds": 40.0, "samples": 1, "oom_kills": 2, "succeeded": False}, True),
        ({"seconds": 40.0, "samples": 0, "oom_kills": 2, "succeeded": False}, False),
    ],
)
def test_short_runs_that_failed_teach_nothing(
    observed: Observed, fields: dict[str, Any], counts: bool
) -> None:
    one = observed.take(report(**fields))
    assert one.counts is counts
    assert jobs(observed) == ([7] if counts else [])
    assert one.is_lower_bound is bool(fields.get("oom_kills"))


def test_the_newest_report_of_a_job_stays_whatever_the_order(observed: Observed) -> None:
    observed.take(report(time=2000.0, ended=False, figures={"host_memory_peak_mib": 1}))
    assert [one.job_id for one in observed.running()] == []  # more than an hour ago
    observed.take(report(time=9000.0, ended=False, figures={"host_memory_peak_mib": 2}))
    assert [one.host_memory_peak_mib for one in observed.running()] == [2]
    observed.take(report(time=9500.0, figures={"host_memory_peak_mib": 3}))
    assert observed.running() == ()
    observed.take(report(time=9400.0, ended=False, figures={"host_memory_peak_mib": 9}))
    assert [one.host_memory_peak_mib for one in observed.peaks(LLAMA)] == [3]


def test_nodes_and_jobs_count_apart_and_the_newest_come_first(observed: Observed) -> None:
    observed.take(report(job_id="1", time=100.0))
    observed.take(report(job_id="2", time=300.0))
    observed.take(report(job_id="2", node="n2", time=200.0))
    assert [(one.job_id, one.node) for one in observed.peaks(LLAMA)] == [
        (2, "n1"),
        (2, "n2"),
        (1, "n1"),
    ]


def test_the_index_is_bounded(
    observed: Observed, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, most in {
        "_PER_KEY": 3,
        "_MOST_KEYS": 2,
        "_MOST_PLANS": 2,
        "_MOST_RUNNING": 2,
    }.items():
        monkeypatch.setattr(observed_module, name, most)
    for job in range(6):
        observed.take(report(job_id=str(job), time=100.0 + job))
    assert jobs(observed) == [5, 4, 3]
    for number in range(3):
        recorder.decisions[f"m{number}"] = decision(f"m{number}", model=f"model-{number}")
        observed.take(report(plan_id=f"m{number}"))
        observed.take(report(plan_id=f"m{number}", ended=False, time=9999.0))
    assert jobs(observed) == [], "the workload that nobody ran for longest went"
    assert [one.plan_id for one in observed.running()] == ["m1", "m2"]
    assert list(observed._plans) == ["m1", "m2"]


def test_the_store_is_asked_for_a_plan_once(observed: Observed, recorder: Recorder) -> None:
    for second in range(5):
        observed.take(report(time=float(second)))
    assert recorder.asked == ["p1"]


def test_a_store_that_is_away_is_told_so_that_the_node_tries_again(
    observed: Observed, recorder: Recorder
) -> None:
    recorder.away = True
    with pytest.raises(StoreError):
        observed.take(report())
    assert recorder.added == []


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_outside_what_a_machine_can_say_is_refused(observed: Observed, name: str) -> None:
    for value in (-1, FIGURES[name] * 1.01 + 1, float("nan"), float("inf"), "7", True, [1]):
        with pytest.raises(UsageError, match=name):
            observed.take(report(figures={name: value}))
    assert getattr(observed.take(report(figures={name: FIGURES[name]})), name) == FIGURES[name]


def test_figures_of_a_newer_node_are_left_out_and_unknown_ones_are_none(observed: Observed) -> None:
    one = observed.take(report(figures={"energy_j": 5.0, "cpu_cores_mean": None}))
    assert {name: getattr(one, name) for name in FIGURES} == dict.fromkeys(FIGURES)


def test_every_figure_is_a_field_and_every_measured_field_has_its_bounds() -> None:
    optional = {e.name for e in dataclasses.fields(Observation) if str(e.type).endswith("| None")}
    assert optional - {"key", "succeeded"} == set(FIGURES)


def test_a_clock_that_is_ahead_makes_no_report_the_newest_for_ever(observed: Observed) -> None:
    assert observed.take(report(time=2e9)).time == 10_000.0


def test_what_the_store_has_is_there_after_a_restart(
    recorder: Recorder, store: Store, observed: Observed
) -> None:
    done = observed.take(report(job_id="1", time=100.0))
    going = observed.take(report(job_id="2", time=9900.0, ended=False))
    bare = observed.take(report(job_id="3", plan_id="bare"))
    store.add_observations([done, going, bare])
    again = Observed(lambda: store, recorder, clock=lambda: 10_000.0)  # type: ignore[arg-type]
    again.take(report(job_id="1", time=200.0, figures={"host_memory_peak_mib": 77}))
    again.load()
    assert [(one.job_id, one.time) for one in again.peaks(LLAMA)] == [(2, 9900.0), (1, 200.0)]
    assert again.running() == (), "nobody has said yet that it still runs"


def test_a_store_that_comes_late_is_loaded_then(
    recorder: Recorder, store: Store, observed: Observed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observed_module, "_RETRY_SECONDS", 0.01)
    store.add_observation(observed.take(report()))
    tried, opened = threading.Event(), []

    def open_store() -> Store:
        opened.append(1)
        if len(opened) < 3:
            raise StoreError("not yet")
        tried.set()
        return store

    late = Observed(open_store, recorder)  # type: ignore[arg-type]
    late.start()
    assert tried.wait(5)
    late.stop()
    assert jobs(late) == [7]


def test_threads_that_report_and_ask_at_once_disturb_nobody(observed: Observed) -> None:
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for turn in range(200):
                observed.take(report(job_id=str(turn), node=f"n{number}", time=float(turn)))
                assert len(observed.peaks(LLAMA)) <= observed_module._PER_KEY
                observed.running()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert failures == []
    assert jobs(observed)[0] == 199


def test_a_key_is_short_and_printable() -> None:
    odd = Workload(model="a\x1b[31m\udcff" + "x" * 1000, method="lora")
    key = key_of(odd)
    assert key.startswith("a\ufffd[31m\ufffdxxx")
    assert len(key) == 255
