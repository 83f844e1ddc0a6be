"""Configuration classes with the names, fields, defaults and checks of ``ray.serve.config`` (Ray Serve 2.60).

Why Pydantic models beside the structs of `serve_common.config`: programs written for Ray Serve construct these, catch
Pydantic's ValidationError, read fields back and dump them. `muster.sdk.deployments` translates them; nothing else of
Muster knows them. What has no meaning here is refused when it is set, with a sentence that names the substitute.
"""

from __future__ import annotations

import importlib
import json
import operator
import warnings
from collections.abc import Callable
from enum import Enum
from typing import Annotated, Any, Final, Literal, TypeVar, cast

import msgspec
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_serializer,
    field_validator,
    model_validator,
)

from serve_common.config.autoscaling import AggregationFunction, AutoscalingContext
from serve_common.config.rollout import RolloutConfig, check_rollout_config
from serve_common.errors import BadField
from serve_common.names import DeploymentID

__all__ = [
    "DEFAULT_METRICS_INTERVAL_S",
    "AggregationFunction",
    "AutoscalingConfig",
    "AutoscalingContext",
    "AutoscalingPolicy",
    "BackpressureConfig",
    "ControllerOptions",
    "DeploymentActorConfig",
    "DeploymentID",
    "GangPlacementStrategy",
    "GangRuntimeFailurePolicy",
    "GangSchedulingConfig",
    "HTTPOptions",
    "ProxyLocation",
    "RequestRouterConfig",
    "gRPCOptions",
]

DEFAULT_POLICY: Final = "muster.autoscaling_policy:default_autoscaling_policy"
"""Names Muster's own default policy; Ray Serve's name for its own is understood as well."""
RAY_DEFAULT_POLICY: Final = "ray.serve.autoscaling_policy:default_autoscaling_policy"
DEFAULT_ROUTER: Final = "muster.request_router:PowerOfTwoChoicesRequestRouter"
DEFAULT_METRICS_INTERVAL_S: Final = 10.0
_LOGGED_VALUE_MAX: Final = 200
Value = TypeVar("Value")


def check_json(value: Value, name: str) -> Value:
    """Return ``value``; raises ValueError when it cannot be written as JSON."""
    try:
        json.dumps(value)
    except TypeError as error:
        raise ValueError(f"{name} is not JSON-serializable: {error}.") from error
    return value


def check_rollout(value: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return ``value``; raises ValueError unless it has settings of a rollout."""
    if value is not None:
        try:
            check_rollout_config(msgspec.convert(value, RolloutConfig))
        except (msgspec.ValidationError, BadField) as error:
            raise ValueError(str(error)) from error
    return value


RolloutDict = Annotated[dict[str, Any] | None, AfterValidator(check_rollout)]
"""Settings of a rollout by their names, or None for none."""


class AutoscalingPolicy(BaseModel):
    """A function that decides the number of replicas."""

    policy_function: str | Callable[..., Any] = DEFAULT_POLICY
    """The function, or a class whose instances are called, or ``module:function``; it takes an `AutoscalingContext`."""
    policy_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the class, as JSON; additional ones of a function that the controller imports."""

    @field_validator("policy_kwargs")
    @classmethod
    def _are_json(cls, value: dict[str, Any]) -> dict[str, Any]:
        return check_json(value, "policy_kwargs")

    @field_serializer("policy_function", when_used="json")
    def _name(self, value: str | Callable[..., Any]) -> str:
        kind = value if isinstance(value, str) or hasattr(value, "__qualname__") else type(value)
        return kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}"

    def is_default_policy_function(self) -> bool:
        """True when no function of the user's own is set."""
        return self.policy_function in (DEFAULT_POLICY, RAY_DEFAULT_POLICY)

    def get_policy(self) -> Callable[..., Any]:
        """The function or class itself, imported where a path names it. Raises ImportError and AttributeError."""
        found: Any = self.policy_function
        if isinstance(found, str):
            path = DEFAULT_POLICY if self.is_default_policy_function() else found
            module, _, attribute = path.partition(":") if ":" in path else path.rpartition(".")
            found = operator.attrgetter(attribute)(importlib.import_module(module))
        return cast("Callable[..., Any]", found)

    def __hash__(self) -> int:
        return hash((self.policy_function, json.dumps(self.policy_kwargs, sort_keys=True, default=str)))


