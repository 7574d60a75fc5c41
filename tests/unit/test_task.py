"""The task schema: what is taken, and what each mistake is told. A new case is two files:

``tasks/valid/NNN-name.json`` beside ``tasks/expected/valid-NNN-name.sh`` (the rendered script) or
``tasks/invalid/NNN-name.json`` beside ``tasks/expected/invalid-NNN-name.txt`` (a problem a line).
"""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from task_documents import CASES, LLAMA, llama, paths, put, without

from crater_slurm.alldata import waiting
from crater_slurm.alldata.document import MOST_BYTES, Problem, TaskError, pointer
from crater_slurm.alldata.journal import BusyError
from crater_slurm.alldata.request import counterparts, directive_lines, request_of
from crater_slurm.alldata.sending import ConflictError, RefusedError, UnknownOutcomeError
from crater_slurm.alldata.task import fingerprint, json_schema, parse
from crater_slurm.cli.main import crater
from crater_slurm.errors import CraterError, SlurmError, UnavailableError, UsageError
from crater_slurm.model.directives import parse_script
from crater_slurm.model.request import BY_KEY, REQUIREMENTS, Request

VALID = sorted((CASES / "valid").glob("*.json"))
INVALID = sorted((CASES / "invalid").glob("*.json"))
EVERY = json.loads((CASES / "valid" / "003-every-field.json").read_text())
#: Everything in it that is an object.
BLOCKS = sorted({p[:-1] for p in paths(EVERY)} - {()})
#: The same wishes as the task with every field, as a user of directives writes them.
EVERY_DIRECTIVE = """\
#CRATER task=llm_finetune model=Llama-3-8B model-params=8.03B method=lora framework=torchtune
#CRATER precision=bf16 quantization=none optimizer=adamw lora-rank=16 micro-batch=2
#CRATER sequence-length=2048 activation-checkpointing=yes sharding=zero2 tensor-parallel=2
#CRATER pipeline-parallel=2 traced-memory=21001MiB gpus=4 gpu-memory=24000 gpu-type=a100
#CRATER tensor-cores=yes gpu-sharing=no mig=3g.20gb driver=535.104 cuda=12.2
#CRATER cpus=16 physical-cores=yes avx=avx2 memory-bandwidth=70.5GB/s
#CRATER ssd-iops=300k ssd-latency=87.2us cache=200GB io-pattern=random checkpoint=s3://bucket/llama
#CRATER checkpoint-credentials=own:research checkpoint-keep=3 checkpoint-keep-every=1000 ring=16GB
#CRATER stage=/data/sets,s3://bucket/set
#CRATER numa=strict max-wait=24m min-gpu-utilization=65 preemptible=no mode=advise
"""


def problems(document: Any) -> list[Problem]:
    text = document if isinstance(document, str | bytes) else json.dumps(document)
    with pytest.raises(TaskError) as raised:
        parse(text)
    return list(raised.value.problems)


@pytest.mark.parametrize("case", VALID, ids=lambda p: p.stem)
def test_a_valid_task_is_taken_and_matches_the_schema(case: object) -> None:
    text = case.read_bytes()  # type: ignore[attr-defined]
    assert parse(text).task_id == json.loads(text)["task_id"]
    jsonschema.Draft202012Validator(json_schema()).validate(json.loads(text))


@pytest.mark.parametrize("case", INVALID, ids=lambda p: p.stem)
def test_an_invalid_task_gives_every_problem_at_once(case: object) -> None:
    expected = CASES / "expected" / f"invalid-{case.stem}.txt"  # type: ignore[attr-defined]
    found = problems(case.read_bytes())  # type: ignore[attr-defined]
    assert [str(problem) for problem in found] == expected.read_text().splitlines()


def test_every_case_has_its_pair() -> None:
    pairs = {f"valid-{p.stem}.sh" for p in VALID} | {f"invalid-{p.stem}.txt" for p in INVALID}
    assert {p.name for p in (CASES / "expected").iterdir()} == pairs


