"""How a backend's number of replicas follows its load, and what a user's autoscaling policy is given."""

from __future__ import annotations

from enum import Enum
from typing import Any, Final

import msgspec

from serve_common.config.validation import check_between, check_import_path, check_size
from serve_common.errors import BadField

REPLICAS_MAX: Final = 10_000
QUERY_LENGTH_MAX: Final = 4096


class AggregationFunction(Enum):
    """How the load over the look-back period becomes one number."""

    MEAN = "mean"
    MAX = "max"
    MIN = "min"


class AutoscalingPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A function of the user's that says how many replicas there should be; names as in Ray Serve."""

    policy_function: str = ""
    """``module:function``, imported beside the controller, with the backend's ``app_dir`` first on ``sys.path``. It
    takes an ``AutoscalingContext`` and returns a number, or a number and its next ``policy_state``. Empty: the default
    policy."""
    policy_kwargs: dict[str, Any] = {}
    """Given to the function as further keyword arguments."""


class QueryMeaning(Enum):
    """What the number that a query gives stands for."""

    TOTAL = "total"
    """The load of the whole backend: divided by `AutoscalingQuery.target`, it is the number of replicas."""
    PER_REPLICA = "per_replica"
    """An average over the replicas there are: their number is changed by its ratio to `AutoscalingQuery.target`."""


class AutoscalingQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Any PromQL expression in place of the ongoing requests. It needs a Prometheus server."""

    promql: str
    """Gives one number: a scalar, or a vector of at most one element; none at all means no data.
    ``$backend_tag``, ``$look_back`` (such as ``30s``) and ``$deployment`` are replaced."""
    target: float
    """What one replica should bear (total), or what the average should be (per replica)."""
    meaning: QueryMeaning = QueryMeaning.TOTAL


class AutoscalingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How ``num_replicas`` follows the load; all times in seconds."""

    min_replicas: int = 1
    """0: down to none while nobody asks; the first request that waits wakes the backend."""
    initial_replicas: int | None = None
    """How many the first deploy starts, and each deploy of new code while there are none; None means `min_replicas`."""
    max_replicas: int = 1
    target_ongoing_requests: float = 2.0
    """Requests per replica, those that wait included, that the number of replicas is chosen for."""
    metrics_interval_s: float = 10.0
    """How often the load is looked at and decided on."""
    look_back_period_s: float = 30.0
    """Over how long the load is averaged."""
    upscaling_factor: float | None = None
    """Of each step up; below 1 it is smaller, above 1 larger. None means 1."""
    downscaling_factor: float | None = None
    """Of each step down, likewise."""
    upscale_delay_s: float = 30.0
    """How long more must have been wanted without a break before replicas are added."""
    downscale_delay_s: float = 600.0
    """How long fewer must have been wanted without a break before replicas are removed."""
    downscale_to_zero_delay_s: float | None = None
    """The same for the last replica; None means `downscale_delay_s`."""
    aggregation_function: AggregationFunction = AggregationFunction.MEAN
    policy: AutoscalingPolicy = AutoscalingPolicy()
    query: AutoscalingQuery | None = None
    """Not in Ray Serve: what the load is read from instead of the ongoing requests."""
    panic_threshold: float = 2.0
    """Not in Ray Serve (Knative has it): a load over `panic_window_s` of this many times what the replicas are meant to
    bear adds replicas at once, without `upscale_delay_s`. 0 turns it off."""
    panic_window_s: float = 10.0
    panic_hold_s: float = 60.0
    """After a panic no replica is removed for so long."""


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
    check_size(policy.policy_kwargs, f"{field}.policy_kwargs")


def _check_query(query: AutoscalingQuery, field: str) -> None:
    if not query.promql.strip() or len(query.promql) > QUERY_LENGTH_MAX or "\0" in query.promql:
        raise BadField(f"{field}.promql", f"must be an expression of at most {QUERY_LENGTH_MAX} characters")
    check_between(query.target, 1e-9, 1e12, f"{field}.target")


class LoadReading(msgspec.Struct, frozen=True, kw_only=True):
    """The load as one look found it; not in Ray Serve."""

    at: float
    """Of the newest sample in it, seconds since 1970."""
    seen: float | None
    """Requests that are worked on or wait, over ``look_back_period_s``; or what the query gave. None: not known."""
    burst: float | None = None
    """The same over ``panic_window_s``."""
    queued: float = 0.0
    """Of ``seen``: those that waited."""
    source: str = ""
    """``prometheus`` or ``scrape``."""
    over_s: float | None = None
    """Over how long it really was seen; None: as asked."""
    missing: str = ""
    """Why ``seen`` is None."""


class AutoscalingContext(msgspec.Struct, frozen=True, kw_only=True):
    """A deployment and its load at the time of a decision; the names are Ray Serve's."""

    deployment_name: str
    app_name: str
    current_num_replicas: int
    """That run now."""
    target_num_replicas: int
    """As it was decided last."""
    total_num_requests: float
    """Worked on and waiting, over ``look_back_period_s``; or what the configured query gave."""
    total_queued_requests: float
    capacity_adjusted_min_replicas: int
    """``min_replicas``; what the function returns is kept within these two."""
    capacity_adjusted_max_replicas: int
    policy_state: dict[str, Any]
    """What the function returned beside its number the last time; empty at first, and with a new leader."""
    last_scale_up_time: float | None
    """Seconds since 1970, as all times here."""
    last_scale_down_time: float | None
    current_time: float
    readings: list[LoadReading] = []
    """The latest looks, the oldest first; not in Ray Serve."""

    @property
    def total_running_requests(self) -> float:
        """Those that replicas work on."""
        return self.total_num_requests - self.total_queued_requests
