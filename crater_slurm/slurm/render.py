"""Node profiles as Slurm configuration: node lines, gres.conf and cgroup.conf.

What a profile says in NUMA nodes and drives becomes what Slurm counts and enforces: sockets,
GPUs with the cores beside them, and CountOnly gres for memory bandwidth, NVMe IOPS and cache.
It renders text and refuses to write files: whoever asks decides where the text goes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Literal

import jinja2

from crater_slurm import paths
from crater_slurm.errors import UsageError
from crater_slurm.model.profile import NodeProfile, NumaKind
from crater_slurm.slurm import hostlist, words
from crater_slurm.slurm.layout import Layout, SocketUnit, layout, settle, wanted
from crater_slurm.slurm.node_gres import (
    COUNT_ONLY,
    DEVICES,
    PLAIN,
    Choices,
    gres_lines,
    node_gres,
    shard_sentences,
)
from crater_slurm.slurm.published import features, weight

Version = tuple[int, int]
#: The first with ``Parameters=`` on a node's line; before, SlurmdParameters is the whole cluster's.
_NODE_PARAMETERS = (25, 11)


@dataclass(frozen=True, slots=True)
class NodeGroup:
    """Nodes of one make: a host list and the profile they share.

    ``attributes`` are further words of their NodeName line, such as ``Port`` or ``Weight``.
    """

    names: str
    profile: NodeProfile
    attributes: Mapping[str, str] = field(default_factory=dict)


def group(profiles: Iterable[NodeProfile], choices: Choices = PLAIN) -> list[NodeGroup]:
    """Groups of nodes that Slurm can't tell apart, so that a big cluster has few lines."""
    everyone = list(profiles)
    unit = settle(everyone)
    makes: dict[tuple[object, ...], list[NodeProfile]] = {}
    for profile in everyone:
        form = layout(profile, unit)
        facts = (
            wanted(profile),
            profile.cpu.sockets,
            *_node_words(NodeGroup("", profile), form, choices).items(),
            *gres_lines("", profile, form, choices),
            *shard_sentences(profile, choices),
        )
        makes.setdefault(facts, []).append(profile)
    return [
        NodeGroup(hostlist.compress(words.node_name(p.name) for p in same), same[0])
        for same in makes.values()
    ]


def layouts(groups: Sequence[NodeGroup]) -> list[Layout]:
    """Each group's sockets, as slurmd counts them under what the whole cluster sets."""
    unit = settle([one.profile for one in groups])
    return [layout(one.profile, unit) for one in groups]


