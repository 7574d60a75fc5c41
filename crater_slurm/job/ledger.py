"""Which bytes live while torch works, and whose they are: a count of storages, never of contents.

Every operator passes here, below autograd. A storage is entered when an operator first shows it
and struck out when the last tensor on it is gone, so views cost nothing and what the backward
pass frees early is free. What a kernel takes and gives back within one operator is not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from crater_slurm.job.memory import CATEGORIES, PHASES

#: Categories that a better knowledge may replace.
_PROVISIONAL = frozenset({"activations", "temporaries", "other"})


class _Holding:
    """One live storage. ``birth`` orders storages by the time they were entered."""

    __slots__ = ("birth", "category", "reference", "size")

    def __init__(self, size: int, category: str, birth: int) -> None:
        self.size = size
        self.category = category
        self.birth = birth
        self.reference: weakref.ref[Any] | None = None


def storages_of(tensor: torch.Tensor) -> Iterator[Any]:
    """The storages below a tensor; one that wraps others (quantised, distributed) has several."""
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            inner = getattr(tensor, name)
            if isinstance(inner, torch.Tensor):
                yield from storages_of(inner)
    elif tensor.layout is torch.strided:
        yield tensor.untyped_storage()
    else:
        for part in _parts_of_sparse(tensor):
            yield part.untyped_storage()


def _parts_of_sparse(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    if tensor.layout is torch.sparse_coo:
        return (tensor._indices(), tensor._values())
    return ()


class Ledger(TorchDispatchMode):
    """Live bytes by category, the same at the highest point since ``forget_peak``, and the highest
    total of each phase.

    ``block_bytes`` is what the device's allocator rounds each storage up to.
    """

    def __init__(self, block_bytes: int = 1) -> None:
        super().__init__()
        self.in_optimizer = False
        self.live = dict.fromkeys(CATEGORIES, 0)
        self._block_bytes = block_bytes
        self._held: dict[int, _Holding] = {}
        self._births = 0
        self._paused = False
        self.forget_peak()

    def forget_peak(self) -> None:
        """Start again from what lives now."""
        self.peak = dict(self.live)
        self.by_phase = dict.fromkeys(PHASES, 0) | {"forward": sum(self.live.values())}
        self._peak_births = self._births

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within, new storages are not entered; those that go are struck out all the same."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def classify(self, tensors: Iterable[object], category: str) -> None:
        """Say whose these tensors are, where only a guess stood so far.

        A storage that was there at the peak moves in the peak's account as well: a gradient is
        known as one only after the operator that made it.
        """
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                for storage in storages_of(tensor):
                    self._enter(storage, category)
                    self._move(self._held[id(storage)], category)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        kwargs = kwargs or {}
        if self._paused:
            return _run(func, args, kwargs)
        self._note(tree_leaves((args, kwargs)), "other")
        result = _run(func, args, kwargs)
        # Autograd records in the forward pass and where a checkpoint computes again, not in the
        # backward pass nor in an optimizer.
        made = "activations" if torch.is_grad_enabled() else "temporaries"
        self._note(tree_leaves(result), made)
        self._measure()
        return result

    def _measure(self) -> None:
        total = sum(self.live.values())
        phase = self._phase()
        self.by_phase[phase] = max(self.by_phase[phase], total)
        if total > sum(self.peak.values()):
            self.peak = dict(self.live)
            self._peak_births = self._births

    def _note(self, leaves: Iterable[object], category: str) -> None:
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                for storage in storages_of(leaf):
                    self._enter(storage, category)

    def _enter(self, storage: Any, category: str) -> None:
        key = id(storage)
        size = -(-storage.nbytes() // self._block_bytes) * self._block_bytes
        holding = self._held.get(key)
        if holding is None:
            self._births += 1
            holding = self._held[key] = _Holding(size, category, self._births)
            holding.reference = weakref.ref(storage, lambda _: self._strike(key))
            self.live[category] += size
        elif holding.size != size:
            self._births += 1
            self.live[holding.category] += size - holding.size
            holding.size, holding.birth = size, self._births

    def _strike(self, key: int) -> None:
        holding = self._held.pop(key)
        self.live[holding.category] -= holding.size

    def _move(self, holding: _Holding, category: str) -> None:
        if holding.category == category or holding.category not in _PROVISIONAL:
            return
        accounts = [self.live]
        if holding.birth <= self._peak_births:
            accounts.append(self.peak)
        for account in accounts:
            account[holding.category] -= holding.size
            account[category] += holding.size
        holding.category = category

    def _phase(self) -> str:
        if self.in_optimizer:
            return "optimizer"
        return "forward" if torch._C._current_graph_task_id() == -1 else "backward"


def _run(func: Any, args: Any, kwargs: Any) -> object:
    """The operator's result. A fraction read out of a tensor, which a trace has not, is 1.0:
    steps read the loss to print it. Anything else read would decide sizes or branches."""
    try:
        return func(*args, **kwargs)
    except DataDependentOutputException:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_floating_point():
            return 1.0
        raise
