"""Weights in Slurm: the node's own is never lost, never mistaken, and put back in the end."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pytest

from crater_slurm.errors import SlurmError
from crater_slurm.model.cluster import SlurmCluster, SlurmNode
from crater_slurm.scheduler import weights as weights_module
from crater_slurm.scheduler.weights import Known, Weights, learn, plan, read, tiered
from crater_slurm.slurm.control import MOST_WEIGHT


class FakeSlurm:
    """slurmctld's weights, and what slurm.conf says of them."""

    def __init__(self, **conf: int) -> None:
        self.conf = dict(conf)
        self.now = dict(conf)
        self.calls: list[tuple[tuple[str, ...], int]] = []
        self.refused: set[int] = set()

    def set_weight(self, nodes: Iterable[str], weight: int) -> None:
        self.calls.append((tuple(nodes), weight))
        if weight in self.refused:
            raise SlurmError("slurm_update error: Access/permission denied")
        self.now |= dict.fromkeys(self.calls[-1][0], weight)

    def reconfigure(self, **conf: int) -> None:
        self.conf |= conf
        self.now = dict(self.conf)

    def cluster(self) -> SlurmCluster:
        return SlurmCluster(nodes=tuple(SlurmNode(name=n, weight=w) for n, w in self.now.items()))


class Site:
    """Weights beside a Slurm. ``extra`` is what crater wants to add to each node."""

    def __init__(self, folder: Path, **conf: int) -> None:
        self.slurm = FakeSlurm(**conf)
        self.file = folder / "weights.json"
        self.extra: dict[str, int | None] = {}
        self.restart()

    def restart(self) -> None:
        self.weights = Weights(self.slurm, self.file)  # type: ignore[arg-type]
        self.weights.add(lambda node: self.extra.get(node, 0))

    def look(self, changing: bool = True, times: int = 3) -> dict[str, int]:
        for _ in range(times):
            self.weights.publish(self.slurm.cluster(), changing=changing)
        return self.slurm.now


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path, n1=5, n2=5, n3=20)


def test_a_penalty_is_added_to_the_node_s_own_weight_once(site: Site) -> None:
    site.extra = {"n1": 100, "n3": 100}
    assert site.look() == {"n1": 105, "n2": 5, "n3": 120}
    # One command for each weight, the highest first; then there is nothing to do.
    assert site.slurm.calls == [(("n3",), 120), (("n1",), 105)]
    assert site.weights.own("n3") == 20


def test_nodes_of_one_weight_share_a_command(site: Site) -> None:
    site.extra = {"n1": 100, "n2": 100}
    site.look()
    assert site.slurm.calls == [(("n1", "n2"), 105)]


def test_the_own_weight_comes_back_with_health(site: Site) -> None:
    site.extra = {"n1": 100}
    site.look()
    site.extra = {"n1": 1000}
    assert site.look()["n1"] == 1005
    site.extra = {}
    assert site.look() == {"n1": 5, "n2": 5, "n3": 20}


def test_reconfigure_takes_it_away_and_it_is_set_again(site: Site) -> None:
    site.extra = {"n1": 100}
    site.look()
    site.slurm.reconfigure()
    assert site.slurm.now["n1"] == 5
    assert site.look()["n1"] == 105


def test_a_change_in_slurm_conf_is_noticed(site: Site) -> None:
    site.extra = {"n1": 100}
    site.look()
    site.slurm.reconfigure(n1=50, n2=60)
    assert site.look() == {"n1": 150, "n2": 60, "n3": 20}
    assert (site.weights.own("n1"), site.weights.own("n2")) == (50, 60)


def test_an_admin_s_command_counts_like_slurm_conf(site: Site) -> None:
    site.extra = {"n1": 100}
    site.look()
    site.slurm.now["n1"] = 7
    assert site.look()["n1"] == 107


def test_a_restart_of_ours_takes_nothing_of_ours_for_the_site_s(site: Site) -> None:
    site.extra = {"n1": 100}
    site.look()
    site.restart()
    assert site.look()["n1"] == 105
    assert site.weights.own("n1") == 5
    site.restart()
    site.extra = {}
    assert site.look()["n1"] == 5


def test_what_can_t_be_told_yet_leaves_the_weight_alone(site: Site) -> None:
    site.extra = {"n1": 100}
    site.look()
    site.restart()
    site.extra = {"n1": None, "n2": None}
    assert site.look() == {"n1": 105, "n2": 5, "n3": 20}
    assert site.weights.own("n1") == 5


def test_a_crash_between_the_file_and_slurm_loses_nothing(site: Site) -> None:
    site.extra = {"n1": 100}
    site.slurm.refused = {105}  # as if we ended before the command
    site.look(times=1)
    assert site.slurm.now["n1"] == 5
    site.slurm.refused = set()
    site.restart()
    assert site.look()["n1"] == 105
    # And on the way from one of ours to the next.
    site.extra = {"n1": 1000}
    site.slurm.refused = {1005}
    site.look(times=1)
    site.restart()
    site.slurm.refused = set()
    assert site.look()["n1"] == 1005
    assert site.weights.own("n1") == 5


