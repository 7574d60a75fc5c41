"""``trace_memory``: how much GPU memory a training step needs, told without a GPU.

The step runs on torch's fake tensors, which have shapes and types but no contents: a model of any
size is traced in seconds on a login node. This module is the way in, from Python and from the
command line; it imports torch only when a trace is made, and never runs a step for real.
"""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from crater_slurm.job.memory import DEFAULT_PATH, PATH_VARIABLE, MemoryTrace, TraceError

if TYPE_CHECKING:
    import os

#: Older ones lack the hook that tells when a gradient is there, or lose track of storages.
OLDEST_TORCH = (2, 4)
DEVICES = ("cuda", "cpu")
AUTOCAST = ("bf16", "fp16")
MOST_STEPS = 100


def trace_memory(
    build: object,
    step: Callable[..., object],
    *,
    steps: int = 2,
    device: str = "cuda",
    precision: str | None = None,
    path: str | os.PathLike[str] | None = None,
) -> MemoryTrace:
    """Trace ``steps`` training steps, write the record as JSON and return it.

    ``build()`` makes and returns the model and its optimizer, and what else ``step`` wants, a
    batch for instance. ``step(model, optimizer, ...)`` gets the same and does one whole step:
    forward, loss, backward, ``optimizer.step()``, ``zero_grad()``. Instead of a function,
    ``build`` may be a tuple of existing objects; they are copied, never changed. Two steps are
    the default, because an optimizer makes its state in the first and the second is higher.

    ``device`` "cuda" counts as a GPU's allocator does (blocks of 512 bytes, optimizers over all
    parameters at once) and lets ``.cuda()`` and ``device="cuda"`` pass on a machine without one;
    "cpu" counts exact bytes of a CPU run. ``precision`` "bf16" or "fp16" runs the models'
    forward passes under autocast; leave it out when ``step`` does so itself.

    The file goes to ``path``, else to $CRATER_MEMORY_TRACE, else to crater-memory.json.
    Raises TraceError where torch is missing or too old, the step depends on values of tensors,
    or the file can't be written; errors of ``build`` and ``step`` themselves come through.
    """
    _check(steps, device, precision)
    _require_torch()
    from crater_slurm.job.fake_run import fake_run

    trace = fake_run(build, step, steps=steps, device=device, precision=precision)
    trace.write(path)
    return trace


def _check(steps: int, device: str, precision: str | None) -> None:
    if not 1 <= steps <= MOST_STEPS:
        raise TraceError(f"steps is {steps}; give 1 to {MOST_STEPS}, 2 are enough as a rule")
    if device not in DEVICES:
        raise TraceError(f"device is {device!r}; known are {', '.join(DEVICES)}")
    if precision is not None and precision not in AUTOCAST:
        raise TraceError(
            f"precision is {precision!r}; autocast knows {', '.join(AUTOCAST)}, and other "
            "precisions are made by build"
        )


def _require_torch() -> None:
    wanted = ".".join(map(str, OLDEST_TORCH))
    try:
        import torch
    except ImportError as error:
        raise TraceError(
            f"a memory trace needs torch {wanted} or newer, and {sys.executable} has none; run "
            "it with the Python that trains, or install torch there (a build for CPUs will do)"
        ) from error
    found = str(getattr(torch, "__version__", ""))
    numbers = re.match(r"(\d+)\.(\d+)", found)
    if numbers is None or (int(numbers[1]), int(numbers[2])) < OLDEST_TORCH:
        raise TraceError(
            f"a memory trace needs torch {wanted} or newer; {sys.executable} has "
            f"{found or 'one without a version'}"
        )


def _named(target: str) -> tuple[object, Callable[..., object]]:
    """``build`` and ``step`` of "module:function", which returns both, or "module:build,step"."""
    module_name, _, names = target.partition(":")
    parts = names.split(",")
    if not module_name or not all(part.isidentifier() for part in parts) or len(parts) > 2:
        raise TraceError(
            f"{target!r} names no functions; give MODULE:FUNCTION, which returns build and step, "
            "or MODULE:BUILD,STEP"
        )
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name != module_name:
            raise
        raise TraceError(f"there is no module {module_name}; start in its folder") from error
    missing = [part for part in parts if not callable(getattr(module, part, None))]
    if missing:
        raise TraceError(f"module {module_name} has no function {missing[0]}")
    found = [getattr(module, part) for part in parts]
    pair = found if len(found) == 2 else found[0]()
    if not isinstance(pair, list | tuple) or len(pair) != 2 or not callable(pair[1]):
        raise TraceError(f"{target} gave {type(pair).__name__}, not the pair (build, step)")
    return pair[0], pair[1]


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m crater_slurm.job.trace",
        description="Say how much GPU memory a training step needs, without a GPU.",
    )
    parser.add_argument(
        "target",
        metavar="MODULE:FUNCTION",
        help="returns build and step; or MODULE:BUILD,STEP",
    )
    parser.add_argument("--steps", type=int, default=2, help="steps to trace (2)")
    parser.add_argument("--device", choices=DEVICES, default="cuda", help="what is meant (cuda)")
    parser.add_argument("--precision", choices=AUTOCAST, help="autocast of the forward pass")
    parser.add_argument(
        "--output", metavar="FILE", help=f"the record (${PATH_VARIABLE}, else {DEFAULT_PATH})"
    )
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """Trace what the command line names and print the table; 1 says that it could not be."""
    given = _arguments(words)
    try:
        _require_torch()
        build, step = _named(given.target)
        trace = trace_memory(
            build,
            step,
            steps=given.steps,
            device=given.device,
            precision=given.precision,
            path=given.output,
        )
    except TraceError as error:
        print(f"crater trace: ERROR: {error}", file=sys.stderr)
        return 1
    print(trace.as_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
