"""Schemas of configuration files, and the classes that `muster.status` returns, with the names and checks of
``ray.serve.schema`` (Ray Serve 2.60)."""

from __future__ import annotations

import logging
import os
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any, Final

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    StrictInt,
    ValidationInfo,
    field_validator,
    model_validator,
)

from muster.config import (
    AutoscalingConfig,
    AutoscalingPolicy,
    BackpressureConfig,
    ControllerOptions,
    DeploymentActorConfig,
    GangSchedulingConfig,
    ProxyLocation,
    RequestRouterConfig,
)
from muster.sdk.absent import absent
from muster.sdk.states import (
    ApplicationStatus,
    ApplicationStatusOverview,
    DeploymentStatus,
    DeploymentStatusOverview,
    DeploymentStatusTrigger,
    ProxyStatus,
    ReplicaState,
    ServeStatus,
)
from serve_common.config.backend import LOG_ATTRIBUTES
from serve_common.protocol import reports

__all__ = [
    "DEFAULT",
    "ApplicationStatus",
    "ApplicationStatusOverview",
    "AutoscalingConfig",
    "AutoscalingPolicy",
    "BackpressureConfig",
    "ControllerOptions",
    "DeploymentActorConfig",
    "DeploymentSchema",
    "DeploymentStatus",
    "DeploymentStatusOverview",
    "DeploymentStatusTrigger",
    "EncodingType",
    "GangSchedulingConfig",
    "HTTPOptionsSchema",
    "LoggingConfig",
    "ProxyLocation",
    "ProxyStatus",
    "RayActorOptionsSchema",
    "ReplicaRank",
    "ReplicaState",
    "RequestRouterConfig",
    "ServeApplicationSchema",
    "ServeDeploySchema",
    "ServeStatus",
    "TracingConfig",
    "gRPCOptionsSchema",
]


class DEFAULT(Enum):
    """The value of an option that was not set, as distinct from one that was set to None."""

    VALUE = 1


class EncodingType(str, Enum):
    """How log lines are written."""

    TEXT = "TEXT"
    JSON = "JSON"


class LoggingConfig(BaseModel):
    """Log lines of a deployment's replicas, as ``muster logs`` shows them."""

    model_config = ConfigDict(extra="forbid")

    encoding: str | EncodingType = Field(
        default_factory=lambda: os.environ.get("RAY_SERVE_LOG_ENCODING", "TEXT"), validate_default=True
    )
    """Whether ``muster logs`` shows them as text or as JSON objects."""
    log_level: int | str = "INFO"
    """Lowest level that the loggers ``ray.serve`` and ``muster`` of replicas write; a name or a number of `logging`."""
    logs_dir: str | None = None
    """Directory on the hosts, or relative to the program's, where each replica writes these lines to a file too."""
    enable_access_log: bool = True
    """Whether replicas log a line for each request, at INFO by the logger ``ray.serve``."""
    additional_log_standard_attrs: list[str] = Field(default_factory=list)
    """Attributes of ``logging.LogRecord`` that each line has in addition."""

    @field_validator("encoding")
    @classmethod
    def _is_an_encoding(cls, value: str | EncodingType) -> str | EncodingType:
        if value not in list(EncodingType):
            raise ValueError(f"Got '{value}' for encoding. Encoding must be one of {set(EncodingType)}.")
        return value

    @field_validator("log_level")
    @classmethod
    def _is_a_level(cls, value: int | str) -> str:
        levels = logging.getLevelNamesMapping()
        if isinstance(value, int):
            name = logging.getLevelName(value)
            if name not in levels:
                numbers = sorted(set(levels.values()), reverse=True)
                raise ValueError(f'Got "{value}" for log_level. log_level must be one of {numbers}.')
            return str(name)
        if value not in levels:
            raise ValueError(f'Got "{value}" for log_level. log_level must be one of {list(levels)}.')
        return value

    @field_validator("additional_log_standard_attrs")
    @classmethod
    def _are_attributes(cls, value: list[str]) -> list[str]:
        for name in value:
            if name not in LOG_ATTRIBUTES:
                raise ValueError(
                    f"Unknown attribute '{name}'. Additional log standard attributes must be one of "
                    f"{set(LOG_ATTRIBUTES)}."
                )
        return list(dict.fromkeys(value))


