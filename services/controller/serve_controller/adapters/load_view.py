"""Sums up what all services export into the one table that `muster top` shows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Final

from serve_common.metrics_catalogue.proxies import PROXY_INFO, QUEUE_DEPTH, REQUEST_SECONDS, REQUESTS
from serve_common.metrics_catalogue.replicas import REPLICA_IN_FLIGHT
from serve_common.wires.views import BackendLoad, EndpointLoad, LoadView
from serve_controller.adapters.load_page import Sample
from serve_controller.adapters.prometheus_queries import HOST

_BUCKET: Final = f"{REQUEST_SECONDS.name}_bucket"
VIEWED: Final = (PROXY_INFO.name, HOST, REQUESTS.name, _BUCKET, QUEUE_DEPTH.name, REPLICA_IN_FLIGHT.name)
"""The samples that it needs."""


def sum_up(at: float, pages: Iterable[Sequence[Sample]], unreachable: Sequence[str]) -> LoadView:
    """``at`` is now; requests without an endpoint, which no route was found for, have the empty tag."""
    requests: defaultdict[str, float] = defaultdict(float)
    errors: defaultdict[str, float] = defaultdict(float)
    buckets: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    in_flight: defaultdict[str, float] = defaultdict(float)
    queued: defaultdict[str, float] = defaultdict(float)
    for page in pages:
        for sample in page:
            endpoint = sample.labels.get("endpoint_tag", "")
            backend = sample.labels.get("backend_tag", "")
            if sample.name == REQUESTS.name:
                requests[endpoint] += sample.value
                if sample.labels.get("code", "").startswith("5"):
                    errors[endpoint] += sample.value
            elif sample.name == _BUCKET:
                buckets[endpoint][sample.labels.get("le", "")] += sample.value
            elif sample.name == QUEUE_DEPTH.name:
                queued[backend] += sample.value
            elif sample.name == REPLICA_IN_FLIGHT.name:
                in_flight[backend] += sample.value
    return LoadView(
        at=at,
        endpoints=[
            EndpointLoad(
                endpoint_tag=tag,
                requests=requests[tag],
                errors=errors[tag],
                seconds_buckets=dict(buckets[tag]) if tag in buckets else {},
            )
            for tag in sorted(requests.keys() | buckets.keys())
        ],
        backends=[
            BackendLoad(backend_tag=tag, in_flight=in_flight[tag], queued=queued[tag])
            for tag in sorted(in_flight.keys() | queued.keys())
        ],
        unreachable=list(unreachable),
    )
