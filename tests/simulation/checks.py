"""What must hold, stated from the goal and not from the code. One class or function for each promise."""

from __future__ import annotations

from serve_common.names import BackendTag
from serve_common.wires.views import GoalStatus
from serve_controller.adapters.checkpoint_rows import load_checkpoint
from serve_controller.core.checkpoint import Checkpoint
from serve_controller.core.objects import GoalKind, ReplicaState
from serve_controller.core.transitions import ROUTED
from tests.simulation.world import World


def recorded(world: World) -> Checkpoint:
    """The truth: what the store holds."""
    return load_checkpoint(world.store.rows.values())


def running_by_backend(world: World, tag: str) -> set[str]:
    """What really runs, whatever anyone recorded."""
    found: set[str] = set()
    for host in world.hosts:
        found |= {t for t in host.running() if t.rpartition("#")[0] == tag}
    return found


class GoalsEndOnce:
    """A goal that ended never ends otherwise, and never becomes pending again."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.ended: dict[str, GoalStatus] = {}

    def __call__(self) -> None:
        for goal in recorded(self.world).goals.values():
            before = self.ended.get(goal.goal_id)
            if before is not None:
                self.world.check(
                    goal.status is before, f"{goal.goal_id} ended {before} and then {goal.status}"
                )
            elif goal.status is not GoalStatus.PENDING:
                self.ended[goal.goal_id] = goal.status


class SuccessIsTrue:
    """When a deploy succeeds, its version runs and every proxy routes to it alone. (Not for worlds with deaths.)"""

    def __init__(self, world: World) -> None:
        self.world = world
        self.seen: set[str] = set()

    def __call__(self) -> None:
        checkpoint = recorded(self.world)
        for goal in checkpoint.goals.values():
            if goal.status is not GoalStatus.SUCCEEDED or goal.goal_id in self.seen:
                continue
            self.seen.add(goal.goal_id)
            tag = BackendTag(goal.subject)
            backend = checkpoint.backends.get(tag)
            if backend is not None and backend.goal_id != goal.goal_id:
                continue
            replicas = checkpoint.replicas.get(tag, {})
            if goal.kind is GoalKind.DELETE:
                left = running_by_backend(self.world, tag)
                self.world.check(not left, f"{goal.goal_id} deleted {tag} but {left} run")
                continue
            assert backend is not None
            of_target = {
                r.replica_tag for r in replicas.values() if r.code_version == backend.target.code_version
            }
            running = running_by_backend(self.world, tag) & of_target
            wanted = backend.target.backend_config.num_replicas
            self.world.check(len(running) >= wanted, f"{goal.goal_id} succeeded with {running} of {wanted}")
            for proxy in self.world.proxies:
                routed = proxy.routed(tag)
                self.world.check(
                    routed <= of_target and len(routed) == wanted,
                    f"{goal.goal_id} succeeded while {proxy.proxy_id} routes to {sorted(routed)}",
                )


class FailureLeavesOld:
    """A failed deploy leaves the version that served before as what is wanted."""

    def __init__(self, world: World) -> None:
        self.world = world

    def __call__(self) -> None:
        checkpoint = recorded(self.world)
        for backend in checkpoint.backends.values():
            goal = checkpoint.goals.get(backend.goal_id)
            if goal is not None and goal.status is GoalStatus.FAILED and backend.last_good is not None:
                self.world.check(
                    backend.target == backend.last_good, f"{goal.goal_id} failed and stays the target"
                )


class Surge:
    """Never more replicas than were ever wanted plus the surge."""

    def __init__(self, world: World, tag: str, running_max: int) -> None:
        self.world, self.tag, self.running_max = world, tag, running_max

    def __call__(self) -> None:
        running = running_by_backend(self.world, self.tag)
        self.world.check(
            len(running) <= self.running_max, f"{len(running)} replicas of {self.tag} run: {running}"
        )


class Serving:
    """Once a proxy has so many running replicas of a backend, it always has.

    For worlds without deaths whose messages are prompt: a proxy that hears late of the new replicas may for a moment
    know only draining ones, which refuse, so its requests wait.
    """

    def __init__(self, world: World, tag: str, routed_min: int) -> None:
        self.world, self.tag, self.routed_min = world, tag, routed_min
        self.begun: set[str] = set()

    def __call__(self) -> None:
        backend = recorded(self.world).backends.get(BackendTag(self.tag))
        if backend is None or backend.deleting:
            self.begun.clear()
            return
        alive = {t for host in self.world.hosts for t in host.running()}
        for proxy in self.world.proxies:
            routed = proxy.routed(self.tag) & alive
            if len(routed) >= self.routed_min:
                self.begun.add(proxy.proxy_id)
            self.world.check(
                len(routed) >= self.routed_min or proxy.proxy_id not in self.begun,
                f"{proxy.proxy_id} has only {sorted(routed)} for {self.tag}",
            )


def check_converged(world: World) -> None:
    """In the calm: what runs, what is recorded and what is routed are the same, and it is what is wanted."""
    checkpoint = recorded(world)
    tags = {r.rpartition("#")[0] for host in world.hosts for r in host.replicas} | set(checkpoint.backends)
    for tag in sorted(tags):
        backend = checkpoint.backends.get(BackendTag(tag))
        wanted = 0 if backend is None else backend.num_wanted
        running = running_by_backend(world, tag)
        replicas = checkpoint.replicas.get(BackendTag(tag), {}).values()
        rows = {r.replica_tag for r in replicas if r.state in ROUTED}
        world.check(len(running) == wanted, f"{len(running)} of {wanted} replicas of {tag} run")
        world.check(running == rows, f"{sorted(rows)} are recorded of {tag}, {sorted(running)} run")
        world.check(
            all(r.state is ReplicaState.RUNNING for r in replicas),
            f"{tag} is not calm: {[r.state for r in replicas]}",
        )
        if backend is not None and not backend.halted:
            target = backend.target
            world.check(
                all(
                    r.code_version == target.code_version and r.config_version == target.config_version
                    for r in replicas
                ),
                f"replicas of {tag} are of another version than the target",
            )
            for proxy in world.proxies:
                world.check(
                    proxy.routed(tag) == running,
                    f"{proxy.proxy_id} routes {tag} to {sorted(proxy.routed(tag))}",
                )
        if backend is None:
            for proxy in world.proxies:
                world.check(not proxy.routed(tag), f"{proxy.proxy_id} still routes the deleted {tag}")
    for key, record in checkpoint.snapshots.items():
        held = world.bucket_id(key)
        world.check(held == record.snapshot.snapshot_id, f"the bucket holds {held} of {key}")


def is_calm(world: World) -> bool:
    """No goal is pending and no replica is between states."""
    checkpoint = recorded(world)
    if any(goal.status is GoalStatus.PENDING for goal in checkpoint.goals.values()):
        return False
    replicas = [r for rs in checkpoint.replicas.values() for r in rs.values()]
    if any(r.state is not ReplicaState.RUNNING for r in replicas):
        return False
    draining = [t for host in world.hosts for t in host.replicas if t not in host.running()]
    return not draining and not world.is_unsettled(checkpoint)
