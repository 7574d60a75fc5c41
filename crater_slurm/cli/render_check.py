"""``crater render --check``: finds the live configuration, and words what differs."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from crater_slurm.errors import SlurmError, UsageError
from crater_slurm.model.profile import NodeProfile
from crater_slurm.slurm import conf_check, conf_text, gres_check, hostlist, node_gres
from crater_slurm.slurm import render as renderer
from crater_slurm.slurm.client import Client
from crater_slurm.slurm.conf_check import Difference
from crater_slurm.slurm.conf_text import ConfText
from crater_slurm.slurm.layout import SocketUnit, settle

_DAEMONS = "/usr/local/sbin:/usr/sbin:/sbin"


@dataclass(frozen=True, slots=True)
class Report:
    """What was compared with which file, what differs, and what could not be compared."""

    conf: Path
    nodes: int
    differences: tuple[Difference, ...]
    notes: tuple[str, ...]

    def text(self) -> str:
        """Lines for people, the count last."""
        count = len(self.differences)
        said = {0: "no difference", 1: "1 difference"}.get(count, f"{count} differences")
        return "\n".join(
            [
                *(difference.sentence() for difference in self.differences),
                *(f"note: {note}" for note in self.notes),
                f"{self.nodes} {'node' if self.nodes == 1 else 'nodes'} compared with "
                f"{self.conf}: {said}",
            ]
        )

    def tree(self) -> dict[str, Any]:
        """The same for programs."""
        return {
            "conf": str(self.conf),
            "nodes": self.nodes,
            "differences": [{"nodes": d.nodes} | asdict(d.finding) for d in self.differences],
            "notes": list(self.notes),
        }

    def with_slurmd(
        self, profiles: Sequence[NodeProfile], client: Client, version: renderer.Version
    ) -> Report:
        """The report, with what slurmd finds on this node."""
        unit = settle(profiles)
        # slurmd -C takes no SlurmdParameters but those of its own command line, since 25.11.
        seen = unit if unit and version >= (25, 11) else SocketUnit.PACKAGE
        found = _slurmd(client, seen.parameter)
        name = found.get("nodename", "")
        profile = next((p for p in profiles if p.name == name), None)
        if profile is None:
            raise UsageError(f"slurmd calls this node {name}, which has no profile here")
        more = [(name, finding) for finding in conf_check.check_slurmd(found, seen, profile)]
        return replace(self, differences=(*self.differences, *conf_check.gather(more)))


def live_conf(conf: Path | None, client: Client) -> Path:
    """The slurm.conf that is in force: the one named, SLURM_CONF's, or the one Slurm names."""
    named = conf or client.conf or os.environ.get("SLURM_CONF")
    if named:
        return Path(named)
    found = client.config().get("SLURM_CONF")
    if not found:
        raise SlurmError("scontrol show config names no SLURM_CONF; name the file with --conf")
    return Path(found)


def compare(
    what: str | None,
    conf: Path,
    profiles: Sequence[NodeProfile],
    version: renderer.Version,
    choices: node_gres.Choices,
    *,
    everyone: bool,
) -> Report:
    """Compare the files, or the one that ``what`` names, with what would be rendered."""
    notes = [f"not compared: {why}" for p in profiles if (why := node_gres.unwritable(p))]
    chosen = [p for p in profiles if not node_gres.unwritable(p)]
    by_name = {profile.name: profile for profile in chosen}
    groups = renderer.group(chosen, choices)
    rendered = renderer.SlurmConf(version=version, groups=groups, choices=choices).render()
    ours, live = conf_text.parse(rendered), conf_text.read(conf)
    found = []
    if what in (None, "slurm.conf"):
        found += list(conf_check.check_cluster(live, ours))
    if what in (None, "slurm.conf", "node-line"):
        found += list(conf_check.check_nodes(live, ours, by_name))
        strangers = [name for name in live.nodes if name not in {p.name for p in profiles}]
        if everyone and strangers:
            notes.append(f"without a profile, so not compared: {hostlist.compress(strangers)}")
    if what in (None, "gres.conf"):
        lines = _beside(conf, "gres.conf", notes)
        mine = conf_text.parse(renderer.gres_conf(groups, choices))
        found += list(gres_check.check_gres(lines, mine, by_name))
        if alone := gres_check.detected(lines, list(by_name)):
            notes.append(f"AutoDetect finds the GPUs of {hostlist.compress(alone)}: not compared")
    if what in (None, "cgroup.conf"):
        mine = conf_text.parse(renderer.cgroup_conf(version))
        found += list(conf_check.check_cgroup(_beside(conf, "cgroup.conf", notes), mine))
    return Report(conf, len(chosen), tuple(conf_check.gather(found)), tuple(notes))


def _beside(conf: Path, name: str, notes: list[str]) -> ConfText:
    """A file beside slurm.conf; Slurm takes one that is missing for an empty one."""
    file = conf.parent / name
    if not file.exists():
        notes.append(f"there is no {file}")
        return ConfText()
    return conf_text.read(file)


def _slurmd(client: Client, parameter: str | None) -> conf_text.Words:
    """What ``slurmd -C`` prints of this node."""
    folders = f"{os.environ.get('PATH', os.defpath)}:{_DAEMONS}"
    program = shutil.which("slurmd", path=str(client.bin_dir) if client.bin_dir else folders)
    if program is None:
        raise SlurmError("there is no slurmd here; --slurmd is for compute nodes")
    options = [f"--parameters={parameter}"] if parameter else []
    text = replace(client, bin_dir=None).run(program, *options, "-C")
    line = next((line for line in text.splitlines() if line.startswith("NodeName=")), "")
    if not line:
        raise SlurmError("slurmd -C prints no NodeName line")
    return conf_text.words(line)
