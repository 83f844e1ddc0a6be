"""``python -m bench.scale.simulator``: one process that plays every host and every proxy.

Why a process of its own: its processor time must neither count as the controller's nor delay the clock of the
benchmark. It answers each line on its standard input with its counters, and ends with that input.

Why not the real host's core: that one also drives health checks, reconfigures and processes, each with deadlines;
here a thousand hosts share half a processor, and only what crosses the wire must be as in reality. All hosts share
one connection, all proxies another: a server that serves two thousand of them takes processor time that belongs to the
controller on a small machine; what the controller receives and sends is the same.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

import msgspec
import uvloop

from muster.secrets import Secrets
from serve_common.clock import SystemClock
from serve_common.errors import BusUnavailable
from serve_common.identities.roles import Role
from serve_common.names import HostId, ProxyId, ReplicaTag
from serve_common.nats.bucket_watch import BucketWatch
from serve_common.nats.client import close_nats, connect_nats
from serve_common.nats.connection import BusConnection
from serve_common.nats.login import build_login
from serve_common.nats.options import BusOptions
from serve_common.protocol.reports import (
    HostGoal,
    HostReport,
    LeaderNotice,
    ProxyReport,
    ReplicaReport,
    ReplicaStatus,
)
from serve_common.protocol.subjects import Subjects
from serve_common.runtime.tasks import TaskOwner
from serve_common.telemetry.logs import configure_logs
from tests.support.identities import bus_settings

REPORT_PERIOD_S: Final = 1.0
START_S: Final = 0.05
"""From a goal to RUNNING."""
DRAIN_S: Final = 0.02
_TICK_S: Final = 0.02
_CONNECT_WITHIN_S: Final = 10.0
PROXY_COALESCE_S: Final = 0.01
"""As in the real proxy: changes that come together are reported together."""
RESOURCES = {"CPU": 1_000.0, "GPU": 0.0, "memory": 1e13}
"""Of each host: more than is ever asked for, so that room is never what a change waits for."""


class Counters(msgspec.Struct, kw_only=True):
    """Rises for ever; a figure is the difference between two of them. Bytes are of payloads, without subjects."""

    host_reports: int = 0
    proxy_reports: int = 0
    reports_dropped: int = 0
    """Not sent, because the connection was away or full; then the figures mean nothing."""
    goals: int = 0
    goal_bytes: int = 0
    goals_refused: int = 0
    snapshots: int = 0
    snapshot_bytes: int = 0
    cpu_s: float = 0.0
    """Processor time of the simulator's process."""
    hosts_with_goal: int = 0
    replicas_running: int = 0
    applied_snapshot_id: int = 0
    late_s: float = 0.0
    """How late periodic reports were at most since the last time we were asked."""

    @property
    def reports(self) -> int:
        """Reports of hosts and of proxies."""
        return self.host_reports + self.proxy_reports


class Outcome(msgspec.Struct, frozen=True):
    """What a goal began; both end later, by `SimulatedHost.finish`."""

    started: tuple[ReplicaTag, ...] = ()
    drained: tuple[ReplicaTag, ...] = ()
    is_refused: bool = False


