"""Secrets in files that only their owner may read; a setting never holds one."""

from __future__ import annotations

from pathlib import Path

from crater_slurm.errors import ConfigError


def read_secret(file: Path, setting: str, least: int = 1) -> str:
    """The first line of a file. Raises ConfigError naming the setting and what to do."""
    try:
        mode = file.stat().st_mode
        text = file.read_text(encoding="utf-8", errors="strict")
    except (OSError, UnicodeDecodeError) as error:
        said = error.strerror if isinstance(error, OSError) else "it is no UTF-8"
        raise ConfigError(f"{setting}: {file} can't be read ({said})") from error
    if mode & 0o077:
        raise ConfigError(
            f"{setting}: {file} may be read by others (mode {mode & 0o777:04o}); "
            f"run chmod 0600 {file}"
        )
    secret = text.split("\n", 1)[0].strip()
    if len(secret) < least:
        raise ConfigError(
            f"{setting}: {file} begins with a line of {len(secret)} characters; "
            f"at least {least} are needed"
        )
    return secret