class TracingConfig(BaseModel):
    """Ray Serve's tracing options. Tracing is configured by OTEL_* variables of the services here."""

    model_config = ConfigDict(extra="forbid")

    enabled: bool = False
    """Whether spans are exported."""
    exporter_import_path: str = ""
    """Function that makes Ray Serve's exporters; refused here unless empty."""
    sampling_ratio: float = 0.01
    """Share of traces that are kept, 0 to 1."""

    @field_validator("sampling_ratio")
    @classmethod
    def _is_a_share(cls, value: float) -> float:
        if not 0 <= value <= 1:
            raise ValueError(f"sampling_ratio must be between 0.0 and 1.0, got {value}.")
        return value


LOCAL_PATHS: Final = {"local_paths": True}
"""Validation context in which ``runtime_env`` may name local paths, as in files; Ray Serve's models take none."""


def _has_remote_files(runtime_env: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
    if not (info.context or {}).get("local_paths"):
        modules = runtime_env.get("py_modules") or []
        for path in (runtime_env.get("working_dir"), *(modules if isinstance(modules, list) else ())):
            if isinstance(path, str) and "://" not in path:
                raise ValueError(
                    "runtime_envs in the Serve config support only remote URIs in working_dir and py_modules, or "
                    '"local://" URIs for directories that already exist on every node. Got error when parsing URI: '
                    f"Expected URI but received path {path}"
                )
    return runtime_env


RuntimeEnv = Annotated[dict[str, Any], AfterValidator(_has_remote_files)]


class RayActorOptionsSchema(BaseModel):
    """Resources and environment of each replica's actor."""

    runtime_env: RuntimeEnv = {}
    """Ray's runtime environment."""
    num_cpus: float | None = Field(default=None, ge=0)
    """CPUs of each replica."""
    num_gpus: float | None = Field(default=None, ge=0)
    """GPUs of each replica."""
    memory: float | None = Field(default=None, ge=0)
    """Bytes of memory of each replica."""
    resources: dict[str, Any] = {}
    """Custom resources of each replica."""
    accelerator_type: str | None = None
    """Type of accelerator; refused here: ask for a custom resource that hosts declare."""
    label_selector: dict[str, str] | None = None
    """Labels of nodes; refused here, as ``accelerator_type``."""
    fallback_strategy: list[dict[str, Any]] | None = None
    """Options to fall back on; refused here, as ``accelerator_type``."""


class DeploymentSchema(BaseModel):
    """Options of one deployment of an application, which override those in its code."""

    name: str
    """Name of the deployment in the code."""
    num_replicas: PositiveInt | str | DEFAULT | None = DEFAULT.VALUE
    """Number of replicas, or ``auto``."""
    max_ongoing_requests: PositiveInt | DEFAULT = DEFAULT.VALUE
    """Requests that a replica works on at once."""
    max_queued_requests: StrictInt | DEFAULT = DEFAULT.VALUE
    """Requests that may wait in each router; -1 for any number."""
    backpressure_config: BackpressureConfig | DEFAULT = DEFAULT.VALUE
    """HTTP response when too many wait."""
    user_config: dict[str, Any] | DEFAULT | None = DEFAULT.VALUE
    """Value that ``reconfigure`` gets."""
    autoscaling_config: dict[str, Any] | AutoscalingConfig | DEFAULT | None = DEFAULT.VALUE
    """How the number of replicas follows the load."""
    graceful_shutdown_wait_loop_s: NonNegativeFloat | DEFAULT = DEFAULT.VALUE
    """Least seconds that a replica drains."""
    graceful_shutdown_timeout_s: NonNegativeFloat | DEFAULT = DEFAULT.VALUE
    """Most seconds that a replica drains."""
    health_check_period_s: PositiveFloat | DEFAULT = DEFAULT.VALUE
    """Seconds between health checks."""
    health_check_timeout_s: PositiveFloat | DEFAULT = DEFAULT.VALUE
    """Seconds before a health check counts as failed."""
    ray_actor_options: RayActorOptionsSchema | DEFAULT = DEFAULT.VALUE
    """Resources and environment of each replica."""
    placement_group_bundles: list[dict[str, float]] | DEFAULT | None = DEFAULT.VALUE
    """Not supported."""
    placement_group_strategy: str | DEFAULT | None = DEFAULT.VALUE
    """Not supported."""
    placement_group_bundle_label_selector: list[dict[str, str]] | DEFAULT | None = DEFAULT.VALUE
    """Not supported."""
    max_replicas_per_node: int | DEFAULT | None = DEFAULT.VALUE
    """Most replicas on one host, 1 to 100."""
    logging_config: LoggingConfig | DEFAULT | None = DEFAULT.VALUE
    """Logging of the replicas."""
    request_router_config: RequestRouterConfig | dict[str, Any] | DEFAULT = DEFAULT.VALUE
    """How requests are routed to the replicas."""
    gang_scheduling_config: GangSchedulingConfig | DEFAULT | None = DEFAULT.VALUE
    """Not supported."""
    deployment_actors: list[DeploymentActorConfig | dict[str, Any]] | DEFAULT | None = DEFAULT.VALUE
    """Not supported."""
    rolling_update_percentage: Annotated[float, Field(gt=0, le=1)] | DEFAULT = DEFAULT.VALUE
    """Share of the replicas that an update replaces at a time."""
    max_surge_percent: Annotated[int, Field(ge=0, le=100)] | DEFAULT = DEFAULT.VALUE
    """Extra replicas during an update, in %."""
    rollout: dict[str, Any] | DEFAULT | None = DEFAULT.VALUE
    """Muster's own: settings of the rollout that each deploy of another version is."""

    @model_validator(mode="before")
    @classmethod
    def _one_number(cls, values: Any) -> Any:
        number, autoscaling = values.get("num_replicas"), values.get("autoscaling_config")
        if isinstance(number, int):
            if autoscaling not in (None, DEFAULT.VALUE):
                raise ValueError(
                    "Manually setting num_replicas is not allowed when autoscaling_config is provided."
                )
        elif number not in ("auto", None, DEFAULT.VALUE):
            raise ValueError(f'`num_replicas` must be an int or "auto", but got: {number}')
        return values

    @model_validator(mode="after")
    def _has_one_placement(self) -> DeploymentSchema:
        limit, bundles = self.max_replicas_per_node, self.placement_group_bundles
        if limit not in (None, DEFAULT.VALUE) and bundles not in (None, DEFAULT.VALUE):
            raise ValueError(
                "Setting max_replicas_per_node is not allowed when placement_group_bundles is provided."
            )
        return self

    @field_validator("max_queued_requests")
    @classmethod
    def _is_positive(cls, value: int | DEFAULT) -> int | DEFAULT:
        if isinstance(value, int) and value < 1 and value != -1:
            raise ValueError("max_queued_requests must be -1 (no limit) or a positive integer.")
        return value

    def options(self) -> dict[str, Any]:
        """The options that are set, without the name, as `muster.Deployment.options` takes them."""
        chosen = {name: getattr(self, name) for name in self.model_fields_set - {"name"}}
        if isinstance(actor := chosen.get("ray_actor_options"), RayActorOptionsSchema):
            chosen["ray_actor_options"] = actor.model_dump(exclude_unset=True)
        return {name: value for name, value in chosen.items() if value is not DEFAULT.VALUE}

    def is_autoscaling_configured(self) -> bool:
        """True when the number of replicas follows the load."""
        return self.num_replicas == "auto" or self.autoscaling_config not in (None, DEFAULT.VALUE)


class ServeApplicationSchema(BaseModel):
    """One application of a configuration file."""

    name: str = "default"
    """Name of the application."""
    route_prefix: str | None = "/"
    """HTTP path prefix; None is headless."""
    import_path: str
    """``module:attribute`` or ``module.attribute`` of a bound application, or of a function that builds one."""
    runtime_env: RuntimeEnv = {}
    """Ray's runtime environment of all its replicas."""
    host: str = "0.0.0.0"  # noqa: S104 - Ray Serve's default; not used
    """Refused by Ray Serve within a file of several applications."""
    port: int = 8000
    """As ``host``."""
    deployments: list[DeploymentSchema] = []
    """Options that override those in the code."""
    autoscaling_policy: dict[str, Any] | None = None
    """Fields of an `AutoscalingPolicy` that decides for all autoscaled deployments; None leaves that to their own."""
    args: dict[str, Any] = {}
    """Arguments of the function that builds the application."""
    logging_config: LoggingConfig | None = None
    """Logging of all its replicas."""
    external_scaler_enabled: bool = False
    """Says that ``muster scale`` is used from outside; no deployment may be autoscaled then."""

    @staticmethod
    def get_empty_schema_dict() -> dict[str, Any]:
        """An application without deployments, to be filled in."""
        return {"import_path": "", "runtime_env": {}, "deployments": []}

    @property
    def deployment_names(self) -> list[str]:
        """Names of the deployments with overridden options."""
        return [deployment.name for deployment in self.deployments]

    @field_validator("autoscaling_policy", mode="before")
    @classmethod
    def _is_a_policy(cls, value: Any) -> dict[str, Any] | None:
        if value is None:
            return None
        if isinstance(value, dict) and value.keys() - AutoscalingPolicy.model_fields.keys():
            unknown = min(value.keys() - AutoscalingPolicy.model_fields.keys(), key=str)
            raise ValueError(f"has no field {unknown!r}")
        return AutoscalingPolicy.model_validate(value).model_dump()

    @field_validator("import_path")
    @classmethod
    def _is_an_import_path(cls, value: str) -> str:
        separator = ":" if ":" in value else "."
        if value.count(":") > 1:
            raise ValueError(f'Got invalid import path "{value}". An import path may have at most one colon.')
        if separator not in value:
            raise ValueError(
                f'Got invalid import path "{value}". An import path must contain at least on dot or colon '
                "separating the module (and potentially submodules) from the deployment graph. E.g.: "
                '"module.deployment_graph".'  # Ray Serve's words, to the letter
            )
        if value.startswith(separator) or value.endswith(separator):
            raise ValueError(
                f'Got invalid import path "{value}". An import path may not start or end with a '
                f"{'colon' if separator == ':' else 'dot'}."
            )
        return value

    @model_validator(mode="after")
    def _has_one_scaler(self) -> ServeApplicationSchema:
        scaled = [f'"{one.name}"' for one in self.deployments if one.is_autoscaling_configured()]
        if self.external_scaler_enabled and scaled:
            raise ValueError(
                "external_scaler_enabled is set to True, but the following deployment(s) have autoscaling "
                f"configured: {', '.join(scaled)}. When using an external autoscaler, Serve's built-in autoscaling "
                "must be disabled for all deployments in the application."
            )
        return self


class HTTPOptionsSchema(BaseModel):
    """HTTP options in a configuration file."""

    host: str = "0.0.0.0"  # noqa: S104 - Ray Serve's default; proxies listen where their service says
    """Has no effect here: proxies listen where their service says."""
    port: int = 8000
    """As ``host``."""
    root_path: str = ""
    """Has no effect here; mount applications under a ``route_prefix``."""
    request_timeout_s: float | None = None
    """Seconds from a request to the beginning of its response; None leaves the stack's limit."""
    keep_alive_timeout_s: int = 90
    """Seconds that an idle connection stays open."""
    ssl_keyfile: str | None = None
    """Has no effect here: the certificate is an option of the proxies' service."""
    ssl_certfile: str | None = None
    """As ``ssl_keyfile``."""
    ssl_keyfile_password: str | None = None
    """As ``ssl_keyfile``."""
    ssl_ca_certs: str | None = None
    """As ``ssl_keyfile``."""

    @model_validator(mode="after")
    def _has_both(self) -> HTTPOptionsSchema:
        if bool(self.ssl_keyfile) != bool(self.ssl_certfile):
            raise ValueError("Both ssl_keyfile and ssl_certfile must be provided together to enable HTTPS.")
        return self


class gRPCOptionsSchema(BaseModel):  # noqa: N801 - Ray Serve's name
    """gRPC options in a configuration file; Muster has no gRPC ingress."""

    port: int = 9000
    """Port of the gRPC proxy."""
    grpc_servicer_functions: list[str] = []
    """Functions that add servicers."""
    request_timeout_s: float | None = None
    """Seconds from a request to its response."""
    enable_reflection: bool = True
    """Whether the gRPC server describes itself."""


class ServeDeploySchema(BaseModel):
    """A configuration file: all applications of a stack. What it leaves out is deleted."""

    proxy_location: ProxyLocation = ProxyLocation.EveryNode
    """Has no effect here: proxies are services of the stack."""
    http_options: HTTPOptionsSchema = HTTPOptionsSchema()
    """HTTP options of all proxies."""
    grpc_options: gRPCOptionsSchema = gRPCOptionsSchema()
    """Not supported."""
    controller_options: ControllerOptions | None = None
    """Not supported."""
    logging_config: LoggingConfig | None = None
    """Logging of all applications that have no own."""
    tracing_config: TracingConfig | None = None
    """Has no effect here: services are configured by OTEL_* variables."""
    applications: list[ServeApplicationSchema]
    """The applications."""
    target_capacity: float | None = Field(default=None, ge=0, le=100)
    """Not supported."""

    @staticmethod
    def get_empty_schema_dict() -> dict[str, Any]:
        """A configuration without applications."""
        return {"applications": []}

    @field_validator("applications")
    @classmethod
    def _are_different(cls, value: list[ServeApplicationSchema]) -> list[ServeApplicationSchema]:
        names = [app.name for app in value]
        routes = [app.route_prefix for app in value if app.route_prefix is not None]
        if "" in names:
            raise ValueError("Application names must be nonempty.")
        if doubled := sorted({f'"{name}"' for name in names if names.count(name) > 1}):
            what = "application" if len(doubled) == 1 else "applications"
            raise ValueError(
                f"Found multiple configs for {what} {', '.join(doubled)}. Please remove all duplicates."
            )
        if doubled := sorted({f'"{route}"' for route in routes if routes.count(route) > 1}):
            what = "prefix" if len(doubled) == 1 else "prefixes"
            raise ValueError(
                f"Found duplicate applications for route {what} {', '.join(doubled)}. Please ensure each application's "
                "route_prefix is unique."
            )
        for app in value:
            for name in ("host", "port"):
                if name in app.model_fields_set:
                    shown = f'Host "{app.host}"' if name == "host" else f"Port {app.port}"
                    raise ValueError(
                        f"{shown} is set in the config for application `{app.name}`. Please remove it and set {name} "
                        "in the top level deploy config only."
                    )
        return value


ReplicaRank = reports.ReplicaRank
"""Numbers of a replica, in its context and for its ``reconfigure``."""


if not TYPE_CHECKING:  # a checker would take it for any name

    def __getattr__(name: str) -> object:
        return absent("schema", name)
