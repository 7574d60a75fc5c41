"""From reports to the board, to weights and drains, and to what a submission is told."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from cluster_samples import GIB, cluster, decider, gpus, message, node, view
from prometheus_client import CollectorRegistry, generate_latest
from test_weights import FakeSlurm

from crater_slurm.cli.explanation import lines
from crater_slurm.config import Settings
from crater_slurm.model.cluster import SlurmCluster
from crater_slurm.model.health import GpuHealth, NodeHealth
from crater_slurm.model.plan import Decision, Mode
from crater_slurm.model.profile import NodeProfile
from crater_slurm.placement.reconcile import Wanted
from crater_slurm.scheduler import replan
from crater_slurm.scheduler.drain import Drains
from crater_slurm.scheduler.health import HealthWatch
from crater_slurm.scheduler.health_metrics import HealthCollector
from crater_slurm.scheduler.state import View
from crater_slurm.scheduler.weights import Weights
from crater_slurm.store.decisions import decision_from_dict, decision_to_dict


class Slurm(FakeSlurm):
    """Also takes drains, which it notes."""

    def __init__(self, **conf: int) -> None:
        super().__init__(**conf)
        self.drains: list[tuple[str, str]] = []

    def drain(self, name: str, reason: str) -> bool:
        self.drains.append((name, reason))
        return True

    def undrain(self, name: str) -> bool:
        self.drains.append((name, "undrained"))
        return True


class Source:
    """Health by node, as Reports and Prometheus hold it."""

    def __init__(self) -> None:
        self.found: dict[str, NodeHealth] = {}
        self.problem = ""

    def health(self, name: str) -> NodeHealth | None:
        return self.found.get(name)

    def start(self) -> None: ...

    def stop(self) -> None: ...


class Site:
    """A watch over three machines of four GPUs each, with time in the test's hands."""

    def __init__(self, folder: Path, mode: Mode = Mode.ENFORCE, prometheus: bool = False) -> None:
        self.folder = folder
        self.now = 1_700_000_000.0
        self.machines = [node(f"n{i}") for i in (1, 2, 3)]
        self.slurm = Slurm(n1=1, n2=1, n3=1)
        self.reports, self.prometheus = Source(), Source() if prometheus else None
        self.settings = Settings.model_validate(
            {
                "filter": {"mode": mode.value},
                "off_switch": folder / "off",
                "health": {"drain": ["gpu_lost"], "drain_share": 1},
            }
        )
        self.view: View | None = view(*self.machines)
        self.restart()

    @property
    def profiles(self) -> dict[str, NodeProfile]:
        return {m.name: m for m in self.machines}

    def restart(self) -> None:
        control: Any = self.slurm
        state: Any = self
        source: Any = self.prometheus
        reports: Any = self.reports
        self.watch = HealthWatch(
            self.settings,
            state,
            reports,
            Weights(control, self.folder / "weights.json"),
            Drains(control),
            source,
            clock=lambda: self.now,
        )

    def report(self, name: str, celsius: float = 40, gpus: int = 4, **fields: Any) -> NodeHealth:
        states = [GpuHealth(index=i, temperature_c=40) for i in range(gpus)]
        states[-1] = dataclasses.replace(states[-1], temperature_c=celsius, **fields)
        self.reports.found[name] = NodeHealth(node=name, time=self.now, gpus=tuple(states))
        return self.reports.found[name]

    def pass_(self, seconds: float = 30) -> None:
        """Time passes, Slurm is read, the watch looks."""
        self.now += seconds
        seen = cluster(self.machines)
        nodes = tuple(dataclasses.replace(n, weight=self.slurm.now[n.name]) for n in seen.nodes)
        found = SlurmCluster(nodes=nodes, time=self.now, default_partition="gpu", name="test")
        assert self.view
        self.view = dataclasses.replace(self.view, cluster=found)
        self.watch.tick()

    def rounds(self, count: int, *names: str, **how: Any) -> None:
        for _ in range(count):
            for name in names:
                self.report(name, **how)
            self.pass_()

    def described(self, name: str) -> dict[str, Any]:
        found = self.watch.describe(name)
        assert found
        return found


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def test_three_reports_of_heat_make_a_node_the_last_choice(site: Site) -> None:
    site.rounds(2, "n1", celsius=95)
    assert site.slurm.now["n1"] == 1
    assert site.described("n1")["score"] == 0
    site.rounds(1, "n1", celsius=95)
    assert site.slurm.now == {"n1": 10_001, "n2": 1, "n3": 1}
    found = site.described("n1")
    assert (found["tier"], found["degraded"], found["faults"]) == (3, True, ["gpu_temperature"])
    assert found["own_weight"] == 1
    site.rounds(3, "n1")
    site.pass_()
    assert site.slurm.now["n1"] == 1


