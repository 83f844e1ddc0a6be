"""The processes themselves and what connects them."""

from __future__ import annotations

from typing import Final

from deploy.grafana.boards import common
from deploy.grafana.boards.model import Board, Kind, Panel, Query, Row, Step
from deploy.grafana.boards.nats_servers import NATS_SERVERS
from deploy.grafana.boards.promql import OF_INSTANCE, increase, rate, series, total

_BUS: Final = Row(
    title="The bus",
    panels=(
        Panel(
            title="Connected to NATS",
            description="Each process by connection. All away at once: NATS is down. One of them: that process is "
            "cut off.",
            unit="none",
            kind=Kind.STATES,
            width=12,
            steps=common.RED_BELOW_ONE,
            texts=(("0", "away"), ("1", "connected")),
            queries=(
                Query(
                    expr=f"max by (instance, connection) (serve_bus_connected{{{OF_INSTANCE}}})",
                    legend="{{instance}} {{connection}}",
                ),
            ),
        ),
        Panel(
            title="Reconnects",
            description="In each minute, by process; replicas' are added up on their host. "
            "Many of one process: a network or a server that drops slow readers.",
            unit="none",
            width=12,
            stacked=True,
            queries=tuple(
                Query(expr=increase(metric, OF_INSTANCE, by="instance"), legend="{{instance}} " + of)
                for metric, of in (
                    ("serve_controller_nats_reconnects_total", "controller"),
                    ("serve_proxy_nats_reconnects_total", "proxy"),
                    ("serve_host_nats_reconnects_total", "host"),
                    ("serve_replica_nats_reconnects_total", "replicas"),
                )
            ),
        ),
        Panel(
            title="Unsent bytes",
            description="For NATS, that the operating system has not taken yet. Rising: NATS or the network is "
            "too slow.",
            unit="bytes",
            stacked=True,
            queries=(
                Query(
                    expr=total("serve_bus_pending_bytes", OF_INSTANCE, by="instance"), legend="{{instance}}"
                ),
            ),
        ),
        Panel(
            title="Direct links",
            description="Of proxies to replicas: open now (unix on one machine, tcp between machines), and in each "
            "minute opened, failed and ended, and frames that took them. Ended ones in a row: replicas that die, or "
            "read too slowly.",
            unit="none",
            queries=(
                Query(
                    expr=total("serve_proxy_direct_links", OF_INSTANCE, by="instance, transport"),
                    legend="{{instance}} open {{transport}}",
                ),
                Query(
                    expr=increase("serve_proxy_direct_dials_total", OF_INSTANCE, by="instance, outcome"),
                    legend="{{instance}} {{outcome}}",
                ),
                Query(
                    expr=increase("serve_proxy_direct_frames_total", OF_INSTANCE, by="instance, direction"),
                    legend="{{instance}} frames {{direction}}",
                ),
            ),
        ),
        Panel(
            title="Refused by NATS, or dropped",
            description="Messages that a process may not send or hear, in each minute. Anything above 0 is a "
            "fault of the installation: see deploy/nats/nats.conf. And calls that were to be answered elsewhere than "
            "in an inbox, which somebody's attack is more likely than a mistake.",
            unit="none",
            steps=common.RED_FROM_ONE,
            queries=(
                Query(
                    expr=increase("serve_bus_permission_violations_total", OF_INSTANCE, by="instance"),
                    legend="{{instance}}",
                ),
                Query(
                    expr=increase("serve_proxy_dropped_calls_total", OF_INSTANCE, by="instance"),
                    legend="{{instance}}: calls to a proxy without an inbox",
                ),
                Query(
                    expr=increase("serve_controller_dropped_calls_total", OF_INSTANCE, by="instance"),
                    legend="{{instance}}: admin calls without an inbox",
                ),
            ),
        ),
        Panel(
            title="Messages that were refused",
            description="That a service could not read or take in, in each minute, by kind. Anything above 0 is a "
            "sender of another version, or one that is up to no good: the log line message_refused names it.",
            unit="none",
            steps=common.RED_FROM_ONE,
            queries=(
                Query(
                    expr=increase("serve_messages_refused_total", OF_INSTANCE, by="instance, message"),
                    legend="{{instance}} {{message}}",
                ),
            ),
        ),
        Panel(
            title="Replicas connected to NATS",
            description="Whose data connection is up, by host.",
            unit="none",
            stacked=True,
            steps_between=True,
            queries=(
                Query(
                    expr=total("serve_replica_bus_connected", OF_INSTANCE, by="instance"),
                    legend="{{instance}}",
                ),
            ),
        ),
    ),
)

