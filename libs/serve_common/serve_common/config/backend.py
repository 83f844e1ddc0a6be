"""How many replicas of a backend run, how they are treated, and how routers spread requests over them."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any, TypeVar

import msgspec

from serve_common.config.autoscaling import REPLICAS_MAX, AutoscalingConfig, check_autoscaling_config
from serve_common.config.endpoint import EndpointOptions, HttpOptions
from serve_common.config.replica import check_may_call
from serve_common.config.validation import check_between, check_size
from serve_common.errors import BadField

NUM_REPLICAS_MAX = REPLICAS_MAX


class Placement(Enum):
    """Which host a replica is placed on, of those that have room."""

    SPREAD = "spread"
    """The one with the fewest replicas: the loss of a host costs little."""
    PACK = "pack"
    """The one with the least room left: whole hosts stay free for what is large."""


class OnFailure(Enum):
    """What becomes of an update whose new version does not come up as often as is allowed."""

    KEEP = "keep"
    """It stops where it is: the old version stays what is wanted, and replicas of the new one that serve are kept."""
    GO_BACK = "go_back"
    """Replicas of the new version are replaced by the old one too."""


class ReplicaPolicyName(Enum):
    """Which of the replicas that have a free slot takes a request."""

    POWER_OF_TWO_CHOICES = "power_of_two_choices"
    """Of two taken at random the one with less in flight."""
    ROUND_ROBIN = "round_robin"
    RANDOM = "random"
    FIXED_PACKING = "fixed_packing"
    """One replica gets `packing_num` requests in a row before the next: batches fill."""


class BackpressureConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a request is refused when `max_queued_requests` wait already; names and defaults as in Ray Serve."""

    status_code: int = 503
    """503 or 429."""
    retry_after_s: float | None = None
    """Told in ``Retry-After``; None means a second."""


class OutlierEjection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When a router leaves out a replica that fails again and again."""

    consecutive_failures: int = 5
    """In a row: answers with status 500 and above, losses, and deadlines that passed without any sign of life; 0 ejects
    nobody. A deadline that passes while the replica says that it works on the request is none."""
    ejection_time_s: float = 10.0
    """The first time; each further time in a row lasts that much longer, up to ten times."""
    max_ejected_percent: float = 50.0
    """Of the backend's replicas; rounded down, so that of one replica none is ejected."""


