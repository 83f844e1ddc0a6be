"""From Ray Serve's words to Muster's: options to configurations."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path
from typing import Any, Final

import msgspec

from muster.config import AutoscalingConfig as ServeAutoscaling
from muster.schema import LoggingConfig
from muster.sdk.build import BuiltApplication, BuiltDeployment
from muster.sdk.policies import BuiltPolicy
from serve_common.api.commands import DeployApplication, DeploymentSpec
from serve_common.config.autoscaling import AutoscalingConfig, AutoscalingPolicy
from serve_common.config.backend import (
    EVERYTHING,
    BackendConfig,
    BackpressureConfig,
    EndpointOptions,
    ErrorFormat,
    RayActorOptions,
    ReplicaConfig,
    ReplicaPolicyName,
)
from serve_common.config.backend import LoggingConfig as ReplicaLogging
from serve_common.config.rollout import RolloutConfig
from serve_common.errors import BadField

_log: Final = logging.getLogger("ray.serve")

_VERSION_LENGTH: Final = 16
_PANIC_HOLD_S: Final = AutoscalingConfig(max_replicas=1).panic_hold_s
_RETRIES_PER_REPLICA: Final = 3
"""Failed starts for each replica wanted after which a deploy fails, as Ray Serve counts them."""


def deploy_command(
    app: BuiltApplication,
    logging_config: dict[str, Any] | LoggingConfig | None,
    *,
    external_scaler: bool,
    app_config: dict[str, Any] | None = None,
) -> DeployApplication:
    """The command that deploys ``app``; its code must be uploaded before. Raises `BadField`.

    ``logging_config`` is for the deployments that have none. ``app_config`` is recorded: what a configuration file has
    for it. Without one, as of `serve.run`, replicas are replaced where their ``user_config`` or
    ``max_ongoing_requests`` is another one, as in Ray Serve; a file reconfigures them.
    """
    if external_scaler:
        for each in app.deployments:
            if each.deployment.deployment_options.autoscaling_config is not None:
                raise BadField(
                    f"{each.name}.autoscaling_config", "is not possible with external_scaler_enabled"
                )
    return DeployApplication(
        name=app.name,
        deployments=[
            _deployment_spec(each, logging_config, is_run=app_config is None) for each in app.deployments
        ],
        ingress=app.ingress,
        route_prefix=app.route_prefix,
        app_config=app_config,
    )


_NOT_APPLIED: Final = frozenset({"graceful_shutdown_wait_loop_s"})
"""Options that are checked and have no effect."""
_ROUTING: Final = frozenset({"request_router_class", "request_router_kwargs"})
"""Fields of a ``request_router_config`` that have one; the others are times of Ray Serve's polling."""


def _deployment_spec(
    built: BuiltDeployment, logging_config: dict[str, Any] | LoggingConfig | None, *, is_run: bool
) -> DeploymentSpec:
    router = built.deployment.deployment_options.request_router_config
    for name in sorted(built.deployment.chosen_options & _NOT_APPLIED | router.model_fields_set - _ROUTING):
        _log.warning("%s: %s has no effect in Muster.", built.name, name)
    config = ReplicaConfig(
        import_path=_import_path(built.deployment.func_or_class),
        code=built.digest,
        working_dir=built.environment.working_dir,
        py_modules=built.environment.py_modules,
        ray_actor_options=_actor_options(built),
    )
    # Equal code with equal resources is an equal version: deploying it again replaces no replica.
    backend_config = _backend_config(built, built.deployment.logging_config or logging_config)
    content = msgspec.json.encode(config)
    if is_run:
        content += msgspec.json.encode([backend_config.user_config, backend_config.max_concurrent_queries])
    version = hashlib.sha256(content).hexdigest()[:_VERSION_LENGTH]
    return DeploymentSpec(
        name=built.name,
        replica_config=config,
        backend_config=backend_config,
        endpoint_options=EndpointOptions(error_format=ErrorFormat.TEXT),
        version=version,
    )


def _import_path(target: Any) -> str:
    """Names the code for people; nothing is imported by it."""
    module = getattr(target, "__module__", None) or "__main__"
    name = getattr(target, "__qualname__", type(target).__qualname__).rpartition("<locals>.")[2]
    attribute = name if name.replace(".", "_").isidentifier() else "function"
    return f"{module}:{attribute}"


