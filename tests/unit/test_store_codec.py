"""Profiles and decisions as plain data and back; every mistake in a profile is refused."""

from __future__ import annotations

import dataclasses
import json
from datetime import UTC, datetime
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from store_samples import NOON, plain_profile, rich_decision, rich_profile

from crater_slurm.errors import StoreError, UsageError
from crater_slurm.model.plan import Mode, Verdict
from crater_slurm.model.profile import (
    Cpu,
    Gpu,
    Method,
    NodeProfile,
    NumaNode,
    NvLink,
    Nvme,
    Provenance,
)
from crater_slurm.store.codec import profile_from_dict, profile_to_dict
from crater_slurm.store.decisions import decision_from_dict, decision_to_dict
from crater_slurm.store.readers import PRECISIONS, READERS

# Writing


def test_a_profile_is_written_as_people_write_it() -> None:
    data = profile_to_dict(rich_profile())
    assert data["numa_nodes"][0] == {
        "id": 0,
        "cpus": "0-3,8-11",
        "socket": 0,
        "memory_mib": 257536,
        "memory_bandwidth_gb_s": 0.1 + 0.2,
        "distances": [10, 32, 80],
        "kind": "cpu",
        "remote_bandwidth_gb_s": [138.7, 60.25, 1 / 3],
        "firmware_bandwidth_gb_s": 131.072,
        "firmware_latency_ns": 26,
    }
    assert data["numa_nodes"][2] == {"id": 4, "cpus": "", "kind": "gpu_memory"}
    assert data["cpu"]["l3_caches"] == [
        {"cpus": "0-3,8-11", "size_kib": 32768},
        {"cpus": "4-7"},
    ]
    assert data["pci_devices"][0]["local_cpus"] == "0-3"
    assert data["pci_devices"][0]["link"] == {"speed_gt_s": 8.0, "width": 8}
    assert data["pci_devices"][2] == {"address": "10000:01:00.0", "kind": "nvme"}
    assert data["software"] == {"kernel": "6.12.9-amd64", "gpu_driver": "590.48.01", "cuda": "13.1"}
    assert data["gpus"][0]["precisions"] == ["bf16", "fp16"]
    assert data["gpus"][0]["nvlinks"] == [
        {"peer": 0, "bandwidth_gb_s": 600.0},
        {"peer": 3, "bandwidth_gb_s": 600.0},
        {"peer": 2},
    ]
    assert data["gpus"][3] == {"index": 3, "model": "t4"}
    assert data["source"] == {"method": "derived", "time": "2026-03-01T12:00:00.123456Z"}
    assert data["provenance"]["gpus[0].sm_count"] == {"method": "catalogue"}


def test_unknown_values_are_left_out_but_an_empty_set_is_a_value() -> None:
    data = profile_to_dict(plain_profile())
    assert data == {
        "name": "cn01",
        "cpu": {"sockets": 1, "cores_per_socket": 2, "threads_per_core": 1},
        "numa_nodes": [{"id": 0, "cpus": "0-1"}],
        "source": {"method": "declared"},
    }
    no_avx = dataclasses.replace(
        plain_profile(), cpu=Cpu(sockets=1, cores_per_socket=2, avx=frozenset())
    )
    assert profile_to_dict(no_avx)["cpu"]["avx"] == []
    assert profile_from_dict(profile_to_dict(no_avx)).cpu.avx == frozenset()


def test_a_time_in_another_zone_is_written_in_utc() -> None:
    source = Provenance(Method.MEASURED, datetime.fromisoformat("2026-03-01T13:00:00+01:00"))
    data = profile_to_dict(dataclasses.replace(plain_profile(), source=source))
    assert data["source"]["time"] == "2026-03-01T12:00:00Z"


# Round trips

_text = st.text(
    st.characters(codec="utf-8", exclude_categories=["C", "Z"], include_characters=" "),
    min_size=1,
    max_size=30,
).filter(str.strip)
_maybe = st.none()
_positive = st.floats(min_value=0.001, max_value=20_000)
_provenance = st.builds(
    Provenance,
    st.sampled_from(Method),
    _maybe | st.datetimes(datetime(1990, 1, 1), datetime(2100, 1, 1), timezones=st.just(UTC)),  # noqa: DTZ001
)


