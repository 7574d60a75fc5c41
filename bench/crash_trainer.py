"""A rank of ``bench/crash.py``: saves as fast as it can, or looks at what can be loaded.

Run as the job's user by its text, for this file may lie where that user may not go. A state is
known from step, rank and life (which start of the trainers it is), so whoever reads it knows what
it has to be.
"""

from __future__ import annotations

import os
import random
import sys
import time
from pathlib import Path
from typing import Any, TextIO

from crater_slurm.job import checkpoint

RANKS = 2


def state(step: int, rank: int, life: int, size: int) -> dict[str, Any]:
    """What a rank has at a step of a life."""
    data = random.Random(f"{step} {rank} {life}").randbytes(1000 + (step * 7919 + rank) % size)
    return {"step": step, "rank": rank, "life": life, "data": data}


def check(found: checkpoint.Loaded, rank: int, value: Any, size: int) -> int:
    """The life of a state that was loaded; it is what it has to be."""
    wanted = state(found.step, rank, value["life"], size)
    assert value == wanted, f"rank {rank} of {found.step} is wrong"
    return int(value["life"])


def look(size: int) -> None:
    """Print the step and the life of what is loaded."""
    found = checkpoint.load(ranks="all")
    if found is None:
        print("0 0", flush=True)
        return
    lives = {check(found, rank, value, size) for rank, value in found.state.items()}
    assert len(lives) == 1 and len(found.state) == RANKS, f"{found.step} is of lives {lives}"
    print(found.step, lives.pop(), flush=True)


def train(rank: int, step: int, life: int, size: int, log: TextIO) -> None:
    """Go on from a step, and log what is called saved."""
    if step:
        found = checkpoint.load(step)
        assert found is not None, f"step {step} is not there any more"
        check(found, rank, found.state, size)
    chance = random.Random(f"{life} {rank}")
    waiting: list[checkpoint.Saving] = []
    while True:
        step += 1
        waiting.append(checkpoint.save(state(step, rank, life, size), step, strict=False))
        print(step, flush=True)
        for saving in [s for s in waiting if s.done()]:
            waiting.remove(saving)
            if saving.error is None:
                log.write(f"{saving.step} {life} {saving.how}\n")
                log.flush()
                os.fsync(log.fileno())
        time.sleep(chance.random() * 0.04)


def main(what: str, size: str, *more: str) -> None:
    if what == "look":
        look(int(size))
        return
    step, life, path = more
    with Path(path).open("a") as log:
        train(int(os.environ["RANK"]), int(step), int(life), int(size), log)


if __name__ == "__main__":
    main(*sys.argv[1:])
