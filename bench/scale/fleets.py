"""All simulated hosts on one connection, all simulated proxies on another.

Why so few connections: a server that serves two thousand of them takes processor time that belongs to the controller
on a small machine; what the controller receives and sends is the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from bench.scale.hosts import Outcome, SimulatedHost
from bench.scale.sizes import host_id, proxy_id, turns
from bench.scale.tally import Tally
from serve_common.errors import BusUnavailable
from serve_common.names import HostId
from serve_common.nats.connection import BusConnection
from serve_common.protocol.reports import HostGoal, LeaderNotice, ProxyReport
from serve_common.protocol.subjects import Subjects

REPORT_PERIOD_S: Final = 1.0
START_S: Final = 0.05
"""From a goal to RUNNING."""
DRAIN_S: Final = 0.02
PROXY_COALESCE_S: Final = 0.01
"""As in the real proxy: changes that come together are reported together."""


class HostFleet:
    """Hosts that obey goals."""

    def __init__(
        self, bus: BusConnection, subjects: Subjects, count: int, tally: Tally, started_at: float
    ) -> None:
        self._bus = bus
        self._stats = tally
        self._loop = asyncio.get_running_loop()
        self._hosts = [SimulatedHost(host_id(index), started_at) for index in range(count)]
        self._by_id = {host.host_id: host for host in self._hosts}
        self._subject_of = {host.host_id: subjects.host_report(host.host_id).encode() for host in self._hosts}
        self._goal_decoder = msgspec.json.Decoder(HostGoal)
        self._encoder = msgspec.json.Encoder()
        bus.subscribe(subjects.host_goal(HostId("*")), self._hear_goal)
        bus.subscribe(subjects.leader, self._hear_leader)

    def report_turns(self, before_s: float, now_s: float) -> None:
        """Send the periodic reports that came due."""
        self._report(
            self._hosts[index] for index in turns(len(self._hosts), before_s, now_s, REPORT_PERIOD_S)
        )

    def count(self) -> None:
        """Bring the tally's states up to now."""
        self._stats.hosts_with_goal = sum(host.has_goal for host in self._hosts)
        self._stats.replicas_running = sum(host.running for host in self._hosts)

    def _hear_goal(self, _subject: bytes, _reply: bytes, payload: bytes, _headers: bytes | None) -> None:
        self._stats.goals += 1
        self._stats.goal_bytes += len(payload)
        goal = self._goal_decoder.decode(payload)
        host = self._by_id[goal.host_id]
        outcome = host.take_goal(goal)
        self._stats.goals_refused += outcome.is_refused
        self._report((host,))
        if outcome.started:
            self._loop.call_later(START_S, self._finish, host, Outcome(started=outcome.started))
        if outcome.drained:
            self._loop.call_later(DRAIN_S, self._finish, host, Outcome(drained=outcome.drained))

    def _hear_leader(self, _subject: bytes, _reply: bytes, payload: bytes, _headers: bytes | None) -> None:
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
                self._stats.host_reports += 1
            except BusUnavailable:
                self._stats.reports_dropped += 1


class _SnapshotId(msgspec.Struct):
    """All that is read of a snapshot."""

    snapshot_id: int


class ProxyFleet:
    """Proxies that have applied whatever the bucket's one watch told."""

    def __init__(
        self, bus: BusConnection, subjects: Subjects, count: int, tally: Tally, started_at: float
    ) -> None:
        self._bus = bus
        self._stats = tally
        self._loop = asyncio.get_running_loop()
        self._started_at = started_at
        self._ids = [proxy_id(index) for index in range(count)]
        self._subjects = [subjects.proxy_report(name).encode() for name in self._ids]
        self._sequence = 0
        """One for all: what counts is that it rises for each."""
        self._seen_id = 0
        self._applied_id = 0
        self._is_filled = False
        self._is_report_due = False
        self._id_decoder = msgspec.json.Decoder(_SnapshotId)
        self._encoder = msgspec.json.Encoder()
        bus.subscribe(subjects.leader, self._hear_leader)

    def report_turns(self, before_s: float, now_s: float) -> None:
        """Send the periodic reports that came due."""
        self._report(turns(len(self._ids), before_s, now_s, REPORT_PERIOD_S))

    def on_bucket_entries(self, entries: Mapping[str, tuple[int, bytes | None]], whole: bool) -> None:
        """Apply what the bucket says, and let every proxy say so."""
        for _revision, value in entries.values():
            if value is None:
                continue
            self._seen_id = max(self._seen_id, self._id_decoder.decode(value).snapshot_id)
            if not whole:  # what a newly opened watch repeats was not published now
                self._stats.snapshots += 1
                self._stats.snapshot_bytes += len(value)
        self._is_filled = self._is_filled or whole
        if self._is_filled:
            self._applied_id = self._stats.applied_snapshot_id = self._seen_id
        self._report_all_soon()

    def _hear_leader(self, _subject: bytes, _reply: bytes, _payload: bytes, _headers: bytes | None) -> None:
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
                self._stats.proxy_reports += 1
            except BusUnavailable:
                self._stats.reports_dropped += 1
