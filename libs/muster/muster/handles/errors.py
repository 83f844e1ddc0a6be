"""What only callers by handle meet, and the names under which users of Ray Serve know the rest."""

from __future__ import annotations

from serve_common.dispatch.tallies import CLIENT_GONE
from serve_common.errors import NoReplicaAvailable, RequestFailed


class RequestCancelled(RequestFailed):
    """The caller gave the call up."""

    error_code = "request_cancelled"
    status_hint = CLIENT_GONE


BackPressureError = NoReplicaAvailable
RequestCancelledError = RequestCancelled
