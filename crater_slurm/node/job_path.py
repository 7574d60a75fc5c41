"""The folder that jobs import crater_slurm.job from: that module alone, and no dependency of ours.

    <folder>/crater_slurm/__init__.py
    <folder>/crater_slurm/job/...

It stands at the end of a task's PYTHONPATH, but before the site's own packages; so its
``__init__`` lets a whole crater_slurm that is installed there too keep its other modules.
"""

from __future__ import annotations

import hashlib
import logging
import os
import py_compile
import shutil
from pathlib import Path

from crater_slurm import __version__, paths
from crater_slurm.node.services import Services

_log = logging.getLogger("crater.node")

_INIT = f'''"""The part of crater-slurm that jobs import."""

import os
import sys

__version__ = "{__version__}"
for _folder in sys.path:
    _found = os.path.join(_folder or ".", "crater_slurm")
    if _found not in __path__ and os.path.isfile(os.path.join(_found, "__init__.py")):
        __path__.append(_found)
'''


def prepare(services: Services) -> None:
    """Lay the folder out beside the daemon's socket, unless the site has its own. Never raises.

    Each content has a folder of its own, so that running jobs keep theirs over an upgrade.
    """
    settings = services.settings.node
    if settings.checkpoints.job_path:
        return
    try:
        files = contents()
        name = hashlib.sha256(repr(sorted(files.items())).encode()).hexdigest()[:12]
        folder = settings.socket.parent / "job" / name
        if not folder.is_dir():
            fresh = folder.with_name(f".{name}.{os.getpid()}")
            write(files, fresh)
            fresh.rename(folder)
        services.job_path = str(folder)
    except OSError as error:
        _log.warning("job path: couldn't lay crater_slurm.job out: %s", error)


def contents() -> dict[str, tuple[bytes, int]]:
    """The files' contents and modes by their path in the folder."""
    files = {"crater_slurm/__init__.py": (_INIT.encode(), 0o644)}
    source = paths.PACKAGE / "job"
    for file in sorted(source.rglob("*.py")):
        files[f"crater_slurm/job/{file.relative_to(source)}"] = (file.read_bytes(), 0o644)
    return files


def write(files: dict[str, tuple[bytes, int]], folder: Path) -> None:
    """Write the files, readable by all, over whatever is there. Raises OSError."""
    if folder.is_dir():
        shutil.rmtree(folder)
    for name, (data, mode) in files.items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
        target.write_bytes(data)
        target.chmod(mode)
        # Users can't write here, so without this every import would compile it all again.
        py_compile.compile(
            str(target), quiet=2, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH
        )