class SimulatedHost:
    """One host. Its methods are steps of a state machine; time and messages are the caller's."""

    def __init__(self, host_id: HostId, started_at: float) -> None:
        """``started_at``: seconds since 1970."""
        self.host_id = host_id
        self._started_at = started_at
        self._sequence = 0
        self._epoch = 0
        self._active = (0, 0)
        self._config_versions: dict[ReplicaTag, int] = {}
        """By replica that the goal names: the configuration it should have."""
        self._replicas: dict[ReplicaTag, ReplicaReport] = {}
        self._next_pid = 1_000

    @property
    def has_goal(self) -> bool:
        """Whether it was ever told what to run."""
        return self._active != (0, 0)

    @property
    def running(self) -> int:
        """How many replicas run."""
        return sum(replica.status is ReplicaStatus.RUNNING for replica in self._replicas.values())

    def on_leader_notice(self, epoch: int) -> None:
        """Refuse goals of older epochs from now on."""
        self._epoch = max(self._epoch, epoch)

    def take_goal(self, goal: HostGoal) -> Outcome:
        """Obey a goal unless a newer one or a newer epoch was received; configurations apply at once."""
        number = (goal.epoch, goal.generation)
        if goal.host_id != self.host_id or goal.epoch < self._epoch or number < self._active:
            return Outcome(is_refused=True)
        if number == self._active:
            return Outcome()
        self._epoch, self._active = goal.epoch, number
        self._config_versions = {wanted.replica_tag: wanted.config_version for wanted in goal.replicas}
        started = [self._start(tag) for tag in self._config_versions if tag not in self._replicas]
        drained = []
        for tag, replica in list(self._replicas.items()):
            version = self._config_versions.get(tag)
            if version is None and tag in goal.kill:
                del self._replicas[tag]
            elif version is None and replica.status is not ReplicaStatus.DRAINING:
                drained.append(tag)
                self._put(replica, status=ReplicaStatus.DRAINING)
            elif version is not None and replica.status is ReplicaStatus.RUNNING:
                self._put(replica, config_version=version)
        return Outcome(started=tuple(started), drained=tuple(drained))

    def finish(self, outcome: Outcome) -> bool:
        """What was started runs, what was drained is gone. False when that changes nothing any more."""
        before = dict(self._replicas)
        for tag in outcome.started:
            replica = self._replicas.get(tag)
            if replica is not None and replica.status is ReplicaStatus.STARTING:
                self._put(replica, status=ReplicaStatus.RUNNING, config_version=self._config_versions[tag])
        for tag in outcome.drained:
            self._replicas.pop(tag, None)
        return before != self._replicas

    def report(self) -> HostReport:
        """The whole inventory, with the next sequence number."""
        self._sequence += 1
        return HostReport(
            host_id=self.host_id,
            incarnation="1",
            sequence=self._sequence,
            started_at=self._started_at,
            epoch=self._active[0],
            generation=self._active[1],
            resources=RESOURCES,
            replicas=list(self._replicas.values()),
        )

    def _start(self, tag: ReplicaTag) -> ReplicaTag:
        self._next_pid += 1
        self._replicas[tag] = ReplicaReport(
            replica_tag=tag, status=ReplicaStatus.STARTING, pid=self._next_pid
        )
        return tag

    def _put(
        self,
        replica: ReplicaReport,
        *,
        status: ReplicaStatus | None = None,
        config_version: int | None = None,
    ) -> None:
        self._replicas[replica.replica_tag] = msgspec.structs.replace(
            replica,
            status=replica.status if status is None else status,
            config_version=replica.config_version if config_version is None else config_version,
        )


def _turns(count: int, before_s: float, now_s: float, period_s: float) -> list[int]:
    """Whose turn came after ``before_s`` until ``now_s``, when ``count`` take turns evenly in each period.

    Nobody has more than one turn, however late we are: a report that was missed is not sent twice.
    """
    first = int(before_s / period_s * count) + 1
    last = int(now_s / period_s * count)
    return [turn % count for turn in range(max(first, last - count + 1), last + 1)]


class HostFleet:
    """Hosts that obey goals."""

    def __init__(
        self, bus: BusConnection, subjects: Subjects, count: int, counters: Counters, started_at: float
    ) -> None:
        self._bus = bus
        self._counters = counters
        self._loop = asyncio.get_running_loop()
        self._hosts = [SimulatedHost(HostId(f"host-{index:05d}"), started_at) for index in range(count)]
        self._by_id = {host.host_id: host for host in self._hosts}
        self._subject_of = {host.host_id: subjects.host_report(host.host_id).encode() for host in self._hosts}
        self._goal_decoder = msgspec.json.Decoder(HostGoal)
        self._encoder = msgspec.json.Encoder()
        bus.subscribe(subjects.host_goal(HostId("*")), self._on_goal)
        bus.subscribe(subjects.leader, self._on_leader)

    def report_turns(self, before_s: float, now_s: float) -> None:
        """Send the periodic reports that came due."""
        self._report(
            self._hosts[index] for index in _turns(len(self._hosts), before_s, now_s, REPORT_PERIOD_S)
        )

    def count(self) -> None:
        """Bring the states among the counters up to now."""
        self._counters.hosts_with_goal = sum(host.has_goal for host in self._hosts)
        self._counters.replicas_running = sum(host.running for host in self._hosts)

    def _on_goal(self, _subject: bytes, _reply: bytes, payload: bytes, _headers: bytes | None) -> None:
        self._counters.goals += 1
        self._counters.goal_bytes += len(payload)
        goal = self._goal_decoder.decode(payload)
        host = self._by_id[goal.host_id]
        outcome = host.take_goal(goal)
        self._counters.goals_refused += outcome.is_refused
        self._report((host,))
        if outcome.started:
            self._loop.call_later(START_S, self._finish, host, Outcome(started=outcome.started))
        if outcome.drained:
            self._loop.call_later(DRAIN_S, self._finish, host, Outcome(drained=outcome.drained))

    def _on_leader(self, _subject: bytes, _reply: bytes, payload: bytes, _headers: bytes | None) -> None:
        epoch = msgspec.json.decode(payload, type=LeaderNotice).epoch
        for host in self._hosts:
            host.on_leader_notice(epoch)
        self._report(self._hosts)

    def _finish(self, host: SimulatedHost, outcome: Outcome) -> None:
        if host.finish(outcome):
            self._report((host,))

    def _report(self, hosts: Iterable[SimulatedHost]) -> None:
        for host in hosts:
            try:
                self._bus.publish(self._subject_of[host.host_id], self._encoder.encode(host.report()))
                self._counters.host_reports += 1
            except BusUnavailable:
                self._counters.reports_dropped += 1


