"""The cluster in memory: what a decision needs, refreshed beside the submissions, never in one.

A refresh that fails keeps the last good state: an old picture of the cluster is better than
refusing to look, and its age is on the health page.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from crater_slurm.guard import Guard
from crater_slurm.model.cluster import SlurmCluster
from crater_slurm.model.profile import NodeProfile
from crater_slurm.placement import inventory
from crater_slurm.placement.planner import Planner, Preference
from crater_slurm.placement.sharing import Policy
from crater_slurm.placement.tally import union
from crater_slurm.slurm import features, hostlist
from crater_slurm.slurm.client import Client
from crater_slurm.store.repository import Store

_log = logging.getLogger("crater.scheduler.state")

#: How often the store is asked (one row) whether profiles changed.
_STORE_POLL_SECONDS = 1.0
#: Until Slurm answered once, it is asked this often: slurmctld may still be starting.
_FIRST_POLL_SECONDS = 0.5
#: With it Slurm may give a job shards of several GPUs, also where one would do.
_SPREADS_SHARDS = "MULTIPLE_SHARING_GRES_PJ"
#: Node sets put into words, and expressions turned into node sets; a cluster has few distinct ones.
_WORDED_SETS = 1024


@dataclass(frozen=True, slots=True)
class View:
    """One consistent picture of the cluster. Replaced as a whole, never changed.

    ``serial`` is another one whenever anything that a decision depends on is.
    """

    cluster: SlurmCluster
    planner: Planner
    profiles: int
    serial: int = 0
    _words: dict[int, str] = field(default_factory=dict)
    _matches: dict[str, int | None] = field(default_factory=dict)

    def hostlist(self, nodes: int) -> str:
        """Host list of a node set; words are kept, because compressing 10,000 names takes 10 ms."""
        text = self._words.get(nodes)
        if text is None:
            if len(self._words) >= _WORDED_SETS:
                self._words.clear()
            text = hostlist.compress(self.planner.inventory.names_of(nodes))
            self._words[nodes] = text
        return text

    def matching(self, expression: str) -> int | None:
        """Nodes whose features match; None where that can't be told. Kept, as words are."""
        found = self._matches.get(expression, -1)
        if found == -1:
            if len(self._matches) >= _WORDED_SETS:
                self._matches.clear()
            matches = features.compile_expression(expression)
            sets = self.planner.inventory.feature_sets
            found = union(n for f, n in sets if matches(f)) if matches else None
            self._matches[expression] = found
        return found


class State:
    """Holds the current View and refreshes it in a thread of its own."""

    def __init__(
        self,
        client: Client,
        store: Callable[[], Store],
        *,
        refresh_seconds: float,
        allow_declared: bool,
        preference: Preference | None = None,
        sharing_policy: Policy | None = None,
    ) -> None:
        self.view: View | None = None
        self._guard = Guard(
            _log,
            "the cluster can't be read, the last picture stays",
            "the cluster has not been read yet",
        )
        self._client = client
        self._open_store = store
        self._refresh_seconds = refresh_seconds
        self._allow_declared = allow_declared
        self._preference = preference or Preference()
        self._sharing_policy = sharing_policy
        self._profiles: dict[str, NodeProfile] = {}
        self._version: int | None = None
        self._cluster: SlurmCluster | None = None
        self._stale = True
        self._next_slurm = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="state", daemon=True)

    @property
    def profiles(self) -> Mapping[str, NodeProfile]:
        """Profiles by node, as they are in the store; replaced as a whole, never changed."""
        return self._profiles

    @property
    def problem(self) -> str:
        """Why the last reading failed, or that there was none yet; empty when all is well."""
        return self._guard.problem

    def node_names(self) -> frozenset[str]:
        """Names of Slurm's nodes; none before Slurm was read."""
        return frozenset(self.view.planner.inventory.names) if self.view else frozenset()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(timeout=5)

    def _run(self) -> None:
        while not self._stop.is_set():
            self._guard.run(self.refresh)
            self._stop.wait(_STORE_POLL_SECONDS if self.view else _FIRST_POLL_SECONDS)

    def refresh(self) -> None:
        """Read what is due; build a new View when anything changed. Raises CraterError."""
        changed = self._profiles_changed()
        if not (changed or self._stale or self._slurm_due()):
            return  # which is nearly always: a collection each second would be for nothing
        with self._uncollected():
            if changed:
                self._read_profiles()
            try:
                self._read_cluster()
            finally:  # new profiles count even while slurmctld is away
                if self._stale and self._cluster is not None:
                    self._build(self._cluster)

    @contextmanager
    def _uncollected(self) -> Iterator[None]:
        """A new picture is left alone by the garbage collector, while it is made and later.

        A picture of 10,000 nodes is a million objects, and looking through them stops every
        thread for 300 ms: longer than a submission may wait. They hold no circles, so they go by
        themselves when the next picture takes their place. What else is garbage goes before.
        """
        before = self.view and self.view.planner
        gc.collect()
        gc.disable()
        try:
            yield
        finally:
            if self.view and self.view.planner is not before:
                gc.freeze()
            gc.enable()

    def _read_cluster(self) -> None:
        known = self._cluster
        if not self._slurm_due():
            return
        now = time.monotonic()
        cluster = self._client.cluster()
        self._next_slurm = now + self._refresh_seconds
        self._cluster = cluster
        if known is None or self.view is None or _placed(cluster) != _placed(known):
            self._stale = True
        else:  # the same nodes, so the planner keeps what it has worked out; the time is new
            planner, serial = self.view.planner, self.view.serial
            if _rules(cluster) != _rules(known):
                planner, serial = planner.ruled(cluster), serial + 1
            self.view = dataclasses.replace(
                self.view, cluster=cluster, planner=planner, serial=serial
            )

    def _build(self, cluster: SlurmCluster) -> None:
        built = inventory.build(
            cluster, list(self._profiles.values()), allow_declared=self._allow_declared
        )
        policy = self._sharing_policy
        if _SPREADS_SHARDS in cluster.select_parameters:
            policy = None  # a slice's memory is of use on one card only
        planner = Planner(built, self._preference, sharing_policy=policy)
        serial = self.view.serial + 1 if self.view else 1
        self.view = View(cluster, planner, len(self._profiles), serial)
        self._stale = False

    def _slurm_due(self) -> bool:
        return self._cluster is None or time.monotonic() >= self._next_slurm

    def _profiles_changed(self) -> bool:
        return self._version is None or self._open_store().version() != self._version

    def _read_profiles(self) -> None:
        snapshot = self._open_store().snapshot(self._version)
        fresh = {profile.name: profile for profile in snapshot.profiles}
        names = set(snapshot.names)
        self._profiles = {n: p for n, p in (self._profiles | fresh).items() if n in names}
        self._version = snapshot.version
        self._stale = True


def _placed(cluster: SlurmCluster) -> tuple[object, ...]:
    """What a decision takes from Slurm's picture; jobs that come and go change none of it."""
    nodes = [
        (n.name, n.partitions, n.usable, n.in_maintenance, n.features, n.gres, n.gpu_types)
        for n in cluster.nodes
    ]
    return cluster.default_partition, cluster.select_parameters, nodes


def _rules(cluster: SlurmCluster) -> tuple[object, ...]:
    """What Slurm's picture says of all nodes of a kind; they change without a node changing."""
    return cluster.partitions, cluster.reservations, cluster.enforce_limits
