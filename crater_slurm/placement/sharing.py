"""Parts of a GPU: how many slices a small job asks for, and on which nodes that number is right.

Cards of different sizes have slices of different sizes, and a Slurm request names one number only.
So the number is chosen together with the nodes: on each of them it holds the memory that was asked
for, fits on one card (Slurm never spreads a job's shards over two) and wastes little. Where that
can't be had the answer is no share at all, never one that would pend for ever.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from crater_slurm.model.profile import NodeProfile
from crater_slurm.model.slices import Rounding, Slicing, slicing
from crater_slurm.model.units import format_mib
from crater_slurm.placement.check import Check
from crater_slurm.placement.inventory import Inventory, NodeClass
from crater_slurm.placement.need import Need
from crater_slurm.placement.rules import Result
from crater_slurm.placement.tally import enough, union

#: Beside cards with small slices those with big ones are left out where the number of slices
#: would be more than this many times what the job needs there: big cards are for big jobs.
_MOST_WASTE = 1.5

_CHECK = "gpu-slices"

Found = list[tuple[NodeClass, Result]]


@dataclass(frozen=True, slots=True)
class Policy:
    """A site that shares GPUs: how it cuts them, and whether CUDA MPS limits the memory."""

    rounding: Rounding = "ceil"
    reserve: int = 1
    mps: bool = False


@dataclass(frozen=True, slots=True)
class Shared:
    """A job's part of a GPU, and how the site shares."""

    share: Share
    policy: Policy


