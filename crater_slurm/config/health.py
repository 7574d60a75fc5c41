"""Settings of the nodes' health: thresholds, what is published to Slurm, where it comes from."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from crater_slurm.config.section import Section

Fault = Literal[
    "gpu_lost", "gpu_xid", "ecc_uncorrected", "gpu_temperature", "gpu_throttled", "drive_warning"
]


class PrometheusSource(Section):
    """Health read from a Prometheus server, for nodes that report none themselves."""

    url: str | None = Field(
        default=None,
        pattern=r"^https?://",
        description="Address of the server, such as http://prometheus:9090; not used when unset. "
        "It is asked for crater-probe's metrics and for those of NVIDIA's DCGM exporter.",
    )
    token_file: Path | None = Field(
        default=None,
        description="File with a bearer token for it; only its owner may read it (mode 0600).",
    )
    poll_seconds: float = Field(default=30, ge=1, description="How often it is asked.")
    window_seconds: float = Field(
        default=120, ge=10, description="How far it may look back for a metric's newest value."
    )
    timeout_seconds: float = Field(
        default=5, gt=0, description="Each question is given up after this long."
    )
    node_labels: tuple[str, ...] = Field(
        default=("exported_node", "node", "Hostname", "instance"),
        description="Labels that may name the node; the first whose value Slurm knows counts, "
        "without port and domain.",
    )


class Health(Section):
    """How healthy nodes are, and what is made of it."""

    stale_seconds: float = Field(
        default=180, gt=0, description="An older report says nothing: the node counts as healthy."
    )
    gpu_warm_c: float = Field(default=80, description="From here on heat lowers a node's score.")
    gpu_hot_c: float = Field(default=92, description="A GPU this hot makes the score 0.")
    ecc_corrected_some: int = Field(
        default=100, ge=0, description="More corrected memory errors of a GPU in an hour count."
    )
    ecc_corrected_many: int = Field(
        default=1000, ge=1, description="So many corrected errors in an hour count in full."
    )
    bandwidth_busy_percent: float = Field(
        default=80,
        ge=0,
        lt=100,
        description="More of the measured memory bandwidth in use lowers the score a little.",
    )
    wear_percent: float = Field(
        default=90, ge=0, description="A drive with this much of its endurance used counts less."
    )
    load_per_cpu: float = Field(
        default=1.0, gt=0, description="A higher load of each CPU lowers the score a little."
    )
    degraded_below: float = Field(
        default=0.5, ge=0, le=1, description="A node with a lower score is degraded."
    )
    margin: float = Field(
        default=0.05,
        ge=0,
        le=0.5,
        description="A score must rise this far above a bound to be over it again.",
    )
    reports: int = Field(
        default=3,
        ge=1,
        description="Reports in a row that it takes to change what a node counts as.",
    )
    exclude_degraded: bool = Field(
        default=True,
        description="Keep planned jobs off degraded nodes, as far as other nodes can take them.",
    )
    tiers: tuple[float, ...] = Field(
        default=(0.75, 0.5, 0.25),
        max_length=8,
        description="Bounds of the score: below the first a node is in tier 1, and so on.",
    )
    penalties: tuple[int, ...] = Field(
        default=(100, 1000, 10_000),
        description="What each tier adds to the node's own weight in Slurm, which takes nodes of "
        "a low weight first.",
    )
    publish_weights: bool = Field(
        default=True,
        description="Set the weights of nodes by their health; only done where filter.mode is "
        "enforce, else logged.",
    )
    publish_seconds: float = Field(
        default=30, ge=1, description="Weights are changed and nodes drained no more often."
    )
    state_file: Path = Field(
        default=Path("/var/lib/crater/weights.json"),
        description="The nodes' own weights, so that crater never takes its own for them.",
    )
    drain: tuple[Fault, ...] = Field(
        default=(),
        description="Faults for which a node is drained, and undrained when they are gone; none "
        "by default. Only done where filter.mode is enforce.",
    )
    drain_share: float = Field(
        default=0.1,
        ge=0,
        le=1,
        description="Never more of a partition is drained by crater; of 9 nodes 0.1 is none.",
    )
    prometheus: PrometheusSource = PrometheusSource()

    @model_validator(mode="after")
    def _ordered(self) -> Health:
        """Refuse bounds that contradict each other."""
        if self.gpu_warm_c >= self.gpu_hot_c:
            raise ValueError("gpu_warm_c must be below gpu_hot_c")
        if self.ecc_corrected_some >= self.ecc_corrected_many:
            raise ValueError("ecc_corrected_some must be below ecc_corrected_many")
        if list(self.tiers) != sorted(set(self.tiers), reverse=True):
            raise ValueError("tiers must fall, such as [0.75, 0.5, 0.25]")
        if any(not 0 <= bound <= 1 for bound in self.tiers):
            raise ValueError("tiers must be between 0 and 1")
        if len(self.penalties) != len(self.tiers):
            raise ValueError("penalties must have one entry for each of tiers")
        if list(self.penalties) != sorted(self.penalties) or any(p < 0 for p in self.penalties):
            raise ValueError("penalties must be at least 0 and must not fall")
        return self
