"""What the exit code of every command means. Scripts depend on it, so it is one table."""

from __future__ import annotations

from enum import IntEnum

from serve_common.errors import (
    BusAuthorizationFailed,
    CommandRefused,
    DeadlineExceeded,
    NotFound,
    ServeError,
    TransientError,
)


class ExitCode(IntEnum):
    """0 is success."""

    OK = 0
    FAILED = 1
    """The goal failed, or was superseded, or the operation failed."""
    BAD_INPUT = 2
    """What was asked for cannot be accepted; nothing was changed."""
    UNREACHABLE = 3
    """NATS, the controller or Postgres does not answer, or NATS refuses the user."""
    NOT_FOUND = 4
    TIMED_OUT = 5
    """The time to wait is over; what was begun goes on."""
    INTERRUPTED = 130
    """Ctrl-C while waiting; what was begun goes on."""


EXIT_CODES_HELP = (
    "Exit codes: 0 done, 1 failed, 2 bad input, 3 the stack cannot be reached, 4 not found, 5 timed out."
)


def exit_code_of(error: ServeError) -> ExitCode:
    """The exit code for an error that ends a command."""
    match error:
        case NotFound():
            return ExitCode.NOT_FOUND
        case CommandRefused():
            return ExitCode.BAD_INPUT
        case TransientError() | BusAuthorizationFailed():
            return ExitCode.UNREACHABLE
        case DeadlineExceeded():
            return ExitCode.TIMED_OUT
        case _:
            return ExitCode.FAILED
