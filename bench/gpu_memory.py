"""GPU memory predicted and measured: ``python bench/gpu_memory.py ROWS.csv``.

Takes rows of measured peaks (columns of the published tables that were gathered: source, model,
params_b, method, ..., measured_peak_gb, unit, notes) and prints, per source, how far predictions
are off and whether the 95 % bound holds, beside two naive lines and, where it is installed, the
estimator fitcheck-llm, which runs without a network.

How rows are compared: a sum over GPUs is divided by them; ``GB`` and ``GB?`` are 10^9 bytes;
what the source says it counts (nvidia-smi, reserved, allocated) is what is predicted. A BOUNDARY
row says that this length is the longest that fits a card: the peak there is the card's size, and
the allocator has nothing left to give back, so the prediction is without its cache.

``--fit`` prints each recipe's fitted figures, ``--cross-validate`` what is left of the accuracy
when a model, or a whole framework, is not in the fit.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.gpu_memory_fit import (
    Result,
    fit_all,
    fits_its_card,
    leave_one_framework_out,
    leave_one_model_out,
    predicted,
)
from bench.memory_rows import Row, read
from bench.table import show
from crater_slurm.catalogue.llms import describe
from crater_slurm.placement.prediction.recipes import recipe_for

_HEAD = ["source", "rows", "median %", "mean %", "worst %", ">10 % under, %", "bound holds, %",
         "bound slack, %"]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description="GPU memory, predicted against measured")
    parser.add_argument("rows", type=Path, help="CSV of measured peaks")
    parser.add_argument("--fit", action="store_true", help="print each recipe's fitted figures")
    parser.add_argument(
        "--cross-validate", action="store_true", help="leave models and frameworks out"
    )
    parser.add_argument("--each", action="store_true", help="print every row")
    asked = parser.parse_args()
    try:
        rows, refused = read(asked.rows)
    except OSError as error:
        parser.error(f"can't read {asked.rows}: {error.strerror}")
    for sentence in refused:
        print(f"skipped {sentence}")
    if not rows:
        parser.error(f"{asked.rows} has no row that can be compared")
    if asked.fit:
        _show_fit(rows)
    if asked.cross_validate:
        _show_results("Known framework, model not fitted to", leave_one_model_out(rows))
        _show_results("Framework unknown and not fitted to", leave_one_framework_out(rows))
    results = [predicted(row) for row in rows]
    if asked.each:
        _show_each(results)
    _show_results("Prediction", results)
    _show_others(rows, results)
    ran = [row for row in rows if row.card_bytes and row.workload.gpus == 1]
    if ran:
        refused = sum(not fits_its_card(row) for row in ran)
        print(f"ran on one card of known size: {len(ran)}; of these would be refused: {refused}\n")
    print(_last_line(results))
    return 0


def _figures(results: Sequence[Result]) -> list[float]:
    errors = [100 * abs(result.error) for result in results]
    return [
        statistics.median(errors),
        statistics.mean(errors),
        max(errors),
        100 * statistics.mean(result.error < -0.1 for result in results),
        100 * statistics.mean(result.slack >= 0 for result in results),
        100 * statistics.mean(result.slack for result in results),
    ]


def _show_results(title: str, results: Sequence[Result]) -> None:
    groups: dict[str, list[Result]] = {}
    for result in results:
        groups.setdefault(result.row.source or "no source", []).append(result)
    groups["all"] = list(results)
    lines = [
        [name, str(len(group)), *(f"{figure:.1f}" for figure in _figures(group))]
        for name, group in groups.items()
    ]
    show(title, _HEAD, lines)
    within = statistics.mean(1.1 * (1 + result.slack) >= 1 for result in results)
    print(f"actual <= 1.10 x bound for {within:.1%} of the rows\n")


def _show_each(results: Sequence[Result]) -> None:
    lines = [
        [str(r.row.number), r.prediction.recipe, r.row.model, r.row.workload.method or "",
         f"{r.row.actual / 1e9:.2f}", f"{r.prediction.expected / 1e9:.2f}", f"{100 * r.error:+.0f}",
         f"{r.prediction.upper / 1e9:.2f}", r.row.meter, r.prediction.point]
        for r in results
    ]  # fmt: skip
    show("Rows, GB", ["row", "recipe", "model", "method", "measured", "expected", "off %", "bound",
                      "meter", "highest at"], lines)  # fmt: skip


def _show_fit(rows: Sequence[Row]) -> None:
    lines = [
        [r.name, f"{r.overhead_gb:g}", f"{r.fragmentation:g}", f"{r.spread_static:g}",
         f"{r.spread_dynamic:g}"]
        for r in fit_all(rows)
    ]  # fmt: skip
    show(
        "Fitted figures",
        ["recipe", "overhead_gb", "fragmentation", "spread_static", "spread_dynamic"],
        lines,
    )


def _show_others(rows: Sequence[Row], results: Sequence[Result]) -> None:
    estimators: dict[str, Callable[[Row], float | None]] = {
        "2 B x parameters + 2 GB": lambda row: _naive(row, 0.0),
        "the same + 2.5 MB per token": lambda row: _naive(row, 2.5e6),
    }
    fitcheck = _fitcheck()
    if fitcheck is None:
        print("fitcheck-llm: skipped, it is not installed (pip install fitcheck-llm)\n")
    else:
        estimators["fitcheck-llm"] = fitcheck
    lines = [["crater", str(len(rows)), *(f"{figure:.1f}" for figure in _figures(results)[:4])]]
    for name, estimator in estimators.items():
        pairs = [(estimator(row), row.actual) for row in rows]
        errors = [100 * (guess / actual - 1) for guess, actual in pairs if guess is not None]
        sizes = [abs(error) for error in errors]
        under = 100 * statistics.mean(error < -10 for error in errors)
        figures = (statistics.median(sizes), statistics.mean(sizes), max(sizes), under)
        lines.append([name, str(len(errors)), *(f"{figure:.1f}" for figure in figures)])
    show("Beside others", ["estimator", *_HEAD[1:6]], lines)


def _naive(row: Row, per_token: float) -> float | None:
    known = describe(row.workload)
    if known is None:
        return None
    work = row.workload
    tokens = (work.micro_batch or 1) * (work.sequence_length or 512)
    return 2 * known.architecture.parameters + 2e9 + per_token * tokens


def _fitcheck() -> Callable[[Row], float | None] | None:
    """The estimator fitcheck-llm, given the catalogue's sizes so that it needs no network; None
    where it is not installed."""
    try:
        from fitcheck import GPU_DB, ModelConfig, TrainingConfig, estimate
    except ImportError:
        return None

    def guess(row: Row) -> float | None:
        known = describe(row.workload)
        if known is None or not known.architecture.hidden or row.workload.method == "inference":
            return None
        a, w = known.architecture, row.workload
        config = ModelConfig(
            name=known.name, num_params=int(a.parameters), hidden_size=a.hidden,
            num_layers=a.layers, num_attention_heads=a.heads, num_kv_heads=a.kv_heads,
            vocab_size=a.vocabulary,
            intermediate_size=a.intermediate, head_dim=a.head_size or a.hidden // a.heads,
            tie_word_embeddings=a.tied_embeddings,
        )  # fmt: skip
        recipe = recipe_for(w.framework)
        quantised = {None: "none", "int8": "int8", "gptq8": "int8"}.get(w.quantization, "nf4")
        training = TrainingConfig(
            precision=w.precision if w.precision in {"bf16", "fp16", "fp32"} else "bf16",
            quantization=quantised,
            batch_size=w.micro_batch or 1,
            seq_len=w.sequence_length or 512,
            lora_rank=(w.lora_rank or 8) if w.method in {"lora", "qlora"} else None,
            grad_checkpoint=recipe.checkpointing if w.activation_checkpointing is None
            else w.activation_checkpointing,
            flash_attn=w.attention != "eager",
        )  # fmt: skip
        return float(estimate(config, training, GPU_DB["a100-80"]).total_mib) * 2**20

    return guess


def _last_line(results: Sequence[Result]) -> str:
    median, _, _, under, coverage, slack = _figures(results)
    return (
        f"median_error_percent={median:.2f} under10_percent={under:.2f} "
        f"bound95_coverage_percent={coverage:.2f} bound95_slack_percent={slack:.2f}"
    )


if __name__ == "__main__":
    sys.exit(main())
