"""One step that is being saved on this node: whose files are on disk, and who still has to come."""

from __future__ import annotations

from crater_slurm.checkpoint.folder import Leftover
from crater_slurm.checkpoint.save import Save
from crater_slurm.job import layout
from crater_slurm.job.layout import FileEntry


class Step:
    """A step that is being saved: files that are on disk, saves under way, and who waits."""

    def __init__(self, name: str, step: int, local: int, world: int, run: str, now: float) -> None:
        self.name, self.step, self.folder = name, step, layout.step_name(step, name)
        self.local, self.world, self.run = local, world, run
        self.kept: dict[int, FileEntry] = {}
        #: When the files were written that a killed worker left, as time.time().
        self.left_at: dict[int, float] = {}
        #: When the latest of the processes that save it was started.
        self.since = 0.0
        self.saves: dict[int, Save] = {}
        self.followers: list[Save] = []
        self.finishing = False
        self.touched = 0.0
        self.begun = now
        self.alone_since: float | None = None
        #: When ranks that have committed wait no longer for those that still copy.
        self.held_until = 0.0

    @property
    def ranks(self) -> set[int]:
        """Ranks that have saved, or are about to."""
        return self.kept.keys() | self.saves.keys()

    def done(self, there: set[int]) -> bool:
        """Whether all ranks' files are on disk; ``there`` are those that wrote it themselves."""
        return len(self.kept.keys() | there) >= self.local and bool(self.kept)

    @property
    def settling(self) -> bool:
        """Whether it goes on without any trainer."""
        return self.finishing or (
            len(self.ranks) >= self.local and all(save.committed for save in self.saves.values())
        )

    @property
    def held(self) -> bool:
        return any(save.held for save in self.saves.values())

    def release(self) -> None:
        """Let all its saves begin to be written."""
        for save in list(self.saves.values()):
            save.release()

    def written_at(self, rank: int) -> float:
        """When a rank's file was begun, or noted by a worker before."""
        save = self.saves.get(rank)
        return save.begun_at if save is not None else self.left_at.get(rank, 0.0)

    def older(self, save: Save, began: dict[int, float]) -> list[int]:
        """Ranks that saved it in an earlier start than ``save``'s: the starts have other names or,
        where none is known, they saved before ``save``'s process was started and their own is
        gone, or was started anew too. ``began``: when the connected ranks' processes were."""
        if self.run != save.place.run:
            return list(self.ranks)
        return [
            rank
            for rank in self.ranks
            if (at := self.written_at(rank)) < save.since
            and (rank == save.place.rank or began.get(rank, at + 1) > at)
        ]

    def drop(self, rank: int) -> str:
        """Forget a rank's file; its name."""
        save, entry = self.saves.pop(rank, None), self.kept.pop(rank, None)
        self.left_at.pop(rank, None)
        self.followers = [f for f in self.followers if f.place.rank != rank]
        if save is not None:
            save.settle()
            return save.place.file
        return entry.name if entry is not None else ""

    def everybody(self) -> list[Save]:
        return [*self.saves.values(), *self.followers]


def from_leftover(left: Leftover, run: str, now: float) -> Step | None:
    """The step whose ranks a killed worker of this run left whole; None where there is none. Of
    several starts of the training the latest counts."""
    mine = [
        entry
        for entry in left.kept.values()
        if layout.is_of_run(entry.manifest.run, run)
        and layout.step_name(entry.manifest.step, entry.manifest.name) == left.name
    ]
    if not mine:
        return None
    last = max(mine, key=lambda entry: entry.manifest.time)
    whole = last.manifest
    step = Step(whole.name, whole.step, last.local, whole.world_size, whole.run, now)
    kept = [e for e in mine if (e.local, e.manifest.run) == (last.local, whole.run)]
    step.kept = {entry.rank: entry.file for entry in kept}
    step.left_at = {entry.rank: entry.manifest.time for entry in kept}
    step.touched = now
    return step


def left_out(step: Step, live: set[int]) -> str:
    """What a person should know of a step that some ranks left out. ``live`` are connected."""
    there, missing = sorted(step.ranks), sorted(live - step.ranks)
    if missing:
        who = f"rank {missing[0]}" if len(missing) == 1 else f"ranks {_some(missing)}"
    else:
        who = f"{step.local - len(there)} of {step.local} ranks"
    saved = ", ".join(map(str, there[:8])) or "none"
    return (
        f"{step.name} {step.step}: {who} of this node never saved it (saved: rank {saved} "
        f"of {step.local} here); call save() on every rank, or save(..., only_rank=0)."
    )


def _some(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")


def disagree(step: Step, save: Save) -> str:
    mine = f"{save.place.local} of {save.place.world} ranks"
    return f"this rank says that {mine} save it, another says {step.local} of {step.world}"
