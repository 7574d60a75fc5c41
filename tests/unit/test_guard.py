"""A round that fails is told once, and the next one is tried."""

from __future__ import annotations

import logging

import pytest

from crater_slurm.errors import CraterError
from crater_slurm.guard import Guard


def _fails(error: Exception) -> None:
    raise error


def test_what_goes_wrong_is_told_once_and_forgotten_when_it_goes_well(
    caplog: pytest.LogCaptureFixture,
) -> None:
    guard = Guard(logging.getLogger("test"), "nothing is read", "not yet")
    assert guard.problem == "not yet"
    for _ in range(3):
        assert not guard.run(lambda: _fails(CraterError("no file")))
    assert guard.problem == "nothing is read: no file"
    assert [r.getMessage() for r in caplog.records] == ["nothing is read: no file"]
    assert not guard.run(lambda: _fails(CraterError("no room")))
    assert len(caplog.records) == 2
    assert guard.run(lambda: 5) == 5
    assert guard.problem == ""
    guard.run(lambda: _fails(CraterError("no room")))
    assert len(caplog.records) == 3


def test_a_defect_is_logged_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    guard = Guard(logging.getLogger("test"), "nothing is read")
    for _ in range(3):
        assert not guard.run(lambda: _fails(KeyError("x")))
    assert guard.problem == "nothing is read; see the log"
    (record,) = caplog.records
    assert record.exc_info is not None and record.exc_info[0] is KeyError
