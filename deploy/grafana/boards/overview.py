"""Where somebody who was woken looks first: what users get, and what is near its limit."""

from __future__ import annotations

from typing import Final

from deploy.grafana.boards import common
from deploy.grafana.boards.limits import PROTECTION, SATURATION
from deploy.grafana.boards.model import Board, Kind, Panel, Query, Row, Step
from deploy.grafana.boards.promql import OF_ENDPOINT, increase, quantile, rate, share, total

_FAILED: Final = 'code=~"5.."'
_SHARE_STEPS: Final = (
    Step(value=None, color="green"),
    Step(value=0.01, color="orange"),
    Step(value=0.05, color="red"),
)


def _failing(by: str = "") -> str:
    # A code that was never answered has no series: without the second part there would be no line instead of 0.
    requests = rate("serve_proxy_requests_total", OF_ENDPOINT, by=by)
    return share(
        f"({rate('serve_proxy_requests_total', OF_ENDPOINT, _FAILED, by=by)} or {requests} * 0)", requests
    )


_GLANCE: Final = Row(
    title="At a glance",
    panels=(
        Panel(
            title="Processes up",
            description="Processes that answer Prometheus, by what they are. One too few: look at Bus and hosts.",
            unit="none",
            kind=Kind.NUMBER,
            width=7,
            height=4,
            queries=(Query(expr="sum by (job) (up)", legend="{{job}}"),),
        ),
        Panel(
            title="Alerts firing",
            description="Each is explained in docs/runbook.md; the row below shows which.",
            unit="none",
            kind=Kind.NUMBER,
            width=3,
            height=4,
            steps=common.RED_FROM_ONE,
            queries=(Query(expr='count(ALERTS{alertstate="firing"}) or vector(0)', legend="alerts"),),
        ),
        Panel(
            title="Leaders",
            description="1 is right: one controller decides. 0: nothing is repaired and commands are refused.",
            unit="none",
            kind=Kind.NUMBER,
            width=3,
            height=4,
            steps=(*common.RED_BELOW_ONE, Step(value=2, color="red")),
            queries=(Query(expr=total("serve_controller_leader"), legend="leaders"),),
        ),
        Panel(
            title="Live hosts",
            description="Replica hosts that report. Without one no replica can run.",
            unit="none",
            kind=Kind.NUMBER,
            width=3,
            height=4,
            steps=common.RED_BELOW_ONE,
            queries=(Query(expr=total("serve_controller_hosts", 'status="live"'), legend="hosts"),),
        ),
        Panel(
            title="Postgres, NATS",
            description="Whether the leader reaches Postgres, and whether every connection to NATS is up.",
            unit="none",
            kind=Kind.NUMBER,
            width=4,
            height=4,
            steps=common.RED_BELOW_ONE,
            texts=(("0", "away"), ("1", "there")),
            queries=(
                Query(expr="min(serve_controller_store_available)", legend="Postgres"),
                Query(expr="min(serve_bus_connected)", legend="NATS"),
            ),
        ),
        Panel(
            title="Failing requests",
            description="Share of answers with status 500 and above, of the chosen endpoints.",
            unit="percentunit",
            kind=Kind.NUMBER,
            width=4,
            height=4,
            steps=_SHARE_STEPS,
            queries=(Query(expr=_failing(), legend="share"),),
        ),
        Panel(
            title="Alerts",
            description="Which alerts fire and since when; empty is good. What to do is in docs/runbook.md under the "
            "name.",
            unit="none",
            kind=Kind.STATES,
            width=24,
            height=4,
            steps=common.RED_FROM_ONE,
            texts=(("1", "fires"),),
            queries=(Query(expr='max by (alertname) (ALERTS{alertstate="firing"})', legend="{{alertname}}"),),
        ),
    ),
)

