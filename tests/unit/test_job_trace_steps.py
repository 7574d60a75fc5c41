"""What users may write in ``build`` and ``step``, what of it is refused, and that nothing is left."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from crater_slurm.job import MemoryTrace, TraceError, trace_memory

torch = pytest.importorskip("torch", reason="torch is not installed: no build for CPUs was found")

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.nn.functional import scaled_dot_product_attention as attention  # noqa: E402
from trace_samples import Step, forward_only, mlp, mlp_step  # noqa: E402


@pytest.fixture
def trace(tmp_path: Path) -> Callable[..., MemoryTrace]:
    return partial(trace_memory, path=tmp_path / "trace.json")


def test_code_for_a_gpu_runs_without_one(trace: Any) -> None:
    def build() -> object:
        model, _ = mlp()
        model = model.cuda().to("cuda:0").to(torch.device("cuda"))
        return model, torch.optim.Adam(model.parameters())

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        batch = torch.randn(10, 100, device="cuda").cuda(non_blocking=True).to(0)
        loss = model(batch).sum()
        del batch
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    assert trace(build, step) == trace(mlp, mlp_step)


@pytest.mark.parametrize("move", ["bfloat16", "cpu"])
def test_a_model_may_change_its_type_while_it_is_built(trace: Any, move: str) -> None:
    def build() -> object:
        layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
        return getattr(nn.TransformerEncoder(layer, 2), move)()

    size = {"bfloat16": 2, "cpu": 4}[move]
    layer = (192 * 64 + 192) + (64 * 64 + 64) + (64 * 128 + 128) + (128 * 64 + 64) + 4 * 64

    def step(model: nn.Module) -> None:
        model(torch.randn(7, 3, 64, dtype=next(model.parameters()).dtype))

    for device in ("cpu", "cuda"):
        found = trace(build, step, device=device, steps=1)
        assert found.by_category["parameters"] == pytest.approx(2 * layer * size, rel=0.05)


def test_autocast_for_a_gpu_is_on(trace: Any) -> None:
    types = []

    def step(model: nn.Module, _: object) -> None:
        for dtype in (torch.bfloat16, None):
            with torch.autocast("cuda", dtype=dtype):
                types.append(model(torch.randn(10, 100, device="cuda")).dtype)

    found = trace(mlp, step, steps=1)
    assert types == [torch.bfloat16, torch.float16]
    assert found.precision == "fp16"


def test_precision_lowers_the_activations_and_not_the_weights(trace: Any) -> None:
    wide = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8)))
    step = forward_only(4096, 64)
    plain, low = (trace(wide, step, precision=p, steps=1) for p in (None, "bf16"))
    assert (plain.precision, low.precision) == ("fp32", "bf16")
    assert low.by_category["parameters"] == plain.by_category["parameters"]
    # Seven results are kept, and an eighth is made; in bf16 with the input cast, and the weights.
    output, weight = 4 * 4096 * 64, 4 * 64 * 64
    assert plain.by_category["activations"] == 8 * output
    assert low.by_category["activations"] == 8 * output // 2 + output // 2 + 8 * weight // 2
    assert "forward" not in wide.__dict__


def test_dropout_in_attention_costs_no_matrix_of_scores_on_a_gpu(trace: Any) -> None:
    def step(dropout: float) -> Step:
        def forward(model: nn.Module) -> None:
            x = model(torch.randn(1, 2, 512, 32))
            functional.scaled_dot_product_attention(x, x, x, None, dropout, True)
            attention(x, x, x, dropout_p=dropout)

        return forward

    layer = nn.Linear(32, 32)
    with_it, without = (trace(layer, step(d), steps=1).peak_bytes for d in (0.1, 0.0))
    assert with_it == without < 4 * 2 * 512 * 512


def test_nor_does_it_within_torch_s_own_attention(trace: Any) -> None:
    def step(model: nn.Module) -> None:
        x = torch.randn(1, 512, 32)
        model(x, x, x, need_weights=False)

    peaks = [
        trace(nn.MultiheadAttention(32, 2, dropout=p, batch_first=True), step, steps=1).peak_bytes
        for p in (0.1, 0.0)
    ]
    assert peaks[0] == peaks[1] < 4 * 2 * 512 * 512


def test_an_existing_model_is_copied_and_stays_as_it_was(trace: Any) -> None:
    model, optimizer = mlp()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert trace((model, optimizer), mlp_step, device="cpu") == trace(mlp, mlp_step, device="cpu")
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not optimizer.state
    assert all(p.grad is None for p in model.parameters())
    assert optimizer.param_groups[0]["foreach"] is None


def test_a_real_batch_of_the_caller_s_counts_as_input(trace: Any) -> None:
    batch = torch.randn(10, 100)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    assert trace(mlp, step, device="cpu").by_category["inputs"] == 4 * 10 * 100


def test_a_loss_may_be_printed(trace: Any) -> None:
    seen = []

    def step(model: nn.Module, *_: object) -> None:
        seen.append(model(torch.randn(10, 100)).sum().item())

    trace(mlp, step, steps=2)
    assert seen == [1.0, 1.0]


@pytest.mark.parametrize(
    ("use", "operator"),
    [
        (lambda y: 1 if y.sum() > 0 else 2, "_local_scalar_dense"),
        (lambda y: y[y > 0], "nonzero"),
        (lambda y: torch.zeros(y.argmax()), "_local_scalar_dense"),
    ],
)
def test_a_step_that_depends_on_values_is_refused(trace: Any, use: Any, operator: str) -> None:
    def step(model: nn.Module, *_: object) -> None:
        use(model(torch.randn(10, 100)))

    with pytest.raises(TraceError, match=rf"value inside a tensor \(aten\.{operator}.*shapes"):
        trace(mlp, step)


def test_an_error_of_the_step_comes_through_and_leaves_torch_as_it_was(trace: Any) -> None:
    def step(*_: object) -> None:
        raise ZeroDivisionError

    def patched() -> tuple[object, ...]:
        attention = functional.scaled_dot_product_attention
        return torch.autocast.__init__, torch.utils.weakref, attention, warnings.filters[:]

    before = patched()
    with pytest.raises(ZeroDivisionError):
        trace(mlp, step, precision="bf16")
    assert patched() == before
    assert type(torch.zeros(1)) is torch.Tensor


@pytest.mark.parametrize("given", [lambda: None, lambda: ("model", 7), ()])
def test_a_build_without_parameters_is_refused(trace: Any, given: object) -> None:
    with pytest.raises(TraceError, match="build gave no model with parameters"):
        trace(given, mlp_step)
