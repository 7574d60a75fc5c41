"""The table of requirements, and everything that is written from it."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from crater_slurm.cli.directives import directives
from crater_slurm.model.request import (
    _PARSERS,
    BY_ATTRIBUTE,
    BY_KEY,
    REQUIREMENTS,
    Request,
    Requirement,
    json_schema,
    markdown_table,
)

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "directives.md"
each = pytest.mark.parametrize("requirement", REQUIREMENTS, ids=lambda r: r.key)


def test_the_table_and_the_request_have_the_same_rows_in_the_same_order() -> None:
    assert [r.attribute for r in REQUIREMENTS] == [f.name for f in dataclasses.fields(Request)]
    assert list(BY_ATTRIBUTE) == [r.attribute for r in REQUIREMENTS]
    assert len(BY_KEY) == len(REQUIREMENTS)


@each
def test_a_row_is_complete(requirement: Requirement) -> None:
    assert re.fullmatch(r"[a-z]+(-[a-z]+)*", requirement.key)
    assert requirement.attribute.startswith(requirement.key.replace("-", "_"))
    assert requirement.kind in _PARSERS
    assert requirement.meaning.endswith(".")
    if requirement.choices:
        assert requirement.example in requirement.choices
    if requirement.kind in {"mib", "gb", "bandwidth", "count", "latency", "seconds"}:
        assert requirement.unit
        assert requirement.minimum is not None
        assert requirement.maximum is not None


@each
def test_the_type_of_a_value_is_the_fields(requirement: Requirement) -> None:
    value = requirement.parse(requirement.example)
    annotation = next(
        f.type for f in dataclasses.fields(Request) if f.name == requirement.attribute
    )
    assert annotation == f"{type(value).__name__} | None"


@pytest.mark.parametrize(
    "requirement", [r for r in REQUIREMENTS if r.minimum is not None], ids=lambda r: r.key
)
def test_the_bounds_themselves_are_valid_and_one_step_beyond_is_not(
    requirement: Requirement,
) -> None:
    assert requirement.minimum is not None
    assert requirement.maximum is not None
    assert requirement.check(requirement.minimum) == requirement.minimum
    assert requirement.check(requirement.maximum) == requirement.maximum
    step = 1 if requirement.kind in {"integer", "count"} else 0.01
    with pytest.raises(ValueError, match=r"at least"):
        requirement.check(requirement.minimum - step)
    with pytest.raises(ValueError, match=r"at most"):
        requirement.check(requirement.maximum + step)


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("gpu-memory", 16384, "gpu-memory=16GiB"),
        ("gpu-memory", 15259, "gpu-memory=15259MiB"),
        ("memory-bandwidth", 138.7, "memory-bandwidth=138.7GB/s"),
        ("memory-bandwidth", 12345.678, "memory-bandwidth=12345.678GB/s"),
        ("ssd-iops", 800_000, "ssd-iops=800000"),
        ("ssd-latency", 87.23456789, "ssd-latency=87.23456789us"),
        ("preemptible", False, "preemptible=no"),
        ("max-wait", 1800, "max-wait=1800s"),
        ("cache", 200, "cache=200GB"),
        ("numa", "strict", "numa=strict"),
        ("model-params", 8_030_261_248, "model-params=8.030261248B"),
        ("cuda", "12.2", "cuda=12.2"),
        ("mig", "1g.5gb", "mig=1g.5gb"),
    ],
)
def test_a_value_is_shown_as_its_user_would_write_it(key: str, value: object, text: str) -> None:
    assert BY_KEY[key].format(value) == text
    assert BY_KEY[key].parse(text.partition("=")[2]) == value


def test_the_schema_knows_every_directive_and_nothing_else() -> None:
    schema = json_schema()
    assert list(schema["properties"]) == list(BY_KEY)
    assert schema["additionalProperties"] is False
    json.dumps(schema)


@each
def test_the_schema_has_the_tables_values_and_bounds(requirement: Requirement) -> None:
    entry = json_schema()["properties"][requirement.key]
    assert entry["description"] == requirement.meaning
    if requirement.choices:
        assert entry["enum"] == list(requirement.choices)
        return
    value = requirement.parse(requirement.example)
    names = {bool: "boolean", int: "integer", float: "number", str: "string"}
    accepted = {names[type(value)], "number"} if type(value) is int else {names[type(value)]}
    assert entry["type"] in accepted
    assert entry.get("minimum") == requirement.minimum
    assert entry.get("maximum") == requirement.maximum
    assert entry.get("x-unit", "") == requirement.unit


def test_the_documentation_holds_the_table_as_it_is() -> None:
    text = DOCUMENT.read_text()
    between = re.search(r"<!-- table -->\n(.*)\n<!-- end of table -->", text, re.DOTALL)
    assert between is not None
    assert between.group(1) == markdown_table()


@pytest.mark.parametrize("argument", ["--json", "--markdown", None])
def test_crater_directives_prints_every_directive(argument: str | None) -> None:
    done = CliRunner().invoke(directives, [argument] if argument else [])
    assert done.exit_code == 0
    for requirement in REQUIREMENTS:
        assert requirement.key in done.output
        assert requirement.meaning in done.output or argument == "--json"
    if argument == "--json":
        assert json.loads(done.output) == json_schema()
