"""The profile that a node keeps of itself, as a file: scans and measurements meet in it.

Every change is made under a lock on the file beside it, so that a calibration that ends while the
probe scans loses nothing, and replaces the file in one step.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable
from pathlib import Path

from crater_slurm.errors import CraterError, UsageError
from crater_slurm.files import write_atomically
from crater_slurm.model.profile import NodeProfile
from crater_slurm.store.codec import profile_from_dict, profile_to_dict


def read(file: Path) -> NodeProfile | None:
    """The profile in the file; None when there is no file. Raises UsageError for a bad one."""
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"can't read the profile {file}: {error}") from error
    try:
        return profile_from_dict(json.loads(text))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"the profile {file} is no JSON: {error}") from error
    except UsageError as error:
        raise UsageError(f"the profile {file}: {error}") from error


def update(file: Path, change: Callable[[NodeProfile | None], NodeProfile]) -> NodeProfile:
    """Replace the profile by what ``change`` makes of it; the new one.

    A file that can't be read is set aside as ``.damaged`` and counts as none: a half-written
    profile must not keep a node unknown. Raises CraterError when the folder can't be written.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(
            file.with_name(f".{file.name}.lock"),
            os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC,
            0o600,
        )
    except OSError as error:
        raise CraterError(f"can't write below {file.parent}: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            old = read(file)
        except UsageError:
            file.replace(file.with_name(file.name + ".damaged"))
            old = None
        new = change(old)
        write_atomically(file, json.dumps(profile_to_dict(new), indent=1) + "\n", 0o644)
    except OSError as error:
        raise CraterError(f"can't write the profile {file}: {error.strerror}") from error
    finally:
        os.close(lock)
    return new