def test_a_weight_that_slurm_refuses_holds_up_no_other(site: Site) -> None:
    site.extra = {"n1": 100, "n3": 100}
    site.slurm.refused = {120}
    assert site.look(times=1) == {"n1": 105, "n2": 5, "n3": 20}
    assert "Access/permission denied" in site.weights.problem
    site.slurm.refused = set()
    assert site.look()["n3"] == 120
    assert site.weights.problem == ""


def test_observing_changes_and_writes_nothing(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    site.extra = {"n1": 100}
    assert site.look(changing=False)["n1"] == 5
    assert site.slurm.calls == []
    assert not site.file.exists()
    assert [r.message for r in caplog.records] == ["weight of n1 would be set to 105"]


def test_observing_after_enforcing_puts_the_own_weights_back(site: Site) -> None:
    site.extra = {"n1": 100}
    site.look()
    site.restart()
    site.slurm.now["n2"] = 9  # an admin's; not ours to undo
    assert site.look(changing=False) == {"n1": 5, "n2": 9, "n3": 20}


def test_a_node_that_slurm_hides_for_a_while_keeps_its_own_weight(site: Site) -> None:
    site.extra = {"n1": 100}
    site.look()
    hidden = site.slurm.now.pop("n1")
    site.look()
    site.slurm.now["n1"] = hidden
    site.restart()
    site.extra = {}
    assert site.look()["n1"] == 5


def test_penalties_of_several_parts_add_up(site: Site) -> None:
    site.weights.add(lambda node: 3 if node == "n1" else 0)
    site.extra = {"n1": 100}
    assert site.look()["n1"] == 108


@pytest.mark.parametrize(
    ("own", "extra", "wanted"),
    [
        (1, MOST_WEIGHT, MOST_WEIGHT),
        (MOST_WEIGHT - 1, 100, MOST_WEIGHT),
        (MOST_WEIGHT + 5, 100, MOST_WEIGHT + 5),  # Slurm takes it; we would not go there
        (5, -100, 5),
    ],
)
def test_weights_stay_within_bounds_and_never_fall_below_the_own(
    own: int, extra: int, wanted: int
) -> None:
    seen = SlurmCluster(nodes=(SlurmNode(name="n1", weight=own),))
    found = plan(seen, {}, lambda _: extra, changing=True)
    assert found.changes == ({wanted: ["n1"]} if wanted != own else {})


@pytest.mark.parametrize(
    ("known", "seen", "now"),
    [
        (None, 5, Known(5)),
        (Known(5), 5, Known(5)),
        (Known(5), 9, Known(9)),
        (Known(5, (105,)), 105, Known(5, (105,))),
        (Known(5, (105, 1005)), 1005, Known(5, (1005,))),
        (Known(5, (105, 1005)), 105, Known(5, (105,))),
        (Known(5, (105,)), 5, Known(5)),
        (Known(5, (105,)), 50, Known(50)),
        (Known(5, (105, 5)), 5, Known(5)),
    ],
)
def test_what_a_weight_that_slurm_shows_tells(known: Known | None, seen: int, now: Known) -> None:
    assert learn(known, seen) == now


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        '{"nodes": 3}',
        '{"nodes": {"n1": {}}}',
        '{"nodes": {"n1": {"own": "5", "ours": []}}}',
    ],
)
def test_a_damaged_file_stops_publishing_and_says_the_way_out(site: Site, text: str) -> None:
    site.file.write_text(text)
    site.extra = {"n1": 100}
    assert site.look()["n1"] == 5
    assert site.slurm.calls == []
    assert "run 'scontrol reconfigure'" in site.weights.problem
    site.file.unlink()
    assert site.look()["n1"] == 105
    assert site.weights.problem == ""


def test_no_weight_is_changed_before_the_own_is_kept(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(weights_module, "write_atomically", full)
    site.extra = {"n1": 100}
    assert site.look()["n1"] == 5
    assert site.slurm.calls == []
    assert "No space left on device" in site.weights.problem


def test_the_file_is_read_as_it_was_written(site: Site) -> None:
    site.extra = {"n1": 100}
    site.look()
    assert read(site.file) == {"n1": Known(5, (105,)), "n2": Known(5), "n3": Known(20)}
    assert json.loads(site.file.read_text())["version"] == 1
    assert site.file.stat().st_mode & 0o777 == 0o600
    assert read(site.file.with_name("none")) == {}


def test_commands_of_one_round_are_bounded(tmp_path: Path) -> None:
    site = Site(tmp_path, **{f"n{i}": 2 * i for i in range(120)})
    site.extra = dict.fromkeys(site.slurm.conf, 1000)
    site.look(times=1)
    assert len(site.slurm.calls) == 50
    assert site.look(times=2) == {f"n{i}": 2 * i + 1000 for i in range(120)}


def test_the_penalty_of_a_tier() -> None:
    tiers: dict[str, int | None] = {"well": 0, "ill": 2, "dead": 9, "new": None}
    penalty = tiered(tiers.__getitem__, (100, 1000, 10_000))
    assert [penalty(name) for name in tiers] == [0, 1000, 10_000, None]


def test_a_weight_that_slurm_does_not_tell_is_left_alone() -> None:
    seen = SlurmCluster(nodes=(SlurmNode(name="n1"),))
    found = plan(seen, {"n1": Known(5)}, lambda _: 100, changing=True)
    assert (found.changes, found.known) == ({}, {"n1": Known(5)})
