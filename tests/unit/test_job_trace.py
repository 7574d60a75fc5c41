"""``trace_memory`` on real torch: sizes by hand, the real allocator's account, a 7B model for free."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from crater_slurm.job import MemoryTrace, trace_memory
from crater_slurm.model.memory_trace import read_memory_trace

torch = pytest.importorskip("torch", reason="torch is not installed: no build for CPUs was found")

import llama_sample  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402
from trace_samples import MLP_BLOCKS, MLP_BYTES, Step, forward_only, mlp, mlp_step  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def trace(tmp_path: Path) -> Callable[..., MemoryTrace]:
    return partial(trace_memory, path=tmp_path / "trace.json")


def test_each_category_of_an_mlp_with_adam_is_what_the_hand_computes(trace: Any) -> None:
    found = trace(mlp, mlp_step, device="cpu")
    assert found.by_category == {
        "parameters": MLP_BYTES,
        "gradients": MLP_BYTES,
        # Two moments, and a step count in fp32 for each of the four tensors.
        "optimizer": 2 * MLP_BYTES + 4 * 4,
        # Of the largest weight: the root of its second moment, and that divided.
        "temporaries": 2 * 4 * 100 * 200,
        # The loss; the batch went when the backward pass had used it.
        "activations": 4,
        "inputs": 0,
        "buffers": 0,
        "other": 0,
    }
    assert found.peak_bytes == sum(found.by_category.values()) == found.by_phase["optimizer"]


def test_a_gpu_counts_in_blocks_and_its_optimizer_takes_all_parameters_at_once(trace: Any) -> None:
    found = trace(mlp, mlp_step)
    assert found.by_category == {
        "parameters": MLP_BLOCKS,
        "gradients": MLP_BLOCKS,
        "optimizer": 2 * MLP_BLOCKS + 4 * 512,
        "temporaries": MLP_BLOCKS,
        "activations": 512,
        "inputs": 0,
        "buffers": 0,
        "other": 0,
    }


def test_an_optimizer_told_to_go_one_by_one_does_so_on_a_gpu_too(trace: Any) -> None:
    def one_by_one() -> object:
        model, _ = mlp()
        return model, torch.optim.Adam(model.parameters(), foreach=False)

    assert trace(one_by_one, mlp_step).by_category["temporaries"] == 2 * 512 * 157


def test_activations_of_a_chain_are_its_outputs_and_one_result_under_way(trace: Any) -> None:
    layers, side, rows = 5, 64, 16
    chain = nn.Sequential(
        *(part for _ in range(layers) for part in (nn.Linear(side, side, bias=False), nn.Tanh()))
    )
    found = trace(chain, forward_only(rows, side), device="cpu", steps=1)
    output = 4 * rows * side
    # Tanh keeps its output, a linear layer its input, which is the tanh before it; the highest
    # point is the last tanh, whose input still lives.
    assert found.by_category["activations"] == (layers + 1) * output
    assert found.by_category["inputs"] == output
    assert found.by_category["parameters"] == layers * 4 * side * side
    assert found.by_phase == {"forward": found.peak_bytes, "backward": 0, "optimizer": 0}


def test_without_autograd_nothing_is_kept(trace: Any) -> None:
    chain = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(5)))

    def step(model: nn.Module) -> None:
        with torch.no_grad():
            model(torch.randn(16, 64))

    found = trace(chain, step, device="cpu", steps=1)
    assert found.by_category["activations"] == 0
    assert found.by_category["temporaries"] == 2 * 4 * 16 * 64


def test_the_second_step_has_the_optimizer_s_state_below_it(trace: Any) -> None:
    first, both = (trace(mlp, mlp_step, device="cpu", steps=n) for n in (1, 2))
    state = both.by_category["optimizer"]
    assert both.by_phase["backward"] - first.by_phase["backward"] == state
    # At the first step's end the state is there too, and counted as what it is.
    assert first.by_category["optimizer"] == state


def test_frozen_parameters_have_neither_gradient_nor_state(trace: Any) -> None:
    def frozen() -> object:
        model, _ = mlp()
        model[0].requires_grad_(False)
        return model, torch.optim.Adam(model[2].parameters())

    found = trace(frozen, mlp_step, device="cpu")
    trained = 4 * (200 * 50 + 50)
    assert found.by_category["parameters"] == MLP_BYTES
    assert found.by_category["gradients"] == trained
    assert found.by_category["optimizer"] == 2 * trained + 2 * 4


def test_accumulated_gradients_are_counted_once(trace: Any) -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(3):
            model(torch.randn(10, 100)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    assert trace(mlp, step, device="cpu").by_category["gradients"] == MLP_BYTES


def test_buffers_and_a_batch_from_build_have_their_own_categories(trace: Any) -> None:
    def build() -> object:
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
        return model, torch.optim.SGD(model.parameters(), lr=0.1), {"x": torch.randn(32, 8)}

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Any]) -> None:
        model(batch["x"]).sum().backward()
        optimizer.step()

    found = trace(build, step, device="cpu")
    # Mean and variance in fp32, the count of batches in int64.
    assert found.by_category["buffers"] == 2 * 4 * 8 + 8
    assert found.by_category["inputs"] == 4 * 32 * 8
    assert found.by_category["optimizer"] == 0


# The same on a real machine.


def small_llama(checkpointing: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = llama_sample.Llama(2, 64, 4, 172, 100, checkpointing)
    return model, torch.optim.AdamW(model.parameters())


def llama_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    tokens = torch.randint(0, 100, (4, 64))
    functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()


@cache
def traced_llama(checkpointing: bool) -> MemoryTrace:
    with tempfile.TemporaryDirectory() as folder:
        build = partial(small_llama, checkpointing)
        return trace_memory(build, llama_step, device="cpu", path=Path(folder, "trace.json"))


def allocated_peak(build: Callable[[], Any], step: Step) -> int:
    """What torch's own allocator for the CPU had given out at most, over two real steps."""
    model, optimizer = build()
    live = peak = sum(p.untyped_storage().nbytes() for p in model.parameters())
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        for _ in range(2):
            step(model, optimizer)
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return int(peak)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_trace_agrees_with_what_a_real_run_allocates(checkpointing: bool) -> None:
    real = allocated_peak(partial(small_llama, checkpointing), llama_step)
    assert traced_llama(checkpointing).peak_bytes == pytest.approx(real, rel=0.01)


