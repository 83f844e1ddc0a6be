"""Two stories with known ends, for crashes at every effect.

The client behaves as the guarantees ask of it: it sends a command until it gets an answer, and then waits for the goal.
"""

from __future__ import annotations

from typing import Final

from serve_common.api import commands as c
from serve_common.api.views import GoalStatus
from serve_common.config.backend import BackendConfig, RayActorOptions, ReplicaConfig
from serve_common.config.external_gates import ExternalGate
from serve_common.config.rollout import RolloutConfig
from serve_controller.shell.control_loop import Term
from tests.simulation.clients import Step
from tests.simulation.crashes import CrashPoint
from tests.simulation.rollout_wishes import FOUL, OUTSIDE
from tests.simulation.runs import Outcome, play
from tests.simulation.sim_host import Code
from tests.simulation.world import Faults, World

GOOD, BAD = GoalStatus.SUCCEEDED, GoalStatus.FAILED


def _code(code: Code) -> ReplicaConfig:
    return ReplicaConfig(import_path=code.value, ray_actor_options=RayActorOptions(num_cpus=1))


def deploy(
    name: str,
    version: str,
    *,
    num: int,
    request_id: str,
    code: Code = Code.GOOD,
    config: int = 0,
    route: str | None = None,
) -> c.Deploy:
    """A deploy; what a story does not name has the default."""
    return c.Deploy(
        name=name,
        version=version,
        request_id=request_id,
        route_prefix=f"/{name}" if route is None else route,
        replica_config=_code(code),
        backend_config=BackendConfig(
            num_replicas=num, user_config=config, graceful_shutdown_timeout_s=2.0, start_timeout_s=2.0
        ),
    )


def application(version: str, *members: str, request_id: str, code: Code = Code.GOOD) -> c.DeployApplication:
    """The application ``shop``; its first member is the ingress."""
    return c.DeployApplication(
        name="shop",
        ingress=members[0],
        route_prefix="/shop",
        request_id=request_id,
        deployments=[c.DeploymentSpec(name=m, version=version, replica_config=_code(code)) for m in members],
    )


STORY: Final = [
    Step(deploy("a", "v1", num=2, request_id="r1"), ends=GOOD),
    Step(application("v1", "web", "model", request_id="r2"), ends=GOOD),
    Step(deploy("a", "v1", num=2, request_id="r3", config=1), ends=GOOD),
    Step(deploy("a", "v2", num=2, request_id="r4", config=1, route="/new"), ends=GOOD),
    Step(deploy("a", "v3", num=2, request_id="r5", code=Code.RAISES), ends=BAD),
    Step(c.UpdateBackendConfig(backend_tag="a", config={"num_replicas": 3}), ends=GOOD),
    Step(application("v2", "web", "cache", request_id="r6", code=Code.RAISES), ends=BAD),
    Step(application("v3", "web", "cache", request_id="r7"), ends=GOOD),
    Step(c.CreateBackend(backend_tag="x", replica_config=_code(Code.GOOD)), ends=GOOD),
    Step(c.CreateEndpoint(endpoint="e", traffic={"x": 0.5, "a": 0.5}, route="/e"), ends=GOOD),
    Step(c.SetTraffic(endpoint="e", weights={"x": 1.0}), ends=GOOD),
    Step(c.ShadowTraffic(endpoint="e", backend_tag="a", proportion=0.5), ends=GOOD),
    Step(c.SetEndpointOptions(endpoint="e", options={"backend_header": "X-To"}), ends=GOOD),
    Step(c.SetCapture(endpoint="e", share=0.5), ends=GOOD),
    Step(c.DrainHost(host_id="host-1"), ends=GOOD),
    Step(c.UndrainHost(host_id="host-1")),
    Step(c.SetHttpOptions(options={"request_timeout_s": 5.0}), ends=GOOD),
    Step(c.Rollback(name="a", to="v1", request_id="r8"), ends=GOOD),
    Step(c.DeleteEndpoint(endpoint="e"), ends=GOOD),
    Step(c.DeleteBackend(backend_tag="x", force_kill=True), ends=GOOD),
    Step(c.DeleteApplication(name="shop"), ends=GOOD),
    Step(deploy("a", "v2", num=1, request_id="r9", config=1), ends=GOOD),
    Step(c.Shutdown(confirm="everything"), ends=GOOD),
]

