"""The cluster's plan key: read from its file, followed when an admin rotates it."""

from __future__ import annotations

import logging
import secrets
from pathlib import Path

from crater_slurm.errors import ConfigError

_log = logging.getLogger("crater.scheduler.keys")
_LEAST_BYTES = 16


def read_keys(file: Path) -> list[bytes]:
    """Keys of the file, first the one that signs. Raises ConfigError with the way out."""
    try:
        mode = file.stat().st_mode
        lines = [line.strip() for line in file.read_text(errors="replace").splitlines()]
    except OSError as error:
        raise ConfigError(
            f"the plan key {file} can't be read ({error.strerror}); "
            "make one with 'crater key create' and copy it to every node"
        ) from error
    if mode & 0o007:
        raise ConfigError(f"the plan key {file} is readable by everyone; run chmod 0400 {file}")
    keys = []
    for line in lines:
        if not line or line.startswith("#"):
            continue
        try:
            key = bytes.fromhex(line)
        except ValueError as error:
            raise ConfigError(f"{file} must hold hexadecimal keys, one per line") from error
        if len(key) < _LEAST_BYTES:
            raise ConfigError(f"a key in {file} is shorter than {_LEAST_BYTES} bytes")
        keys.append(key)
    if not keys:
        raise ConfigError(f"{file} holds no key")
    return keys


class KeyFile:
    """The signing key, re-read when the file changes; the last good one stays otherwise."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._seen: tuple[int, int] | None = None
        self._keys: list[bytes] = []
        self.problem = ""

    def signing_key(self) -> bytes | None:
        """The key that signs; None when there is none, and plans then travel without token."""
        try:
            status = self._file.stat()
            seen = (status.st_mtime_ns, status.st_ino)
            if seen != self._seen:
                self._keys = read_keys(self._file)
                self._seen = seen
            self.problem = ""
        except (OSError, ConfigError) as error:
            if not self.problem:
                _log.error("plans are not signed: %s", error)
            self.problem = str(error)
        return self._keys[0] if self._keys else None

    def verifying_keys(self) -> list[bytes]:
        """All keys that verify a plan, newest first; empty when there is none."""
        self.signing_key()
        return list(self._keys)


def create_key(file: Path) -> None:
    """Write a new random key, readable by root only; refuses to replace one."""
    try:
        with file.open("x") as handle:
            file.chmod(0o400)
            handle.write(secrets.token_hex(32) + "\n")
    except FileExistsError as error:
        raise ConfigError(
            f"{file} exists; to rotate, put a new first line above the old key on every node"
        ) from error
    except OSError as error:
        raise ConfigError(f"can't write {file}: {error.strerror}") from error
