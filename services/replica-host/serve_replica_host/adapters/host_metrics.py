"""What the host counts about itself, shown beside what its replicas count, so that one scrape has all.

Why in memory and not in the replicas' files: it is one process, and what it says of itself must end with it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Final, TypeVar, final

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from serve_common.names import BackendTag, HostId
from serve_common.protocol.reports import ReplicaStatus
from serve_common.runtime.health import LoopLag
from serve_common.runtime.operations import (
    add_observations,
    family_of,
    histogram_of,
    register_process_metrics,
)
from serve_common.telemetry.catalogue.services import (
    HOST_INFO,
    HOST_RECONNECTS,
    HOST_REPLICAS,
    METRICS_FILES_LEFT_OUT,
    REPLICA_ENDS,
    START_SECONDS,
)
from serve_common.telemetry.log_lines import RefusedMessages
from serve_common.telemetry.metrics import Observations
from serve_replica_host.adapters.metrics_files import BACKENDS_MAX, MetricsFiles

_REASONS: Final = {
    ReplicaStatus.FAILED: "start",
    ReplicaStatus.DEAD: "death",
    ReplicaStatus.UNHEALTHY: "health",
}
_STARTS_MAX: Final = 2 * BACKENDS_MAX
_FAILURES_MAX: Final = len(_REASONS) * BACKENDS_MAX

V = TypeVar("V")


@final
class PrometheusHostMetrics:
    """The host's own metrics, and the files of its replicas."""

    def __init__(
        self,
        files: MetricsFiles,
        host_id: HostId,
        lag: LoopLag,
        connections: Mapping[str, Callable[[], bool]],
    ) -> None:
        """``connections`` to NATS tell whether they are up, by their names."""
        self._files = files
        self._counts = _HostCollector(host_id, files)
        self.registry: Final = CollectorRegistry()
        """What the operations port serves."""
        self.registry.register(files)  # first: what was left out is counted after it
        self.registry.register(self._counts)
        self._refused = RefusedMessages(time.monotonic)
        register_process_metrics(self.registry, lag, connections, self._refused)

    def show_replicas(self, counts: Mapping[ReplicaStatus, int]) -> None:
        """As `ports.HostMetrics`."""
        self._counts.replicas = dict(counts)

    def count_start(self, backend_tag: BackendTag, seconds: float, *, was_spare: bool) -> None:
        """As `ports.HostMetrics`."""
        key = (backend_tag, "spare" if was_spare else "cold")
        starts = self._counts.starts
        observations = starts.get(key) or Observations(START_SECONDS.buckets)
        observations.observe(seconds)
        _keep(starts, key, observations, _STARTS_MAX)

    def count_failure(self, backend_tag: BackendTag, status: ReplicaStatus) -> None:
        """As `ports.HostMetrics`."""
        key = (backend_tag, _REASONS[status])
        failures = self._counts.failures
        _keep(failures, key, failures.get(key, 0) + 1, _FAILURES_MAX)

    def count_reconnect(self) -> None:
        """The host's connection came back."""
        self._counts.reconnects += 1

    def message_refused(self, kind: str, sender: str, error: Exception) -> None:
        """As `ports.HostMetrics`."""
        self._refused.refuse(kind, sender, error)

    def retire_process(self, process: str) -> None:
        """As `ports.HostMetrics`."""
        self._files.retire(process)


def _keep(held: dict[tuple[str, str], V], key: tuple[str, str], value: V, held_max: int) -> None:
    """Put it last; the first, which has not changed for longest, goes when there are too many."""
    held.pop(key, None)
    held[key] = value
    if len(held) > held_max:
        del held[next(iter(held))]


@final
class _HostCollector(Collector):
    """Runs in another thread than the host's loop, so it copies each table in one step."""

    def __init__(self, host_id: HostId, files: MetricsFiles) -> None:
        self.replicas: Mapping[ReplicaStatus, int] = {}
        self.reconnects = 0
        self.starts: dict[tuple[str, str], Observations] = {}
        self.failures: dict[tuple[str, str], int] = {}
        self._host_id = host_id
        self._files = files

    def collect(self) -> Iterable[Metric]:
        info = family_of(HOST_INFO)
        info.add_metric([self._host_id], 1.0)
        yield info
        replicas, counts = family_of(HOST_REPLICAS), self.replicas
        for status in ReplicaStatus:
            replicas.add_metric([status.value], counts.get(status, 0))
        yield replicas
        starts = histogram_of(START_SECONDS)
        for labels, observed in list(self.starts.items()):
            add_observations(starts, list(labels), observed.buckets, list(observed.counts), observed.total)
        yield starts
        failures = family_of(REPLICA_ENDS)
        for labels, count in list(self.failures.items()):
            failures.add_metric(list(labels), count)
        yield failures
        reconnects = family_of(HOST_RECONNECTS)
        reconnects.add_metric([], self.reconnects)
        yield reconnects
        left_out = family_of(METRICS_FILES_LEFT_OUT)
        left_out.add_metric([], self._files.left_out)
        yield left_out
