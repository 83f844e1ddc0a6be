"""What is near its limit, and what routers do about replicas that fail: the lower half of Overview."""

from __future__ import annotations

from typing import Final

from deploy.grafana.boards import common
from deploy.grafana.boards.model import Panel, Query, Row, Step
from deploy.grafana.boards.promql import OF_BACKEND, OF_ENDPOINT, increase, rate, share, total

_FULL_STEPS: Final = (
    Step(value=None, color="green"),
    Step(value=0.8, color="orange"),
    Step(value=1, color="red"),
)

SATURATION: Final = Row(
    title="What is near its limit",
    panels=(
        Panel(
            title="Slots in use",
            description="Requests that replicas work on, of those that they may work on at once "
            "(max_concurrent_queries). At 100 % requests wait.",
            unit="percentunit",
            steps=_FULL_STEPS,
            link=common.TO_BACKEND,
            queries=(
                Query(
                    expr=share(
                        total("serve_replica_in_flight_requests", OF_BACKEND, by="backend_tag"),
                        total("serve_replica_in_flight_limit", OF_BACKEND, by="backend_tag"),
                    ),
                    legend="{{backend_tag}}",
                ),
            ),
        ),
        Panel(
            title="Waiting for a replica",
            description="Requests in the proxies' queues, by backend.",
            unit="none",
            stacked=True,
            link=common.TO_BACKEND,
            queries=(
                Query(
                    expr=total("serve_proxy_queue_depth", OF_BACKEND, by="backend_tag"),
                    legend="{{backend_tag}}",
                ),
            ),
        ),
        Panel(
            title="Refused by proxies",
            description="Requests that were sent to no replica: the queue was full, the circuit open, or the "
            "budget for second sendings spent. Callers get 503.",
            unit="reqps",
            stacked=True,
            link=common.TO_BACKEND,
            queries=(
                Query(
                    expr=rate("serve_proxy_refused_requests_total", OF_BACKEND, by="backend_tag, reason"),
                    legend="{{backend_tag}} {{reason}}",
                ),
            ),
        ),
    ),
)

PROTECTION: Final = Row(
    title="What routers do about replicas that fail",
    panels=(
        Panel(
            title="Open circuits",
            description="In how many proxies nothing is sent to a backend because its replicas fail.",
            unit="none",
            width=6,
            steps_between=True,
            steps=common.RED_FROM_ONE,
            link=common.TO_BACKEND,
            queries=(
                Query(
                    expr=total("serve_proxy_circuit_open", OF_BACKEND, by="backend_tag"),
                    legend="{{backend_tag}}",
                ),
            ),
        ),
        Panel(
            title="Replicas left out",
            description="Times in each minute that a router left out a replica because it failed again and again.",
            unit="none",
            width=6,
            link=common.TO_BACKEND,
            queries=(
                Query(
                    expr=increase("serve_proxy_replica_ejections_total", OF_BACKEND, by="backend_tag"),
                    legend="{{backend_tag}}",
                ),
            ),
        ),
        Panel(
            title="Second sendings",
            description="Requests that were sent again because their replica died or lost them.",
            unit="reqps",
            width=6,
            link=common.TO_BACKEND,
            queries=(
                Query(
                    expr=rate("serve_proxy_retries_total", OF_BACKEND, by="backend_tag"),
                    legend="{{backend_tag}}",
                ),
            ),
        ),
        Panel(
            title="Copies to shadow backends",
            description="Requests copied to a shadow backend, by what became of the copy; skipped ones were over "
            "a limit. Callers notice nothing of it.",
            unit="reqps",
            width=6,
            stacked=True,
            link=common.TO_BACKEND,
            queries=(
                Query(
                    expr=rate(
                        "serve_proxy_shadow_requests_total",
                        OF_ENDPOINT,
                        OF_BACKEND,
                        by="backend_tag, outcome",
                    ),
                    legend="{{backend_tag}} {{outcome}}",
                ),
            ),
        ),
        Panel(
            title="Captured requests",
            description="Requests that proxies sampled for a capture: published, or dropped because more than 200 a "
            "second came at once or NATS was away. Callers notice nothing of it.",
            unit="reqps",
            width=6,
            stacked=True,
            queries=(
                Query(
                    expr=rate("serve_proxy_captured_requests_total", by="outcome"),
                    legend="{{outcome}}",
                ),
            ),
        ),
    ),
)
