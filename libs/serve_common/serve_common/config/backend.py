"""Configuration of backends (their code, number of replicas, updates, health, balancing), of endpoints, and of HTTP."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, Final, TypeVar

import msgspec

from serve_common.config.autoscaling import REPLICAS_MAX, AutoscalingConfig, check_autoscaling_config
from serve_common.config.rollout import RolloutConfig, check_rollout_config
from serve_common.config.runtime_env import check_runtime_env
from serve_common.errors import BadField
from serve_common.names import check_name, check_route
from serve_common.values import check_between, check_digest, check_import_path, check_size

PY_MODULES_MAX: Final = 64
EVERYTHING: Final = "*"
CALLS_MAX: Final = 100


def check_may_call(may_call: Sequence[str], field: str) -> None:
    """Raise `BadField` unless each entry is an application, ``application/deployment``, or `EVERYTHING`."""
    if len(may_call) > CALLS_MAX:
        raise BadField(field, f"has {len(may_call)} entries; at most {CALLS_MAX} are allowed")
    for called in may_call:
        if called == EVERYTHING:
            continue
        parts = called.split("/")
        if len(parts) > 2:
            raise BadField(field, f"{called[:100]!r} must be an application, application/deployment, or '*'")
        for part in parts:
            check_name(part, field)


def allows(may_call: Sequence[str] | None, own_tag: str, called_tag: str) -> bool:
    """Whether a replica of deployment ``own_tag`` may call ``called_tag``; None allows only its own application.

    Why ``may_call`` is configuration: NATS enforces it, through the permissions in each replica's token, and those must
    not be the choice of the replica's own code. Handles check too, before they send, so that a call that NATS would
    drop fails with a reason.
    """
    app = called_tag.partition("/")[0]
    if may_call is None:
        return app == own_tag.partition("/")[0]
    return any(called in (EVERYTHING, app, called_tag) for called in may_call)


class RayActorOptions(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """Resources and environment of one replica's Ray actor; names and defaults as in Ray Serve."""

    num_cpus: float = 1.0
    """CPUs to reserve, for each replica; fractions are allowed."""
    num_gpus: float = 0.0
    """GPUs to reserve, for each replica; fractions are allowed."""
    memory: float = 0.0
    """Bytes to reserve; 0 reserves none."""
    resources: dict[str, float] = {}
    """Amounts of custom resources by name."""
    runtime_env: dict[str, Any] = {}
    """Ray's runtime environment: ``env_vars``, and packages by ``pip`` or ``uv``, with ``config``."""


class ReplicaConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Code of a replica. Changing it makes a new code version: replicas are replaced."""

    import_path: str
    """``module:attribute`` of a class or function, imported in the replica's process."""
    code: str = ""
    """SHA-256 of uploaded code (`UploadCode`), with its arguments, that runs instead of what ``import_path`` names;
    empty: ``import_path`` is imported. Other code is another version."""
    app_dir: str = ""
    """Directory that comes first on ``sys.path``, as the replica hosts see it; empty for none."""
    working_dir: str = ""
    """SHA-256 of an uploaded archive, which is the replica's current directory, read-only, and before ``app_dir`` on
    ``sys.path``; empty for none."""
    py_modules: tuple[str, ...] = ()
    """SHA-256s of uploaded archives with modules, which come before ``working_dir`` on ``sys.path``, in this order."""
    init_args: list[Any] = []
    """Positional arguments of the constructor; JSON of at most 64 KiB."""
    init_kwargs: dict[str, Any] = {}
    """Keyword arguments of the constructor; JSON of at most 64 KiB."""
    ray_actor_options: RayActorOptions = RayActorOptions()
    """Resources and environment of each replica."""

    @property
    def archives(self) -> tuple[str, ...]:
        """Digests of the archives, in the order of ``sys.path``."""
        return (*self.py_modules, self.working_dir) if self.working_dir else self.py_modules

    @property
    def uploads(self) -> dict[str, str]:
        """Digests of all that was uploaded for it, by the field that names them."""
        named = {"code": self.code, "working_dir": self.working_dir}
        named |= {f"py_modules[{at}]": digest for at, digest in enumerate(self.py_modules)}
        return {field: digest for field, digest in named.items() if digest}


