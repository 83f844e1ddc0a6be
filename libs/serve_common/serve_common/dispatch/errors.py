"""How a request can fail between a router and its replica, beyond what all of Muster shares (`serve_common.errors`)."""

from __future__ import annotations

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
from serve_common.names import BackendTag
from serve_common.protocol.snapshots import BackendProtection

_RETRY_AFTER_S = 1.0


class MethodNotAllowed(BadField):
    """The endpoint does not take this method."""

    error_code = "method_not_allowed"
    status_hint = 405

    def __init__(self, method: str, allowed: str) -> None:
        """``allowed`` is a list as the header `Allow` has it."""
        super().__init__("method", f"{method[:20]} is not allowed here; allowed: {allowed}")
        self.allowed = allowed


class HeadersTooLarge(LimitReached):
    """The headers are longer, or more, than is read, or do not fit into one frame."""

    error_code = "headers_too_large"
    status_hint = 431


class ResponseUnusable(RequestFailed):
    """The replica's answer cannot be passed on."""

    error_code = "answer_unusable"


class ReplicaError(RequestFailed):
    """The replica says that the request failed, with its own code and status."""

    def __init__(self, error_code: str, status: int, message: str, raised: bytes = b"") -> None:
        """``raised`` is what came with it: for a Python caller, the exception as the replica pickled it."""
        super().__init__(message)
        self.code = error_code
        self.status = status if 400 <= status <= 599 else 500
        self.raised = raised


class NoRoute(NotFound):
    """No endpoint has a route that matches."""

    error_code = "no_route"


class QueueIsFull(NoReplicaAvailable):
    """As many requests wait for the backend as may."""

    error_code = "queue_full"

    def __init__(self, backend_tag: BackendTag, limit: int, protection: BackendProtection) -> None:
        """``limit`` is how many wait; ``protection`` says how that is told."""
        super().__init__(f"{limit} requests wait for backend {backend_tag!r} already")
        config = protection.backpressure_config
        self.status = config.status_code
        """503 or 429."""
        self.retry_after_s = _RETRY_AFTER_S if config.retry_after_s is None else config.retry_after_s


class BackendStopped(NoReplicaAvailable):
    """A user has set the backend's number of replicas to zero."""

    error_code = "backend_stopped"

    def __init__(self, backend_tag: BackendTag) -> None:
        super().__init__(
            f"backend {backend_tag!r} was set to no replicas; nobody answers until it is given some"
        )


class LostTwice(ReplicaDied):
    """Two replicas died while they had the request, which is likely why; it is sent to no third one."""

    error_code = "lost_twice"


class CircuitOpen(NoReplicaAvailable):
    """The backend's replicas died or fell silent lately; nothing is sent there for a while."""

    error_code = "circuit_open"

    def __init__(self, backend_tag: BackendTag, retry_after_s: float) -> None:
        """``retry_after_s`` is when it is worth trying again."""
        super().__init__(f"the replicas of backend {backend_tag!r} fail; nothing is sent there for a while")
        self.status = 503
        self.retry_after_s = retry_after_s


class ReplicaTimedOut(DeadlineExceeded):
    """The replica did not answer in time, nor when it was asked whether it is still there."""


def error_type_of(error: ServeError) -> str:
    """The word for ``error`` in traces: the replica's own, where it said one."""
    return error.code if isinstance(error, ReplicaError) else error.error_code
