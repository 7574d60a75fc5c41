"""Settings of checkpoints: the ring that jobs save into, where checkpoints go, who pays for it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from crater_slurm.config.direct_writes import DirectWrites
from crater_slurm.config.section import OffIsAWord, Section

_URL = r"^(s3|gs|az)://[A-Za-z0-9][A-Za-z0-9._-]{1,254}(/[A-Za-z0-9._=+@-]+)*$"


def _destination(text: str) -> str:
    """A site's default place, checked by the rules of the directive."""
    if text:
        from crater_slurm.model.request import BY_KEY

        if text.startswith("/") or "://" in text:
            BY_KEY["checkpoint"].parse(text)
        else:
            raise ValueError("must be an absolute path, a URL such as s3://bucket/prefix, or empty")
    return text


def _listen(text: str) -> str:
    host, _, port = text.rpartition(":")
    if text and not (host and port.isascii() and port.isdecimal() and 0 < int(port) < 65536):
        raise ValueError("must be host:port, such as 0.0.0.0:9195, or empty")
    return text


def _transport(text: str) -> str:
    if not re.fullmatch(r"tcp|rdma:[A-Za-z0-9_.-]+(:[0-9]{1,3}){0,2}", text):
        raise ValueError("must be tcp or rdma:DEVICE[:PORT[:GID_INDEX]], such as rdma:mlx5_0:1:3")
    return text


def _named_once(stores: tuple[Remote, ...]) -> tuple[Remote, ...]:
    for what in ("name", "url"):
        values = [getattr(store, what) for store in stores]
        if twice := {value for value in values if values.count(value) > 1}:
            raise ValueError(f"have the {what} {', '.join(sorted(twice))} twice")
    return stores


class Remote(Section):
    """A store of the site's. Jobs get in with the site's credentials below ``<url>/<user>/``."""

    name: str = Field(pattern=r"^[a-z][a-z0-9_-]{0,31}$", description="For messages.")
    url: str = Field(pattern=_URL, description="s3://bucket/prefix, gs:// or az://.")
    endpoint: str = Field(default="", description="https://host:port of a store that isn't AWS's.")
    region: str = Field(default="", description="Region, where the store has several.")
    addressing: Literal["auto", "path", "virtual"] = Field(
        default="auto", description="Whether the bucket is in the path or in the host's name."
    )
    ca_bundle: Path | None = Field(
        default=None, description="Certificates that its own must match."
    )
    credentials_file: Path | None = Field(
        default=None,
        description="KEY = value lines (access_key_id, secret_access_key, ...); root's, mode 0600.",
    )


class Checkpoints(DirectWrites):
    """Checkpoints through crater-io-daemon. A job's own directives win, within these limits."""

    enabled: bool = Field(
        default=True,
        description="Give jobs a ring to save checkpoints into. False: jobs write them themselves.",
    )
    ring_socket: Path | None = Field(
        default=None,
        description="Where jobs ask for their ring; ring.sock beside node.socket when unset.",
    )
    ring_percent: float = Field(
        default=50,
        gt=0,
        le=90,
        description="Share of the room left in a job's memory limit that its ring may take.",
    )
    ring_max_gb: float = Field(
        default=64, gt=0, description="A job's ring on a node is never larger than this."
    )
    policy: Literal["wait", "direct"] = Field(
        default="wait",
        description="While the ring is full a save waits, or the job writes the file itself.",
    )
    huge_pages: Annotated[Literal["off", "advise", "hugetlb"], OffIsAWord] = Field(
        default="advise",
        description="Pages of the ring: advise asks for transparent huge pages, hugetlb takes "
        "reserved ones and falls back.",
    )
    engine: Literal["auto", "io_uring", "pwritev"] = Field(
        default="auto", description="How files are written; auto takes io_uring where it works."
    )
    rate_mb_s: float = Field(
        default=0,
        ge=0,
        description="A job's checkpoints are written no faster than this, on its node and at the "
        "destination; 0: no limit.",
    )
    destination: Annotated[str, AfterValidator(_destination)] = Field(
        default="",
        description="Where checkpoints go for checkpoint=on: a path or URL with %u %j %A %a %x %c "
        "for user, job, array job, array task, job name, cluster. Empty: they stay on the node.",
    )
    remotes: Annotated[tuple[Remote, ...], AfterValidator(_named_once)] = Field(
        default=(),
        description="The site's stores, each with name, url, endpoint, region, addressing (auto, "
        "path, virtual), ca_bundle and credentials_file (root's, 0600). A job gets in with them "
        "only below url/user.",
    )
    keep_last: int = Field(
        default=0, ge=0, description="Newest checkpoints kept, unless the job says; 0: all."
    )
    keep_every: int = Field(
        default=0, ge=0, description="Steps that this divides are kept too; 0: none for its step."
    )
    requeue_limit: int = Field(
        default=10,
        ge=0,
        description="A job is not requeued by its own request after so many times.",
    )
    peer_listen: Annotated[str, AfterValidator(_listen)] = Field(
        default="",
        description="host:port, such as 0.0.0.0:9195, where nodes take copies of each other's "
        "checkpoints, so that a lost node loses nothing; the same port on all. Empty: no copies.",
    )
    peer_host: str = Field(
        default="%n",
        pattern=r"^[A-Za-z0-9._%-]*%n[A-Za-z0-9._-]*$",
        description="How another node is reached for copies: %n is its name; %n-ib uses a network "
        "whose names end so.",
    )
    peer_transport: Annotated[str, AfterValidator(_transport)] = Field(
        default="tcp",
        description="What carries copies: tcp, or rdma:DEVICE[:PORT[:GID_INDEX]] with the verbs "
        "device (rdma:mlx5_0:1:3; ib0 is a network interface). Without RDMA on both ends: TCP.",
    )
    scope: Annotated[Literal["auto", "off"], OffIsAWord] = Field(
        default="auto",
        description="auto gives each job's worker a systemd scope of its own where systemd runs, "
        "so that it outlives the daemon's service.",
    )
    job_path: Path | None = Field(
        default=None,
        description="Folder that jobs find crater_slurm.job in; when unset the daemon makes one "
        "beside its socket.",
    )
    append_pythonpath: bool = Field(
        default=True, description="Put that folder at the end of the tasks' PYTHONPATH."
    )