def test_the_source_text_s_task_asks_for_what_it_says() -> None:
    assert request_of(parse(LLAMA.read_bytes())) == Request(
        task="llm_finetune",
        model="Llama-3-8B",
        precision="bf16",
        quantization="none",
        gpus=2,
        gpu_memory_mib=16384,
        gpu_type="a100-pcie-40gb",
        cpus=32,
        avx="avx512",
        memory_bandwidth_gb_s=140.0,
        ssd_iops=800_000,
        ssd_latency_us=100.0,
        io_pattern="random",
        max_wait_seconds=1800,
        min_gpu_utilization_percent=65,
    )


# Every field of the source text: missing, of a wrong type, beside an unknown one.

_REQUIRED = paths(llama())


@pytest.mark.parametrize("path", _REQUIRED, ids=lambda p: pointer(*p))
def test_a_field_that_is_missing_is_named(path: tuple[str, ...]) -> None:
    (found,) = problems(without(llama(), path))
    assert (found.pointer, found.code, found.value) == (pointer(*path), "missing", None)
    assert found.message.startswith("is missing")


_WISHES = [p for p in _REQUIRED if p[-1] not in {"task_id", "task_type", "count"}]
_NEEDED_BLOCKS = {"resource_requirements", "gpu", "cpu"}


@pytest.mark.parametrize("path", _WISHES, ids=lambda p: pointer(*p))
def test_null_says_that_there_is_no_wish(path: tuple[str, ...]) -> None:
    document = put(llama(), path, None)
    if path[-1] in _NEEDED_BLOCKS:
        (found,) = problems(document)
        assert (found.pointer, found.message) == (pointer(*path), "must be an object")
    else:
        parse(json.dumps(document))


@pytest.mark.parametrize("path", paths(EVERY), ids=lambda p: pointer(*p))
@pytest.mark.parametrize("wrong", [[[1]], {"no": "such"}], ids=["a list", "an object"])
def test_a_value_of_a_wrong_type_is_shown(path: tuple[str, ...], wrong: Any) -> None:
    found = problems(put(EVERY, path, wrong))
    here = [p for p in found if p.pointer.startswith(pointer(*path))]
    assert here == found or "run_config" in path
    assert here
    assert all(p.message for p in here)


@pytest.mark.parametrize(
    ("path", "wrong", "message"),
    [
        ("task_id", 7, "must be a text"),
        ("task_type", True, "must be a text"),
        ("model_config/name", 3, "must be a text"),
        ("model_config/precision", 16, "must be a text"),
        ("model_config/quantization", True, "must be a text"),
        ("data_config/train_dataset", ["a"], "must be a text"),
        ("data_config/val_dataset", 1, "must be a text"),
        ("data_config/io_pattern", 1, "must be a text"),
        ("resource_requirements/gpu/count", "2", "must be a whole number"),
        ("resource_requirements/gpu/count", True, "must be a whole number"),
        ("resource_requirements/gpu/count", 1.5, "must be a whole number"),
        ("resource_requirements/gpu/memory_mb", "16GiB", "must be a whole number"),
        ("resource_requirements/gpu/type", 100, "must be a text"),
        ("resource_requirements/cpu/cores", "32", "must be a whole number"),
        ("resource_requirements/cpu/avx_support", 512, "must be a text"),
        ("resource_requirements/memory/bandwidth_gbps", "140", "must be a number"),
        ("resource_requirements/memory/bandwidth_gbps", False, "must be a number"),
        ("resource_requirements/ssd/iops_min", "800k", "must be a whole number"),
        ("resource_requirements/ssd/latency_us_max", "100us", "must be a number"),
        ("sla/max_queue_time_seconds", "30m", "must be a whole number"),
        ("sla/min_gpu_utilization_percent", "65%", "must be a whole number"),
        ("run_config/command", "python3 train.py", "must be a list of texts"),
        ("run_config/command", ["a", 1], "must be a list of texts; number 1 is none"),
        ("training_config/activation_checkpointing", 1, "must be true or false"),
        ("topology_awareness/enable_numa_binding", "yes", "must be true or false"),
    ],
)
def test_each_wrong_type_says_the_right_one(path: str, wrong: Any, message: str) -> None:
    (found,) = problems(put(llama(), tuple(path.split("/")), wrong))
    assert (found.pointer, found.code, found.message) == (f"/{path}", "type", message)


