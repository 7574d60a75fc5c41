"""Stage 1 as a whole: truth tables, every limit from both sides, and what holds for any cluster."""

from __future__ import annotations

import dataclasses
import itertools
import random
from typing import Any

import pytest
from cluster_samples import AMPERE, AVX2, AVX512, GIB, TURING, cluster, gpus, node, plan, replan
from hypothesis import given, settings
from hypothesis import strategies as st

from crater_slurm.model.directives import parse_script
from crater_slurm.model.job import Job
from crater_slurm.model.profile import Gpu, NodeProfile, Software
from crater_slurm.placement import inventory, mig, rules
from crater_slurm.placement.need import Need, join
from crater_slurm.placement.outcome import Outcome
from crater_slurm.placement.planner import Planner

#: Condition: directives, the check by which it shows, and what makes a machine lack it.
MAIN: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpu": ("gpus=4 gpu-memory=40GiB", "gpus", {"cards": gpus(0, 0, 1)}),
    "cpu": ("cpus=32 avx=avx512", "avx", {"avx": AVX2}),
    "bandwidth": ("memory-bandwidth=280.7", "memory-bandwidth", {"bandwidth": (142, 138.6)}),
    "ssd": ("ssd-iops=900k ssd-latency=80us", "ssd-iops", {"iops": 899_999}),
}
ALL_16 = pytest.mark.parametrize(
    "chosen",
    list(itertools.product([False, True], repeat=4)),
    ids=lambda t: "".join("01"[b] for b in t),
)


def of_chosen(chosen: tuple[bool, ...]) -> list[tuple[str, str, dict[str, Any]]]:
    return [row for row, there in zip(MAIN.values(), chosen, strict=True) if there]


def refused(outcome: Outcome) -> set[str]:
    return {c.name for c in outcome.conditions if not c.met}


@ALL_16
def test_all_four_main_conditions_must_hold_and_the_missing_ones_are_named(
    chosen: tuple[bool, ...],
) -> None:
    words = " ".join(row[0] for row in MAIN.values())
    machine = {k: v for row in of_chosen(chosen) for k, v in row[2].items()}
    outcome = plan(words, node(**machine))
    assert outcome.feasible is not any(chosen)
    assert refused(outcome) == {row[1] for row in of_chosen(chosen)}


@ALL_16
def test_only_what_is_asked_counts_on_a_machine_that_lacks_everything(
    chosen: tuple[bool, ...],
) -> None:
    machine = {k: v for row in MAIN.values() for k, v in row[2].items()}
    asked = of_chosen(chosen)
    outcome = plan(" ".join(row[0] for row in asked) or "task=generic", node(**machine))
    assert outcome.feasible is not any(chosen)
    assert refused(outcome) == {row[1] for row in asked}


@ALL_16
def test_four_nodes_that_each_have_one_condition_are_not_one_that_has_all(
    chosen: tuple[bool, ...],
) -> None:
    """Each chosen condition is met by some node, all chosen together by none but the full one."""
    rows = list(MAIN.values())
    poor = [
        node(f"n{i}", **{k: v for other in rows if other is not row for k, v in other[2].items()})
        for i, row in enumerate(rows)
    ]
    asked = of_chosen(chosen)
    words = " ".join(row[0] for row in asked) or "task=generic"
    outcome = plan(words, *poor)
    assert outcome.feasible is (len(asked) < 2)
    assert not refused(outcome), "each condition by itself is met somewhere"
    assert plan(words, *poor, node("whole")).feasible


def driven(driver: str | None = "550.54.14", cuda: str | None = "12.4") -> NodeProfile:
    return dataclasses.replace(node(), software=Software(gpu_driver=driver, cuda=cuda))


def tensored(*cores: bool | None) -> NodeProfile:
    cards = tuple(
        dataclasses.replace(g, tensor_cores=has)
        for g, has in zip(gpus(*(0 for _ in cores)), cores, strict=True)
    )
    return node(cards=cards)


def cut(*instances: str, whole: int = 1, types: tuple[str, ...] = ()) -> NodeProfile:
    """A machine of whole A100 and of one that is cut, as placement sees it."""
    cards = gpus(*(0 for _ in range(whole + 1)))
    one = dataclasses.replace(cards[-1], mig_instances=instances)
    return mig.apart(node(cards=(*cards[:-1], one)), types)


