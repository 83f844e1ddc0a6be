"""The tracer of this process, for code that is not joined by hand: handles, batches, what the controller's shell does.

Why a module variable: a process has one way out for its spans, as it has one for its logs. None, as it is where tracing
is off, costs one look.
"""

from __future__ import annotations

from serve_common.tracing.tracer import Tracer

_tracer: Tracer | None = None


def set_process_tracer(tracer: Tracer | None) -> None:
    """For whoever opens and closes tracing."""
    global _tracer  # noqa: PLW0603 - see the module's text
    _tracer = tracer


def process_tracer() -> Tracer | None:
    """None while nothing is traced."""
    return _tracer
