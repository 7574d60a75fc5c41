"""What was measured of every node, as arrays, and the nodes that a need finds alike.

Measurements differ a little between equal machines, so a cluster that was measured has as many
different profiles as nodes. But a need only asks on which side of its thresholds a node lies: nodes
of one make with the same answers have the same outcome, and are decided once.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from crater_slurm.model.profile import NodeProfile
from crater_slurm.placement.need import Need

Floats = npt.NDArray[np.float64]
Answers = npt.NDArray[np.bool_]

#: NUMA nodes of one machine whose choices are all looked at; with more, values count as they are.
_MOST_DOMAINS = 8


@dataclass(frozen=True, slots=True)
class Domains:
    """One value of each node's NUMA nodes: [node, NUMA node with CPUs], NaN unknown or not there.

    ``least`` and ``most`` are the sums of the k smallest and of the k largest values of a node, at
    k - 1; what is not there makes no sum smaller, and what is unknown counts nothing.
    """

    values: Floats
    least: Floats
    most: Floats
    total: Floats

    @classmethod
    def of(cls, values: Floats, counts: npt.NDArray[np.int64]) -> Domains:
        """From the values and how many NUMA nodes each node has."""
        there = np.arange(values.shape[1]) < counts[:, None]
        known = np.nan_to_num(values)
        ascending = np.sort(np.where(there, known, np.inf), axis=1)
        descending = -np.sort(-np.where(there, known, 0.0), axis=1)
        total = np.where(there, values, 0.0).sum(axis=1)
        return cls(
            values,
            np.cumsum(ascending, axis=1),
            np.cumsum(descending, axis=1),
            np.where(counts > 0, total, np.nan),
        )

    def answers(self, wanted: float) -> list[Answers]:
        """What tells nodes apart whose choices of NUMA nodes have ``wanted`` together or not.

        Where all choices of a size have it, or none, that is the answer; every choice is looked
        at only on the nodes in between.
        """
        width = self.values.shape[1]
        all_have, some_have = self.least >= wanted, self.most >= wanted
        found = [np.isnan(self.values[:, k]) for k in range(width)]
        found += [column for both in (all_have, some_have) for column in both.T]
        between = some_have & ~all_have
        for size in np.flatnonzero(between.any(axis=0)) + 1:
            rows = np.flatnonzero(between[:, size - 1])
            values = np.nan_to_num(self.values[rows])
            choices = itertools.combinations(range(width), int(size))
            for choice in choices if width <= _MOST_DOMAINS else [(k,) for k in range(width)]:
                sums = values[:, choice].sum(axis=1)
                for answer in (
                    [sums >= wanted]
                    if width <= _MOST_DOMAINS
                    else [sums == value for value in np.unique(sums)]
                ):
                    column = np.zeros(len(self.values), np.bool_)
                    column[rows] = answer
                    found.append(column)
        return found


@dataclass(frozen=True, slots=True)
class Measured:
    """Columns over the nodes in name order; NaN is unknown. ``make`` is -1 without a profile."""

    make: npt.NDArray[np.int64]
    domain_bandwidth: Domains
    domain_memory: Domains
    memory: Floats
    iops: Floats
    latency: Floats
    cache: Floats

    @classmethod
    def of(cls, makes: Sequence[int], profiles: Sequence[NodeProfile | None]) -> Measured:
        """From each node's make and profile (None where it has none)."""
        widest = max((len(p.cpu_domains) for p in profiles if p), default=0)
        shape = (len(makes), max(1, widest))
        domain_bandwidth, domain_memory = np.full(shape, np.nan), np.full(shape, np.nan)
        columns = np.full((4, len(makes)), np.nan)
        domains = np.zeros(len(makes), np.int64)
        for i, profile in enumerate(profiles):
            if profile is None:
                continue
            nodes = profile.cpu_domains
            domains[i] = len(nodes)
            for k, node in enumerate(nodes):
                domain_bandwidth[i, k] = _number(node.memory_bandwidth_gb_s)
                domain_memory[i, k] = _number(node.memory_mib)
            iops = [d.random_read_iops for d in profile.nvmes if d.random_read_iops]
            latency = [d.read_latency_us for d in profile.nvmes if d.read_latency_us is not None]
            columns[:, i] = (
                _number(profile.memory_mib),
                max(iops, default=np.nan),
                min(latency, default=np.nan),
                _number(profile.cache_gb),
            )
        return cls(
            np.asarray(makes, np.int64),
            Domains.of(domain_bandwidth, domains),
            Domains.of(domain_memory, domains),
            *columns,
        )

    def groups(self, need: Need) -> list[tuple[int, int]]:
        """For each class of nodes that the need finds alike: the nearest node, and the node set.

        The nearest is the one that has most of what the need asks for, the first of equals.
        """
        known = np.flatnonzero(self.make >= 0)
        if not known.size:
            return []
        answers, closeness = self._answers(need)
        keys = _keys(self.make, answers)[known]
        # Best of each class first, classes together.
        order = np.lexsort((known, -closeness[known], keys))
        sorted_keys = keys[order]
        starts = np.flatnonzero(np.r_[True, sorted_keys[1:] != sorted_keys[:-1]])
        found = []
        for begin, end in zip(starts, np.r_[starts[1:], order.size], strict=True):
            members = known[order[begin:end]]
            found.append((int(members[0]), _node_set(members, len(self.make))))
        return sorted(found, key=lambda group: group[1] & -group[1])

    def _answers(self, need: Need) -> tuple[list[Answers], Floats]:
        """Yes or no of every node to everything that decides, and how near it comes."""
        answers: list[Answers] = []
        closeness = np.zeros(len(self.make))

        def ask(have: Floats, wanted: float | None, *, less: bool = False) -> None:
            nonlocal closeness
            if not wanted:
                return
            answers.append(have <= wanted if less else have >= wanted)
            answers.append(np.isnan(have))
            ratio = wanted / np.maximum(have, 1e-9) if less else have / wanted
            closeness = closeness + np.nan_to_num(np.minimum(ratio, 1.0))

        with np.errstate(invalid="ignore"):
            ask(self.memory, need.memory_mib)
            ask(self.domain_bandwidth.total, need.memory_bandwidth_gb_s)
            ask(self.iops, need.ssd_iops)
            ask(self.latency, need.ssd_latency_us, less=True)
            ask(self.cache, need.cache_gb)
            if need.strict:
                for column, wanted in (
                    (self.domain_bandwidth, need.memory_bandwidth_gb_s),
                    (self.domain_memory, need.memory_mib),
                ):
                    if wanted:
                        answers += column.answers(wanted)
                        closeness = closeness + np.minimum(column.most[:, 0] / wanted, 1.0)
        return answers, closeness


def _number(value: float | None) -> float:
    return np.nan if value is None else float(value)


def _keys(make: npt.NDArray[np.int64], answers: list[Answers]) -> npt.NDArray[np.int64]:
    """One number for each combination of make and answers."""
    keys = make
    for start in range(0, len(answers), 32):
        bits = np.zeros(len(make), np.int64)
        for place, answer in enumerate(answers[start : start + 32]):
            bits |= answer.astype(np.int64) << place
        # Renumbered after each portion, so that any number of answers fits.
        _, keys = np.unique((keys << 32) | bits, return_inverse=True)
    return keys.astype(np.int64)


def _node_set(members: npt.NDArray[np.int64], count: int) -> int:
    """The set of these places, one bit each."""
    mask = np.zeros(count, np.bool_)
    mask[members] = True
    return int.from_bytes(np.packbits(mask, bitorder="little").tobytes(), "little")
