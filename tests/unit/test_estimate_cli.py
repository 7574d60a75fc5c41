"""``crater estimate`` as people and scripts call it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from store_samples import rich_profile

from crater_slurm.cli.estimate import estimate
from crater_slurm.errors import CraterError, UsageError
from crater_slurm.store.repository import Store

LORA = ("--model", "Llama-3-8B", "--method", "lora", "--framework", "torchtune", "--micro-batch",
        "2", "--sequence-length", "2048")  # fmt: skip


def run(*arguments: object) -> str:
    result = CliRunner().invoke(estimate, [str(item) for item in arguments])
    if isinstance(result.exception, CraterError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def document(*arguments: object) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(*arguments, "--json"))
    return found


def test_terms_interval_and_cards_are_shown() -> None:
    output = run(*LORA)
    assert "weights            16.06  8.03 B x 2 B" in output
    assert "decided by: formula" in output
    assert "assumed, since not said: precision=bf16" in output
    fitting = next(line for line in output.splitlines() if line.startswith("fits on:"))
    refused = next(line for line in output.splitlines() if line.startswith("not on:"))
    assert "a100-sxm4-80gb" in fitting
    assert "p100-pcie-16gb" in refused


def test_json_says_the_same() -> None:
    found = document(*LORA)
    memory = found["memory"]
    assert memory["lower"] < memory["expected"] < memory["upper"]
    assert sum(t["bytes"] for t in memory["terms"]) == pytest.approx(memory["expected"], abs=50)
    assert found["model"]["name"] == "llama-3-8b"
    assert {card["card"]: card["fits"] for card in found["cards"]}["h200-sxm5-141gb"] is True
    assert {need["name"] for need in found["host"]} >= {"host memory", "cores", "SSD read"}


def test_a_card_on_which_it_does_not_fit_gets_the_way_out() -> None:
    output = run("--model", "Llama-3-8B", "--method", "full", "--on", "a100-pcie-40gb")
    assert "on a100-pcie-40gb (40960 MiB): does not fit" in output
    assert "it would fit with " in output
    found = document("--model", "Llama-3-8B", "--method", "full", "--on", "NVIDIA A100-PCIE-40GB")
    assert found["on"]["fits"] is False
    assert found["on"]["needed_mib"] > 40960
    assert found["on"]["change"]


def test_a_script_s_directives_are_read_and_options_overrule_them(tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text(
        "#!/bin/bash\n#CRATER model=Llama-3-8B method=full framework=deepspeed\n"
        "#CRATER gpus=8 sharding=zero3 sequence-length=2048 micro-batch=1\nsrun x\n"
    )
    sharded = document(script)["memory"]
    assert "gathered weights" in {t["name"] for t in sharded["terms"]}
    lora = document(script, "--method", "lora")["memory"]
    assert lora["expected"] < sharded["expected"]
    two_nodes = document(script, "--job-nodes", 2)["memory"]
    assert two_nodes["expected"] < sharded["expected"]


def test_cards_of_the_store_s_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"sqlite:///{tmp_path / 'crater.db'}"
    monkeypatch.setenv("CRATER_STORE__URL", url)
    profile = rich_profile("gn01")
    Store.open(url, create=True).save_profile(profile)
    cards = document(*LORA, "--nodes", "gn01")["cards"]
    memories = {gpu.memory_mib for gpu in profile.gpus if gpu.memory_mib}
    assert {card["memory_mib"] for card in cards} == memories
    assert all("gn01" in card["card"] for card in cards)
    with pytest.raises(UsageError, match="there is no profile of node gn02; did you mean gn01"):
        run(*LORA, "--nodes", "gn02")


def test_headroom_makes_cards_smaller() -> None:
    def fitting(*more: object) -> int:
        return sum(card["fits"] for card in document(*LORA, *more)["cards"])

    assert fitting("--headroom", 30) < fitting()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "no model is named; say --model Llama-3-8B"),
        (("--model", "lama-thing"), "tells no size; near to it are llama-.*--model-params"),
        (("--model", "x", "--micro-batch", "0"), "--micro-batch=0: must be at least 1"),
        (("--model", "x", "--method", "lorra"), "did you mean lora"),
        (("--model", "Llama-3-8B", "--on", "a100"), "no card 'a100'; did you mean a100-pcie-40gb"),
        (("--model", "Llama-3-8B", "--on", "zz"), "no card 'zz'"),
        (("--model", "Llama-3-8B", "--tensor-parallel", "3"), "is 3, which does not divide the 1"),
        (("/no/such/script",), "can't read script /no/such/script"),
    ],
)
def test_wrong_input_is_told(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        run(*arguments)


@pytest.mark.parametrize(
    "name", ["$(rm -rf /)", "'; DROP TABLE", "a" * 128, "ünï-7b", "../../x-7b"]
)
def test_hostile_names_are_only_names(name: str) -> None:
    found = document("--model", name, "--model-params", "7B")
    assert found["model"]["architecture"]["parameters"] == 7e9


def test_a_trace_takes_the_place_of_the_formula(tmp_path: Path) -> None:
    record = {
        "version": 1, "peak_bytes": 24 * 2**30, "torch": "2.13.0", "precision": "bf16",
        "device": "cuda", "steps": 2,
        "by_category": {
            "parameters": 16 * 2**30, "gradients": 0, "optimizer": 0, "activations": 8 * 2**30,
            "temporaries": 0, "buffers": 0, "inputs": 0, "other": 0,
        },
        "by_phase": {"forward": 24 * 2**30, "backward": 20 * 2**30, "optimizer": 0},
    }  # fmt: skip
    file = tmp_path / "crater-memory.json"
    file.write_text(json.dumps(record))
    arguments = ["--model", "Llama-3-8B", "--trace", str(file), "--json"]
    answer = CliRunner().invoke(estimate, arguments)
    assert answer.exit_code == 0, answer.output
    document = json.loads(answer.output)
    assert document["memory"]["decided_by"] == "traced"
    file.write_text("{")
    with pytest.raises(UsageError, match="memory trace"):
        CliRunner().invoke(estimate, arguments, catch_exceptions=False)