@pytest.mark.parametrize(
    ("path", "wrong", "message"),
    [
        ("schema_version", 2, "must be 1 to 1"),
        ("task_id", "", "must have 1 to 128 characters"),
        ("task_id", "a" * 129, "must have 1 to 128 characters"),
        ("task_id", "a b", "must be letters, digits and . _ : -"),
        ("task_id", "../../etc", "must be letters, digits and . _ : -"),
        ("task_type", "llm-finetunes", "did you mean llm_finetune?"),
        ("model_config/precision", "bf17", "did you mean bf16?"),
        ("model_config/quantization", "int3", "takes none, int8, int4, nf4, gptq, awq"),
        ("model_config/parameters", 0, "must be at least 1"),
        ("data_config/io_pattern", "zigzag", "takes sequential, random, many_small"),
        ("resource_requirements/gpu/count", -1, "must be at least 0"),
        ("resource_requirements/gpu/count", 1025, "must be at most 1,024"),
        ("resource_requirements/gpu/count", 10**300, "is no finite number"),
        ("resource_requirements/gpu/memory_mb", 0, "must be at least 1 MiB"),
        ("resource_requirements/gpu/mig", "half", "must be a MIG profile"),
        ("resource_requirements/gpu/driver_min", "new", "must be a version"),
        ("resource_requirements/cpu/cores", 0, "must be at least 1"),
        ("resource_requirements/cpu/cores", 8193, "must be at most 8,192"),
        ("resource_requirements/cpu/avx_support", "sse", "takes avx, avx2"),
        ("resource_requirements/memory/bandwidth_gbps", 0.5, "must be at least 1 GB/s"),
        ("resource_requirements/memory/bandwidth_gbps", 100001, "must be at most 100,000 GB/s"),
        ("resource_requirements/ssd/iops_min", 0, "must be at least 1 IOPS"),
        ("resource_requirements/ssd/latency_us_max", 0, "must be at least 0.1 µs"),
        ("sla/max_queue_time_seconds", 0, "must be at least 1 s"),
        ("sla/max_queue_time_seconds", 10**9, "must be at most 31,622,400 s"),
        ("sla/min_gpu_utilization_percent", 101, "must be at most 100 %"),
        ("training_config/stage", "LORA", "takes pretrain, sft, lora"),
        ("checkpoint_config/destination", "here", "takes on, off, an absolute path"),
        ("checkpoint_config/destination", "/a/../b", "must not contain .."),
        ("scheduling_config/partition", "a;b", "must be a name"),
        ("scheduling_config/account", "-x", "must be a name"),
        ("scheduling_config/time_limit_seconds", 59, "must be 60 to"),
        ("scheduling_config/nodes", 0, "must be 1 to 100,000"),
        ("run_config/name", "a b", "must be a name"),
        ("run_config/working_directory", "here", "must be an absolute path"),
        ("run_config/container", {"image": "--nv"}, "must be a path or a registry's name"),
        ("run_config/container", {"image": "a,b"}, "must be a path or a registry's name"),
        ("run_config/container", {"image": "a", "mounts": ["/a"]}, "must be host:container"),
        ("run_config/container", {"image": "a", "mounts": ["/a:/b,c"]}, "must not hold commas"),
        ("run_config/container", {"image": "a", "mounts": ["/a:/../b"]}, "must be an absolute"),
        ("run_config/container", {"image": "a", "mounts": ["a:/b"]}, "must be an absolute path"),
    ],
)
def test_each_value_out_of_range_says_what_is_valid(path: str, wrong: Any, message: str) -> None:
    (found,) = problems(put(llama(), tuple(path.split("/")), wrong))
    assert found.pointer.startswith(f"/{path}")
    assert message in found.message


