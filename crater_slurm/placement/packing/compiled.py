"""Loops that numba compiles where it is installed, and that plain Python runs where it is not.

One source for both: the compiled function is the function that can be read here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

F = TypeVar("F", bound=Callable[..., object])

try:
    import numba

    COMPILED = True
except ImportError:  # an extra; without it the same loops run a few hundred times slower
    COMPILED = False


def loop(function: F) -> F:
    """The function compiled, without the interpreter's lock, and kept on disk for the next start.

    A compiled function is kept by its own file's date alone, so loops that call each other stand
    in one file: else a change of the inner one would leave the outer one as it was.
    """
    if not COMPILED:
        return function
    try:
        return cast(F, numba.njit(cache=True, nogil=True)(function))
    except RuntimeError:  # no folder to keep it in: a service without a home
        return cast(F, numba.njit(nogil=True)(function))