def test_activation_checkpointing_lowers_the_peak() -> None:
    plain, saving = traced_llama(False), traced_llama(True)
    assert saving.peak_bytes < 0.75 * plain.peak_bytes
    assert saving.by_category["activations"] < 0.7 * plain.by_category["activations"]
    assert saving.by_category["parameters"] == plain.by_category["parameters"]


def test_a_7b_model_is_traced_from_the_command_line_without_its_memory(tmp_path: Path) -> None:
    file = tmp_path / "7b.json"
    code = (
        "import sys; from crater_slurm.job.trace import main\n"
        "code = main(sys.argv[1:])\n"
        # Not ru_maxrss: a process that was forked begins with its parent's.
        "print(code, open('/proc/self/status').read().split('VmHWM:')[1].split()[0])"
    )
    words = ["llama_sample:build_and_step", "--steps", "1", "--output", str(file)]
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "unit")])
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    status, kib = done.stdout.split()[-2:]
    assert status == "0"
    assert int(kib) < 1.5 * 2**20
    found = read_memory_trace(file.read_text())
    weights = 2 * 6_738_415_616  # Llama 2 7B's own count of parameters, in bf16
    assert found.by_category == {
        "parameters": weights,
        "gradients": weights,
        # Two moments, and a step count for each of 32 x 9 + 3 tensors.
        "optimizer": 2 * weights + 291 * 512,
        "temporaries": weights,
        # The logits in fp32, which the step still holds by their name, and the loss.
        "activations": 4 * 2048 * 32000 + 512,
        "inputs": 8 * 2048,
        "buffers": 0,
        "other": 0,
    }
    assert (found.precision, found.device, found.steps) == ("bf16", "cuda", 1)
    assert f"{found.peak_bytes:,} bytes" in done.stdout


# The file.


def test_the_file_is_read_by_crater_as_it_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "deep.json"
    monkeypatch.setenv("CRATER_MEMORY_TRACE", str(file))
    written = trace_memory(mlp, mlp_step)
    read = read_memory_trace(file.read_text())
    for name in read.__dataclass_fields__:
        assert getattr(read, name) == getattr(written, name)
    assert read.torch == torch.__version__.partition("+")[0]
    assert list(tmp_path.iterdir()) == [file]
