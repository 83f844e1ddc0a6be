"""The NATS servers' own state: the second row of Bus and hosts."""

from __future__ import annotations

from typing import Final

from deploy.grafana.boards import common
from deploy.grafana.boards.model import Kind, Panel, Query, Row, Step
from deploy.grafana.boards.promql import increase, rate, share

_SHARE_STEPS: Final = (Step(value=None, color="green"), Step(value=0.8, color="red"))


def _value(metric: str, legend: str = "") -> Query:
    """As whoever leads shows it; for a moment, two may."""
    return Query(expr=_newest(metric), legend=f"{{{{server}}}} {legend}".rstrip())


def _newest(metric: str) -> str:
    return f"max by (server) ({metric})"


def _each_second(metric: str, legend: str) -> Query:
    return Query(expr=rate(metric, by="server"), legend=f"{{{{server}}}} {legend}")


def _each_minute(metric: str, legend: str) -> Query:
    return Query(expr=increase(metric, by="server"), legend=f"{{{{server}}}} {legend}")


NATS_SERVERS: Final = Row(
    title="NATS servers",
    panels=(
        Panel(
            title="State of NATS",
            description="Whether the leading controller can read each server's monitoring port, and whether the "
            "server says that it is well: not so when JetStream was given up, as with a full disk.",
            unit="none",
            kind=Kind.STATES,
            width=12,
            steps=common.RED_BELOW_ONE,
            texts=(("0", "no"), ("1", "yes")),
            queries=(_value("serve_nats_up", "readable"), _value("serve_nats_healthy", "well")),
        ),
        Panel(
            title="NATS running since",
            description="How long each server has run. One that is young again and again crashes, mostly of memory.",
            unit="s",
            width=12,
            queries=(
                Query(
                    expr=f"time() - {_newest('serve_nats_start_time_seconds')}",
                    legend="{{server}}",
                ),
            ),
        ),
        Panel(
            title="Slow consumers",
            description="Connections that the server cut in each minute because they read too slowly, or left its "
            "pings unanswered, and how often it held up a sender for a slow receiver. What was on its way to a cut "
            "connection is lost: requests fail or are sent again.",
            unit="none",
            steps=common.RED_FROM_ONE,
            queries=(
                _each_minute("serve_nats_slow_consumers_total", "too slow"),
                _each_minute("serve_nats_stale_connections_total", "silent"),
                _each_minute("serve_nats_stalled_clients_total", "held up"),
            ),
        ),
        Panel(
            title="Connections to NATS",
            description="Open ones, and how many the server takes: at most so many processes and "
            "replicas can be there.",
            unit="none",
            queries=(
                _value("serve_nats_connections", "open"),
                _value("serve_nats_connections_limit", "limit"),
            ),
        ),
        Panel(
            title="New connections to NATS",
            description="In each minute. Many without a deploy: processes come and go, or are cut off and come back.",
            unit="none",
            queries=(_each_minute("serve_nats_connections_opened_total", "opened"),),
        ),
        Panel(
            title="Messages through NATS",
            description="In a second, that came to the server and that it delivered. Much more delivered than "
            "came: something has many listeners.",
            unit="ops",
            queries=(
                _each_second("serve_nats_received_messages_total", "received"),
                _each_second("serve_nats_sent_messages_total", "delivered"),
            ),
        ),
        Panel(
            title="Bytes through NATS",
            description="In a second. Near what the network between the machines carries, everything becomes slow.",
            unit="binBps",
            queries=(
                _each_second("serve_nats_received_bytes_total", "received"),
                _each_second("serve_nats_sent_bytes_total", "delivered"),
            ),
        ),
        Panel(
            title="CPU of NATS",
            description="CPUs in use, and how many the server may use. Near that, every request waits.",
            unit="none",
            queries=(_value("serve_nats_cpus_used", "used"), _value("serve_nats_cpus", "has")),
        ),
        Panel(
            title="Memory of NATS",
            description="Resident. It rises when receivers are slow, for the server keeps up to 64 MB for each.",
            unit="bytes",
            queries=(_value("serve_nats_memory_bytes"),),
        ),
        Panel(
            title="JetStream, of its limits",
            description="How full its storage and memory are. At 100 % no snapshot and no event is taken: proxies "
            "learn of no change. Above 80 % of the storage an alert fires.",
            unit="percentunit",
            steps=_SHARE_STEPS,
            queries=tuple(
                Query(
                    expr=share(
                        _newest(f"serve_nats_jetstream_{of}_bytes"),
                        _newest(f"serve_nats_jetstream_{of}_limit_bytes"),
                    ),
                    legend=f"{{{{server}}}} {of}",
                )
                for of in ("storage", "memory")
            ),
        ),
        Panel(
            title="JetStream's API",
            description="Requests in a second, and those that were answered with an error. Some errors are ordinary, "
            "such as asking for what is not there; many are a fault, such as a stream that is gone.",
            unit="ops",
            queries=(
                _each_second("serve_nats_jetstream_api_requests_total", "requests"),
                _each_second("serve_nats_jetstream_api_errors_total", "errors"),
            ),
        ),
        Panel(
            title="What NATS holds",
            description="Subscriptions, streams, and consumers of streams: each process that watches the bucket has "
            "one. Rising without more processes: something does not clean up.",
            unit="none",
            queries=(
                _value("serve_nats_subscriptions", "subscriptions"),
                _value("serve_nats_jetstream_streams", "streams"),
                _value("serve_nats_jetstream_consumers", "consumers"),
            ),
        ),
    ),
)
