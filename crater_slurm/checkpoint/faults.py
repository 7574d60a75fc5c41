"""What a failed call means for a checkpoint, in a sentence for the user."""

from __future__ import annotations

import errno

_MEANS = {
    errno.ENOSPC: "there is no room left on {where}",
    errno.EDQUOT: "your disk quota on {where} is used up",
    errno.EIO: "the disk of {where} reports an error",
    errno.EROFS: "{where} can only be read",
    errno.ENOENT: "{where} is gone",
    errno.ENOTDIR: "{where} is no folder",
    errno.ELOOP: "a symbolic link lies in the way in {where}",
    errno.EACCES: "you may not write to {where}",
    errno.EPERM: "something of another user is in the way in {where}",
    errno.EISDIR: "a folder is in the way in {where}",
    errno.EFBIG: "a file of that size is not allowed on {where}",
    errno.ESTALE: "{where} is gone from its server",
}


def sentence(what: str, error: Exception, where: str) -> str:
    """Such as "step 100 is not saved: there is no room left on /nvme/job (No space left)."."""
    if isinstance(error, OSError) and error.errno in _MEANS:
        why = _MEANS[error.errno].format(where=where)
        return f"{what}: {why} ({error.strerror})."
    if isinstance(error, OSError):
        return f"{what}: {where}: {error.strerror or error}."
    return f"{what}: {str(error).rstrip('.')}."
