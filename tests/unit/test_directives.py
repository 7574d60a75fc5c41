"""``#CRATER`` lines and the comment form. A new case of a script is two files and no code:

``directives/valid/NNN-name.sh`` beside ``expected/valid-NNN-name.json`` (request and notes), or
``directives/invalid/NNN-name.sh`` beside ``expected/invalid-NNN-name.txt`` (a problem a line).
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from crater_slurm.model.directives import (
    DirectiveError,
    Origin,
    _words,
    header_lines,
    parse_comment,
    parse_job,
    parse_script,
)
from crater_slurm.model.request import REQUIREMENTS

CASES = Path(__file__).parent / "directives"
VALID = sorted((CASES / "valid").glob("*.sh"))
INVALID = sorted((CASES / "invalid").glob("*.sh"))
EXPECTED = CASES / "expected"
LONG = 1 << 18  # the filter sends at most 256 KiB of a script


def read(path: Path) -> str:
    return path.read_bytes().decode()


@given(st.text(alphabet="ab=#'\"\\ \t,1\x0b\u00a0", max_size=24))
def test_words_are_what_the_shell_would_make_of_them(text: str) -> None:
    """The short way for plain lines and the lexer never differ."""
    origin = Origin(1, text)
    problems: list[str] = []
    quick = _words(origin, text, problems)
    if problems:
        return
    # A tab between words is not plain, and nothing else about the line is changed by it.
    assert quick == _words(origin, "\t" + text, [])


@pytest.mark.parametrize("script", VALID, ids=lambda p: p.stem)
def test_a_valid_script_gives_its_request_and_notes(script: Path) -> None:
    expected = json.loads((EXPECTED / f"valid-{script.stem}.json").read_text())
    found = parse_script(read(script))
    assert found.request.given() == expected["request"]
    assert list(found.notes) == expected.get("notes", [])


@pytest.mark.parametrize("script", INVALID, ids=lambda p: p.stem)
def test_an_invalid_script_gives_every_problem_at_once(script: Path) -> None:
    expected = (EXPECTED / f"invalid-{script.stem}.txt").read_text().splitlines()
    with pytest.raises(DirectiveError) as raised:
        parse_script(read(script))
    assert raised.value.problems == expected


def test_every_case_has_its_pair() -> None:
    scripts = {f"valid-{p.stem}.json" for p in VALID} | {f"invalid-{p.stem}.txt" for p in INVALID}
    assert {p.name for p in EXPECTED.iterdir()} == scripts
    assert len(VALID) >= 20
    assert len(INVALID) >= 15


def test_each_requirement_says_where_it_was_written() -> None:
    found = parse_script("#!/bin/sh\n#CRATER gpus=2\n\n#CRATER cpus=4\n")
    assert str(found.origins["gpus"]) == "line 2"
    assert str(found.origins["cpus"]) == "line 4"
    assert found


def test_a_script_without_directives_asks_for_nothing() -> None:
    assert not parse_script("#!/bin/sh\n#SBATCH -n 1\nsrun a\n")


def test_the_header_is_what_sbatch_reads() -> None:
    script = "#!/bin/sh\n\n  # indented\n\t\nsrun\n#CRATER gpus=1\n"
    assert [number for number, _ in header_lines(script)] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("comment", "asked"),
    [
        ("crater: gpus=2 numa=strict", {"gpus": 2, "numa": "strict"}),
        ("run 7; crater: gpus=2", {"gpus": 2}),
        ("Crater:gpus=2", {"gpus": 2}),
        ("about\ncrater: gpus=2", {"gpus": 2}),
        ("crater: gpus=2 crater-plan:1.abc.def", {"gpus": 2}),
        ("crater-plan:1.abc.def crater: gpus=2", {"gpus": 2}),
        ("mycrater: gpus=2", {}),
        ("gpus=2", {}),
        ("crater-plan:1.abc.def", {}),
        ("", {}),
    ],
)
def test_a_comment_is_read_behind_its_prefix(comment: str, asked: dict[str, object]) -> None:
    assert parse_comment(comment).request.given() == asked


def test_a_wrong_comment_is_named_as_such() -> None:
    with pytest.raises(DirectiveError, match=r"^--comment: numa='x': takes strict"):
        parse_comment("crater: numa=x")


def test_the_comment_wins_over_the_script_and_says_so() -> None:
    found = parse_job("#!/bin/sh\n#CRATER gpus=2 cpus=8\n", "crater: gpus=4 numa=strict")
    assert found.request.given() == {"gpus": 4, "cpus": 8, "numa": "strict"}
    assert found.notes == ("--comment says gpus too and wins over line 2 of the script",)
    assert str(found.origins["gpus"]) == "--comment"


def test_a_comment_of_its_own_leaves_the_script_as_it_is() -> None:
    assert parse_job("#CRATER gpus=2\n", "for the paper").request.given() == {"gpus": 2}
    assert not parse_job(None, None)


@pytest.mark.parametrize("requirement", REQUIREMENTS, ids=lambda r: r.key)
def test_what_is_shown_to_a_user_can_be_written_again(requirement: object) -> None:
    found = parse_script(f"#CRATER {requirement.key}={requirement.example}")  # type: ignore[attr-defined]
    value = found.request.given()[requirement.attribute]  # type: ignore[attr-defined]
    shown = requirement.format(value)  # type: ignore[attr-defined]
    assert parse_script(f"#CRATER {shown}").request == found.request


def test_a_header_of_mistakes_is_answered_with_the_first_ones() -> None:
    with pytest.raises(DirectiveError) as raised:
        parse_script("#CRATER wrong=1\n" * 5000)
    assert len(raised.value.problems) == 21
    assert raised.value.problems[-1].endswith("mend the script first")


def test_a_user_s_long_text_comes_back_short() -> None:
    with pytest.raises(DirectiveError) as raised:
        parse_script("#CRATER " + "x" * 3000 + "=1 numa=" + "y" * 900)
    assert len(str(raised.value)) < 1000


@pytest.mark.parametrize(
    "script",
    [
        "#CRATER " + "x" * LONG,
        "#CRATER " + "gpus=2 " * (LONG // 7),
        "#CRATER gpus=2\n" * (LONG // 15),
        "#CRATER x\n" * (LONG // 10),
        "# crater" + " " * LONG,
        "# crater a" + " " * LONG,
        "#" * LONG,
        " " * LONG,
        "#\n" * (LONG // 2),
        "# crater a=1\n" * (LONG // 13),
    ],
    ids=["word", "words", "lines", "mistakes", "blanks", "blanks2", "#", "spaces", "empty", "near"],
)
def test_no_header_takes_long(script: str) -> None:
    """slurmctld waits with its locks held; a quadratic step here would stop the cluster."""
    begin = time.process_time()
    for text in (script, "crater: " + script, " " * LONG + "crater-plan:"):
        try:
            parse_job(script, text)
        except DirectiveError:
            continue
    assert time.process_time() - begin < 2


@settings(max_examples=150)
@given(st.text(max_size=300), st.text(max_size=120))
@example("#CRATER memory-bandwidth=1" + "0" * 400, "crater: ssd-latency=1" + "0" * 400)
@example("#CRATER gpus=2\x00 cpus=\ud800", "crater: \udcff=1")
@example("#CRATER gpus=²", "crater: cpus=٣")
def test_any_text_is_a_request_or_a_list_of_problems(script: str, comment: str) -> None:
    for text in (script, "#CRATER " + script):
        try:
            found = parse_job(text, "crater: " + comment)
        except DirectiveError as error:
            assert error.problems
        else:
            assert bool(found) == bool(found.request.given())


VALUES = st.sampled_from(["2", "16GiB", "a100", "strict", "on", "yes", "80us", "x y", "#", '"', ""])
WORDS = st.tuples(st.sampled_from([r.key for r in REQUIREMENTS]), VALUES)


@settings(max_examples=100)
@given(st.lists(WORDS, max_size=6, unique_by=lambda w: w[0]), st.randoms())
def test_the_order_of_directives_does_not_matter(words: list[tuple[str, str]], dice) -> None:  # type: ignore[no-untyped-def]
    def asked(order: list[tuple[str, str]]) -> object:
        lines = "".join(f"#CRATER {key}={value!r}\n" for key, value in order)
        try:
            return parse_script(lines).request
        except DirectiveError as error:
            return sorted(problem.partition(":")[2] for problem in error.problems)

    shuffled = list(words)
    dice.shuffle(shuffled)
    assert asked(words) == asked(shuffled)
