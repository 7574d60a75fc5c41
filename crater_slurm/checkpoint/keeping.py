"""Which steps stay in the cache: the rules are the services', the removing is done here."""

from __future__ import annotations

from crater_slurm.checkpoint.services import Services
from crater_slurm.checkpoint.steps import Steps
from crater_slurm.checkpoint.threads import Mailbox
from crater_slurm.checkpoint.tools import Tools


class Keeping:
    """Removes what the rules let go, after each save and when room is lacking."""

    def __init__(self, tools: Tools, steps: Steps, services: Services, mailbox: Mailbox) -> None:
        self._tools, self._steps, self._services = tools, steps, services
        self._mailbox = mailbox
        tools.room.drop_more = self.make_room

    def apply(self) -> None:
        """Let the rules be applied, by the clerk."""
        self._tools.clerk.ask(lambda: self.make_room(0), lambda _, __: None)

    def make_room(self, over_bytes: int) -> None:
        """Remove what may go; with ``over_bytes`` until that much has gone. In a pool's thread."""
        folder, freed = self._tools.folder, 0
        found = folder.scan()
        for step in self._services.removable(found, over_bytes):
            if over_bytes and freed >= over_bytes:
                break
            folder.remove(step.folder.rpartition("/")[2])
            freed += step.bytes
            self._tools.log("info", f"{step.name} {step.step} went from the cache by its rules")
        if freed:
            self._mailbox.post(self._steps.rescan)