def check_replica_config(config: ReplicaConfig, field: str = "replica_config") -> ReplicaConfig:
    """Return ``config`` when every field is acceptable; otherwise raise `BadField` with the field's path."""
    check_import_path(config.import_path, f"{field}.import_path")
    for name, digest in config.uploads.items():
        check_digest(digest, f"{field}.{name}")
    if len(config.py_modules) > PY_MODULES_MAX:
        raise BadField(
            f"{field}.py_modules",
            f"has {len(config.py_modules)} entries; at most {PY_MODULES_MAX} are allowed",
        )
    if config.code and (config.init_args or config.init_kwargs):
        raise BadField(f"{field}.init_args", "must be empty: uploaded code has its arguments with it")
    if len(config.app_dir) > 4096 or "\0" in config.app_dir:
        raise BadField(f"{field}.app_dir", "must be a path of at most 4096 characters without NUL")
    options, at = config.ray_actor_options, f"{field}.ray_actor_options"
    check_between(options.num_cpus, 0, 10_000, f"{at}.num_cpus")
    check_between(options.num_gpus, 0, 10_000, f"{at}.num_gpus")
    check_between(options.memory, 0, 2**50, f"{at}.memory")
    if len(options.resources) > 32:
        raise BadField(f"{at}.resources", f"has {len(options.resources)} entries; at most 32 are allowed")
    for name, amount in options.resources.items():
        if not 0 < len(name) <= 63 or name in {"CPU", "GPU", "memory"}:
            raise BadField(f"{at}.resources", f"{name[:80]!r} is not a name for a custom resource")
        check_between(amount, 0, 10**9, f"{at}.resources.{name}")
    check_runtime_env(options.runtime_env, f"{at}.runtime_env")
    check_size(config.init_args, f"{field}.init_args")
    check_size(config.init_kwargs, f"{field}.init_kwargs")
    return config


class Placement(Enum):
    """How the host of a replica is chosen among those with enough capacity."""

    SPREAD = "spread"
    """The host with the fewest replicas: the loss of a host costs little."""
    PACK = "pack"
    """The host with the least capacity left: whole hosts stay free for large replicas."""


class OnFailure(Enum):
    """What happens to an update whose new version fails to start too often."""

    KEEP = "keep"
    """The update stops: the old version stays the target, and replicas of the new one that serve are retained."""
    GO_BACK = "go_back"
    """The update stops, and replicas of the new version are replaced by the old one."""


class ReplicaPolicyName(Enum):
    """How a router chooses among replicas with a free slot."""

    POWER_OF_TWO_CHOICES = "power_of_two_choices"
    """The one with fewer requests in flight of two random replicas."""
    ROUND_ROBIN = "round_robin"
    RANDOM = "random"
    FIXED_PACKING = "fixed_packing"
    """One replica gets `packing_num` consecutive requests before the next: batches fill."""


class BackpressureConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Response to a request when `max_queued_requests` already wait; names and defaults as in Ray Serve."""

    status_code: int = 503
    """HTTP status, 503 or 429."""
    retry_after_s: float | None = None
    """Seconds in the header ``Retry-After``; None means 1."""


class OutlierEjection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When a router ejects a replica that keeps failing."""

    consecutive_failures: int = 5
    """Failures in a row that eject a replica: responses with status 500 and above, losses, and deadlines that passed
    without any sign of life; 0 disables ejection. A deadline that passes while the replica confirms that it works on
    the request is not a failure."""
    ejection_time_s: float = 10.0
    """Seconds of the first ejection; each consecutive one lasts that much longer, up to ten times as long."""
    max_ejected_percent: float = 50.0
    """Largest share of the backend's replicas ejected at once; rounded down, so a single replica is never ejected."""


