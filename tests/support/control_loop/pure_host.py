"""A replica host by its contract and nothing else: for the controller's pure core in a closed loop."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from serve_common.config.backend import ReplicaConfig
from serve_common.names import HostId, ReplicaTag
from serve_common.protocol.reports import HostGoal, HostReport, ReplicaGoal, ReplicaReport, ReplicaStatus
from tests.support.control_loop.orders import BAD_CODE, UNUSABLE_CODE

M = TypeVar("M")


def carried(message: M) -> M:
    """``message`` as it is read from the bus. Raises `msgspec.ValidationError` for one that its reader refuses.

    The bus carries bytes, and whoever reads them refuses what is out of bounds.
    """
    decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(type(message))
    return decoder.decode(msgspec.json.encode(message))


class PureHost:
    """The newest whole goal is obeyed, and everything it holds is reported."""

    def __init__(self, host_id: str, cpus: float = 4.0, **resources: float) -> None:
        self.host_id = HostId(host_id)
        self.resources = {"CPU": cpus, **resources}
        self.lives = 0
        self.is_up = True
        self.is_deaf = False
        """Hears no goal, but goes on reporting."""
        self.is_leaving = False
        """It was asked to stop, and says so."""
        self.hangs_in_starting = False
        """Constructors do not return."""
        self.hangs_in_draining = False
        """What should stop drains until it is killed, or until this ends."""
        self.dies_at: set[object] = set()
        """User configs at which a replica's process ends, when it starts with them or is given them."""
        self.raises_at: set[object] = set()
        """User configs at which ``reconfigure`` raises; at a start that is a failed start."""
        self.is_unhealthy: set[str] = set()
        self.drained: set[ReplicaTag] = set()
        """Ended by themselves, having finished what they had."""
        self.killed: set[ReplicaTag] = set()
        """Ended because a goal said so, without draining."""
        self._begin()

    def _begin(self) -> None:
        self.lives += 1
        self.number = (0, 0)
        self.told: dict[ReplicaTag, ReplicaGoal] = {}
        """The replicas of the newest goal."""
        self.held: dict[ReplicaTag, ReplicaReport] = {}
        self.asked: dict[ReplicaTag, int] = {}
        self.user_config: dict[ReplicaTag, object] = {}
        """What each replica really runs with."""
        self.spent: set[ReplicaTag] = set()
        self.sequence = 0

    def restart(self) -> None:
        """The process dies and another one comes up: nothing of before runs."""
        self._begin()

    def hear(self, goal: HostGoal) -> None:
        """Obey a goal; starts, drains and reconfigurations are done at once, unless they hang."""
        if not self.is_up or self.is_deaf or (goal.epoch, goal.generation) < self.number:
            return
        goal = carried(goal)
        self.number = (goal.epoch, goal.generation)
        self.told = wanted = {g.replica_tag: g for g in goal.replicas}
        assert not wanted.keys() & set(goal.kill), "what should run is to be killed"
        for tag in [tag for tag in self.held if tag not in wanted]:
            self._stop(tag, is_killed=tag in goal.kill)
        for tag, replica in wanted.items():
            if tag not in self.held:
                assert tag not in self.spent, f"{tag} ended on {self.host_id} and was asked for again"
                self._start(tag, replica.config_version, replica.user_config, replica.replica_config)
            elif self.asked[tag] < replica.config_version:
                self._reconfigure(tag, replica.config_version, replica.user_config)

    def _stop(self, tag: ReplicaTag, *, is_killed: bool) -> None:
        held = self.held[tag]
        drains = self.hangs_in_draining and held.status not in (ReplicaStatus.FAILED, ReplicaStatus.DEAD)
        if drains and not is_killed:
            self.held[tag] = msgspec.structs.replace(held, status=ReplicaStatus.DRAINING)
            return
        del self.held[tag]
        self.spent.add(tag)
        (self.killed if is_killed else self.drained).add(tag)

    def _start(self, tag: ReplicaTag, version: int, user_config: object, code: ReplicaConfig) -> None:
        self.asked[tag] = version
        failed = user_config in (self.raises_at | self.dies_at) or code.import_path in (
            BAD_CODE,
            UNUSABLE_CODE,
        )
        status = ReplicaStatus.FAILED if failed else ReplicaStatus.RUNNING
        if self.hangs_in_starting:
            failed, status = False, ReplicaStatus.STARTING
        self.user_config[tag] = user_config
        self.held[tag] = ReplicaReport(
            replica_tag=tag,
            status=status,
            config_version=version if status is ReplicaStatus.RUNNING else 0,
            error="RuntimeError: no" if failed else "",
            is_unusable=failed and code.import_path == UNUSABLE_CODE,
        )

    def _reconfigure(self, tag: ReplicaTag, version: int, user_config: object) -> None:
        held = self.held[tag]
        self.asked[tag] = version
        if held.status not in (ReplicaStatus.RUNNING, ReplicaStatus.UNHEALTHY):
            return
        if user_config in self.dies_at:
            self.held[tag] = msgspec.structs.replace(held, status=ReplicaStatus.DEAD, error="exit code 1")
        elif user_config in self.raises_at:
            self.held[tag] = msgspec.structs.replace(
                held, config_error_version=version, error="ValueError: no such config"
            )
        else:
            self.user_config[tag] = user_config
            self.held[tag] = msgspec.structs.replace(held, config_version=version, error="")

    def kill(self, tag: ReplicaTag) -> None:
        """The replica's process ends by itself."""
        if tag in self.held:
            self.held[tag] = msgspec.structs.replace(
                self.held[tag], status=ReplicaStatus.DEAD, error="killed"
            )

    def finish_drains(self) -> None:
        """What drains ends, and what stops from now on ends at once."""
        self.hangs_in_draining = False
        for tag in [tag for tag, r in self.held.items() if r.status is ReplicaStatus.DRAINING]:
            self._stop(tag, is_killed=False)

    def report(self) -> HostReport:
        """The whole inventory."""
        self.sequence += 1
        return carried(
            HostReport(
                host_id=self.host_id,
                incarnation=str(self.lives),
                sequence=self.sequence,
                started_at=float(self.lives),
                epoch=self.number[0],
                generation=self.number[1],
                resources=self.resources,
                replicas=[self._told(held) for held in self.held.values()],
                leaving=self.is_leaving,
            )
        )

    def _told(self, held: ReplicaReport) -> ReplicaReport:
        if held.status is not ReplicaStatus.RUNNING:
            return held
        if self.is_leaving:
            return msgspec.structs.replace(held, status=ReplicaStatus.DRAINING)
        if held.replica_tag in self.is_unhealthy:
            return msgspec.structs.replace(held, status=ReplicaStatus.UNHEALTHY)
        return held

    def running(self) -> set[ReplicaTag]:
        """Replicas whose process lives and should live."""
        ended = (ReplicaStatus.FAILED, ReplicaStatus.DEAD, ReplicaStatus.DRAINING)
        return {t for t, r in self.held.items() if r.status not in ended}