_TRAFFIC: Final = Row(
    title="What callers get",
    panels=(
        Panel(
            title="Endpoints",
            description="Of the last moments, one line for each endpoint; the empty name is of requests without a "
            "route.",
            unit="none",
            kind=Kind.TABLE,
            width=24,
            group_by="endpoint_tag",
            heading="Endpoint",
            queries=(
                Query(
                    expr=rate("serve_proxy_requests_total", OF_ENDPOINT, by="endpoint_tag"),
                    legend="Requests",
                    unit="reqps",
                ),
                Query(expr=_failing("endpoint_tag"), legend="Failing", unit="percentunit"),
                *(
                    Query(
                        expr=quantile(q, "serve_proxy_request_seconds", OF_ENDPOINT, by="endpoint_tag"),
                        legend=f"p{round(q * 100)}",
                        unit="s",
                    )
                    for q in (0.5, 0.95, 0.99)
                ),
            ),
        ),
        Panel(
            title="Requests per second",
            description="Answered by the proxies, by endpoint. A click leads to the backend of the same name.",
            unit="reqps",
            stacked=True,
            link=common.TO_BACKEND_OF_ENDPOINT,
            queries=(
                Query(
                    expr=rate("serve_proxy_requests_total", OF_ENDPOINT, by="endpoint_tag"),
                    legend="{{endpoint_tag}}",
                ),
            ),
        ),
        Panel(
            title="Answers by method and status",
            description="499: the client went away before its answer; 502: a replica died or broke off; "
            "503: refused, for the queue is full, a circuit is open or nothing runs; 504: over its time.",
            unit="reqps",
            stacked=True,
            queries=(
                Query(
                    expr=rate("serve_proxy_requests_total", OF_ENDPOINT, by="method, code"),
                    legend="{{method}} {{code}}",
                ),
            ),
        ),
        Panel(
            title="Failing, by endpoint",
            description="Share of answers with status 500 and above. Above 5 % for a minute an alert fires.",
            unit="percentunit",
            steps=_SHARE_STEPS,
            link=common.TO_BACKEND_OF_ENDPOINT,
            queries=(Query(expr=_failing("endpoint_tag"), legend="{{endpoint_tag}}"),),
        ),
        Panel(
            title="Time of a request",
            description="From the head of a request to the end of its answer, queueing included; "
            "all chosen endpoints together.",
            unit="s",
            queries=common.quantiles("serve_proxy_request_seconds", OF_ENDPOINT),
        ),
        Panel(
            title="Slowest hundredth, by endpoint",
            description="99 of 100 requests took no longer (p99).",
            unit="s",
            link=common.TO_BACKEND_OF_ENDPOINT,
            queries=common.quantiles(
                "serve_proxy_request_seconds", OF_ENDPOINT, by="endpoint_tag", shares=(0.99,)
            ),
        ),
        Panel(
            title="Connections of clients",
            description="Open HTTP connections, WebSockets included, by proxy. Very uneven: the ingress or a "
            "client keeps to one proxy.",
            unit="none",
            stacked=True,
            link=common.TO_PROCESS,
            queries=(Query(expr=total("serve_proxy_connections", by="instance"), legend="{{instance}}"),),
        ),
        Panel(
            title="Memory of request bodies",
            description="What the bodies under way may need, by proxy. At MUSTER_BODY_MEMORY_MAX further requests "
            "with a body get 503 and Retry-After.",
            unit="bytes",
            link=common.TO_PROCESS,
            queries=(Query(expr=total("serve_proxy_body_bytes", by="instance"), legend="{{instance}}"),),
        ),
        Panel(
            title="Bodies refused",
            description="Requests that got 503 in each minute because the bodies of others take all the memory "
            "that a proxy has for them.",
            unit="none",
            link=common.TO_PROCESS,
            queries=(
                Query(
                    expr=increase("serve_proxy_refused_bodies_total", by="instance"), legend="{{instance}}"
                ),
            ),
        ),
    ),
)

BOARD: Final = Board(
    uid=common.OVERVIEW,
    title="Muster: Overview",
    description="Traffic, errors, times and what is near its limit.",
    variables=(common.ENDPOINTS, common.BACKENDS),
    annotations=(common.DEPLOYS, common.SCALINGS_OF_BACKEND, common.LEADER_CHANGES),
    rows=(_GLANCE, _TRAFFIC, SATURATION, PROTECTION),
)
