"""Compares the live gres.conf with what the profiles would render, GPU by GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from crater_slurm.errors import SlurmError
from crater_slurm.model.cpuset import format_cpulist, parse_cpulist
from crater_slurm.model.profile import NodeProfile
from crater_slurm.slurm import gres, hostlist
from crater_slurm.slurm.conf_check import Finding
from crater_slurm.slurm.conf_text import ConfText, Words, gres_of
from crater_slurm.slurm.layout import Layout, layout, settle

_FILE = "gres.conf"


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU of gres.conf."""

    type: str | None
    cores: frozenset[int] | None
    links: str | None


@dataclass(slots=True)
class NodeGres:
    """A node's gres by gres.conf; shards are by file, ``""`` for those of no certain one."""

    gpus: dict[str, Device] = field(default_factory=dict)
    shards: dict[str, int] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    detected: str | None = None


def check_gres(
    live: ConfText, ours: ConfText, profiles: Mapping[str, NodeProfile]
) -> Iterator[tuple[str, Finding]]:
    """What differs in gres.conf for the profiles' nodes."""
    live_lines, our_lines = gres_of(live), gres_of(ours)
    unit = settle(list(profiles.values()))
    for name, profile in profiles.items():
        found = _node(live, live_lines[""] + live_lines.get(name, []))
        wanted = _node(ours, our_lines[""] + our_lines.get(name, []))
        if not (found.detected and not found.gpus):
            for finding in _gpus(found, wanted, profile, layout(profile, unit)):
                yield name, finding
        for finding in (*_shards(found, wanted), *_counts(found, wanted)):
            yield name, finding


def detected(live: ConfText, names: list[str]) -> list[str]:
    """Nodes whose GPUs Slurm finds itself, so that there are no lines to compare."""
    lines = gres_of(live)
    nodes = {name: _node(live, lines[""] + lines.get(name, [])) for name in names}
    return [name for name, node in nodes.items() if node.detected and not node.gpus]


def _node(conf: ConfText, lines: list[Words]) -> NodeGres:
    node = NodeGres(detected=_detection(conf.settings))
    for words in lines:
        node.detected = _detection(words) if "autodetect" in words else node.detected
        name = words.get("name", "").lower()
        files = hostlist.expand(words.get("file", "") or words.get("multiplefiles", ""))
        if name == "gpu":
            for file in files or ["no file"]:
                node.gpus[file] = _device(words)
        elif name == "shard":
            file = files[0] if len(files) == 1 else ""
            node.shards[file] = node.shards.get(file, 0) + _count(words)
        elif name:
            node.counts[name] = node.counts.get(name, 0) + _count(words)
    return node


def _detection(words: Mapping[str, str]) -> str | None:
    text = words.get("autodetect", "off").lower()
    return None if text == "off" else text


def _device(words: Words) -> Device:
    cores = words.get("cores") or words.get("cpus")
    try:
        numbers = frozenset(parse_cpulist(cores)) if cores else None
    except ValueError as error:
        raise SlurmError(f"the live gres.conf has Cores={cores!r}: {error}") from error
    return Device(words.get("type", "").lower() or None, numbers, _told(words.get("links")))


def _told(links: str | None) -> str | None:
    """Links that tell pairs apart; a row of equal numbers says as much as none."""
    others = {word for word in (links or "").split(",") if word != "-1"}
    return links if len(others) > 1 else None


def _count(words: Words) -> int:
    try:
        return gres.parse(f"any:typed:{words.get('count', '1')}")[0].count
    except ValueError as error:
        raise SlurmError(f"the live gres.conf has Count={words['count']!r}") from error


def _gpus(
    found: NodeGres, wanted: NodeGres, profile: NodeProfile, form: Layout
) -> Iterator[Finding]:
    missing = [file for file in wanted.gpus if file not in found.gpus]
    extra = [file for file in found.gpus if file not in wanted.gpus]
    if missing:
        meaning = f"{len(missing)} of {len(wanted.gpus)} GPUs are no job's"
        yield Finding(_FILE, "gpu File", None, hostlist.compress(missing), meaning)
    if extra:
        meaning = "the profile has no such GPU; slurmd stops where a device file is not there"
        yield Finding(_FILE, "gpu File", hostlist.compress(extra), None, meaning)
    facts: dict[tuple[str, str | None, str | None, str], list[str]] = {}
    for file in (file for file in wanted.gpus if file in found.gpus):
        for fact in _device_facts(found.gpus[file], wanted.gpus[file], profile, form):
            facts.setdefault(fact, []).append(file)
    for (key, live, want, meaning), files in facts.items():
        yield Finding(_FILE, f"{key} of {hostlist.compress(files)}", live, want, meaning)


def _device_facts(
    live: Device, wanted: Device, profile: NodeProfile, form: Layout
) -> Iterator[tuple[str, str | None, str | None, str]]:
    if live.type != wanted.type:
        yield "Type", live.type, wanted.type, "jobs that ask for the profile's type can't get it"
    if live.cores != wanted.cores:
        texts = [None if c is None else format_cpulist(c) for c in (live.cores, wanted.cores)]
        yield "Cores", texts[0], texts[1], _cores_meaning(live.cores, profile, form)
    if live.links != wanted.links:
        yield "Links", live.links, wanted.links, "jobs of several GPUs may get badly linked ones"


def _cores_meaning(cores: frozenset[int] | None, profile: NodeProfile, form: Layout) -> str:
    if cores is None:
        return "Slurm does not know which cores are near the GPU"
    as_cpus = [frozenset(domain.cpus) for domain in profile.cpu_domains]
    if max(cores) >= profile.cpu.cores or cores in as_cpus:
        return "these are CPU numbers of the kernel; Cores= counts logical cores from 0"
    size = form.cores_per_socket
    if any(
        0 < len(cores & set(range(s * size, (s + 1) * size))) < size for s in range(form.sockets)
    ):
        return f"not whole sockets, which have {size} cores: Slurm can't bind to less"
    return "cores that are not the nearest, so jobs work across sockets"


def _shards(found: NodeGres, wanted: NodeGres) -> Iterator[Finding]:
    if not wanted.shards or found.shards == wanted.shards:
        return
    have, need = sum(found.shards.values()), sum(wanted.shards.values())
    if "" in found.shards and have == need and len(set(wanted.shards.values())) == 1:
        return  # one line for all, which Slurm spreads evenly over the cards
    meaning = "a card's shards are not what its memory holds"
    yield Finding(_FILE, "shard Count", _spread(found.shards), _spread(wanted.shards), meaning)


def _spread(shards: Mapping[str, int]) -> str | None:
    files: dict[int, list[str]] = {}
    for file, count in shards.items():
        files.setdefault(count, []).append(file)
    parts = (f"{n} on {hostlist.compress(f) or 'all'}" for n, f in files.items())
    return "; ".join(parts) or None


def _counts(found: NodeGres, wanted: NodeGres) -> Iterator[Finding]:
    for name, need in wanted.counts.items():
        have = found.counts.get(name)
        if have != need:
            meaning = "slurmd counts by this file and slurmctld by slurm.conf: keep both alike"
            yield Finding(
                _FILE, f"{name} Count", None if have is None else str(have), str(need), meaning
            )
