# SPDX-License-Identifier: Apache-2.0
"""The virtual test bed: what Slurm and the kernel do on a machine with real NUMA nodes.

    make test-vm                        all; or: python3 -m pytest tests/vm
    python3 -m pytest tests/vm -k 24.11           one Slurm release
    python3 -m tests.vm.image                     only build the images, ahead of the tests

How it works, from the outside to the inside:

    mirror.py       where this machine's apt has Debian from; no address is written down
    parts.py        what is built once and kept, named by its recipe's hash
    emulator.py     this machine's QEMU, or a newer one where its own would let guests panic
    image.py        a kernel, and a root image for each Slurm release
    guest.py        `Guest`: a QEMU machine with two NUMA nodes and NVMe; run scripts, push files
    slurm.py        `slurm_up(guest, hooks)`: a one-node Slurm with cgroup v2; submit, wait, look
    node.py         `crater_node(guest, settings)`: this working tree's node daemon in the guest
    alloc.py        a program for jobs that uses memory and reports on which node it lies
    preload.py      the trick with which a user can try to skip a hook
    guest_files/    what runs inside a guest: its init, its command agent, those programs, trainer.py

A test takes the fixture `guest` or `slurm` and so runs once on each release. Each release boots
once, and its tests share the guest: a test leaves no job and no daemon behind. `slurm` is a Slurm
without hooks, one for each test module; a module that wants hooks defines its own:

    @pytest.fixture(scope="module")
    def slurm(guest):
        with crater_node(guest, {"node": {"memory_binding": "hard"}}):
            slurm = slurm_up(guest, Hooks(task_prolog=f"{SOURCE}/prolog/task_prolog"))
            yield slurm
            slurm.down()

The machine is emulated, so everything is slow and no time measured in it says anything about
hardware. Needed: root, and Debian's mmdebstrap and e2fsprogs. Without them the tests are skipped,
each with the reason; with CRATER_VM_REQUIRE=1 they fail instead. Images take 1.2 GiB in
CRATER_VM_CACHE (/var/cache/crater-vm), which may be removed at any time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator
from typing import Any, TypeVar

import pytest

from . import alloc, preload
from .errors import BedUnavailableError
from .guest import Guest
from .image import SUITE_OF_RELEASE, build_image
from .slurm import Slurm, slurm_up

Made = TypeVar("Made")

_booted = pytest.StashKey[Guest]()


def _get_or_skip(make: Callable[[], Made]) -> Made:
    """Return what `make` makes; where this machine cannot, skip the test, or fail if so asked."""
    try:
        return make()
    except BedUnavailableError as error:
        reason = str(error)
    if os.environ.get("CRATER_VM_REQUIRE") == "1":
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


@pytest.fixture(scope="session", params=list(SUITE_OF_RELEASE))
def guest(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Guest]:
    """A booted guest with one Slurm release, which the whole session's tests share."""
    image = _get_or_skip(lambda: build_image(request.param))
    with Guest.boot(image, tmp_path_factory.mktemp(f"guest-{request.param}")) as booted:
        alloc.install(booted)
        request.config.stash[_booted] = booted
        yield booted
        del request.config.stash[_booted]


@pytest.fixture(scope="module")
def slurm(guest: Guest) -> Iterator[Slurm]:
    """A Slurm without hooks of ours."""
    running = slurm_up(guest)
    yield running
    running.down()


@pytest.fixture(scope="session")
def skip_library(guest: Guest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The path in the guest of the library that skips programs; see preload.py."""
    return _get_or_skip(lambda: preload.install(guest, tmp_path_factory.mktemp("preload")))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failed test shows what its guest said last, on the console and in the daemons' logs."""
    report = yield
    guest: Any = item.config.stash.get(_booted, None)
    if report.failed and guest is not None:
        report.sections.append((f"guest {guest.release}", guest.diagnostics()))
    return report
