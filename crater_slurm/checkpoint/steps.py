"""The steps of this node: who has saved, when a part gets its final name, when it never can.

A step is complete here when as many ranks committed as its savers said there are on this node.
The main thread alone touches all this; files are the folder's business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from crater_slurm.checkpoint import faults
from crater_slurm.checkpoint.folder import Leftover, LocalStep
from crater_slurm.checkpoint.save import Save
from crater_slurm.checkpoint.step import Step, disagree, from_leftover, left_out
from crater_slurm.checkpoint.tools import Tools
from crater_slurm.job.layout import Manifest

Key = tuple[str, int]

#: Steps of one name that wait for ranks; the oldest is given up for a further one.
_MOST_WAITING = 4
#: How long a step waits for a rank whose process is gone, which may be started anew.
GRACE_S = 30.0
#: How long a step waits for a rank that is there and does not save.
PATIENCE_S = 900.0
#: How long a rank that has copied all is left in memory for the sake of those that still copy.
HOLD_S = 0.5
#: How long a partial folder is left alone that nobody has announced: its writer may be about to.
LEFTOVER_S = 60.0


class Steps:
    """All steps of the job on this node. ``live_ranks`` tells whose trainers are connected."""

    def __init__(self, tools: Tools, live_ranks: Callable[[], set[int]]) -> None:
        self.complete: dict[Key, LocalStep] = {}
        self.waiting: dict[Key, Step] = {}
        self.on_saved: list[Callable[[str, Manifest], None]] = []
        self.on_change: Callable[[], None] = lambda: None
        self.errors: dict[Key, str] = {}
        self._leftovers: dict[str, float] = {}
        self._tools = tools
        self._live_ranks = live_ranks
        #: When the processes of connected ranks were started.
        self.began: Callable[[], dict[int, float]] = dict

    # From the disk

    def found(self, steps: Iterable[LocalStep]) -> None:
        """What lies in the folder; replaces what was known."""
        self.complete = {(s.name, s.step): s for s in sorted(steps, key=lambda s: s.time)}
        self.on_change()

    def rescan(self) -> None:
        """Look into the folder again: others may have written or removed steps."""
        self._tools.clerk.ask(self._tools.folder.scan, self._on_scan)

    def _on_scan(self, steps: list[LocalStep] | None, error: Exception | None) -> None:
        if steps is not None and error is None:
            self.found(steps)
            for step in list(self.waiting.values()):
                self.advance(step)

    def recovered(self, leftovers: list[Leftover]) -> None:
        """What a killed worker left: ranks of this run that are whole are taken over."""
        now, wall = self._tools.clock(), self._tools.now()
        for left in leftovers:
            step = from_leftover(left, self._tools.spec.run, now)
            if step is None:
                age = max(0.0, min(LEFTOVER_S, wall - left.changed_at))
                self._leftovers[left.name] = now + LEFTOVER_S - age
            else:
                self.waiting[step.name, step.step] = step

    # From the trainers

    def begin(self, save: Save) -> None:
        """A rank begins a save; it may turn out that nothing is left to do."""
        place = save.place
        there = self._there(place.key, place.run, save.since)
        enough = len(there) >= place.local or (there and self.complete[place.key].whole)
        if place.rank in there and enough:
            self._answer(save)
            return
        self._overtake(save)
        step = self.waiting.get(place.key)
        if step is not None and not self._outdate(step, save):
            return
        if step is None:
            now = self._tools.clock()
            step = Step(place.name, place.step, place.local, place.world, place.run, now)
            self.waiting[place.key] = step
            self._leftovers.pop(place.folder, None)
            self._bound(place.name)
        step.touched = self._tools.clock()
        step.since = max(step.since, save.since)
        if (step.local, step.world) != (place.local, place.world):
            save.fail(ValueError(disagree(step, save)))
            return
        earlier = step.saves.get(place.rank)
        if step.finishing or place.rank in step.kept or (earlier and earlier.committed):
            save.writes = False
            step.followers.append(save)
            return
        if any(s.place.file == place.file and r != place.rank for r, s in step.saves.items()):
            save.fail(ValueError(f"another rank saves {place.file} as well"))
            return
        step.saves[place.rank] = save
        if earlier is not None:
            earlier.settle()
        if save.in_lane and step.local > 1:
            save.hold()
            step.held_until = self._tools.clock() + HOLD_S

    def committed(self, save: Save) -> None:
        """A rank has said all. Training stands still until the last rank of the node has copied,
        so until then neither checksums nor the disk take memory bandwidth or cores from them."""
        step = self.waiting.get(save.place.key)
        if step is not None and step.settling:
            step.release()

    @property
    def held_until(self) -> float | None:
        """When ``release_due`` has something to do; None when nothing is held back."""
        return min((s.held_until for s in self.waiting.values() if s.held), default=None)

    def release_due(self) -> None:
        """Write what was held back long enough."""
        now = self._tools.clock()
        for step in list(self.waiting.values()):
            if step.held and now >= step.held_until:
                step.release()

    def _overtake(self, save: Save) -> None:
        """A rank goes on to another step: one that it left out will never be complete."""
        for step in list(self.waiting.values()):
            other = (step.name, step.step) != save.place.key and step.name == save.place.name
            missing = save.place.rank not in step.ranks and not step.settling
            if other and missing and step.local > 1 and save.place.local == step.local:
                self.give_up(step, self._why(step))

    def _bound(self, name: str) -> None:
        mine = [s for s in self.waiting.values() if s.name == name and not s.settling]
        if len(mine) > _MOST_WAITING:
            self.give_up(mine[0], self._why(mine[0]))

    def abandon(self, save: Save) -> None:
        """The trainer takes a save back, or is gone in the midst of it."""
        step = self.waiting.get(save.place.key)
        save.settle()
        if step is not None and step.saves.get(save.place.rank) is save and not step.finishing:
            del step.saves[save.place.rank]
            step.kept.pop(save.place.rank, None)
            for after in [f for f in step.followers if f.place.rank == save.place.rank]:
                step.followers.remove(after)
                self.failed(after, f"{step.name} {step.step} was taken back by its rank.")
            if not step.ranks:
                self._forget(step)

    def _there(self, key: Key, run: str, since: float) -> set[int]:
        """Ranks that lie under the step's final name already, of this run and not from before."""
        found = self.complete.get(key)
        return found.ranks_since(since) if found and found.run == run else set()

    def _outdate(self, step: Step, save: Save) -> bool:
        """Drop what ranks had saved of a step in an earlier start of the training: files of two
        starts make no checkpoint. False where it is too late for that, or ``save`` is itself of an
        earlier one."""
        began = self.began()
        if save.place.run != step.run and began.get(save.place.rank, 0.0) > save.since:
            save.fail(ValueError("its process is gone, and a later start of the training saves it"))
            return False
        old = step.older(save, began)
        if old and step.finishing:
            save.fail(ValueError("it gets its final name as it was saved before a restart"))
            return False
        if save.place.run != step.run:
            step.run, step.local, step.world = save.place.run, save.place.local, save.place.world
        if not old:
            return True
        files = {rank: file for rank in old if (file := step.drop(rank))}
        folder, name = self._tools.folder, step.folder
        # Before a new file is noted there: the clerk does one thing after the other.
        self._tools.clerk.ask(lambda: folder.withdraw(name, files), lambda _, __: None)
        return True

    # From the saves

    def kept(self, save: Save) -> None:
        """A rank's file is whole and on the disk."""
        step = self.waiting.get(save.place.key)
        if step is None or step.saves.get(save.place.rank) is not save or save.entry is None:
            return
        step.kept[save.place.rank] = save.entry
        step.touched = self._tools.clock()
        self.advance(step)

    def failed(self, save: Save, error: str, *, disk: bool = False) -> None:
        """A rank's file can't be written; the step can't be complete, so all its ranks fail.
        ``disk``: the fault is this disk's, so that they may well write it elsewhere."""
        step = self.waiting.get(save.place.key)
        if step is None or save not in step.everybody():
            self._tools.counters["failed"] += 1
            save.settle()
            save.owner.tell(_failed(save, error, disk))
            return
        self.give_up(step, error, disk=disk)

    def advance(self, step: Step) -> None:
        """Give a step its final name, when all ranks of this node are there."""
        there = self._there((step.name, step.step), step.run, step.since)
        if step.finishing or not step.done(there):
            return
        step.finishing = True
        tools = self._tools
        files, run = list(step.kept.values()), step.run

        def work() -> tuple[Manifest, list[LocalStep]]:
            manifest = tools.manifest(step.name, step.step, step.world, files, run)
            tools.folder.finish(step.folder, manifest, since=step.since)
            return manifest, tools.folder.scan()

        def then(found: tuple[Manifest, list[LocalStep]] | None, error: Exception | None) -> None:
            if error is not None or found is None:
                what = f"{step.name} {step.step} is not saved"
                text = faults.sentence(what, error or OSError(), tools.folder.path)
                self.give_up(step, text, disk=isinstance(error, OSError))
                return
            self._saved(step, *found)

        tools.clerk.ask(work, then)

    def _saved(self, step: Step, manifest: Manifest, steps: list[LocalStep]) -> None:
        self.waiting.pop((step.name, step.step), None)
        self.errors.pop((step.name, step.step), None)
        self._tools.counters["saved"] += 1
        self._tools.counters["saved_bytes"] += manifest.size
        self._tools.drain_seconds += self._tools.clock() - step.begun
        self.found(steps)
        for save in step.everybody():
            self._answer(save)
        folder = self._tools.folder.file(step.folder)
        for hook in self.on_saved:
            hook(folder, manifest)

    def _answer(self, save: Save) -> None:
        save.settle()
        place = save.place
        message = {"op": "saved", "save": save.number, "name": place.name, "step": place.step}
        save.owner.tell(message)

    # Steps that will never be complete

    def give_up(self, step: Step, error: str, *, disk: bool = False) -> None:
        """A step will never be complete: its ranks are told, its files removed."""
        self.errors[step.name, step.step] = error
        while len(self.errors) > 20:
            del self.errors[next(iter(self.errors))]
        self._tools.counters["failed"] += len(step.everybody()) or 1
        self._tools.log("warning", error)
        self._forget(step)
        for save in step.everybody():
            save.settle()
            save.owner.tell(_failed(save, error, disk))
        self.on_change()

    def _forget(self, step: Step) -> None:
        if self.waiting.get((step.name, step.step)) is step:
            del self.waiting[step.name, step.step]
        folder, name = self._tools.folder, step.folder
        files = {rank: file.name for rank, file in step.kept.items()}
        self._tools.clerk.ask(lambda: folder.withdraw(name, files), lambda _, __: None)
        self._leftovers[name] = self._tools.clock() + LEFTOVER_S

    def _why(self, step: Step) -> str:
        return left_out(step, self._live_ranks())

    def sweep(self, *, ended: bool = False) -> None:
        """Give up what nobody will finish. ``ended``: no trainer will come any more."""
        now = self._tools.clock()
        live = self._live_ranks()
        for step in list(self.waiting.values()):
            if step.settling or any(
                save.committed and not save.settled and save.entry is None
                for save in step.saves.values()
            ):
                continue
            lacking = step.local - len(step.ranks)
            open_ = sum(not save.committed for save in step.saves.values())
            if lacking <= len(live - step.ranks) and not (ended and (lacking or open_)):
                step.alone_since = None
            elif step.alone_since is None:
                step.alone_since = now
            alone = step.alone_since is not None and now - step.alone_since >= GRACE_S
            if ended or alone or now - step.touched >= PATIENCE_S:
                self.give_up(step, self._why(step))
        for name, at in list(self._leftovers.items()):
            if now >= at:
                self._drop_leftover(name)

    def _drop_leftover(self, name: str) -> None:
        del self._leftovers[name]
        folder, wall = self._tools.folder, self._tools.now()

        def then(dropped: bool | None, error: Exception | None) -> None:
            if error is None and not dropped:  # somebody writes into it
                self._leftovers[name] = self._tools.clock() + LEFTOVER_S

        self._tools.clerk.ask(lambda: folder.drop_unused(name, wall - LEFTOVER_S), then)

    @property
    def sweep_needed(self) -> bool:
        """Whether something waits that time alone may decide."""
        return bool(self._leftovers) or any(not s.settling for s in self.waiting.values())


def _failed(save: Save, error: str, disk: bool) -> dict[str, object]:
    more = {"disk": True} if disk else {}
    return {"op": "failed", "save": save.number, "error": error, **more}
