"""Rates and latencies from two samples of a stack's load, as `muster top` and the console show them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from serve_common.api.views import AutoscalingView, BackendLoad, EndpointLoad, LoadView, StatusView

_RUNNING = frozenset({"running", "updating"})


class LoadRates(msgspec.Struct, frozen=True, kw_only=True):
    """Load of one endpoint or backend over an interval; None for what is unknown or has no samples."""

    name: str
    requests_per_s: float | None = None
    errors_per_s: float | None = None
    p50_s: float | None = None
    p99_s: float | None = None
    queued: float | None = None
    in_flight: float | None = None
    running: int | None = None
    wanted: int | None = None
    autoscaling: str = ""


def compute_rates(
    before: LoadView, after: LoadView, status: StatusView, autoscaling: Sequence[AutoscalingView]
) -> list[LoadRates]:
    """One row for each endpoint, backend with load, and deployment, sorted by name.

    Rates are computed from counters and not from gauges: the difference of two counters is exact, however long the
    interval.
    """
    seconds = after.at - before.at
    earlier = {load.endpoint_tag: load for load in before.endpoints}
    now = {load.endpoint_tag: load for load in after.endpoints}
    loads = {load.backend_tag: load for load in after.backends}
    deployments = {view.name: view for view in status.deployments}
    scaling = {view.backend_tag: view for view in autoscaling}
    rows = []
    for name in sorted({*now, *loads, *deployments} - {""}):
        row = _traffic(name, earlier.get(name), now.get(name), seconds, loads.get(name))
        deployment, scaled = deployments.get(name), scaling.get(name)
        running = None if deployment is None else sum(each.state in _RUNNING for each in deployment.replicas)
        wanted = None if deployment is None else deployment.backend_config.num_replicas
        if scaled is not None:
            wanted = scaled.num_replicas
        state = "" if scaled is None else ("paused" if scaled.paused else scaled.verdict)
        rows.append(msgspec.structs.replace(row, running=running, wanted=wanted, autoscaling=state))
    return rows


def _traffic(
    name: str,
    before: EndpointLoad | None,
    after: EndpointLoad | None,
    seconds: float,
    load: BackendLoad | None,
) -> LoadRates:
    row = LoadRates(
        name=name,
        queued=None if load is None else load.queued,
        in_flight=None if load is None else load.in_flight,
    )
    if after is None or seconds <= 0:
        return row
    buckets = increases(before.seconds_buckets if before is not None else {}, after.seconds_buckets)
    return msgspec.structs.replace(
        row,
        requests_per_s=_increase(0.0 if before is None else before.requests, after.requests) / seconds,
        errors_per_s=_increase(0.0 if before is None else before.errors, after.errors) / seconds,
        p50_s=quantile(0.5, buckets),
        p99_s=quantile(0.99, buckets),
    )


def _increase(before: float, after: float) -> float:
    """The increase of a counter as Prometheus computes it: a counter that fell was reset meanwhile."""
    return after - before if after >= before else after


def increases(before: Mapping[str, float], after: Mapping[str, float]) -> dict[float, float]:
    """The increase of each cumulative bucket, by its upper bound."""
    whole = max(after.values(), default=0.0)
    was_reset = whole < max(before.values(), default=0.0)
    return {
        float(bound): count - (0.0 if was_reset else before.get(bound, 0.0)) for bound, count in after.items()
    }


def quantile(q: float, buckets: Mapping[float, float]) -> float | None:
    """The quantile as Prometheus' ``histogram_quantile``: linear within a bucket, the last finite bound beyond it.

    ``buckets`` are cumulative counts by upper bound, ``inf`` included. None when they are empty.
    """
    bounds = sorted(buckets)
    total = buckets[bounds[-1]] if bounds else 0.0
    if total <= 0:
        return None
    rank = q * total
    low, below = 0.0, 0.0
    for bound in bounds:
        if buckets[bound] >= rank:
            if bound == float("inf"):
                return low
            inside = buckets[bound] - below
            return low + (bound - low) * ((rank - below) / inside if inside > 0 else 1.0)
        low, below = bound, buckets[bound]
    return low