class CircuitBreaker(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When a router stops sending to a backend for a while, and responds with 503 at once.

    Failures are signs of unhealthy replicas: ones that died, lost requests or gave no sign of life until a deadline.
    Responses of the user's code, whatever their status, and user code that takes too long are not failures.
    """

    failure_percent: float = 50.0
    """Share of failures among requests that ended within `window_s` that opens the circuit; 0 disables it."""
    requests_min: int = 20
    """Requests that must have ended within `window_s` before the circuit can open."""
    window_s: float = 10.0
    """Seconds over which requests are counted."""
    open_time_s: float = 5.0
    """Seconds that the circuit stays open. Then one trial request is sent; its success closes the circuit."""


class LogEncoding(Enum):
    """How `muster logs` prints the lines of a replica."""

    TEXT = "TEXT"
    """As text for people."""
    JSON = "JSON"
    """As JSON objects, with the fields of Ray Serve's: ``asctime``, ``levelname``, ``filename``, ``lineno``,
    ``process``."""


LOG_ATTRIBUTES: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
"""Attributes of ``logging.LogRecord``, of any version of Python."""
LOG_LEVELS: Final = ("CRITICAL", "FATAL", "ERROR", "WARNING", "WARN", "INFO", "DEBUG", "NOTSET")


class LoggingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Log lines of replicas; names and defaults as in Ray Serve. Changing it restarts no replica."""

    encoding: LogEncoding = LogEncoding.TEXT
    """How `muster logs` prints them. On their way all lines are JSON."""
    log_level: str = "INFO"
    """Lowest level of the loggers ``ray.serve`` and ``muster`` and those below them: ``DEBUG``, ``INFO``, ``WARNING``,
    ``ERROR`` or ``CRITICAL``. Other loggers and prints are not affected."""
    enable_access_log: bool = True
    """Whether a replica logs a line for each request at INFO, by the logger ``ray.serve``. A deployment without a
    `LoggingConfig` logs none."""
    additional_log_standard_attrs: tuple[str, ...] = ()
    """Attributes of ``logging.LogRecord``, such as ``funcName``, that the lines of log calls have as fields too."""
    logs_dir: str = ""
    """Directory on the hosts, by an absolute path, where each replica also writes what the loggers ``ray.serve`` and
    ``muster`` log to a file of its own, ``replica_<application>_<deployment>_<number>.log``, in Ray Serve's form, at
    most 100 MiB and five former files of it. Empty for none."""


class BackendConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Number and treatment of replicas. Changing it never replaces a replica."""

    num_replicas: int = 1
    """Number of replicas. With an `autoscaling_config`, the autoscaler sets it."""
    autoscaling_config: AutoscalingConfig | None = None
    """How `num_replicas` follows the load; None leaves it fixed."""
    max_concurrent_queries: int = 100
    """Requests that one replica works on at once; also the size of its thread pool for plain functions."""
    max_queued_requests: int = 1000
    """Requests that may wait in one router for this backend; further ones are refused. -1 means no limit of its own."""
    user_config: Any = None
    """Value passed to ``reconfigure`` of every replica at start and on change, without a restart."""
    logging_config: LoggingConfig | None = None
    """Log lines of its replicas; None leaves the levels of loggers alone and logs no requests."""
    may_call: tuple[str, ...] | None = None
    """What handles in its replicas may call: applications, deployments as ``application/deployment``, or ``*`` for all.
    None means its own application, an empty tuple nothing. A list must include its own application if it is called."""
    graceful_shutdown_timeout_s: float = 20.0
    """Seconds for a stopped replica to finish requests in flight before it is killed."""
    health_check_period_s: float = 10.0
    """Seconds between health checks."""
    health_check_timeout_s: float = 30.0
    """Seconds before a check counts as failed."""
    health_check_failure_threshold: int = 3
    """Consecutive failed checks before the replica is replaced."""
    start_timeout_s: float = 300.0
    """Seconds for import and constructor together before the replica counts as stuck. Where ``runtime_env`` installs
    packages, its own limit is added (``config.setup_timeout_seconds``, 600 unless set)."""
    max_constructor_retry_count: int = 3
    """Failed starts of one version before its goal fails."""
    on_failure: OnFailure = OnFailure.KEEP
    """What happens to replicas of the new version when an update fails."""
    max_surge_percent: float = 25.0
    """Extra replicas allowed during an update, in % of `num_replicas`; rounded up."""
    max_unavailable_percent: float = 25.0
    """Replicas that may be missing during an update when capacity is short, in % of `num_replicas`; rounded up."""
    rollout: RolloutConfig | None = None
    """How another version of a deployment takes over its traffic; None: it replaces the old one as soon as it runs.
    What replicas are reconfigured with, such as `user_config`, is rolled out too, and applied in place at the end."""
    placement: Placement = Placement.SPREAD
    """How hosts are chosen for replicas."""
    max_replicas_per_host: int | None = None
    """Most replicas of this backend on one host; None: as many as fit."""
    replica_policy: ReplicaPolicyName = ReplicaPolicyName.POWER_OF_TWO_CHOICES
    """How a router chooses among replicas with a free slot."""
    packing_num: int = 3
    """Consecutive requests to one replica, with `ReplicaPolicyName.FIXED_PACKING`."""
    backpressure_config: BackpressureConfig = BackpressureConfig()
    """Response to a request when the queue is full."""
    outlier_ejection: OutlierEjection = OutlierEjection()
    """When a router ejects a replica that keeps failing."""
    retry_budget_percent: float = 20.0
    """Share of a router's requests to this backend that may be retries after a loss, in % over ten seconds; ten
    retries in that time are always allowed."""
    circuit_breaker: CircuitBreaker = CircuitBreaker()
    """When a router stops sending to the backend for a while."""


def check_backend_config(config: BackendConfig, field: str = "backend_config") -> BackendConfig:
    """Return ``config`` when every field is within its limits; otherwise raise `BadField` with the field's path."""
    check_between(config.num_replicas, 0, REPLICAS_MAX, f"{field}.num_replicas")
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
        check_between(config.max_replicas_per_host, 1, REPLICAS_MAX, f"{field}.max_replicas_per_host")
    check_between(config.packing_num, 1, 100_000, f"{field}.packing_num")
    check_between(config.retry_budget_percent, 0, 100, f"{field}.retry_budget_percent")
    _check_protection(config, field)
    if config.autoscaling_config is not None:
        check_autoscaling_config(config.autoscaling_config, f"{field}.autoscaling_config")
    check_size(config.user_config, f"{field}.user_config")
    if config.may_call is not None:
        check_may_call(config.may_call, f"{field}.may_call")
    if config.logging_config is not None:
        _check_logging(config.logging_config, f"{field}.logging_config")
    if config.rollout is not None:
        check_rollout_config(config.rollout, f"{field}.rollout")
    return config


def _check_logging(config: LoggingConfig, field: str) -> None:
    if config.log_level not in LOG_LEVELS:
        raise BadField(f"{field}.log_level", f"must be one of {', '.join(LOG_LEVELS)}")
    for name in config.additional_log_standard_attrs:
        if name not in LOG_ATTRIBUTES:
            raise BadField(
                f"{field}.additional_log_standard_attrs",
                f"{name[:80]!r} is no attribute of logging.LogRecord",
            )
    if config.logs_dir and not (
        config.logs_dir.startswith("/") and len(config.logs_dir) <= 4096 and "\0" not in config.logs_dir
    ):
        raise BadField(f"{field}.logs_dir", "must be an absolute path")


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


METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")


class ErrorFormat(Enum):
    """Form of the error responses that proxies write for an endpoint.

    A path without a route gets the form that all routes have, and problem details where they differ or there are none.
    """

    PROBLEM = "problem"
    """Problem details: JSON as of RFC 9457, with a stable code and what failed."""
    TEXT = "text"
    """Plain text as Ray Serve sends it: 500 without the exception, 408 for 504, and ``Retry-After`` only where
    `BackpressureConfig` has it."""


class EndpointOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How an endpoint routes its requests and sets their deadlines.

    Why not options of a backend: several backends may serve one endpoint, and one backend several endpoints.
    """

    shard_key_header: str = "X-Serve-Shard-Key"
    """Request header whose value pins requests to one backend and replica; empty disables it."""
    backend_header: str = ""
    """Request header whose value selects one of the endpoint's backends, also one of weight 0; a value that names none
    is refused with 400. Empty disables it."""
    relative_slo_ms: float | None = None
    """Milliseconds from arrival to the deadline of requests that set none; None means the request timeout."""
    error_format: ErrorFormat = ErrorFormat.PROBLEM
    """Form of the error responses that proxies write: problem details, or Ray Serve's text and statuses."""


_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,128}")


