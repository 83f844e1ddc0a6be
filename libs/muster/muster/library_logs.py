"""Log lines of Muster within a program of its users: through `logging`, and silent unless the program listens."""

from __future__ import annotations

import logging
from typing import Final

import structlog

_LOGGERS: Final = ("muster", "serve_common")


def use_library_logs() -> None:
    """Send structured log lines to `logging`, unless the program or the process' service has configured structlog.

    A library that prints would write into what its program prints.
    """
    if structlog.is_configured():
        return
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            structlog.processors.format_exc_info,
            structlog.stdlib.render_to_log_kwargs,
        ],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
    )
    for name in _LOGGERS:
        logging.getLogger(name).addHandler(logging.NullHandler())