def test_one_report_counts_once_however_often_it_is_looked_at(site: Site) -> None:
    site.report("n1", celsius=95)
    for _ in range(5):
        site.pass_(10)
    assert not site.described("n1")["degraded"]


def test_a_new_profile_does_not_make_a_report_count_again(site: Site) -> None:
    site.report("n1", celsius=95)
    for count in (900, 901, 902, 903):
        site.machines[0] = node("n1", iops=count)
        site.pass_(10)
    assert site.described("n1")["score"] == 0
    assert not site.described("n1")["degraded"]


def test_a_node_that_falls_silent_is_neutral_again(site: Site) -> None:
    site.rounds(3, "n1", celsius=95)
    assert site.described("n1")["degraded"]
    site.pass_(200)
    found = site.described("n1")
    assert (found["score"], found["flags"], found["degraded"]) == (1, ["stale"], False)
    assert site.slurm.now["n1"] == 1
    site.rounds(1, "n1", celsius=95)  # and must show its heat three times again
    assert not site.described("n1")["degraded"]


def test_a_node_that_never_reported_is_neutral(site: Site) -> None:
    site.pass_()
    assert site.described("n2")["flags"] == ["no_report"]
    assert site.watch.describe("n9") is None


def test_a_young_daemon_gives_up_no_weight_before_it_knows(site: Site) -> None:
    site.rounds(3, "n1", celsius=95)
    site.restart()
    site.pass_()
    assert site.slurm.now["n1"] == 10_001
    site.rounds(1, "n1", celsius=95)
    assert site.slurm.now["n1"] == 10_001
    site.rounds(2, "n1", celsius=95)
    assert site.slurm.now["n1"] == 10_001
    # Of a node that stays silent it knows enough after the time of a stale report.
    site.restart()
    site.reports.found.clear()
    site.pass_(170)
    assert site.slurm.now["n1"] == 10_001
    site.pass_(20)
    assert site.slurm.now["n1"] == 1


def test_a_picture_from_before_a_change_is_not_acted_on(site: Site) -> None:
    site.rounds(3, "n1", celsius=95)
    calls = len(site.slurm.calls)
    assert site.view
    old = dataclasses.replace(site.view.cluster, time=site.now - 1)
    site.view = dataclasses.replace(site.view, cluster=old)  # it shows n1 with its own weight
    site.now += 60
    site.watch.tick()
    assert len(site.slurm.calls) == calls


def test_changes_are_no_more_frequent_than_the_site_allows(site: Site) -> None:
    site.rounds(3, "n1", celsius=95)
    site.slurm.reconfigure()
    for _ in range(3):
        site.pass_(9)  # 30 s is the default
        assert site.slurm.now["n1"] == 1
    site.pass_(9)
    assert site.slurm.now["n1"] == 10_001


@pytest.mark.parametrize("mode", [Mode.OBSERVE, Mode.ADVISE, Mode.OFF])
def test_only_enforcing_changes_anything(tmp_path: Path, mode: Mode) -> None:
    site = Site(tmp_path, mode)
    site.rounds(4, "n1", gpus=3)
    assert site.described("n1")["faults"] == ["gpu_lost"]
    assert (site.slurm.calls, site.slurm.drains) == ([], [])


