"""amd-smi in JSON, text and CSV: one captured file, and samples by hand."""

from __future__ import annotations

import pytest
import tool_samples as samples

from crater_slurm.errors import CraterError
from crater_slurm.probe.tools import amd_smi
from crater_slurm.probe.tools.amd_smi import AmdGpu
from crater_slurm.probe.tools.run import Output
from crater_slurm.probe.tools.values import Card, Report


def test_the_captured_metric_of_one_gpu() -> None:
    text = samples.capture("virtualclient/amd-smi__result.txt")
    assert amd_smi.parse(text) == (AmdGpu(index=0, memory_mib=14928),)


def test_a_list_in_json() -> None:
    assert amd_smi.parse(samples.AMD_LIST) == (
        AmdGpu(index=0, address="0000:0c:00.0", uuid="0eff74a1-0000-1000-80b1-3d1f5c64a8d0"),
        AmdGpu(index=1, address="0000:22:00.0", uuid="a3ff74a1-0000-1000-80f2-b04a8e9d1c11"),
    )


def test_static_facts_in_json() -> None:
    assert amd_smi.parse(samples.AMD_STATIC) == (
        AmdGpu(
            index=0,
            address="0000:0c:00.0",
            model="AMD Instinct MI300X",
            memory_mib=196592,
            compute_units=304,
            target="gfx942",
            numa_node=1,
            driver="6.10.5",
        ),
    )


def test_static_facts_in_text() -> None:
    assert amd_smi.parse(samples.AMD_TEXT) == (
        AmdGpu(
            index=0,
            address="0000:63:00.0",
            model="AMD Instinct MI210",
            memory_mib=65520,
            compute_units=104,
            target="gfx90a",
            numa_node=3,
            driver="6.7.0",
        ),
        AmdGpu(index=1, address="0000:83:00.0"),
    )


def test_a_list_in_text() -> None:
    assert amd_smi.parse(samples.AMD_LIST_TEXT) == (
        AmdGpu(index=0, address="0000:63:00.0", uuid="12ff740f-0000-1000-8012-345678901234"),
    )


@pytest.mark.parametrize(
    ("size", "memory_mib"),
    [
        ('"196592 MB"', 196592),
        ('"196592"', 196592),
        ("196592", 196592),
        ('{"value": 192, "unit": "GB"}', 196608),
        ('{"value": 34359738368, "unit": "B"}', 32768),
        ('"N/A"', None),
        ('{"value": "N/A", "unit": "MB"}', None),
        ('{"value": 1, "unit": "pages"}', None),
        ("null", None),
    ],
)
def test_sizes_in_any_form(size: str, memory_mib: int | None) -> None:
    (gpu,) = amd_smi.parse(f'[{{"gpu": "3", "vram": {{"size": {size}}}}}]')
    assert (gpu.index, gpu.memory_mib) == (3, memory_mib)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[{", "amd-smi printed no JSON"),
        ("ERROR: no driver\n", "'ERROR: no driver' tells of no GPU"),
        ('[{"gpu": "x"}]', "'x' is no number of a GPU"),
        ('[{"gpu": 0, "bdf": "c"}]', "'c' is no PCI address"),
        ('[{"gpu": 0}, {"gpu": 0}]', "two GPUs with the number 0"),
        ('[{"gpu": 0, "bdf": "0:1:0.0"}, {"gpu": 1, "bdf": "0:1:0.0"}]', "the address 0000:01"),
        ("gpu,a\n0\n", "a row has 1 cells for 2 columns"),
    ],
)
def test_what_can_t_be_read_says_so(text: str, why: str) -> None:
    with pytest.raises(CraterError, match=why):
        amd_smi.parse(text)


def test_reading_joins_list_and_static(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"list": Output(samples.AMD_LIST), "static": Output(samples.AMD_STATIC)}
    monkeypatch.setattr(amd_smi, "run", lambda argv: told[argv[1]])
    notes: list[str] = []
    assert amd_smi.read(notes) == Report(
        cards=(
            Card(
                address="0000:0c:00.0",
                model="AMD Instinct MI300X",
                uuid="0eff74a1-0000-1000-80b1-3d1f5c64a8d0",
                memory_mib=196592,
                compute_capability="gfx942",
                numa_node=1,
            ),
            Card(address="0000:22:00.0", uuid="a3ff74a1-0000-1000-80f2-b04a8e9d1c11"),
        ),
        driver="6.10.5",
    )
    assert notes == []


def test_reading_says_why_there_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []
    monkeypatch.setattr(amd_smi, "run", lambda argv: Output("", "amd-smi is not installed"))
    assert amd_smi.read(notes) is None
    monkeypatch.setattr(amd_smi, "run", lambda argv: Output("[{"))
    assert amd_smi.read(notes) == Report()
    assert notes[0] == "amd-smi says nothing of the GPUs: amd-smi is not installed"
    assert notes[1].startswith("amd-smi static: amd-smi printed no JSON")
