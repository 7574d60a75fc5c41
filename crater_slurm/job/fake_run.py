"""Runs ``build`` and ``step`` on fake tensors with a ledger beside them. Needs torch.

Nothing is computed and no tensor gets memory. Hooks and patches last as long as the run, and
objects that the caller made before are copied, not touched.
"""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch._subclasses import fake_tensor
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._pytree import tree_leaves

from crater_slurm.job import standin
from crater_slurm.job.ledger import Ledger
from crater_slurm.job.memory import MemoryTrace, TraceError

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
_PRECISIONS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_NEEDS_VALUES = (
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
)
_UNKNOWN = (
    fake_tensor.UnsupportedOperatorException,
    fake_tensor.UnsupportedFakeTensorException,
)


class _Parts:
    """What ``build`` gave: ``all`` of it in order, and the models, optimizers and parameters."""

    def __init__(self, given: object) -> None:
        self.all = tuple(given) if isinstance(given, list | tuple) else (given,)
        leaves = tree_leaves(self.all)
        self.models = [leaf for leaf in leaves if isinstance(leaf, torch.nn.Module)]
        self.optimizers = [leaf for leaf in leaves if isinstance(leaf, torch.optim.Optimizer)]
        self.tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        own = [p for model in self.models for p in model.parameters()]
        every = own + [p for group in groups for p in group["params"]]
        self.parameters = list({id(p): p for p in every}.values())
        self.buffers = [b for model in self.models for b in model.buffers()]
        #: What the step itself lowers a model's forward pass to, once it has done so.
        self.autocast: torch.dtype | None = None

    @property
    def states(self) -> list[object]:
        return [leaf for optimizer in self.optimizers for leaf in _state_of(optimizer)]


def fake_run(
    build: object,
    step: Callable[..., object],
    *,
    steps: int,
    device: str,
    precision: str | None,
) -> MemoryTrace:
    """Trace ``steps`` calls of ``step``; arguments and errors as ``trace_memory`` says them."""
    on_gpu = device == "cuda"
    ledger = Ledger(standin.BLOCK_BYTES if on_gpu else 1)
    with ExitStack() as stack, _explained():
        mode = stack.enter_context(fake_tensor.FakeTensorMode(allow_non_fake_inputs=True))
        # torch's own copying of fake parameters sets it off, and nobody could act on it.
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        stack.enter_context(_convertible())
        if on_gpu:
            stack.enter_context(standin.as_the_gpu_does())
            stack.enter_context(standin.CpuStandIn())
        stack.enter_context(ledger)
        parts = _built(build, mode, ledger)
        stack.enter_context(_watched(parts, ledger))
        if on_gpu:
            for optimizer in parts.optimizers:
                standin.step_over_all_parameters(optimizer)
        if precision is not None:
            stack.enter_context(_autocast(parts.models, _AUTOCAST[precision]))
        _repeat(step, parts, steps, ledger)
    return MemoryTrace(
        peak_bytes=sum(ledger.peak.values()),
        by_category=dict(ledger.peak),
        by_phase=dict(ledger.by_phase),
        torch=str(torch.__version__).partition("+")[0],
        precision=precision or _precision_of(parts),
        device=device,
        steps=steps,
    )


def _repeat(step: Callable[..., object], parts: _Parts, steps: int, ledger: Ledger) -> None:
    """The steps, each after a collection, so that no circle of references keeps tensors by luck."""
    for number in range(steps):
        gc.collect()
        if number == 0:
            ledger.forget_peak()
        step(*parts.all)


def _built(build: object, mode: fake_tensor.FakeTensorMode, ledger: Ledger) -> _Parts:
    """The parts, all of them fake; a module is itself callable and means an existing model."""
    given = build
    if callable(build) and not isinstance(build, torch.nn.Module):
        given = build()
    parts = _Parts(given)
    tensors = [*parts.parameters, *parts.buffers, *parts.tensors, *parts.states]
    real = any(
        isinstance(tensor, torch.Tensor) and not isinstance(tensor, fake_tensor.FakeTensor)
        for tensor in tensors
    )
    if real:
        # What is copied is no part of the step, so it is not counted beside its copy.
        with ledger.paused(), fake_tensor.FakeCopyMode(mode):
            parts = _Parts(copy.deepcopy(parts.all))
    if not parts.parameters:
        names = ", ".join(type(part).__name__ for part in parts.all)
        raise TraceError(
            f"build gave no model with parameters, only {names}; return the model and its "
            "optimizer, as step takes them"
        )
    return parts