def test_the_off_switch_puts_weights_back(site: Site) -> None:
    site.rounds(3, "n1", celsius=95)
    (site.folder / "off").touch()
    site.rounds(2, "n1", gpus=3)
    assert site.slurm.now["n1"] == 1
    assert site.slurm.drains == []
    (site.folder / "off").unlink()
    site.rounds(2, "n1", gpus=3)
    assert site.slurm.now["n1"] == 10_001


def test_a_lost_gpu_drains_after_three_reports(site: Site) -> None:
    site.rounds(2, "n1", gpus=3)
    assert site.slurm.drains == []
    site.rounds(1, "n1", gpus=3)
    assert site.slurm.drains == [("n1", "gpu_lost: 3 of 4 GPUs answer; silent: 3")]


def test_prometheus_fills_in_for_nodes_that_do_not_report(tmp_path: Path) -> None:
    site = Site(tmp_path, prometheus=True)
    assert site.prometheus
    hot = site.report("n1", celsius=95)
    site.reports.found.clear()
    site.prometheus.found["n1"] = hot
    assert site.watch.newest("n1") is hot
    own = site.report("n1")
    assert site.watch.newest("n1") is own
    site.now += 200  # the node's own report is stale, the server's is newer
    assert site.watch.newest("n1") is own
    newer = dataclasses.replace(hot, time=site.now)
    site.prometheus.found["n1"] = newer
    assert site.watch.newest("n1") is newer


def test_problems_of_its_sources_are_warnings(tmp_path: Path) -> None:
    site = Site(tmp_path, prometheus=True)
    assert site.watch.warnings() == []
    assert site.prometheus
    site.prometheus.problem = "Prometheus does not answer"
    (tmp_path / "weights.json").write_text("{")
    site.pass_()
    first, second = site.watch.warnings()
    assert first == "Prometheus does not answer"
    assert "can't read the nodes' own weights" in second


def test_corrected_errors_are_counted_from_a_report_of_the_last_hour(site: Site) -> None:
    def errors() -> str:
        terms = {t["name"]: t["seen"] for t in site.described("n1")["terms"]}
        return str(terms.get("ecc_corrected", "nothing"))

    site.report("n1", ecc_corrected=1000)
    site.pass_(60)
    assert errors() == "nothing"
    for minute in range(1, 121):
        site.report("n1", ecc_corrected=1000 + 10 * minute)
        site.pass_(60)
        told, span = errors().removeprefix("GPU 3: ").split(" in ")
        assert int(told) == 10 * int(span.removesuffix(" min"))
        assert minute < 30 or 29 <= int(span.removesuffix(" min")) <= 60


def test_metrics_tell_score_and_weight_of_every_node(site: Site) -> None:
    site.rounds(3, "n1", celsius=86)
    site.pass_()
    registry = CollectorRegistry()
    registry.register(HealthCollector(site.watch))
    text = generate_latest(registry).decode()
    for line in (
        'crater_node_health{node="n1"} 0.5',
        'crater_node_health{node="n2"} 1.0',
        'crater_node_health_known{node="n1"} 1.0',
        'crater_node_health_known{node="n2"} 0.0',
        'crater_node_degraded{node="n1"} 0.0',
        'crater_node_weight{node="n1"} 101.0',
        'crater_node_weight{node="n2"} 1.0',
    ):
        assert line + "\n" in text, text


# Submissions ---------------------------------------------------------------------------------------


def submitted(site: Site, mode: Mode = Mode.ENFORCE, **fields: str) -> Any:
    chosen = dataclasses.replace(decider(mode), board=lambda: site.watch.board)
    return chosen.decide(message("gpus=2", **fields), site.view)


def test_a_plan_leaves_degraded_nodes_out_and_says_so(site: Site) -> None:
    site.rounds(3, "n1", celsius=95)
    answer = submitted(site)
    assert answer.fields["exc_nodes"] == "n1"
    assert "crater: n1 is degraded and left out (n1: GPU 3 at 95 °C)" in answer.messages
    decision = answer.decision
    assert decision.nodes_passed == 3
    heat = {
        "name": "gpu_temperature",
        "value": 0.0,
        "seen": "GPU 3 at 95 °C",
        "threshold": "falls from 80 °C, 0 at 92 °C",
    }
    assert decision.health == {
        "degraded": [{"node": "n1", "score": 0.0, "worst": [heat]}],
        "degraded_nodes": 1,
        "left_out": "n1",
    }
    again = decision_from_dict(decision_to_dict(decision))
    assert again == decision
    told = list(lines(decision_to_dict(decision), (), {}, ()))
    assert "  degraded n1: score 0.00 (gpu_temperature: GPU 3 at 95 °C)" in told
    assert "  left out for their health: n1" in told