@st.composite
def profiles(draw: st.DrawFn) -> NodeProfile:
    sockets, cores, threads = draw(
        st.tuples(st.integers(1, 4), st.integers(1, 8), st.integers(1, 2))
    )
    ids = draw(st.lists(st.integers(0, 1023), unique=True, max_size=4))
    owner = [draw(st.sampled_from([None, *ids])) for _ in range(sockets * cores * threads)]
    numa_ids = st.sampled_from([None, *ids])
    indices = draw(st.lists(st.integers(0, 1023), unique=True, max_size=4))
    profile = NodeProfile(
        name=draw(st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,20}", fullmatch=True)),
        cpu=Cpu(
            model=draw(_maybe | _text),
            arch=draw(_maybe | _text),
            sockets=sockets,
            cores_per_socket=cores,
            threads_per_core=threads,
            avx=draw(_maybe | st.frozensets(st.sampled_from(["avx", "avx2", "avx512f"]))),
        ),
        numa_nodes=tuple(
            NumaNode(
                id=i,
                cpus=tuple(cpu for cpu, node in enumerate(owner) if node == i),
                socket=draw(_maybe | st.integers(0, 3)),
                memory_mib=draw(_maybe | st.integers(0, 2**31)),
                memory_bandwidth_gb_s=draw(_maybe | _positive),
                distances=tuple(draw(st.lists(st.integers(0, 255), max_size=4))),
            )
            for i in ids
        ),
        gpus=tuple(
            Gpu(
                index=i,
                model=draw(_text),
                gres_type=draw(_maybe | _text),
                uuid=draw(_maybe | _text),
                pci_bus_id=draw(_maybe | _text),
                numa_node=draw(numa_ids),
                sm_count=draw(_maybe | st.integers(1, 10_000)),
                tensor_cores=draw(_maybe | st.booleans()),
                memory_mib=draw(_maybe | st.integers(1, 2**24)),
                memory_bandwidth_gb_s=draw(_maybe | _positive),
                precisions=draw(_maybe | st.frozensets(st.sampled_from(PRECISIONS))),
                compute_capability=draw(_maybe | _text),
                nvlinks=tuple(NvLink(k, draw(_maybe | _positive)) for k in indices if k != i),
                mig_capable=draw(_maybe | st.booleans()),
                mig_instances=tuple(draw(st.lists(_text, max_size=2))),
            )
            for i in indices
        ),
        nvmes=tuple(
            Nvme(
                name=name,
                stable_id=draw(_maybe | _text),
                size_gb=draw(_maybe | st.integers(0, 10**6)),
                numa_node=draw(numa_ids),
                random_read_iops=draw(_maybe | st.integers(0, 10**9)),
                read_latency_us=draw(_maybe | _positive),
                iops_stability_ratio=draw(_maybe | st.floats(0, 1)),
                sequential_write_mb_s=draw(_maybe | st.floats(0, 10**6)),
            )
            for name in draw(st.lists(_text, unique=True, max_size=2))
        ),
        memory_mib=draw(_maybe | st.integers(1, 2**31)),
        cache_gb=draw(_maybe | st.integers(0, 10**7)),
        source=draw(_provenance),
    )
    paths = [path for path, _ in profile.values()]
    chosen = draw(st.lists(st.sampled_from(paths), unique=True, max_size=5))
    return dataclasses.replace(profile, provenance={path: draw(_provenance) for path in chosen})


@given(profiles())
@settings(max_examples=60)
def test_any_profile_survives_json_and_yaml(profile: NodeProfile) -> None:
    data = profile_to_dict(profile)
    assert profile_from_dict(json.loads(json.dumps(data))) == profile
    assert profile_from_dict(yaml.safe_load(yaml.safe_dump(data, allow_unicode=True))) == profile


def test_every_field_of_every_class_has_a_reader() -> None:
    for kind, readers in READERS.items():
        assert set(readers) == {field.name for field in dataclasses.fields(kind)}, kind


def test_the_rich_sample_survives() -> None:
    assert profile_from_dict(profile_to_dict(rich_profile())) == rich_profile()


# Reading what people write


def reading(**changes: Any) -> NodeProfile:
    return profile_from_dict({**profile_to_dict(rich_profile()), **changes})


