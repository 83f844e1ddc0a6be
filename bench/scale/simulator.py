"""``python -m bench.scale.simulator``: one process that plays every host and every proxy.

Why a process of its own: its processor time must neither count as the controller's nor delay the clock of the
benchmark. It answers each line on its standard input with its tally, and ends with that input.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from pathlib import Path
from typing import Final

import msgspec
import uvloop

from bench.scale.fleets import HostFleet, ProxyFleet
from bench.scale.tally import Tally
from muster.secrets import Secrets
from serve_common.clock import SystemClock
from serve_common.identities.roles import Role
from serve_common.nats.bucket_watch import BucketWatch
from serve_common.nats.client import close_nats, connect_nats
from serve_common.nats.connection import BusConnection
from serve_common.nats.login import build_login
from serve_common.nats.options import BusOptions
from serve_common.protocol.subjects import Subjects
from serve_common.runtime.tasks import TaskOwner
from serve_common.telemetry.logs import configure_logs
from tests.support.identities import bus_settings

_TICK_S: Final = 0.02
_CONNECT_WITHIN_S: Final = 10.0


class Beat:
    """Lets those report whose turn it is."""

    def __init__(self, hosts: HostFleet, proxies: ProxyFleet, tally: Tally) -> None:
        self._hosts = hosts
        self._proxies = proxies
        self._stats = tally

    async def run(self) -> None:
        """Beat for ever."""
        loop = asyncio.get_running_loop()
        begun = before = loop.time()
        while True:
            await asyncio.sleep(_TICK_S)
            now = loop.time()
            self._stats.late_s = max(self._stats.late_s, now - before - _TICK_S)
            self._hosts.report_turns(before - begun, now - begun)
            self._proxies.report_turns(before - begun, now - begun)
            before = now


async def _connected(url: str, role: Role, secrets: Secrets) -> BusConnection:
    """As all of that role at once: whoever holds their signing key may take any name."""
    settings = bus_settings(secrets, url, role, name="*")
    options = BusOptions(
        servers=[url],
        login=build_login(settings),
        name=f"simulated {role.value}s",
        inbox_prefix=settings.inbox_prefix,
    )
    bus = BusConnection(options, random.Random(1))
    await bus.connect(_CONNECT_WITHIN_S)
    return bus


async def simulate(url: str, secrets: Secrets, hosts: int, proxies: int) -> None:
    """Play until standard input ends."""
    subjects = Subjects()
    tally = Tally()
    started_at = SystemClock().now()
    bus_of_hosts = await _connected(url, Role.HOST, secrets)
    bus_of_proxies = await _connected(url, Role.PROXY, secrets)
    settings = bus_settings(secrets, url, Role.PROXY, name="simulated")
    client = await connect_nats(settings, name="simulated watch", deadline_s=_CONNECT_WITHIN_S)
    host_fleet = HostFleet(bus_of_hosts, subjects, hosts, tally, started_at)
    proxy_fleet = ProxyFleet(bus_of_proxies, subjects, proxies, tally, started_at)
    watch = BucketWatch(client, subjects, proxy_fleet.on_bucket_entries)
    watch.start()
    tasks = TaskOwner("simulator")
    tasks.start(Beat(host_fleet, proxy_fleet, tally).run(), "beat")
    questions = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(questions), sys.stdin
    )
    try:
        while await questions.readline():
            host_fleet.count()
            tally.cpu_s = time.process_time()
            sys.stdout.write(msgspec.json.encode(tally).decode() + "\n")
            sys.stdout.flush()
            tally.late_s = 0.0
    finally:
        await tasks.close(timeout_s=1.0)
        await watch.close()
        await close_nats(client)
        await bus_of_hosts.close()
        await bus_of_proxies.close()


def main() -> None:
    """Read the command line and play."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nats-url", required=True)
    parser.add_argument("--secrets", type=Path, required=True, help="directory of the passwords")
    parser.add_argument("--hosts", type=int, required=True)
    parser.add_argument("--proxies", type=int, required=True)
    options = parser.parse_args()
    configure_logs("simulator")
    uvloop.run(simulate(options.nats_url, Secrets(options.secrets), options.hosts, options.proxies))


if __name__ == "__main__":
    main()
