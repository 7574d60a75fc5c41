"""Compares the live configuration with what the profiles would render, node by node, key by key.

Both are read as text by the same reader, so that spelling, order and grouping are no difference.
Only keys that crater renders are compared: a site's own features, weights and gres are its own.
It says what each difference means and changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from crater_slurm.errors import SlurmError
from crater_slurm.model.profile import NodeProfile
from crater_slurm.slurm import gres, hostlist
from crater_slurm.slurm.conf_text import ConfText, Words
from crater_slurm.slurm.layout import SocketUnit, layout
from crater_slurm.slurm.node_gres import COUNT_ONLY
from crater_slurm.slurm.render import real_memory_mib

#: An admin may leave some of the memory to the system; this much less is worth a word.
_MEMORY_LOST = 0.05
_SHAPE = ("Sockets", "CoresPerSocket", "ThreadsPerCore")
_OUT = "slurmd finds less than that and the node is taken out of service"


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    """One difference on one node: live value and the profile's, None where there is none."""

    file: str
    key: str
    live: str | None
    profile: str | None
    meaning: str


@dataclass(frozen=True, slots=True)
class Difference:
    """A finding and the host list of the nodes that have it."""

    nodes: str
    finding: Finding

    def sentence(self) -> str:
        """One line for people."""
        found = self.finding
        live = "missing" if found.live is None else found.live
        wanted = "nothing" if found.profile is None else found.profile
        return (
            f"{self.nodes or 'all nodes'}: {found.file}: {found.key} is {live}, "
            f"by the profile {wanted}: {found.meaning}"
        )


def gather(found: Iterable[tuple[str, Finding]]) -> list[Difference]:
    """Equal findings of many nodes as one; a node ``""`` is the whole cluster."""
    nodes: dict[Finding, list[str]] = {}
    for node, finding in found:
        nodes.setdefault(finding, []).append(node)
    return [Difference(hostlist.compress(filter(None, nodes[f])), f) for f in nodes]


def check_nodes(
    live: ConfText, ours: ConfText, profiles: Mapping[str, NodeProfile]
) -> Iterator[tuple[str, Finding]]:
    """What differs in the NodeName lines of the profiles' nodes."""
    for name, wanted in ours.nodes.items():
        found = live.nodes.get(name)
        if found is None:
            meaning = "Slurm does not know the node, or by another name"
            yield name, Finding("slurm.conf", "NodeName", None, name, meaning)
            continue
        for finding in (
            *_sockets(live, ours, found, wanted, profiles[name]),
            *_memory(found, wanted, profiles[name]),
            *_gres(found, wanted),
            *_features(found, wanted),
        ):
            yield name, finding


def check_cluster(live: ConfText, ours: ConfText) -> Iterator[tuple[str, Finding]]:
    """What differs in the settings of slurm.conf that are every node's."""
    wanted = ours.settings.get("grestypes", "")
    have = live.settings.get("grestypes", "")
    missing = [name for name in wanted.split(",") if name and name not in have.lower().split(",")]
    if missing:
        meaning = f"slurmctld refuses {', '.join(missing)} on every node"
        yield "", Finding("slurm.conf", "GresTypes", have or None, wanted, meaning)


def check_cgroup(live: ConfText, ours: ConfText) -> Iterator[tuple[str, Finding]]:
    """What differs in cgroup.conf; what it leaves out is off."""
    meanings = {
        "ConstrainCores": "jobs can run on cores that are not theirs",
        "ConstrainDevices": "jobs can open GPUs that are not theirs",
        "ConstrainRAMSpace": "jobs can use more memory than they asked for",
    }
    for key, meaning in meanings.items():
        found = live.settings.get(key.lower(), "no")
        wanted = ours.settings.get(key.lower(), "no")
        if found.lower() != wanted.lower():
            yield "", Finding("cgroup.conf", key, found, wanted, meaning)
    if live.settings.get("cgroupplugin", "").lower() == "disabled":
        meaning = "nothing is constrained at all"
        yield "", Finding("cgroup.conf", "CgroupPlugin", "disabled", "autodetect", meaning)


def check_slurmd(words: Words, unit: SocketUnit, profile: NodeProfile) -> Iterator[Finding]:
    """What ``slurmd -C`` finds on the node itself and the profile does not say."""
    form = layout(profile, unit)
    shape = (form.sockets, form.cores_per_socket, form.threads_per_core)
    for key, found, wanted in zip(_SHAPE, _shape(words), shape, strict=True):
        if found != wanted:
            meaning = "the profile is out of date: run crater-probe on the node"
            yield Finding("slurmd -C", key, str(found), str(wanted), meaning)
    memory = _number(words, "realmemory", 0)
    wanted_mib = real_memory_mib(profile, margin=True) or 0
    if memory < wanted_mib:
        yield Finding("slurmd -C", "RealMemory", str(memory), str(wanted_mib), _OUT)


