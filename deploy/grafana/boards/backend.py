"""One backend, or a few: its replicas, what they work on, and what their code does."""

from __future__ import annotations

from typing import Final

from deploy.grafana.boards import common
from deploy.grafana.boards.batches_and_models import BATCHES, MODELS
from deploy.grafana.boards.model import Board, Panel, Query, Row
from deploy.grafana.boards.promql import OF_BACKEND, increase, rate, total

_REPLICAS: Final = Row(
    title="Replicas",
    panels=(
        Panel(
            title="Replicas by state",
            description="As the controller decided. should_start for long: no host has room; see `muster status "
            "NAME`.",
            unit="none",
            stacked=True,
            steps_between=True,
            queries=(
                Query(
                    expr=total("serve_controller_replicas", OF_BACKEND, by="backend_tag, state") + " > 0",
                    legend="{{backend_tag}} {{state}}",
                ),
            ),
        ),
        Panel(
            title="Wanted and serving",
            description="How many replicas should run, and how many take requests.",
            unit="none",
            steps_between=True,
            link=common.TO_AUTOSCALING,
            queries=(
                Query(
                    expr=total("serve_controller_replicas_wanted", OF_BACKEND, by="backend_tag"),
                    legend="{{backend_tag}} wanted",
                ),
                Query(
                    expr=total(
                        "serve_controller_replicas", OF_BACKEND, 'state=~"running|updating"', by="backend_tag"
                    ),
                    legend="{{backend_tag}} serving",
                ),
            ),
        ),
        Panel(
            title="Failed replicas",
            description="In each minute: replicas that failed to start, died unasked or failed their health "
            "checks.",
            unit="none",
            stacked=True,
            queries=(
                Query(
                    expr=increase("serve_replica_failures_total", OF_BACKEND, by="backend_tag, reason"),
                    legend="{{backend_tag}} {{reason}}",
                ),
            ),
        ),
        Panel(
            title="Starts",
            description="Replicas that became ready in each minute. spare: in a process that was started "
            "ahead; cold: in a new one.",
            unit="none",
            stacked=True,
            queries=(
                Query(
                    expr=increase("serve_replica_start_seconds_count", OF_BACKEND, by="backend_tag, kind"),
                    legend="{{backend_tag}} {{kind}}",
                ),
            ),
        ),
        Panel(
            title="Time to start",
            description="From the order to start a replica until it can take requests; the user's constructor is "
            "in it.",
            unit="s",
            queries=common.quantiles(
                "serve_replica_start_seconds", OF_BACKEND, by="backend_tag, kind", shares=(0.5, 0.95)
            ),
        ),
        Panel(
            title="Replicas connected to NATS",
            description="Those whose data connection is up. Fewer than serve: they are cut off, and their "
            "requests fail.",
            unit="none",
            steps_between=True,
            queries=(
                Query(
                    expr=total("serve_replica_bus_connected", OF_BACKEND, by="backend_tag"),
                    legend="{{backend_tag}}",
                ),
                Query(
                    expr=increase("serve_replica_nats_reconnects_total", OF_BACKEND, by="backend_tag"),
                    legend="{{backend_tag}} reconnects in a minute",
                ),
            ),
        ),
    ),
)

