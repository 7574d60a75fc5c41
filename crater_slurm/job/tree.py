"""A state taken apart: what is large becomes leaves with a path each, the rest a small pickle.

Leaves are torch tensors, numpy arrays and long byte strings. The pickle has their numbers in
their places, so it stays some KiB however large the model is. It refuses to guess: what can't be
pickled is an error that names the place in the state.
"""

from __future__ import annotations

import io
import pickle
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

#: Shorter byte strings stay in the pickle.
LEAST_BYTES = 4096
_LONGEST_PATH = 256


class StateError(ValueError):
    """A state can't be saved, or a file is none; the message names the place and what to do."""


class Leaves:
    """The leaves of one state, each object once, in the order in which they are met."""

    def __init__(self) -> None:
        self.objects: list[Any] = []
        self.paths: list[str] = []
        self._numbers: dict[int, int] = {}
        self._test = leaf_test()

    def number(self, value: Any, path: str | None = None) -> int | None:
        """Number of a leaf, a new one where it has none yet; None for what is no leaf."""
        known = self._numbers.get(id(value))
        if known is None and self._test(value):
            known = self._numbers[id(value)] = len(self.objects)
            self.objects.append(value)
            self.paths.append(path if path is not None else f"object.{known}")
        return known

    def walk(self, state: Any) -> None:
        """Number the leaves in nested dicts, lists and tuples, under their paths."""
        waiting: list[tuple[str, Any]] = [("", state)]
        seen: set[int] = set()
        while waiting:
            path, value = waiting.pop()
            if isinstance(value, (dict, list, tuple)):
                if value and id(value) not in seen:
                    seen.add(id(value))
                    waiting.extend(reversed(_children(path, value)))
            else:
                self.number(value, path or "state")


def _children(path: str, value: Any) -> list[tuple[str, Any]]:
    before = path + "." if path else ""
    if isinstance(value, dict):
        return [(before + _word(key), child) for key, child in value.items()]
    return [(f"{before}{number}", child) for number, child in enumerate(value)]


def _word(key: Any) -> str:
    if isinstance(key, str):
        return key
    return str(key) if isinstance(key, (int, float, bool)) else type(key).__name__


def unique_names(paths: list[str], taken: set[str]) -> list[str]:
    """Paths as names of a file's entries: valid text, not endless, each once, none of ``taken``."""
    names, used = [], set(taken)
    for path in paths:
        name = path.encode("utf-8", "replace").decode()[:_LONGEST_PATH]
        number, whole = 2, name
        while whole in used:
            whole = f"{name}#{number}"
            number += 1
        used.add(whole)
        names.append(whole)
    return names


def leaf_test() -> Callable[[Any], bool]:
    """What tells leaves from the rest, with the libraries that are loaded by now: a state can't
    hold a tensor without torch."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    kinds: tuple[type, ...] = ()
    if torch is not None and hasattr(torch, "nn"):
        kinds = tuple({torch.Tensor, torch.nn.Parameter, getattr(torch.nn, "Buffer", torch.Tensor)})
    array = numpy.ndarray if numpy is not None and hasattr(numpy, "ndarray") else None

    def test(value: Any) -> bool:
        kind = type(value)
        if kind in kinds:
            return _is_plain(torch, value)
        if kind is array:
            return not value.dtype.hasobject and value.dtype.kind != "V"
        return (kind is bytes or kind is bytearray) and len(value) >= LEAST_BYTES

    return test


def _is_plain(torch: Any, tensor: Any) -> bool:
    """A tensor with a storage of its own kind; sparse, quantised and meta ones pickle themselves,
    and the plain tensors that they are made of are leaves again."""
    return (
        tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_nested
        and not tensor.is_meta
    )


class _Pickler(pickle.Pickler):
    def __init__(self, file: Any, leaves: Leaves) -> None:
        super().__init__(file, protocol=5)
        self._leaves = leaves

    def persistent_id(self, obj: Any) -> int | None:
        return self._leaves.number(obj)


def dumps(state: Any, leaves: Leaves) -> bytes:
    """The state with leaves' numbers in their places. Raises StateError."""
    file = io.BytesIO()
    try:
        _Pickler(file, leaves).dump(state)
    except Exception as error:
        path, reason = _find_bad(state, error)
        raise StateError(
            f"The state can't be saved: {path} ({reason}). Leave it out, or put plain values, "
            "tensors or a state_dict() there."
        ) from error
    return file.getvalue()


def _find_bad(state: Any, error: Exception) -> tuple[str, str]:
    """The deepest place in the state that does not pickle by itself, and why."""
    path, value, reason, depth = "", state, error, 0
    while isinstance(value, (dict, list, tuple)) and depth < 100:
        depth += 1
        for child_path, child in _children(path, value):
            failed = _fails(child)
            if failed is not None:
                path, value, reason = child_path, child, failed
                break
        else:
            break
    return f"state[{path}]" if path else "the whole of it", f"{type(value).__name__}: {reason}"


def _fails(value: Any) -> Exception | None:
    try:
        _Pickler(io.BytesIO(), Leaves()).dump(value)
    except Exception as error:
        return error
    return None


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: Any, leaves: list[Any]) -> None:
        super().__init__(file)
        self._leaves = leaves

    def persistent_load(self, pid: Any) -> Any:
        if type(pid) is not int or not 0 <= pid < len(self._leaves):
            raise StateError(
                f"The file's skeleton names a tensor {pid!r:.40} that it does not have."
            )
        return self._leaves[pid]


def loads(data: bytes | memoryview, leaves: list[Any]) -> Any:
    """The state again, with leaves in the places of their numbers. Runs what the pickle says, so
    the file has to be the user's own."""
    return _Unpickler(io.BytesIO(data), leaves).load()
