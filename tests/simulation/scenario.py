"""The story that every crash plan interrupts: two deployments are made, changed, broken, scaled and deleted.

The client behaves as the guarantees ask of it: it sends a command until it gets an answer, and then waits for the goal.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from serve_common.values import BackendConfig, RayActorOptions, ReplicaConfig
from serve_common.wires.commands import AnyCommand as Command
from serve_common.wires.commands import ChangeReply, DeleteDeployment, Deploy
from serve_common.wires.views import GoalStatus
from serve_controller.shell.term import Term
from tests.simulation.checks import (
    FailureLeavesOld,
    GoalsEndOnce,
    Serving,
    SuccessIsTrue,
    Surge,
    check_converged,
    is_calm,
    recorded,
)
from tests.simulation.crashes import CrashingBoundary
from tests.simulation.world import Faults, SimController, SimHost, SimProxy, World

STEP_LIMIT_S = 120.0
CALM_LIMIT_S = 60.0


def deploy(
    name: str, version: str, *, num: int, request_id: str, code: str = "good:Code", config: int = 0
) -> Deploy:
    return Deploy(
        name=name,
        version=version,
        request_id=request_id,
        route_prefix=f"/{name}",
        replica_config=ReplicaConfig(import_path=code, ray_actor_options=RayActorOptions(num_cpus=1)),
        backend_config=BackendConfig(num_replicas=num, user_config={"threshold": config}),
    )


@dataclass
class Step:
    command: Command
    ends: GoalStatus


STORY = (
    Step(deploy("a", "v1", num=2, request_id="r1"), GoalStatus.SUCCEEDED),
    Step(deploy("b", "v1", num=1, request_id="r2"), GoalStatus.SUCCEEDED),
    Step(deploy("a", "v1", num=2, request_id="r3", config=1), GoalStatus.SUCCEEDED),
    Step(deploy("a", "v2", num=2, request_id="r4", config=1), GoalStatus.SUCCEEDED),
    Step(deploy("a", "v3", num=2, request_id="r5", code="bad:Code"), GoalStatus.FAILED),
    Step(deploy("a", "v2", num=3, request_id="r6", config=1), GoalStatus.SUCCEEDED),
    Step(DeleteDeployment(name="b"), GoalStatus.SUCCEEDED),
    Step(deploy("a", "v2", num=1, request_id="r7", config=1), GoalStatus.SUCCEEDED),
)


@dataclass
class Outcome:
    violations: list[str]
    boundary: CrashingBoundary
    goals: list[tuple[str, GoalStatus]] = field(default_factory=list)
    virtual_s: float = 0.0


def build_world(
    *,
    seed: int = 0,
    faults: Faults | None = None,
    crashes: frozenset[tuple[int, bool]] = frozenset(),
    controllers: int = 1,
    term_class: type[Term] = Term,
) -> World:
    world = World(
        seed=seed, faults=faults or Faults(), boundary=CrashingBoundary(plan=crashes), term_class=term_class
    )
    world.hosts = [SimHost(world, "host-1", cpus=4), SimHost(world, "host-2", cpus=4)]
    world.proxies = [SimProxy(world, "proxy-1"), SimProxy(world, "proxy-2")]
    world.controllers = [SimController(world, f"controller-{n}") for n in range(1, controllers + 1)]
    world.after_cycle_checks = [
        GoalsEndOnce(world),
        FailureLeavesOld(world),
        SuccessIsTrue(world),
        Surge(world, "default/a", running_max=4),
    ]
    if world.faults.delay_max_s < SimHost.DRAIN_S / 10:
        world.after_cycle_checks.append(Serving(world, "default/a", routed_min=1))
    return world


def play(world: World, story: tuple[Step, ...] = STORY) -> Outcome:
    """Play the story to its end and then demand the calm."""
    outcome = Outcome(violations=world.violations, boundary=world.boundary)
    begun = world.time
    for number, step in enumerate(story):
        goal_id = _acknowledged(world, step.command)
        if goal_id is None:
            if not isinstance(step.command, DeleteDeployment):
                world.check(False, f"step {number} was never acknowledged")
                break
            # "Nothing to delete": an attempt whose answer was lost had done it already.
            continue
        world.check(
            goal_id in recorded(world).goals, f"step {number}: {goal_id} was acknowledged and is not recorded"
        )
        ended = world.run_until(lambda g=goal_id: _status(world, g) is not GoalStatus.PENDING, STEP_LIMIT_S)
        world.check(ended, f"step {number}: {goal_id} did not end in {STEP_LIMIT_S} s")
        if not ended:
            break
        status = _status(world, goal_id)
        outcome.goals.append((goal_id, status))
        world.check(status is step.ends, f"step {number}: {goal_id} ended {status}, not {step.ends}")
    world.is_stormy = False
    calm = world.run_until(lambda: is_calm(world), CALM_LIMIT_S)
    world.check(calm, f"no calm within {CALM_LIMIT_S} s")
    world.run_until(lambda: False, 0.5)
    check_converged(world)
    outcome.virtual_s = world.time - begun
    return outcome


def _acknowledged(world: World, command: Command) -> str | None:
    """Send until answered; the goal's id, or None for 'nothing to do'."""
    for _ in range(200):
        reply = world.execute(command)
        match reply:
            case ChangeReply():
                return reply.goal_id
            case None:
                world.run_until(lambda: False, 0.3)
    return None


def _status(world: World, goal_id: str) -> GoalStatus:
    goals = recorded(world).goals
    return next((g.status for g in goals.values() if g.goal_id == goal_id), GoalStatus.PENDING)
