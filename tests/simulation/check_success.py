"""When a goal succeeds, it is so: recorded, running, and applied by every live proxy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from serve_common.api.views import GoalStatus
from serve_common.names import HostId
from serve_common.protocol.reports import ReplicaStatus
from serve_common.protocol.subjects import HTTP_KEY
from serve_controller.core.checkpoint import Checkpoint
from serve_controller.core.goals import owned_backends
from serve_controller.core.objects import Backend, Goal, GoalKind, ObjectChanges, ReplicaState

if TYPE_CHECKING:
    from tests.simulation.world import World
    from tests.simulation.world_store import Writer


FAILED = (ReplicaStatus.FAILED, ReplicaStatus.DEAD)


class SuccessIsTrue:
    """Looks at every goal in the moment of its success."""

    def __init__(self, world: World) -> None:
        self.world = world

    def on_commit(
        self,
        writer: Writer,
        epoch: int,
        before: Checkpoint,
        after: Checkpoint,
        changes: ObjectChanges,
        _: object,
    ) -> None:
        for value in changes.puts:
            if isinstance(value, Goal) and value.status is GoalStatus.SUCCEEDED:
                self._look(after, value)

    def _look(self, after: Checkpoint, goal: Goal) -> None:
        for tag in owned_backends(goal):
            backend = after.backends.get(tag)
            if backend is None or backend.deleting:
                left = sorted(after.get_replicas(tag))
                self.world.check(not left, f"{goal.goal_id} deleted {tag}, and {left} are left")
                self._nothing_runs(goal, tag)
            else:
                self._runs(after, goal, backend)
        if goal.kind is GoalKind.DRAIN:
            self.world.check(
                not after.by_host.get(HostId(goal.subject)), f"{goal.goal_id} succeeded on a host in use"
            )
        for proxy in self.world.proxies:
            if proxy.serves and proxy.proxy_id in after.proxies and not self.world.checks.is_bucket_lost:
                for key in goal.owns:
                    record = after.snapshots.get(key)
                    needed = 0 if record is None else record.snapshot.snapshot_id
                    self.world.check(
                        proxy.ids.get(key, 0) >= needed,
                        f"{goal.goal_id} succeeded, and {proxy.proxy_id} has no {key} {needed}",
                    )
                if goal.kind is GoalKind.HTTP and after.snapshots[
                    HTTP_KEY
                ].snapshot.snapshot_id == proxy.ids.get(HTTP_KEY):
                    options = None if after.http is None else after.http.target
                    self.world.check(
                        proxy.options == options, f"{goal.goal_id} succeeded, and {proxy.proxy_id} has others"
                    )

    def _runs(self, after: Checkpoint, goal: Goal, backend: Backend) -> None:
        target, tag = backend.target, backend.backend_tag
        replicas = after.get_replicas(tag).values()
        ready = [
            r.replica_tag
            for r in replicas
            if r.state is ReplicaState.RUNNING
            and r.code_version == target.code_version
            and r.config_version == target.config_version
        ]
        self.world.check(
            len(ready) == target.backend_config.num_replicas,
            f"{goal.goal_id} succeeded with {len(ready)} replicas of {tag}",
        )
        if self.world.weather.faults.has_deaths:
            return  # what ran when it was reported may have died since
        for replica_tag in ready:
            if replica_tag in self.world.checks.not_well:
                continue
            held = [
                host.state.replicas[replica_tag] for host in self.world.hosts if replica_tag in host.serving
            ]
            self.world.check(
                len(held) == 1 and held[0].config_version >= target.config_version,
                f"{goal.goal_id} succeeded, and {replica_tag} does not serve with its configuration",
            )

    def _nothing_runs(self, goal: Goal, tag: str) -> None:
        if self.world.weather.faults.has_deaths:
            return  # a host that was lost may still run what it will be told to stop
        for host in self.world.hosts:
            held = host.state.replicas
            # One that failed is gone in a moment.
            # What a goal began that the store has lost, no goal that it knows waits for.
            left = [
                t
                for t in host.processes
                if t.rpartition("#")[0] == tag
                and t not in self.world.lost_replicas
                and not (t in held and held[t].status in FAILED)
            ]
            self.world.check(not left, f"{goal.goal_id} deleted {tag}, and {host.host_id} runs {left}")
