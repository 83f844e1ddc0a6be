"""`python -m serve_console`: the console, from its environment to a signal."""

from __future__ import annotations

import asyncio
import signal
import sys

import structlog
import uvloop

from serve_common.errors import BadField
from serve_common.runtime.settings import Environment
from serve_common.telemetry.logs import configure_logs
from serve_console.settings import ConsoleSettings, read_settings
from serve_console.wiring import Console

_log = structlog.get_logger(__name__)


async def _run(settings: ConsoleSettings) -> int:
    """Run until a signal or a failure; the exit code."""
    should_end = asyncio.Event()
    has_failed = False

    def on_failure() -> None:
        nonlocal has_failed
        has_failed = True
        should_end.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, should_end.set)
    console = Console(settings, on_failure=on_failure)
    try:
        await console.start()
        await should_end.wait()
    finally:
        await console.close()
    return 1 if has_failed else 0


def main() -> int:
    """Read the settings and run. The exit code: 0 after a signal, 2 for bad settings, else 1 with a log line."""
    configure_logs("console")
    try:
        settings = read_settings(Environment())
    except BadField as error:
        _log.critical("bad_setting", field=error.field, reason=error.reason)
        return 2
    try:
        return uvloop.run(_run(settings))
    except OSError as error:
        _log.critical("cannot_listen", reason=str(error))
    except Exception:  # noqa: BLE001 - no end may be silent
        _log.critical("console_failed", exc_info=True)
    return 1


if __name__ == "__main__":
    sys.exit(main())
