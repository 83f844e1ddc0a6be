"""What was read of NATS servers, for Prometheus.

Why only of the leader: several controllers may run, and each server should be there once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import final

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from serve_common.adapters.process_metrics import family_of
from serve_common.metrics_catalogue.nats_servers import NATS_METRICS, NATS_UP
from serve_controller.adapters.nats_monitor import ServerReading


@final
class NatsServersCollector(Collector):
    """Of every server that was read lately, or tried to."""

    def __init__(self, readings: Callable[[], Sequence[ServerReading]]) -> None:
        """``readings`` are looked at from the operations port's thread."""
        self._readings = readings

    def describe(self) -> Iterable[Metric]:
        """Nothing: what there is depends on the servers."""
        return []

    def collect(self) -> Iterable[Metric]:
        """What there is of each metric; those of which there is nothing are left out."""
        readings = self._readings()
        for spec in NATS_METRICS:
            family = family_of(spec)
            for reading in readings:
                known = {NATS_UP: 0.0} if reading.values is None else {NATS_UP: 1.0, **reading.values}
                if spec in known:
                    family.add_metric([reading.server], known[spec])
            if family.samples:
                yield family
