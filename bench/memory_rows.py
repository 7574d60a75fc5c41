"""Rows of measured GPU memory as workloads: what a row says of itself, and nothing else.

The framework comes from the source's name (or from the notes, where these say that another
library was measured), the settings from the columns and notes. A row that can't be read is named
with the reason. No row is recognised by its model or value.
"""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from pathlib import Path

from crater_slurm.catalogue.llms import describe
from crater_slurm.model.workload import Workload
from crater_slurm.placement.prediction.recipes import recipe_for

UNITS = {
    **dict.fromkeys(("", "g", "gb", "gb?"), 1e9),
    **dict.fromkeys(("gib", "gib?"), 2.0**30),
    "mib": 2.0**20,
    "mb": 1e6,
}
_IN_BACKWARD = r"(opt[a-z]*|step)[ _-]in[ _-](the[ _-])?b(ackward|wd)"
#: A peak and its unit, wherever the unit is said, with what a source writes around them.
_PEAK = re.compile(
    r"\s*[~≈]?\s*(?P<number>\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?)\s*(?P<unit>[a-z]*\??)"
    r"(?:[\s(].*)?"
)
#: The columns in whose words settings are looked for.
_TOLD = ("method", "optimizer", "weight_dtype", "sharding", "grad_checkpointing", "seq_len",
         "notes")  # fmt: skip
#: Where a table lies says nothing of the framework that was measured.
_HOST = re.compile(r"huggingface\.co|(hf|hugging ?face) datasets?", re.IGNORECASE)
_UNSAID = {"", "not stated", "unknown", "n/a", "-", "none stated"}
_OPTIMIZERS = (
    (r"paged.*8.?bit|paged.*adam.*8", "paged_adamw_8bit"),
    (r"8.?bit", "adamw_8bit"),
    (r"paged", "paged_adamw"),
    (r"adafactor", "adafactor"),
    (r"lion", "lion"),
    (r"sgd", "sgd"),
    (r"adam", "adamw"),
)
#: Cards whose name stands for one size; others say it.
_CARDS = {
    **dict.fromkeys(("a100", "h100"), 80),
    **dict.fromkeys(("a6000", "l40", "l40s", "a40"), 48),
    **dict.fromkeys(("4090", "3090", "a10", "l4"), 24),
    "v100": 32,
    "t4": 16,
}
#: Data sets whose name in a row tells batch and longest sample of its source's example.
_DATA = {"twitter_complaints": (8, 48), "alpaca": (None, 512), "dolly": (None, 1024)}


class RowError(ValueError):
    """A row that can't be compared; the message says why."""


@dataclass(frozen=True, slots=True)
class Row:
    """One measured row: bytes per GPU, the work, and how it was counted."""

    number: int
    source: str
    model: str
    workload: Workload
    actual: float
    meter: str
    boundary: bool
    card_bytes: float | None


def read(path: Path) -> tuple[list[Row], list[str]]:
    """The rows of a file and, in words, those that can't be read."""
    rows, refused = [], []
    with path.open(newline="", encoding="utf-8") as opened:
        for number, cells in enumerate(csv.DictReader(opened), start=1):
            cells = {key: (value or "").strip() for key, value in cells.items() if key}
            try:
                rows.append(_row(number, cells))
            except RowError as error:
                refused.append(f"row {number} ({cells.get('model', '?')}): {error}")
    return rows, refused


def _row(number: int, cells: dict[str, str]) -> Row:
    notes = cells.get("notes", "")
    text = " ; ".join(cells.get(column, "") for column in _TOLD).lower()
    workload = _workload(cells, text)
    if describe(workload) is None:
        raise RowError("neither its model nor its parameters are known")
    recipe = recipe_for(workload.framework)
    meter = "reserved" if "reserved" in text else "allocated" if "allocated" in text else (
        "driver" if "nvidia-smi" in text else recipe.published)  # fmt: skip
    boundary = "boundary" in text or "longest context that fits" in text
    return Row(
        number=number,
        source=cells.get("source", ""),
        model=cells.get("model", ""),
        workload=workload,
        actual=_actual(cells, text, workload.gpus),
        meter="tight" if boundary else meter,
        boundary=boundary,
        card_bytes=None if boundary else _card(notes),
    )


