"""The job's signal sets a flag, and nothing else happens in the handler: saving there would find
the state half changed. The training loop looks at the flag between two steps.
"""

from __future__ import annotations

import signal
import sys
import threading
import time

from crater_slurm.job.find import gatherer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType
    from typing import Any

    from crater_slurm.job.session import Session


class _Flags:
    """``came``: this process has had the signal. ``agreed``: some rank has. ``answered``: it has
    been saved since."""

    def __init__(self) -> None:
        self.came = False
        self.agreed = False
        self.answered = False
        self.group: Any = None


_flags = _Flags()


def install(number: int) -> bool:
    """Set the flag on this signal, and go on to a Python handler that was there; False outside
    the main thread, where Python installs none."""
    if threading.current_thread() is not threading.main_thread():
        return False
    before = signal.getsignal(number)
    if getattr(before, "of_crater", False):
        return True

    def handler(received: int, frame: FrameType | None) -> None:
        _flags.came = True
        if callable(before):
            before(received, frame)

    handler.of_crater = True  # type: ignore[attr-defined]
    signal.signal(number, handler)
    return True


def should_stop() -> bool:
    """Whether the signal has come; among several ranks, what the last ``due`` agreed on."""
    return _flags.agreed or (_flags.came and _flags.group is None)


def saved() -> None:
    """A save has been made: the signal is answered."""
    _flags.answered = _flags.agreed or _flags.came


def clear() -> None:
    """Forget the signal."""
    global _flags
    _flags = _Flags()


def due(session: Session, step: int, every: int | None, seconds: float | None) -> bool:
    """See ``checkpoint.due``."""
    by_step = bool(every) and every is not None and step > 0 and step % every == 0
    late = seconds is not None and time.monotonic() - session.last_saved >= seconds
    if gatherer() is None:
        _flags.agreed = _flags.came
    else:
        _flags.agreed, late = _agree(_flags.agreed or _flags.came, late)
    again = session.last_step == step
    return not again and (by_step or late or (_flags.agreed and not _flags.answered))


def _agree(came: bool, late: bool) -> tuple[bool, bool]:
    """Whether any rank says so, by way of the CPU: GPUs are not made to wait for it."""
    torch: Any = sys.modules["torch"]
    if _flags.group is None:
        _flags.group = torch.distributed.new_group(backend="gloo")
    word = torch.tensor([came, late], dtype=torch.int32)
    torch.distributed.all_reduce(word, op=torch.distributed.ReduceOp.MAX, group=_flags.group)
    return bool(word[0]), bool(word[1])