@dataclass(frozen=True, slots=True)
class Card:
    """One GPU as Slurm counts it: ``shards`` of ``slice_mib`` for jobs, of ``slices`` in all."""

    index: int
    model: str
    slice_mib: int
    shards: int
    slices: int

    def needed(self, memory_mib: int) -> int:
        """Slices of this card that hold so much memory."""
        return max(1, -(-memory_mib // self.slice_mib))


@dataclass(frozen=True, slots=True)
class Share:
    """A job's part of one GPU on each of its nodes, as far as all nodes chosen have it.

    ``memory_mib`` is the least on any of them, ``slices`` the most that a card of theirs has, and
    ``card`` their model, None where cards differ.
    """

    shards: int
    slices: int
    memory_mib: int
    card: str | None


@dataclass(frozen=True, slots=True)
class Choice:
    """The number of slices that is asked for (0: none will do) and what it makes of each class."""

    shards: int
    results: Found
    cards: dict[str, tuple[Card, ...]]

    def share(self, passing: Found) -> Share:
        """What the job has on the classes that are left of those that passed."""
        cards = [
            c for one, _ in passing for c in self.cards[one.example] if c.shards >= self.shards
        ]
        kinds = {(c.model, c.slice_mib, c.slices) for c in cards}
        return Share(
            shards=self.shards,
            slices=max(c.slices for c in cards),
            memory_mib=self.shards * min(c.slice_mib for c in cards),
            card=cards[0].model if len(kinds) == 1 else None,
        )


def cards(profile: NodeProfile, shards: int, policy: Policy) -> tuple[Card, ...]:
    """The GPUs of a node for which Slurm counts so many shards; none where they can't be told.

    The counts are those that crater renders. Where Slurm has another number, the site cut its
    cards by itself, evenly, and then a slice is an even part of a card. Which card has how many
    is not known where such cards differ, nor where one is cut into MIG instances.
    """
    sizes = [gpu.memory_mib for gpu in profile.gpus if gpu.memory_mib and not gpu.mig_instances]
    if not shards or not sizes or len(sizes) < len(profile.gpus):
        return ()
    cuts = [slicing(size, policy.reserve, policy.rounding) for size in sizes]
    if sum(cut.usable for cut in cuts) != shards:
        each, left = divmod(shards, len(sizes))
        if left or len(set(sizes)) > 1 or each > sizes[0]:
            return ()
        cuts = [Slicing(size, size // each, 0) for size in sizes]
        return tuple(
            Card(g.index, g.model, c.slice_mib, each, each)
            for g, c in zip(profile.gpus, cuts, strict=True)
        )
    return tuple(
        Card(g.index, g.model, c.slice_mib, c.usable, c.slices)
        for g, c in zip(profile.gpus, cuts, strict=True)
    )


@dataclass(frozen=True, slots=True)
class Among:
    """The nodes to choose among; ``candidates`` and ``named`` are node sets of the inventory."""

    inventory: Inventory
    candidates: int
    named: int


@dataclass(frozen=True, slots=True)
class _Piece:
    """Nodes of one class that have the same number of shards."""

    one: NodeClass
    result: Result
    cards: tuple[Card, ...]

    def fitting(self, shards: int) -> list[Card]:
        """Cards that Slurm could give so many shards of; which of them is Slurm's choice."""
        return [card for card in self.cards if card.shards >= shards]

    def serves(self, shards: int, need: Need) -> bool:
        """Whether whatever card Slurm chooses is one that the job can use."""
        fitting = self.fitting(shards)
        return bool(fitting) and all(
            (need.own_shards or c.index in self.result.eligible)
            and c.needed(_memory(need)) <= shards
            for c in fitting
        )

    def wastes(self, shards: int, need: Need) -> bool:
        """Whether the job needs far less slices here."""
        return shards > _MOST_WASTE * min(c.needed(_memory(need)) for c in self.fitting(shards))

    def could(self, shards: int, need: Need) -> bool:
        """Whether some card has room, whatever else is wrong; with 0 for any number of shards."""
        memory = _memory(need)
        return any(c.needed(memory) <= (shards or c.shards) <= c.shards for c in self.cards)


def ways(need: Need, policy: Policy | None) -> Iterator[Need]:
    """A need as it is tried: with a part of a GPU where that is allowed, then with whole ones."""
    if policy is None and need.own_shards:
        need = dataclasses.replace(need, own_shards=0)
    if need.shared:
        if policy is not None:
            yield need
        need = dataclasses.replace(need, shared=False)
    yield need


def choose(results: Found, need: Need, policy: Policy | None, among: Among) -> Choice | None:
    """The number of slices for a need, and each class's result with the check of its slices.

    None for a job without slices, and on a site without. A number that the user's own option names
    is never changed. Otherwise the one is taken that serves most nodes, of equals the one that
    takes least memory.
    """
    if policy is None or not (need.shared or need.own_shards):
        return None
    pieces = _pieces(results, policy, among)
    if need.own_shards:
        shards = need.own_shards
        serving = [p for p in pieces if p.serves(shards, need)]
    else:
        shards, serving = _best(pieces, need, among)
    there = {id(piece) for piece in serving}
    checked = [
        (piece.one, _with(piece.result, _check(piece, shards, need, ok=id(piece) in there)))
        for piece in pieces
    ]
    return Choice(shards, checked, {piece.one.example: piece.cards for piece in pieces})


def largest(choice: Choice) -> int:
    """The most shards that one card has, of the machines that lack nothing else."""
    able = [
        one.example
        for one, result in choice.results
        if all(check.ok for check in result.checks if check.name != _CHECK)
    ]
    return max((c.shards for example in able for c in choice.cards[example]), default=0)


def notes(share: Share, need: Need, policy: Policy) -> Iterator[str]:
    """What a user must know of a part of a GPU."""
    wall = (
        "its memory is limited by CUDA MPS, by settings in its environment"
        if policy.mps
        else "nothing on the GPU keeps its memory for it: a neighbour can take it, and only MPS or "
        "MIG would limit that"
    )
    yield f"the job shares its GPU with others; {wall}"
    if need.own_shards and share.memory_mib < (need.gpu_memory_mib or 0):
        has = f"{share.shards} slices are {share.memory_mib:,} MiB of a GPU's memory"
        yield f"{has}, less than gpu-memory says"


def why_whole(policy: Policy | None) -> str:
    """Why a job that may share a GPU has it for itself."""
    if policy is None:
        return "gpu-sharing=yes shares nothing: this cluster gives whole GPUs"
    return "gpu-sharing=yes: no slices for it where the job could run, so the GPU is a whole one"


def _memory(need: Need) -> int:
    """What the slices must hold: nothing in particular where the user counted them."""
    return 0 if need.own_shards else need.gpu_memory_mib or 0


def _pieces(results: Found, policy: Policy, among: Among) -> list[_Piece]:
    pieces = []
    for one, result in results:
        for shards, nodes in among.inventory.shard_sets:
            if part := one.nodes & nodes & among.candidates:
                example = one.example if part == one.nodes else among.inventory.names_of(part, 1)[0]
                found = cards(one.profile, shards, policy)
                pieces.append(_Piece(NodeClass(one.profile, part, example), result, found))
    return pieces


def _best(pieces: list[_Piece], need: Need, among: Among) -> tuple[int, list[_Piece]]:
    """The number of slices and where it is right; 0 and nowhere when no number is."""
    memory = _memory(need)
    able = [piece for piece in pieces if piece.result.ok]
    counts = {n for p in able for c in p.cards if (n := c.needed(memory)) <= c.shards}
    for sparing in (True, False):
        choices = []
        for shards in counts:
            serving = [p for p in able if p.serves(shards, need)]
            if sparing:
                serving = [p for p in serving if not p.wastes(shards, need)]
            nodes = union(p.one.nodes for p in serving)
            if enough(nodes, need, among.named):
                size = max(c.slice_mib * shards for p in serving for c in p.fitting(shards))
                up = (nodes & among.inventory.usable).bit_count()
                choices.append(((up, nodes.bit_count(), -size), shards, serving))
        if choices:
            _, shards, serving = max(choices, key=lambda choice: choice[:2])
            return shards, serving
    return 0, []


def _with(result: Result, check: Check) -> Result:
    return dataclasses.replace(result, checks=(*result.checks, check), ok=result.ok and check.ok)


def _check(piece: _Piece, shards: int, need: Need, *, ok: bool) -> Check:
    best = max(piece.cards, key=lambda card: card.shards, default=None)
    have = f"{best.shards} of {best.slice_mib:,} MiB" if best else "none"
    asked = f"{shards} slices" if shards else f"slices for {format_mib(_memory(need))}"
    if not piece.result.ok:  # what the machine lacks is said by its other checks
        ok = piece.could(shards, need)
    reason = "" if ok else _reason(piece, shards, need)
    return Check(_CHECK, f"{asked} of one GPU", have, ok, reason, best.shards if best else 0.0)


def _reason(piece: _Piece, shards: int, need: Need) -> str:
    """Why this number of slices is not right for these nodes."""
    if not piece.cards:
        return "its GPUs are not in slices, or it can't be told which has how many"
    fitting = piece.fitting(shards)
    if not shards and piece.could(0, need):
        return "no number of slices is right on nodes enough"
    if not fitting or not piece.could(0, need):
        best = max(piece.cards, key=lambda card: card.shards)
        return f"one GPU has {best.shards} slices of {best.slice_mib:,} MiB for jobs"
    if not all(c.index in piece.result.eligible for c in fitting):
        return "it has other GPUs too, and a request for slices can't say which"
    least = min(c.slice_mib for c in fitting)
    if shards * least < _memory(need):
        return f"{shards} slices of one of its GPUs are {shards * least:,} MiB"
    return f"with slices of {least:,} MiB it is kept for jobs that need more"
