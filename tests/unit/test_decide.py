"""One submission from the filter's message to its answer: modes, words, the signed plan, hostility."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import pytest
from cluster_samples import KEY, decide, decider, message, node, view
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from crater_slurm.model import token
from crater_slurm.model.plan import Mode, Verdict
from crater_slurm.scheduler.decide import COMMENT_LIMIT, Answer

GOOD = "gpus=2 cpus=8 numa=strict"
TOO_MUCH = "gpus=2 cpus=20 numa=strict"
UNREADABLE = "gpuz=2"


def untouched(answer: Answer) -> bool:
    return not (answer.reject or answer.fields or answer.flags or answer.environment)


def test_enforcing_a_plan_sets_fields_flags_environment_and_comment() -> None:
    answer = decide(GOOD, node())
    assert not answer.reject
    assert answer.fields["tres_per_socket"] == "gres/gpu:2"
    assert answer.flags == ["GRES_ENFORCE_BIND"]
    assert answer.environment == {"SLURM_CPUS_PER_TASK": "8", "SRUN_CPUS_PER_TASK": "8"}
    assert answer.messages == [
        "crater: planned 2 GPUs, 8 cores on one NUMA node; "
        "1 of 1 nodes can run it (crater explain p1)"
    ]
    signed = token.verify(answer.fields["comment"], [KEY], 1000, "test")
    assert signed is not None
    assert (signed.plan.gpus, signed.plan.cpus, signed.plan.domains) == (2, 8, 1)
    assert (signed.issued, signed.array) == (1_700_000_000, False)


def test_the_record_has_everything_that_explain_needs() -> None:
    decision = decide(GOOD, node(), comment="mine").decision
    assert decision is not None
    assert (decision.id, decision.verdict, decision.mode) == ("p1", Verdict.PLANNED, Mode.ENFORCE)
    assert (decision.user_id, decision.user_name) == (1000, "ada")
    assert decision.request == {"gpus": 2, "cpus": 8, "numa": "strict"}
    assert [c.name for c in decision.conditions] == ["gpus", "cpus", "numa"]
    assert (decision.nodes_considered, decision.nodes_passed) == (1, 1)
    assert decision.passed_nodes == "n1"
    assert decision.plan is not None
    assert decision.fields["flags"] == "GRES_ENFORCE_BIND"
    assert decision.duration_us > 0


def test_a_refusal_says_need_have_nearest_node_and_the_smallest_change() -> None:
    answer = decide(TOO_MUCH, node(), node("c1", cards=()))
    assert answer.reject
    assert answer.fields == {}
    assert answer.messages == [
        "crater: refused: none of the 2 nodes that its options allow can run this job",
        "crater:   nearest is n1: numa: needs 2 GPUs, 20 cores together (strict), "
        "one NUMA node has at most 16 cores beside 2 GPUs",
        "crater:   it would fit with cpus=16, or with numa=best_effort",
        "crater:   every condition: crater explain p1",
    ]
    assert answer.decision is not None
    assert answer.decision.verdict is Verdict.REFUSED
    assert answer.decision.smallest_change == ("cpus=16", "numa=best_effort")
    assert [p for p in answer.pairs() if p[0].startswith(("set.", "flag", "env."))] == []


def test_too_few_nodes_are_named() -> None:
    answer = decide("gpus=2", node("n1"), node("n2"), node("c1", cards=()), min_nodes="3")
    assert answer.messages[0] == (
        "crater: refused: this job needs 3 nodes and only 2 of 3 can run it: n[1-2]"
    )
    assert "crater:   it would fit with --nodes=2" in answer.messages


def test_a_node_that_the_user_named_and_that_can_t_is_named() -> None:
    answer = decide("gpus=2", node("n1"), node("c1", cards=()), req_nodes="n1,c1")
    assert answer.messages[0] == (
        "crater: refused: the node list of this job names c1, which can't run it"
    )


@pytest.mark.parametrize("words", [GOOD, TOO_MUCH, UNREADABLE])
def test_observing_changes_nothing_says_nothing_and_records_it(words: str) -> None:
    answer = decide(words, node(), mode=Mode.OBSERVE)
    assert untouched(answer)
    assert answer.messages == []
    assert answer.pairs()[0] == ("verdict", "accept")
    assert answer.log
    assert answer.decision is not None
    assert answer.decision.mode is Mode.OBSERVE


@pytest.mark.parametrize(
    ("words", "first"),
    [
        (GOOD, "crater: would plan 2 GPUs, 8 cores on one NUMA node; 1 of 1 nodes"),
        (TOO_MUCH, "crater: would be refused: none of the 1 nodes"),
        (UNREADABLE, "crater: line 2: unknown directive 'gpuz'"),
    ],
)
def test_advising_changes_nothing_but_tells(words: str, first: str) -> None:
    answer = decide(words, node(), mode=Mode.ADVISE)
    assert untouched(answer)
    assert answer.messages[0].startswith(first)
    assert answer.decision is not None


@pytest.mark.parametrize("words", [GOOD, TOO_MUCH])
def test_what_is_recorded_does_not_depend_on_the_mode(words: str) -> None:
    observed, enforced = (
        decide(words, node(), mode=m).decision for m in (Mode.OBSERVE, Mode.ENFORCE)
    )
    assert observed is not None
    assert enforced is not None
    same = {"mode": Mode.ENFORCE, "duration_us": enforced.duration_us}
    assert dataclasses.replace(observed, **same) == enforced  # type: ignore[arg-type]


@pytest.mark.parametrize("words", [GOOD, TOO_MUCH, None, "gpus=2 mode=enforce"])
def test_switched_off_a_job_is_as_if_crater_was_not_there(words: str | None) -> None:
    assert decide(words, node(), mode=Mode.OFF) == Answer()


@pytest.mark.parametrize("mode", list(Mode))
def test_a_job_without_directives_is_never_touched(mode: Mode) -> None:
    assert decide(None, node(), mode=mode) == Answer()
    assert decide("", node(), mode=mode, tres_per_node="gres/gpu:99") == Answer()


@pytest.mark.parametrize("site", list(Mode))
@pytest.mark.parametrize("job", list(Mode))
def test_a_job_lowers_the_mode_and_never_raises_it(site: Mode, job: Mode) -> None:
    answer = decide(f"{TOO_MUCH} mode={job}", node(), mode=site)
    lower = min(site, job, key=lambda m: m.rank)
    assert answer.reject is (lower is Mode.ENFORCE)
    assert bool(answer.messages) is (lower.rank >= Mode.ADVISE.rank)
    assert (answer.decision is None) is (lower is Mode.OFF)


def test_a_job_that_lowers_the_mode_hears_nothing_of_what_is_unknown_either() -> None:
    script = message(f"{GOOD} mode=observe")
    assert decider().decide(script, None).messages == []
    assert decider().decide(message(GOOD), None).messages != []


@pytest.mark.parametrize("mode", list(Mode))
def test_an_unreadable_directive_is_refused_only_when_enforcing(mode: Mode) -> None:
    assert decide(UNREADABLE, node(), mode=mode).reject is (mode is Mode.ENFORCE)


def test_every_unreadable_directive_is_told_at_once() -> None:
    answer = decide("gpuz=2 cpus=x", node())
    assert [m.partition(";")[0] for m in answer.messages] == [
        "crater: line 2: unknown directive 'gpuz' in 'gpuz=2'",
        "crater: line 2: cpus='x': must be a whole number",
        "crater: the job is refused",
    ]


def test_notes_on_lines_that_are_not_read_reach_the_user_without_a_plan() -> None:
    script = message() | {"script": "#!/bin/sh\n# CRATER gpus=2\n"}
    for mode, shown in ((Mode.ENFORCE, 1), (Mode.ADVISE, 1), (Mode.OBSERVE, 0), (Mode.OFF, 0)):
        answer = decider(mode).decide(script, view(node()))
        assert untouched(answer)
        assert len(answer.messages) == shown


def test_a_directive_beyond_what_the_filter_sent_is_pointed_out_once() -> None:
    sent = message("gpus=1") | {"late_directive": "900"}
    (first, second) = decider().decide(sent, view(node())).messages
    assert first.startswith("crater: planned 1 GPU")
    assert second.startswith("crater: line 900 of the script is not read")
    seen = {"op": "submit", "uid": "1", "script": "#!/bin/sh\ncd\n#CRATER gpus=1\n"}
    assert len(decider().decide(seen | {"late_directive": "3"}, view(node())).messages) == 1


def test_a_modified_job_is_left_alone() -> None:
    sent = message(GOOD) | {"op": "modify", "record.job_id": "7"}
    assert decider().decide(sent, view(node())) == Answer(log=["job 7 is modified"])


def test_before_the_cluster_is_known_jobs_go_through_and_are_told() -> None:
    answer = decider().decide(message(GOOD), None)
    assert untouched(answer)
    assert answer.messages == [
        "crater: the job is left as it is: crater-scheduler has not read the cluster yet"
    ]


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"tres_per_node": "gpu:a:b:c"}, "its Slurm options can't be read ('gpu:a:b:c' is no gres"),
        ({"req_nodes": "n[1-"}, "its Slurm options can't be read (a bracket is never closed"),
        ({"partition": "none\nsuch"}, "crater knows no partition 'none\\nsuch'"),
        ({"req_nodes": "unknown1"}, "no node that its options allow has a profile"),
    ],
)
def test_what_crater_can_t_judge_is_left_to_slurm(fields: dict[str, str], why: str) -> None:
    answer = decide(GOOD, node(), **fields)
    assert untouched(answer)
    assert answer.messages[0].startswith(f"crater: the job is left as it is: {why}")


def test_the_comment_form_plans_a_job_without_a_script() -> None:
    sent = message(comment=f"mine; crater: {GOOD}") | {"kind": "interactive"}
    answer = decider().decide(sent, view(node()))
    assert answer.fields["gres"] == "gpu:2"
    assert answer.environment == {}
    assert answer.messages[1].startswith("crater: srun makes its step from its own options: give")
    assert "-c8" in answer.messages[1]


def test_of_a_user_s_options_the_record_keeps_what_can_be_shown() -> None:
    odd = "a\x1b[31m\udcff" + "x" * 9000  # longer than Slurm's own limit, so left to Slurm
    decision = decide("gpus=8", node(), features=odd).decision
    assert decision is not None
    assert decision.options["features"] == "a\ufffd[31m\ufffd" + "x" * 493
    decision = decide("gpus=8", node(), tres_per_node="gres/a\nb:3", exc_nodes="n[5-6]").decision
    assert decision is not None
    assert decision.options == {"exclude": "n[5-6]", "gres": {"a\ufffdb": 3}, "kind": "batch"}
    named = ",".join(f"other{i}x" for i in range(900))
    decision = decide("gpus=8", node(), exc_nodes=named).decision
    assert decision is not None
    assert decision.options["exclude"] == named[:500]


# --- The signed plan in the comment -----------------------------------------------------------


def test_the_user_s_comment_stays_in_front_of_the_plan() -> None:
    comment = decide(GOOD, node(), comment="for the paper").fields["comment"]
    assert comment.startswith("for the paper crater-plan:1.")
    assert token.strip(comment) == "for the paper"


def test_a_plan_that_came_in_with_the_comment_is_replaced() -> None:
    old = decide("gpus=4", node()).fields["comment"]
    comment = decide(GOOD, node(), comment=f"mine {old}").fields["comment"]
    assert comment.count("crater-plan:") == 1
    signed = token.verify(comment, [KEY], 1000, "test")
    assert signed is not None
    assert signed.plan.gpus == 2


@pytest.mark.parametrize(("spare", "signed"), [(1, True), (0, True), (-1, False)])
def test_a_comment_may_have_1023_bytes_with_the_plan_and_none_more(
    spare: int, signed: bool
) -> None:
    """slurmctld counts the final NUL too: of its 1,024 that leaves 1,023."""
    size = len(decide(GOOD, node()).fields["comment"])
    own = "x" * (COMMENT_LIMIT - 1 - size - 1 - spare)
    answer = decide(GOOD, node(), comment=own)
    assert ("comment" in answer.fields) is signed
    if signed:
        assert len(answer.fields["comment"]) == 1023 - spare
    else:
        assert answer.messages[-1].startswith("crater: the job's comment leaves no room")
        assert answer.fields["gres"] == "gpu:2", "it is placed as planned all the same"


def test_the_limit_is_in_bytes() -> None:
    assert "comment" in decide(GOOD, node(), comment="x" * 700).fields
    assert "comment" not in decide(GOOD, node(), comment="€" * 300).fields
    assert "comment" not in decide(GOOD, node(), comment="\udcff" * 900).fields


def test_without_a_key_the_job_is_placed_and_told_that_nothing_is_prepared() -> None:
    answer = decider(key=None).decide(message(GOOD), view(node()))
    assert "comment" not in answer.fields
    assert answer.fields["gres"] == "gpu:2"
    assert answer.messages[-1] == "crater: no plan key: the node prepares nothing for this job"


@pytest.mark.parametrize(
    ("fields", "kind"), [({"array_inx": "0-9"}, "batch"), ({}, "cron")], ids=["array", "cron"]
)
def test_plans_of_jobs_that_start_many_times_say_so(fields: dict[str, str], kind: str) -> None:
    sent = message(GOOD, **fields) | {"kind": kind}
    signed = token.verify(
        decider().decide(sent, view(node())).fields["comment"], [KEY], 1000, "test"
    )
    assert signed is not None
    assert signed.array


def test_nodes_that_can_t_are_excluded_beside_the_user_s_own() -> None:
    profiles = [node("n1"), node("n2", cards=()), node("n3", cards=()), node("n9")]
    assert decide("gpus=2", *profiles).fields["exc_nodes"] == "n[2-3]"
    own = decide("gpus=2", *profiles, exc_nodes="n9").fields["exc_nodes"]
    assert own == "n9,n[2-3]"


# --- Whatever a user writes -------------------------------------------------------------------

HOSTILE = {
    "newline": "a\nb",
    "quotes": "\"'`$(reboot)",
    "nul": "a\x00b",
    "escape": "\x1b[31m",
    "surrogates": "\udcff\udc80",
    "lone surrogate": "\ud800",
    "bidi": "\u202egpus",
    "long": "x" * (1 << 20),
    "long digits": "9" * 5000,
    "superscript": "²",
    "percent": "%s%n%d",
    "deep": "(" * 5000,
    "and": "a&" * 5000 + "a",
    "brackets": "[" * 5000,
    "infinite": "1e999",
    "negative": "-1",
    "tokens": "crater-plan:1.a.b " * 40,
    "directive": "crater: gpus=1e9 numa=\x00",
}
PLACES = [
    *("uid", "user", "kind", "het", "gres_style", "late_directive", "slurm", "script", "op"),
    *("field.comment", "field.partition", "field.features", "field.req_nodes", "field.exc_nodes"),
    *("field.gres", "field.tres_per_node", "field.tres_per_job", "field.tres_per_socket"),
    *("field.cpus_per_tres", "field.num_tasks", "field.min_nodes", "field.cpus_per_task"),
    *("field.ntasks_per_node", "field.bitflags", "field.min_mem_per_cpu", "field.array_inx"),
]
WORLD = view(node("n1"), node("n2", cards=()), names=("u1",))


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_string_anywhere_is_answered_in_time(what: str) -> None:
    begin = time.process_time()
    for place in PLACES:
        for words in (GOOD, TOO_MUCH, None):
            answer = decider().decide(message(words) | {place: HOSTILE[what]}, WORLD)
            assert isinstance(answer, Answer)
    assert time.process_time() - begin < 5


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_value_of_a_directive_is_read_or_refused_in_few_words(what: str) -> None:
    for key in ("gpus", "model", "gpu-type", "checkpoint", "memory-bandwidth", "ssd-latency"):
        for script in (f"#CRATER {key}={HOSTILE[what]}", f"#CRATER {key}='{HOSTILE[what]}'"):
            sent = {"op": "submit", "uid": "1000", "script": script}
            answer = decider().decide(sent, WORLD)
            assert sum(map(len, answer.messages)) < 30_000
            assert all("\x00" not in m and "\x1b" not in m for m in answer.messages)


@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.dictionaries(st.sampled_from(PLACES), st.text(max_size=40), max_size=6),
    st.sampled_from([GOOD, TOO_MUCH, "gpus=1", "cpus=3 memory-bandwidth=1", None]),
    st.sampled_from(list(Mode)),
)
def test_no_message_makes_a_decision_raise(
    parts: dict[str, str], words: str | None, mode: Mode
) -> None:
    answer = decider(mode).decide(message(words) | parts, WORLD)
    assert answer.pairs()[0][0] == "verdict"
    if mode is not Mode.ENFORCE:
        assert untouched(answer)


NUMBERS = st.sampled_from(["0", "1", "2", "3", "7", "64", "65533", "4294967292"])
GRES = st.sampled_from(
    ["gres/gpu:0", "gres/gpu:2", "gres/gpu:a100:1", "gres/shard:3", "gpu:1,gpu:2"]
)
OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(
            (
                *("min_nodes", "num_tasks", "ntasks_per_node", "cpus_per_task", "min_cpus"),
                *("sockets_per_node", "cores_per_socket", "ntasks_per_socket", "shared"),
                *("ntasks_per_gpu", "min_mem_per_node", "min_mem_per_cpu"),
            ),
            NUMBERS,
        ),
        **dict.fromkeys(("tres_per_node", "tres_per_job", "tres_per_task", "cpus_per_tres"), GRES),
        "exc_nodes": st.just("n1"),
        "req_nodes": st.just("n[1-2]"),
    },
)


@settings(max_examples=300)
@given(OPTIONS, st.sampled_from([GOOD, TOO_MUCH, "gpus=1 cpus=3", "cpus=4 numa=strict", "gpus=3"]))
def test_no_options_make_a_decision_raise_and_all_fields_are_decimal(
    options: dict[str, str], words: str
) -> None:
    answer = decider().decide(message(words, **options), WORLD)
    for name, value in answer.fields.items():
        if name not in ("gres", "tres_per_socket", "exc_nodes", "comment"):
            assert value.isdigit(), (name, value)


@settings(max_examples=100)
@given(OPTIONS, st.sampled_from([GOOD, TOO_MUCH, "gpus=1 cpus=3", "cpus=4 numa=strict"]))
def test_the_same_message_gives_the_same_answer(options: dict[str, str], words: str) -> None:
    def timeless(answer: Answer) -> Any:
        found = answer.decision and dataclasses.replace(answer.decision, duration_us=0)
        return dataclasses.replace(answer, decision=found)

    sent = message(words, **options)
    first = timeless(decider().decide(sent, WORLD))
    assert timeless(decider().decide(sent, WORLD)) == first
    assert (
        timeless(decider().decide(sent, view(node("n1"), node("n2", cards=()), names=("u1",))))
        == first
    )
