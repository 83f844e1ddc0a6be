"""Promises about who decides how many replicas there are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from serve_common.api import commands as c
from serve_common.api.views import GoalStatus
from serve_common.names import BackendTag
from serve_controller.core.checkpoint import Checkpoint
from serve_controller.core.goals import owned_backends
from serve_controller.core.objects import Backend, Goal, ObjectChanges
from serve_controller.ports import HistoryEntry
from serve_controller.shell.queries import parse_request

if TYPE_CHECKING:
    from tests.simulation.world import World
    from tests.simulation.world_store import Writer


class UsersWinOverTheAutoscaler:
    """The load moves numbers within the limits and only where it may; what a user sets stays until a user says else."""

    def __init__(self, world: World) -> None:
        self.world = world

    def on_commit(
        self,
        writer: Writer,
        epoch: int,
        before: Checkpoint,
        after: Checkpoint,
        changes: ObjectChanges,
        history: Sequence[HistoryEntry],
    ) -> None:
        gone_back = {
            tag
            for value in changes.puts
            if isinstance(value, Goal) and value.status is GoalStatus.FAILED
            for tag in owned_backends(value)
        }
        for value in changes.puts:
            if isinstance(value, Backend) and not value.deleting:
                self._limits(value)
                known = before.backends.get(value.backend_tag)
                if not history and known is not None and value.backend_tag not in gone_back:
                    self._moved_by_a_plan(known, value)
        for entry in history:
            command = parse_request(entry.verb, entry.request.encode())
            if isinstance(command, c.Scale):
                backend = after.backends[BackendTag(entry.subject)]
                number = backend.target.backend_config.num_replicas
                self.world.check(number == command.num_replicas, f"{command} came to {number}")
                is_scaled = backend.target.backend_config.autoscaling_config is not None
                self.world.check(bool(backend.autoscaling_paused) == is_scaled, f"{command} does not pause")

    def _limits(self, backend: Backend) -> None:
        config = backend.target.backend_config
        scaling = config.autoscaling_config
        self.world.check(
            scaling is None or scaling.min_replicas <= config.num_replicas <= scaling.max_replicas,
            f"{backend.backend_tag} has {config.num_replicas} replicas, outside of its limits",
        )
        self.world.check(
            scaling is not None or not backend.autoscaling_paused,
            f"{backend.backend_tag} is paused and has no autoscaling",
        )

    def _moved_by_a_plan(self, known: Backend, backend: Backend) -> None:
        was, number = known.target.backend_config.num_replicas, backend.target.backend_config.num_replicas
        if was != number:
            self.world.trace(f"{backend.backend_tag} is autoscaled {was} → {number}")
            is_scaled = known.target.backend_config.autoscaling_config is not None
            self.world.check(
                is_scaled and not known.autoscaling_paused and not known.halted and not known.deleting,
                f"{backend.backend_tag} was moved from {was} to {number} though the load has no say",
            )
        self.world.check(
            known.autoscaling_paused == backend.autoscaling_paused,
            f"a plan paused or resumed {backend.backend_tag}",
        )
