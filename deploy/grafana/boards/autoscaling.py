"""What the autoscaler saw, what it wanted, what came of it, and why."""

from __future__ import annotations

from typing import Final

from deploy.grafana.boards import common
from deploy.grafana.boards.model import Board, Kind, Panel, Query, Row, Step
from deploy.grafana.boards.promql import OF_BACKEND, increase, rate, total

_VERDICTS: Final = (
    "steady: as many as the load asks for. waits_up, waits_down: a delay is not over. up, down: moved. "
    "panic: added at once, for a burst. held: the load is not known, or a panic is not over. "
    "woken: from zero, by a request that waits. In words: `muster autoscaling list`."
)
_IN_REPLICAS: Final = rate("serve_replica_ongoing_seconds_total", OF_BACKEND, by="backend_tag")
_QUEUED: Final = rate("serve_router_queued_seconds_total", OF_BACKEND, by="backend_tag")

_WHY: Final = Row(
    title="Why it moved or held",
    panels=(
        Panel(
            title="Verdicts",
            description=_VERDICTS,
            unit="none",
            kind=Kind.STATES,
            width=18,
            texts=(("1", " "),),
            queries=(
                Query(
                    expr=f"max by (backend_tag, verdict) (serve_autoscaler_verdict{{{OF_BACKEND}}} == 1)",
                    legend="{{backend_tag}} {{verdict}}",
                ),
            ),
        ),
        Panel(
            title="Paused",
            description="By `muster autoscaling pause`, or because the number was set by hand: nothing moves by "
            "itself.",
            unit="none",
            kind=Kind.NUMBER,
            width=6,
            steps=(Step(value=None, color="green"), Step(value=1, color="orange")),
            texts=common.NO_OR_YES,
            queries=(
                Query(
                    expr=f"max by (backend_tag) (serve_autoscaler_paused{{{OF_BACKEND}}})",
                    legend="{{backend_tag}}",
                ),
            ),
        ),
    ),
)

_MOVES: Final = Row(
    title="Seen, wanted, got",
    panels=(
        Panel(
            title="Load",
            description="What decisions went by (seen: ongoing and queued requests over the look-back period, or "
            "what the backend's query gave), beside the mean of the last moments, of the same "
            "counters.",
            unit="none",
            width=12,
            queries=(
                Query(
                    expr=f"max by (backend_tag) (serve_autoscaler_seen_requests{{{OF_BACKEND}}})",
                    legend="{{backend_tag}} seen",
                ),
                Query(
                    expr=f"({_IN_REPLICAS} + {_QUEUED}) or {_IN_REPLICAS} or {_QUEUED}",
                    legend="{{backend_tag}} now",
                ),
            ),
        ),
        Panel(
            title="Replicas",
            description="Wanted by the load alone, decided within limits and delays, and serving. Decided above "
            "serving for long: there is no room, or they do not start.",
            unit="none",
            width=12,
            steps_between=True,
            link=common.TO_BACKEND,
            queries=(
                Query(
                    expr=f"max by (backend_tag) (serve_autoscaler_wanted_replicas{{{OF_BACKEND}}})",
                    legend="{{backend_tag}} wanted",
                ),
                Query(
                    expr=f"max by (backend_tag) (serve_autoscaler_target_replicas{{{OF_BACKEND}}})",
                    legend="{{backend_tag}} decided",
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
            title="Limits",
            description="min_replicas and max_replicas, with what was decided. At the maximum with more wanted, "
            "raise it.",
            unit="none",
            width=12,
            steps_between=True,
            queries=(
                Query(
                    expr=f"max by (backend_tag) (serve_autoscaler_min_replicas{{{OF_BACKEND}}})",
                    legend="{{backend_tag}} least",
                ),
                Query(
                    expr=f"max by (backend_tag) (serve_autoscaler_target_replicas{{{OF_BACKEND}}})",
                    legend="{{backend_tag}} decided",
                ),
                Query(
                    expr=f"max by (backend_tag) (serve_autoscaler_max_replicas{{{OF_BACKEND}}})",
                    legend="{{backend_tag}} most",
                ),
            ),
        ),
        Panel(
            title="Waiting for a replica",
            description="Requests in the proxies' queues: what scaling up is to end.",
            unit="none",
            width=12,
            stacked=True,
            queries=(
                Query(
                    expr=total("serve_proxy_queue_depth", OF_BACKEND, by="backend_tag"),
                    legend="{{backend_tag}}",
                ),
            ),
        ),
    ),
)

_DATA: Final = Row(
    title="What it goes by",
    panels=(
        Panel(
            title="Age of the load",
            description="Of the newest whole reading. It rises up to the backend's metrics_interval_s. While it is "
            "too old, nothing is scaled, and after a minute of that an alert fires.",
            unit="s",
            queries=(
                Query(
                    expr=f"max by (backend_tag) (serve_autoscaler_data_age_seconds{{{OF_BACKEND}}})",
                    legend="{{backend_tag}}",
                ),
            ),
        ),
        Panel(
            title="Readings",
            description="In each minute, by where they were asked for and what came of it. scrape: Prometheus "
            "does not answer, or there is none, and the services were asked directly.",
            unit="none",
            stacked=True,
            queries=(
                Query(
                    expr=increase("serve_autoscaler_readings_total", by="source, outcome"),
                    legend="{{source}} {{outcome}}",
                ),
            ),
        ),
        Panel(
            title="Decisions",
            description="In each minute, by their reason.",
            unit="none",
            stacked=True,
            queries=(
                Query(
                    expr=increase("serve_autoscaler_decisions_total", OF_BACKEND, by="backend_tag, verdict"),
                    legend="{{backend_tag}} {{verdict}}",
                ),
            ),
        ),
        Panel(
            title="Processes in a reading",
            description="Proxies and replica hosts that Prometheus sees, beside those that live. A reading that "
            "misses one of them is not used.",
            unit="none",
            steps_between=True,
            queries=(
                Query(expr="count(serve_proxy_info)", legend="proxies scraped"),
                Query(expr=total("serve_controller_proxies", 'status="live"'), legend="proxies live"),
                Query(expr="count(serve_host_info)", legend="hosts scraped"),
                Query(expr=total("serve_controller_hosts", 'status="live"'), legend="hosts live"),
            ),
        ),
        Panel(
            title="Wake-ups",
            description="In each minute: times that a waiting request woke a backend that had no replica.",
            unit="none",
            queries=(
                Query(
                    expr=increase("serve_autoscaler_wakeups_total", OF_BACKEND, by="backend_tag"),
                    legend="{{backend_tag}}",
                ),
            ),
        ),
        Panel(
            title="Time to start a replica",
            description="What a scaling up, and above all one from zero, waits for.",
            unit="s",
            queries=common.quantiles(
                "serve_replica_start_seconds", OF_BACKEND, by="backend_tag, kind", shares=(0.5, 0.95)
            ),
        ),
    ),
)

BOARD: Final = Board(
    uid=common.AUTOSCALING,
    title="Muster: Autoscaling",
    description="What the autoscaler saw, wanted and did, and why.",
    variables=(common.BACKENDS,),
    annotations=(common.DEPLOYS, common.SCALINGS_OF_BACKEND, common.LEADER_CHANGES),
    rows=(_WHY, _MOVES, _DATA),
)
