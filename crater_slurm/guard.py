"""A service's round that may fail: it is told once, remembered, and the next round tries again."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from crater_slurm.errors import CraterError

T = TypeVar("T")


class Guard:
    """Runs rounds and raises nothing. ``what`` says what is the matter when one fails.

    ``problem`` is what the last round failed by, empty when it went well; before the first round
    it is what was given.
    """

    def __init__(self, log: logging.Logger, what: str, problem: str = "") -> None:
        self._log = log
        self._what = what
        self.problem = problem

    def run(self, act: Callable[[], T]) -> T | None:
        """What ``act`` gives; None when it fails. A defect of ours is logged with its traceback."""
        result: T | None = None
        try:
            result = act()
        except CraterError as error:
            problem = f"{self._what}: {error}"
            if problem != self.problem:
                self._log.warning("%s", problem)
        except Exception:
            problem = f"{self._what}; see the log"
            if problem != self.problem:
                self._log.exception("%s", self._what)
        else:
            problem = ""
        self.problem = problem
        return result
