"""How a request can fail between a router and its replica, beyond what all of Muster shares (`serve_common.errors`)."""

from __future__ import annotations

from serve_common.errors import BadField, LimitReached, NotFound, RequestFailed


class MethodNotAllowed(BadField):
    """The endpoint does not take this method."""

    error_code = "method_not_allowed"
    status_hint = 405

    def __init__(self, method: str, allowed: str) -> None:
        """``allowed`` is a list as the header `Allow` has it."""
        super().__init__("method", f"{method[:20]} is not allowed here; allowed: {allowed}")
        self.allowed = allowed


class HeadTooLarge(LimitReached):
    """The headers do not fit into one frame."""

    error_code = "headers_too_large"
    status_hint = 431


class AnswerUnusable(RequestFailed):
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
