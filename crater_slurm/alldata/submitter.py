"""Submits a task's batch script by sbatch, as the task's user, and finds its job again.

The job carries the task's token in its comment, behind the word that says which task it is. What
sbatch says is sorted into three: Slurm refused, Slurm surely never heard of it, or nobody knows;
only the second may be sent again at once.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from typing import Any

from crater_slurm.alldata.marker import Marker
from crater_slurm.alldata.payload import plain
from crater_slurm.alldata.run_as import Account, RunAs, environment, run
from crater_slurm.alldata.submission import AwayError, DoubtError, RefusedError, Submitted
from crater_slurm.alldata.task import Task, fingerprint
from crater_slurm.config.settings import Settings
from crater_slurm.errors import ConfigError, UsageError
from crater_slurm.slurm import job_search, job_states
from crater_slurm.slurm.client import Client

RUN = "crater-run:"
#: What sbatch says when its message never reached slurmctld.
_AWAY = re.compile(
    r"connect failure|Connection refused|Unable to resolve|No route to host|"
    r"find a valid slurm|Invalid authentication credential|If munged is up|munge",
    re.IGNORECASE,
)
#: And when the answer did not come: the job may be there.
_DOUBT = re.compile(
    r"timed out|Zero Bytes|(receive|send) failure|Unexpected message|Communication|"
    r"Transport endpoint|Incomplete|temporarily unable|connection (failure|reset)|"
    r"Unable to contact slurm controller \((?!connect failure)",
    re.IGNORECASE,
)
_EXPLAIN = re.compile(r"crater explain ([A-Za-z0-9_-]{1,64})")
_NOISE = re.compile(r"^(sbatch|slurm_\w+): (error: |fatal: )?(Batch job submission failed: )?")

Render = Callable[[Task], str]
Run = Callable[..., subprocess.CompletedProcess[str]]


class SbatchSubmitter:
    """Runs sbatch; ``render`` makes the script, ``become`` the words that make it the user's."""

    def __init__(
        self,
        client: Client,
        render: Render,
        become: RunAs,
        *,
        seconds: float,
        execute: Run = run,
    ) -> None:
        self._client = client
        self._render = render
        self._become = become
        self._seconds = seconds
        self._execute = execute

    def submit(self, task: Task, user: Account, token: str) -> Submitted:
        """Ask Slurm once. Raises RefusedError, AwayError, DoubtError."""
        try:
            script = self._render(task)
        except UsageError as error:
            raise RefusedError(str(error)) from error
        try:
            words, how = self._become.submission(user, self._program("sbatch"))
        except ConfigError as error:
            raise AwayError(str(error)) from error
        comment = f"{Marker(task.task_id, fingerprint(task))} {RUN}{token}"
        options = ["--parsable", "--propagate=NONE", f"--comment={comment}"]
        if "\n#SBATCH --chdir=" not in script:
            options.append(f"--chdir={user.home}")
        done = self._run([*words, *options], script, user, how)
        if done.returncode == 0:
            return _submitted(done)
        raise _failure(done)

    def _run(
        self, words: list[str], script: str, user: Account, how: dict[str, Any]
    ) -> subprocess.CompletedProcess[str]:
        more = {"SLURM_CONF": str(self._client.conf)} if self._client.conf else {}
        env = environment(user, os.environ, **more, **self._client.environment)
        try:
            return self._execute(words, stdin=script, seconds=self._seconds, env=env, **how)
        except subprocess.TimeoutExpired as error:
            raise DoubtError(f"sbatch did not answer within {self._seconds:g} s") from error
        except OSError as error:
            raise AwayError(f"{words[0]} can't be run: {error.strerror or error}") from error

    def _program(self, name: str) -> str:
        return str(self._client.bin_dir / name) if self._client.bin_dir else name

    def find(self, user: str, token: str) -> list[int]:
        """Jobs that slurmctld remembers with this token, the oldest first. Raises SlurmError."""
        return job_search.by_comment(self._client, user, f"{RUN}{token}")

    def find_task(self, user: str, marker: Marker) -> list[int]:
        """Jobs that a user submitted for a task by command, the oldest first. SlurmError."""
        return job_search.by_comment(self._client, user, str(marker))

    def find_recorded(self, user: str, task: Task, since: float) -> list[int] | None:
        """Jobs of the task's name in slurmdbd; None where there is none. Raises SlurmError."""
        if not job_states.has_accounting(self._client.config()):
            return None
        name = (task.run_config and task.run_config.name) or task.task_id
        return job_search.accounted_by_name(self._client, user, name, since)

    def memory_seconds(self) -> float:
        """How long slurmctld surely remembers a job. Raises SlurmError."""
        return job_search.memory_seconds(self._client.config())

    def cancel(self, user: str, job_id: int) -> None:
        """End a job, if it is the user's. Raises SlurmError."""
        self._client.run("scancel", "--quiet", f"--user={user}", str(job_id))


def submitter(settings: Settings, client: Client) -> SbatchSubmitter:
    """The submitter of these settings."""

    def script(task: Task) -> str:
        from crater_slurm.alldata.batch import render

        # What the filter will not ask Slurm for, the script asks for itself.
        return render(task, settings.submit, enforced=settings.filter.mode == "enforce").script

    return SbatchSubmitter(
        client,
        script,
        RunAs(settings.alldata.submit_command),
        seconds=settings.submit.timeout_seconds,
    )


def _submitted(done: subprocess.CompletedProcess[str]) -> Submitted:
    """The job that sbatch --parsable names; DoubtError when it names none."""
    number = re.search(r"^(\d{1,10})(?:;\S*)?$", done.stdout.strip(), re.MULTILINE)
    if number is None:
        raise DoubtError(f"sbatch says {plain(done.stdout)!r}, which names no job")
    plan = _EXPLAIN.search(done.stderr)
    return Submitted(int(number.group(1)), plan.group(1) if plan else None)


def _failure(done: subprocess.CompletedProcess[str]) -> Exception:
    said = done.stderr.strip() or done.stdout.strip() or f"sbatch ended with {done.returncode}"
    told = [line.strip() for line in said.splitlines() if line.strip()]
    # sudo may warn before a command that it then runs: that one's own words count.
    own = [line for line in told if not line.startswith(("sudo:", "setpriv:"))]
    words = plain("; ".join(dict.fromkeys(_NOISE.sub("", line) for line in own or told)))
    if told and not own:
        hint = "; the sudoers line is in docs/api.md" if told[-1].startswith("sudo:") else ""
        return AwayError(words + hint)
    said = "\n".join(own)
    # Ended by a signal, also where sudo tells it as a shell does.
    if done.returncode < 0 or done.returncode > 128 or _DOUBT.search(said):
        return DoubtError(words)
    return AwayError(words) if _AWAY.search(said) else RefusedError(words)
