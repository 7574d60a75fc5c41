"""The table of public models by name, and what can be told of one that it lacks.

A name finds its row whatever its organisation, case and punctuation, and with the suffixes of a
tuned variant (``-chat``, ``-instruct``, ``-hf``). A name that is in no row but carries a size
(``foo-13b``) or a bare parameter count gets sizes between those of the models next to it; the
answer says so, and nobody should take them for facts.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from types import MappingProxyType

from crater_slurm.model.workload import Architecture, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What is known of a model. ``certainty`` is ``catalogue``, ``stated`` (sizes or count from
    the user, the shape between known models), or ``name`` (the count read out of its name)."""

    name: str
    architecture: Architecture
    certainty: str
    note: str


#: Ends of a name that do not change a model's sizes.
_SUFFIXES = re.compile(
    r"-(?:chat|instruct|it|base|hf|sft|dpo|rlhf|tuned|gptq|awq|int4|int8|bnb|4bit|8bit|bf16|fp16"
    r"|v[0-9]+(?:\.[0-9]+)?|pt|ms|[0-9]{4}|deduped|uncased|cased|text|preview)$"
)
#: A stated count further from the table's than this is another model of that name.
_SAME_MODEL = 0.25
#: A size in a name, with what begins or ends it: 13b, 1_8b, 560m, 8x7b.
_SIZE = re.compile(
    r"(?<![a-z0-9.])(?:([0-9]{1,3})x)?([0-9]{1,4}(?:\.[0-9]{1,3})?)(b|m)(?![a-z0-9])"
)


def slug(name: str) -> str:
    """A name as the table writes it: ``meta-llama/Llama-2-7b-chat-hf`` is ``llama-2-7b-chat-hf``;
    ``1_8b`` is ``1.8b``."""
    word = name.strip().lower().rsplit("/", 1)[-1]
    word = re.sub(r"(?<=[0-9])_(?=[0-9])", ".", word)
    return re.sub(r"-+", "-", re.sub(r"[\s_:()]+", "-", word)).strip("-")


@cache
def models() -> Mapping[str, Architecture]:
    """All models by id, in the order of the table."""
    text = resources.files(__package__).joinpath("llms.csv").read_text(encoding="utf-8")
    return MappingProxyType(
        {r["model"]: _architecture(r) for r in csv.DictReader(text.split("\n"))}
    )


@cache
def _names() -> Mapping[str, str]:
    text = resources.files(__package__).joinpath("llms.csv").read_text(encoding="utf-8")
    names: dict[str, str] = {}
    for row in csv.DictReader(text.split("\n")):
        for name in (row["model"], *row["aliases"].split()):
            names[_plain(name)] = row["model"]
    return MappingProxyType(names)


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9.]", "", name)


def model_named(name: str) -> str | None:
    """The id of the row that ``name`` means; None when no row is meant."""
    for word in dict.fromkeys((slug(name[:256]), slug(name[:256].replace("_", "-")))):
        while word:
            if found := _names().get(_plain(word)):
                return found
            if (shorter := _SUFFIXES.sub("", word)) == word:
                break
            word = shorter
    return None


def size_in(name: str) -> float | None:
    """Parameters that a name tells (``foo-13b``); None when it tells none."""
    found = _SIZE.findall(slug(name[:256]))
    if not found:
        return None
    experts, number, unit = found[-1]
    return float(number) * (1e9 if unit == "b" else 1e6) * float(experts or 1)


def nearest_models(name: str, count: int = 3) -> list[str]:
    """The names of the table most like ``name``, for a message."""
    import difflib

    return difflib.get_close_matches(slug(name), list(models()), n=count, cutoff=0.5)


def describe(workload: Workload) -> Known | None:
    """What is known of the workload's model; None when neither name nor count tells its size."""
    if workload.architecture is not None:
        return Known(
            name=workload.model or "this model",
            architecture=workload.architecture,
            certainty="catalogue",
            note="sizes as given",
        )
    stated = workload.parameters
    found = model_named(workload.model) if workload.model else None
    if found and (not stated or abs(stated / models()[found].parameters - 1) < _SAME_MODEL):
        return Known(
            name=found,
            architecture=models()[found],
            certainty="catalogue",
            note=f"sizes of {found} from the catalogue",
        )
    label = workload.model or "this model"
    if stated:
        return _between(label, stated, "stated", "its stated parameter count")
    if workload.model and (size := size_in(workload.model)):
        return _between(label, size, "name", "the size in its name")
    return None


def _between(name: str, parameters: float, certainty: str, source: str) -> Known:
    listed = "is in the catalogue with another size" if model_named(name) else (
        "is not in the catalogue")  # fmt: skip
    return Known(
        name=name,
        architecture=synthesised(parameters),
        certainty=certainty,
        note=f"{name} {listed}: {source} ({parameters / 1e9:.3g} B), layers and "
        "widths between those of known models",
    )


#: Of these the shape of an unknown model is made: the usual decoders of today.
_USUAL = (
    *("smollm-135m", "qwen1.5-0.5b", "llama-3.2-1b", "qwen2-1.5b", "llama-3.2-3b", "llama-3-8b"),
    *("phi-4", "qwen2.5-32b", "llama-3-70b", "llama-3.1-405b"),
)


def synthesised(parameters: float) -> Architecture:
    """A usual decoder of this many parameters, its sizes interpolated in the logarithm.

    The vocabulary is that of today's models (128,000), the largest part of what is unknown.
    """
    known = [models()[name] for name in _USUAL]
    size = math.log(max(parameters, 1e6))
    marks = [math.log(a.parameters) for a in known]
    upper = next((i for i, mark in enumerate(marks) if mark >= size), len(marks) - 1)
    upper = max(1, upper)
    share = (size - marks[upper - 1]) / (marks[upper] - marks[upper - 1])

    def between(field: str) -> float:
        low, high = (float(getattr(known[i], field)) for i in (upper - 1, upper))
        return math.exp(math.log(low) + share * (math.log(high) - math.log(low)))

    hidden = max(64, round(between("hidden") / 64) * 64)
    heads = max(1, round(hidden / 128)) if hidden >= 1024 else max(1, hidden // 64)
    return Architecture(
        parameters=parameters,
        layers=max(1, round(between("layers"))),
        hidden=hidden,
        intermediate=max(64, round(between("intermediate") / 64) * 64),
        heads=heads,
        kv_heads=min(heads, 8),
        vocabulary=128000 if parameters > 3e8 else 50000,
        tied_embeddings=parameters < 4e9,
    )


def _architecture(row: Mapping[str, str]) -> Architecture:
    if row["family"] == "diffusion":
        return Architecture(
            family="diffusion", parameters=float(row["parameters"]), layers=0, hidden=0,
            intermediate=0, heads=0, kv_heads=0, vocabulary=0,
        )  # fmt: skip
    return Architecture(
        family=row["family"],
        parameters=float(row["parameters"]),
        layers=int(row["layers"]),
        hidden=int(row["hidden"]),
        intermediate=int(row["intermediate"]),
        heads=int(row["heads"]),
        kv_heads=int(row["kv_heads"]),
        head_size=int(row["head_size"]) if row["head_size"] else None,
        vocabulary=int(row["vocabulary"]),
        tied_embeddings=row["tied"] == "yes",
        gated_mlp=row["gated"] == "yes",
        experts=int(row["experts"]),
        active_experts=int(row["active_experts"]),
        cross_layers=int(row["cross_layers"]),
        attention=row["attention"] or None,
    )
