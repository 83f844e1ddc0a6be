"""``@serve.deployment``, and what it makes: deployments, and applications of bound deployments.

Names, defaults, checks and types of exceptions are those of Ray Serve 2.60 (``ray.serve.deployment``). What has no
meaning in Muster is refused with a sentence that names the substitute; nothing is ignored.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, TypedDict, final

# Programs of Ray Serve import starlette alone, and annotate with starlette.requests.Request.
import starlette.requests  # noqa: F401 - as above
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
)

from muster.config import AutoscalingConfig, BackpressureConfig, RequestRouterConfig, RolloutDict, check_json
from muster.schema import DEFAULT, LoggingConfig

_UNSUPPORTED: Final = {
    "placement_group_bundles": "reserve resources with ray_actor_options; a replica is one actor on one host",
    "placement_group_strategy": "reserve resources with ray_actor_options; a replica is one actor on one host",
    "placement_group_bundle_label_selector": "declare a custom resource on the hosts meant, and ask for it",
    "gang_scheduling_config": "replicas are scheduled one by one; let one replica start its own processes",
    "deployment_actors": "bind another deployment with one replica, and call it by its handle",
}
"""Options of Ray Serve that Muster does not have, and what to do instead."""
_ACTOR_OPTIONS: Final = frozenset({"memory", "num_cpus", "num_gpus", "resources", "runtime_env"})
_UNSUPPORTED_ACTOR_OPTIONS: Final = frozenset({"accelerator_type", "label_selector", "fallback_strategy"})
_RUNTIME_ENV: Final = frozenset({"env_vars", "pip", "uv", "working_dir", "py_modules", "excludes", "config"})
REPLICAS_PER_NODE_MAX: Final = 100


class DeploymentOptions(BaseModel):
    """Checked options of a deployment that never replace a replica."""

    model_config = ConfigDict(
        title="DeploymentConfig",  # the name in Ray Serve's messages
        validate_assignment=True,
        arbitrary_types_allowed=True,
        extra="forbid",
    )

    num_replicas: NonNegativeInt | None = 1
    """Number of replicas; None where the load decides."""
    max_ongoing_requests: PositiveInt = 5
    """Requests that one replica works on at once."""
    max_queued_requests: int = -1
    """Requests that may wait in each router for this deployment; -1 for any number."""
    backpressure_config: BackpressureConfig = Field(default_factory=BackpressureConfig)
    """HTTP response when too many wait."""
    user_config: Any = None
    """Value that ``reconfigure`` gets, at start and on change."""
    autoscaling_config: AutoscalingConfig | None = None
    """How the number of replicas follows the load."""
    graceful_shutdown_wait_loop_s: NonNegativeFloat = 2.0
    """Least seconds that a stopped replica drains."""
    graceful_shutdown_timeout_s: NonNegativeFloat = 20.0
    """Most seconds that a stopped replica drains."""
    health_check_period_s: PositiveFloat = 10.0
    """Seconds between health checks."""
    health_check_timeout_s: PositiveFloat = 30.0
    """Seconds before a health check counts as failed."""
    logging_config: dict[str, Any] | None = None
    """Logging of the replicas."""
    request_router_config: RequestRouterConfig = Field(default_factory=RequestRouterConfig)
    """How requests are routed to the replicas."""
    max_constructor_retry_count: PositiveInt = 20
    """Failed starts of one version before its deploy fails."""
    rolling_update_percentage: float = Field(default=0.2, gt=0, le=1)
    """Share of the replicas that an update replaces at a time."""
    max_surge_percent: int = Field(default=0, ge=0, le=100)
    """Extra replicas during an update, in %."""
    rollout: RolloutDict = None
    """Muster's own: settings of the rollout that each deploy of another version is, by their names; None for none."""

    @field_validator("user_config")
    @classmethod
    def _is_json(cls, value: Any) -> Any:
        return check_json(value, "user_config")

    @field_validator("logging_config", mode="before")
    @classmethod
    def _is_logging(cls, value: Any) -> Any:
        if isinstance(value, LoggingConfig):
            return value.model_dump()
        if value is not None and not isinstance(value, dict):
            raise TypeError(f"Got invalid type '{type(value)}' for logging_config. Expected a dictionary.")
        return None if value is None else LoggingConfig(**value).model_dump()

    @field_validator("max_queued_requests")
    @classmethod
    def _is_a_limit(cls, value: int) -> int:
        if value < 1 and value != -1:
            raise ValueError("max_queued_requests must be -1 (no limit) or a positive integer.")
        return value


