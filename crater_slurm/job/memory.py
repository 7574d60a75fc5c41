"""The record that a memory trace leaves: bytes at the peak by category, as a small JSON file.

It names no model and no path of the user's; crater's services read it with their own reader,
since nothing in this package may import the rest of the suite.
"""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict, dataclass

VERSION = 1
#: Environment variable with the path of the file; without it, the file of the working folder.
PATH_VARIABLE = "CRATER_MEMORY_TRACE"
DEFAULT_PATH = "crater-memory.json"

#: What holds memory. ``activations``: made while autograd records. ``temporaries``: made while it
#: does not, so in the backward pass and in the optimizer, where they become neither gradient nor
#: state. ``inputs``: given to the model. ``other``: what belongs to nothing of these.
CATEGORIES = (
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "temporaries",
    "buffers",
    "inputs",
    "other",
)

PHASES = ("forward", "backward", "optimizer")


class TraceError(RuntimeError):
    """A step can't be traced; the message says what stands in the way and what to do."""


@dataclass(frozen=True)
class MemoryTrace:
    """Live bytes of tensors at the highest point of the traced steps.

    ``by_category`` adds up to the peak; ``by_phase`` has the highest total of each phase, 0 for one
    that did not happen. ``device`` is what was meant, "cuda" or "cpu"; ``precision`` that of
    autocast, else the one of most parameters.
    """

    peak_bytes: int
    by_category: dict[str, int]
    by_phase: dict[str, int]
    torch: str
    precision: str
    device: str
    steps: int
    version: int = VERSION

    def as_json(self) -> str:
        """The file's text: one object, ended by a newline."""
        return json.dumps(asdict(self), indent=2, sort_keys=True) + "\n"

    def as_text(self) -> str:
        """A table for people, largest first; what holds nothing is left out."""
        held = sorted(self.by_category.items(), key=lambda item: -item[1])
        rows = [("peak", self.peak_bytes), *((name, size) for name, size in held if size)]
        lines = [f"{name:<12} {size:>18,} bytes  {size / 2**30:>9.3f} GiB" for name, size in rows]
        highest = ", ".join(f"{name} {size / 2**30:.3f}" for name, size in self.by_phase.items())
        lines.append(f"highest in GiB: {highest}")
        lines.append(f"{self.steps} steps, {self.precision}, for {self.device}, torch {self.torch}")
        return "\n".join(lines)

    def write(self, path: str | os.PathLike[str] | None = None) -> str:
        """Write the file in one step, so that nobody reads half of it, and return its path. A
        link stays, and what it points to is replaced; into a pipe or a device the text goes.

        Without ``path``: $CRATER_MEMORY_TRACE, else crater-memory.json in the working folder.
        """
        chosen = os.fspath(path if path is not None else default_path())
        try:
            _write(chosen, self.as_json())
        except OSError as error:
            raise TraceError(
                f"the trace can't be written to {chosen}: {error.strerror}; give another path, "
                f"or set {PATH_VARIABLE}"
            ) from error
        return chosen


def default_path() -> str:
    """Where a trace goes when nobody says so; an empty variable counts as none."""
    return os.environ.get(PATH_VARIABLE) or DEFAULT_PATH


def _write(path: str, text: str) -> None:
    """A pipe or a device is written to; renaming onto it would take its place for everybody."""
    if os.path.exists(path) and not os.path.isfile(path):
        with open(path, "w", encoding="utf-8") as stream:
            stream.write(text)
    else:
        _replace(os.path.realpath(path), text)


def _replace(path: str, text: str) -> None:
    folder = os.path.dirname(path)
    handle, temporary = tempfile.mkstemp(prefix=".crater-memory.", dir=folder)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except OSError:
        os.unlink(temporary)
        raise


def _umask() -> int:
    """The process's mask, which can only be read by setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