def test_users_own_exclusions_and_what_can_t_run_it_stay_excluded(site: Site) -> None:
    site.machines[1] = node("n2", cards=())
    site.view = view(*site.machines)
    site.rounds(3, "n1", celsius=95)
    assert submitted(site).fields["exc_nodes"] == "n[1-2]"
    assert submitted(site, exc_nodes="n9").fields["exc_nodes"] == "n9,n[1-2]"


@pytest.mark.parametrize(
    ("fields", "note"),
    [
        ({"min_nodes": "3"}, "n1 is degraded and may still be chosen: too few other nodes"),
        ({"req_nodes": "n1"}, "n1 is degraded and may still be chosen: your options name nodes"),
    ],
)
def test_health_alone_makes_no_job_impossible(
    site: Site, fields: dict[str, str], note: str
) -> None:
    site.rounds(3, "n1", celsius=95)
    answer = submitted(site, **fields)
    assert not answer.reject
    assert "exc_nodes" not in answer.fields
    assert any(note in line for line in answer.messages), answer.messages
    assert answer.decision.health["left_out"] == ""


def test_when_all_are_degraded_none_is_left_out(site: Site) -> None:
    site.rounds(3, "n1", "n2", "n3", celsius=95)
    answer = submitted(site)
    assert "exc_nodes" not in answer.fields
    assert "n[1-3] are degraded and may still be chosen" in " ".join(answer.messages)


def test_the_worst_go_first_where_not_all_can(site: Site) -> None:
    # n1 at 95 °C is tier 3, n2 at 87 °C (5/12 = 0.42) tier 2.
    for _ in range(3):
        site.report("n1", celsius=95)
        site.report("n2", celsius=87)
        site.pass_()
    assert submitted(site, min_nodes="1").fields["exc_nodes"] == "n[1-2]"
    assert submitted(site, min_nodes="2").fields["exc_nodes"] == "n1"


def test_a_node_that_recovers_is_taken_again(site: Site) -> None:
    site.rounds(3, "n1", celsius=95)
    assert "exc_nodes" in submitted(site).fields
    site.rounds(3, "n1")
    answer = submitted(site)
    assert "exc_nodes" not in answer.fields
    assert answer.decision.health == {}


@pytest.mark.parametrize("mode", [Mode.OBSERVE, Mode.ADVISE])
def test_other_modes_only_record_it(site: Site, mode: Mode) -> None:
    site.rounds(3, "n1", celsius=95)
    answer = submitted(site, mode)
    assert answer.fields == {}
    assert answer.decision.health["left_out"] == "n1"
    assert answer.decision.fields["exc_nodes"] == "n1"


def test_a_new_inventory_is_not_read_with_an_old_set(site: Site) -> None:
    site.rounds(3, "n1", celsius=95)
    assert submitted(site).fields["exc_nodes"] == "n1"
    site.machines.insert(0, node("m1"))  # now n1 is another bit
    site.view = view(*site.machines)
    assert submitted(site).fields["exc_nodes"] == "n1"


def test_a_record_of_before_there_was_health_is_read() -> None:
    old = {"id": "p0", "verdict": "planned", "mode": "enforce", "time": 1.0, "user_id": 7}
    found: Decision = decision_from_dict(old)
    assert found.health == {}
    assert "health" not in decision_to_dict(found)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"gpu_warm_c": 95}, "gpu_warm_c must be below gpu_hot_c"),
        ({"ecc_corrected_some": 5000}, "ecc_corrected_some must be below"),
        ({"tiers": [0.5, 0.75, 0.25]}, "tiers must fall"),
        ({"tiers": [1.5, 0.75, 0.25]}, "between 0 and 1"),
        ({"tiers": [0.5]}, "one entry for each of tiers"),
        ({"penalties": [100, 50, 10]}, "must not fall"),
        ({"penalties": [-1, 50, 100]}, "at least 0"),
        ({"drain": ["load"]}, "drain"),
        ({"prometheus": {"url": "file:///etc/passwd"}}, "url"),
    ],
)
def test_settings_that_contradict_are_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Settings.model_validate({"health": fields})


