"""The logs of one replica: its own events, and what its user's code says; to its host, and to the bus."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import final

from serve_common.adapters.logs import configure_replica_logs, log_level
from serve_common.adapters.system_clock import SystemClock
from serve_common.bus.connection import BusConnection
from serve_common.logs.bus_outlet import BusLogOutlet
from serve_common.logs.relay import LogRelay
from serve_common.names import BackendTag, ReplicaTag
from serve_common.subjects import Subjects
from serve_replica_host.replica.caught_prints import CaughtPrints
from serve_replica_host.replica.log_lines import HOST_ID, open_log_way
from serve_replica_host.replica.user_logs import UserLogs


def log_ids(replica_tag: ReplicaTag, backend_tag: BackendTag) -> dict[str, str]:
    """What every line of a replica's bears."""
    ids = {"replica_tag": str(replica_tag), "backend_tag": str(backend_tag)}
    host_id = os.environ.get(HOST_ID)
    if host_id:
        ids["host_id"] = host_id
    return ids


@final
class ReplicaLogs:
    """From its construction on, everything that this process says is a log line."""

    def __init__(
        self,
        replica_tag: ReplicaTag,
        backend_tag: BackendTag,
        way: Callable[[bytes], None] | None = None,
    ) -> None:
        """``way`` takes whole lines, on one thread at a time; None for the way to a host on this machine."""
        ids = log_ids(replica_tag, backend_tag)
        self._replica_tag = replica_tag
        clock = SystemClock()
        lines_ids = {"service": "replica", **ids}
        self._relay = LogRelay(way or open_log_way(), lines_ids, clock)
        self._outlet: BusLogOutlet | None = None
        configure_replica_logs(self._relay, **ids)
        UserLogs(self._relay, lines_ids, clock).catch(log_level())

    def join(self, bus: BusConnection, subjects: Subjects) -> None:
        """Publish from now on; on the connection's loop."""
        self._outlet = BusLogOutlet(self._relay, bus, subjects, "replica", self._replica_tag)

    async def part(self) -> None:
        """Publish what was said so far, and nothing after that; on the connection's loop, before it is closed."""
        if self._outlet is not None:
            await self._outlet.close()

    def end(self) -> None:
        """Hand on everything that was said."""
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, CaughtPrints):
                stream.end()
        self._relay.flush()