class OptionValues(TypedDict, total=False):
    """Options of ``@serve.deployment`` and of `Deployment.options`, in Ray Serve's order."""

    name: str
    version: str
    num_replicas: int | str | None
    ray_actor_options: dict[str, Any] | None
    placement_group_bundles: list[dict[str, float]] | None
    placement_group_strategy: str | None
    placement_group_bundle_label_selector: list[dict[str, str]] | None
    max_replicas_per_node: int | None
    user_config: Any
    max_ongoing_requests: int
    max_queued_requests: int
    backpressure_config: dict[str, Any] | BackpressureConfig | None
    autoscaling_config: dict[str, Any] | AutoscalingConfig | None
    graceful_shutdown_wait_loop_s: float
    graceful_shutdown_timeout_s: float
    health_check_period_s: float
    health_check_timeout_s: float
    logging_config: dict[str, Any] | LoggingConfig | None
    request_router_config: dict[str, Any] | RequestRouterConfig | None
    max_constructor_retry_count: int
    gang_scheduling_config: Any
    deployment_actors: Any
    rolling_update_percentage: float
    max_surge_percent: int
    rollout: dict[str, Any] | None


_NAMES: Final = tuple(OptionValues.__annotations__)


@final
class Application:
    """One or more bound deployments that are deployed together; `Deployment.bind` makes it.

    It may be an argument of another ``bind``, whose constructor then gets a `DeploymentHandle` in its place.
    """

    def __init__(self, bound_deployment: Deployment) -> None:
        """Use `Deployment.bind`."""
        self._bound_deployment = bound_deployment

    @property
    def bound_deployment(self) -> Deployment:
        """The deployment with its arguments."""
        return self._bound_deployment