@pytest.mark.parametrize(
    "cpus", ["0-3,8-11", ["0-3", "8-11"], [0, 1, 2, 3, "8-11"], [0, 1, 2, 3, 8, 9, 10, 11]]
)
def test_cpus_may_be_a_kernel_list_or_a_list_of_them(cpus: object) -> None:
    node = {"id": 0, "cpus": cpus}
    found = reading(numa_nodes=[node], gpus=[], nvmes=[], provenance={})
    assert found.numa_nodes[0].cpus == (0, 1, 2, 3, 8, 9, 10, 11)


def test_one_cpu_may_be_a_number() -> None:
    found = reading(numa_nodes=[{"id": 0, "cpus": 5}], gpus=[], nvmes=[], provenance={})
    assert found.numa_nodes[0].cpus == (5,)


def test_null_means_unknown() -> None:
    assert reading(memory_mib=None).memory_mib is None


def test_a_yaml_timestamp_and_a_time_without_zone_are_utc() -> None:
    data = yaml.safe_load("{method: measured, time: 2026-03-01T12:00:00.123456Z}")
    assert reading(source=data).source == Provenance(Method.MEASURED, NOON)
    naive = {"method": "measured", "time": "2026-03-01T12:00:00.123456"}
    assert reading(source=naive).source == Provenance(Method.MEASURED, NOON)


def test_the_given_name_wins() -> None:
    assert profile_from_dict(profile_to_dict(rich_profile()), "gn77").name == "gn77"


# Refusing

SET_GPU = "gpus", 0
MISTAKES: list[tuple[tuple[Any, ...], Any, str]] = [
    (("gpu",), [], "gn01: gpu: unknown 'gpu'; did you mean gpus?"),
    (
        (*SET_GPU, "sm_cuont"),
        108,
        "gn01: gpus[0].sm_cuont: unknown 'sm_cuont'; did you mean sm_count",
    ),
    (
        (*SET_GPU, "sm_count"),
        "108",
        "gn01: gpus[0].sm_count: '108' is not a whole number from 1 to",
    ),
    ((*SET_GPU, "sm_count"), 108.0, "108.0 is not a whole number"),
    ((*SET_GPU, "sm_count"), True, "True is not a whole number"),
    ((*SET_GPU, "sm_count"), 0, "0 is not a whole number from 1"),
    ((*SET_GPU, "memory_mib"), 2**40, "is not a whole number from 1 to 16777216 MiB"),
    ((*SET_GPU, "memory_bandwidth_gb_s"), 1_555_000, "is not a number above 0 up to 100000 GB/s"),
    ((*SET_GPU, "memory_bandwidth_gb_s"), float("nan"), "nan is not a number"),
    ((*SET_GPU, "memory_bandwidth_gb_s"), 0, "0 is not a number above 0"),
    ((*SET_GPU, "tensor_cores"), "yes", "'yes' is not true or false"),
    ((*SET_GPU, "precisions"), "bf16", "'bf16' is not a list"),
    (
        (*SET_GPU, "precisions"),
        ["bf61"],
        "gpus[0].precisions[0]: unknown 'bf61'; did you mean bf16?",
    ),
    ((*SET_GPU, "compute_capability"), 8.0, "put it in quotes if it looks like a number"),
    ((*SET_GPU, "model"), "a" * 256, "gpus[0].model: 256 characters are more than 255"),
    ((*SET_GPU, "model"), "a\x1b[31m", "is not a printable text"),
    ((*SET_GPU, "model"), None, "gn01: gpus[0].model is missing"),
    ((*SET_GPU, "numa_node"), -1, "leave it out when it is not known"),
    ((*SET_GPU, "numa_node"), 7, "gpus[0].numa_node: 7 is not in numa_nodes [0, 1, 4]"),
    (
        (*SET_GPU, "nvlinks"),
        [{"peer": 9}],
        "gpus[0].nvlinks: peer 9 is not another GPU of [1, 0, 2, 3]",
    ),
    ((*SET_GPU, "nvlinks"), [{"peer": 1}], "peer 1 is not another GPU"),
    ((*SET_GPU, "nvlinks"), [{"peer": 0}, {"peer": 0}], "nvlinks: peer 0 is there twice"),
    (("gpus", 1, "index"), 1, "gn01: gpus: index 1 is there twice"),
    (("nvmes", 1, "name"), "nvme0n1", "gn01: nvmes: name 'nvme0n1' is there twice"),
    (("nvmes", 0, "iops_stability_ratio"), 1.2, "is not a number from 0 to 1"),
    (("nvmes", 0, "random_read_iops"), -5, "IOPS"),
    (("numa_nodes", 1, "id"), 0, "gn01: numa_nodes: id 0 is there twice"),
    (("numa_nodes", 1, "cpus"), "3-5", "CPUs 3 are in node 0 and in node 1; each CPU has one"),
    (("numa_nodes", 1, "cpus"), "7-4", "numa_nodes[1].cpus: the range '7-4' runs backwards"),
    (("numa_nodes", 1, "cpus"), "0-99999999", "runs backwards or beyond"),
    (("numa_nodes", 1, "cpus"), 4.5, '4.5 is not a list of CPUs such as "0-7,64-71"'),
    (
        ("numa_nodes", 1, "cpus"),
        "4-7,12-20",
        "list 21 CPUs, but cpu has only 16 (2 sockets x 4 cores",
    ),
    (("cpu", "sockets"), 0, "gn01: cpu.sockets: 0 is not"),
    (("cpu",), {"sockets": 2}, "gn01: cpu.cores_per_socket is missing"),
    (("cpu",), "EPYC", "gn01: cpu: 'EPYC' is not a mapping"),
    (("cpu", "avx"), ["AVX2"], "cpu.avx[0]: 'AVX2' is not a lower-case word"),
    (
        ("source",),
        {"method": "guessed"},
        "source.method: 'guessed' is not one of measured, derived",
    ),
    (("source",), {"method": "measured", "time": "noon"}, "'noon' is not an ISO time"),
    (("provenance",), {"gpus[9].model": {"method": "declared"}}, "has no value of that path"),
    (("provenance",), {"gpus[0].colour": {"method": "declared"}}, "has no value of that path"),
    (("provenance",), {"name": {"method": "declared"}}, "has no value of that path"),
    (("name",), "../etc", "name: '../etc' is not a node name such as gn01"),
    (("name",), None, "name: None is not a node name"),
    ((3,), 1, "the key 3 must be a text"),
]


