# SPDX-License-Identifier: Apache-2.0
"""What the training scripts of the checkpoint tests have in common, inside the guest.

A state is bytes that follow from its step alone, so that a loaded one can be compared without a
copy. Every report is one line of JSON. The emulated machine gets more time than a node would.
"""

import json
import os
import random
import re
import sys
import time

import crater_slurm.job
from crater_slurm.job import checkpoint, contact, init, link, loading, session

contact.OPEN_SECONDS = 60.0
link.GRACE_SECONDS = 300.0
MIB = 1 << 20
CGROUPS = "/sys/fs/cgroup"


def state(step, mib=16):
    """The state of a step."""
    block = random.Random(step).randbytes(1 << 16)
    return {"weights": block * (mib * MIB >> 16), "step": step}


def report(what, **values):
    """A line for the test."""
    print(json.dumps({"what": what, **values}), flush=True)


def until(path):
    """Wait for a file."""
    while not os.path.exists(path):
        time.sleep(0.3)


def save(step, mib=16):
    """Save a step, wait until it is over, and report how it went."""
    begin = time.monotonic()
    saving = checkpoint.save(state(step, mib), step)
    returned = time.monotonic() - begin
    saving.wait(600)
    report(
        "save", step=step, how=saving.how, error=saving.error, done=saving.done(),
        returned_s=round(returned, 2), over_s=round(time.monotonic() - begin, 2),
    )  # fmt: skip
    return saving


def load(mib=16):
    """Load the newest step and report which it is, and whether it is what was saved."""
    found = checkpoint.load()
    if found is None:
        return report("load", step=None)
    good = found.state == state(found.step, mib)
    return report("load", step=found.step, source=found.source, folder=found.folder, good=good)


def flushed(step):
    """Wait until the worker has said that a step is at its destination."""
    ring = session.current().ring
    with ring.changed:
        ring.changed.wait_for(lambda: ("step", step) in ring.flushed, 600)
    report("flushed", steps=sorted(step for _, step in ring.flushed))


def job_folder():
    """The job's folder in the cgroup tree."""
    with open("/proc/self/cgroup") as file:
        return CGROUPS + re.search(r"^0::(.*?)/step_", file.read(), re.M).group(1)


def charged():
    """Bytes that the job is charged for: all, and shared memory."""
    folder = job_folder()
    with open(f"{folder}/memory.current") as current, open(f"{folder}/memory.stat") as stat:
        shared = re.search(r"^shmem (\d+)$", stat.read(), re.M).group(1)
        return {"current": int(current.read()), "shmem": int(shared)}


def pages():
    """This process's pages on each NUMA node: the lane's and those without a file."""
    found = {"lane": {}, "anon": {}}
    with open("/proc/self/numa_maps") as file:
        for line in file:
            if " file=" not in line and "anon=" in line:  # of a file the page cache is counted too
                kind = "anon"
            else:
                kind = "lane" if "memfd:crater-lane" in line else ""
            for node, count in re.findall(r" N(\d+)=(\d+)", line) if kind else ():
                found[kind][node] = found[kind].get(node, 0) + int(count)
    return found


def begin(mib=16):
    """Do as a training script does at its start; report what the job is charged for its lane."""
    env = init()
    own = os.path.dirname(os.path.dirname(crater_slurm.__file__))
    before = charged()
    checkpoint.prepare(state(0, mib), wait=True)
    ring = session.current().ring
    report(
        "begin", imported=own, named=os.environ.get("CRATER_JOB_PATH"), folder=env.folder,
        destination=os.environ.get("CRATER_CHECKPOINT_DESTINATION"),
        cpus=sorted(os.sched_getaffinity(0)), lane=ring.lane.length if ring and ring.lane else 0,
        before=before, after=charged(), pages=pages(), python=sys.version.split()[0],
        suite=sorted(name for name in sys.modules if name.startswith("crater_slurm.")
                     and not name.startswith("crater_slurm.job")),
    )  # fmt: skip
    return env


def try_to_open(ring, job, run):
    """Ask for the ring of a job; report what is answered."""
    hello = {"job": job, "run": run, "rank": 0, "local_rank": 0, "world": 1, "local_world": 1}
    try:
        channel, answer, _ = contact.connect(ring, {**hello, "slots": 1, "bytes": 1 << 20})
    except (OSError, ValueError, contact.wire.WireError) as error:
        return report("refused", error=str(error))
    channel.close()
    return report("opened", answer=answer)


__all__ = [
    "begin", "checkpoint", "flushed", "load", "loading", "pages", "report", "save", "session",
    "state", "try_to_open", "until",
]  # fmt: skip
