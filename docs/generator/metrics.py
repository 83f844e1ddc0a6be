"""The page of metrics, from their catalogue."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from docs.generator.structs import GENERATED
from serve_common.telemetry.catalogue import CATALOGUE
from serve_common.telemetry.catalogue.consoles import CONSOLE_METRICS
from serve_common.telemetry.catalogue.controllers import AUTOSCALER_METRICS, CONTROLLER_METRICS
from serve_common.telemetry.catalogue.nats_servers import NATS_METRICS
from serve_common.telemetry.catalogue.proxies import PROXY_METRICS
from serve_common.telemetry.catalogue.replicas import REPLICA_METRICS
from serve_common.telemetry.catalogue.services import EVERYWHERE_METRICS, HOST_METRICS, LIBRARY_GROUPS
from serve_common.telemetry.catalogue.specs import LABELS, MetricKind, MetricSpec

_HEAD: Final = f"""\
# Metrics

{GENERATED}
Every process serves `/metrics` in Prometheus' text format on its operations port: proxies on 9102, controllers on
9101, replica hosts on 9103, consoles on 9104. Replica processes have no port of their own: what they count is on the
page of their host, added up over the replicas of a backend, and stays in the counters when a replica ends.

Units are base units: seconds, bytes, or what the row says. Counters end in `_total`. A histogram has the series
`…_bucket{{le}}`, `…_sum` and `…_count`. No metric has a label for the replica: replicas come and go, and each would
leave series behind; which replica it was is in logs and traces. A container with several proxy processes serves one
page, on which each sample has the further label `process`, the number of the process.
"""

_QUERIES: Final = (
    (
        "Ongoing requests of a backend, as the autoscaler sees them (each request is in exactly one of the two)",
        """\
sum(rate(serve_replica_ongoing_seconds_total{backend_tag="default/app"}[30s]))
  + sum(rate(serve_router_queued_seconds_total{backend_tag="default/app"}[30s]))""",
    ),
    (
        "Share of requests that failed, by endpoint",
        """\
sum by (endpoint_tag) (rate(serve_proxy_requests_total{code=~"5.."}[5m]))
  / sum by (endpoint_tag) (rate(serve_proxy_requests_total[5m]))""",
    ),
    (
        "The 99th percentile of latency by endpoint, in seconds",
        """\
histogram_quantile(0.99, sum by (endpoint_tag, le) (rate(serve_proxy_request_seconds_bucket[5m])))""",
    ),
    (
        "How full a backend is (at 1 every further request waits)",
        """\
sum by (backend_tag) (serve_replica_in_flight_requests)
  / sum by (backend_tag) (serve_replica_in_flight_limit)""",
    ),
    (
        "Replicas short of what was decided",
        """\
sum by (backend_tag) (serve_controller_replicas_wanted)
  - sum by (backend_tag) (serve_controller_replicas{state=~"running|updating"})""",
    ),
)
_NO_LABELS: Final = "none"
_OF_NATS: Final = """\
Exported by the controller that leads, which reads the monitoring ports that `MUSTER_NATS_MONITOR_URL` names (separated
by commas) every 2 s. Counters are the server's own and begin anew with it. What an older server does not tell is
absent."""

_OWN: Final = """\
## Metrics of user code

`muster.metrics` has `Counter`, `Gauge` and `Histogram`, with the names and arguments of Ray Serve's:

```python
from muster import metrics

CACHE_HITS = metrics.Counter("model_cache_hits", "Answers that came from the cache.", tag_keys=("model",))

class Model:
    async def __call__(self, request):
        ...
        CACHE_HITS.inc(tags={"model": "small"})
```

They are shown on the page of the replica's host, as `model_cache_hits_total{backend_tag, model}`: a counter gets the
ending `_total`, and each sample the label `backend_tag`. A name has one type and one set of tags, in all deployments;
names that begin with `serve_` are refused. Counters and histograms of a backend's replicas are added up, and stay when
a replica ends. Gauges are added up over the replicas that live, or as `aggregate` says: `"sum"`, `"max"`, `"min"`, or
`"latest"` (the value that was set last). What is set shows within half a second.

Limits for each replica: 200 metrics, and 1,000 sets of tag values for each of them. Further sets are counted with
`other` in place of each value, and a log line says so once.
"""


def page() -> str:
    """The whole page, as Markdown."""
    parts = [
        _HEAD,
        "## What one asks most\n",
        *(f"{title}:\n\n```promql\n{query}\n```\n" for title, query in _QUERIES),
        _section("Proxies", PROXY_METRICS),
        _section("Replicas", REPLICA_METRICS),
        _section("Replica hosts", HOST_METRICS),
        _section("Controllers", CONTROLLER_METRICS),
        _section("Autoscaler", AUTOSCALER_METRICS, "Exported by the controller that leads."),
        _section("NATS servers", NATS_METRICS, _OF_NATS),
        _section("Consoles", CONSOLE_METRICS),
        _section("Every service process", EVERYWHERE_METRICS),
        *(f"- `{group}`: {text}" for group, text in LIBRARY_GROUPS.items()),
        "",
        "## Labels\n",
        _table(
            ("label", "meaning", "values"),
            [(f"`{name}`", LABELS[name].meaning, LABELS[name].bound) for name in _labels_used()],
        ),
        _OWN.rstrip("\n"),
    ]
    return "\n".join(parts) + "\n"


def _labels_used() -> list[str]:
    return sorted({label for spec in CATALOGUE for label in spec.labels})


def _section(title: str, metrics: Sequence[MetricSpec], text: str = "") -> str:
    head = f"## {title}\n\n{text}\n" if text else f"## {title}\n"
    rows = [(f"`{spec.name}`", spec.kind.value, _labels(spec), spec.unit, _meaning(spec)) for spec in metrics]
    return f"{head}\n{_table(('name', 'type', 'labels', 'unit', 'meaning'), rows)}"


def _labels(spec: MetricSpec) -> str:
    return ", ".join(f"`{label}`" for label in spec.labels) or _NO_LABELS


def _meaning(spec: MetricSpec) -> str:
    parts = [spec.text]
    if spec.when:
        parts.append(f"Present {spec.when}.")
    if spec.kind is MetricKind.HISTOGRAM:
        parts.append(f"Bounds: {', '.join(f'{bound:g}' for bound in spec.buckets)}.")
    if len(spec.exporters) > 1 or spec in EVERYWHERE_METRICS:
        parts.append(f"Exported by: {', '.join(exporter.value for exporter in spec.exporters)}.")
    return " ".join(parts)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [_row(head), _row(["---"] * len(head)), *(_row(row) for row in rows)]
    return "\n".join([*lines, ""])


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
