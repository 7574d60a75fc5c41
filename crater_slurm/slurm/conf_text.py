"""Reads slurm.conf, gres.conf and cgroup.conf as Slurm does: includes, defaults, host lists.

Only what a check needs is understood, and every other key is left alone. A file that can't be read
is an error and never an empty configuration.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from crater_slurm.errors import SlurmError
from crater_slurm.slurm import hostlist

#: Keys of any case, ``+=`` and spaces around the sign, values in quotes.
_PAIR = re.compile(r'([A-Za-z0-9_.]+)\s*[-+*/]?=\s*("[^"]*"|\S*)')
_COMMENT = re.compile(r"(?<!\\)#.*")
_INCLUDE = re.compile(r"include\s+(\S+)\s*$", re.IGNORECASE)
_DEEPEST = 10
#: A node has three socket counts and two spellings of some keys.
_ALIASES = {"features": "feature", "procs": "cpus"}

Words = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class ConfText:
    """A configuration: its settings, the words of each node, and the lines of gres.

    Keys are in lower case. ``gres`` are lines with ``name`` or ``autodetect``, in their order.
    """

    settings: dict[str, str] = field(default_factory=dict)
    nodes: dict[str, Words] = field(default_factory=dict)
    gres: list[Words] = field(default_factory=list)


def read(file: Path) -> ConfText:
    """The configuration in a file and those it includes. SlurmError when one can't be read."""
    return _parse(_lines(file, 0))


def parse(text: str) -> ConfText:
    """The configuration in a text that includes nothing."""
    return _parse(_joined(text))


def gres_of(conf: ConfText) -> dict[str, list[Words]]:
    """Lines of gres.conf by node; ``""`` has those without a NodeName, which are every node's."""
    found: dict[str, list[Words]] = {"": []}
    for line in conf.gres:
        for node in hostlist.expand(line.get("nodename", "")) or [""]:
            found.setdefault(node, []).append(line)
    return found


def words(line: str) -> dict[str, str]:
    """The ``Key=value`` pairs of a line, keys in lower case and by one spelling."""
    pairs = ((key.lower(), value.strip('"')) for key, value in _PAIR.findall(line))
    return {_ALIASES.get(key, key): value for key, value in pairs}


def _parse(lines: Iterator[str]) -> ConfText:
    conf = ConfText()
    defaults: dict[str, str] = {}
    for line in lines:
        found = words(line)
        first = next(iter(found), "")
        if "name" in found or (first == "nodename" and "autodetect" in found):
            conf.gres.append(found)
        elif first == "nodename":
            _add_nodes(conf, found, defaults)
        elif first not in ("", "partitionname", "nodeset", "downnodes", "frontendname"):
            conf.settings.update(found)
    return conf


def _add_nodes(conf: ConfText, found: dict[str, str], defaults: dict[str, str]) -> None:
    names = found.pop("nodename")
    if names.upper() == "DEFAULT":
        defaults.update(found)
        return
    shared = defaults | found
    for name in hostlist.expand(names):
        conf.nodes[name] = shared


def _lines(file: Path, depth: int) -> Iterator[str]:
    if depth > _DEEPEST:
        raise SlurmError(f"{file} is included by itself, or more than {_DEEPEST} files deep")
    try:
        text = file.read_text(errors="replace")
    except OSError as error:
        raise SlurmError(f"can't read {file}: {error.strerror}") from error
    for line in _joined(text):
        if included := _INCLUDE.match(line):
            # Relative to the file's folder; an absolute name stays what it is.
            yield from _lines(file.parent / included.group(1).strip('"'), depth + 1)
        else:
            yield line


def _joined(text: str) -> Iterator[str]:
    """Lines without comments, continued ones (``\\`` at the end) as one."""
    begun = ""
    for line in text.splitlines():
        line = begun + _COMMENT.sub("", line).replace("\\#", "#")
        begun = ""
        if line.endswith("\\"):
            begun = line[:-1] + " "
        elif line.strip():
            yield line.strip()
    if begun.strip():
        yield begun.strip()
