"""Publishes node health to Slurm as node weights, so that Slurm prefers healthy nodes by itself.

A node's weight is its own, as slurm.conf has it, plus a penalty. Its own is what Slurm showed
before crater changed it, kept in a file: ``scontrol reconfigure`` and a restart of slurmctld put it
back, which is how a change in slurm.conf is noticed, and a restart of crater must not take crater's
weight for it. A weight that is neither the node's own nor one of crater's is an admin's, and
becomes the node's own.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from crater_slurm.errors import CraterError, SlurmError
from crater_slurm.files import write_atomically
from crater_slurm.model.cluster import SlurmCluster
from crater_slurm.slurm import hostlist
from crater_slurm.slurm.control import MOST_WEIGHT, Control

_log = logging.getLogger("crater.scheduler.weights")
#: Commands of one round; what is left waits for the next, the unhealthiest nodes go first.
_MOST_COMMANDS = 50

#: What a part of crater adds to a node's weight; None as long as it can't tell: what crater set
#: before stays then, so that a restart of crater moves no weight forth and back.
Penalty = Callable[[str], int | None]


@dataclass(frozen=True, slots=True)
class Known:
    """A node's own weight, and the weights that crater may have given it since it was seen so."""

    own: int
    ours: tuple[int, ...] = ()


@dataclass(slots=True)
class Round:
    """What one look at the cluster comes to: what is known now, and the weights to set."""

    known: dict[str, Known] = field(default_factory=dict)
    changes: dict[int, list[str]] = field(default_factory=dict)


def learn(known: Known | None, seen: int) -> Known:
    """What is known of a node's weight after Slurm showed it as ``seen``."""
    if known is not None and seen != known.own and seen in known.ours:
        return Known(known.own, (seen,))
    return Known(seen)


def plan(
    cluster: SlurmCluster, known: Mapping[str, Known], penalty: Penalty, *, changing: bool
) -> Round:
    """The weights that Slurm must be told; pure. Not ``changing`` only takes back crater's own."""
    # A node that Slurm does not list for a while may come back with a weight of ours.
    result = Round(dict(known))
    for node in cluster.nodes:
        if node.weight is None:
            continue
        now = learn(known.get(node.name), node.weight)
        extra = penalty(node.name) if changing else 0
        if extra is None:
            wanted = node.weight
        else:
            wanted = max(now.own, min(now.own + max(0, extra), MOST_WEIGHT))
        if wanted != node.weight:
            result.changes.setdefault(wanted, []).append(node.name)
            # Both count as ours until Slurm shows which it is: a command may fail half way.
            now = Known(now.own, tuple(dict.fromkeys((*now.ours, wanted))))
        result.known[node.name] = now
    return result


class Weights:
    """Keeps Slurm's weights as they should be. One thread calls ``publish``.

    ``add`` takes further penalties, for parts of crater that prefer nodes for other reasons.
    """

    def __init__(self, control: Control, file: Path) -> None:
        self._control = control
        self._file = file
        self._penalties: list[Penalty] = []
        self._known: dict[str, Known] | None = None
        self._told: dict[int, list[str]] = {}
        self.problem = ""

    def add(self, penalty: Penalty) -> None:
        """Add what ``penalty(node)`` says to every node's weight from now on."""
        self._penalties.append(penalty)

    def own(self, node: str) -> int | None:
        """The weight that slurm.conf gives a node; None before it was seen."""
        found = (self._known or {}).get(node)
        return found.own if found else None

    def publish(self, cluster: SlurmCluster, *, changing: bool) -> bool:
        """Set what differs from what it should be; whether Slurm was told anything.

        Not ``changing`` logs what would be done and takes back what crater did before.
        """
        try:
            return self._publish(cluster, changing)
        except CraterError as error:
            if self.problem != str(error):
                _log.warning("weights are not published: %s", error)
            self.problem = str(error)
            return False

    def _publish(self, cluster: SlurmCluster, changing: bool) -> bool:
        if self._known is None:
            self._known = read(self._file)
        round_ = plan(cluster, self._known, self._penalty, changing=changing)
        if not changing:
            self._would(plan(cluster, round_.known, self._penalty, changing=True))
            if not round_.changes:
                self.problem = ""
                return False
        if round_.known != self._known:
            # Before Slurm is told: after a crash nothing of ours is taken for the site's.
            write(self._file, round_.known)
            self._known = round_.known
        self._apply(round_.changes)
        return bool(round_.changes)

    def _apply(self, changes: Mapping[int, list[str]]) -> None:
        """Tell Slurm; what it refuses of one weight keeps no other from being set."""
        failed = ""
        for weight, nodes in sorted(changes.items(), reverse=True)[:_MOST_COMMANDS]:
            try:
                self._control.set_weight(nodes, weight)
            except SlurmError as error:
                failed = str(error)
            else:
                _log.info("weight of %s is set to %d", hostlist.compress(nodes), weight)
        if failed and failed != self.problem:
            _log.warning("weights can't be set: %s", failed)
        self.problem = failed

    def _penalty(self, node: str) -> int | None:
        each = [penalty(node) for penalty in self._penalties]
        known = [extra for extra in each if extra is not None]
        return sum(known) if len(known) == len(each) else None

    def _would(self, round_: Round) -> None:
        if round_.changes != self._told:
            for weight, nodes in sorted(round_.changes.items()):
                _log.info("weight of %s would be set to %d", hostlist.compress(nodes), weight)
            self._told = round_.changes


def read(file: Path) -> dict[str, Known]:
    """What is known of each node's weight; nothing when there is no file.

    Raises SlurmError for a file that can't be read: guessing would take our weights for the site's.
    """
    try:
        data: Any = json.loads(file.read_text())
        return {
            str(name): Known(_whole(entry["own"]), tuple(map(_whole, entry["ours"])))
            for name, entry in data["nodes"].items()
        }
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise SlurmError(
            f"can't read the nodes' own weights in {file} ({error}); run 'scontrol reconfigure', "
            "which restores them in Slurm, and remove the file"
        ) from error


def write(file: Path, known: Mapping[str, Known]) -> None:
    """Keep it. Raises SlurmError when it can't be written."""
    nodes = {name: {"own": k.own, "ours": list(k.ours)} for name, k in sorted(known.items())}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json.dumps({"version": 1, "nodes": nodes}) + "\n")
    except OSError as error:
        raise SlurmError(
            f"can't write the nodes' own weights to {file} ({error.strerror}); no weight is "
            "changed before they are kept (health.state_file)"
        ) from error


def _whole(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{value!r} is no weight")
    return value


def tiered(tier: Callable[[str], int | None], penalties: Iterable[int]) -> Penalty:
    """The penalty of a node by its health tier; tier 0 has none."""
    table = (0, *penalties)

    def penalty(node: str) -> int | None:
        found = tier(node)
        return None if found is None else table[min(found, len(table) - 1)]

    return penalty