@final
class Deployment:
    """A class or function with the options to deploy it with; ``@serve.deployment`` makes it."""

    def __init__(
        self,
        name: str,
        func_or_class: Callable[..., Any],
        options: DeploymentOptions,
        actor: Mapping[str, Any] = MappingProxyType({}),
        *,
        _internal: bool = False,
    ) -> None:
        """Use ``@serve.deployment``; raises RuntimeError otherwise."""
        if not _internal:
            raise RuntimeError(
                "The Deployment constructor should not be called directly. Use `@serve.deployment` instead."
            )
        if not isinstance(name, str):
            raise TypeError("name must be a string.")
        if "#" in name:
            raise ValueError(f"Deployment names must not contain the '#' character. Current name: {name}.")
        self._name = name
        self._func_or_class = func_or_class
        self._options = options
        self._actor = actor
        """``ray_actor_options`` and ``max_replicas_per_node``, checked."""
        self._init_args: tuple[Any, ...] = ()
        self._init_kwargs: dict[str, Any] = {}
        self._chosen: frozenset[str] = frozenset()
        """Names of the options that the code sets itself."""

    @property
    def name(self) -> str:
        """Name of the deployment, unique within its application."""
        return self._name

    @property
    def version(self) -> None:
        """Always None: versions are managed by the controller."""
        return None

    @property
    def func_or_class(self) -> Callable[..., Any]:
        """The decorated class or function."""
        return self._func_or_class

    @property
    def num_replicas(self) -> int:
        """Number of replicas; 1 where the load decides, as in Ray Serve."""
        return self._options.num_replicas or 1

    @property
    def user_config(self) -> Any:
        """Value that ``reconfigure`` gets."""
        return self._options.user_config

    @property
    def max_ongoing_requests(self) -> int:
        """Requests that one replica works on at once."""
        return self._options.max_ongoing_requests

    @property
    def max_queued_requests(self) -> int:
        """Requests that may wait in each router; -1 for any number."""
        return self._options.max_queued_requests

    @property
    def backpressure_config(self) -> BackpressureConfig:
        """HTTP response when too many wait."""
        return self._options.backpressure_config

    @property
    def ray_actor_options(self) -> dict[str, Any]:
        """Resources and environment of each replica."""
        return dict(self._actor["ray_actor_options"])

    @property
    def max_replicas_per_node(self) -> int | None:
        """Most replicas on one host."""
        limit: int | None = self._actor["max_replicas_per_node"]
        return limit

    @property
    def init_args(self) -> tuple[Any, ...]:
        """Positional arguments of the constructor, as bound."""
        return self._init_args

    @property
    def init_kwargs(self) -> dict[str, Any]:
        """Keyword arguments of the constructor, as bound."""
        return self._init_kwargs

    @property
    def logging_config(self) -> dict[str, Any] | None:
        """Logging of the replicas."""
        return self._options.logging_config

    def set_logging_config(self, logging_config: dict[str, Any] | LoggingConfig | None) -> None:
        """Change how the replicas log, of this object itself. Raises as ``@serve.deployment`` does."""
        self._options = self.options(logging_config=logging_config).deployment_options

    @property
    def _deployment_config(self) -> DeploymentOptions:
        """Ray Serve's name for ``deployment_options``, which tests read."""
        return self.deployment_options

    @property
    def deployment_options(self) -> DeploymentOptions:
        """All options that never replace a replica."""
        return self._options

    @property
    def chosen_options(self) -> frozenset[str]:
        """Names of the options that the code sets itself, and does not leave at their defaults."""
        return self._chosen

    def __call__(self) -> None:
        """Raises RuntimeError: a deployment is bound, not called."""
        raise RuntimeError("Deployments cannot be constructed directly. Use `deployment.bind()` instead.")

    def bind(self, *args: Any, **kwargs: Any) -> Application:
        """An application of this deployment, whose replicas are constructed with these arguments.

        The arguments may be anything that can be pickled. Applications among them, at any depth, are deployed along and
        arrive as a `DeploymentHandle`. Raises ValueError for arguments of a function.
        """
        if inspect.isfunction(self._func_or_class) and (args or kwargs):
            what = "init_args" if args else "init_kwargs"
            raise ValueError(f"{what} not supported for function deployments.")
        bound = self._copy()
        bound._init_args, bound._init_kwargs = args, kwargs  # noqa: SLF001 - its own class
        return Application(bound)

    def options(self, func_or_class: Callable[..., Any] | None = None, **options: Any) -> Deployment:
        """A copy with changed options, those of ``@serve.deployment``; others stay. Raises as that does."""
        values = _check_names(options, "Deployment.options", "Deployment.options()")
        checked = self._options.model_copy(deep=True)
        _apply(values, checked)
        actor = _check_actor({**self._actor, **values})
        deployment = Deployment(
            values.get("name", self._name),
            func_or_class or self._func_or_class,
            checked,
            actor,
            _internal=True,
        )
        deployment._init_args, deployment._init_kwargs = self._init_args, self._init_kwargs
        deployment._chosen = self._chosen | values.keys()
        return deployment

    def _copy(self) -> Deployment:
        return self.options()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Deployment):
            return NotImplemented
        return all(
            getattr(self, name) == getattr(other, name)
            for name in ("_name", "_options", "_chosen", "_init_args", "_init_kwargs", "_actor")
        )

    __hash__ = None  # type: ignore[assignment]  # as in Ray Serve: its options may change

    def __repr__(self) -> str:
        return f"Deployment(name={self._name})"


