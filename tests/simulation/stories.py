"""What clients ask for, drawn from a seed: every command there is, sensible or not."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Final

import msgspec

from serve_common.api import commands as c
from serve_common.config.autoscaling import AutoscalingConfig
from serve_common.config.backend import (
    BackendConfig,
    EndpointOptions,
    OnFailure,
    Placement,
    RayActorOptions,
    ReplicaConfig,
)
from serve_common.config.rollout import RolloutConfig
from tests.simulation.clients import Step
from tests.simulation.rollout_wishes import FOUL, OUTSIDE
from tests.simulation.sim_host import BAD_CONFIG, Code
from tests.simulation.sim_proxy import MISSING_MIDDLEWARE

DEPLOYMENTS: Final = ("a", "b", "shop/extra", "shop/web")
BACKENDS: Final = ("x", "y")
ENDPOINTS: Final = ("e", "f")
MEMBERS: Final = ("web", "model", "cache")
ROUTES: Final = (None, "/a", "/b", "/e", "/shop")
VERSIONS: Final = ("v1", "v2", "v3")
TOO_LARGE: Final = 6.0
"""CPUs that no host has."""


def code(dice: random.Random) -> ReplicaConfig:
    """What runs: mostly good."""
    path = dice.choices(list(Code), weights=[76, 8, 2, 5, 4, 5])[0]
    cpus = dice.choices([0.5, 1.0, TOO_LARGE], weights=[10, 10, 1])[0]
    return ReplicaConfig(import_path=path.value, ray_actor_options=RayActorOptions(num_cpus=cpus))


def config(dice: random.Random) -> BackendConfig:
    """How many, and how they are treated."""
    surge = dice.choice([25.0, 25.0, 100.0, 0.0])
    unavailable = dice.choice([25.0, 50.0, 0.0]) if surge else dice.choice([25.0, 50.0])
    return BackendConfig(
        num_replicas=dice.choice([0, 1, 1, 1, 2, 2, 2, 3, 4]),
        user_config=dice.choice([None, 1, 1, 2, 2, 3, BAD_CONFIG]),
        max_queued_requests=dice.choice([-1, 10, 1000]),
        graceful_shutdown_timeout_s=dice.choice([0.5, 2.0]),
        start_timeout_s=dice.choice([1.0, 2.0]),
        max_constructor_retry_count=dice.choice([1, 2, 3]),
        on_failure=dice.choice(list(OnFailure)),
        max_surge_percent=surge,
        max_unavailable_percent=unavailable,
        placement=dice.choice(list(Placement)),
        max_replicas_per_host=dice.choice([None, None, None, 1, 2]) if unavailable else None,
        autoscaling_config=_autoscaling(dice) if dice.random() < 0.4 else None,
    )


def _autoscaling(dice: random.Random) -> AutoscalingConfig:
    low = dice.choice([0, 1, 2])
    high = low + dice.choice([1, 2, 3])
    initial = dice.choice([None, low, high])
    return AutoscalingConfig(min_replicas=low, max_replicas=high, initial_replicas=initial)


def _endpoint_options(dice: random.Random) -> EndpointOptions:
    return EndpointOptions(backend_header=dice.choice(["", "", "X-To"]))


def _deploy(dice: random.Random, request_id: str | None) -> c.Deploy:
    rollout = None
    if dice.random() < 0.4:
        steps = dice.choice([("50%", "100%"), ("25%", "50% wait", "100%")])
        rollout = RolloutConfig(steps=steps, cool_down_s=dice.choice([0.0, 5.0]))
    return c.Deploy(
        name=dice.choice(DEPLOYMENTS),
        replica_config=code(dice),
        backend_config=msgspec.structs.replace(config(dice), rollout=rollout),
        skips_rollout=dice.random() < 0.1,
        route_prefix=dice.choice(ROUTES),
        version=dice.choice([*VERSIONS, None]),
        prev_version=dice.choice([None, None, None, *VERSIONS]),
        endpoint_options=_endpoint_options(dice),
        request_id=request_id,
    )


def _start_rollout(dice: random.Random, request_id: str | None) -> c.StartRollout:
    steps = dice.choice([("50%", "100%"), ("shadow 50%", "25%", "100%"), ("10% 1s", "50% wait", "100%")])
    path = code(dice).import_path
    return c.StartRollout(
        name=dice.choice([*DEPLOYMENTS, *BACKENDS]),
        version=dice.choice([*VERSIONS, "bad", FOUL, None]),
        replica_config={"import_path": path},
        backend_config=dice.choice([{}, {}, {"user_config": 3}, {"max_queued_requests": 10}]),
        rollout=RolloutConfig(
            steps=steps,
            max_replica_failures=dice.choice([0, 2]),
            # Of code that never runs nothing could be kept.
            keeps_failed=dice.random() < 0.2 and path == Code.GOOD.value,
            cool_down_s=dice.choice([0.0, 5.0]),
            gates=dice.choice([(), (), (OUTSIDE,), (msgspec.structs.replace(OUTSIDE, max_failures=0),)]),
        ),
        again=dice.random() < 0.2,
        request_id=request_id,
    )


def _deploy_application(dice: random.Random, request_id: str | None) -> c.DeployApplication:
    members = dice.sample(MEMBERS, dice.choice([1, 2, 2, 3]))
    return c.DeployApplication(
        name="shop",
        deployments=[
            c.DeploymentSpec(
                name=name,
                replica_config=code(dice),
                backend_config=config(dice),
                version=dice.choice([*VERSIONS, None]),
            )
            for name in members
        ],
        ingress=members[0],
        route_prefix=dice.choice(ROUTES),
        request_id=request_id,
    )


def _some_config(dice: random.Random) -> dict[str, Any]:
    options: dict[str, Any] = {
        "num_replicas": dice.choice([0, 1, 2, 3]),
        "user_config": dice.choice([1, 2, 3, BAD_CONFIG]),
        "max_queued_requests": dice.choice([-1, 10, 1000]),
        "max_constructor_retry_count": dice.choice([1, 3]),
        "autoscaling_config": dice.choice(
            [None, {"min_replicas": 1, "max_replicas": 3}, {"max_replicas": 4}]
        ),
        "num_replica": 1,
    }
    names = (
        dice.sample(list(options)[:-1], dice.choice([1, 1, 2])) if dice.random() < 0.95 else ["num_replica"]
    )
    return {name: options[name] for name in names}


def _split(dice: random.Random) -> dict[str, float]:
    return dice.choice(
        [{"x": 1.0}, {"y": 1.0}, {"x": 0.5, "y": 0.5}, {"x": 0.9, "y": 0.1}, {"a": 1.0}, {"x": 0.7}]
    )


def _http(dice: random.Random) -> dict[str, Any]:
    return dice.choice(
        [
            {"request_timeout_s": dice.choice([1.0, 5.0])},
            {"middlewares": ["good:middleware"]},
            {"middlewares": []},
            {"middlewares": [MISSING_MIDDLEWARE]},
        ]
    )


Rng = Callable[[random.Random, str | None], c.Command[Any]]

COMMANDS: Final[dict[str, tuple[int, Rng]]] = {
    "deploy": (30, _deploy),
    "deploy_application": (12, _deploy_application),
    "create_backend": (
        12,
        lambda d, _: c.CreateBackend(
            backend_tag=d.choice(BACKENDS), replica_config=code(d), backend_config=config(d)
        ),
    ),
    "update_backend_config": (
        10,
        lambda d, _: c.UpdateBackendConfig(
            backend_tag=d.choice([*DEPLOYMENTS, *BACKENDS]), config=_some_config(d)
        ),
    ),
    "scale": (
        10,
        lambda d, _: c.Scale(
            backend_tag=d.choice([*DEPLOYMENTS, *BACKENDS]), num_replicas=d.choice([0, 1, 2, 3])
        ),
    ),
    "pause_autoscaling": (
        5,
        lambda d, _: c.PauseAutoscaling(backend_tag=d.choice([*DEPLOYMENTS, *BACKENDS])),
    ),
    "resume_autoscaling": (
        5,
        lambda d, _: c.ResumeAutoscaling(backend_tag=d.choice([*DEPLOYMENTS, *BACKENDS])),
    ),
    "create_endpoint": (
        8,
        lambda d, _: c.CreateEndpoint(
            endpoint=d.choice(ENDPOINTS), traffic=_split(d), route=d.choice(ROUTES)
        ),
    ),
    "set_traffic": (
        6,
        lambda d, _: c.SetTraffic(endpoint=d.choice([*ENDPOINTS, *ENDPOINTS, "a"]), weights=_split(d)),
    ),
    "shadow_traffic": (
        5,
        lambda d, _: c.ShadowTraffic(
            endpoint=d.choice([*ENDPOINTS, "a"]),
            backend_tag=d.choice([*BACKENDS, "b"]),
            proportion=d.choice([0.0, 0.5, 1.0]),
        ),
    ),
    "set_endpoint_options": (
        5,
        lambda d, _: c.SetEndpointOptions(
            endpoint=d.choice([*ENDPOINTS, "a", "shop/web"]),
            options={"relative_slo_ms": d.choice([None, 100.0, 250.0])},
        ),
    ),
    "set_capture": (
        3,
        lambda d, _: c.SetCapture(
            endpoint=d.choice([*ENDPOINTS, "a", "shop/web"]), share=d.choice([0.0, 0.5, 1.0])
        ),
    ),
    "rollback": (
        8,
        lambda d, r: c.Rollback(
            name=d.choice([*DEPLOYMENTS, *BACKENDS]), to=d.choice([None, None, *VERSIONS, 1]), request_id=r
        ),
    ),
    "start_rollout": (8, _start_rollout),
    "control_rollout": (
        6,
        lambda d, _: c.ControlRollout(
            name=d.choice([*DEPLOYMENTS, *BACKENDS]),
            action=d.choice(list(c.RolloutAction)),
            step=d.choice([None, None, 0]),
        ),
    ),
    "delete_deployment": (6, lambda d, _: c.DeleteDeployment(name=d.choice(DEPLOYMENTS))),
    "delete_application": (3, lambda d, _: c.DeleteApplication(name="shop")),
    "record_build_failure": (
        3,
        lambda d, _: c.RecordBuildFailure(name=d.choice(["shop", "stall"]), error=f"no. {d.randint(1, 3)}"),
    ),
    "delete_backend": (
        5,
        lambda d, _: c.DeleteBackend(backend_tag=d.choice(BACKENDS), force_kill=d.random() < 0.5),
    ),
    "delete_endpoint": (4, lambda d, _: c.DeleteEndpoint(endpoint=d.choice(ENDPOINTS))),
    "set_http_options": (5, lambda d, _: c.SetHttpOptions(options=_http(d))),
    "drain_host": (5, lambda d, _: c.DrainHost(host_id=d.choice(["host-1", "host-2", "host-9"]))),
    "undrain_host": (4, lambda d, _: c.UndrainHost(host_id=d.choice(["host-1", "host-2"]))),
    "shutdown": (1, lambda d, _: c.Shutdown(confirm="everything")),
}


def draw_story(dice: random.Random, client: str) -> list[Step]:
    """The steps of one client. What it did last is often asked again in other words, so that changes meet."""
    names, weights = list(COMMANDS), [weight for weight, _ in COMMANDS.values()]
    steps = []
    if dice.random() < 0.3:
        steps = [
            Step(c.CreateBackend(backend_tag="x", replica_config=code(dice), backend_config=config(dice))),
            Step(
                c.CreateBackend(backend_tag="y", replica_config=code(dice), backend_config=config(dice)),
                waits=False,
            ),
            Step(c.CreateEndpoint(endpoint="e", traffic={"x": 1.0}, route=dice.choice(ROUTES)), waits=False),
        ]
    for number in range(dice.choice([3, 5, 8])):
        draw = COMMANDS[dice.choices(names, weights=weights)[0]][1]
        request_id = f"{client}-{number}" if dice.random() < 0.7 else None
        command = draw(dice, request_id)
        steps.append(
            Step(
                command, waits=dice.random() < 0.6, think_s=dice.choice([0.0, 0.05, 0.5, dice.uniform(0, 3)])
            )
        )
    return steps
