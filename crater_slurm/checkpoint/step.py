"""One step that is being saved on this node: whose files are on disk, and who still has to come."""

from __future__ import annotations

from crater_slurm.checkpoint.save import Save
from crater_slurm.job.layout import FileEntry


class Step:
    """A step that is being saved: files that are on disk, saves under way, and who waits."""

    def __init__(self, name: str, step: int, folder: str, local: int, world: int) -> None:
        self.name, self.step, self.folder = name, step, folder
        self.local, self.world = local, world
        self.kept: dict[int, FileEntry] = {}
        self.saves: dict[int, Save] = {}
        self.followers: list[Save] = []
        self.finishing = False
        self.touched = 0.0
        self.alone_since: float | None = None

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

    def everybody(self) -> list[Save]:
        return [*self.saves.values(), *self.followers]


def some(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")


def disagree(step: Step, save: Save) -> str:
    mine = f"{save.place.local} of {save.place.world} ranks"
    return f"this rank says that {mine} save it, another says {step.local} of {step.world}"
