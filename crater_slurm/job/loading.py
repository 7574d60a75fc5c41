"""The newest checkpoint that is whole: found, agreed on by all ranks, checked and read."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace

from crater_slurm.job import layout, wire
from crater_slurm.job.find import Found, common, gatherer, look, newest_first, scan
from crater_slurm.job.saving import CheckpointError
from crater_slurm.job.session import Session
from crater_slurm.job.stream import Stream
from crater_slurm.job.tensorfile import DamagedError
from crater_slurm.job.tree import StateError
from crater_slurm.job.unpack import read_state

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from crater_slurm.job.tensorfile import Source

_ASK_SECONDS = 30.0
_RESTORE_SECONDS = 3600.0


@dataclass(frozen=True)
class Loaded:
    """A state, the step it was saved at, the folder it came from, and by which way: ``cache``,
    ``peer``, ``remote`` (the worker's words) or ``folder``. With ``ranks`` given to load, the
    state is a dict of states by rank. ``world_size`` is how many ranks saved."""

    state: Any
    step: int
    folder: str
    source: str
    run: str = ""
    world_size: int = 1


@dataclass(frozen=True)
class Wish:
    """What load was asked for. ``ranks`` None is this rank's own file, () is all of them."""

    name: str = "step"
    step: int | None = None
    ranks: tuple[int, ...] | None = None
    map_location: Any = None
    mmap: bool = False
    verify: bool = True
    trust: bool = False


def steps(session: Session, name: str) -> list[Found]:
    """Every step that this rank can see whole, in its folders or by the worker; newest first."""
    wish = Wish(name=name, ranks=())
    return newest_first(list(_Loader(session, wish).visible(complete=True).values()))


def load(session: Session, wish: Wish) -> Loaded | None:
    """The newest step that all ranks can load; None where there is none. Raises CheckpointError."""
    loader = _Loader(session, wish)
    gather = gatherer()
    visible = loader.visible(complete=gather is None)
    while True:
        word = [(f.step, f.run, f.time) for f in visible.values()]
        choice = common(gather(word) if gather else [word])
        if choice is None:
            loader.explain(visible)
            return None
        loaded, stop = loader.attempt(visible[choice])
        answers = gather((loaded is not None, stop is not None)) if gather else []
        if stop is not None:
            raise CheckpointError(str(stop)) from stop
        if any(stopped for _, stopped in answers):
            raise CheckpointError(
                f"Another rank can't load {wish.name} {choice[0]}; it says why in its own output."
            )
        if loaded is not None and all(good for good, _ in answers):
            return loaded
        del visible[choice]


class _Loader:
    def __init__(self, session: Session, wish: Wish) -> None:
        self.session = session
        self.wish = wish
        self.rank, self.world = session.ranks()
        self._incomplete: list[Found] = []
        self._away: dict[tuple[int, str], Found] | None = None

    def visible(self, *, complete: bool) -> dict[tuple[int, str], Found]:
        """Steps by (step, run). ``complete``: leave out those of which a rank is not here."""
        seen: dict[tuple[int, str], Found] = {}
        for folder in self.session.folders():
            for found in scan(folder, self.wish.name):
                if self._fits(found, complete):
                    found.source = "cache" if folder == self.session.env.folder else "folder"
                    known = seen.get(found.key)
                    if known is None or known.time < found.time:
                        seen[found.key] = found
                else:
                    self._incomplete.append(found)
        rows, sure = self._of_worker()
        for step, run, time in rows:
            known = seen.setdefault((step, run), Found(step, run, source="cache"))
            known.time = max(known.time, time)
        if not sure:
            for key, found in self._at_destination(complete=complete).items():
                if not seen.setdefault(key, found).folder:
                    seen[key] = found
        if self.wish.step is not None:
            seen = {key: found for key, found in seen.items() if key[0] == self.wish.step}
        return seen

    def _at_destination(self, *, complete: bool) -> dict[tuple[int, str], Found]:
        """What lies at the destination, if that is a folder that this process can read itself."""
        if self._away is None:
            place, self._away = self.session.env.destination, {}
            for found in scan(place, self.wish.name) if place else ():
                found.source = "remote"
                if self._fits(found, complete):
                    self._away[found.key] = found
                else:
                    self._incomplete.append(found)
        return self._away

    def _fits(self, found: Found, complete: bool) -> bool:
        if complete and not layout.covers(found.parts):
            return False
        return set(self._wanted(found)) <= found.ranks

    def _wanted(self, found: Found) -> list[int]:
        """The ranks whose files this rank reads."""
        if self.wish.ranks is None:
            return [self.rank if found.world_size > 1 else 0]
        return list(self.wish.ranks) or list(range(found.world_size))

    def _asked(self) -> list[list[int] | None]:
        """Which ranks' files to ask the worker for, one wish after the other. A step that one rank
        saved alone has no file of this rank, but is whole."""
        if self.wish.ranks == ():
            return [None]
        if self.wish.ranks is not None:
            return [list(self.wish.ranks)]
        return [[self.rank], None] if self.rank else [[0]]

    def _of_worker(self) -> tuple[list[tuple[int, str, float]], bool]:
        """(step, run, time) of what the worker says it has or could bring; and whether that is
        all: not where there is none, or it does not know what is at the destination."""
        good: list[tuple[int, str, float]] = []
        sure = True
        for ranks in self._asked():
            message = {"op": "available", "name": self.wish.name, "ranks": ranks}
            answer = self.session.ask(message, "available", _ASK_SECONDS)
            if answer is None:
                return good, False
            sure = sure and not answer.get("error")
            rows = answer.get("steps")
            for row in rows if isinstance(rows, list) else []:
                if isinstance(row, list) and len(row) == 3 and type(row[0]) is int:
                    time = float(row[2]) if isinstance(row[2], (int, float)) else 0.0
                    good.append((row[0], str(row[1]), time))
        return good, sure

    def attempt(self, found: Found) -> tuple[Loaded | None, Exception | None]:
        """(what was loaded, None); (None, None) where it is damaged or gone; (None, an error)
        where no other step would help."""
        try:
            loaded = self._read(found) if found.folder else None
            if loaded is None and self.session.env.ring is not None:
                loaded = self._by_worker(found)
            if loaded is None:  # another copy may be whole
                there = self._at_destination(complete=False).get(found.key)
                if there is not None and there.folder != found.folder:
                    loaded = self._read(there)
            return loaded, None
        except (StateError, CheckpointError) as error:
            return None, error

    def _by_worker(self, found: Found) -> Loaded | None:
        """Brought into the cache, else read past it; None, with a warning, where neither goes."""
        brought, reason = self._bring(found)
        if brought is not None:
            return self._read(brought)
        try:
            return self._past_the_cache(found)
        except (OSError, wire.WireError, layout.LayoutError):
            # There is no worker, or no destination, or it is not there either.
            self._left_out(found, reason)
            return None

    def _read(self, found: Found) -> Loaded | None:
        """What a folder has of a step; None, with a warning, where it is damaged."""

        def place(rank: int) -> tuple[str, layout.FileEntry]:
            entry = found.file(rank)
            if entry is None:
                raise DamagedError(f"no file of rank {rank} is in {found.folder}")
            return f"{found.folder}/{entry.name}", entry

        return self._states(found, place)

    def _states(
        self, found: Found, place: Callable[[int], tuple[str | Source, layout.FileEntry]]
    ) -> Loaded | None:
        """The states of the ranks that are wanted; ``place`` says where a rank's file is. None,
        with a warning, where one is damaged."""
        wish = self.wish
        if wish.ranks is None and found.world_size not in (1, self.world):
            raise CheckpointError(
                f"{wish.name} {found.step} in {found.folder} was saved by {found.world_size} "
                f"ranks, and there are {self.world} now. load(ranks='all') gives all their states."
            )
        states = {}
        for rank in self._wanted(found):
            try:
                where, entry = place(rank)
                states[rank] = read_state(
                    where,
                    entry if wish.verify else None,
                    map_location=wish.map_location,
                    mmap=wish.mmap,
                    trust=wish.trust,
                )
            except (DamagedError, OSError, wire.WireError, layout.LayoutError) as error:
                self._left_out(found, str(error))
                return None
        own = next(iter(states.values())) if wish.ranks is None else states
        return Loaded(own, found.step, found.folder, found.source, found.run, found.world_size)

    def _left_out(self, found: Found, reason: str) -> None:
        text = f"{self.wish.name} {found.step} is left out: {reason.rstrip('.')}."
        warnings.warn(text, RuntimeWarning, stacklevel=6)

    def _bring(self, found: Found) -> tuple[Found | None, str]:
        """Have the worker bring a step into the cache; None and why, where it can't."""
        reason = "its file is damaged, and there is no worker to bring another"
        for ranks in self._asked():
            message = {
                "op": "restore", "name": self.wish.name, "step": found.step, "run": found.run,
                "ranks": ranks,
            }  # fmt: skip
            answer = self.session.ask(message, "restored", _RESTORE_SECONDS)
            if answer is None:
                break
            reason = str(answer.get("error") or "the checkpoint worker does not have it")
            folder = answer.get("folder")
            for here in look(folder, found.step, self.wish.name) if isinstance(folder, str) else []:
                if here.run == found.run and self._fits(here, False):
                    return replace(here, source=str(answer.get("source") or "cache")), ""
        return None, reason

    def _past_the_cache(self, found: Found) -> Loaded | None:
        """What the destination has of a step, through the worker's hands, where the cache can't
        take it; None where it is damaged there. Raises OSError, WireError, LayoutError."""
        streams: dict[int, Stream] = {}

        def place(rank: int) -> tuple[Stream, layout.FileEntry]:
            stream = streams.pop(rank, None) or self._stream(found, rank)
            return stream, stream.entry

        try:
            first = streams[0] = self._stream(found, 0)
            here = replace(found, folder=first.folder, parts=[first.manifest], source="remote")
            return self._states(here, place)
        finally:
            for stream in streams.values():
                stream.close()

    def _stream(self, found: Found, rank: int) -> Stream:
        if self.session.env.ring is None:
            raise FileNotFoundError(2, "there is no worker")
        wish = {"name": self.wish.name, "step": found.step, "run": found.run, "rank": rank}
        return Stream(self.session.env.ring, self.session.hello(), wish)

    def explain(self, visible: dict[tuple[int, str], Found]) -> None:
        """Say why there is nothing, where something is there after all."""
        step = self.wish.step
        left = [f for f in self._incomplete if step is None or f.step == step]
        if visible:
            newest = newest_first(list(visible.values()))[0]
            warnings.warn(
                f"Rank {self.rank} sees {self.wish.name} {newest.step}, but other ranks don't: "
                "nothing is loaded. Save into a folder that all nodes share, or on all ranks.",
                RuntimeWarning,
                stacklevel=4,
            )
        elif left:
            newest = newest_first(left)[0]
            there = ", ".join(map(str, sorted(newest.ranks)[:8]))
            warnings.warn(
                f"{self.wish.name} {newest.step} in {newest.folder} is not complete: it has rank "
                f"{there} of {newest.world_size}. Where only one rank saves, all of them call "
                "save(..., only_rank=0).",
                RuntimeWarning,
                stacklevel=4,
            )
