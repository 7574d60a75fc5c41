"""The benchmark of GPU memory: how rows are read, and what the measured ones must still show."""

from __future__ import annotations

import csv
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from captured import DATA, REPOSITORY

from bench.gpu_memory_fit import fits_its_card, fitted, predicted
from bench.memory_rows import Row, read
from crater_slurm.placement.prediction.fit import fit
from crater_slurm.placement.prediction.recipes import GENERIC, recipe_for

MEASURED = DATA / "gpu_memory_measured.csv"
COLUMNS = [
    *("source", "url_or_repo_path", "model", "params_b", "method", "lora_rank", "optimizer"),
    *("weight_dtype", "micro_batch", "seq_len", "grad_checkpointing", "gpus", "sharding"),
    *("measured_peak_gb", "unit", "notes"),
]

needs_rows = pytest.mark.skipif(not MEASURED.exists(), reason=f"there is no {MEASURED}")


def rows(folder: Path, **cells: str) -> tuple[list[Row], list[str]]:
    plain = {"source": "somebody", "model": "Llama-2-7B", "method": "lora", "micro_batch": "1",
             "seq_len": "2048", "gpus": "1", "measured_peak_gb": "20", "unit": "GB"}  # fmt: skip
    file = folder / "rows.csv"
    with file.open("w", newline="") as opened:
        writer = csv.DictWriter(opened, COLUMNS, restval="")
        writer.writeheader()
        writer.writerow(plain | cells)
    return read(file)


def one(folder: Path, **cells: str) -> Row:
    found, refused = rows(folder, **cells)
    assert not refused
    return found[0]


@pytest.mark.parametrize(
    ("unit", "actual"),
    [("GB", 20e9), ("GB?", 20e9), ("GiB", 20 * 2**30), ("MiB", 20 * 2**20), ("", 20e9)],
)
def test_units(tmp_path: Path, unit: str, actual: float) -> None:
    assert one(tmp_path, unit=unit).actual == actual


@pytest.mark.parametrize(
    ("peak", "unit", "actual"),
    [
        ("18.5 GB", "", 18.5e9),
        ("~18.5", "GB (nvidia-smi)", 18.5e9),
        ("14,949", "MiB", 14949 * 2**20),
        ("18.5", "GiB per GPU", 18.5 * 2**30),
    ],
)
def test_a_peak_is_read_as_sources_write_it(
    tmp_path: Path, peak: str, unit: str, actual: float
) -> None:
    assert one(tmp_path, measured_peak_gb=peak, unit=unit).actual == actual


def test_a_file_may_lack_columns_and_have_others(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_text("model,measured_peak_gb,mood\nmy-own-13b,30,good\n")
    found, refused = read(file)
    assert not refused
    result = predicted(found[0])
    assert 0 < result.prediction.lower < result.prediction.expected < result.prediction.upper


def test_settings_in_the_notes(tmp_path: Path) -> None:
    work = one(
        tmp_path, notes="optimizer_in_bwd; torch compile; gradient checkpointing off"
    ).workload
    assert work.optimizer_in_backward
    assert work.fused_loss
    assert work.activation_checkpointing is False


def test_a_sum_is_divided_by_its_gpus(tmp_path: Path) -> None:
    row = one(
        tmp_path, gpus="4", sharding="ZeRO-2 2x2 GPUs (sum over 4 GPUs)", measured_peak_gb="74.7"
    )
    assert row.actual == pytest.approx(74.7e9 / 4)
    assert (row.workload.gpus, row.workload.sharding) == (4, "zero2")


def test_a_boundary_is_met_where_the_cache_is_empty(tmp_path: Path) -> None:
    row = one(tmp_path, notes="BOUNDARY: longest context that fits a card of this size, HF + FA2")
    assert row.boundary
    assert row.meter == "tight"
    assert recipe_for(row.workload.framework).name == "transformers"


@pytest.mark.parametrize(
    ("method", "dtype", "expected"),
    [
        ("lora", "bf16", ("lora", None, "bf16")),
        ("qlora-nf4", "nf4", ("qlora", "nf4", "bf16")),
        ("qlora-int4-gptq", "fp16 compute / int4 base", ("qlora", "gptq", "fp16")),
        ("qlora-int8-gptq", "int8-gptq", ("qlora", "gptq8", "bf16")),
        ("qlora-int4-bnb", "int4-bnb", ("qlora", "nf4", "bf16")),
        ("lora", "bnb.nf4-dq", ("lora", "nf4-double", "bf16")),
        ("adapter_v2", "bf16-true", ("lora", None, "bf16")),
        ("full", "not stated", ("full", None, None)),
        ("inference", "bnb.int8", ("inference", "int8", "bf16")),
    ],
)
def test_methods_and_formats(
    tmp_path: Path, method: str, dtype: str, expected: tuple[str, str | None, str | None]
) -> None:
    work = one(tmp_path, method=method, weight_dtype=dtype).workload
    assert (work.method, work.quantization, work.precision) == expected


def test_settings_come_from_columns_and_notes(tmp_path: Path) -> None:
    row = one(
        tmp_path, source="torchtune README", optimizer="PagedAdamW8bit", seq_len="4k",
        grad_checkpointing="no", sharding="FSDP + CPU offload",
        notes="packed; chunked CE; optimizer in backward; all linear; max_memory_reserved; A100-80G",
    )  # fmt: skip
    work = row.workload
    assert (work.optimizer, work.sequence_length) == ("paged_adamw_8bit", 4096)
    assert work.activation_checkpointing is False
    assert work.packed and work.fused_loss and work.optimizer_in_backward
    assert (work.lora_targets, work.sharding) == ("all", "fsdp")
    assert work.offload == {"parameters"}
    assert row.meter == "reserved"
    assert row.card_bytes == 80 * 2**30


def test_lengths_that_vary_are_told_by_the_notes(tmp_path: Path) -> None:
    work = one(tmp_path, notes="dataset tokens mean 3234 sd 2548 max 19548, truncated").workload
    assert (work.varying_lengths, work.mean_length, work.length_deviation) == (True, 3234, 2548)


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        ({"measured_peak_gb": "n/a"}, "no peak"),
        ({"measured_peak_gb": "-3"}, "no peak"),
        ({"measured_peak_gb": "nan"}, "no peak"),
        ({"measured_peak_gb": "0"}, "outside all reason"),
        ({"unit": "furlong"}, "no peak"),
        ({"model": "mystery"}, "neither its model nor its parameters"),
    ],
)
def test_a_row_that_cannot_be_read_is_named(
    tmp_path: Path, cells: dict[str, str], reason: str
) -> None:
    found, refused = rows(tmp_path, **cells)
    assert not found
    assert reason in refused[0]
    assert refused[0].startswith("row 1 (")


