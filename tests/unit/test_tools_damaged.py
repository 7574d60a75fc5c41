"""Damaged output of every tool ends in typed data or in one CraterError, never in a traceback."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import tool_samples as samples
from hypothesis import given, settings
from hypothesis import strategies as st

from crater_slurm.errors import CraterError
from crater_slurm.probe import nvml
from crater_slurm.probe.tools import (
    amd_smi,
    dmidecode,
    lspci,
    nvidia_smi,
    nvidia_smi_links,
    nvidia_smi_query,
    nvidia_smi_topo,
    nvme_cli,
)

GARBLE = '\x00\x1b[]{}",:;\t\n\u00b2\u0661\ud800 0-9e99xX./\\GPU'


def table(text: str) -> object:
    return nvidia_smi.cards(nvidia_smi.parse_table(text))


PARSERS: dict[str, Callable[[str], object]] = {
    "table": table,
    "list": nvidia_smi.parse_list,
    "query": nvidia_smi_query.parse,
    "topo": nvidia_smi_topo.parse,
    "links": nvidia_smi_links.parse,
    "lspci": lspci.parse,
    "amd_smi": amd_smi.parse,
    "dmidecode": dmidecode.parse,
    "nvme list": nvme_cli.parse_list,
    "smart log": nvme_cli.parse_smart_log,
    "nvml": lambda text: nvml.decode(text, []),
}
SAMPLES: dict[str, list[str]] = {
    "table": [samples.TABLE_MIXED],
    "list": ["GPU 0: A (UUID: GPU-a)\n  MIG 1g.5gb     Device  0: (UUID: MIG-1)\n"],
    "query": [samples.QUERY_TWO],
    "topo": [samples.TOPO_NICS, samples.TOPO_OLD, samples.TOPO_GRACE, samples.TOPO_PASTED],
    "links": [samples.NVLINK_INACTIVE],
    "lspci": [samples.LSPCI_NN],
    "amd_smi": [
        *(samples.AMD_LIST, samples.AMD_STATIC, samples.AMD_TEXT, samples.AMD_LIST_TEXT),
    ],
    "dmidecode": [
        *(samples.DMI_DELL, samples.DMI_SUPERMICRO, samples.DMI_AMD[:4000]),
        *(samples.DMI_QEMU, samples.DMI_OLD),
    ],
    "nvme list": [samples.NVME_FLAT, samples.NVME_NESTED],
    "smart log": [samples.SMART, samples.SMART_STRINGS],
    "nvml": [
        '{"report": {"cards": [{"address": "0000:01:00.0", "model": "A", "peers": [{"address": '
        '"0000:02:00.0", "bandwidth_gb_s": 600.0}], "mig_instances": ["1g.5gb"]}], "driver": "5",'
        ' "cuda": null}, "notes": ["x"]}'
    ],
}
#: What makes a careless pattern or parser take the square of the length.
LONG = [
    "[" * 100_000,
    "9" * 100_000,
    "{" + '"gpu":' * 10_000,
    "GPU 0: " + " " * 100_000,
    "GPU: 0\n    A: b" + " " * 100_000 + "c\n",
    "GPU0\t" * 3000,
    "0000:01:00.0 a: " + "(rev " * 20_000 + "\n\tNUMA node: " + " " * 50_000 + "x",
    "Memory Device\n\tSize: 1 GB\n\tBank Locator: " + "channel " * 10_000,
    "Memory Device" + " " * 50_000 + "x\n\t" + "A" * 50_000,
    "\n" * 100_000,
    " \n" * 50_000 + "x",
]
_SECTIONS = {
    "table": "idle :: query-gpu (csv",
    "list": "capabilities :: list",
    "query": "idle :: query (-q)",
    "topo": "capabilities :: topo",
    "links": "capabilities :: nvlink",
}


@cache
def captured(tool: str) -> list[str]:
    """Captured output of a tool; none where the captures aren't."""
    folder = samples.CAPTURES
    patterns = {"lspci": "lspci*", "amd_smi": "amd-smi*", "table": "*.csv", "links": "*c2c*"}
    texts = [
        file.read_text()
        for file in sorted(folder.glob(f"virtualclient/{patterns.get(tool, 'none')}"))
    ]
    for file in sorted(folder.glob("nvidia_gpu_exporter/linux*.txt")):
        for title, text in samples.sections(file.read_text()).items():
            if tool in _SECTIONS and title.startswith(_SECTIONS[tool]):
                texts.append(text)
    return texts


def read(tool: str, text: str) -> None:
    """Anything but a result and a CraterError is the test's failure."""
    try:
        PARSERS[tool](text)
    except CraterError as error:
        assert str(error)
        assert len(str(error)) < 2000


@st.composite
def damage(draw: st.DrawFn) -> Callable[[str], str]:
    """Cuts a text, shuffles its lines, and puts other characters into it."""
    start, end = draw(st.floats(0, 0.3)), draw(st.floats(0.3, 1))
    seed = draw(st.none() | st.integers(0, 2**16))
    edits = draw(st.lists(st.tuples(st.floats(0, 1), st.text(GARBLE, max_size=8)), max_size=12))

    def apply(text: str) -> str:
        text = text[int(start * len(text)) : int(end * len(text)) + 1] if start else text
        lines = text.splitlines(keepends=True)
        if seed is not None:
            random.Random(seed).shuffle(lines)
        text = "".join(lines)
        for place, instead in edits:
            at = int(place * len(text))
            text = text[:at] + instead + text[at + len(instead) // 2 :]
        return text

    return apply


@pytest.mark.parametrize("tool", PARSERS)
@given(data=st.data())
@settings(max_examples=150)
def test_damaged_samples(tool: str, data: st.DataObject) -> None:
    read(tool, data.draw(damage())(data.draw(st.sampled_from(SAMPLES[tool]))))


@pytest.mark.parametrize(
    "tool", [t for t in PARSERS if t in _SECTIONS or t in ("lspci", "amd_smi")]
)
@given(data=st.data())
@settings(max_examples=60)
def test_damaged_captures(tool: str, data: st.DataObject) -> None:
    texts = captured(tool)
    if not texts:
        pytest.skip("no captures (CRATER_TEST_DATA)")
    read(tool, data.draw(damage())(data.draw(st.sampled_from(texts))))


@pytest.mark.parametrize("tool", PARSERS)
@given(text=st.text(max_size=200) | st.text(GARBLE, max_size=200))
@settings(max_examples=100)
def test_any_text(tool: str, text: str) -> None:
    read(tool, text)


@given(
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    [
                        *("gpu", "gpu_data", "bdf", "asic", "vram", "size", "value", "unit"),
                        *("Devices", "Subsystems", "Controllers", "Namespaces", "NameSpace"),
                        *("DevicePath", "Address", "percent_used", "critical_warning"),
                        *(
                            "report",
                            "cards",
                            "peers",
                            "notes",
                            "driver",
                            "cuda",
                            "address",
                            "mig_instances",
                        ),
                    ]
                ),
                inner,
                max_size=4,
            )
        ),
        max_leaves=15,
    ),
    tool=st.sampled_from(["amd_smi", "nvme list", "smart log", "nvml"]),
)
@settings(max_examples=400)
def test_json_of_any_shape(value: Any, tool: str) -> None:
    read(tool, json.dumps(value))


@pytest.mark.parametrize("tool", PARSERS)
@pytest.mark.parametrize("text", LONG, ids=range(len(LONG)))
def test_deep_and_long_text_takes_no_minutes(tool: str, text: str) -> None:
    start = time.process_time()
    read(tool, text)
    assert time.process_time() - start < 5
