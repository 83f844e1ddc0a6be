"""A replica host as the controller sees it: obeys goals and reports everything, with nothing behind it.

Why not the real host's core: that one also drives health checks, reconfigures and processes, each with deadlines;
here a thousand hosts share half a processor, and only what crosses the wire must be as in reality.
"""

from __future__ import annotations

import msgspec

from serve_common.names import HostId, ReplicaTag
from serve_common.protocol.reports import HostGoal, HostReport, ReplicaReport, ReplicaStatus

RESOURCES = {"CPU": 1_000.0, "GPU": 0.0, "memory": 1e13}
"""Of each host: more than is ever asked for, so that room is never what a change waits for."""


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
        """Obey a goal unless a newer one or a newer epoch was heard; configurations apply at once."""
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
