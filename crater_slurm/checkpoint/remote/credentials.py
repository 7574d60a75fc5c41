"""Who a job is at an object store: the site's credentials, or a profile of the user's own.

Never from environment variables, an instance's metadata or a program named in a file. Secrets are
kept out of every text: ``scrub`` replaces them in messages of libraries and servers.
"""

from __future__ import annotations

import configparser
import os
import stat
from dataclasses import dataclass, field

from crater_slurm.checkpoint.remote.store import RemoteError
from crater_slurm.checkpoint.spec import Remote

_FILE_BYTES = 1 << 20
_ELSEWHERE = ("credential_process", "role_arn", "sso_session", "sso_start_url", "source_profile")


@dataclass(frozen=True, slots=True)
class Access:
    """Keys of an S3 store; region and endpoint as far as the user's profile names them."""

    key: str
    secret: str = field(repr=False)
    token: str = field(default="", repr=False)
    region: str = ""
    endpoint: str = ""


def of(remote: Remote, home: str) -> Access:
    """The keys for a destination. Raises RemoteError with what is missing where."""
    if remote.profile:
        if remote.credentials:
            raise RemoteError(
                f"{remote.url}: both a profile and the site's credentials are given; "
                "crater-io-daemon has to choose one.",
                lasting=True,
            )
        return _profile(remote.profile, home)
    known = remote.credentials
    if not known.get("access_key_id") or not known.get("secret_access_key"):
        raise RemoteError(
            f"{remote.url}: no credentials; the site's credentials file needs access_key_id and "
            "secret_access_key, or the job a profile of the user's own.",
            lasting=True,
        )
    return Access(
        known["access_key_id"], known["secret_access_key"], known.get("session_token", "")
    )


def _profile(name: str, home: str) -> Access:
    folder = os.path.join(home, ".aws")
    keys = _section(f"{folder}/credentials", (name,))
    more = _section(f"{folder}/config", (f"profile {name}", name))
    both = {**more, **keys}
    if not keys and not more:
        raise RemoteError(
            f"There is no profile {name!r:.80} in {folder}/credentials or {folder}/config.",
            lasting=True,
        )
    if "aws_access_key_id" not in both or "aws_secret_access_key" not in both:
        how = next((word for word in _ELSEWHERE if word in both), "")
        reason = f"it relies on {how}, which is not followed" if how else "it has none"
        raise RemoteError(
            f"The profile {name!r:.80} in {folder} needs aws_access_key_id and "
            f"aws_secret_access_key; {reason}.",
            lasting=True,
        )
    return Access(
        both["aws_access_key_id"],
        both["aws_secret_access_key"],
        both.get("aws_session_token", ""),
        both.get("region", ""),
        both.get("endpoint_url", ""),
    )


def _section(path: str, names: tuple[str, ...]) -> dict[str, str]:
    text = _text(path)
    parser = configparser.RawConfigParser(strict=False)
    try:
        parser.read_string(text)
    except configparser.Error:
        # The parser's own message quotes the line, and that line may be the secret.
        raise RemoteError(
            f"{path} is no file of profiles that can be read.", lasting=True
        ) from None
    for name in names:
        if parser.has_section(name):
            return dict(parser.items(name))
    return {}


def _text(path: str) -> str:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise RemoteError(f"{path} can't be read: {error.strerror}.", lasting=True) from None
    with os.fdopen(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise RemoteError(f"{path} is no plain file.", lasting=True)
        return file.read(_FILE_BYTES).decode("utf-8", "replace")


def scrub(text: str, secrets: tuple[str, ...], most: int = 300) -> str:
    """A library's or server's message in one line, cut, without secrets and control characters."""
    for secret in secrets:
        if secret:
            text = text.replace(secret, "***")
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return line if len(line) <= most else f"{line[:most]}..."