_LOAD: Final = Row(
    title="Load",
    panels=(
        Panel(
            title="Ongoing requests, mean",
            description="Requests in replicas plus those that wait in routers, each once: what autoscaling goes "
            "by. Streams and WebSockets count while they last.",
            unit="none",
            stacked=True,
            link=common.TO_AUTOSCALING,
            queries=(
                Query(
                    expr=rate("serve_replica_ongoing_seconds_total", OF_BACKEND, by="backend_tag"),
                    legend="{{backend_tag}} in replicas",
                ),
                Query(
                    expr=rate("serve_router_queued_seconds_total", OF_BACKEND, by="backend_tag"),
                    legend="{{backend_tag}} queued",
                ),
            ),
        ),
        Panel(
            title="In flight and its limit",
            description="At the moment of the scrape: as the proxies count (sent), as the replicas do (worked "
            "on), and how many replicas may work on at once.",
            unit="none",
            queries=(
                Query(
                    expr=total("serve_proxy_in_flight_requests", OF_BACKEND, by="backend_tag"),
                    legend="{{backend_tag}} sent",
                ),
                Query(
                    expr=total("serve_replica_in_flight_requests", OF_BACKEND, by="backend_tag"),
                    legend="{{backend_tag}} worked on",
                ),
                Query(
                    expr=total("serve_replica_in_flight_limit", OF_BACKEND, by="backend_tag"),
                    legend="{{backend_tag}} limit",
                ),
            ),
        ),
        Panel(
            title="Waiting",
            description="In the queues of proxies and handles, and in replicas whose slots other routers took.",
            unit="none",
            stacked=True,
            queries=(
                Query(
                    expr=total("serve_proxy_queue_depth", OF_BACKEND, by="backend_tag"),
                    legend="{{backend_tag}} in proxies",
                ),
                Query(
                    expr=total("serve_handle_queue_depth", OF_BACKEND, by="backend_tag"),
                    legend="{{backend_tag}} in handles",
                ),
                Query(
                    expr=total("serve_replica_waiting_requests", OF_BACKEND, by="backend_tag"),
                    legend="{{backend_tag}} in replicas",
                ),
            ),
        ),
        Panel(
            title="Streams and WebSockets",
            description="Answers that have begun and not ended, and open WebSockets.",
            unit="none",
            stacked=True,
            queries=(
                Query(
                    expr=total("serve_replica_streams", OF_BACKEND, by="backend_tag"),
                    legend="{{backend_tag}} streams",
                ),
                Query(
                    expr=total("serve_replica_websockets", OF_BACKEND, by="backend_tag"),
                    legend="{{backend_tag}} WebSockets",
                ),
            ),
        ),
        Panel(
            title="Refused by replicas",
            description="Busy: several routers chose the same one; draining: it is about to stop. Routers try "
            "elsewhere.",
            unit="reqps",
            stacked=True,
            queries=(
                Query(
                    expr=rate("serve_replica_refused_total", OF_BACKEND, by="backend_tag, reason"),
                    legend="{{backend_tag}} {{reason}}",
                ),
            ),
        ),
        Panel(
            title="Refused by proxies",
            description="Sent to no replica: the queue was full, the circuit open, or the budget for second "
            "sendings spent.",
            unit="reqps",
            stacked=True,
            queries=(
                Query(
                    expr=rate("serve_proxy_refused_requests_total", OF_BACKEND, by="backend_tag, reason"),
                    legend="{{backend_tag}} {{reason}}",
                ),
            ),
        ),
    ),
)

_CODE: Final = Row(
    title="The user's code",
    panels=(
        Panel(
            title="Answers",
            description="Requests that left replicas, by status; those of handles and of other NATS clients "
            "included.",
            unit="reqps",
            stacked=True,
            queries=(
                Query(
                    expr=rate("serve_replica_requests_total", OF_BACKEND, by="backend_tag, code"),
                    legend="{{backend_tag}} {{code}}",
                ),
            ),
        ),
        Panel(
            title="Time inside replicas",
            description="From a request's first frame to its answer's last one. What is longer on Overview was "
            "spent waiting.",
            unit="s",
            queries=common.quantiles("serve_replica_request_seconds", OF_BACKEND, by="backend_tag"),
        ),
        Panel(
            title="Lag of the loop that user code runs on",
            description="Half a second and more: user code blocks its event loop, and nothing else of that "
            "replica goes on.",
            unit="s",
            queries=common.quantiles(
                "serve_replica_loop_lag_seconds", OF_BACKEND, by="backend_tag", shares=(0.5, 0.99)
            ),
        ),
    ),
)

BOARD: Final = Board(
    uid=common.BACKEND,
    title="Muster: Backend",
    description="Replicas, load, answers, batches and models of single backends.",
    variables=(common.BACKENDS,),
    annotations=(common.DEPLOYS, common.SCALINGS_OF_BACKEND, common.LEADER_CHANGES),
    rows=(_REPLICAS, _LOAD, _CODE, BATCHES, MODELS),
)
