"""How a metric and its labels are described: for exporters, the page of documentation, and checks of dashboards."""

from __future__ import annotations

from enum import Enum
from typing import Final

import msgspec


class LabelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One label."""

    meaning: str
    bound: str
    """What limits the number of its values.

    Why it is stated: each further value is a further series in every Prometheus for weeks, and a label without a bound
    is how a monitored system brings its monitoring down.
    """


LABELS: Final = {
    "backend_tag": LabelSpec(
        meaning="The backend; of a deployment, `application/deployment`.",
        bound="The backends that are deployed; on a host also those it has run replicas of, the last 500 at most.",
    ),
    "direction": LabelSpec(
        meaning="`sent` or `received`, by the process that is scraped.",
        bound="These two.",
    ),
    "endpoint_tag": LabelSpec(
        meaning="The endpoint; empty for requests that no route was found for.",
        bound="The endpoints that are deployed.",
    ),
    "gate": LabelSpec(
        meaning="What a rollout compares: `errors`, `client_errors`, `latency_p50` or `latency_p99`.",
        bound="Words of the code.",
    ),
    "version": LabelSpec(
        meaning="Of a rollout: `canary`, the new version, or `baseline`, as many replicas of the old one.",
        bound="These two.",
    ),
    "method": LabelSpec(
        meaning="The HTTP method.",
        bound="The seven usual methods; any other one is `other`.",
    ),
    "code": LabelSpec(
        meaning="The HTTP status; 499 when the client went away before its answer, 101 for a WebSocket.",
        bound="Three digits; any other number is `other`.",
    ),
    "outcome": LabelSpec(
        meaning="What became of it: of a shadow's copy `answered`, `error`, `failed` or `skipped`; of an effect and "
        "of a load `ok` or what went wrong; of a reading whether it is whole; of a rollout `promoted`, `aborted` or "
        "`superseded`; of an attempt to sign in `ok`, `wrong` (name or password), `limited` (too many attempts), "
        "`bus_away` or `refused` (by NATS).",
        bound="Words of the code.",
    ),
    "reason": LabelSpec(
        meaning="Why a request was refused: by proxies `queue`, `circuit`, `retry_budget`, `stopped` or "
        "`deaths`; by replicas `busy`, "
        "`draining` or `reply_subject` (to be answered where nobody's inbox is). "
        "How a replica failed: `start`, `death` or `health`. Why a span was dropped: `queue` (too many "
        "waited to be sent) or `receiver` (it was away, or did not take them). Why a log line was dropped: "
        "`disk_full`, `not_written` (it failed for another reason) or `too_many` (they came faster than they could be "
        "written).",
        bound="Words of the code.",
    ),
    "message": LabelSpec(
        meaning="The kind of a message between services: `host_report`, `proxy_report`, `leader_notice`, `wake`, "
        "`host_goal` or `snapshot`.",
        bound="Words of the code.",
    ),
    "status": LabelSpec(
        meaning="Of a replica on its host, a goal, a host or a proxy, as `muster status` shows it.",
        bound="Words of the code.",
    ),
    "state": LabelSpec(
        meaning="What was decided about a replica, from `should_start` to `stopping`.",
        bound="Words of the code.",
    ),
    "function": LabelSpec(
        meaning="The batched function's name, with its class.",
        bound="The code of the deployment; the first 100 in a replica, any other one is `other`.",
    ),
    "kind": LabelSpec(
        meaning="`spare`: the replica's process had been started ahead; `cold`: not.", bound="These two."
    ),
    "connection": LabelSpec(
        meaning="`data`: requests; `control`: reports, snapshots and commands.", bound="These two."
    ),
    "effect": LabelSpec(
        meaning="What the controller did to the outside, such as `record_plan` or `publish_snapshot`.",
        bound="Words of the code.",
    ),
    "verdict": LabelSpec(
        meaning="Why the autoscaler moved or held, such as `up`, `waits_down` or `held` (no whole reading).",
        bound="Words of the code.",
    ),
    "source": LabelSpec(meaning="Where the load was read: `prometheus` or `scrape`.", bound="These two."),
    "server": LabelSpec(
        meaning="The NATS server: host and port of its address in `MUSTER_NATS_MONITOR_URL`.",
        bound="Those that are named there, 16 at most.",
    ),
    "transport": LabelSpec(
        meaning="Of a direct link: `unix` on the proxy's machine, `tcp` (with TLS) to another one.",
        bound="These two.",
    ),
    "proxy_id": LabelSpec(
        meaning="The proxy, as `muster status` names it.", bound="One for each proxy process."
    ),
    "host_id": LabelSpec(
        meaning="The replica host, as `muster host list` shows it.", bound="One for each host."
    ),
}


SECONDS_BUCKETS: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0
)  # fmt: skip
"""Buckets for durations of requests and of their parts."""


class MetricKind(Enum):
    """The Prometheus type of a metric."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Exporter(Enum):
    """The process whose metrics page has the metric."""

    PROXY = "proxy"
    CONTROLLER = "controller"
    CONSOLE = "console"
    HOST = "host"
    """Exported by the host process itself."""
    REPLICA = "replica"
    """Exported by replica processes, on the page of their host."""


class MetricSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One metric.

    Why a plain value: exporters produce metrics in two ways (a library's objects, and families built at each scrape),
    and neither can list its metrics before something was counted.
    """

    name: str
    """Name in PromQL; of a histogram without ``_bucket``, ``_sum`` and ``_count``."""
    kind: MetricKind
    text: str
    """Description in one or two sentences; its first line is the help text of the scrape."""
    unit: str
    """Unit of its value; ``1`` for a state that is 0 or 1."""
    exporters: tuple[Exporter, ...]
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram, without the last one, which is infinite."""
    when: str = ""
    """Condition under which it exists, if not always."""

    @property
    def family(self) -> str:
        """The name for client libraries, which add ``_total`` to a counter by themselves."""
        return self.name.removesuffix("_total") if self.kind is MetricKind.COUNTER else self.name

    @property
    def series(self) -> tuple[str, ...]:
        """The names of its samples."""
        if self.kind is MetricKind.HISTOGRAM:
            return (f"{self.name}_bucket", f"{self.name}_sum", f"{self.name}_count")
        return (self.name,)