def _actual(cells: dict[str, str], text: str, gpus: int) -> float:
    """Bytes of one GPU: a sum is divided by its GPUs, and GB with a question mark are 10^9."""
    told = f"{cells.get('measured_peak_gb', '')} {cells.get('unit', '')}".lower()
    found = _PEAK.fullmatch(told)
    if found is None or found["unit"] not in UNITS:
        raise RowError(f"no peak: {cells.get('measured_peak_gb')!r} {cells.get('unit')!r}")
    value = float(found["number"].replace(",", "")) * UNITS[found["unit"]]
    if not 0 < value < 1e15:
        raise RowError("a peak outside all reason")
    if found := re.search(r"sum (?:over|of) (?:all )?(\d+)?", text):
        value /= int(found.group(1) or gpus)
    return value


def _card(notes: str) -> float | None:
    words = notes.lower()
    for name, size in _CARDS.items():
        if re.search(rf"\b(?:rtx ?)?{name}\b", words):
            said = re.search(rf"{name}[a-z0-9 -]*?[ -](\d{{2,3}}) ?g", words)
            return (int(said.group(1)) if said else size) * 2.0**30
    return None


def _workload(cells: dict[str, str], text: str) -> Workload:
    method, adapters = _method(text, cells.get("method", "").lower())
    sharding = _sharding(cells.get("sharding", "").lower())
    batch, length = _data(cells, text)
    embeddings = bool(re.search(r"\+ ?emb|embedding.{0,20}trainable", text))
    return Workload(
        model=_model(cells),
        parameters=_number(cells.get("params_b", ""), 1e9),
        framework=_framework(cells),
        method=method,
        precision=_precision(cells.get("weight_dtype", "").lower()),
        quantization=_quantisation(cells) if adapters or method == "inference" else None,
        optimizer=next((name for words, name in _OPTIMIZERS if re.search(
            words, cells.get("optimizer", "").lower())), None),
        lora_rank=int(_number(cells.get("lora_rank", ""), 1) or 0) or None,
        micro_batch=batch,
        sequence_length=length,
        activation_checkpointing=_checkpointing(cells.get("grad_checkpointing", "").lower(), text),
        sharding=sharding,
        tensor_parallel=int(_said(text, r"\b(?:tp|tensor.parallel)[ =_-]*(\d+)") or 1),
        pipeline_parallel=int(_said(text, r"\b(?:pp|pipeline.parallel)[ =_-]*(\d+)") or 1),
        gpus=int(_number(cells.get("gpus", ""), 1) or 1),
        attention=_attention(text),
        fused_loss=_true(
            text, r"chunked|fused.?(linear )?(ce|cross|loss)|liger|\bcce\b|(?<!no )torch.?compile"
        ),
        packed=_true(text, r"(?<!un)packed"),
        varying_lengths=_true(text, r"tokens? mean|\bsd \d|unpacked|dynamic padding"),
        mean_length=_number(_said(text, r"tokens? mean (\d+)") or "", 1),
        length_deviation=_number(_said(text, r"\bsd (\d+)") or "", 1),
        lora_targets=_targets(text),
        train_embeddings=embeddings,
        optimizer_in_backward=_true(text, _IN_BACKWARD) is not None,
        offload=_offload(cells, text),
    )  # fmt: skip


def _model(cells: dict[str, str]) -> str | None:
    name = cells.get("model", "")
    return None if name.lower() in _UNSAID else name


def _framework(cells: dict[str, str]) -> str | None:
    notes = cells.get("notes", "").lower()
    if re.search(r"\bhf ?\+", notes):
        return "transformers"
    source = _HOST.sub("", cells.get("source", ""))
    if recipe_for(source).name != "generic":
        return source
    place = _HOST.sub("", cells.get("url_or_repo_path", "").split("@")[0])
    return place if recipe_for(place).name != "generic" else source


