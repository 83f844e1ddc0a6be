"""Autoscaling configuration of a backend, and the context that a user's autoscaling policy receives."""

from __future__ import annotations

from enum import Enum
from typing import Any, Final

import msgspec

from serve_common.errors import BadField
from serve_common.names import DeploymentID
from serve_common.values import check_between, check_digest, check_import_path, check_size

REPLICAS_MAX: Final = 10_000
QUERY_LENGTH_MAX: Final = 4096


class AggregationFunction(str, Enum):  # noqa: UP042 - prints as Ray Serve's
    """How the load over the look-back period becomes one number."""

    MEAN = "mean"
    MAX = "max"
    MIN = "min"


class PolicyScope(Enum):
    """What one call of a policy decides."""

    DEPLOYMENT = "deployment"
    """The replicas of one deployment."""
    APPLICATION = "application"
    """Those of all deployments of an application that have this policy."""


class AutoscalingPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A user's function that decides the number of replicas; names as in Ray Serve."""

    policy_function: str = ""
    """``module:function``, imported beside the controller, with the backend's ``app_dir`` first on ``sys.path``. It
    takes an ``AutoscalingContext`` and returns a number, or a number and its next ``policy_state``. Empty: the default
    policy. With ``code`` it only names the policy for people."""
    policy_kwargs: dict[str, Any] = {}
    """Additional keyword arguments of the function; with ``code``, of the constructor where that is a class, and
    otherwise of no effect, as in Ray Serve."""
    code: str = ""
    """Digest of an uploaded function or class, which a running replica of the backend evaluates; not in Ray Serve."""
    scope: PolicyScope = PolicyScope.DEPLOYMENT
    """What one call decides. The policy of an application needs ``code``; it takes the contexts of its deployments by
    ``deployment_id``, and returns their numbers and their next states likewise."""


class QueryMeaning(Enum):
    """How the result of a query is interpreted."""

    TOTAL = "total"
    """The load of the whole backend; divided by `AutoscalingQuery.target` it is the desired number of replicas."""
    PER_REPLICA = "per_replica"
    """An average over the replicas; their number is scaled by its ratio to `AutoscalingQuery.target`."""


class AutoscalingQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A PromQL expression that replaces ongoing requests as the load. Needs a Prometheus server."""

    promql: str
    """Expression that returns one number: a scalar, or a vector of at most one element; an empty one means no data.
    ``$backend_tag``, ``$look_back`` (such as ``30s``) and ``$deployment`` are substituted."""
    target: float
    """Desired load per replica (`QueryMeaning.TOTAL`), or desired average (`QueryMeaning.PER_REPLICA`)."""
    meaning: QueryMeaning = QueryMeaning.TOTAL
    """How the expression's result becomes a number of replicas."""


class AutoscalingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How ``num_replicas`` follows the load; all times in seconds.

    Why the names of Ray Serve's ``AutoscalingConfig``: users know them already. Additions say so.
    """

    min_replicas: int = 1
    """Lower limit. With 0 an idle backend is scaled to zero; the first request that waits wakes it."""
    initial_replicas: int | None = None
    """Replicas started by the first deploy, and by a deploy of new code at zero replicas; None means `min_replicas`."""
    max_replicas: int = 1
    """Upper limit, at least `min_replicas`."""
    target_ongoing_requests: float = 2.0
    """Target number of requests per replica, waiting ones included."""
    metrics_interval_s: float = 10.0
    """Seconds between evaluations of the load."""
    look_back_period_s: float = 30.0
    """Seconds over which the load is aggregated."""
    upscaling_factor: float | None = None
    """Multiplier of each upscaling step; below 1 it is smaller, above 1 larger. None means 1."""
    downscaling_factor: float | None = None
    """Multiplier of each downscaling step; None means 1."""
    upscale_delay_s: float = 30.0
    """Seconds for which more replicas must be desired continuously before some are added."""
    downscale_delay_s: float = 600.0
    """Seconds for which fewer replicas must be desired continuously before some are removed."""
    downscale_to_zero_delay_s: float | None = None
    """Like `downscale_delay_s`, for removing the last replica; None means the same value."""
    aggregation_function: AggregationFunction = AggregationFunction.MEAN
    """How the load over the look-back period becomes one number."""
    policy: AutoscalingPolicy = AutoscalingPolicy()
    """A function that decides the number of replicas; the default policy unless set."""
    query: AutoscalingQuery | None = None
    """Source of the load instead of ongoing requests; not in Ray Serve."""
    panic_threshold: float = 2.0
    """Ratio of the load over `panic_window_s` to the target load of the replicas at which replicas are added at once,
    without `upscale_delay_s`. 0 disables it. As in Knative; not in Ray Serve."""
    panic_window_s: float = 10.0
    """Seconds over which the load for `panic_threshold` is averaged."""
    panic_hold_s: float = 60.0
    """Seconds after a panic during which no replica is removed."""

    def get_upscaling_factor(self) -> float:
        """The multiplier of upscaling steps."""
        return 1.0 if self.upscaling_factor is None else self.upscaling_factor

    def get_downscaling_factor(self) -> float:
        """The multiplier of downscaling steps."""
        return 1.0 if self.downscaling_factor is None else self.downscaling_factor

    def get_target_ongoing_requests(self) -> float:
        """The target number of requests per replica."""
        return self.target_ongoing_requests


def check_autoscaling_config(config: AutoscalingConfig, field: str) -> AutoscalingConfig:
    """Return ``config`` when every field is within its limits; otherwise raise `BadField` with the field's path."""
    check_between(config.max_replicas, 1, REPLICAS_MAX, f"{field}.max_replicas")
    check_between(config.min_replicas, 0, REPLICAS_MAX, f"{field}.min_replicas")
    if config.min_replicas > config.max_replicas:
        raise BadField(
            f"{field}.min_replicas", f"is {config.min_replicas}, above max_replicas {config.max_replicas}"
        )
    if config.initial_replicas is not None:
        check_between(
            config.initial_replicas, config.min_replicas, config.max_replicas, f"{field}.initial_replicas"
        )
    check_between(config.target_ongoing_requests, 0.001, 1_000_000, f"{field}.target_ongoing_requests")
    check_between(config.metrics_interval_s, 1, 3600, f"{field}.metrics_interval_s")
    check_between(config.look_back_period_s, 1, 3600, f"{field}.look_back_period_s")
    for name in ("upscaling_factor", "downscaling_factor"):
        factor: float | None = getattr(config, name)
        if factor is not None:
            check_between(factor, 0.001, 1000, f"{field}.{name}")
    check_between(config.upscale_delay_s, 0, 86_400, f"{field}.upscale_delay_s")
    check_between(config.downscale_delay_s, 0, 86_400, f"{field}.downscale_delay_s")
    if config.downscale_to_zero_delay_s is not None:
        check_between(config.downscale_to_zero_delay_s, 0, 86_400, f"{field}.downscale_to_zero_delay_s")
    if config.panic_threshold != 0:
        check_between(config.panic_threshold, 1.1, 1000, f"{field}.panic_threshold")
    check_between(config.panic_window_s, 1, 600, f"{field}.panic_window_s")
    check_between(config.panic_hold_s, 0, 86_400, f"{field}.panic_hold_s")
    _check_policy(config.policy, f"{field}.policy")
    if config.query is not None:
        _check_query(config.query, f"{field}.query")
    return config


def _check_policy(policy: AutoscalingPolicy, field: str) -> None:
    if policy.policy_function:
        check_import_path(policy.policy_function, f"{field}.policy_function")
    elif policy.policy_kwargs:
        raise BadField(f"{field}.policy_kwargs", "needs a policy_function that takes them")
    if policy.code:
        check_digest(policy.code, f"{field}.code")
        if not policy.policy_function:
            raise BadField(f"{field}.code", "needs a policy_function that names it")
    elif policy.scope is PolicyScope.APPLICATION:
        raise BadField(f"{field}.scope", "an application's policy needs code")
    check_size(policy.policy_kwargs, f"{field}.policy_kwargs")


