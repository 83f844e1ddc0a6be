"""Options of a handle's calls, and errors that only calls by handle raise."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from serve_common.dispatch.admission import CLIENT_GONE
from serve_common.dispatch.errors import DeploymentUnavailableError
from serve_common.errors import BadField, LimitReached, NotFound, PermanentError, RequestFailed
from serve_common.runtime.request_context import is_program_replica


class NoSuchMethod(BadField, AttributeError):
    """The deployment has no public method of that name; an AttributeError too, as in Ray Serve."""


class RequestCancelledError(RequestFailed):
    """The caller cancelled the call."""

    error_code = "request_cancelled"
    status_hint = CLIENT_GONE

    def __init__(self, request_id: str | None = None) -> None:
        """``request_id`` is that of the call; as in Ray Serve."""
        super().__init__(*(() if request_id is None else (request_id,)))

    def __str__(self) -> str:
        return f"Request {self.args[0]} was cancelled." if self.args else "Request was cancelled."


class CallNotAllowed(PermanentError):
    """The calling replica's deployment may not call that one, by its `may_call`; nothing was sent."""

    error_code = "call_not_allowed"
    status_hint = 403


class DeploymentGone(NotFound, DeploymentUnavailableError):
    """A call's deployment or application is not deployed, or no longer; Ray Serve says that it is unavailable."""


class ArgumentsTooLarge(LimitReached):
    """The arguments of a call exceed what a replica accepts."""

    status_hint = 413
    is_of_call = True


UNLIMITED_S: Final = 7 * 86_400.0
"""Seconds that a call without any deadline may take."""


class HandleOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of one handle, as set by `DeploymentHandle.options`."""

    method_name: str = ""
    """Method to call; empty means ``__call__``."""
    model_id: str = ""
    """Multiplexed model that the call is for; replicas that have it loaded are preferred. Empty means none."""
    stream: bool = False
    """Whether the method is a generator, whose items are read one by one."""
    shard_key: str = ""
    """Calls with the same key go to the same backend and replica; empty means no key."""
    timeout_s: float | None = None
    """Seconds from the call to the start of its response; above 0. None means no limit of its own."""
    relative_slo_ms: float | None = None
    """Like `timeout_s`, in milliseconds. Of all deadlines of a call the earliest counts."""
    absolute_slo_ms: float | None = None
    """Time by which the response must start, in milliseconds since 1970; None means no limit of its own."""
    is_repeatable: bool = False
    """Whether the call may be sent to another replica after its replica died; set by ``idempotent``."""


class ReplicaSelection(msgspec.Struct, kw_only=True):
    """A replica that `DeploymentHandle.choose_replica` has chosen, for one `DeploymentHandle.dispatch`."""

    replica_id: str
    """Tag of the replica."""
    replica_metadata: dict[str, Any] = {}
    """Always empty: ``record_replica_metadata`` is not called."""
    endpoint: str
    """Endpoint of the deployment that it was chosen for."""
    options: HandleOptions
    """Options of the handle that chose it, which the call has."""
    is_dispatched: bool = False
    """Its one call was made."""


_SERIALIZATIONS: Final = ("cloudpickle", "pickle", "msgpack", "orjson")


def check_serialization(field: str, value: Any, unset: Any) -> None:
    """Raise `BadField` unless ``value`` is ``unset`` or the name of a serialization; calls are pickled in any case."""
    if value is not unset and value not in _SERIALIZATIONS:
        raise BadField(field, f"{str(value)[:40]!r} is none of {', '.join(_SERIALIZATIONS)}")


def check_options(options: HandleOptions) -> HandleOptions:
    """Return ``options`` when all are valid; otherwise raise `BadField` naming the invalid one."""
    if options.method_name and not options.method_name.isidentifier():
        raise BadField("method_name", f"{options.method_name[:100]!r} is not a method's name")
    for name in ("timeout_s", "relative_slo_ms", "absolute_slo_ms"):
        value = getattr(options, name)
        if value is not None and not value > 0:
            raise BadField(name, f"is {value}; it must be above 0")
    return options


PROGRAM_GRACE_S: Final = 1.0
"""Seconds that calls of a program's replica have beyond the deadline of the request that they are made for."""


def compute_deadline(
    options: HandleOptions, request_deadline: float | None, now: float, unix_now: float
) -> float:
    """The deadline of a call made ``now``, by the clock of ``now``: the earliest of those that apply.

    ``request_deadline`` is the deadline of the request that the caller works on, by the same clock.
    """
    left_s = UNLIMITED_S if options.timeout_s is None else options.timeout_s
    if options.relative_slo_ms is not None:
        left_s = min(left_s, options.relative_slo_ms / 1000)
    if options.absolute_slo_ms is not None:
        left_s = min(left_s, options.absolute_slo_ms / 1000 - unix_now)
    deadline = now + left_s
    if request_deadline is None:
        return deadline
    # As in Ray Serve, code of a program is cancelled at its deadline, and not told so by its calls a moment before.
    return min(deadline, request_deadline + (PROGRAM_GRACE_S if is_program_replica() else 0.0))
