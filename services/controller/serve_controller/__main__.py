"""``python -m serve_controller``: one controller process."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import structlog
import uvloop

from serve_common.errors import ServeError
from serve_common.runtime.settings import Environment
from serve_common.telemetry.logs import configure_logs
from serve_controller.settings import read_settings
from serve_controller.wiring import run


def main() -> int:
    """Run until asked to stop. Returns the exit code: 0, or 1 after an error, which is logged."""
    logs = configure_logs("controller")
    failed = False
    try:
        settings = read_settings(Environment())
        structlog.contextvars.bind_contextvars(controller_id=settings.controller_id)
        uvloop.run(run(settings, logs))
    except* Exception as group:  # noqa: BLE001 - no end may be silent
        for error in _leaves(group):
            # The text of an expected error is enough; any other one is logged with its traceback.
            where = None if isinstance(error, ServeError) else error
            structlog.get_logger().critical(
                "controller_failed", error=str(error) or repr(error), exc_info=where
            )
        failed = True
    return 1 if failed else 0


def _leaves(group: BaseExceptionGroup[Exception]) -> Iterator[Exception]:
    """The errors themselves: task groups within task groups wrap them more than once."""
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error


if __name__ == "__main__":
    sys.exit(main())
