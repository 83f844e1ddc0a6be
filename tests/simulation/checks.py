"""What must hold, stated from the goal and not from the code: one class for each promise.

Every commit of the store, every start and drain on a host, every message and every cycle is shown to them. The first
broken promise ends the run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from serve_common.names import ReplicaTag
from serve_common.protocol.reports import HostGoal
from serve_common.protocol.snapshots import Snapshot
from serve_controller.core.checkpoint import Checkpoint
from serve_controller.core.objects import ObjectChanges
from serve_controller.ports import HistoryEntry
from tests.simulation.check_attention import AttentionMissesNothing, VisibleIsDurable
from tests.simulation.check_budgets import (
    ForceKillIsForced,
    ReconfiguresAFew,
    RoomOfHosts,
    ServingIsNotForgotten,
    StuckIsGivenUp,
    Surge,
    UnavailableBudget,
)
from tests.simulation.check_numbers import GoalsEndOnce, NumbersRise, OneWriter
from tests.simulation.check_routing import (
    DroppedIsNotRouted,
    HostGoalsAreRecorded,
    RoutesAreLeftFirst,
    SnapshotsAreTrue,
)
from tests.simulation.check_scaling import UsersWinOverTheAutoscaler
from tests.simulation.check_success import SuccessIsTrue
from tests.simulation.reference import Reference

if TYPE_CHECKING:
    from serve_controller.shell.control_loop import Term
    from tests.simulation.sim_controller import SimController
    from tests.simulation.sim_host import SimHost
    from tests.simulation.sim_proxy import SimProxy
    from tests.simulation.world import World
    from tests.simulation.world_store import Writer

HOOKS: Final = (
    "on_commit",
    "on_start",
    "on_drain",
    "on_goal_sent",
    "on_publish",
    "on_proxy",
    "on_cycle",
    "on_epoch",
)


class Checks:
    """All promises; each hears what it has a method for."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.not_well: set[ReplicaTag] = set()
        """Replicas that something happened to: they may be stopped at any time."""
        self.is_bucket_lost = False
        """Proxies that read the bucket may know less than before."""
        self.bucket_lost_at = float("-inf")
        """Leaders need a moment to hear of it."""
        self.led_since = float("inf")
        """Since when the present leader leads with store and bus there."""
        self.is_silence_possible = False
        """The bus is away for a while."""
        self.reference = Reference(world)
        self.attention = AttentionMissesNothing(world)
        self.all: list[Any] = [
            OneWriter(world),
            NumbersRise(world),
            GoalsEndOnce(world),
            HostGoalsAreRecorded(world),
            SnapshotsAreTrue(world),
            DroppedIsNotRouted(world),
            RoutesAreLeftFirst(world),
            Surge(world),
            UnavailableBudget(world),
            ServingIsNotForgotten(world),
            StuckIsGivenUp(world),
            ForceKillIsForced(world),
            ReconfiguresAFew(world),
            RoomOfHosts(world),
            SuccessIsTrue(world),
            self.reference,
            self.attention,
            VisibleIsDurable(world),
            UsersWinOverTheAutoscaler(world),
        ]
        self._hooks: dict[str, list[Callable[..., None]]] = {
            hook: [getattr(check, hook) for check in self.all if hasattr(check, hook)] for hook in HOOKS
        }

    def save(self) -> list[Any]:
        """What each promise knows of the store's content, for when that goes back in time."""
        return [check.save() if hasattr(check, "save") else None for check in self.all]

    def go_back(self, saved: list[Any]) -> None:
        """The store is as it was when this was saved."""
        for check, known in zip(self.all, saved, strict=True):
            if hasattr(check, "go_back"):
                check.go_back(known)

    def on_commit(
        self,
        writer: Writer,
        epoch: int,
        before: Checkpoint,
        after: Checkpoint,
        changes: ObjectChanges,
        history: Sequence[HistoryEntry],
    ) -> None:
        """The store made a write."""
        for entry in history:
            self.world.trace(f"epoch {epoch} commits {entry.verb} {entry.subject} {entry.goal_id}")
        for hear in self._hooks["on_commit"]:
            hear(writer, epoch, before, after, changes, history)

    def on_start(self, host: SimHost, tag: ReplicaTag) -> None:
        """A host starts a replica."""
        self.world.trace(f"{host.host_id} starts {tag}")
        for hear in self._hooks["on_start"]:
            hear(host, tag)

    def on_drain(self, host: SimHost, tag: ReplicaTag) -> None:
        """A host begins to drain a replica."""
        self.world.trace(f"{host.host_id} drains {tag}")
        for hear in self._hooks["on_drain"]:
            hear(host, tag)

    def on_goal_sent(self, goal: HostGoal) -> None:
        """A controller sends a host its goal."""
        for hear in self._hooks["on_goal_sent"]:
            hear(goal)

    def on_publish(self, key: str, snapshot: Snapshot) -> None:
        """A controller puts a key of the bucket."""
        for hear in self._hooks["on_publish"]:
            hear(key, snapshot)

    def on_proxy(self, proxy: SimProxy) -> None:
        """A proxy took something from the bucket."""
        for hear in self._hooks["on_proxy"]:
            hear(proxy)

    def on_cycle(self, controller: SimController, term: Term) -> None:
        """A leader's cycle is over."""
        for hear in self._hooks["on_cycle"]:
            hear(controller, term)

    def on_epoch(self, epoch: int, writer: Writer) -> None:
        """A controller was given an epoch."""
        self.led_since = self.world.time
        for hear in self._hooks["on_epoch"]:
            hear(epoch, writer)