def deployment(_func_or_class: Any = None, **options: Any) -> Any:
    """Make a `Deployment` of a class or function::

        @serve.deployment(num_replicas=2, ray_actor_options={"num_gpus": 1})
        class Model:
            def __init__(self, path: str): ...
            async def __call__(self, request): ...

        app = Model.bind("weights.bin")

    The options are documented in ``docs/coming-from-ray-serve.md``, with Ray Serve's names and defaults. Raises
    TypeError for an unknown option, and ValueError (Pydantic's ValidationError is one) for a value out of range, or an
    option that Muster does not have.
    """
    values = _check_names(options, "deployment", "@serve.deployment")
    checked = DeploymentOptions()
    _apply(values, checked)
    actor = _check_actor({"ray_actor_options": None, "max_replicas_per_node": None, **values})

    def decorate(func_or_class: Any) -> Deployment:
        if not callable(func_or_class) or isinstance(func_or_class, Deployment):
            raise TypeError("@serve.deployment must be called on a class or function.")
        made = Deployment(
            values.get("name", getattr(func_or_class, "__name__", type(func_or_class).__name__)),
            func_or_class,
            checked.model_copy(deep=True),
            actor,
            _internal=True,
        )
        made._chosen = frozenset(values)  # noqa: SLF001 - its own module
        return made

    return decorate(_func_or_class) if callable(_func_or_class) else decorate


def _signature(*first: inspect.Parameter) -> inspect.Signature:
    keyword = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return inspect.Signature(
        [*first, *(inspect.Parameter(name, keyword, default=DEFAULT.VALUE) for name in _NAMES)]
    )


_TARGET: Final = inspect.Parameter("_func_or_class", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None)
deployment.__signature__ = _signature(_TARGET)  # type: ignore[attr-defined]


def _check_names(options: Mapping[str, Any], function: str, shown: str) -> dict[str, Any]:
    """The options that are set. Raises TypeError for an unknown one, ValueError for what Muster does not have."""
    for name in options:
        if name not in _NAMES:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
    values = {name: value for name, value in options.items() if value is not DEFAULT.VALUE}
    if "version" in values:
        raise ValueError(
            f"`version` in `{shown}` has been removed. Serve manages deployment versions internally."
        )
    if values.get("max_ongoing_requests", 0) is None:
        raise ValueError("`max_ongoing_requests` must be non-null, got None.")
    for name, substitute in _UNSUPPORTED.items():
        if values.pop(name, None) is not None:
            raise ValueError(f"{name} is not supported by Muster: {substitute}.")
    return values


def _apply(values: dict[str, Any], options: DeploymentOptions) -> None:
    """Set ``values`` on ``options``; each is checked as it is set."""
    number, autoscaling = values.get("num_replicas"), values.get("autoscaling_config")
    if number == "auto":
        values = {**values, "autoscaling_config": _auto(autoscaling)}
    elif number is not None and autoscaling is not None:
        raise ValueError("Manually setting num_replicas is not allowed when autoscaling_config is provided.")
    if number == 0:
        raise ValueError("num_replicas is expected to larger than 0")
    for name, value in values.items():
        if name == "num_replicas" and value in (None, "auto"):
            continue
        if name not in DeploymentOptions.model_fields:
            continue
        is_default = value is None and name in ("backpressure_config", "request_router_config")
        default = DeploymentOptions.model_fields[name].get_default(call_default_factory=True)
        setattr(options, name, default if is_default else value)
    if isinstance(number, int):
        options.autoscaling_config = None


def _auto(autoscaling: Mapping[str, Any] | AutoscalingConfig | None) -> AutoscalingConfig:
    """What ``num_replicas="auto"`` stands for: the given fields over `AutoscalingConfig.default`."""
    if isinstance(autoscaling, AutoscalingConfig):
        autoscaling = autoscaling.model_dump(exclude_unset=True)
    return AutoscalingConfig(
        **{**AutoscalingConfig.default().model_dump(exclude_unset=True), **(autoscaling or {})}
    )


