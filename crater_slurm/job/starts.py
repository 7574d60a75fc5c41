"""Which start of the training this is: a number that all its ranks have and no other start.

A job may start its training several times: torchrun after a failure, a loop around srun. The same
step saved by two of them may differ, so their files must never make one checkpoint.
"""

from __future__ import annotations

import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_KEY = "crater/start"


class Starts:
    """One process's; knows the number once it has been agreed on."""

    def __init__(self) -> None:
        self._store: Any = None
        self._number = ""

    def name(self, otherwise: str) -> str:
        """The start's number; ``otherwise`` where torch.distributed does not run.

        Its store is made anew with every start, and the first rank that comes leaves a number
        there. That is no collective: no rank waits for another. The clock gives the number, so
        that a later start has a higher one.
        """
        store = _store()
        if store is None:
            return otherwise
        if store is not self._store:
            try:
                number = str(time.time_ns() // 1_000_000)
                said = store.compare_set(_KEY, "", number)
                number = said.decode() if isinstance(said, bytes) else str(said)
            except Exception:  # a store that can't, or is gone; the others fare alike
                number = ""
            self._store, self._number = store, number if number.isdigit() else ""
        return self._number or otherwise


def _store() -> Any:
    """The store of torch.distributed's default group; None where there is none."""
    torch = sys.modules.get("torch")
    distributed = getattr(torch, "distributed", None)
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    try:
        return distributed.distributed_c10d._get_default_store()
    except Exception:  # it is not torch's public interface, and another version may lack it
        return None
