"""What a worker is told of its job: plain values, sent once by the daemon as JSON.

Credentials come with it over a socket between root's processes, never by environment or argument.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Remote:
    """Where checkpoints go beyond the node, and how to get in.

    ``url``: an absolute path, ``s3://bucket/prefix``, ``gs://`` or ``az://``, placeholders filled
    in; empty when they stay on the node. ``options`` belong to the kind of store: endpoint,
    region, and so on. ``credentials``: access_key_id and secret_access_key and the like;
    ``profile``: read the user's own from their own files instead.
    """

    url: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    credentials: dict[str, str] = field(default_factory=dict, repr=False)
    profile: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """One job on one node. ``folder`` is its checkpoint folder in the cache, the user's own.

    ``nodes``: the job's nodes in Slurm's order, ``node`` is one of them. ``policy``: what a trainer
    does whose lane is full, ``wait`` or write ``direct``. ``rate_bytes_s`` 0 is no
    limit, ``quota_bytes`` 0 no quota. ``keep_last`` 0 keeps all; ``keep_every`` 0 keeps none for
    its step, otherwise steps that it divides stay. ``stage``: data to copy into
    ``dataset_folder`` at the start. ``peers``: address of each other node's daemon, and ``token``
    by which it takes this job's copies; empty without copies.
    """

    job_id: str
    cluster: str
    user: str
    uid: int
    gid: int
    node: str
    run: str
    folder: str
    home: str = ""
    nodes: tuple[str, ...] = ()
    ring_bytes: int = 0
    huge_pages: str = "advise"
    engine: str = "auto"
    policy: str = "wait"
    rate_bytes_s: int = 0
    quota_bytes: int = 0
    keep_last: int = 0
    keep_every: int = 0
    remote: Remote = Remote()
    restore: bool = False
    stage: tuple[str, ...] = ()
    dataset_folder: str = ""
    peers: dict[str, str] = field(default_factory=dict)
    token: str = field(default="", repr=False)
    transport: str = "tcp"

    def to_json(self) -> str:
        """The spec as it is sent; holds secrets."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Spec:
        """The spec that was sent. Raises ValueError or TypeError on anything else."""
        data = json.loads(text)
        data["remote"] = Remote(**data["remote"])
        for name in ("nodes", "stage"):
            data[name] = tuple(data[name])
        return cls(**data)
