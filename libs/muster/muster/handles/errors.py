"""What only callers by handle meet, and the names under which users of Ray Serve know the rest."""

from __future__ import annotations

from serve_common.dispatch.tallies import CLIENT_GONE
from serve_common.errors import LimitReached, NoReplicaAvailable, PermanentError, RequestFailed


class RequestCancelled(RequestFailed):
    """The caller gave the call up."""

    error_code = "request_cancelled"
    status_hint = CLIENT_GONE


class CallNotAllowed(PermanentError):
    """The calling replica's deployment may not call that one; nothing was sent. Its `may_call` says whom it may."""

    error_code = "call_not_allowed"
    status_hint = 403


class ArgumentsTooLarge(LimitReached):
    """What a call was to carry is more than a replica takes."""

    status_hint = 413
    is_of_call = True


BackPressureError = NoReplicaAvailable
RequestCancelledError = RequestCancelled
