"""Settings of the platform's side: who may submit as whom, what is told where, the poller."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from crater_slurm.config.section import Section


class Callback(Section):
    """Where the platform hears what became of its tasks."""

    url: str = Field(
        default="",
        pattern=r"^(https?://[^\s@?#]+)?$",
        description="POSTed to for each change of a task. Empty: nobody is told, and what happened "
        "meanwhile is not told later. Names and passwords go into the other settings.",
    )
    allow_http: bool = Field(
        default=False,
        description="Let url be plain http: its password and all it tells can then be read on "
        "the way.",
    )
    ca_file: Path | None = Field(
        default=None, description="CA certificates for url, in PEM; the system's when unset."
    )
    user: str = Field(default="", description="Name for Basic authentication; empty: none.")
    password_file: Path | None = Field(
        default=None, description="File with that user's password, mode 0600."
    )
    hmac_key_file: Path | None = Field(
        default=None,
        description="File with a key of at least 16 characters, mode 0600: every callback then "
        "carries X-Crater-Signature.",
    )
    timeout_seconds: float = Field(
        default=10, gt=0, description="A receiver that takes longer is tried again."
    )
    attempts: int = Field(
        default=40,
        ge=1,
        description="After so many a callback is dead: it is kept, and 'crater callbacks retry' "
        "sends it. With the default waits that is six hours.",
    )
    first_wait_seconds: float = Field(
        default=1, gt=0, description="Wait after the first failure; it doubles with each further."
    )
    longest_wait_seconds: float = Field(default=600, gt=0, description="Until it is this long.")
    workers: int = Field(
        default=8, ge=1, le=64, description="Callbacks under way at a time, each of another task."
    )
    lease_seconds: float = Field(
        default=120,
        ge=5,
        description="A scheduler that died with a callback in hand loses it after this; longer "
        "than timeout_seconds.",
    )


class AllData(Section):
    """AllData, or any platform that sends tasks as it does."""

    submit_as: dict[str, str] = Field(
        default={},
        description="Cluster user by client name: whose jobs that client's tasks are. A token "
        "made with --user says so itself. A client without a user can't submit.",
    )
    least_uid: int = Field(
        default=1000,
        ge=1,
        description="Users below this id, root before all, are never submitted as.",
    )
    submit_command: str = Field(
        default="/usr/bin/crater-submit",
        description="What sudo runs as the user where crater-scheduler is neither root nor that "
        "user; the sudoers line names the same path.",
    )
    look_seconds: float = Field(
        default=60,
        ge=1,
        description="How often Slurm is asked after unsettled tasks of which no node told.",
    )
    looks_per_minute: int = Field(
        default=600, ge=1, description="Slurm is asked after single jobs at most so often."
    )
    keep_tasks_days: int = Field(
        default=90, ge=1, description="Ended tasks and their callbacks are removed after this."
    )
    callback: Callback = Callback()
    poll: bool = Field(
        default=False, description="Fetch tasks from the platform, instead of only taking them in."
    )
    api_url: str = Field(
        default="",
        pattern=r"^(https?://[^\s@?#]+)?$",
        description="The platform's API; GET api_url/tasks gives its queue.",
    )
    token_file: Path | None = Field(
        default=None, description="File with the platform's token for us, mode 0600."
    )
    poll_interval_seconds: float = Field(
        default=5, ge=0.1, description="How often the queue is asked for."
    )
    poll_client: str = Field(
        default="alldata",
        pattern=r"^[a-z0-9][a-z0-9_.-]{0,63}$",
        description="Client name of tasks that were fetched, for submit_as.",
    )