class CircuitBreaker(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When a router stops sending to a backend for a while, and answers 503 at once.

    Failures are what says that nobody is well there: replicas that died, lost requests or gave no sign of life until a
    deadline. What the user's code answers, whatever its status, is none, and neither is user code that takes too long.
    """

    failure_percent: float = 50.0
    """Of the requests that ended within `window_s`; 0 never opens the circuit."""
    requests_min: int = 20
    """How many must have ended within `window_s` before anything is concluded."""
    window_s: float = 10.0
    open_time_s: float = 5.0
    """Then one request is let through; its success closes the circuit."""


class BackendConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many replicas run and how they are treated. No change of it replaces a replica."""

    num_replicas: int = 1
    """With an `autoscaling_config`, what it came to: it is set by the autoscaling from then on."""
    autoscaling_config: AutoscalingConfig | None = None
    """None: `num_replicas` stays as it is given."""
    max_concurrent_queries: int = 100
    """Requests that one replica works on at once; also the size of its thread pool for plain functions."""
    max_queued_requests: int = 1000
    """Requests that one router keeps waiting for this backend; beyond it 503. -1 means no limit of its own."""
    user_config: Any = None
    """Given to ``reconfigure`` of every replica at start and on change, without a restart."""
    may_call: tuple[str, ...] | None = None
    """Whom handles in its replicas may call: applications, deployments as ``application/deployment``, or ``*`` for all.
    None means its own application, and nothing means nobody; who lists others lists that one too where it is called."""
    graceful_shutdown_timeout_s: float = 20.0
    """How long a replica that is stopped may finish what is in flight before it is killed."""
    health_check_period_s: float = 10.0
    health_check_timeout_s: float = 30.0
    health_check_failure_threshold: int = 3
    """Checks in a row that must fail before the replica is replaced."""
    start_timeout_s: float = 300.0
    """How long import and constructor may take together before the replica counts as stuck."""
    max_constructor_retry_count: int = 3
    """Starts of one version that may fail before its goal fails."""
    on_failure: OnFailure = OnFailure.KEEP
    """What a failed update leaves behind."""
    max_surge_percent: float = 25.0
    """How many replicas more than `num_replicas` may run during an update; rounded up."""
    max_unavailable_percent: float = 25.0
    """How many replicas fewer may serve during an update where there is no room for more; rounded up."""
    placement: Placement = Placement.SPREAD
    max_replicas_per_host: int | None = None
    """Of this backend; None: as many as fit."""
    replica_policy: ReplicaPolicyName = ReplicaPolicyName.POWER_OF_TWO_CHOICES
    packing_num: int = 3
    """Of `ReplicaPolicyName.FIXED_PACKING`."""
    backpressure_config: BackpressureConfig = BackpressureConfig()
    outlier_ejection: OutlierEjection = OutlierEjection()
    retry_budget_percent: float = 20.0
    """How many of a router's requests to this backend may be second sendings after a loss, counted over ten seconds;
    ten in that time are always allowed."""
    circuit_breaker: CircuitBreaker = CircuitBreaker()


def check_backend_config(config: BackendConfig, field: str = "backend_config") -> BackendConfig:
    """Return ``config`` when every field is within its limits; otherwise raise `BadField` with the field's path."""
    check_between(config.num_replicas, 0, NUM_REPLICAS_MAX, f"{field}.num_replicas")
    check_between(config.max_concurrent_queries, 1, 100_000, f"{field}.max_concurrent_queries")
    check_between(config.max_queued_requests, -1, 1_000_000, f"{field}.max_queued_requests")
    check_between(config.graceful_shutdown_timeout_s, 0, 3600, f"{field}.graceful_shutdown_timeout_s")
    check_between(config.health_check_period_s, 0.1, 3600, f"{field}.health_check_period_s")
    check_between(config.health_check_timeout_s, 0.1, 3600, f"{field}.health_check_timeout_s")
    check_between(config.health_check_failure_threshold, 1, 1000, f"{field}.health_check_failure_threshold")
    check_between(config.start_timeout_s, 1, 86_400, f"{field}.start_timeout_s")
    check_between(config.max_constructor_retry_count, 1, 100, f"{field}.max_constructor_retry_count")
    check_between(config.max_surge_percent, 0, 100, f"{field}.max_surge_percent")
    check_between(config.max_unavailable_percent, 0, 100, f"{field}.max_unavailable_percent")
    if config.max_surge_percent == 0 == config.max_unavailable_percent:
        raise BadField(f"{field}.max_surge_percent", "and max_unavailable_percent must not both be 0")
    if config.max_replicas_per_host is not None:
        check_between(config.max_replicas_per_host, 1, NUM_REPLICAS_MAX, f"{field}.max_replicas_per_host")
    check_between(config.packing_num, 1, 100_000, f"{field}.packing_num")
    check_between(config.retry_budget_percent, 0, 100, f"{field}.retry_budget_percent")
    _check_protection(config, field)
    if config.autoscaling_config is not None:
        check_autoscaling_config(config.autoscaling_config, f"{field}.autoscaling_config")
    check_size(config.user_config, f"{field}.user_config")
    if config.may_call is not None:
        check_may_call(config.may_call, f"{field}.may_call")
    return config


def _check_protection(config: BackendConfig, field: str) -> None:
    if config.backpressure_config.status_code not in (429, 503):
        raise BadField(f"{field}.backpressure_config.status_code", "must be 503 or 429")
    if config.backpressure_config.retry_after_s is not None:
        check_between(
            config.backpressure_config.retry_after_s, 0, 3600, f"{field}.backpressure_config.retry_after_s"
        )
    ejection, at = config.outlier_ejection, f"{field}.outlier_ejection"
    check_between(ejection.consecutive_failures, 0, 1000, f"{at}.consecutive_failures")
    check_between(ejection.ejection_time_s, 0.1, 3600, f"{at}.ejection_time_s")
    check_between(ejection.max_ejected_percent, 0, 50, f"{at}.max_ejected_percent")
    breaker, at = config.circuit_breaker, f"{field}.circuit_breaker"
    check_between(breaker.failure_percent, 0, 100, f"{at}.failure_percent")
    check_between(breaker.requests_min, 1, 100_000, f"{at}.requests_min")
    check_between(breaker.window_s, 1, 600, f"{at}.window_s")
    check_between(breaker.open_time_s, 0.1, 3600, f"{at}.open_time_s")


Merged = TypeVar("Merged", BackendConfig, EndpointOptions, HttpOptions)


def merged(config: Merged, partial: Mapping[str, Any], field: str) -> Merged:
    """``config`` with the given fields changed, of the right types but not checked any further.

    Of a group of fields such as ``circuit_breaker`` those that are not given stay too.

    Raises `BadField` with the path of a field that is unknown or of another type.
    """
    known = type(config).__struct_fields__
    for name in partial:
        if name not in known:
            raise BadField(f"{field}.{name[:80]}", "is unknown")
    whole = {name: getattr(config, name) for name in known}
    changed = {name: _within(whole[name], value) for name, value in partial.items()}
    try:
        return msgspec.convert({**msgspec.to_builtins(whole), **changed}, type(config))
    except msgspec.ValidationError as error:
        text, _, path = str(error).partition(" - at `$.")
        raise BadField(f"{field}.{path.rstrip('`')}" if path else field, text) from error


def _within(known: Any, given: Any) -> Any:
    if isinstance(known, msgspec.Struct) and isinstance(given, Mapping):
        return {**msgspec.to_builtins(known), **given}
    return given