def check_endpoint_options(options: EndpointOptions, field: str = "options") -> EndpointOptions:
    """Return ``options`` when every field is acceptable; otherwise raise `BadField` with the field's path."""
    for name in ("shard_key_header", "backend_header"):
        value: str = getattr(options, name)
        if value and not _HEADER_NAME.fullmatch(value):
            raise BadField(f"{field}.{name}", f"{value[:80]!r} cannot be the name of a header")
    if options.relative_slo_ms is not None:
        check_between(options.relative_slo_ms, 1, 86_400_000, f"{field}.relative_slo_ms")
    return options


MIDDLEWARES_MAX = 32


BODY_BYTES_MAX = 64 * 1024 * 1024 * 1024
"""Upper limit of `HttpOptions.body_bytes_max`."""


class HttpOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """HTTP options that proxies apply to every request.

    Why not settings of the proxies: these are changed while the proxies run, and on all of them at once.
    """

    request_timeout_s: float = 60.0
    """Seconds from a request's arrival to the start of its response."""
    body_bytes_max: int = 10 * 1024 * 1024
    """Largest accepted request body, in bytes."""
    header_timeout_s: float = 10.0
    """Seconds for a client to send the head of a request, from its first byte."""
    body_rate_min: int = 500
    """Bytes per second, averaged over ten seconds, that a client must send of a body or receive of a response; 0
    disables it."""
    keep_alive_timeout_s: float = 90.0
    """Seconds that a connection may be idle between two requests."""
    middlewares: list[str] = []
    """Middlewares as ``module:attribute``, imported by the proxies; at most `MIDDLEWARES_MAX`, the first is
    the outermost."""
    access_log: bool = False
    """Whether each HTTP request is logged in one line when it has ended."""
    root_path: str = ""
    """Path that a load balancer in front removes from URLs. Applications get it before their route, as ASGI's
    ``root_path``, and before the path; requests come without it."""