def _method(text: str, method: str) -> tuple[str | None, bool]:
    """The method, and whether a base stays frozen under adapters."""
    if re.search(r"infer|generat|serv", method):
        return "inference", False
    if re.search(r"dpo", method):
        return "dpo", "lora" in method
    if re.search(r"rlhf|ppo", method):
        return "rlhf", "lora" in method
    if "qlora" in method or ("lora" in method and re.search(r"nf4|int4|4.?bit", method)):
        return "qlora", True
    if re.search(r"lora|adapter|prefix|prompt|peft|ia3", method):
        return "lora", True
    if re.search(r"pre.?train", method):
        return "pretrain", False
    if re.search(r"full|sft|fine.?tun", method):
        return "full", False
    return None, False


def _quantisation(cells: dict[str, str]) -> str | None:
    text = f"{cells.get('method', '')} {cells.get('weight_dtype', '')}".lower()
    eight = re.search(r"int8|8.?bit|w8", text) is not None
    if "gptq" in text:
        return "gptq8" if eight else "gptq"
    if "awq" in text:
        return "awq"
    if re.search(r"nf4|fp4|int4|4.?bit", text):
        return "nf4-double" if re.search(r"-dq|double", text) else "nf4"
    return "int8" if eight else None


def _precision(text: str) -> str | None:
    if re.search(r"16-mixed|mixed", text):
        return "bf16"
    found = re.search(r"bf16|bfloat16|fp16|float16|fp32|float32|tf32", text)
    if not found:
        return "bf16" if re.search(r"nf4|int4|int8|gptq|awq", text) else None
    return {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}.get(found[0], found[0])


def _data(cells: dict[str, str], text: str) -> tuple[int | None, int | None]:
    """Batch and length: as stated, else those of the data set that the row names."""
    batch = int(_number(cells.get("micro_batch", ""), 1) or 0) or None
    length = _length(cells.get("seq_len", ""))
    for name, (usual, longest) in _DATA.items():
        if name in text:
            batch, length = batch or usual, length or longest
    return batch, length


def _length(text: str) -> int | None:
    if "px" in text.lower():
        return None
    words = text.lower().replace(",", "")
    if found := re.search(r"(\d{1,4})k\b", words):
        return int(found[1]) * 1024
    found = re.search(r"\d{2,7}", words)
    return int(found[0]) if found else None


def _checkpointing(cell: str, text: str) -> bool | None:
    if cell not in _UNSAID:
        return not cell.startswith(("no", "off", "false"))
    word = r"(gradient|activation)[ _-]checkpointing"
    if re.search(rf"{word}[ =:]*(is )?(off|no|false|disabled)|(no|without) {word}", text):
        return False
    return _true(text, rf"{word}[ =:]*(is )?(on|yes|true|enabled)|with {word}")


def _sharding(text: str) -> str | None:
    if found := re.search(r"zero[ -_]?([123])", text):
        return f"zero{found[1]}"
    return "fsdp" if "fsdp" in text else "ddp" if "ddp" in text else None


def _offload(cells: dict[str, str], text: str) -> frozenset[str]:
    sharding = cells.get("sharding", "").lower()
    found = set()
    if "offload" in sharding:
        found.add("parameters" if re.search(r"zero[ -_]?3|fsdp|param", sharding) else "optimizer")
    if re.search(r"activation.{0,3}offload|offload\w* activation", text) or "offload" in cells.get(
        "grad_checkpointing", ""
    ):
        found.add("activations")
    return frozenset(found)


def _attention(text: str) -> str | None:
    if re.search(r"flash.?attn?(ention)?\w*[ =]+(off|no|false)|\beager\b|no flash", text):
        return "eager"
    return "flash" if re.search(r"flash.?attn?=on|\bfa2\b|flashattention", text) else None


def _targets(text: str) -> str | None:
    if re.search(r"all.?linear|w1,w2|gate|mlp", text):
        return "all"
    if re.search(r"on q,v|targets q,v|q_proj,v_proj", text):
        return "qv"
    return "qkv" if re.search(r"targets (c_attn|query_key_value)", text) else None


def _number(text: str, unit: float) -> float | None:
    found = re.search(r"\d+(\.\d+)?", text)
    return float(found[0]) * unit if found else None


def _true(text: str, pattern: str) -> bool | None:
    """True where the row's words say so; else nobody said."""
    return True if re.search(pattern, text) else None


def _said(text: str, pattern: str) -> str | None:
    found = re.search(pattern, text)
    return found[1] if found else None