@pytest.mark.parametrize("block", [(), *BLOCKS], ids=lambda p: pointer(*p) or "(the task)")
def test_an_unknown_field_is_an_error_wherever_it_stands(block: tuple[str, ...]) -> None:
    (found,) = problems(put(EVERY, (*block, "colour"), "red"))
    assert (found.pointer, found.code) == (pointer(*block, "colour"), "unknown")
    assert found.value == '"red"'
    assert "Valid here are" in found.message


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("taskid", "task_id"),
        ("task_sla", "sla"),
        ("model", "model_config"),
        ("model_config/precison", "precision"),
        ("resource_requirements/gpus", "gpu"),
        ("resource_requirements/gpu/mem_mb", "memory_mb"),
        ("resource_requirements/memory/bandwidth_gb_s", "bandwidth_gbps"),
        ("sla/max_queue_seconds", "max_queue_time_seconds"),
        ("run_config/args", "arguments"),
    ],
)
def test_an_unknown_field_names_the_nearest_known_one(path: str, meant: str) -> None:
    (found,) = problems(put(llama(), tuple(path.split("/")), 1))
    assert f"did you mean {meant}?" in found.message


# What is no task at all, and what hides in one.


@pytest.mark.parametrize(
    ("text", "pointer_", "message"),
    [
        ("", "", "is no JSON: Expecting value in line 1, column 1"),
        ("{", "", "is no JSON: Expecting property name"),
        ("[]", "", "must be a JSON object"),
        ("null", "", "must be a JSON object"),
        (b"\xff\xfe", "", "is not UTF-8: byte 0 can't be read"),
        ("[" * 100_000, "", "is nested deeper than 12 levels"),
        (b"[" * 200_000, "", "is nested deeper than 12 levels"),
        ('{"a": "' + "x" * 2**20 + '"}', "", "has 1,048,585 bytes; a task has at most 262,144"),
    ],
)
def test_what_is_no_task_is_refused_as_a_whole(
    text: str | bytes, pointer_: str, message: str
) -> None:
    (found,) = problems(text)
    assert (found.pointer, found.value in (None, "an empty list", "null")) == (pointer_, True)
    assert message in found.message


def test_what_can_mean_two_things_is_refused() -> None:
    twice = json.dumps(llama()).replace('"count": 2', '"count": 2, "count": 4')
    (found,) = problems(twice)
    assert (found.pointer, found.code) == ("/resource_requirements/gpu/count", "twice")


@pytest.mark.parametrize("word", ["NaN", "Infinity", "-Infinity", "1e999", "9" * 5000, "-1e400"])
def test_numbers_without_bounds_are_refused(word: str) -> None:
    text = json.dumps(llama()).replace("140", word)
    (found,) = problems(text)
    assert (found.pointer, found.code) == (
        "/resource_requirements/memory/bandwidth_gbps",
        "number",
    )


@pytest.mark.parametrize(
    "hidden", ["a\nb", "a\x00b", "a\rb", "\x1b[2J", "a\u2028b", "\ud800", "\u202e"]
)
@pytest.mark.parametrize("path", ["model_config/name", "data_config/train_dataset", "task_id"])
def test_no_text_can_end_a_line_or_hide(path: str, hidden: str) -> None:
    found = problems(put(llama(), tuple(path.split("/")), hidden))
    assert [p.pointer for p in found] == [f"/{path}"]
    assert str(found[0]).isprintable()


def test_an_argument_can_t_either_and_is_found_in_its_list() -> None:
    document = put(llama(), ("run_config",), {"command": ["echo", "a\nb"]})
    (found,) = problems(document)
    assert (found.pointer, found.value) == ("/run_config/command/1", '"a\\nb"')