def _check_query(query: AutoscalingQuery, field: str) -> None:
    if not query.promql.strip() or len(query.promql) > QUERY_LENGTH_MAX or "\0" in query.promql:
        raise BadField(f"{field}.promql", f"must be an expression of at most {QUERY_LENGTH_MAX} characters")
    check_between(query.target, 1e-9, 1e12, f"{field}.target")


class LoadPoint(msgspec.Struct, frozen=True, kw_only=True):
    """One sample of the load; not in Ray Serve."""

    at: float
    """Time of the newest sample it is based on, in seconds since 1970."""
    seen: float | None
    """Running and waiting requests over ``look_back_period_s``, or the result of the query. None: not known."""
    burst: float | None = None
    """The same load over ``panic_window_s``."""
    queued: float = 0.0
    """The part of ``seen`` that waited."""
    source: str = ""
    """``prometheus`` or ``scrape``."""
    over_s: float | None = None
    """Seconds that the samples really cover; None: the requested window."""
    missing: str = ""
    """Reason why ``seen`` is None."""


class TimeStampedValue(msgspec.Struct, frozen=True, array_like=True):
    """One value that a replica recorded, as in Ray Serve."""

    timestamp: float
    """Seconds since 1970."""
    value: float
    """What ``record_autoscaling_stats`` returned."""


class AutoscalingContext(msgspec.Struct, frozen=True, kw_only=True):
    """A deployment and its load at the time of a decision; the names are Ray Serve's."""

    deployment_name: str
    """Name of the deployment, without that of its application."""
    app_name: str
    """Name of its application."""
    current_num_replicas: int
    """Replicas that run now."""
    target_num_replicas: int
    """Number of replicas of the last decision."""
    total_num_requests: float
    """Running and waiting requests over ``look_back_period_s``, or the result of the configured query."""
    total_queued_requests: float
    """The part of `total_num_requests` that waited for a replica."""
    capacity_adjusted_min_replicas: int
    """Lower limit of the function's result: ``min_replicas``."""
    capacity_adjusted_max_replicas: int
    """Upper limit of the function's result: ``max_replicas``."""
    policy_state: dict[str, Any]
    """State that the function returned with its last number; empty at first, and after a change of leader."""
    last_scale_up_time: float | None
    """When replicas were last added, in seconds since 1970; None: not in this term of leadership."""
    last_scale_down_time: float | None
    """When replicas were last removed, in seconds since 1970; None: not in this term of leadership."""
    current_time: float
    """Time of the decision, in seconds since 1970."""
    samples: list[LoadPoint] = []
    """The latest samples of the load, the oldest first; not in Ray Serve."""
    deployment_id: DeploymentID | None = None
    """Both names of the deployment."""
    running_replicas: list[str] = []
    """Tags of the replicas that take requests."""
    aggregated_metrics: dict[str, dict[str, float]] = {}
    """What replicas return from ``record_autoscaling_stats``, by name and replica tag: over ``look_back_period_s``, by
    ``aggregation_function``."""
    raw_metrics: dict[str, dict[str, list[TimeStampedValue]]] = {}
    """The same as recorded, the oldest first."""
    config: AutoscalingConfig | None = None
    """The configuration that is in force."""

    def __post_init__(self) -> None:
        """Call what a test of a policy gives as a function, as it may in Ray Serve."""
        for name in ("total_num_requests", "total_queued_requests", "aggregated_metrics", "raw_metrics"):
            value = getattr(self, name)
            if callable(value):
                msgspec.structs.force_setattr(self, name, value())

    @property
    def total_running_requests(self) -> float:
        """Requests that replicas work on."""
        return max(0.0, self.total_num_requests - self.total_queued_requests)