class AutoscalingConfig(BaseModel):
    """How the number of replicas follows the load; all times in seconds."""

    min_replicas: NonNegativeInt = 1
    """Lower limit; with 0 an idle deployment is scaled to zero."""
    initial_replicas: NonNegativeInt | None = None
    """Replicas started by the first deploy; None means ``min_replicas``."""
    max_replicas: PositiveInt = 1
    """Upper limit, at least ``min_replicas``."""
    target_ongoing_requests: PositiveFloat | None = 2
    """Target number of requests per replica, waiting ones included."""
    metrics_interval_s: PositiveFloat = DEFAULT_METRICS_INTERVAL_S
    """Seconds between evaluations of the load."""
    look_back_period_s: PositiveFloat = 30.0
    """Seconds over which the load is aggregated."""
    smoothing_factor: PositiveFloat = 1.0
    """Deprecated by Ray Serve: the factor of both directions where no other is set."""
    upscale_smoothing_factor: PositiveFloat | None = None
    """Deprecated by Ray Serve in favour of ``upscaling_factor``."""
    downscale_smoothing_factor: PositiveFloat | None = None
    """Deprecated by Ray Serve in favour of ``downscaling_factor``."""
    upscaling_factor: PositiveFloat | None = None
    """Multiplier of each upscaling step."""
    downscaling_factor: PositiveFloat | None = None
    """Multiplier of each downscaling step."""
    downscale_delay_s: NonNegativeFloat = 600.0
    """Seconds for which fewer replicas must be desired before some are removed."""
    downscale_to_zero_delay_s: NonNegativeFloat | None = None
    """Like ``downscale_delay_s``, for removing the last replica."""
    upscale_delay_s: NonNegativeFloat = 30.0
    """Seconds for which more replicas must be desired before some are added."""
    aggregation_function: str | AggregationFunction = AggregationFunction.MEAN
    """How the load over the look-back period becomes one number."""
    policy: AutoscalingPolicy = Field(default_factory=AutoscalingPolicy)
    """The function that decides; the default policy unless set."""

    @model_validator(mode="after")
    def _are_in_order(self) -> AutoscalingConfig:
        low, high, initial = self.min_replicas, self.max_replicas, self.initial_replicas
        if high < low:
            raise ValueError(f"max_replicas ({high}) must be greater than or equal to min_replicas ({low})!")
        if initial is not None and initial < low:
            raise ValueError(
                f"min_replicas ({low}) must be less than or equal to initial_replicas ({initial})!"
            )
        if initial is not None and initial > high:
            raise ValueError(
                f"max_replicas ({high}) must be greater than or equal to initial_replicas ({initial})!"
            )
        return self

    @field_validator("metrics_interval_s")
    @classmethod
    def _is_deprecated(cls, value: float) -> float:
        if value != DEFAULT_METRICS_INTERVAL_S:
            warnings.warn(
                "The `metrics_interval_s` field in AutoscalingConfig is deprecated by Ray Serve; it works here.",
                DeprecationWarning,
                stacklevel=2,
            )
        return value

    @field_validator("look_back_period_s")
    @classmethod
    def _is_longer_than_the_interval(cls, value: float, info: Any) -> float:
        interval_s = info.data.get("metrics_interval_s", DEFAULT_METRICS_INTERVAL_S)
        if value <= interval_s:
            warnings.warn(
                f"`look_back_period_s` ({value}) must be greater than `metrics_interval_s` ({interval_s}).",
                FutureWarning,
                stacklevel=2,
            )
        return value

    @field_validator("aggregation_function")
    @classmethod
    def _is_known(cls, value: str | AggregationFunction) -> AggregationFunction:
        return value if isinstance(value, AggregationFunction) else AggregationFunction(value.lower())

    @classmethod
    def default(cls) -> AutoscalingConfig:
        """The configuration that ``num_replicas="auto"`` stands for: 1 to 100 replicas, 2 requests each."""
        return cls(target_ongoing_requests=2, min_replicas=1, max_replicas=100)

    def get_upscaling_factor(self) -> float:
        """The multiplier of upscaling steps, deprecated fields included."""
        return self.upscaling_factor or self.upscale_smoothing_factor or self.smoothing_factor

    def get_downscaling_factor(self) -> float:
        """The multiplier of downscaling steps, deprecated fields included."""
        return self.downscaling_factor or self.downscale_smoothing_factor or self.smoothing_factor

    def get_target_ongoing_requests(self) -> float | None:
        """The target number of requests per replica."""
        return self.target_ongoing_requests


class BackpressureConfig(BaseModel):
    """HTTP response to a request when ``max_queued_requests`` already wait."""

    model_config = ConfigDict(extra="forbid")

    status_code: Literal[503, 429] = 503
    """HTTP status."""
    retry_after_s: NonNegativeFloat | None = Field(default=None, allow_inf_nan=False)
    """Seconds in the header ``Retry-After``."""


_ROUTERS: Final = {
    "PowerOfTwoChoicesRequestRouter": "power_of_two_choices",
    "RoundRobinRequestRouter": "round_robin",
    "RoundRobinRouter": "round_robin",
}
"""Routers of Ray Serve by class name, and the replica policy here that is the same."""