def test_texts_lists_and_levels_have_bounds() -> None:
    (long,) = problems(put(llama(), ("data_config", "train_dataset"), "x" * 100_000))
    assert long.message == "has 100,000 characters; a text has at most 4,096"
    assert len(str(long)) < 300
    (many,) = problems(put(llama(), ("run_config",), {"command": ["a"] * 2000}))
    assert "has 2,000 entries" in many.message
    deep: Any = 1
    for _ in range(40):
        deep = [deep]
    found = problems(put(llama(), ("sla", "x"), deep))
    assert {p.code for p in found} == {"depth", "unknown"}


def test_a_flood_of_mistakes_is_cut_short() -> None:
    document = llama() | {f"x{n}": n for n in range(900)}
    with pytest.raises(TaskError) as raised:
        parse(json.dumps(document))
    assert len(str(raised.value).splitlines()) == 101
    assert str(raised.value).endswith("and 800 more problems")


def test_a_hostile_key_is_shown_harmlessly() -> None:
    found = problems(llama() | {"a\n\x1b[2J/~": 1, "y" * 5000: 2})
    assert [p.code for p in found] == ["unknown", "unknown"]
    assert all(str(p).isprintable() and len(str(p)) < 500 for p in found)
    assert found[0].pointer == "/a\\n\\u001b[2J~1~0"


@pytest.mark.parametrize(
    ("path", "value", "at", "message"),
    [
        (
            "topology_awareness",
            {"enable_numa_binding": True},
            "/topology_awareness/numa_binding_policy",
            "is needed with enable_numa_binding",
        ),
        (
            "topology_awareness",
            {"enable_numa_binding": False, "numa_binding_policy": "strict"},
            "/topology_awareness/numa_binding_policy",
            "contradicts enable_numa_binding",
        ),
        (
            "run_config",
            {"command": ["a"], "script": "b"},
            "/run_config/script",
            "is given beside command",
        ),
        ("run_config", {"command": []}, "/run_config/command", "names no program"),
        ("run_config", {"arguments": ["a"]}, "/run_config/arguments", "belong to no program"),
    ],
)
def test_contradictions_are_told(path: str, value: Any, at: str, message: str) -> None:
    (found,) = problems(put(llama(), (path,), value))
    assert found.pointer == at
    assert message in found.message


def test_a_task_without_gpus_says_nothing_of_them() -> None:
    found = problems(put(llama(), ("resource_requirements", "gpu", "count"), 0))
    assert [p.pointer for p in found] == [
        "/resource_requirements/gpu/memory_mb",
        "/resource_requirements/gpu/type",
    ]


# One model, two spellings.


def test_every_directive_has_its_place_in_a_task() -> None:
    assert counterparts().keys() == BY_KEY.keys()


def test_the_task_with_every_field_is_the_script_with_every_directive() -> None:
    from_task = request_of(parse(json.dumps(EVERY)))
    assert from_task == parse_script(EVERY_DIRECTIVE).request
    assert len(from_task.given()) == len(REQUIREMENTS)


@pytest.mark.parametrize("requirement", REQUIREMENTS, ids=lambda r: r.key)
def test_one_directive_and_its_field_are_the_same_wish(requirement: Any) -> None:
    """Said alone, in both spellings, for each value or bound that the directive has."""
    words = requirement.choices or (requirement.example,)
    if requirement.kind == "boolean":
        words = ("yes", "no")
    path = tuple(counterparts()[requirement.key].strip("/").split("/"))
    for word in words:
        value = requirement.parse(word)
        document = put(_bare(requirement.key), path, value)
        assert request_of(parse(json.dumps(document))).given() == {
            "task": "generic",
            "gpus": 0,
        } | parse_script(f"#CRATER {requirement.key}={word}").request.given() | _beside(
            requirement.key
        )


def _beside(key: str) -> dict[str, Any]:
    return {"gpus": 1} if key in {"gpu-memory", "gpu-type", "mig"} else {}