def _sockets(
    live: ConfText, ours: ConfText, found: Words, wanted: Words, profile: NodeProfile
) -> Iterator[Finding]:
    have, need = _unit(live, found), _unit(ours, wanted)
    forms = {unit: layout(profile, unit) for unit in SocketUnit}
    sizes = {unit: (f.sockets, f.cores_per_socket, f.threads_per_core) for unit, f in forms.items()}
    if sizes[have] != sizes[need]:
        parameters = _parameters(live, found)
        meaning = f"slurmd takes a {have} for a socket, and GPUs are bound to whole sockets"
        yield Finding(
            "slurm.conf", "SlurmdParameters", parameters or None, need.parameter or None, meaning
        )
    shape, wanted_shape = _shape(found), _shape(wanted)
    other = next((unit for unit in SocketUnit if unit != need and sizes[unit] == shape), None)
    more = shape[0] * shape[1] * shape[2] > profile.cpu.cores * profile.cpu.threads_per_core
    if other:
        meaning = f"each {other} is a socket here, where it should be each {need}"
    else:
        meaning = (
            _OUT if more else "cores or threads are no job's, or sockets are not the machine's"
        )
    for key, a, b in zip(_SHAPE, shape, wanted_shape, strict=True):
        if a != b:
            yield Finding("slurm.conf", key, str(a), str(b), meaning)


def _parameters(conf: ConfText, words: Words) -> str:
    both = (conf.settings.get("slurmdparameters", ""), words.get("parameters", ""))
    return ",".join(filter(None, both))


def _unit(conf: ConfText, words: Words) -> SocketUnit:
    """What slurmd takes for a socket; with both words Slurm takes L3 caches."""
    parameters = _parameters(conf, words).lower()
    for unit in (SocketUnit.L3, SocketUnit.NUMA):
        if unit.parameter and unit.parameter in parameters:
            return unit
    return SocketUnit.PACKAGE


def _shape(words: Words) -> tuple[int, int, int]:
    """Sockets, cores of a socket and threads of a core, inferred as Slurm does."""
    cores = _number(words, "corespersocket", 1)
    threads = _number(words, "threadspercore", 1)
    boards = _number(words, "boards", 1)
    if "sockets" in words:
        sockets = _number(words, "sockets", 1)
    elif "socketsperboard" in words:
        sockets = _number(words, "socketsperboard", 1) * boards
    else:
        sockets = max(1, _number(words, "cpus", 1) // max(1, cores * threads))
    return sockets, cores, threads


def _memory(found: Words, wanted: Words, profile: NodeProfile) -> Iterator[Finding]:
    need = _number(wanted, "realmemory", 0)
    have = _number(found, "realmemory", 1)
    seen = real_memory_mib(profile, margin=False) or 0
    if not need or need * (1 - _MEMORY_LOST) <= have <= seen:
        return
    more = f"slurmd counts {seen} MiB, and slurmctld takes a node with less out of service"
    less = f"{need - have} MiB are no job's; fine if they are left to the system on purpose"
    meaning = more if have > seen else less
    yield Finding("slurm.conf", "RealMemory", str(have), str(need), meaning)


def _gres(found: Words, wanted: Words) -> Iterator[Finding]:
    have, need = _counts(found), _counts(wanted)
    for name in sorted({"gpu", *(key[0] for key in need)}):
        mine = {key: n for key, n in need.items() if key[0] == name}
        theirs = {key: n for key, n in have.items() if key[0] == name}
        if mine != theirs:
            meaning = _gres_meaning(name, sum(theirs.values()), sum(mine.values()))
            yield Finding("slurm.conf", f"Gres {name}", _spell(theirs), _spell(mine), meaning)


def _gres_meaning(name: str, have: int, need: int) -> str:
    if have == need:
        return "jobs that ask for the profile's type can't get it"
    if name in COUNT_ONLY:
        if not have:
            return "jobs can't consume it, so several of them are given the same"
        return "jobs are promised more than is there" if have > need else "a part is no job's"
    return _OUT if have > need else f"{need - have} of {need} are no job's"


def _counts(words: Words) -> dict[tuple[str, str], int]:
    try:
        entries = gres.parse(words.get("gres", ""))
    except ValueError as error:
        raise SlurmError(f"the live Gres= can't be read: {error}") from error
    counts: dict[tuple[str, str], int] = {}
    for entry in entries:
        key = (entry.name.lower(), (entry.type or "").lower())
        counts[key] = counts.get(key, 0) + entry.count
    return counts


def _spell(counts: Mapping[tuple[str, str], int]) -> str | None:
    parts = (f"{name}:{kind}:{n}" if kind else f"{name}:{n}" for (name, kind), n in counts.items())
    return ",".join(sorted(parts)) or None


def _features(found: Words, wanted: Words) -> Iterator[Finding]:
    have = found.get("feature", "")
    missing = [w for w in wanted.get("feature", "").split(",") if w and w not in have.split(",")]
    if missing:
        text = ",".join(missing)
        meaning = "jobs can't ask for it by --constraint"
        yield Finding("slurm.conf", "Feature", have or None, text, meaning)


def _number(words: Words, key: str, default: int) -> int:
    text = words.get(key)
    if text is None:
        return default
    if not text.isdecimal():
        raise SlurmError(f"the live configuration has {key}={text!r}, which is no number")
    return int(text)