def ok(profile: NodeProfile, **need: Any) -> bool:
    return rules.evaluate(profile, Need(**need)).ok


#: Need, its value at the limit, a step, and whether more is asked upwards.
LIMITS: list[tuple[str, Any, Any, Any]] = [
    ("gpus", 3, 4, 5),
    ("gpu_memory_mib", 40 * GIB - 1, 40 * GIB, 40 * GIB + 1),
    ("cpus", 31, 32, 33),
    ("memory_mib", 256 * GIB - 1, 256 * GIB, 256 * GIB + 1),
    ("memory_bandwidth_gb_s", 280.6, 280.7, 280.71),
    ("ssd_iops", 899_999, 900_000, 900_001),
    ("ssd_latency_us", 80.1, 80.0, 79.9),
    ("cache_gb", 2999, 3000, 3001),
    ("driver", "550.54.13", "550.54.14", "550.54.15"),
    ("driver", "549.99", "550.54.14.0", "550.55"),
    ("driver", "99", "550", "1000"),  # as numbers, not as text
    ("cuda", "12.3", "12.4", "12.5"),
    ("cuda", "9.2", "12.4.0", "12.10"),
]


@pytest.mark.parametrize(("name", "below", "at", "above"), LIMITS, ids=lambda v: str(v))
def test_each_limit_from_below_at_it_and_from_above(
    name: str, below: Any, at: Any, above: Any
) -> None:
    rest: dict[str, Any] = {"gpus": 1} if name == "gpu_memory_mib" else {}
    assert ok(driven(), **rest, **{name: below})
    assert ok(driven(), **rest, **{name: at})
    assert not ok(driven(), **rest, **{name: above})


@pytest.mark.parametrize("avx", list(rules.AVX_FLAGS))
def test_each_level_of_vector_instructions_needs_its_own_flag(avx: str) -> None:
    flag = rules.AVX_FLAGS[avx]
    others = frozenset(rules.AVX_FLAGS.values()) - {flag}
    assert ok(node(avx=frozenset({flag})), avx=avx)
    assert not ok(node(avx=others), avx=avx)
    assert not ok(node(avx=None), avx=avx)


@pytest.mark.parametrize(
    ("cards", "wanted", "fits", "reason"),
    [
        ((True, True, False), 1, True, ""),
        ((True, True, False), 2, True, ""),
        ((True, True, False), 3, False, "only 2 of its 3 GPUs have tensor cores"),
        ((False,), 1, False, "its GPUs have no tensor cores"),
        ((None,), 1, False, "whether its GPUs have tensor cores is unknown"),
        ((), 1, False, "has no GPU"),
    ],
)
def test_tensor_cores_are_counted_and_never_guessed(
    cards: tuple[bool | None, ...], wanted: int, fits: bool, reason: str
) -> None:
    result = rules.evaluate(tensored(*cards), Need(gpus=wanted, tensor_cores=True))
    assert result.ok is fits
    if not fits:
        (check,) = [c for c in result.checks if c.name == "tensor-cores"]
        assert check.reason == reason
    assert ok(tensored(*cards), gpus=len(cards)), "without the need nothing is looked at"


@pytest.mark.parametrize(
    ("driver", "cuda"), [(None, None), ("", ""), ("unknown", "n/a"), ("r550", "v12")]
)
def test_a_version_that_can_t_be_read_never_matches(driver: str | None, cuda: str | None) -> None:
    profile = driven(driver, cuda)
    assert not ok(profile, driver="1")
    assert not ok(profile, cuda="1")
    result = rules.evaluate(profile, Need(driver="1"))
    assert (result.checks[0].have, result.checks[0].reason) == (
        "unknown",
        "its GPU driver is unknown",
    )


def test_a_version_may_end_in_words() -> None:
    assert ok(driven("550.54.14-open", "12.4 (forward compatible)"), driver="550.54.14", cuda="12")


# MIG


def test_a_card_in_instances_is_that_many_gpus_and_no_whole_one() -> None:
    profile = cut("3g.20gb", "1g.5gb", "1g.5gb")
    assert [g.index for g in profile.gpus] == [0, 1, 2, 3]
    for count, fits in ((1, True), (2, False)):
        assert ok(profile, gpus=count) is fits, "one card is whole"
        assert ok(profile, gpus=count + 1, mig="1g.5gb") is fits
        assert ok(profile, gpus=count, mig="3g.20gb") is fits
    assert not ok(profile, gpus=1, mig="2g.10gb")
    assert not ok(node(), gpus=1, mig="1g.5gb")


