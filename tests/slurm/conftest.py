"""Real Slurm for the tests of this folder: labs, one release at a time.

``CRATER_TEST_SLURM`` names the release (``make test-matrix`` runs them all); without it the
machine's own is used. Without root, or without any Slurm, the tests are skipped and say why.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from crater_slurm.lab import Lab, roots

HERE = Path(__file__).parent
_number = itertools.count(1)
LabFactory = Callable[..., Lab]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.slurm)


@pytest.fixture(scope="session")
def slurm_release() -> str | None:
    """The release to test with; None is the machine's own."""
    if os.geteuid() != 0:
        pytest.skip("a lab needs root")
    release = os.environ.get("CRATER_TEST_SLURM") or None
    if release is None and roots.machine_version() is None:
        pytest.skip("this machine has no Slurm of its own; CRATER_TEST_SLURM names a release")
    return release


@pytest.fixture(scope="session")
def slurm_version(slurm_release: str | None) -> tuple[int, int]:
    """Year and month of the release under test, for what differs between releases."""
    return roots.find(slurm_release).version


@pytest.fixture(scope="session")
def labs_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Labs of tests are kept apart from the admin's."""
    folder = tmp_path_factory.mktemp("labs") / "kept"
    before = os.environ.get("CRATER_LAB_DIR")
    os.environ["CRATER_LAB_DIR"] = str(folder)
    yield folder
    if before is None:
        del os.environ["CRATER_LAB_DIR"]
    else:
        os.environ["CRATER_LAB_DIR"] = before


def _make(release: str | None, **fields: Any) -> Lab:
    # Names are unique on the machine, since a name is also a control group's.
    name = f"t{os.getpid()}-{next(_number)}"
    return Lab(**{"name": name, "slurm": release, **fields})


def _factory(release: str | None) -> Iterator[LabFactory]:
    made: list[Lab] = []

    def make(*, start: bool = True, **fields: Any) -> Lab:
        one = _make(release, **fields)
        made.append(one)
        return one.up() if start else one

    crashes: dict[str, str] = {}
    try:
        yield make
    finally:
        for one in made:
            crashes |= _crashes(one)
            one.down()
    assert not crashes, "\n\n".join(f"{where}:\n{text}" for where, text in crashes.items())


def _crashes(one: Lab) -> dict[str, str]:
    """The first traceback in each log of crater's daemons: whatever a test does to them, each
    fault of theirs is one that they expect, and say in a sentence."""
    found = {}
    for file in sorted(one.folders.log.glob("*.out")):
        _, start, rest = file.read_text(errors="replace").partition("Traceback (most recent call")
        if start:
            found[f"{one.spec.name} {file.name}"] = start + rest[:4000]
    return found


@pytest.fixture
def fresh_lab(slurm_release: str | None, labs_folder: Path) -> Iterator[LabFactory]:
    """Makes labs with the fields of LabSpec; up unless ``start=False``, down after the test."""
    yield from _factory(slurm_release)


@pytest.fixture(scope="module")
def lab_factory(slurm_release: str | None, labs_folder: Path) -> Iterator[LabFactory]:
    """Like ``fresh_lab``, for fixtures that a test module shares."""
    yield from _factory(slurm_release)


@pytest.fixture(scope="module")
def lab(lab_factory: LabFactory) -> Lab:
    """The demo cluster in enforce mode with all of crater, shared by a test module."""
    return lab_factory(inventory="demo", mode="enforce")
