"""Reads what nodes a lab has: host lists and, for each, a profile.

An inventory is YAML: ``nodes: [{name: a[1-2], profile: a100-pcie-40gb}]``. A profile is written
out, or the name of one of those that come with crater. A list of nodes is all there is, so that
an admin can describe a cluster in minutes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from uuid import NAMESPACE_DNS, uuid5

import yaml

from crater_slurm.errors import LabError, nearest
from crater_slurm.files import exists
from crater_slurm.model.profile import NodeProfile
from crater_slurm.slurm import hostlist
from crater_slurm.store.codec import profile_from_dict

_HERE = Path(__file__).parent
_INVENTORIES = _HERE / "inventories"
_PROFILES = _HERE / "profiles"


@dataclass(frozen=True, slots=True)
class Entry:
    """Nodes of one make; ``profile.name`` is the first of them."""

    names: tuple[str, ...]
    profile: NodeProfile

    @property
    def hostlist(self) -> str:
        return hostlist.compress(self.names)


@dataclass(frozen=True, slots=True)
class Inventory:
    """The nodes of a lab, in the order of the file, and what the file says of itself."""

    entries: tuple[Entry, ...]
    about: str = ""

    @property
    def names(self) -> list[str]:
        return [name for entry in self.entries for name in entry.names]

    def profiles(self) -> list[NodeProfile]:
        """Profiles of all nodes, each under its own name."""
        return [_own(entry.profile, name) for entry in self.entries for name in entry.names]

    def profile_of(self, node: str) -> NodeProfile:
        """Profile of a node, under its name; LabError when there is no such node."""
        for entry in self.entries:
            if node in entry.names:
                return _own(entry.profile, node)
        close = nearest(node, self.names)
        raise LabError(f"there is no node {node}" + (f"; did you mean {close}?" if close else ""))


def _own(profile: NodeProfile, name: str) -> NodeProfile:
    """The same hardware as another node: its name, and GPUs with identities of their own."""
    gpus = tuple(
        replace(gpu, uuid=gpu.uuid or f"GPU-{uuid5(NAMESPACE_DNS, f'{gpu.index}.{name}.lab')}")
        for gpu in profile.gpus
    )
    return replace(profile, name=name, gpus=gpus)


def shipped() -> dict[str, str]:
    """Names of the inventories that come with crater, and what each is."""
    return {
        file.stem: str(yaml.safe_load(file.read_text()).get("about", "")).strip()
        for file in sorted(_INVENTORIES.glob("*.yaml"))
    }


def shipped_profiles() -> list[str]:
    """Names of the profiles that come with crater."""
    return sorted(file.stem for file in _PROFILES.glob("*.yaml"))


def load(name: str) -> Inventory:
    """Inventory of that name, or of that file; LabError says what is wrong where."""
    file = Path(name)
    if not file.suffix and not exists(file):
        file = _INVENTORIES / f"{name}.yaml"
        if not exists(file):
            known = ", ".join(shipped())
            raise LabError(f"no inventory is named {name!r}; there are {known}, or name a file")
    return parse(_read(file), str(file))


def parse(tree: object, where: str) -> Inventory:
    """Inventory from a tree of YAML values; ``where`` is what errors call it."""
    if not isinstance(tree, dict) or not isinstance(tree.get("nodes"), list) or not tree["nodes"]:
        raise LabError(f"{where} must hold a list 'nodes:' of name and profile")
    unknown = set(tree) - {"nodes", "about"}
    if unknown:
        raise LabError(f"{where}: unknown key {sorted(unknown)[0]!r}; known are about and nodes")
    entries = tuple(_entry(item, f"{where}: nodes[{i}]") for i, item in enumerate(tree["nodes"]))
    count = Counter(name for entry in entries for name in entry.names)
    twice = [name for name, times in count.items() if times > 1]
    if twice:
        raise LabError(f"{where} has the node {twice[0]} twice")
    return Inventory(entries, str(tree.get("about", "")).strip())


def _entry(item: object, where: str) -> Entry:
    if not isinstance(item, dict) or set(item) != {"name", "profile"}:
        raise LabError(f"{where} must have exactly 'name' and 'profile'")
    names = tuple(hostlist.expand(str(item["name"])))
    if not names:
        raise LabError(f"{where} has an empty name")
    given = item["profile"]
    tree = _shipped_profile(given, where) if isinstance(given, str) else given
    if not isinstance(tree, Mapping):
        raise LabError(f"{where}: the profile must be a mapping, or the name of one")
    return Entry(names, profile_from_dict(dict(tree), names[0]))


def _shipped_profile(name: str, where: str) -> Any:
    file = _PROFILES / f"{name}.yaml"
    if name not in shipped_profiles():
        known = ", ".join(shipped_profiles())
        raise LabError(f"{where}: no profile is named {name!r}; there are {known}")
    return _read(file)


def _read(file: Path) -> Any:
    try:
        return yaml.safe_load(file.read_text())
    except OSError as error:
        raise LabError(f"can't read {file}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise LabError(f"{file} is not YAML: {error}") from error