_HOSTS: Final = Row(
    title="Hosts and proxies",
    panels=(
        Panel(
            title="Hosts by status",
            description="As the leader sees them. suspect: silent for 3 s; lost: silent for 8 s, replaced "
            "elsewhere.",
            unit="none",
            width=6,
            stacked=True,
            steps_between=True,
            queries=(Query(expr=total("serve_controller_hosts", by="status"), legend="{{status}}"),),
        ),
        Panel(
            title="Replicas by status, on each host",
            description="As the hosts see them.",
            unit="none",
            width=6,
            stacked=True,
            steps_between=True,
            queries=(
                Query(
                    expr=total("serve_host_replicas", OF_INSTANCE, by="instance, status") + " > 0",
                    legend="{{instance}} {{status}}",
                ),
            ),
        ),
        Panel(
            title="Refused by replicas, by host",
            description="Busy or draining; routers try elsewhere.",
            unit="reqps",
            width=6,
            stacked=True,
            queries=(
                Query(
                    expr=rate("serve_replica_refused_total", OF_INSTANCE, by="instance, reason"),
                    legend="{{instance}} {{reason}}",
                ),
            ),
        ),
        Panel(
            title="Requests per second, by proxy",
            description="Very uneven: clients keep their connections to one of them.",
            unit="reqps",
            width=6,
            stacked=True,
            queries=(
                Query(
                    expr=rate("serve_proxy_requests_total", OF_INSTANCE, by="instance"), legend="{{instance}}"
                ),
            ),
        ),
    ),
)

_PROCESSES: Final = Row(
    title="Processes",
    panels=(
        Panel(
            title="Up",
            description="Whether each process answers Prometheus.",
            unit="none",
            kind=Kind.STATES,
            width=12,
            steps=common.RED_BELOW_ONE,
            texts=(("0", "down"), ("1", "up")),
            queries=(Query(expr=series("up", OF_INSTANCE), legend="{{job}} {{instance}}"),),
        ),
        Panel(
            title="Running since",
            description="How long each process has run: one that is young again and again crashes or is "
            "restarted.",
            unit="s",
            width=12,
            queries=(
                Query(
                    expr=f"time() - {series('process_start_time_seconds', OF_INSTANCE)}",
                    legend="{{job}} {{instance}}",
                ),
            ),
        ),
        Panel(
            title="CPU",
            description="CPUs in use. A proxy process at 1 is full: add another one.",
            unit="none",
            queries=(
                Query(
                    expr=rate("process_cpu_seconds_total", OF_INSTANCE, by="job, instance"),
                    legend="{{job}} {{instance}}",
                ),
            ),
        ),
        Panel(
            title="Memory",
            description="Resident; replicas' is not in it.",
            unit="bytes",
            queries=(
                Query(
                    expr=series("process_resident_memory_bytes", OF_INSTANCE), legend="{{job}} {{instance}}"
                ),
            ),
        ),
        Panel(
            title="Open files",
            description="Sockets included, of those that the process may have. Above 80 % an alert fires.",
            unit="percentunit",
            steps=(Step(value=None, color="green"), Step(value=0.8, color="red")),
            queries=(
                Query(
                    expr=f"{series('process_open_fds', OF_INSTANCE)} / {series('process_max_fds', OF_INSTANCE)}",
                    legend="{{job}} {{instance}}",
                ),
            ),
        ),
        Panel(
            title="Lag of event loops",
            description="How late the process comes to what is due (p99). Above a quarter of a second: too little "
            "CPU, or a loop that is blocked.",
            unit="s",
            steps=(Step(value=None, color="green"), Step(value=0.25, color="red")),
            queries=common.quantiles(
                "serve_loop_lag_seconds", OF_INSTANCE, by="job, instance", shares=(0.99,)
            ),
        ),
        Panel(
            title="Garbage collections",
            description="Of Python, in a second, by process.",
            unit="ops",
            queries=(
                Query(
                    expr=rate("python_gc_collections_total", OF_INSTANCE, by="job, instance"),
                    legend="{{job}} {{instance}}",
                ),
            ),
        ),
        Panel(
            title="Spans that were dropped",
            description="Of traces, in each minute, where tracing is on; replicas' are added up on their host. queue: "
            "more spans than can be sent; receiver: it is away, or takes none. Traces have holes then, and requests "
            "notice nothing.",
            unit="none",
            steps=common.RED_FROM_ONE,
            queries=(
                Query(
                    expr=increase("serve_trace_spans_dropped_total", OF_INSTANCE, by="instance, reason"),
                    legend="{{instance}} {{reason}}",
                ),
            ),
        ),
        Panel(
            title="Log lines that were dropped",
            description="That standard error never got, in each minute. disk_full: the disk that logs are on; "
            "too_many: they came faster than they could be written. Nothing else depends on them.",
            unit="none",
            steps=common.RED_FROM_ONE,
            queries=(
                Query(
                    expr=increase("serve_log_lines_dropped_total", OF_INSTANCE, by="instance, reason"),
                    legend="{{instance}} {{reason}}",
                ),
            ),
        ),
        Panel(
            title="Samples per scrape",
            description="How much each process exports. It grows with endpoints and backends, never with requests "
            "or replicas.",
            unit="none",
            queries=(
                Query(expr=series("scrape_samples_scraped", OF_INSTANCE), legend="{{job}} {{instance}}"),
            ),
        ),
    ),
)

BOARD: Final = Board(
    uid=common.BUS_AND_HOSTS,
    title="Muster: Bus and hosts",
    description="NATS and the connections to it, replica hosts, proxies and the processes themselves.",
    variables=(common.INSTANCES,),
    annotations=(common.DEPLOYS, common.scalings(), common.LEADER_CHANGES),
    rows=(_BUS, NATS_SERVERS, _HOSTS, _PROCESSES),
)