def _bare(key: str) -> dict[str, Any]:
    """A task that says nothing but what it must."""
    none = (CASES / "valid" / "002-no-wish.json").read_text()
    document = dict(json.loads(none))
    blocks = {
        "model_config": dict.fromkeys(("name", "precision", "quantization")),
        "data_config": dict.fromkeys(("train_dataset", "val_dataset", "io_pattern")),
        "sla": dict.fromkeys(("max_queue_time_seconds", "min_gpu_utilization_percent")),
    }
    document |= blocks
    document["resource_requirements"] |= {
        "memory": {"bandwidth_gbps": None},
        "ssd": {"iops_min": None, "latency_us_max": None},
    }
    document["resource_requirements"]["gpu"]["count"] = _beside(key).get("gpus", 0)
    return document


def _values(requirement: Any) -> st.SearchStrategy[Any]:
    low, high = requirement.minimum, requirement.maximum
    if requirement.choices:
        return st.sampled_from(requirement.choices)
    if requirement.kind == "boolean":
        return st.booleans()
    if requirement.kind in {"bandwidth", "latency"}:
        return st.floats(low, high, allow_nan=False)
    if requirement.kind == "version":
        return st.from_regex(r"[0-9]{1,4}(\.[0-9]{1,4}){0,3}", fullmatch=True)
    if requirement.kind == "mig":
        return st.from_regex(r"[1-9]g\.[0-9]{1,3}gb(\+me)?", fullmatch=True)
    if requirement.kind == "destination":
        paths = _line().filter(lambda t: ".." not in t and "%" not in t).map("/{}".format)
        return st.sampled_from(["on", "off"]) | paths
    if requirement.kind in {"word", "stage"}:
        return st.just("/data/set,s3://bucket/set") if requirement.kind == "stage" else _line()
    if requirement.kind == "credentials":
        return st.from_regex(r"site|own(:[A-Za-z0-9][A-Za-z0-9_.@-]{0,63})?", fullmatch=True)
    return st.integers(int(low), int(high))


def _line() -> st.SearchStrategy[str]:
    """One line of anything that can be printed, quotation marks and the like more often."""
    characters = st.sampled_from("'\"\\$`#=;|&<>(){}*?!~% ") | st.characters(codec="utf-8")
    return (
        st.text(characters, min_size=1, max_size=100)
        .map(str.strip)
        .filter(lambda t: t.isprintable() and bool(t))
    )


@given(
    st.fixed_dictionaries({}, optional={r.attribute: _values(r) for r in REQUIREMENTS}).map(
        lambda values: Request(**values)
    )
)
def test_directive_lines_are_read_back_as_the_same_request(request_: Request) -> None:
    lines = directive_lines(request_)
    assert all("\n" not in line and line.startswith("#CRATER ") for line in lines)
    found = parse_script("#!/bin/sh\n" + "\n".join(lines) + "\n")
    assert found.request == request_
    assert not found.notes


@given(st.data())
def test_any_request_can_be_said_as_a_task(data: st.DataObject) -> None:
    document = _bare("gpu-type")
    for requirement in REQUIREMENTS:
        path = tuple(counterparts()[requirement.key].strip("/").split("/"))
        if requirement.key != "gpus" and data.draw(st.booleans()):
            document = put(document, path, data.draw(_values(requirement)))
    request = request_of(parse(json.dumps(document)))
    said = {
        requirement.attribute: value
        for requirement in REQUIREMENTS
        if (value := _at(document, counterparts()[requirement.key])) is not None
    }
    assert request.given() == said
    assert parse_script("\n".join(directive_lines(request))).request == request


def _at(document: Any, where: str) -> Any:
    for key in where.strip("/").split("/"):
        document = (document or {}).get(key)
    return document


def test_a_stage_stands_for_the_method_where_none_is_given() -> None:
    def method(**training: str) -> str | None:
        return request_of(parse(json.dumps(llama() | {"training_config": training}))).method

    assert method(stage="lora") == "lora"
    assert method(stage="rlhf", method="qlora") == "qlora"
    assert method(stage="sft") is None