@pytest.mark.parametrize(("path", "value", "message"), MISTAKES)
def test_a_mistake_is_refused_with_its_path(
    path: tuple[Any, ...], value: Any, message: str
) -> None:
    data = profile_to_dict(rich_profile())
    place: Any = data
    for part in path[:-1]:
        place = place[part]
    place[path[-1]] = value
    with pytest.raises(UsageError) as caught:
        profile_from_dict(data)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("data", [None, [], "gn01", 7])
def test_what_is_no_mapping_is_no_profile(data: Any) -> None:
    with pytest.raises(UsageError, match="is not a mapping"):
        profile_from_dict(data)


# Decisions


def test_a_decision_survives_json() -> None:
    decision = rich_decision()
    assert decision_from_dict(json.loads(json.dumps(decision_to_dict(decision)))) == decision


def test_a_decision_with_nothing_but_the_needed_survives() -> None:
    data = {"id": "d", "verdict": "refused", "mode": "advise", "time": 1.5, "user_id": 7}
    decision = decision_from_dict(data)
    assert (decision.verdict, decision.mode, decision.plan) == (Verdict.REFUSED, Mode.ADVISE, None)
    assert decision.conditions == ()
    assert decision_from_dict(decision_to_dict(decision)) == decision


def test_keys_of_a_newer_version_are_passed_over() -> None:
    data = decision_to_dict(rich_decision())
    data["from_the_future"] = 1
    data["plan"]["colour"] = "blue"
    data["conditions"][0]["weight"] = 0.5
    data["excluded"][0].append("more")
    assert decision_from_dict(data) == rich_decision()


@pytest.mark.parametrize(
    ("key", "value"), [("verdict", "postponed"), ("id", None), ("conditions", [{"name": "x"}])]
)
def test_a_decision_that_cannot_be_understood_says_so(key: str, value: Any) -> None:
    data = decision_to_dict(rich_decision())
    data[key] = value
    if value is None:
        del data[key]
    with pytest.raises(StoreError, match="can't read the decision"):
        decision_from_dict(data)
