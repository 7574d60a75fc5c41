"""A CPU that stands in for a GPU while a step is traced, so that ``.cuda()`` needs none.

Fake tensors on a "cuda" device end the whole process in builds of torch without CUDA, and their
autocast is off wherever no GPU is. On the CPU every build behaves the same, so that is where a
trace runs. It refuses nothing: calls that ask the driver (torch.cuda.synchronize and the like)
go to torch as they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

#: A GPU's allocator gives no less, and multiples of it.
BLOCK_BYTES = 512
_NAME = re.compile(r"cuda(:\d+)?")
_CPU = torch.device("cpu")


def _moved(value: object) -> object:
    """The CPU for any name of a GPU, everything else as it is."""
    if isinstance(value, torch.device):
        return _CPU if value.type == "cuda" else value
    return _CPU if isinstance(value, str) and _NAME.fullmatch(value) else value


class CpuStandIn(TorchFunctionMode):
    """Sends to the CPU what asks for a GPU, by device, name or number."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        args = tuple(_moved(value) for value in args)
        if func is torch.Tensor.to and len(args) > 1 and type(args[1]) is int:
            args = (args[0], _CPU, *args[2:])
        if "device" in kwargs:
            number = type(kwargs["device"]) is int
            kwargs["device"] = _CPU if number else _moved(kwargs["device"])
        if func is _attention:
            return attention_without_dropout(*args, **kwargs)
        return func(*args, **kwargs)


_attention = functional.scaled_dot_product_attention


def attention_without_dropout(*args: Any, **kwargs: Any) -> object:
    """A GPU's fused attention draws its dropout again in the backward pass and keeps no mask; the
    CPU's can't, and would count the whole matrix of scores instead."""
    if len(args) > 4:
        args = (*args[:4], 0.0, *args[5:])
    if "dropout_p" in kwargs:
        kwargs["dropout_p"] = 0.0
    return _attention(*args, **kwargs)


@contextmanager
def as_the_gpu_does() -> Iterator[None]:
    """Within, ``torch.autocast("cuda")`` is the CPU's, which is on (the GPU's would turn itself
    off and the step would be counted in full precision), and attention is a GPU's also where
    torch's own modules call it, which no function mode sees."""
    original = torch.autocast.__init__

    def on_the_cpu(self: Any, device_type: str, dtype: Any = None, **options: Any) -> None:
        if _NAME.fullmatch(device_type):
            device_type = "cpu"
            dtype = torch.float16 if dtype is None else dtype
        original(self, device_type, dtype, **options)

    torch.autocast.__init__ = on_the_cpu
    functional.scaled_dot_product_attention = attention_without_dropout
    try:
        yield
    finally:
        torch.autocast.__init__ = original
        functional.scaled_dot_product_attention = _attention


def step_over_all_parameters(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer work as it does on a GPU by default: on all parameters at once, which is
    faster there and holds a temporary as large as all of them."""
    for group in optimizer.param_groups:
        if group.get("foreach", False) is None and not group.get("fused"):
            group["foreach"] = not group.get("differentiable", False)
