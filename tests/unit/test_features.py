"""``--constraint``: which nodes it could match, and when only Slurm can tell."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crater_slurm.slurm.features import compile_expression


@pytest.mark.parametrize(
    ("text", "features", "holds"),
    [
        ("a", {"a"}, True),
        ("a", {"b"}, False),
        ("a&b", {"a", "b"}, True),
        ("a&b", {"a"}, False),
        ("a|b", {"b"}, True),
        ("a|b", set(), False),
        (" a & b ", {"a", "b"}, True),
        # Slurm reads from left to right without precedence: (a|b)&c, not a|(b&c).
        ("a|b&c", {"a"}, False),
        ("a|b&c", {"a", "c"}, True),
        ("a|(b&c)", {"a"}, True),
        ("(a|b)&(c|d)", {"b", "d"}, True),
        ("(a|b)&(c|d)", {"a", "b"}, False),
        ("((a))", {"a"}, True),
        ("a&a|b", {"b"}, True),
        ("zen4.2:x", {"zen4.2:x"}, True),
    ],
)
def test_an_expression_holds_for_a_node_or_not(text: str, features: set[str], holds: bool) -> None:
    matches = compile_expression(text)
    assert matches is not None
    assert matches(frozenset(features)) is holds


@pytest.mark.parametrize(
    "text",
    ["", "[a|b]", "a*4", "{a}", "a&", "&a", "a||b", "(a", "a)", "()", "a b", "(a)(b)", "|", "a&()"],
)
def test_what_this_grammar_can_t_decide_could_be_any_node(text: str) -> None:
    assert compile_expression(text) is None


@pytest.mark.parametrize("text", ["(" * 100_000, "a&" * 100_000 + "a", "(" * 99 + "a" + ")" * 99])
def test_a_monstrous_expression_is_left_to_slurm_at_once(text: str) -> None:
    begin = time.process_time()
    assert compile_expression(text) is None
    assert time.process_time() - begin < 1


def test_a_chain_of_many_terms_is_followed_to_its_end() -> None:
    matches = compile_expression("a&" * 500 + "b")
    assert matches is not None
    assert matches({"a", "b"})
    assert not matches({"a"})


NAMES = ["a", "b", "c"]


def tree(depth: int) -> st.SearchStrategy[str]:
    if not depth:
        return st.sampled_from(NAMES)
    inner = tree(depth - 1)
    return st.sampled_from(NAMES) | st.tuples(inner, st.sampled_from("&|"), inner).map(
        lambda t: f"({t[0]}{t[1]}{t[2]})"
    )


@settings(max_examples=200)
@given(tree(4), st.sets(st.sampled_from(NAMES)))
def test_with_parentheses_everywhere_it_is_python_s_own_logic(text: str, have: set[str]) -> None:
    matches = compile_expression(text)
    assert matches is not None
    python = text.replace("&", " and ").replace("|", " or ")
    assert matches(have) == eval(python, {n: n in have for n in NAMES})


@settings(max_examples=200)
@given(st.text(alphabet="ab&|() ", max_size=20) | st.text(max_size=30))
def test_any_text_is_a_predicate_or_left_to_slurm(text: str) -> None:
    matches = compile_expression(text)
    assert matches is None or matches({"a"}) in (True, False)