def test_a_site_may_have_other_tiers_or_none() -> None:
    assert Settings.model_validate({"health": {"tiers": [], "penalties": []}}).health.tiers == ()


FEATURES = {"n1": {"fast"}, "n2": {"small"}, "n3": {"small"}}


def with_small_cards(site: Site) -> None:
    """n2 and n3 have smaller cards, which suit a small job better."""
    for i in (1, 2):
        cards = gpus(0, 0, 1, 1, model="l4", gres_type="l4", memory_mib=24 * GIB)
        site.machines[i] = node(f"n{i + 1}", cards=cards)
    site.view = view(*site.machines, features=FEATURES)
    site.rounds(3, "n1", "n2", "n3")


def small(site: Site, **fields: str) -> Any:
    chosen = dataclasses.replace(decider(), board=lambda: site.watch.board)
    return chosen.decide(message("gpus=1 gpu-memory=16GiB", **fields), site.view)


@pytest.mark.parametrize(
    ("ill", "excluded", "prefer"),
    [
        ([], None, "small"),
        (["n2"], "n2", "small"),
        (["n2", "n3"], "n[2-3]", None),
    ],
)
def test_nothing_is_preferred_of_which_all_is_left_out(
    site: Site, ill: list[str], excluded: str | None, prefer: str | None
) -> None:
    """Slurm would refuse the job."""
    with_small_cards(site)
    for _ in range(3):
        for name in ("n1", "n2", "n3"):
            site.report(name, celsius=95 if name in ill else 40)
        site.pass_()
    fields = small(site).fields
    assert (fields.get("exc_nodes"), fields.get("prefer")) == (excluded, prefer)


def test_what_the_user_prefers_is_not_left_out(site: Site) -> None:
    with_small_cards(site)
    site.rounds(3, "n2", celsius=95)
    assert small(site).fields["exc_nodes"] == "n2"
    answer = small(site, prefer="small")
    assert "exc_nodes" not in answer.fields
    assert "n2 is degraded and may still be chosen" in " ".join(answer.messages)
    assert "exc_nodes" not in small(site, prefer="[small*2]").fields
    assert small(site, prefer="fast").fields["exc_nodes"] == "n2"


# Waiting jobs --------------------------------------------------------------------------------------


def replanned(site: Site, decision: Decision) -> Any:
    assert site.view
    return replan.wanted(decision, site.view, set(), site.watch.board)


def test_a_waiting_job_keeps_off_what_is_degraded_now(site: Site) -> None:
    site.rounds(3, "n1", celsius=95)
    decision = submitted(site).decision
    assert replanned(site, decision) == Wanted(excluded=frozenset({"n1"}))
    site.rounds(3, "n1")
    assert replanned(site, decision) == Wanted()
    site.rounds(3, "n2", celsius=95)
    assert replanned(site, decision) == Wanted(excluded=frozenset({"n2"}))


def test_a_waiting_job_is_let_in_where_too_few_others_are_left(site: Site) -> None:
    site.rounds(3, "n1", celsius=95)
    decision = submitted(site, min_nodes="2").decision
    assert decision.fields["exc_nodes"] == "n1"
    site.view = view(*site.machines, states={"n2": "down"})
    assert replanned(site, decision) == Wanted()


def test_health_is_known_when_all_nodes_are_or_after_a_while(site: Site) -> None:
    assert not site.watch.settled()
    site.rounds(3, "n1", "n2")
    assert not site.watch.settled(), "n3 has said nothing"
    site.rounds(3, "n1", "n2", "n3")
    assert site.watch.settled()
    site.restart()
    assert not site.watch.settled()
    site.pass_(180)
    assert site.watch.settled(), "by now all would have reported"
