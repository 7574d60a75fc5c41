"""The store's profiles as commands ask for them: by name, with a hint for a name that is none."""

from __future__ import annotations

from typing import TYPE_CHECKING

from crater_slurm.cli.db import store_url

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from crater_slurm.model.profile import NodeProfile
    from crater_slurm.store.repository import Store


def open_store() -> Store:
    from crater_slurm.store.repository import Store

    return Store.open(store_url())


def expanded(names: Iterable[str]) -> tuple[str, ...]:
    """Node names of host lists, each once."""
    from crater_slurm.slurm import hostlist

    return tuple(dict.fromkeys(name for text in names for name in hostlist.expand(text)))


def stored(store: Store, names: Sequence[str]) -> list[NodeProfile]:
    """The profiles of the nodes, in this order; UsageError for one that has none."""
    from crater_slurm.errors import UsageError, nearest

    found = {profile.name: profile for profile in store.profiles(names)}
    for name in names:
        if name not in found:
            close = nearest(name, store.names())
            hint = f"; did you mean {close}?" if close else "; 'crater nodes list' shows those"
            raise UsageError(f"there is no profile of node {name}{hint}")
    return [found[name] for name in names]