@pytest.mark.parametrize(
    ("profile", "need", "reasons"),
    [
        (cut("1g.5gb", whole=0), {"gpus": 1}, ["has no whole GPU, only MIG instances"]),
        (cut("1g.5gb", whole=1), {"gpus": 2}, ["has 1 GPU"]),
        (
            node(),
            {"gpus": 1, "mig": "1g.5gb"},
            ["has no MIG instance", "has no MIG instance"],
        ),
        (
            cut("2g.10gb", "3g.20gb"),
            {"gpus": 1, "mig": "1g.5gb"},
            ["its MIG instances are 1 of 2g.10gb, 1 of 3g.20gb"],
        ),
        (
            cut("1g.5gb"),
            {"gpus": 2, "mig": "1g.5gb"},
            ["has 1 MIG instance", "its MIG instances are 1 of 1g.5gb"],
        ),
    ],
)
def test_what_is_missing_of_instances_is_said(
    profile: NodeProfile, need: dict[str, Any], reasons: list[str]
) -> None:
    failed = [c for c in rules.evaluate(profile, Need(**need)).checks if not c.ok]
    assert [c.reason for c in failed] == reasons


@pytest.mark.parametrize(
    ("type_", "profile"),
    [
        ("1g.5gb", "1g.5gb"),
        ("a100_1g.5gb", "1g.5gb"),
        ("a100-sxm4-40gb_3g.20gb", "3g.20gb"),
        ("A100_1G.10GB+ME", "1g.10gb+me"),
        ("a100", None),
        ("a100_80gb", None),
        ("h100-1g", None),
        ("x1g.5gb", None),
        ("", None),
        (None, None),
    ],
)
def test_a_gres_type_that_ends_in_a_mig_profile_is_an_instance(
    type_: str | None, profile: str | None
) -> None:
    assert mig.profile_of_type(type_) == profile
    declared = node(cards=gpus(0, gres_type=type_))
    assert ok(declared, gpus=1) is (profile is None)
    if profile:
        assert ok(declared, gpus=1, mig=profile)


def test_instances_have_slurm_s_types_and_at_least_the_memory_of_their_name() -> None:
    profile = cut("1g.5gb", "3g.20gb", types=("a100", "a100_1g.5gb"))
    assert [g.gres_type for g in profile.gpus] == ["a100", "a100_1g.5gb", None]
    assert [g.memory_mib for g in profile.gpus] == [40 * GIB, 4291, 17166]
    assert ok(profile, gpus=1, mig="1g.5gb", gpu_memory_mib=4 * GIB)
    assert not ok(profile, gpus=1, mig="1g.5gb", gpu_memory_mib=5 * GIB)
    assert ok(profile, gpus=1, mig="1g.5gb", gpu_type="a100", precision="bf16")


def test_links_follow_the_cards_that_stay_whole() -> None:
    from crater_slurm.model.profile import NvLink

    cards = tuple(
        dataclasses.replace(g, nvlinks=tuple(NvLink(p) for p in range(3) if p != g.index))
        for g in gpus(0, 0, 0)
    )
    cards = (dataclasses.replace(cards[0], mig_instances=("1g.5gb", "1g.5gb")), *cards[1:])
    found = mig.apart(node(cards=cards))
    assert [[link.peer for link in g.nvlinks] for g in found.gpus] == [[], [], [3], [2]]


def sliced(name: str, *instances: str, whole: int = 1) -> NodeProfile:
    """As its probe reports it: not taken apart yet."""
    cards = gpus(*(0 for _ in range(whole + 1)))
    one = dataclasses.replace(cards[-1], mig_instances=instances)
    return node(name, cards=(*cards[:-1], one))


def planner_of(*profiles: NodeProfile, types: dict[str, set[str]] | None = None) -> Planner:
    there = cluster(profiles)
    nodes = tuple(
        dataclasses.replace(n, gpu_types=frozenset((types or {}).get(n.name, ())))
        for n in there.nodes
    )
    return Planner(inventory.build(dataclasses.replace(there, nodes=nodes), profiles))