@contextmanager
def _convertible() -> Iterator[None]:
    """Within, ``model.to(...)`` works on fake parameters. It swaps new for old, which torch refuses
    while weak references point at them; those are its own, of its memory of what it made fake."""
    original = torch.utils.weakref
    torch.utils.weakref = SimpleNamespace(getweakrefs=lambda tensor: [])
    try:
        yield
    finally:
        torch.utils.weakref = original


@contextmanager
def _watched(parts: _Parts, ledger: Ledger) -> Iterator[None]:
    """Tell the ledger whose tensors are whose, now and as they come."""
    ledger.classify(parts.parameters, "parameters")
    ledger.classify(parts.buffers, "buffers")
    ledger.classify(parts.states, "optimizer")
    ledger.classify((p.grad for p in parts.parameters), "gradients")
    ledger.classify(parts.tensors, "inputs")

    def given(_: object, args: object, kwargs: object) -> None:
        if torch.is_autocast_enabled("cpu"):
            parts.autocast = torch.get_autocast_dtype("cpu")
        leaves = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
        ledger.classify((leaf for leaf in leaves if not leaf.requires_grad), "inputs")

    def before(*_: object) -> None:
        ledger.in_optimizer = True
        # Also those whose hook was lost, because a parameter moved after it was set.
        ledger.classify((p.grad for p in parts.parameters), "gradients")

    def after(optimizer: torch.optim.Optimizer, *_: object) -> None:
        ledger.in_optimizer = False
        ledger.classify(_state_of(optimizer), "optimizer")

    def accumulated(parameter: torch.Tensor) -> None:
        ledger.classify([parameter.grad], "gradients")

    handles = [model.register_forward_pre_hook(given, with_kwargs=True) for model in parts.models]
    handles += [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]
    handles += [
        p.register_post_accumulate_grad_hook(accumulated)
        for p in parts.parameters
        if p.requires_grad
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _state_of(optimizer: torch.optim.Optimizer) -> list[object]:
    return [leaf for state in optimizer.state.values() for leaf in tree_leaves(state)]


@contextmanager
def _autocast(models: list[torch.nn.Module], dtype: torch.dtype) -> Iterator[None]:
    """The models' forward passes in ``dtype``; the copies of weights that autocast makes are
    then dropped as early as a training loop drops them."""
    own = [model.__dict__.get("forward") for model in models]
    for model in models:
        forward = model.forward

        def lowered(*args: Any, _forward: Any = forward, **kwargs: Any) -> object:
            with torch.autocast("cpu", dtype=dtype):
                return _forward(*args, **kwargs)

        model.forward = lowered
    try:
        yield
    finally:
        for model, before in zip(models, own, strict=True):
            if before is None:
                del model.forward
            else:
                model.forward = before


@contextmanager
def _explained() -> Iterator[None]:
    """What fake tensors can't do, in words for the one who wrote the step."""
    try:
        yield
    except _NEEDS_VALUES as error:
        raise TraceError(
            f"the step depends on a value inside a tensor ({error.func}), and a trace has shapes "
            "only; leave that branch or selection out of the traced step"
        ) from error
    except _UNKNOWN as error:
        raise TraceError(
            f"the step uses an operator that torch can't run without data: {error}; leave it out "
            "of the traced step, or register a fake implementation for it"
        ) from error


def _precision_of(parts: _Parts) -> str:
    """That of the step's autocast, else of most bytes of the parameters; in crater's words where
    it has one."""
    sizes: dict[torch.dtype, int] = {}
    for parameter in parts.parameters:
        size = parameter.numel() * parameter.element_size()
        sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + size
    dtype = parts.autocast or max(sizes, key=lambda dtype: sizes[dtype])
    name = str(dtype).removeprefix("torch.")
    return _PRECISIONS.get(dtype, "fp8" if name.startswith("float8") else name)
