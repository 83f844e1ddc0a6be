"""Commands as tests give them: what a test does not name has a default that works."""

from __future__ import annotations

import msgspec

from serve_common.api.commands import CreateBackend, CreateEndpoint, Deploy, DeployApplication, DeploymentSpec
from serve_common.config.backend import BackendConfig, RayActorOptions, ReplicaConfig

BAD_CODE = "bad:Code"
UNUSABLE_CODE = "unusable:Code"
"""Its constructor raises."""
GOOD_CODE = "good:Code"


def replica_config(code: str = GOOD_CODE, *, cpus: float = 1.0, gpus: float = 0.0) -> ReplicaConfig:
    """What code runs, and what it takes."""
    options = RayActorOptions(num_cpus=cpus, num_gpus=gpus)
    return ReplicaConfig(import_path=code, ray_actor_options=options)


def backend_config(
    num: int = 1, *, config: object = None, retries: int = 3, **options: object
) -> BackendConfig:
    """How many run and how; ``options`` are further fields by their names."""
    fields = {"num_replicas": num, "user_config": config, "max_constructor_retry_count": retries, **options}
    return msgspec.convert(fields, BackendConfig)


def deploy(
    name: str = "a",
    *,
    version: str | None = "v1",
    prev_version: str | None = None,
    num: int = 1,
    config: object = None,
    code: str = GOOD_CODE,
    route: str | None = None,
    cpus: float = 1.0,
    gpus: float = 0.0,
    retries: int = 3,
    request_id: str | None = None,
    **options: object,
) -> Deploy:
    """A deploy command; ``options`` are of its backend's configuration."""
    return Deploy(
        name=name,
        version=version,
        prev_version=prev_version,
        request_id=request_id,
        route_prefix=route,
        replica_config=replica_config(code, cpus=cpus, gpus=gpus),
        backend_config=backend_config(num, config=config, retries=retries, **options),
    )


def create_backend(
    name: str = "b", *, num: int = 1, code: str = GOOD_CODE, cpus: float = 1.0, **options: object
) -> CreateBackend:
    """A backend by itself."""
    return CreateBackend(
        backend_tag=name,
        replica_config=replica_config(code, cpus=cpus),
        backend_config=backend_config(num, **options),
    )


def create_endpoint(
    name: str = "e", *, route: str | None = None, methods: list[str] | None = None, **traffic: float
) -> CreateEndpoint:
    """An endpoint by itself: ``traffic`` are the weights of its backends, ``b`` alone unless any are given."""
    return CreateEndpoint(
        endpoint=name,
        route=route,
        traffic=traffic or {"b": 1.0},
        methods=["GET"] if methods is None else methods,
    )


def spec(
    name: str,
    *,
    version: str | None = "v1",
    num: int = 1,
    code: str = GOOD_CODE,
    cpus: float = 1.0,
    **options: object,
) -> DeploymentSpec:
    """One deployment of an application."""
    return DeploymentSpec(
        name=name,
        version=version,
        replica_config=replica_config(code, cpus=cpus),
        backend_config=backend_config(num, **options),
    )


def application(
    *deployments: DeploymentSpec,
    name: str = "app",
    ingress: str | None = None,
    route: str | None = None,
    request_id: str | None = None,
) -> DeployApplication:
    """An application; its first deployment is the ingress unless another one is named."""
    return DeployApplication(
        name=name,
        deployments=list(deployments),
        ingress=deployments[0].name if ingress is None else ingress,
        route_prefix=route,
        request_id=request_id,
    )