def _check_actor(values: Mapping[str, Any]) -> dict[str, Any]:
    """``ray_actor_options`` and ``max_replicas_per_node``, checked; the first is a copy with ``num_cpus``."""
    limit = values["max_replicas_per_node"]
    if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool)):
        raise TypeError(
            f"Get invalid type '{type(limit)}' for max_replicas_per_node. Expected None or an integer in the range of "
            f"[1, {REPLICAS_PER_NODE_MAX}]."
        )
    if limit is not None and not 1 <= limit <= REPLICAS_PER_NODE_MAX:
        raise ValueError(
            f"Invalid max_replicas_per_node {limit}. Valid values are None or an integer in the range of "
            f"[1, {REPLICAS_PER_NODE_MAX}]."
        )
    options = values["ray_actor_options"]
    if options is None:
        options = {}
    if not isinstance(options, dict):
        raise TypeError(f'Got invalid type "{type(options)}" for ray_actor_options. Expected a dictionary.')
    for name, value in options.items():
        if name in _UNSUPPORTED_ACTOR_OPTIONS:
            if value is not None:
                raise ValueError(
                    f"ray_actor_options: {name} is not supported by Muster: declare a custom resource on the hosts "
                    "meant, and ask for it in resources."
                )
        elif name not in _ACTOR_OPTIONS:
            raise ValueError(
                f"Specifying '{name}' in ray_actor_options is not allowed. Allowed options: "
                f"{sorted(_ACTOR_OPTIONS)}"
            )
    chosen = {name: value for name, value in options.items() if value is not None}
    _check_amounts(chosen)
    check_runtime_env(chosen.get("runtime_env", {}), "ray_actor_options.runtime_env")
    chosen.setdefault("num_cpus", 1)
    return {"ray_actor_options": chosen, "max_replicas_per_node": limit}


def _check_amounts(options: Mapping[str, Any]) -> None:
    for name in ("num_cpus", "num_gpus", "memory"):
        amount = options.get(name, 0)
        if isinstance(amount, bool) or not isinstance(amount, int | float):
            raise TypeError(
                f"ray_actor_options: The type of keyword '{name}' must be float or int, but received type "
                f"{type(amount)}"
            )
        if amount < 0:
            raise ValueError(f"ray_actor_options: The quantity of resource {name} cannot be negative")
    resources = options.get("resources", {})
    if not isinstance(resources, dict):
        raise TypeError(f"ray_actor_options: resources must be a dict, not {resources!r}.")
    for name in ("CPU", "GPU"):
        if name in resources:
            raise ValueError(
                f"ray_actor_options: use num_{name.lower()}s instead of 'CPU' and 'GPU' in resources."
            )


def check_runtime_env(runtime_env: Any, where: str) -> None:
    """Raise TypeError or ValueError unless ``runtime_env`` is a dict of fields that Muster supports."""
    if not isinstance(runtime_env, dict):
        raise TypeError(f"{where} must be a dict, not {type(runtime_env).__name__}.")
    for name, value in runtime_env.items():
        if name not in _RUNTIME_ENV and value is not None:
            raise ValueError(
                f"{where}: {str(name)[:80]!r} is not supported by Muster. Supported are: "
                f"{', '.join(sorted(_RUNTIME_ENV))}; put anything else into the image of the replica hosts."
            )


def check_targets(targets: Sequence[Any]) -> None:
    """Raise TypeError unless each of ``targets`` is an `Application`."""
    for target in targets:
        if not isinstance(target, Application):
            hint = ""
            if isinstance(target, Deployment):
                hint = f" Got the deployment {target.name!r}: call its bind()."
            raise TypeError(f"`serve.run` expects an `Application` returned by `Deployment.bind()`.{hint}")