class RequestRouterConfig(BaseModel):
    """How requests are routed to the replicas of a deployment."""

    request_router_class: str | Callable[..., Any] = DEFAULT_ROUTER
    """``module:Class`` of one of Ray Serve's routers that have a counterpart: power of two choices, or round robin."""
    request_router_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Refused unless empty: routers here have no arguments."""
    request_routing_stats_period_s: PositiveFloat = 10
    """Has no effect here: replicas report changes at once."""
    request_routing_stats_timeout_s: PositiveFloat = 30
    """As ``request_routing_stats_period_s``."""
    initial_backoff_s: PositiveFloat = 0.025
    """Has no effect here: a request waits for a free slot and is notified."""
    backoff_multiplier: PositiveFloat = 2
    """As ``initial_backoff_s``."""
    max_backoff_s: PositiveFloat = 0.5
    """As ``initial_backoff_s``."""

    @field_validator("request_router_kwargs")
    @classmethod
    def _are_json(cls, value: dict[str, Any]) -> dict[str, Any]:
        return check_json(value, "request_router_kwargs")

    @model_validator(mode="after")
    def _has_a_counterpart(self) -> RequestRouterConfig:
        if self.request_router_kwargs:
            raise ValueError("request_router_kwargs are not supported: Muster's routers have no arguments.")
        self.get_replica_policy()
        return self

    def get_replica_policy(self) -> str:
        """The name of the replica policy that is the same; raises ValueError when there is none."""
        router = self.request_router_class
        name = (
            router.partition(":")[2] or router.rpartition(".")[2]
            if isinstance(router, str)
            else router.__name__
        )
        try:
            return _ROUTERS[name]
        except KeyError:
            raise ValueError(
                f"request_router_class {str(router)[:_LOGGED_VALUE_MAX]!r} is not supported: routers of one's own "
                f"do not exist in Muster. There are {', '.join(_ROUTERS)}; calls that belong together are kept "
                "together by options(session_id=…)."
            ) from None


class ProxyLocation(str, Enum):
    """Where Ray Serve runs proxies. Here they are services of the stack, so this changes nothing and warns."""

    Disabled = "Disabled"
    HeadOnly = "HeadOnly"
    EveryNode = "EveryNode"


def normalize_location(location: ProxyLocation | str | None) -> ProxyLocation | None:
    """The location by its value or by Ray Serve's older names. Raises ValueError and TypeError as Ray Serve does."""
    if location is None or isinstance(location, ProxyLocation):
        return location
    if not isinstance(location, str):
        raise TypeError(f"Must be a `ProxyLocation` or str, got: {type(location)}.")
    return ProxyLocation.Disabled if location == "NoServer" else ProxyLocation(location)


class HTTPOptions(BaseModel):
    """HTTP options of the proxies."""

    model_config = ConfigDict(validate_assignment=True, arbitrary_types_allowed=True)

    host: str | None = "127.0.0.1"
    """Address that proxies listen on. Counts when `start` or `run` starts an embedded stack."""
    port: int = 8000
    """Port that proxies listen on. Counts when `start` or `run` starts an embedded stack."""
    middlewares: list[Any] = []
    """Refused by Ray Serve too: use middlewares of the ingress application."""
    location: ProxyLocation | None = None
    """Deprecated by Ray Serve; proxies are services of the stack here."""
    num_cpus: int = 0
    """Refused by Ray Serve too, unless 0."""
    root_url: str = ""
    """Has no meaning here."""
    root_path: str = ""
    """Path that a load balancer in front removes from URLs; applications get it before their ``route_prefix``."""
    request_timeout_s: float | None = None
    """Seconds from a request to the beginning of its response; None leaves the stack's limit."""
    keep_alive_timeout_s: int = 90
    """Seconds that an idle connection stays open."""
    ssl_keyfile: str | None = None
    """File of the private key for HTTPS, in PEM. Counts when `start` or `run` starts an embedded stack."""
    ssl_certfile: str | None = None
    """File of its certificate. Both, or none."""
    ssl_keyfile_password: str | None = None
    """Password of the key; None for none."""
    ssl_ca_certs: str | None = None
    """Refused here: certificates of clients are not checked."""

    @field_validator("location", mode="before")
    @classmethod
    def _location(cls, value: ProxyLocation | str | None) -> ProxyLocation | None:
        if value is not None:
            warnings.warn(
                "`location` in HTTPOptions is deprecated and will be removed in a future version. Use the "
                "`proxy_location` argument to `serve.start` instead.",
                DeprecationWarning,
                stacklevel=2,
            )
        return normalize_location(value)

    @field_validator("middlewares")
    @classmethod
    def _no_middlewares(cls, value: list[Any]) -> list[Any]:
        if value:
            raise ValueError(
                "`middlewares` in HTTPOptions has been removed. Use Serve's FastAPI integration to configure "
                "middlewares on ingress deployments instead."
            )
        return value

    @field_validator("num_cpus")
    @classmethod
    def _no_cpus(cls, value: int) -> int:
        if value:
            raise ValueError(
                "`num_cpus` in HTTPOptions has been removed. Serve no longer supports configuring CPU reservations for "
                "HTTP proxy actors via HTTPOptions."
            )
        return value

    @model_validator(mode="after")
    def _is_supported(self) -> HTTPOptions:
        if self.host is None and self.location is not ProxyLocation.Disabled:
            object.__setattr__(self, "location", ProxyLocation.Disabled)  # without the warning
        if bool(self.ssl_keyfile) != bool(self.ssl_certfile):
            raise ValueError("Both ssl_keyfile and ssl_certfile must be provided together to enable HTTPS.")
        if self.ssl_ca_certs:
            raise ValueError(
                "ssl_ca_certs is not supported: let a load balancer in front of Muster check clients' certificates."
            )
        return self


