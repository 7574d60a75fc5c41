"""Fill-ups: worked out by hand, repeatable, the same without a compiler, and as published."""

from __future__ import annotations

import csv
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from packing_samples import plain, share, whole

from crater_slurm.placement.packing.state import Need
from crater_slurm.simulate.fill import arrivals, fill
from crater_slurm.simulate.policies import POLICIES
from crater_slurm.simulate.trace import Nodes, Task, openb_nodes, openb_tasks

ROOT = Path(__file__).parents[2]
OPENB = Path(os.environ.get("CRATER_TEST_DATA") or ROOT.parent / "shared/data") / "traces/openb"


def nodes(*each: tuple[int, int]) -> Nodes:
    """(GPUs, CPU) each."""
    count = len(each)
    return Nodes(
        names=tuple(f"n{i}" for i in range(count)),
        gpus=tuple(gpus for gpus, _ in each),
        models=(0,) * count,
        rest=tuple((cpu,) for _, cpu in each),
        model_names=("A",),
        kinds=("cpu",),
    )


def tasks(*needs: Need) -> list[Task]:
    return [Task(f"t{i:03}", need) for i, need in enumerate(needs)]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_fill_by_hand(policy: str) -> None:
    # One node of 4 GPUs and 4 CPU. Whole GPUs with 1 CPU each are asked until 6 have been asked
    # for: 4 are placed, in any order.
    done = fill(tasks(*[whole()] * 3), nodes((4, 4)), policy, share=1.5)
    assert (done.arrived, done.placed, done.allocation, done.fragmented) == (6, 4, 100.0, 0.0)
    assert done.curve == ((25, 25), (50, 50), (75, 75), (100, 100), (125, 100), (150, 100))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_fill_that_runs_out_of_cpu(policy: str) -> None:
    # 2 CPU each: 2 of 4 GPUs can be used, the other 2 are fragments.
    done = fill(tasks(whole(1, 2)), nodes((2, 2), (2, 2)), policy, share=1.0)
    assert (done.arrived, done.placed, done.allocation, done.fragmented) == (4, 2, 50.0, 100.0)


def test_a_fill_in_which_the_policy_matters() -> None:
    # In whatever order they come, best fit puts both shares on one GPU; chance does not always.
    work, where = tasks(share(500), share(500), whole()), nodes((1, 9), (1, 9))
    allocations = {
        policy: {fill(work, where, policy, share=1.0, seed=seed).allocation for seed in range(20)}
        for policy in ("bestfit", "random")
    }
    assert allocations == {"bestfit": {100.0}, "random": {50.0, 100.0}}


def test_what_arrives_is_drawn_until_the_share_is_asked() -> None:
    work = tasks(whole(), share(500), plain(1))
    needs = arrivals(work, 10_000, 1.3, 42)
    asked = sum(need.gpu for need in needs)
    assert sorted(needs[:3]) == sorted(task.need for task in work)
    assert 13_000 <= asked < 14_000
    assert asked - needs[-1].gpu < 13_000


def test_a_trace_that_asks_for_more_is_cut() -> None:
    assert len(arrivals(tasks(*[whole()] * 100), 10_000, 1.3, 1)) == 13


SOME = tasks(*[share(m, c) for m in (190, 300, 500, 810) for c in (1, 2)], whole(), whole(2, 3))


@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_seed_gives_the_same_fill_in_whatever_order_the_trace_stands(policy: str) -> None:
    where = nodes((2, 6), (4, 9), (1, 3))
    once, again = (fill(SOME, where, policy, seed=7) for _ in range(2))
    assert once == again == fill(SOME[::-1], where, policy, seed=7)
    assert once != fill(SOME, where, policy, seed=8)


@pytest.mark.parametrize("policy", POLICIES)
def test_nothing_that_fits_is_dropped(policy: str) -> None:
    done = fill(tasks(share(500)), nodes((1, 9), (3, 9), (2, 9)), policy, share=2.0)
    assert (done.arrived, done.placed, done.allocation) == (24, 12, 100.0)


PLAIN = """
import json, sys
if sys.argv[1] == "plain":
    sys.modules["numba"] = None
sys.path.insert(0, "tests/unit")
import test_fill
from crater_slurm.placement.packing.compiled import COMPILED
assert COMPILED == (sys.argv[1] != "plain")
where = test_fill.nodes((2, 6), (4, 9), (1, 3))
made = {p: test_fill.fill(test_fill.SOME, where, p, seed=7) for p in test_fill.POLICIES}
print(json.dumps({p: [f.allocation, f.fragmented, f.placed, f.curve] for p, f in made.items()}))
"""


def test_without_a_compiler_the_result_is_the_same() -> None:
    pytest.importorskip("numba")
    results = []
    for mode in ("plain", "compiled"):
        argv = [sys.executable, "-c", PLAIN, mode]
        done = subprocess.run(argv, capture_output=True, text=True, cwd=ROOT, check=False)
        assert done.returncode == 0, done.stderr
        results.append(json.loads(done.stdout))
    assert results[0] == results[1]
    assert results[0].keys() == POLICIES.keys()


@pytest.mark.skipif(not OPENB.exists(), reason=f"the openb traces are not in {OPENB}")
@pytest.mark.parametrize("policy", ["packing", "fgd"])
def test_published_figures_are_reproduced(policy: str) -> None:
    pytest.importorskip("numba")
    where = openb_nodes(OPENB / "openb_node_list_gpu_node.csv")
    work = list(openb_tasks(OPENB / "openb_pod_list_default.csv", where))
    found = [fill(work, where, policy, seed=seed).allocation for seed in (42, 43)]
    with (OPENB / "published_allo.csv").open(newline="") as opened:
        published = [
            float(row["130"])
            for row in csv.DictReader(opened)
            if row["workload"] == "openb_pod_list_default"
            and row["sc_policy"] == POLICIES[policy].published
        ]
    assert len(published) == 10
    assert statistics.mean(found) == pytest.approx(statistics.mean(published), abs=0.5)