def test_slurm_is_asked_for_the_instances_by_their_type() -> None:
    types = {"m1": {"a100", "a100_1g.5gb", "a100_3g.20gb"}}
    planner = planner_of(sliced("m1", "3g.20gb", "1g.5gb", "1g.5gb"), node("n1"), types=types)
    outcome = replan(planner, "gpus=2 mig=1g.5gb")
    assert outcome.placement is not None
    assert outcome.placement.gpu_type == "a100_1g.5gb"
    assert planner.inventory.names_of(outcome.passed) == ["m1"]
    whole = replan(planner, "gpus=1")
    assert whole.placement is not None
    assert whole.placement.gpu_type == "a100", "untyped, Slurm might give an instance"
    assert planner.inventory.names_of(whole.passed) == ["m1", "n1"]


def test_an_option_that_names_an_instance_s_type_asks_for_instances() -> None:
    from cluster_samples import option

    types = {"m1": {"a100", "a100_1g.5gb"}}
    planner = planner_of(sliced("m1", "1g.5gb", "1g.5gb"), types=types)
    assert replan(planner, "cpus=1", gpus=(option(2, "a100_1g.5gb"),)).feasible
    assert not replan(planner, "cpus=1", gpus=(option(3, "a100_1g.5gb"),)).feasible
    other = replan(planner, "mig=2g.10gb", gpus=(option(1, "a100_1g.5gb"),))
    assert other.feasible
    assert other.notes == ("the option's GPU type a100_1g.5gb wins over mig=2g.10gb",)


def test_the_way_out_of_missing_versions_and_instances() -> None:
    old = dataclasses.replace(sliced("m1", "2g.10gb", "2g.10gb", "3g.20gb"), name="m1")
    old = dataclasses.replace(old, software=Software(gpu_driver="535.104.05", cuda="12.2"))
    planner = planner_of(old, types={"m1": {"a100", "2g.10gb", "3g.20gb"}})
    ways = {
        "driver=550": ("driver=535.104.5",),
        "cuda=12.4": ("cuda=12.2",),
        "driver=550 cuda=12.4": ("driver=535.104.5 cuda=12.2",),
        "mig=1g.5gb gpus=2": ("mig=2g.10gb",),
    }
    for words, way in ways.items():
        outcome = replan(planner, words)
        assert not outcome.feasible
        assert outcome.smallest_change == way, words
    unknown = planner_of(node())
    assert replan(unknown, "driver=550").smallest_change == ()
    assert replan(unknown, "mig=1g.5gb").smallest_change == ()


# The example of the first description


LLAMA = (
    "model=Llama-3-8B gpus=2 gpu-type=a100 gpu-memory=40GiB cpus=32 avx=avx512 "
    "memory-bandwidth=140 ssd-iops=800k ssd-latency=150us"
)


def xeon(name: str) -> NodeProfile:
    return node(name, latency_us=110)


def epyc_7763(name: str) -> NodeProfile:
    """Zen 3 has no AVX-512, whatever else it has."""
    return node(name, numa=8, cores=16, cards=gpus(*range(8)), avx=AVX2, bandwidth=[42])


def test_the_example_lands_on_the_nodes_that_have_it_all() -> None:
    planner = planner_of(epyc_7763("e1"), xeon("x1"), node("slow", latency_us=151), xeon("x2"))
    outcome = replan(planner, LLAMA)
    assert outcome.feasible
    assert planner.inventory.names_of(outcome.passed) == ["x1", "x2"]
    assert outcome.plan is not None
    assert (outcome.plan.gpus, outcome.plan.cpus, outcome.plan.ssd_iops) == (2, 32, 800_000)
    left_out = {name: reason for name, _, reason in outcome.excluded}
    assert left_out == {
        "e1": "its CPU's vector instructions are avx, avx2",
        "slow": "read latency is 151 µs",
    }


def test_on_epyc_7763_nodes_the_example_is_refused_for_avx_512_and_nothing_else() -> None:
    outcome = plan(LLAMA, epyc_7763("e1"), epyc_7763("e2"))
    assert not outcome.feasible
    assert refused(outcome) == {"avx"}
    assert outcome.nearest_have == (
        "avx: needs avx512, its CPU's vector instructions are avx, avx2",
    )
    assert outcome.smallest_change == ("avx=avx2",)


# What holds for any cluster


