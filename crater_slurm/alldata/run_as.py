"""Runs a command as the cluster user whose task it is, by one explicit rule, and never as root.

root becomes the user in the child; a service user (slurm, crater) asks sudo for one documented
command; whoever is the user runs it. Anything else is refused before anything is started.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pwd
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from crater_slurm.errors import ConfigError, CraterError

#: What of our own environment a child may see; the rest is the user's or none.
_KEPT = ("PATH", "SLURM_CONF", "MUNGE_SOCKET", "TZ")
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class UserError(CraterError):
    """Nobody may submit as this user; exit code 1."""


@dataclass(frozen=True, slots=True)
class Account:
    """A user of this machine."""

    name: str
    uid: int
    gid: int
    home: str


def account(name: str, least_uid: int) -> Account:
    """The user of that name. Raises UserError when there is none, or none to submit as."""
    try:
        found = pwd.getpwnam(name)
    except (KeyError, ValueError) as error:
        raise UserError(
            f"there is no user {name!r} on crater-scheduler's machine; Slurm's users must be "
            "known there"
        ) from error
    if found.pw_uid == 0 or found.pw_uid < least_uid:
        raise UserError(
            f"the user {name} has the id {found.pw_uid}; tasks are never submitted as root or a "
            f"system user (alldata.least_uid is {least_uid})"
        )
    return Account(found.pw_name, found.pw_uid, found.pw_gid, found.pw_dir)


@dataclass(frozen=True, slots=True)
class RunAs:
    """How this process becomes another user. ``services`` may use sudo, ``command`` is for it."""

    command: str
    services: frozenset[str] = frozenset({"slurm", "crater"})
    euid: Callable[[], int] = os.geteuid

    def submission(self, user: Account, sbatch: str) -> tuple[list[str], dict[str, Any]]:
        """The words before sbatch's arguments, and what subprocess must do for it.

        Raises ConfigError when this process can't become that user.
        """
        own = self.euid()
        if own == user.uid:
            return [sbatch], {}
        if own == 0:
            groups = os.getgrouplist(user.name, user.gid)
            if setpriv := _setpriv():
                listed = ",".join(map(str, groups))
                who = [f"--reuid={user.uid}", f"--regid={user.gid}", f"--groups={listed}"]
                return [setpriv, *who, "--", sbatch], {}
            return [sbatch], {"user": user.uid, "group": user.gid, "extra_groups": groups}
        name = _name_of(own)
        if name in self.services:
            return ["sudo", "-n", "-u", user.name, "--", self.command], {}
        services = ", ".join(sorted(self.services))
        raise ConfigError(
            f"crater-scheduler runs as {name} and can't submit as {user.name}; run it as root, as "
            f"one of {services} with the sudoers line of docs/api.md, or as {user.name}"
        )


@functools.cache
def _setpriv() -> str | None:
    """util-linux's program, which becomes the user after its start. Were it done between fork and
    exec, each submission would copy this process's page tables: 20 ms of a large one's time."""
    return shutil.which("setpriv", path=_PATH)


def environment(user: Account, own: Mapping[str, str], **more: str) -> dict[str, str]:
    """What a user's sbatch sees, and so the job: nothing of the daemon's but where Slurm is."""
    kept = {name: own[name] for name in _KEPT if name in own}
    about = {"HOME": user.home, "USER": user.name, "LOGNAME": user.name, "LANG": "C.UTF-8"}
    return {"PATH": _PATH} | kept | about | more


def run(
    words: Sequence[str], *, stdin: str, seconds: float, env: Mapping[str, str], **how: Any
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end. Raises OSError, subprocess.TimeoutExpired."""
    process = subprocess.Popen(
        list(words),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        errors="replace",
        env=dict(env),
        cwd="/",
        umask=0o022,
        **how,
    )
    try:
        out, err = process.communicate(stdin, timeout=seconds)
    except BaseException:
        _abandon(process)
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def _abandon(process: subprocess.Popen[str]) -> None:
    """End a command, or leave it alone: sudo is root's, and we may not be allowed to end it."""
    with contextlib.suppress(PermissionError):
        process.kill()
        process.wait()
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe:
            with contextlib.suppress(OSError):
                pipe.close()


def _name_of(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"