class _SnapshotId(msgspec.Struct):
    """All that is read of a snapshot."""

    snapshot_id: int


class ProxyFleet:
    """Proxies that have applied whatever the bucket's one watch told."""

    def __init__(
        self, bus: BusConnection, subjects: Subjects, count: int, counters: Counters, started_at: float
    ) -> None:
        self._bus = bus
        self._counters = counters
        self._loop = asyncio.get_running_loop()
        self._started_at = started_at
        self._ids = [ProxyId(f"proxy-{index:05d}") for index in range(count)]
        self._subjects = [subjects.proxy_report(name).encode() for name in self._ids]
        self._sequence = 0
        """One for all: what counts is that it rises for each."""
        self._seen_id = 0
        self._applied_id = 0
        self._is_filled = False
        self._is_report_due = False
        self._id_decoder = msgspec.json.Decoder(_SnapshotId)
        self._encoder = msgspec.json.Encoder()
        bus.subscribe(subjects.leader, self._on_leader)

    def report_turns(self, before_s: float, now_s: float) -> None:
        """Send the periodic reports that came due."""
        self._report(_turns(len(self._ids), before_s, now_s, REPORT_PERIOD_S))

    def on_bucket_entries(self, entries: Mapping[str, tuple[int, bytes | None]], whole: bool) -> None:
        """Apply what the bucket says, and let every proxy say so."""
        for _revision, value in entries.values():
            if value is None:
                continue
            self._seen_id = max(self._seen_id, self._id_decoder.decode(value).snapshot_id)
            if not whole:  # what a newly opened watch repeats was not published now
                self._counters.snapshots += 1
                self._counters.snapshot_bytes += len(value)
        self._is_filled = self._is_filled or whole
        if self._is_filled:
            self._applied_id = self._counters.applied_snapshot_id = self._seen_id
        self._report_all_soon()

    def _on_leader(self, _subject: bytes, _reply: bytes, _payload: bytes, _headers: bytes | None) -> None:
        self._report_all_soon()

    def _report_all_soon(self) -> None:
        if not self._is_report_due:
            self._is_report_due = True
            self._loop.call_later(PROXY_COALESCE_S, self._report_all)

    def _report_all(self) -> None:
        self._is_report_due = False
        self._report(range(len(self._ids)))

    def _report(self, indices: Iterable[int]) -> None:
        self._sequence += 1
        for index in indices:
            report = ProxyReport(
                proxy_id=self._ids[index],
                incarnation="bench",
                sequence=self._sequence,
                started_at=self._started_at,
                applied_snapshot_id=self._applied_id,
                address="127.0.0.1:8000",
            )
            try:
                self._bus.publish(self._subjects[index], self._encoder.encode(report))
                self._counters.proxy_reports += 1
            except BusUnavailable:
                self._counters.reports_dropped += 1


async def _report_periodically(hosts: HostFleet, proxies: ProxyFleet, counters: Counters) -> None:
    loop = asyncio.get_running_loop()
    started_at = before = loop.time()
    while True:
        await asyncio.sleep(_TICK_S)
        now = loop.time()
        counters.late_s = max(counters.late_s, now - before - _TICK_S)
        hosts.report_turns(before - started_at, now - started_at)
        proxies.report_turns(before - started_at, now - started_at)
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
    counters = Counters()
    started_at = SystemClock().now()
    bus_of_hosts = await _connected(url, Role.HOST, secrets)
    bus_of_proxies = await _connected(url, Role.PROXY, secrets)
    settings = bus_settings(secrets, url, Role.PROXY, name="simulated")
    client = await connect_nats(settings, name="simulated watch", deadline_s=_CONNECT_WITHIN_S)
    host_fleet = HostFleet(bus_of_hosts, subjects, hosts, counters, started_at)
    proxy_fleet = ProxyFleet(bus_of_proxies, subjects, proxies, counters, started_at)
    watch = BucketWatch(client, subjects, proxy_fleet.on_bucket_entries)
    watch.start()
    tasks = TaskOwner("simulator")
    tasks.start(_report_periodically(host_fleet, proxy_fleet, counters), "reports")
    requests = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(requests), sys.stdin
    )
    try:
        while await requests.readline():
            host_fleet.count()
            counters.cpu_s = time.process_time()
            sys.stdout.write(msgspec.json.encode(counters).decode() + "\n")
            sys.stdout.flush()
            counters.late_s = 0.0
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
