"""What the host counts about itself; in the same files as its replicas', so that one scrape shows all.

Import it only after PROMETHEUS_MULTIPROC_DIR is set.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

from prometheus_client import CollectorRegistry, Counter, Gauge

from serve_common.wires.host import ReplicaStatus
from serve_replica_host.adapters.metrics_files import MetricsFiles


@final
class PrometheusHostMetrics:
    """The host's own metrics, and the files of its replicas."""

    def __init__(self, files: MetricsFiles) -> None:
        self._files = files
        writing = CollectorRegistry()  # only the files are read
        self._replicas = Gauge(
            "serve_host_replicas",
            "Replicas that this host holds, by status",
            ["status"],
            multiprocess_mode="livesum",
            registry=writing,
        )
        self._reconnects = Counter(
            "serve_host_nats_reconnects_total",
            "Reconnects of the host's own NATS connection",
            registry=writing,
        )
        self.show_replicas({})

    @property
    def registry(self) -> CollectorRegistry:
        """What the operations port serves."""
        return self._files.registry()

    def show_replicas(self, counts: Mapping[ReplicaStatus, int]) -> None:
        """As `ports.HostMetrics`."""
        for status in ReplicaStatus:
            self._replicas.labels(status.value).set(counts.get(status, 0))

    def count_reconnect(self) -> None:
        """The host's connection came back."""
        self._reconnects.inc()

    def retire_process(self, pid: int) -> None:
        """As `ports.HostMetrics`."""
        self._files.retire(pid)
