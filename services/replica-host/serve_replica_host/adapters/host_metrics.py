"""The host's own metrics, exported with those of its replicas, so that one scrape has all.

Why in memory and not in multiprocess files: it is one process, and its metrics must end with it.
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
    build_family,
    build_histogram_family,
    build_single,
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
        """``connections`` returns by name whether each connection to NATS is up."""
        self._files = files
        self._counts = _HostCollector(host_id, files)
        self.registry: Final = CollectorRegistry()
        """What the operations port serves."""
        self.registry.register(files)  # first: left-out files are counted while it is collected
        self.registry.register(self._counts)
        self._refused = RefusedMessages(time.monotonic)
        register_process_metrics(self.registry, lag, connections, self._refused)

    def show_replicas(self, counts: Mapping[ReplicaStatus, int]) -> None:
        """Set the numbers of replicas by status."""
        self._counts.replicas = dict(counts)

    def count_start(self, backend_tag: BackendTag, seconds: float, *, was_spare: bool) -> None:
        """Count a start that took ``seconds``."""
        key = (backend_tag, "spare" if was_spare else "cold")
        starts = self._counts.starts
        observations = starts.get(key) or Observations(START_SECONDS.buckets)
        observations.observe(seconds)
        _put_lru(starts, key, observations, _STARTS_MAX)

    def count_failure(self, backend_tag: BackendTag, status: ReplicaStatus) -> None:
        """Count a replica that became FAILED, DEAD or UNHEALTHY."""
        key = (backend_tag, _REASONS[status])
        failures = self._counts.failures
        _put_lru(failures, key, failures.get(key, 0) + 1, _FAILURES_MAX)

    def count_reconnect(self) -> None:
        """Count a reconnect of the host to NATS."""
        self._counts.reconnects += 1

    def message_refused(self, kind: str, sender: str, error: Exception) -> None:
        """Count and log a message that could not be decoded."""
        self._refused.refuse(kind, sender, error)

    def retire_process(self, process: str) -> None:
        """Fold the files of an ended process into totals. Blocks on files."""
        self._files.retire(process)


def _put_lru(entries: dict[tuple[str, str], V], key: tuple[str, str], value: V, entries_max: int) -> None:
    """Insert at the end; if there are more than ``entries_max``, remove the least recently changed."""
    entries.pop(key, None)
    entries[key] = value
    if len(entries) > entries_max:
        del entries[next(iter(entries))]


@final
class _HostCollector(Collector):
    """Runs on another thread than the host's loop, so it copies each table in one step."""

    def __init__(self, host_id: HostId, files: MetricsFiles) -> None:
        self.replicas: Mapping[ReplicaStatus, int] = {}
        self.reconnects = 0
        self.starts: dict[tuple[str, str], Observations] = {}
        self.failures: dict[tuple[str, str], int] = {}
        self._host_id = host_id
        self._files = files

    def collect(self) -> Iterable[Metric]:
        yield build_family(HOST_INFO, [([self._host_id], 1.0)])
        counts = self.replicas
        yield build_family(
            HOST_REPLICAS, (([status.value], counts.get(status, 0)) for status in ReplicaStatus)
        )
        starts = build_histogram_family(START_SECONDS)
        for labels, observed in list(self.starts.items()):
            add_observations(starts, list(labels), observed.buckets, list(observed.counts), observed.total)
        yield starts
        yield build_family(REPLICA_ENDS, list(self.failures.items()))
        yield build_single(HOST_RECONNECTS, self.reconnects)
        yield build_single(METRICS_FILES_LEFT_OUT, self._files.left_out)
