"""Carries out what was decided for a job: noted first, then done, then the outcome noted.

The note comes first, so that neither a crash nor a store that went away makes a step happen twice.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Protocol

from crater_slurm.errors import SlurmError, StoreError, UsageError
from crater_slurm.store.records import JobAction
from crater_slurm.store.repository import Store

_log = logging.getLogger("crater.scheduler.actions")


class Update(Protocol):
    """Changes a job in Slurm, as ``slurm.jobs.update`` does."""

    def __call__(self, label: str, **changes: str | int) -> None: ...


class Actor:
    """Acts on jobs; ``dry_run`` only notes. ``acted`` is told kind, action and outcome of each."""

    def __init__(
        self,
        update: Update,
        store: Callable[[], Store],
        clock: Callable[[], float],
        *,
        dry_run: bool,
        acted: Callable[[str, str, str], None] = lambda *_: None,
    ) -> None:
        self._update = update
        self._open_store = store
        self.clock = clock
        self.dry_run = dry_run
        self._acted = acted

    def act(self, action: JobAction, **changes: str | int) -> str:
        """The outcome. Raises StoreError, and has then done nothing."""
        outcome = "dry_run" if self.dry_run else "begun"
        action = dataclasses.replace(action, outcome=outcome)
        number = self._open_store().add_action(action)
        if self.dry_run:
            return self._told(action, outcome, action.message)
        outcome, message = "done", action.message
        try:
            self._update(action.job, **changes)
        except (SlurmError, UsageError) as error:
            outcome, message = "failed", f"{action.message}; {error}"
        try:
            self._open_store().finish_action(number, outcome, message)
        except StoreError as error:
            _log.warning("job %s: how its change ended can't be noted: %s", action.job, error)
        return self._told(action, outcome, message)

    def note(self, action: JobAction) -> None:
        """Record and log what is not acted upon. Raises StoreError."""
        self._open_store().add_action(dataclasses.replace(action, outcome="noted"))
        self._told(action, "noted", action.message)

    def _told(self, action: JobAction, outcome: str, message: str) -> str:
        _log.info(
            "job %s (uid %d, plan %s): %s %s=%s %s: %s",
            *(action.job, action.user_id, action.plan_id, action.kind, action.action),
            *(action.value, outcome, message),
        )
        self._acted(action.kind, action.action, outcome)
        return outcome