def check_http_options(options: HttpOptions, field: str = "options") -> HttpOptions:
    """Return ``options`` when every field is within its limits; otherwise raise `BadField` with the field's path."""
    check_between(options.request_timeout_s, 0.1, 86_400, f"{field}.request_timeout_s")
    check_between(options.body_bytes_max, 1, BODY_BYTES_MAX, f"{field}.body_bytes_max")
    check_between(options.header_timeout_s, 0.1, 3600, f"{field}.header_timeout_s")
    check_between(options.body_rate_min, 0, 10**9, f"{field}.body_rate_min")
    check_between(options.keep_alive_timeout_s, 0.1, 3600, f"{field}.keep_alive_timeout_s")
    if len(options.middlewares) > MIDDLEWARES_MAX:
        raise BadField(f"{field}.middlewares", f"has more than {MIDDLEWARES_MAX} entries")
    for index, path in enumerate(options.middlewares):
        check_import_path(path, f"{field}.middlewares[{index}]")
    if options.root_path and check_route(options.root_path, f"{field}.root_path") != options.root_path:
        raise BadField(f"{field}.root_path", "must not end with '/'")
    return options


Merged = TypeVar("Merged", ReplicaConfig, BackendConfig, EndpointOptions, HttpOptions, RolloutConfig)


def merged(config: Merged, partial: Mapping[str, Any], field: str) -> Merged:
    """Return ``config`` with the fields of ``partial`` replaced; types are checked, values are not.

    Groups of fields such as ``circuit_breaker`` are merged too: their fields that are not given stay. Why by names: a
    command, a file and a command line each give only the fields to change.

    Raises `BadField` with the path of a field that is unknown or of a wrong type.
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


def _within(known: Any, overrides: Any) -> Any:
    if isinstance(known, msgspec.Struct) and isinstance(overrides, Mapping):
        return {**msgspec.to_builtins(known), **overrides}
    return overrides
