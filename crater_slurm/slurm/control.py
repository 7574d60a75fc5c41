"""Changes nodes in Slurm: their weight, drained or not. Nothing else of crater does.

Commands are argument lists, never a shell's; nodes travel as host lists, many in one command, since
each command holds slurmctld's locks once. Raises SlurmError with Slurm's own words.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from crater_slurm.errors import SlurmError
from crater_slurm.slurm import hostlist
from crater_slurm.slurm.client import Client

#: What every reason of crater's begins with; a node drained for another one is somebody else's.
REASON_PREFIX = "crater: "
#: More is of no use, and near it Slurm keeps values of its own.
MOST_WEIGHT = 2**31 - 1
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
#: Nodes of one command: a command line has room for them, and slurmctld is soon free again.
_AT_ONCE = 500
_LONGEST_REASON = 200
#: Words in a node's state that say that somebody or something took it out of service.
_OUT = ("DOWN", "DRAIN", "FAIL", "MAINT", "FUTURE", "UNKNOWN", "INVAL", "RESPOND", "REBOOT", "*")


@dataclass(frozen=True, slots=True)
class Control:
    """Acts through a Client, so with its paths and its time limit."""

    client: Client

    def set_weight(self, nodes: Iterable[str], weight: int) -> None:
        """Give nodes a weight; Slurm takes nodes of a low one first."""
        if not 0 <= weight <= MOST_WEIGHT:
            raise SlurmError(f"a weight of {weight} is out of bounds (0 to {MOST_WEIGHT})")
        for names in _chunks(nodes):
            self._update(names, f"weight={weight}")

    def drain(self, node: str, reason: str) -> bool:
        """Drain a node that is in service; False when it is not, and then it is left alone."""
        state, _ = self._state(node)
        if any(word in state for word in _OUT):
            return False
        self._update([node], "state=drain", f"reason={REASON_PREFIX}{_plain(reason)}")
        return True

    def undrain(self, node: str) -> bool:
        """Take back a drain of ours; False when it is not ours or not drained, and left alone.

        Asked of Slurm at this moment: an admin may have made the drain his own since.
        """
        state, reason = self._state(node)
        if "DRAIN" not in state or not reason.startswith(REASON_PREFIX):
            return False
        # Unlike resume this does not bring a node back that is down too.
        self._update([node], "state=undrain")
        return True

    def _state(self, node: str) -> tuple[str, str]:
        record = self.client.node(node)
        return record.get("State", "UNKNOWN").upper(), record.get("Reason", "")

    def _update(self, names: Sequence[str], *changes: str) -> None:
        for name in names:
            if not _NAME.fullmatch(name):
                raise SlurmError(f"{name!r} is no node name")
        self.client.run("scontrol", "update", f"nodename={hostlist.compress(names)}", *changes)


def _chunks(nodes: Iterable[str]) -> Iterator[list[str]]:
    names = sorted(set(nodes))
    for begin in range(0, len(names), _AT_ONCE):
        yield names[begin : begin + _AT_ONCE]


def _plain(text: str) -> str:
    """A reason as Slurm takes it everywhere: one line, no quotes, not too long."""
    kept = "".join(c if c.isprintable() and c not in "\"'`\\|=" else " " for c in text)
    return kept[:_LONGEST_REASON].strip()
