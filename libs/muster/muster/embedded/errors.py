"""Why the embedded stack could not start; each message says what a person can do about it."""

from __future__ import annotations

from serve_common.errors import PermanentError


class StackFailed(PermanentError):
    """The stack on this machine cannot run."""

    error_code = "stack_failed"


class AlreadyRunning(StackFailed):
    """Another `muster up` holds the same state directory."""

    error_code = "already_running"


class PortTaken(StackFailed):
    """Something else listens on a port that was asked for."""

    error_code = "port_taken"


class StartFailed(StackFailed):
    """A process did not become ready; the message ends with the last lines of its log."""

    error_code = "start_failed"