def test_fitting_finds_the_figures_that_made_the_rows(tmp_path: Path) -> None:
    true = recipe_for("my loop").__class__(name="generic", overhead_gb=2.1, fragmentation=1.5)
    made = []
    for model in ("Llama-2-7B", "Llama-3-8B", "Qwen2-0.5B"):
        for length in ("512", "2048", "8192"):
            row = one(tmp_path, model=model, seq_len=length, weight_dtype="bf16")
            value = predicted(row, true).prediction.expected / 1e9
            made.append(one(tmp_path, model=model, seq_len=length, weight_dtype="bf16",
                            measured_peak_gb=str(value)))  # fmt: skip
    found = fitted(made, GENERIC)
    assert found.overhead_gb == pytest.approx(2.1, abs=0.11)
    assert found.fragmentation == pytest.approx(1.5, abs=0.06)


@needs_rows
def test_all_measured_rows_are_read() -> None:
    found, refused = read(MEASURED)
    assert (len(found), refused) == (153, [])


@needs_rows
def test_the_measured_rows_are_predicted_and_held_by_the_bound() -> None:
    results = [predicted(row) for row in read(MEASURED)[0]]
    assert statistics.median(abs(r.error) for r in results) < 0.04
    assert statistics.mean(r.slack >= 0 for r in results) >= 0.98
    assert statistics.mean(r.slack for r in results) < 0.25
    assert statistics.mean(r.error < -0.1 for r in results) < 0.07


@needs_rows
def test_what_ran_on_a_card_is_hardly_ever_refused_there() -> None:
    ran = [row for row in read(MEASURED)[0] if row.card_bytes and row.workload.gpus == 1]
    assert len(ran) > 100
    assert statistics.mean(fits_its_card(row) for row in ran) >= 0.98


@needs_rows
@pytest.mark.parametrize("recipe", ["transformers", "unsloth"])
def test_one_and_a_half_times_the_longest_context_is_refused(recipe: str) -> None:
    edges = [row for row in read(MEASURED)[0]
             if row.boundary and recipe_for(row.workload.framework).name == recipe]  # fmt: skip
    assert edges
    for row in edges:
        longer = replace(row.workload, sequence_length=(row.workload.sequence_length or 0) * 3 // 2)
        assert not fit(longer, int(row.actual / 2**20)).fits


@needs_rows
def test_the_last_line_is_what_programs_read() -> None:
    done = subprocess.run([sys.executable, REPOSITORY / "bench/gpu_memory.py", MEASURED],
                          capture_output=True, text=True, check=True, cwd="/")  # fmt: skip
    figures = dict(word.split("=") for word in done.stdout.splitlines()[-1].split())
    assert list(figures) == ["median_error_percent", "under10_percent",
                             "bound95_coverage_percent", "bound95_slack_percent"]  # fmt: skip
    assert all(float(value) >= 0 for value in figures.values())