@st.composite
def machines(draw: st.DrawFn) -> NodeProfile:
    """Machines around the thresholds of ``WORDS``, with unknown values and cut cards."""
    domains = draw(st.sampled_from([1, 2, 4]))
    cards: list[Gpu] = []
    for i, where in enumerate(draw(st.lists(st.integers(0, domains - 1), max_size=4))):
        small = draw(st.booleans())
        (card,) = gpus(
            where,
            first=i,
            model="t4" if small else "a100-pcie-40gb",
            gres_type=draw(st.sampled_from(["t4" if small else "a100", None])),
            memory_mib=draw(st.sampled_from([None, 15 * GIB, 16 * GIB, 40 * GIB])),
            precisions=draw(st.sampled_from([None, AMPERE, TURING])),
        )
        cards.append(
            dataclasses.replace(
                card,
                tensor_cores=draw(st.sampled_from([None, True, True, False])),
                mig_instances=draw(
                    st.sampled_from([(), (), ("1g.5gb",), ("1g.5gb", "1g.5gb", "3g.20gb")])
                ),
            )
        )
    profile = node(
        numa=domains,
        sockets=1,
        cores=4,
        threads=draw(st.sampled_from([1, 2])),
        cards=tuple(cards),
        bandwidth=[draw(st.sampled_from([None, 45.0, 70.0, 139.9, 140.0])) for _ in range(domains)],
        memory_gib=draw(st.sampled_from([None, 16, 64])),
        avx=draw(st.sampled_from([None, AVX2, AVX512])),
        iops=draw(st.sampled_from([None, 799_999, 800_000])),
        latency_us=draw(st.sampled_from([None, 100.0, 100.1])),
        nvme=draw(st.booleans()),
        cache_gb=draw(st.sampled_from([None, 99, 100])),
    )
    software = Software(
        gpu_driver=draw(st.sampled_from([None, "535.104.05", "550.54"])),
        cuda=draw(st.sampled_from([None, "12.2", "12.4"])),
    )
    return dataclasses.replace(profile, software=software)


CHOICES: list[list[str]] = [
    ["gpus=1", "gpus=2", "gpus=3"],
    ["gpu-memory=16GiB", "gpu-memory=4GiB"],
    ["gpu-type=a100"],
    ["precision=bf16"],
    ["tensor-cores=yes"],
    ["mig=1g.5gb"],
    ["driver=535.104.05", "driver=550"],
    ["cuda=12.4"],
    ["cpus=4", "cpus=8", "cpus=17"],
    ["physical-cores=no", "physical-cores=yes"],
    ["avx=avx512"],
    ["memory-bandwidth=140", "memory-bandwidth=70"],
    ["ssd-iops=800k"],
    ["ssd-latency=100us"],
    ["cache=100GB"],
    ["numa=strict"],
]
WORDS = st.lists(st.sampled_from(range(len(CHOICES))), unique=True, min_size=1, max_size=5).flatmap(
    lambda rows: st.tuples(*(st.sampled_from(CHOICES[row]) for row in rows)).map(" ".join)
)


@st.composite
def clusters(draw: st.DrawFn) -> list[NodeProfile]:
    """Nodes of one or two makes, each with something of its own: as clusters are."""
    makes = draw(st.lists(machines(), min_size=1, max_size=2))
    found = []
    for _ in range(draw(st.integers(1, 6))):
        profile = draw(st.sampled_from(makes))
        other = draw(machines())
        kept = draw(st.sampled_from(["software", "nvmes", "cache_gb", "memory_mib", "", ""]))
        found.append(dataclasses.replace(profile, **{kept: getattr(other, kept)} if kept else {}))
    return found


NODES = clusters()


def named(profiles: list[NodeProfile]) -> list[NodeProfile]:
    return [dataclasses.replace(p, name=f"n{i}") for i, p in enumerate(profiles)]


def need_of(words: str) -> Need:
    return join(parse_script(f"#CRATER {words}").request, Job(user_id=1)).need


def at_least(have: float | None, wanted: float | None) -> bool:
    return wanted is None or (have is not None and have >= wanted)


def plainly_serves(gpu: Gpu, need: Need) -> bool:
    """Whether this GPU is one that the job may get."""
    return (
        (gpu.mig_instances == (need.mig,) if need.mig else not gpu.mig_instances)
        and at_least(gpu.memory_mib, need.gpu_memory_mib)
        and (
            need.gpu_type is None
            or need.gpu_type == gpu.gres_type
            or gpu.model.startswith(f"{need.gpu_type}-")
        )
        and (need.precision is None or need.precision in (gpu.precisions or ()))
        and (not need.tensor_cores or gpu.tensor_cores is True)
    )


