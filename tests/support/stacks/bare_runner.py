"""One proxy or one replica as a process of its own, without a controller, a host or Ray around it.

Why not the services' own entry points: a test also has to look inside, at what is held when nothing should be. Each
line on standard input asks for a look, answered by one line of JSON; the end of input ends the process in order.

Run as ``python -m tests.support.stacks.bare_runner proxy|replica NATS_URL NAME [ORDER]``.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import json
import logging
import os
import sys
from typing import Any

import msgspec
import psutil
import structlog
import uvloop

from serve_common.config.backend import HttpOptions, ReplicaConfig
from serve_common.names import BackendTag, ProxyId, ReplicaTag
from serve_common.protocol.reports import ReplicaGoal
from serve_common.runtime.settings import BusSettings, DirectMode, OperationsSettings
from serve_common.telemetry.trace_context import read_tracing_settings
from serve_proxy.settings import ProxySettings
from serve_proxy.wiring import Proxy
from serve_replica_host.adapters.replica_metrics import make_replica_metrics
from serve_replica_host.replica.process import ReplicaProcess, StartReplicaRequest


class RunOrder(msgspec.Struct, kw_only=True):
    """What a replica is to run, or what a proxy is to allow."""

    import_path: str = ""
    app_dir: str = ""
    init_args: list[Any] = []
    user_config: Any = None
    max_concurrent_queries: int = 100
    request_timeout_s: float = 30.0
    body_bytes_max: int = 10 * 1024 * 1024
    body_rate_min: int = HttpOptions().body_rate_min
    direct: DirectMode = DirectMode.BODIES
    direct_dir: str = ""
    """Of the sockets of direct links; empty: there are none."""


def bus_settings(url: str, role: str, order: RunOrder) -> BusSettings:
    return BusSettings(
        servers=[url],
        user="",
        password="",
        inbox_prefix=f"_INBOX_{role}",
        subject_prefix="serve",
        direct=order.direct,
        direct_dir=order.direct_dir,
    )


def proxy_settings(url: str, proxy_id: str, order: RunOrder) -> ProxySettings:
    return ProxySettings(
        proxy_id=ProxyId(proxy_id),
        bus=bus_settings(url, "proxy", order),
        operations=OperationsSettings(host="127.0.0.1", port=0),
        http_host="127.0.0.1",
        http_port=0,
        http=HttpOptions(
            request_timeout_s=order.request_timeout_s,
            body_bytes_max=order.body_bytes_max,
            body_rate_min=order.body_rate_min,
        ),
        drain_timeout_s=2.0,
        bus_wait_s=5.0,
        tracing=read_tracing_settings(os.environ),
    )


def start_order(url: str, replica_tag: str, order: RunOrder) -> StartReplicaRequest:
    goal = ReplicaGoal(
        replica_tag=ReplicaTag(replica_tag),
        backend_tag=BackendTag(replica_tag.partition("#")[0]),
        replica_config=ReplicaConfig(
            import_path=order.import_path, app_dir=order.app_dir, init_args=order.init_args
        ),
        config_version=1,
        user_config=order.user_config,
        max_concurrent_queries=order.max_concurrent_queries,
        graceful_shutdown_timeout_s=5.0,
        health_check_period_s=10.0,
        health_check_timeout_s=10.0,
        start_timeout_s=30.0,
    )
    return StartReplicaRequest(goal=goal, bus=bus_settings(url, "replica", order), app_dir=order.app_dir)


def tell(content: dict[str, Any]) -> None:
    print(json.dumps(content), flush=True)


def rss_bytes() -> int:
    """Of what is held: what the C library keeps for the next allocation is given back first, where it knows how."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    return psutil.Process().memory_info().rss


def names_of(tasks: set[asyncio.Task[Any]]) -> list[str]:
    """Of those that belong to a request, or to nobody: the parts' own are few, and named by them."""
    return sorted(task.get_name() for task in tasks if not task.done())


async def run_proxy(url: str, proxy_id: str, order: RunOrder) -> None:
    proxy = Proxy(proxy_settings(url, proxy_id, order), on_failure=lambda: tell({"failed": True}))
    address = await proxy.start()
    tell({"address": address})
    loop = asyncio.get_running_loop()
    while await loop.run_in_executor(None, sys.stdin.readline):
        routes, dispatcher = proxy._ingress.routes, proxy._dispatcher
        tell(
            {
                "slots": sum(router.in_flight for router in routes.routers.values()),
                "queued": sum(router.queue_depth for router in routes.routers.values()),
                "calls": len(dispatcher.calls),
                "replies": len(dispatcher._outgoing._replies),
                "http": proxy.http.in_flight,
                "tasks": names_of(asyncio.all_tasks()),
                "rss_bytes": rss_bytes(),
            }
        )
    await proxy.close()


def run_replica(url: str, replica_tag: str, order: RunOrder) -> None:
    process = ReplicaProcess(
        start_order(url, replica_tag, order), make_replica_metrics(BackendTag(replica_tag.partition("#")[0]))
    )
    error = process.start()
    tell({"error": error})
    if error is None:
        while sys.stdin.readline():
            tell(
                {
                    "slots": process.in_flight,
                    "tasks": names_of(asyncio.all_tasks(process._user.loop)),
                    "bus_tasks": names_of(asyncio.all_tasks(process._bus.loop)),
                    "rss_bytes": rss_bytes(),
                }
            )
    process.drain()


def main() -> None:
    kind, url, name, *rest = sys.argv[1:]
    order = msgspec.json.decode(rest[0], type=RunOrder) if rest else RunOrder()
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
        logger_factory=structlog.PrintLoggerFactory(file=sys.stderr),
    )
    with contextlib.suppress(KeyboardInterrupt):
        if kind == "proxy":
            uvloop.run(run_proxy(url, name, order))
        else:
            run_replica(url, name, order)


if __name__ == "__main__":
    main()
