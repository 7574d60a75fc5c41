"""A few rounds of the soak in bench/crash.py: real daemon, worker and ranks, killed at random."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from bench.crash import CrashError, a_job

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="runs a node's daemon for another user")


@pytest.mark.parametrize(("flush", "rounds"), [(False, 7), (True, 8)])
def test_what_load_gives_after_kill_9_is_the_newest_whole_step(
    open_path: Path, flush: bool, rounds: int
) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print("seed", seed)
    with a_job(open_path / "node", seed, flush=flush) as job:
        report = job.run(rounds)
    assert report.rounds == sum(report.kills.values()) == rounds
    assert report.last > 0


def test_the_soak_sees_what_it_looks_for(open_path: Path) -> None:
    """A damaged file, a step that is gone, and one older than was promised."""
    with a_job(open_path / "node", 1, flush=False) as job:
        job.start()
        job.train(0)
        while not job.told():
            job.drink()
        job.kill("all")
        there = job.complete(job.cache, still=True)
        with pytest.raises(CrashError, match="complete and lost"):
            job._nothing_lost(there | {max(there) + 1}, there)
        with pytest.raises(CrashError, match="was called saved"):
            job._newest({max(there) + 1: 1}, max(there), 1)
        with pytest.raises(CrashError, match="of life 1, and that of 2"):
            job._newest({max(there): 2}, max(there), 1)
        file = next(job.cache.glob("step-*/rank-00001.safetensors"))
        with file.open("r+b") as opened:
            opened.write(b"x")
        with pytest.raises(CrashError, match="is damaged between"):
            job.complete(job.cache, still=True)