def test_a_fingerprint_is_of_what_is_said_not_of_how() -> None:
    task = parse(LLAMA.read_bytes())
    other = json.dumps(dict(reversed(llama().items())) | {"schema_version": 1, "run_config": None})
    assert fingerprint(parse(other)) == fingerprint(task)
    changed = put(llama(), ("resource_requirements", "cpu", "cores"), 31)
    assert fingerprint(parse(json.dumps(changed))) != fingerprint(task)


def test_the_case_of_a_word_is_not_looked_at() -> None:
    document = put(llama(), ("model_config", "precision"), "BF16")
    document = put(document, ("data_config", "io_pattern"), "Random_Read")
    assert request_of(parse(json.dumps(document))) == request_of(parse(LLAMA.read_bytes()))


# The schema that is exported.


def test_crater_schema_prints_the_schema() -> None:
    done = CliRunner().invoke(crater, ["schema", "task"])
    assert json.loads(done.output) == json_schema()
    jsonschema.Draft202012Validator.check_schema(json_schema())


@pytest.mark.parametrize("path", _REQUIRED, ids=lambda p: pointer(*p))
def test_the_schema_knows_what_must_be_there(path: tuple[str, ...]) -> None:
    assert not jsonschema.Draft202012Validator(json_schema()).is_valid(without(llama(), path))


def test_the_schema_refuses_what_crater_refuses() -> None:
    schema = jsonschema.Draft202012Validator(json_schema())
    for path, wrong in (
        (("task_id",), "a b"),
        (("colour",), 1),
        (("resource_requirements", "gpu", "count"), -1),
        (("resource_requirements", "gpu", "count"), None),
        (("resource_requirements", "gpu", "count"), "2"),
        (("model_config", "precision"), "bf17"),
        (("sla", "min_gpu_utilization_percent"), 101),
        (("run_config",), {"command": "rm -rf /"}),
    ):
        assert not schema.is_valid(put(llama(), path, wrong)), path


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_no_json_makes_the_reader_fail_otherwise(value: Any) -> None:
    for document in (
        value,
        llama() | {"sla": value},
        put(llama(), ("model_config", "name"), value),
    ):
        try:
            parse(json.dumps(document))
        except TaskError as error:
            assert all(str(problem).isprintable() for problem in error.problems)


@given(st.binary(max_size=200))
def test_no_bytes_make_the_reader_fail_otherwise(data: bytes) -> None:
    with pytest.raises(TaskError):
        parse(data)


def test_the_limit_is_the_documented_one() -> None:
    assert MOST_BYTES == 256 * 1024


# The documentation.

DOCS = CASES.parents[2] / "docs"


def test_the_task_in_the_documentation_is_the_source_text_s() -> None:
    text = (DOCS / "alldata.md").read_text()
    example = re.search(r"```json\n(.*?)```", text, re.DOTALL)
    assert example is not None
    assert json.loads(example.group(1)) == llama()


@pytest.mark.parametrize("path", paths(EVERY), ids=lambda p: pointer(*p))
def test_every_field_is_documented(path: tuple[str, ...]) -> None:
    text = (DOCS / "alldata.md").read_text()
    assert re.search(rf"[`.\"]{path[-1]}[`.\":]", text)


def test_every_directive_s_field_names_it_in_the_documentation() -> None:
    text = (DOCS / "alldata.md").read_text()
    for key, where in counterparts().items():
        assert f"`{key}`" in text or where.rpartition("/")[2].replace("_", "-") == key, key


def test_every_exit_code_of_submit_is_documented() -> None:
    text = (DOCS / "submit.md").read_text().partition("## Exit codes")[2]
    codes = {int(code) for code in re.findall(r"^\| (\d+) \|", text, re.MULTILINE)}
    errors = (CraterError, UsageError, SlurmError, UnavailableError, RefusedError)
    own = {e.exit_code for e in (*errors, ConflictError, UnknownOutcomeError, BusyError)}
    ends = {waiting.TIMED_OUT, waiting.NO_CODE, waiting.CANCELLED, waiting.OUT_OF_MEMORY}
    assert codes == own | ends | {0}