def _actor_options(built: BuiltDeployment) -> RayActorOptions:
    options = built.deployment.ray_actor_options
    return RayActorOptions(
        num_cpus=float(options["num_cpus"]),
        num_gpus=float(options.get("num_gpus", 0)),
        memory=float(options.get("memory", 0)),
        resources={name: float(amount) for name, amount in options.get("resources", {}).items()},
        runtime_env=built.environment.runtime_env,
    )


def _logging(config: dict[str, Any] | LoggingConfig | None) -> ReplicaLogging | None:
    if config is None:
        return None
    fields = LoggingConfig.model_validate(config).model_dump(mode="json")
    fields["logs_dir"] = str(Path(fields["logs_dir"]).absolute()) if fields["logs_dir"] else ""
    return msgspec.convert(fields, ReplicaLogging)


def _backend_config(
    built: BuiltDeployment, logging_config: dict[str, Any] | LoggingConfig | None
) -> BackendConfig:
    options = built.deployment.deployment_options
    autoscaling = options.autoscaling_config
    wanted = options.num_replicas or 1
    if autoscaling is not None:
        wanted = autoscaling.initial_replicas or max(autoscaling.min_replicas, 1)
    # Both budgets: new replicas start first, and where there is no room for one, an old one stops first.
    share = options.rolling_update_percentage * 100.0
    is_surge_chosen = "max_surge_percent" in built.deployment.chosen_options
    return BackendConfig(
        num_replicas=options.num_replicas or 1,
        autoscaling_config=None if autoscaling is None else _autoscaling(autoscaling, built.policy),
        max_concurrent_queries=options.max_ongoing_requests,
        max_queued_requests=options.max_queued_requests,
        user_config=options.user_config,
        logging_config=_logging(logging_config),
        graceful_shutdown_timeout_s=options.graceful_shutdown_timeout_s,
        health_check_period_s=options.health_check_period_s,
        health_check_timeout_s=options.health_check_timeout_s,
        max_constructor_retry_count=min(options.max_constructor_retry_count, _RETRIES_PER_REPLICA * wanted),
        max_replicas_per_host=built.deployment.max_replicas_per_node,
        backpressure_config=BackpressureConfig(
            status_code=options.backpressure_config.status_code,
            retry_after_s=options.backpressure_config.retry_after_s,
        ),
        replica_policy=ReplicaPolicyName(options.request_router_config.get_replica_policy()),
        max_surge_percent=float(options.max_surge_percent) if is_surge_chosen else share,
        max_unavailable_percent=share,
        rollout=None if options.rollout is None else msgspec.convert(options.rollout, RolloutConfig),
        may_call=(EVERYTHING,),  # as in Ray Serve: programs find other applications by `get_app_handle`
    )


def _autoscaling(config: ServeAutoscaling, built: BuiltPolicy | None) -> AutoscalingConfig:
    policy = AutoscalingPolicy()
    if built is not None:
        policy = AutoscalingPolicy(
            policy_function=built.path, policy_kwargs=built.kwargs, code=built.digest, scope=built.scope
        )
    aggregation = ServeAutoscaling.model_fields["aggregation_function"].default
    return AutoscalingConfig(
        min_replicas=config.min_replicas,
        initial_replicas=config.initial_replicas,
        max_replicas=config.max_replicas,
        target_ongoing_requests=config.target_ongoing_requests or 2.0,
        metrics_interval_s=max(1.0, config.metrics_interval_s),
        look_back_period_s=max(1.0, config.look_back_period_s),
        upscaling_factor=config.get_upscaling_factor(),
        downscaling_factor=config.get_downscaling_factor(),
        upscale_delay_s=config.upscale_delay_s,
        downscale_delay_s=config.downscale_delay_s,
        downscale_to_zero_delay_s=config.downscale_to_zero_delay_s,
        # A burst adds replicas at once; it must not hold them for longer than the program's own delay.
        panic_hold_s=min(_PANIC_HOLD_S, config.downscale_delay_s),
        aggregation_function=type(aggregation)(config.aggregation_function),
        policy=policy,
    )
