"""Drains: only crater's own, only for faults that a site named, never too many at once."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from crater_slurm.errors import SlurmError
from crater_slurm.model.cluster import SlurmCluster, SlurmNode
from crater_slurm.placement.health import HealthScore
from crater_slurm.placement.standing import Standing, Steps, step
from crater_slurm.placement.terms import Term
from crater_slurm.scheduler.drain import Drains, Judged, Orders, orders
from crater_slurm.slurm.client import Client
from crater_slurm.slurm.control import MOST_WEIGHT, Control

STEPS = Steps(reports=2)
OURS = "crater: gpu_lost: 7 of 8 GPUs answer"


def node(name: str, state: str = "idle", reason: str = "", parts: str = "gpu") -> SlurmNode:
    return SlurmNode(name=name, state=state, reason=reason, partitions=frozenset(parts.split(",")))


def judged(*faults: str, looked_for: Iterable[str] = ("gpu_lost", "ecc_uncorrected")) -> Judged:
    """A node whose reports showed these faults, of those that were looked for, often enough."""
    terms = tuple(
        Term(
            name=name,
            value=0.0 if name in faults else 1.0,
            seen="7 of 8 GPUs answer" if name == "gpu_lost" else name,
            threshold="",
            fault=name in faults,
        )
        for name in looked_for
    )
    score = HealthScore(node="n", value=0.0 if faults else 1.0, terms=terms)
    standing = Standing()
    for _ in range(2):
        standing = step(standing, score, STEPS)
    return Judged(score, standing)


LOST, WELL = judged("gpu_lost"), judged()


def ordered(
    *nodes: SlurmNode,
    faults: Iterable[str] = ("gpu_lost",),
    share: float = 1.0,
    **states: Judged,
) -> Orders:
    return orders(SlurmCluster(nodes=nodes), states, faults, share, STEPS)


def test_a_fault_that_a_site_named_drains() -> None:
    found = ordered(node("n1"), node("n2"), n1=LOST, n2=WELL)
    assert found == Orders({"n1": "gpu_lost: 7 of 8 GPUs answer"})


def test_nothing_is_drained_unless_asked_for() -> None:
    assert ordered(node("n1"), node("n2", "drained", OURS), faults=(), n1=LOST, n2=WELL) == Orders()
    assert ordered(node("n1"), faults=("ecc_uncorrected",), n1=LOST) == Orders()


@pytest.mark.parametrize("state", ["drained", "draining", "down", "down*", "maint", "failing"])
def test_a_node_out_of_service_is_left_alone(state: str) -> None:
    assert ordered(node("n1", state, "a fan is changed"), n1=LOST) == Orders()


@pytest.mark.parametrize(
    ("state", "reason", "back"),
    [
        ("drained", OURS, True),
        ("draining", OURS, True),
        ("drained*", OURS, True),
        ("drained", "a fan is changed", False),
        ("drained", f"see ticket 7; {OURS}", False),
        ("drained", "Crater: gpu_lost: x", False),
        ("drained", "crater:gpu_lost: x", False),
        ("drained", "crater: ask Ada first", False),  # no fault of ours
        ("drained", "", False),
        ("down", OURS, False),
        ("idle", OURS, False),  # the reason of a drain that is over
    ],
)
def test_only_a_drain_of_crater_s_is_taken_back(state: str, reason: str, back: bool) -> None:
    assert ordered(node("n1", state, reason), n1=WELL).undrain == (("n1",) if back else ())


def test_a_drained_node_stays_until_its_fault_is_known_to_be_gone() -> None:
    drained = node("n1", "drained", OURS)
    assert ordered(drained).undrain == ()
    assert ordered(drained, n1=LOST).undrain == ()
    once = step(LOST.standing, WELL.score, STEPS)
    assert ordered(drained, n1=Judged(WELL.score, once)).undrain == ()
    # A report that says nothing of GPUs, and one that is old.
    assert ordered(drained, n1=judged(looked_for=())).undrain == ()
    stale = HealthScore(node="n1", value=1.0, flags=("stale",))
    assert ordered(drained, n1=Judged(stale, WELL.standing)).undrain == ()
    # Another fault for which it would be drained again.
    other = judged("ecc_uncorrected")
    assert ordered(drained, faults=("gpu_lost", "ecc_uncorrected"), n1=other).undrain == ()
    assert ordered(drained, n1=other).undrain == ("n1",)


def test_all_faults_of_the_reason_must_be_gone() -> None:
    both = node("n1", "drained", "crater: ecc_uncorrected,gpu_lost: x")
    assert ordered(both, n1=judged(looked_for=("gpu_lost",))).undrain == ()
    assert ordered(both, n1=WELL).undrain == ("n1",)


def test_a_share_of_each_partition_at_most_is_drained() -> None:
    nodes = [node(f"n{i:02}") for i in range(20)]
    states = {n.name: LOST for n in nodes}
    found = ordered(*nodes, share=0.1, **states)
    assert sorted(found.drain) == ["n00", "n01"]
    assert len(found.waiting) == 18
    assert "crater may drain no more of partition gpu" in found.waiting["n02"]
    # Those that are drained already count.
    nodes[0] = node("n00", "drained", OURS)
    found = ordered(*nodes, share=0.1, **states)
    assert sorted(found.drain) == ["n01"]
    # Those that people drained are no work of crater's.
    nodes[1] = node("n01", "drained", "a fan is changed")
    assert sorted(ordered(*nodes, share=0.1, **states).drain) == ["n02"]


def test_a_share_of_less_than_one_node_is_none() -> None:
    nodes = [node(f"n{i}") for i in range(9)]
    assert ordered(*nodes, share=0.1, **{n.name: LOST for n in nodes}).drain == {}
    ten = [node(f"n{i}") for i in range(10)]
    assert len(ordered(*ten, share=0.1, **{n.name: LOST for n in ten}).drain) == 1


def test_a_node_in_two_partitions_needs_room_in_both() -> None:
    nodes = [node("n1", parts="all,gpu"), node("n2", parts="all,gpu"), node("n3", parts="all")]
    states = {n.name: LOST for n in nodes}
    # gpu may lose one of its two nodes, all may lose one of three.
    found = ordered(*nodes, share=0.5, **states)
    assert sorted(found.drain) == ["n1"]
    assert sorted(found.waiting) == ["n2", "n3"]


# Telling Slurm -------------------------------------------------------------------------------------


@pytest.fixture
def slurm(tmp_path: Path) -> Control:
    """A Control on a scontrol that notes its arguments and shows the node in ``state``."""
    program = tmp_path / "scontrol"
    program.write_text(
        "#!/bin/sh\n"
        f'for word; do printf "[%s]" "$word" >>{tmp_path}/calls; done; echo >>{tmp_path}/calls\n'
        f'case "$*" in *show*) cat {tmp_path}/state;; *bad*) echo "Invalid node name" >&2; exit 1;;'
        " esac\n"
    )
    program.chmod(0o755)
    state(tmp_path, "IDLE")
    return Control(Client(bin_dir=tmp_path, timeout_seconds=10))


def state(folder: Path, text: str, reason: str = "") -> None:
    (folder / "state").write_text(f"NodeName=n1 State={text} Weight=1 Reason={reason}\n")


def updates(folder: Path) -> list[str]:
    file = folder / "calls"
    lines = file.read_text().splitlines() if file.exists() else []
    return [line for line in lines if line.startswith("[update]")]


def test_a_weight_goes_to_many_nodes_in_few_commands(slurm: Control, tmp_path: Path) -> None:
    slurm.set_weight([f"n{i}" for i in range(1, 1201)], 101)
    assert len(updates(tmp_path)) == 3
    slurm.set_weight(["a2", "a1", "a1", "b7"], 5)
    assert updates(tmp_path)[-1] == "[update][nodename=a[1-2],b7][weight=5]"
    slurm.set_weight([], 5)
    assert len(updates(tmp_path)) == 4


@pytest.mark.parametrize(
    "name", ["n1 state=down", "-v", "ALL=x", "n1;reboot", "n[1-9]", "", "a\nb"]
)
def test_nothing_but_a_node_s_name_reaches_slurm(slurm: Control, tmp_path: Path, name: str) -> None:
    with pytest.raises(SlurmError, match="is no node name"):
        slurm.set_weight([name], 5)
    with pytest.raises(SlurmError, match="is no node name"):
        slurm.drain(name, "x")
    assert updates(tmp_path) == []


@pytest.mark.parametrize("weight", [-1, MOST_WEIGHT + 1])
def test_a_weight_out_of_bounds_is_no_weight(slurm: Control, weight: int) -> None:
    with pytest.raises(SlurmError, match="out of bounds"):
        slurm.set_weight(["n1"], weight)


def test_what_slurm_says_is_passed_on(slurm: Control) -> None:
    with pytest.raises(SlurmError, match="scontrol failed: Invalid node name"):
        slurm.set_weight(["bad1"], 5)


def test_a_drain_names_its_reason_on_one_plain_line(slurm: Control, tmp_path: Path) -> None:
    assert slurm.drain("n1", "gpu_lost: 'GPU' \"7\"\nstate=down |" + "x" * 500)
    (line,) = updates(tmp_path)
    assert line.startswith(
        "[update][nodename=n1][state=drain][reason=crater: gpu_lost:  GPU   7  st"
    )
    assert "state down" in line
    assert len(line) < 280


@pytest.mark.parametrize(
    "now", ["IDLE+DRAIN", "MIXED+DRAIN", "DOWN", "DOWN*", "IDLE*", "IDLE+MAINT", "UNKNOWN"]
)
def test_a_node_that_left_service_meanwhile_is_not_drained(
    slurm: Control, tmp_path: Path, now: str
) -> None:
    state(tmp_path, now, "a fan is changed")
    assert not slurm.drain("n1", "gpu_lost: x")
    assert updates(tmp_path) == []


@pytest.mark.parametrize(
    ("now", "reason", "done"),
    [
        ("IDLE+DRAIN", "crater: gpu_lost: x [root@2026-01-01T00:00:00]", True),
        ("IDLE+DRAIN", "sent back to the vendor [ada@2026-01-01T00:00:00]", False),
        ("IDLE", "crater: gpu_lost: x", False),
        ("DOWN", "crater: gpu_lost: x", False),
    ],
)
def test_a_drain_is_taken_back_only_if_it_is_still_crater_s(
    slurm: Control, tmp_path: Path, now: str, reason: str, done: bool
) -> None:
    state(tmp_path, now, reason)
    assert slurm.undrain("n1") is done
    assert updates(tmp_path) == (["[update][nodename=n1][state=undrain]"] if done else [])


def test_one_failure_keeps_no_other_node_waiting(slurm: Control, tmp_path: Path) -> None:
    drains = Drains(slurm)
    wanted = Orders({"bad1": "gpu_lost: x", "n1": "gpu_lost: x"})
    assert drains.act(wanted, changing=True)
    assert len(updates(tmp_path)) == 2
    assert drains.problem == "bad1 can't be drained: scontrol failed: Invalid node name"
    assert not drains.act(Orders(), changing=True)
    assert drains.problem == ""


def test_observing_only_tells(
    slurm: Control, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    wanted = Orders({"n1": "gpu_lost: x"}, ("n2",), {"n3": "too many"})
    drains = Drains(slurm)
    assert not drains.act(wanted, changing=False)
    assert not drains.act(wanted, changing=False)
    assert updates(tmp_path) == []
    assert [r.message for r in caplog.records] == [
        "n3 is not drained: too many",
        "n1 would be drained: gpu_lost: x",
        "n2 would be undrained",
    ]
