"""How a request can fail between a router and its replica, beyond what all of Muster shares (`serve_common.errors`)."""

from __future__ import annotations

from typing import Any

from serve_common.config.backend import ErrorFormat
from serve_common.errors import (
    BadField,
    DeadlineExceeded,
    LimitReached,
    NoReplicaAvailable,
    NotFound,
    ReplicaDied,
    RequestFailed,
    ServeError,
)
from serve_common.names import BackendTag, DeploymentID
from serve_common.protocol.snapshots import BackendProtection


class MethodNotAllowed(BadField):
    """The endpoint does not take this method."""

    error_code = "method_not_allowed"
    status_hint = 405

    def __init__(self, method: str, allowed: str) -> None:
        """``allowed`` is a list as the header `Allow` has it."""
        super().__init__("method", f"{method[:20]} is not allowed here; allowed: {allowed}")
        self.allowed = allowed


class HeadersTooLarge(LimitReached):
    """The headers exceed the limits of size or number, or do not fit into one frame."""

    error_code = "headers_too_large"
    status_hint = 431


class ResponseUnusable(RequestFailed):
    """The replica's response cannot be forwarded."""

    error_code = "answer_unusable"


class ReplicaError(RequestFailed):
    """The replica reports that the request failed, with its own code and status."""

    def __init__(self, error_code: str, status: int, message: str, raised: bytes = b"") -> None:
        """``raised`` is the error's body: for a Python caller, the exception as the replica pickled it."""
        super().__init__(message)
        self.code = error_code
        self.status = status if 400 <= status <= 599 else 500
        self.raised = raised


class NoRoute(NotFound):
    """No endpoint has a route that matches."""

    error_code = "no_route"

    def __init__(self, path: str, error_format: ErrorFormat = ErrorFormat.PROBLEM) -> None:
        """``error_format`` is that of the routes which do not match."""
        # In Ray Serve's words, which programs look for.
        super().__init__(f"Path '{path[:200]}' not found. Ping http://.../-/routes for available routes.")
        self.error_format = error_format


class BackPressureError(NoReplicaAvailable):
    """The backend's queue is full."""

    error_code = "queue_full"

    def __init__(
        self,
        num_queued_requests: int,
        max_queued_requests: int,
        status_code: int = 503,
        retry_after_s: float | None = None,
        *,
        backend_tag: BackendTag | None = None,
    ) -> None:
        """As in Ray Serve."""
        super().__init__(num_queued_requests, max_queued_requests, status_code, retry_after_s)
        # Ray Serve's words, which programs look for.
        self._text = (
            f"Request dropped due to backpressure (num_queued_requests={num_queued_requests}, "
            f"max_queued_requests={max_queued_requests})."
        )
        self.backend_tag = backend_tag
        """Whose queue it is; None where that is not known."""
        self.status = status_code
        """503 or 429."""
        self.retry_after_s = retry_after_s
        """Seconds for the header ``Retry-After``; None where none are configured, as in Ray Serve."""

    @classmethod
    def of_backend(
        cls, backend_tag: BackendTag, limit: int, protection: BackendProtection
    ) -> BackPressureError:
        """The error of a backend whose queue has ``limit`` requests, with the response that it configures."""
        config = protection.backpressure_config
        return cls(limit, limit, config.status_code, config.retry_after_s, backend_tag=backend_tag)

    @property
    def status_code(self) -> int:
        """As ``status``; Ray Serve's name for it."""
        return self.status

    def __str__(self) -> str:
        return self._text

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (type(self), self.args, vars(self))


class DeploymentUnavailableError(NoReplicaAvailable):
    """The backend takes no requests, whatever the time that they have."""

    def __init__(self, reason: str | DeploymentID) -> None:
        """``reason`` is the message; or, as in Ray Serve, the deployment that failed."""
        is_failed = isinstance(reason, DeploymentID)
        super().__init__(f"{reason} is unavailable because it failed to deploy." if is_failed else reason)

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (type(self), (str(self),), vars(self))


class BackendStopped(DeploymentUnavailableError):
    """The backend has no replicas and starts none: it was scaled to zero by hand, or its first version failed."""

    error_code = "backend_stopped"

    def __init__(self, backend_tag: BackendTag) -> None:
        super().__init__(
            f"backend {backend_tag!r} has no replicas, and starts none until it is scaled or deployed"
        )


class LostTwice(ReplicaDied):
    """Two replicas died while they had the request, which is likely the cause; it is not sent to a third one."""

    error_code = "lost_twice"


class CircuitOpen(DeploymentUnavailableError):
    """The backend's replicas died or became unresponsive lately; nothing is sent there for a while."""

    error_code = "circuit_open"

    def __init__(self, backend_tag: BackendTag, retry_after_s: float) -> None:
        """``retry_after_s`` is the number of seconds after which a retry may succeed."""
        super().__init__(f"the replicas of backend {backend_tag!r} fail; nothing is sent there for a while")
        self.status = 503
        self.retry_after_s = retry_after_s


def _restore(kind: type[ServeError], args: tuple[Any, ...], state: dict[str, Any]) -> ServeError:
    """The error, unpickled: what its constructor takes did not travel."""
    error = kind.__new__(kind, *args)
    vars(error).update(state)
    return error


class ReplicaTimedOut(DeadlineExceeded):
    """The replica did not answer in time, nor respond to a probe."""


def get_error_type(error: ServeError) -> str:
    """The type of ``error`` in traces: the replica's own error code, where it sent one."""
    return error.code if isinstance(error, ReplicaError) else error.error_code
