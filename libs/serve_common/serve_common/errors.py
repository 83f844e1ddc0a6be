"""Every error that crosses a process border, with whose fault it is and what a caller should do.

Why one hierarchy: a caller needs to know two things, *did I send something wrong* and *may I try again*; the type
answers both. Drivers' own exceptions never leave their adapter: they are chained to one of these.
"""

from __future__ import annotations

from typing import ClassVar


class ServeError(Exception):
    """Something unexpected failed. The root of all errors."""

    error_code: ClassVar[str] = "internal"
    """Stable word that scripts may compare."""
    status_hint: ClassVar[int] = 500
    """The corresponding HTTP status; also the number in ``Nats-Service-Error-Code``."""
    is_of_call: bool = False
    """True when a call by handle ended with it; code that lets it propagate fails with the same status."""

    @property
    def message(self) -> str:
        """The error in words, as `str` gives it; Ray Serve's name for it."""
        return str(self)


class CommandRefused(ServeError):
    """The command is invalid, or conflicts with the current state; nothing was changed."""

    error_code = "refused"
    status_hint = 409


class BadField(CommandRefused):
    """A field has a value that cannot be accepted."""

    error_code = "bad_field"
    status_hint = 400

    def __init__(self, field: str, reason: str) -> None:
        """``field`` is the path of the field, such as ``backend_config.num_replicas``."""
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason


class NotFound(CommandRefused):
    """What the command names does not exist."""

    error_code = "not_found"
    status_hint = 404


class Conflict(CommandRefused):
    """Something else already has that name, route or version."""

    error_code = "conflict"
    status_hint = 409


class LimitReached(CommandRefused):
    """A limit of the system would be passed."""

    error_code = "limit_reached"
    status_hint = 429


class TransientError(ServeError):
    """A dependency is unavailable; the same call may succeed later."""

    error_code = "unavailable"
    status_hint = 503


class StoreUnavailable(TransientError):
    """Postgres does not answer. A state change may or may not have been made: try again."""

    error_code = "store_unavailable"


class BusUnavailable(TransientError):
    """NATS does not answer."""

    error_code = "bus_unavailable"


class NotLeading(TransientError):
    """This controller does not lead (any more); another one does or soon will."""

    error_code = "not_leading"


class PermanentError(ServeError):
    """Retrying cannot help; an operator must intervene."""

    error_code = "permanent"


class CheckpointUnreadable(PermanentError):
    """A row of the checkpoint cannot be understood by this version of the code."""

    error_code = "checkpoint_unreadable"


class FencedOut(PermanentError):
    """Another controller leads with a higher epoch: this one's writes are refused for good."""

    error_code = "fenced_out"


class BusAuthorizationFailed(PermanentError):
    """NATS refused the user and password."""

    error_code = "bus_authorization_failed"


class RequestFailed(ServeError):
    """A request to a model could not be answered by it."""

    error_code = "request_failed"
    status_hint = 502


class NoReplicaAvailable(RequestFailed):
    """No replica could take the request within its time, or the queue is full."""

    error_code = "no_replica_available"
    status_hint = 503


class ReplicaDied(RequestFailed):
    """The replica died, or lost the request, after it may have started it; it was not safe to send again."""

    error_code = "replica_died"
    status_hint = 502


class DeadlineExceeded(RequestFailed):
    """The answer did not come in time."""

    error_code = "deadline_exceeded"
    status_hint = 504


class UserCodeRaised(RequestFailed):
    """The user's code raised an exception."""

    error_code = "user_code_raised"
    status_hint = 500
