"""Takes tasks in and has them submitted, each at most once whatever dies in between.

The task is written first, with a token that its job will carry; then Slurm is asked; then the job's
id is written. After a crash the token is looked for in Slurm, for as long as an answer may still be
under way, before anything is sent again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from crater_slurm.alldata import payload
from crater_slurm.alldata.run_as import Account, account
from crater_slurm.alldata.states import State
from crater_slurm.alldata.submission import (
    AwayError,
    DoubtError,
    RefusedError,
    Submitted,
    Submitter,
)
from crater_slurm.alldata.task import Task, fingerprint, parse
from crater_slurm.config.alldata import AllData
from crater_slurm.errors import CraterError, SlurmError, StoreError
from crater_slurm.store.repository import Store
from crater_slurm.store.task_records import NewTask, StoredTask

_log = logging.getLogger("crater.alldata.intake")
#: Slurm was away, and nothing was sent: it is tried again so soon.
_AGAIN_SECONDS = 5.0
#: A task that has no job after so long is looked for: whoever took it in may be dead.
_LOOK_SECONDS = 10.0


class ConflictError(CraterError):
    """A client sent another task under an id that it has used; exit code 1."""


@dataclass(frozen=True, slots=True)
class Taken:
    """A task that was taken in; ``fresh`` is False when it was sent before."""

    task: StoredTask
    fresh: bool


class Intake:
    """Safe to share between threads. ``written`` is called when there is something to deliver."""

    def __init__(
        self,
        settings: AllData,
        store: Callable[[], Store],
        submitter: Submitter,
        *,
        written: Callable[[], None],
        plan_of: Callable[[str], str | None] = lambda token: None,
        clock: Callable[[], float] = time.time,
        find_account: Callable[[str, int], Account] = account,
    ) -> None:
        self._settings = settings
        self._open_store = store
        self._submitter = submitter
        self._written = written
        self._plan_of = plan_of
        self._clock = clock
        self._account = find_account
        self._delivery = "waiting" if settings.callback.url else "off"

    def user_of(self, client: str, own: str | None = None) -> Account:
        """Whom a client's tasks run as; ``own`` is what its token says. Raises UserError."""
        from crater_slurm.alldata.run_as import UserError

        name = own or self._settings.submit_as.get(client)
        if not name:
            raise UserError(
                f"the client {client} has no cluster user: name one in alldata.submit_as, or make "
                "its token with --user"
            )
        return self.account(name)

    def account(self, user: str) -> Account:
        """The user, if tasks may be submitted as that one. Raises UserError."""
        return self._account(user, self._settings.least_uid)

    def take(self, client: str, body: bytes | str, *, user: str | None, source: str) -> Taken:
        """Take a task in, and submit it if it is new.

        Raises TaskError, UserError, ConflictError, RefusedError, ConfigError, StoreError. When
        Slurm is away the task is kept without a job, and submitted when Slurm is back.
        """
        now = self._clock()
        taken, task, whom = self._keep(client, body, user, source, attempt=now)
        if not taken.fresh:
            return taken
        return Taken(self._submit(taken.task, task, whom), True)

    def keep(self, client: str, body: bytes | str, *, user: str | None, source: str) -> Taken:
        """Take a task in without submitting it: whoever looks after tasks without a job does that.

        Raises as ``take`` does.
        """
        return self._keep(client, body, user, source, attempt=None)[0]

    def _keep(
        self, client: str, body: bytes | str, user: str | None, source: str, attempt: float | None
    ) -> tuple[Taken, Task, Account]:
        task = parse(body)
        whom = self.user_of(client, user)
        now = self._clock()
        text = body if isinstance(body, str) else body.decode()
        new = NewTask(
            client=client,
            task_id=task.task_id,
            body_hash=fingerprint(task),
            body=text,
            user=whom.name,
            token=secrets.token_hex(12),
            source=source,
            state=State.SUBMITTING.value,
            time=now,
            look=now if attempt is None else now + _LOOK_SECONDS,
            attempt=attempt,
        )
        stored, fresh = self._open_store().add_task(new)
        found = stored if fresh else self._same(stored, new)
        return Taken(found, fresh), task, whom

    def _same(self, stored: StoredTask, new: NewTask) -> StoredTask:
        """What the client got for this task before."""
        if stored.body_hash != new.body_hash:
            raise ConflictError(
                f"the task {stored.task_id} was sent before with another content; one id is one "
                "task, so send the new one under a new id"
            )
        if stored.state == State.REJECTED:
            raise RefusedError(stored.reason)
        return stored

    def attempt(self, stored: StoredTask, task: Task, user: Account) -> StoredTask:
        """Ask Slurm once; the task as it is afterwards. Raises RefusedError, StoreError."""
        now = self._clock()
        change: dict[str, Any] = {"attempt": now, "changed": now}
        if not self._open_store().change_task(stored, change):
            return self.again(stored)  # another scheduler has it in hand
        return self._submit(dataclasses.replace(stored, **change), task, user)

    def _submit(self, stored: StoredTask, task: Task, user: Account) -> StoredTask:
        """Ask Slurm for a task whose attempt is written down."""
        try:
            done = self._submitter.submit(task, user, stored.token)
        except RefusedError as error:
            self.refuse(stored, str(error))
            raise
        except AwayError as error:
            change = {"attempt": None, "look": self._clock() + _AGAIN_SECONDS}
            return self._noted(stored, change, error)
        except DoubtError as error:
            return self._noted(stored, {"look": self._clock() + 1.0}, error)
        return self.commit(stored, done)

    def _noted(
        self, stored: StoredTask, change: Mapping[str, float | None], error: SlurmError
    ) -> StoredTask:
        _log.warning("task %s is kept and not submitted yet: %s", stored.task_id, error)
        about = {"reason": payload.plain(str(error)), "changed": self._clock()}
        self._open_store().change_task(stored, {**change, **about})
        return self.again(stored)

    def commit(self, stored: StoredTask, done: Submitted) -> StoredTask:
        """Write down which job a task became."""
        now = self._clock()
        change: dict[str, Any] = {
            "job_id": done.job_id,
            "plan_id": done.plan_id or stored.plan_id or self._plan_of(stored.token),
            "state": State.SUBMITTED.value,
            "submitted": now,
            "reason": "",
            "changed": now,
            "look": now + self._settings.look_seconds,
        }
        if not self._open_store().change_task(stored, change):
            _log.info("task %s: another scheduler noted its job", stored.task_id)
            return self.again(stored)
        return dataclasses.replace(stored, **change)

    def again(self, stored: StoredTask) -> StoredTask:
        found = self._open_store().task_of_number(stored.number)
        if found is None:
            raise StoreError(f"the task {stored.task_id} has gone from the store")
        return found

    def reject(self, client: str, task_id: str, body: str, reason: str) -> None:
        """Keep and tell that a task can't become a job; nothing happens if it is known already."""
        now = self._clock()
        new = NewTask(
            client=client,
            task_id=task_id,
            body_hash=hashlib.sha256(body.encode("utf-8", "replace")).hexdigest()[:12],
            body=body,
            user=self._settings.submit_as.get(client, "")[:64],
            token=secrets.token_hex(12),
            source="poll",
            state=State.SUBMITTING.value,
            time=now,
        )
        stored, fresh = self._open_store().add_task(new)
        if fresh:
            self.refuse(stored, reason)

    def refuse(self, stored: StoredTask, reason: str) -> None:
        self.settle(stored, State.REJECTED, reason)

    def settle(self, stored: StoredTask, state: State, reason: str) -> bool:
        """End a task that has no job, and tell it; False when it is another by now."""
        now = self._clock()
        told = payload.callback(
            stored,
            state,
            sequence=stored.sequence + 1,
            happened=now,
            now=now,
            delivery=self._delivery,
            reason=reason,
        )
        change = {
            "state": state.value,
            "settled": True,
            "changed": now,
            "ended": now,
            "look": None,
            "reason": payload.plain(reason),
        }
        done = self._open_store().change_task(stored, change, [told])
        self._written()
        return done

    # At a client's wish

    def cancel(self, stored: StoredTask) -> StoredTask:
        """Have a task's job ended. Raises ConflictError while it is being submitted, SlurmError."""
        if stored.settled:
            return stored
        if stored.job_id is None:
            words = "cancelled before Slurm had it"
            if stored.attempt is not None or not self.settle(stored, State.CANCELLED, words):
                raise ConflictError(
                    f"the task {stored.task_id} is being submitted; cancel it in a moment"
                )
            return self.again(stored)
        self._submitter.cancel(stored.user, stored.job_id)
        self._open_store().look_again(stored.number, self._clock() + 0.5, sooner=True)
        return self.again(stored)