class gRPCOptions(BaseModel):  # noqa: N801 - Ray Serve's name
    """Options of Ray Serve's gRPC proxy, which Muster does not have."""

    port: int = 9000
    """Port of the gRPC proxy."""
    grpc_servicer_functions: list[str] = []
    """Functions that add servicers; refused here unless empty."""
    request_timeout_s: float | None = None
    """Seconds from a request to its response."""
    enable_reflection: bool = True
    """Whether the gRPC server describes itself."""

    @property
    def grpc_servicer_func_callable(self) -> list[Any]:
        """Always empty, as there is no gRPC ingress."""
        return []

    @field_validator("grpc_servicer_functions")
    @classmethod
    def _no_grpc(cls, value: list[str]) -> list[str]:
        if value:
            raise ValueError(
                "gRPC ingress is not supported by Muster; use HTTP, or call deployments over NATS."
            )
        return value


class ControllerOptions(BaseModel):
    """Options of Ray Serve's controller actor. Here the controller is a service with an environment of its own."""

    model_config = ConfigDict(extra="forbid")

    runtime_env: dict[str, Any] | None = None
    """Its ``env_vars``. `start` and `run` refuse it unless None: set the variables of the controller's service."""

    @field_validator("runtime_env", mode="before")
    @classmethod
    def _environment(cls, value: Any) -> Any:
        if value is None:
            return value
        if not isinstance(value, dict):
            raise ValueError(f"runtime_env must be a dict, got {type(value).__name__}.")  # noqa: TRY004 - Pydantic collects it
        if others := sorted(set(value) - {"env_vars"}):
            raise ValueError(
                "ControllerOptions.runtime_env only supports ['env_vars'] in this version; got disallowed keys "
                f"{others}. Per-replica runtime_env belongs on the deployment, not on the controller."
            )
        variables = value.get("env_vars", {})
        if not isinstance(variables, dict):
            raise ValueError(  # noqa: TRY004 - as above
                f"runtime_env.env_vars must be a dict[str, str], got {type(variables).__name__}."
            )
        for name, text in variables.items():
            if not isinstance(name, str) or not name:
                raise ValueError(f"env_vars key must be a non-empty str, got {name!r}.")
            if not isinstance(text, str):
                raise ValueError(  # noqa: TRY004 - as above
                    f"env_vars[{name!r}] must be str (got {type(text).__name__}); coerce explicitly."
                )
        return value


class GangPlacementStrategy(str, Enum):
    """How Ray Serve places a gang."""

    PACK = "PACK"
    SPREAD = "SPREAD"


class GangRuntimeFailurePolicy(str, Enum):
    """What Ray Serve does when a replica of a gang fails."""

    RESTART_GANG = "RESTART_GANG"
    RESTART_REPLICA = "RESTART_REPLICA"


class GangSchedulingConfig(BaseModel):
    """Replicas that Ray Serve schedules together; a deployment that has it is refused here."""

    gang_size: PositiveInt
    """Replicas of one gang."""
    gang_placement_strategy: GangPlacementStrategy = GangPlacementStrategy.PACK
    """How the replicas of a gang are placed."""
    runtime_failure_policy: GangRuntimeFailurePolicy = GangRuntimeFailurePolicy.RESTART_GANG
    """What happens when one of them fails."""


class DeploymentActorConfig(BaseModel):
    """A Ray actor that all replicas of a deployment share in Ray Serve; a deployment that has it is refused here."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    name: str
    """Name of the actor within the deployment."""
    actor_class: Any
    """Class of the actor, or its import path."""
    init_args: tuple[Any, ...] = ()
    """Positional arguments of its constructor."""
    init_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of its constructor."""
    actor_options: dict[str, Any] = Field(default_factory=dict)
    """Ray's options of the actor."""