def real_memory_mib(profile: NodeProfile, *, margin: bool) -> int | None:
    """RealMemory of a node, MiB; None when it is not known.

    slurmctld takes a node out of service that registers less than RealMemory, and slurmd counts
    what the kernel has left at boot (MemTotal). That changes by some 100 MiB with a kernel, its
    crash reserve or a page of broken memory, so ``margin`` stays 0.5 % and at least 256 MiB below,
    at a multiple of 256 MiB, which also gives twins the same line. A GPU's own memory is no
    job's, and is there only while the GPU's driver is.
    """
    nodes = profile.numa_nodes
    gpu_memory = sum(n.memory_mib or 0 for n in nodes if n.kind is NumaKind.GPU_MEMORY)
    whole = profile.memory_mib or sum(n.memory_mib or 0 for n in nodes)
    seen = whole - gpu_memory
    if not margin:
        return seen if seen > 0 else None
    safe = (seen - max(256, seen // 200)) // 256 * 256
    return safe if safe > 0 else None


def gres_types(groups: Iterable[NodeGroup], choices: Choices = PLAIN) -> list[str]:
    """``GresTypes=`` for these nodes; a gres that is missing there is refused by slurmctld."""
    used: set[str] = set()
    for one in groups:
        used.update(word.split(":")[0] for word in node_gres(one.profile, choices).split(","))
    return [name for name in ("gpu", "shard", *COUNT_ONLY) if name in used]


def _node_words(one: NodeGroup, form: Layout, choices: Choices) -> dict[str, str]:
    memory = real_memory_mib(one.profile, margin=choices.memory_margin)
    return {
        "NodeName": one.names,
        "Sockets": str(form.sockets),
        "CoresPerSocket": str(form.cores_per_socket),
        "ThreadsPerCore": str(form.threads_per_core),
        "RealMemory": str(memory or ""),
        "Gres": node_gres(one.profile, choices),
        "Feature": ",".join(features(one.profile)) if choices.features else "",
        "Weight": str(weight(one.profile)) if choices.weights else "",
        **one.attributes,
    }


def socket_notes(groups: Sequence[NodeGroup]) -> list[str]:
    """Why slurmd must count something else than packages; a sentence for each such make."""
    return [
        f"{one.names}: SlurmdParameters={unit.parameter} (Slurm 22.05 and later; since 25.11 also "
        "Parameters= on a node's line) is needed, because Slurm binds GPUs and jobs to whole "
        f"sockets, and {_reason(one.profile, unit)}"
        for one in groups
        if (unit := wanted(one.profile)) is not SocketUnit.PACKAGE
    ]


def shard_notes(groups: Sequence[NodeGroup], choices: Choices) -> list[str]:
    """How each kind of card is cut and what that loses; none without shards."""
    sentences = (s for one in groups for s in shard_sentences(one.profile, choices))
    return [f"Shards of {sentence}" for sentence in dict.fromkeys(sentences)]


def _reason(profile: NodeProfile, unit: SocketUnit) -> str:
    each = layout(profile, unit).sockets // profile.cpu.sockets
    if unit is SocketUnit.L3:
        return f"a GPU is near only some of the {each} {unit}s of its package"
    return f"a package holds {each} {unit}s"


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmConf:
    """Lines that crater adds to slurm.conf; ``settings`` are further ``Key=Value`` lines."""

    version: Version
    groups: Sequence[NodeGroup]
    choices: Choices = PLAIN
    slurmd_parameters: tuple[str, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)

    def render(self) -> str:
        """Text for slurm.conf (or a file that it includes)."""
        unit = self._unit()
        parameters = [*self.slurmd_parameters, *filter(None, [unit and unit.parameter])]
        return template(
            "slurm.conf.j2",
            version="{}.{:02}".format(*self.version),
            notes=socket_notes(self.groups),
            gres_types=gres_types(self.groups, self.choices),
            slurmd_parameters=list(dict.fromkeys(parameters)),
            settings=self.settings,
            nodes=self.node_lines(),
        )

    def node_lines(self) -> list[str]:
        """The NodeName lines alone."""
        each = self._unit() is None
        lines = []
        for one, form in zip(self.groups, layouts(self.groups), strict=True):
            own = {"Parameters": form.unit.parameter} if each else {}
            lines.append(words.line(_node_words(one, form, self.choices) | own))
        return lines

    def _unit(self) -> SocketUnit | None:
        """The cluster's unit, or None where each node's line has its own."""
        unit = settle([one.profile for one in self.groups])
        if unit is None and self.version < _NODE_PARAMETERS:
            needs = "; ".join(f"{one.names} a {wanted(one.profile)}" for one in self.groups)
            raise UsageError(
                f"slurmd must take for a socket: on {needs}. SlurmdParameters is the whole "
                "cluster's until Slurm 25.11, and one of them would make slurmd count the others "
                "wrongly; render each kind by itself (--node), for a slurm.conf of its own"
            )
        return unit


def gres_conf(
    groups: Sequence[NodeGroup],
    choices: Choices = PLAIN,
    devices: Path = DEVICES,
    *,
    everywhere: bool = False,
) -> str:
    """gres.conf of these nodes; ``devices`` is the folder of the GPUs' device files.

    Written out rather than detected: detection needs a vendor's library in the Slurm build, and
    drains a node whose lines differ from what it finds. ``everywhere`` leaves the nodes' names
    out, for a cluster of one make: slurmctld matches every name with every line otherwise.
    """
    lines: list[str] = []
    notes = [*dict.fromkeys(socket_notes(groups)), *shard_notes(groups, choices)]
    for one, form in zip(groups, layouts(groups), strict=True):
        names = "" if everywhere else one.names
        lines += gres_lines(names, one.profile, form, choices, devices)
    return template("gres.conf.j2", lines=lines, notes=notes)


def cgroup_conf(
    version: Version,
    hierarchy: Literal["autodetect", "v1", "v2", "none"] = "autodetect",
    *,
    systemd: bool = True,
    memory: bool = True,
) -> str:
    """cgroup.conf for a Slurm version.

    ``hierarchy`` none means that nothing is constrained; ``systemd`` False is for machines that
    have none (v2 only); ``memory`` False leaves memory limits to the kernel.
    """
    return template(
        "cgroup.conf.j2", version=version, hierarchy=hierarchy, systemd=systemd, memory=memory
    )


@cache
def _environment() -> jinja2.Environment:
    return jinja2.Environment(  # noqa: S701 - configuration files, not HTML
        loader=jinja2.FileSystemLoader(paths.share("templates")),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def template(file: str, /, **values: object) -> str:
    """Any template of the installation, rendered; a variable that is missing is an error."""
    return _environment().get_template(file).render(**values)
