"""The nodes' scores and weights as Prometheus metrics, made from the board at each scrape."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from crater_slurm.scheduler.health import HealthWatch


class HealthCollector(Collector):
    """Registers with a prometheus_client registry."""

    def __init__(self, watch: HealthWatch) -> None:
        self._watch = watch

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        health = GaugeMetricFamily(
            "crater_node_health", "Health score, 0 to 1; 1 also when unknown.", labels=["node"]
        )
        known = GaugeMetricFamily(
            "crater_node_health_known", "1 when the score rests on a fresh report.", labels=["node"]
        )
        degraded = GaugeMetricFamily(
            "crater_node_degraded", "1 for a node that jobs are kept off.", labels=["node"]
        )
        weight = GaugeMetricFamily(
            "crater_node_weight", "Weight in Slurm, as it showed it last.", labels=["node"]
        )
        for node, found in self._watch.board.judged.items():
            health.add_metric([node], found.score.value)
            known.add_metric([node], float(found.score.fresh))
            degraded.add_metric([node], float(found.standing.degraded))
        for node, value in self._watch.slurm_weights().items():
            weight.add_metric([node], value)
        rounds = CounterMetricFamily(
            "crater_health_rounds", "Comparisons of Slurm's weights and drains with health."
        )
        rounds.add_metric([], self._watch.rounds)
        yield from (health, known, degraded, weight, rounds)