PAIR_STORY: Final = [
    Step(deploy("a", "v1", num=2, request_id="r1"), ends=GOOD),
    Step(deploy("a", "v2", num=1, request_id="r2", config=1, route="/new"), ends=GOOD),
    Step(deploy("a", "v3", num=2, request_id="r3", code=Code.RAISES), ends=BAD),
    Step(c.DeleteDeployment(name="a"), ends=GOOD),
]


def _rollout(
    version: str,
    *steps: str,
    request_id: str,
    code: Code = Code.GOOD,
    gates: tuple[ExternalGate, ...] = (),
) -> c.StartRollout:
    return c.StartRollout(
        name="a",
        version=version,
        request_id=request_id,
        replica_config={"import_path": code.value},
        rollout=RolloutConfig(steps=steps, gates=gates),
    )


ROLLOUT_STORY: Final = [
    Step(deploy("a", "v1", num=2, request_id="r1"), ends=GOOD),
    Step(_rollout("v2", "25%", "50%", "100%", request_id="r2"), ends=GOOD),
    Step(_rollout("bad", "25%", "100%", request_id="r3"), ends=BAD),
    Step(_rollout("v3", "25%", "100%", request_id="r4", code=Code.RAISES), ends=BAD),
    Step(_rollout(FOUL, "25%", "100%", request_id="r5", gates=(OUTSIDE,)), ends=BAD),
    Step(c.DeleteDeployment(name="a"), ends=GOOD),
]
"""A version that is promoted, one that fails its requests, one that does not start, and one that is refused outside."""


_FIRST: Final = Step(deploy("a", "v1", num=1, request_id="r1"), ends=GOOD)
PROMOTION_STORY: Final = [_FIRST, Step(_rollout("v2", "50%", "100%", request_id="r2"), ends=GOOD)]
ABORT_STORY: Final = [_FIRST, Step(_rollout("bad", "50%", "100%", request_id="r2"), ends=BAD)]


GROUP_STORY: Final = [
    Step(application("v1", "web", "model", request_id="r1"), ends=GOOD),
    Step(application("v2", "web", "cache", request_id="r2", code=Code.RAISES), ends=BAD),
    Step(application("v3", "cache", request_id="r3"), ends=GOOD),
    Step(c.CreateEndpoint(endpoint="e", traffic={"shop/cache": 1.0}, route="/e"), ends=GOOD),
    Step(c.DrainHost(host_id="host-1"), ends=GOOD),
    Step(c.Shutdown(confirm="everything"), ends=GOOD),
]


def run_stuck(term_class: type[Term] = Term) -> Outcome:
    """A host takes a replica, and then neither starts it nor says so, and ends nothing either."""
    world = World(hosts=2, term_class=term_class, faults=Faults(has_deaths=True))
    world.hosts[0].is_hung = True
    world.after(0.3, lambda: setattr(world.hosts[0], "is_numb", True))
    return play(world, [[Step(deploy("a", "v1", num=2, request_id="r1"))]], storm_s=80.0)


def run_stall(term_class: type[Term] = Term) -> Outcome:
    """The only controller stands still for longer than hosts may be silent: nobody is lost by that."""
    world = World(hosts=2, term_class=term_class)
    world.after(4.0, lambda: world.controllers[0].process.stall(9.5))
    last = Step(deploy("b", "v1", num=1, request_id="r2"), think_s=12.0, ends=GOOD)
    return play(world, [[Step(deploy("a", "v1", num=2, request_id="r1"), ends=GOOD), last]])


def run_story(
    story: list[Step],
    crashes: frozenset[CrashPoint] = frozenset(),
    *,
    faults: Faults | None = None,
    term_class: type[Term] = Term,
) -> Outcome:
    """Play a story in a small world, with crashes."""
    world = World(crashes=crashes, hosts=3, term_class=term_class, faults=faults)
    return play(world, [story])


def effects_of(story: list[Step]) -> int:
    """How many effects a story has when nothing crashes."""
    return run_story(story).effects