def plainly_has(profile: NodeProfile, need: Need) -> bool:
    """What a machine must have at least, written down without the rules: NUMA left out."""
    cards = [g for g in mig.apart(profile).gpus if plainly_serves(g, need)]
    threads = profile.cpu.threads_per_core if need.cpus_are_threads else 1
    drives = profile.nvmes
    driver = [int(part) for part in (profile.software.gpu_driver or "0").split(".")]
    return (
        len(cards) >= need.gpus
        and at_least(profile.cpu.cores * threads, need.cpus)
        and (need.avx is None or "avx512f" in (profile.cpu.avx or ()))
        and at_least(profile.memory_bandwidth_gb_s, need.memory_bandwidth_gb_s)
        and (
            need.ssd_iops is None
            or any(at_least(d.random_read_iops, need.ssd_iops) for d in drives)
        )
        and (
            need.ssd_latency_us is None
            or any((d.read_latency_us or 1e9) <= need.ssd_latency_us for d in drives)
        )
        and at_least(profile.cache_gb, need.cache_gb)
        and (need.driver is None or driver >= [int(part) for part in need.driver.split(".")])
        and (need.cuda is None or profile.software.cuda == "12.4")
    )


@settings(max_examples=120)
@given(NODES, WORDS)
def test_a_plan_never_goes_where_a_stated_need_is_not_met(
    profiles: list[NodeProfile], words: str
) -> None:
    there = named(profiles)
    planner = planner_of(*there)
    outcome = replan(planner, words)
    by_name = {p.name: p for p in there}
    for name in planner.inventory.names_of(outcome.passed):
        assert plainly_has(by_name[name], outcome.need), (name, outcome.need)
        if outcome.placement is None or not outcome.need.gpus:
            continue
        asked = outcome.placement.gpu_type
        for gpu in mig.apart(by_name[name]).gpus:
            if asked is None or gpu.gres_type == asked:
                assert plainly_serves(gpu, outcome.need), "Slurm may give any GPU of that type"
    if outcome.feasible:
        assert outcome.passed


@settings(max_examples=80)
@given(NODES, machines(), WORDS)
def test_one_more_node_never_makes_a_request_impossible(
    profiles: list[NodeProfile], another: NodeProfile, words: str
) -> None:
    there = named(profiles)
    before = replan(planner_of(*there), words)
    after = replan(planner_of(*there, dataclasses.replace(another, name="zz")), words)
    assert after.feasible or not before.feasible


def answer(outcome: Outcome, planner: Planner) -> tuple[Any, ...]:
    return (
        outcome.feasible,
        planner.inventory.names_of(outcome.passed),
        outcome.plan,
        outcome.placement,
        outcome.conditions,
        sorted(outcome.excluded),
        outcome.smallest_change,
        outcome.notes,
        outcome.facts,
    )


@settings(max_examples=80)
@given(NODES, WORDS, st.integers(0, 10**6))
def test_the_order_of_nodes_changes_nothing_and_the_same_question_has_one_answer(
    profiles: list[NodeProfile], words: str, seed: int
) -> None:
    there = named(profiles)
    planner = planner_of(*there)
    first = answer(replan(planner, words), planner)
    assert answer(replan(planner, words), planner) == first
    random.Random(seed).shuffle(there)
    other = planner_of(*there)
    assert answer(replan(other, words), other) == first


@settings(max_examples=120)
@given(NODES, WORDS)
def test_nodes_decided_together_are_decided_as_each_alone(
    profiles: list[NodeProfile], words: str
) -> None:
    there = named(profiles)
    found = planner_of(*there).inventory
    by_name = {p.name: mig.apart(p) for p in there}
    need = need_of(words)
    seen = 0
    for one in found.classes(need):
        assert not seen & one.nodes
        seen |= one.nodes
        together = rules.evaluate(one.profile, need)
        for name in found.names_of(one.nodes):
            alone = rules.evaluate(by_name[name], need)
            verdicts = [[(c.name, c.ok) for c in r.checks] for r in (alone, together)]
            assert verdicts[0] == verdicts[1], name
            assert (alone.ok, alone.eligible) == (together.ok, together.eligible)
    assert seen == found.everything
