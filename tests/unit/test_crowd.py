"""Tests for crater_slurm.alldata.crowd."""

from __future__ import annotations

import contextlib
import threading
import time

from crater_slurm.alldata.crowd import Crowd


def test_a_crowd_goes_first_and_then_whoever_let_it_by() -> None:
    crowd, passed = Crowd(most=2), threading.Event()
    crowd.let_by()  # nobody is there
    with contextlib.ExitStack() as some:
        for _ in range(2):
            some.enter_context(crowd.joined())
        assert not crowd.large
        crowd.let_by()
        with crowd.joined():
            assert crowd.large
            waiting = threading.Thread(target=lambda: (crowd.let_by(60), passed.set()))
            waiting.start()
            assert not passed.wait(0.1)
        assert passed.wait(60)
        waiting.join()


def test_nobody_lets_others_by_for_ever() -> None:
    crowd = Crowd(most=0)
    with crowd.joined():
        begin = time.monotonic()
        crowd.let_by(0.05)
        assert time.monotonic() - begin >= 0.05


def test_one_who_fails_is_there_no_longer() -> None:
    crowd = Crowd(most=0)
    with contextlib.suppress(ValueError), crowd.joined():
        raise ValueError
    assert not crowd.large
