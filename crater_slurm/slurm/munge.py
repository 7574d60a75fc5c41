"""MUNGE, which every Slurm node has: who sent this, proven by the node's own munged."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass

from crater_slurm.errors import SlurmError

_TIMEOUT_SECONDS = 5


@dataclass(frozen=True, slots=True)
class Credential:
    """A decoded credential: the sender's uid and gid, what was signed, and where.

    ``host`` and ``address`` are those of the machine whose munged made it.
    """

    uid: int
    gid: int
    payload: str
    host: str = ""
    address: str = ""


def encode(payload: str) -> str:
    """Credential of the calling user over ``payload`` (one line). Raises SlurmError."""
    return _run(["munge", "--string", payload], "").strip()


def decode(credential: str) -> Credential:
    """Verify a credential. A replayed, expired or foreign one raises SlurmError."""
    if not re.fullmatch(r"MUNGE:[A-Za-z0-9+/=]+:", credential):
        raise SlurmError("that is no MUNGE credential")
    printed = _run(["unmunge"], credential)
    head, _, payload = printed.partition("\n\n")
    uid = re.search(r"^UID:.*\((\d+)\)", head, re.MULTILINE)
    gid = re.search(r"^GID:.*\((\d+)\)", head, re.MULTILINE)
    if not uid or not gid:
        raise SlurmError("unmunge printed no uid and gid")
    host = re.search(r"^ENCODE_HOST:\s+(\S+)\s+\((\S+)\)", head, re.MULTILINE)
    name, address = host.groups() if host else ("", "")
    return Credential(int(uid.group(1)), int(gid.group(1)), payload.rstrip("\n"), name, address)


def _run(argv: list[str], text: str) -> str:
    try:
        done = subprocess.run(
            argv, input=text, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS
        )
    except FileNotFoundError as error:
        raise SlurmError(f"{argv[0]} is not installed; it comes with Debian's munge") from error
    except subprocess.TimeoutExpired as error:
        raise SlurmError(f"{argv[0]} did not answer; is munged up?") from error
    if done.returncode:
        raise SlurmError(f"{argv[0]}: {(done.stderr or done.stdout).strip()[:200]}")
    return done.stdout
